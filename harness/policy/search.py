"""Find the placement whose largest pressure is lowest: among all placements if they are few, else by local search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import fsum
from typing import NamedTuple

from harness.policy.types import Gpus

TRIED = 8_000  # places that the exact search tries before it gives way to local search


class Part(NamedTuple):
    """A model in a placement, with its demands on each of its `tp` GPUs."""

    tp: int
    need: float  # memory that it must find; all parts on a GPU together need at most its room
    w: float  # of that, what it holds while idle
    d: float  # its demand on the memory that idle parts leave


Score = tuple[float, ...]  # need beyond room in all, then the pressures of the GPUs, highest first


@dataclass(slots=True)
class Board:
    """A placement of parts on GPUs, with the sums of their demands on each GPU."""

    parts: Mapping[str, Part]
    room: Sequence[float]
    nodes: Sequence[int]
    at: dict[str, Gpus] = field(default_factory=dict)
    here: list[set[str]] = field(init=False)  # by GPU
    need: list[float] = field(init=False)  # sums by GPU, of its present parts alone, so that searches end
    w: list[float] = field(init=False)
    d: list[float] = field(init=False)
    places: Mapping[int, list[Gpus]] = field(init=False)  # by degree, each within a node

    def __post_init__(self) -> None:
        self.here = [set() for _ in self.room]
        self.need, self.w, self.d = ([0.0] * len(self.room) for _ in range(3))
        nodes = [[g for g, at in enumerate(self.nodes) if at == node] for node in sorted(set(self.nodes))]
        degrees = {part.tp for part in self.parts.values()}
        self.places = {tp: [place for node in nodes for place in combinations(node, tp)] for tp in degrees}

    def put(self, name: str, place: Gpus) -> None:
        """Place a part on GPUs."""
        self.at[name] = place
        for g in place:
            self.here[g].add(name)
            self.sum(g)

    def take(self, name: str) -> None:
        """Remove a part from its GPUs."""
        for g in self.at.pop(name):
            self.here[g].remove(name)
            self.sum(g)

    def sum(self, g: int) -> None:
        """Compute the sums of need, weights and demand over the parts on a GPU."""
        parts = [self.parts[name] for name in self.here[g]]
        self.need[g], self.w[g], self.d[g] = (fsum(part[k] for part in parts) for k in (1, 2, 3))

    def move(self, homes: Mapping[str, Gpus]) -> dict[str, Gpus]:
        """Move some parts to new places, and return their former places."""
        before = {name: self.at[name] for name in homes}
        for name in before:
            self.take(name)
        for name, place in homes.items():
            self.put(name, place)
        return before

    def pressure(self, g: int) -> float:
        """Return a GPU's demand divided by the memory that its idle parts leave free."""
        return self.d[g] / max(self.room[g] - self.w[g], 1e-9)

    def over(self, g: int) -> float:
        """Return by how much a GPU's need exceeds its room; an excess by rounding counts as 0."""
        more = self.need[g] - self.room[g]
        return more if more > 1e-9 * self.room[g] else 0.0

    def score(self) -> Score:
        """Return what a search minimizes: the total need beyond the room, then the pressures from the highest down."""
        gpus = range(len(self.room))
        return (sum(map(self.over, gpus)), *sorted(map(self.pressure, gpus), reverse=True))


def search(
    parts: Mapping[str, Part], room: Sequence[float], nodes: Sequence[int], known: Mapping[str, Gpus] | None = None
) -> dict[str, Gpus] | None:
    """Place each part within one node, so that no GPU lacks room and the largest pressure is as low as possible.

    A GPU's pressure is d / (room - w), with d and w summed over its parts. Return None if no placement exists, or if
    local search did not find one. If a placement `known` of all parts has room on every GPU, the result is no worse.
    The search is deterministic.
    """
    if any(part.tp > max(map(nodes.count, nodes), default=0) for part in parts.values()):
        return None
    order = sorted(parts, key=lambda name: (-parts[name].tp, -parts[name].need, -parts[name].d))
    board = Board(parts, room, nodes)
    exact, whole = _exact(board, order)
    if whole:
        return exact
    for name in order:  # each where most room is left
        board.put(
            name, min(board.places[parts[name].tp], key=lambda place: max(board.need[g] / room[g] for g in place))
        )
    starts = [dict(board.at), *(at for at in (exact, known) if at is not None and at.keys() == parts.keys())]
    scored = []
    for start in starts:
        board.move(start)
        scored.append((board.score(), dict(board.at)))
    board.move(min(scored, key=lambda candidate: candidate[0])[1])
    _improve(board)
    return None if board.score()[0] > 0 else {name: board.at[name] for name in parts}


def _exact(board: Board, order: Sequence[str]) -> tuple[dict[str, Gpus] | None, bool]:
    """Return the best placement by branch and bound, and whether the search needed at most `TRIED` places."""
    best: dict[str, Gpus] | None = None
    least, tried = float("inf"), 0

    def kind(place: Gpus) -> tuple[object, ...]:  # GPUs of one kind are interchangeable so far
        return tuple(sorted((board.nodes[g], board.room[g], board.need[g], board.w[g], board.d[g]) for g in place))

    def descend(k: int, worst: float) -> bool:
        nonlocal best, least, tried
        if k == len(order):
            best, least = dict(board.at), worst
            return True
        options, places = [], board.places[board.parts[order[k]].tp]
        first = {kind(place): place for place in reversed(places)}  # the first of a kind stands for all
        tried += len(first)
        if tried > TRIED:
            return False
        for place in first.values():
            board.put(order[k], place)
            if not any(map(board.over, place)):
                options.append((max(worst, *map(board.pressure, place)), place))
            board.take(order[k])
        for pressure, place in sorted(options):
            if best is not None and pressure >= least:
                break
            board.put(order[k], place)
            whole = descend(k + 1, pressure)
            board.take(order[k])
            if not whole:
                return False
        return True

    whole = descend(0, 0.0)
    return best, whole


def _improve(board: Board) -> None:
    """Move a part away from the worst GPU, or swap it with another part, for as long as the score improves."""
    while True:
        gpus, now = range(len(board.room)), board.score()
        worst = max(gpus, key=lambda g: (board.over(g), board.pressure(g)))
        best, change = now, dict[str, Gpus]()
        for name in [name for name, at in board.at.items() if worst in at]:
            tp, mine = board.parts[name].tp, board.at[name]
            changes = [{name: place} for place in board.places[tp] if place != mine]
            changes += [
                {name: at, x: mine} for x, at in board.at.items() if board.parts[x].tp == tp and worst not in at
            ]
            for homes in changes:
                before = board.move(homes)
                if (score := board.score()) < best:
                    best, change = score, homes
                board.move(before)
        if not change:
            return
        board.move(change)
