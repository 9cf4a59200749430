"""Clusters with several GPU kinds, as text: a mix `h100*2+l40s*4` has two GPUs of one kind and four of another.

A cluster consists of a whole number of copies of its mix. All GPUs of a kind are adjacent, and the kinds are in the
order of the text. Each kind begins a new node. A tensor-parallel group lies within a node, so all its GPUs have the
same kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import count

from harness.policy.types import UserError

PART = re.compile(r"([^*+\s]+)(?:\*([0-9]{1,4}))?")


def mixed(gpu: str) -> bool:
    """Tell whether a text describes a mix; if not, it names a single kind."""
    return "*" in gpu or "+" in gpu


@cache
def parts(gpu: str) -> tuple[tuple[str, int], ...]:
    """Return the GPU kinds of a mix, each with its number of GPUs in one copy of the mix; 1 for a single kind.

    Raises UserError for text of another form, a count of 0, and a single kind with a count.
    """
    if not mixed(gpu):
        return ((gpu, 1),)
    numbers: dict[str, int] = {}
    for text in gpu.split("+"):
        match = PART.fullmatch(text.strip())
        if match is None:
            raise UserError(f'gpu "{gpu}": "{text}" is not KIND*COUNT, as in h100*2+l40s*4')
        n = int(match[2] or 1)
        if n == 0:
            raise UserError(f'gpu "{gpu}": no GPU in "{text.strip()}"')
        numbers[match[1]] = numbers.get(match[1], 0) + n
    if len(numbers) == 1:
        ((kind, n),) = numbers.items()
        raise UserError(f'gpu "{gpu}" has one kind: give {kind} as the kind, and {n} as the number of GPUs')
    return tuple(numbers.items())


def names(gpu: str) -> list[str]:
    """Return the kinds of a mix, or the single kind that the text names."""
    return [kind for kind, _ in parts(gpu)]


def size(gpu: str) -> int:
    """Return the number of GPUs in one copy of a mix; 1 for a single kind."""
    return sum(n for _, n in parts(gpu))


def canonical(gpu: str, name: Callable[[str], str]) -> str:
    """Return a mix as text with one entry for each kind, in which `name` gives the kind's name."""
    if not mixed(gpu):
        return name(gpu)
    renamed = "+".join(f"{name(kind)}*{n}" for kind, n in parts(gpu))
    return "+".join(f"{kind}*{n}" for kind, n in parts(renamed))


def copies(gpu: str, gpus: int) -> list[tuple[str, int]]:
    """Return the kinds of a cluster of `gpus` GPUs, each with its number of GPUs.

    Raises UserError if the cluster is not a whole number of copies of the mix.
    """
    times, rest = divmod(gpus, size(gpu))
    if rest or not times:
        n = size(gpu)
        raise UserError(f"gpus is {gpus}: {gpu} is {n} GPUs, so a cluster of it has {n}, {2 * n}, {3 * n} ...")
    return [(kind, n * times) for kind, n in parts(gpu)]


@cache
def kinds(gpu: str, gpus: int) -> tuple[str, ...]:
    """Return the kind of each GPU of a cluster, in order. Raises UserError in the same cases as `copies`."""
    return tuple(kind for kind, n in copies(gpu, gpus) for _ in range(n))


@cache
def nodes(gpu: str, gpus: int, node_gpus: int) -> tuple[int, ...]:
    """Return the node number of each GPU of a cluster; a node has at most `node_gpus` GPUs, all of one kind."""
    out: list[int] = []
    for _, n in copies(gpu, gpus):
        first = out[-1] + 1 if out else 0
        out += [first + k // node_gpus for k in range(n)]
    return tuple(out)


def counts(gpu: str, needed: int) -> Iterator[int]:
    """Yield the possible sizes of a cluster in GPUs, in rising order; none is below `needed`.

    For a single kind of GPU, yield only `needed` itself.
    """
    n = size(gpu)
    yield from (n * k for k in count(-(-needed // n))) if n > 1 else (needed,)


def told(gpu: str, gpus: int) -> str:
    """Return a cluster in words, such as `8 x h100` or `2 x h100 + 4 x l40s`."""
    return " + ".join(f"{n} x {kind}" for kind, n in copies(gpu, gpus))


def all_told(gpus: Iterable[float], kinds: Iterable[str], conjunction: str = ", ") -> str:
    """Return several clusters in words; for a single cluster, return what `told` returns.

    Several clusters are described by their least and greatest number of GPUs, and by their kinds.
    """
    counts, names = sorted({*map(int, gpus)}), [*dict.fromkeys(kinds)]
    if len(counts) == len(names) == 1:
        return told(names[0], counts[0])
    span = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return f"{span} x {conjunction.join(names)}"
