"""GPUs that models take turns on: what one answer of a policy says to pass from one model to the next.

The stages of a switch are those of Xiang et al., "Aegaeon", SOSP 2025, section 5: KV out, weights out, weights in, KV
in, run; and the next model's weights ahead of their time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from harness.policy.actions import Action, Evict, Load, Move, Run
from harness.policy.types import Batch, Gpus, Host, Inst
from harness.policy.view import View


@dataclass(slots=True, eq=False)
class Slot:
    """GPUs, the models that are to be on them, and whose KV is. With `sync` the stages overlap, else each waits."""

    gpus: Gpus
    host: Host  # where KV goes
    way: str  # rung by which weights come
    sync: bool
    want: tuple[str, ...] = ()  # the model that runs, and the next
    home: dict[Batch, None] = field(default_factory=dict)  # whose KV is on the GPUs
    stages: deque[list[Action]] = field(default_factory=deque)  # of a switch under way, without `sync`
    waits: list[Action] = field(default_factory=list)  # what the next stage waits for

    def switch(
        self, turn: Run, view: View, *, stay: Container[Batch] = (), ahead: Inst | None = None
    ) -> Iterator[Action]:
        """KV goes, but of those who `stay`; models that are not wanted leave; weights and KV of a decode batch come.

        `ahead`: weights that are fetched meanwhile; only with `sync`.
        """
        batch, inst = turn.batch, turn.batch.inst
        self.want = (inst.model, ahead.model) if ahead else (inst.model,)
        insts = view.insts(self.gpus[0])
        here = {x.model for x in insts if view.weights(x) == "in"}  # a Load keeps what is on its way in, or out
        out = self.out(stay)
        into = turn.phase == "decode" and batch not in self.home
        if into:
            self.home[batch] = None
        stages: tuple[list[Action], ...] = (
            out,
            [*self.clear(insts), *(() if inst.model in here else (Load(inst, self.way),))],
            [Move(batch, inst.place)] if into else [],
            [turn],
        )
        if not self.sync:
            self.stages = deque(stages)
            yield from self.advance()
            return
        yield from chain(*stages)
        if ahead and ahead.model not in here:
            yield Load(ahead, self.way)

    def out(self, stay: Container[Batch] = ()) -> list[Action]:
        """KV goes to the host."""
        gone = [batch for batch in self.home if batch not in stay]
        for batch in gone:
            del self.home[batch]
        return [Move(batch, self.host) for batch in gone]

    def take(self, rid: int, batch: Batch, view: View) -> Iterator[Action]:
        """A request's KV joins that of its batch: in host memory, or by that way on the GPUs."""
        now = view.request(rid).home
        path = (self.host, batch.inst.place) if batch in self.home else (self.host,)
        if now != path[-1]:
            yield from (Move(rid, place) for place in path if place != now)

    def clear(self, insts: Iterable[Inst]) -> list[Action]:
        """Of the models that are here those go that are not wanted."""
        return [Evict(inst, drain=False) for inst in insts if inst.model not in self.want]

    def advance(self) -> Iterator[Action]:
        """The next stages, up to one that has to be waited for."""
        while self.stages and not self.waits:
            stage = self.stages.popleft()
            self.waits = [a for a in stage if isinstance(a, Move | Load)]
            yield from stage

    def done(self, action: Action, failed: str | None, view: View) -> Iterator[Action]:
        """An action of any slot is over: what waits for it here goes on. KV that could not be moved is where it was."""
        if failed is not None and isinstance(action, Move):
            who, to = action.who, action.to
            batch = who if isinstance(who, Batch) else view.request(who).batch
            if batch in self.home and to == batch.inst.place:  # some of it did not come: it goes back
                yield from self.out([b for b in self.home if b != batch])
            elif isinstance(who, Batch) and who.inst.place[0] in self.gpus and to == self.host:  # type: ignore[index]
                self.home[who] = None  # some of it did not go
        if action in self.waits:
            self.waits.remove(action)
            yield from self.advance()
