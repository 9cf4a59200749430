"""The view of an engine of servers that policies read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.engines.servers.fleet import Up
from harness.engines.wallclock import WallView
from harness.policy.actions import Run
from harness.policy.types import Batch, Host, Inst, Phase
from harness.policy.view import KvState, Weights

if TYPE_CHECKING:
    from harness.engines.servers.requests import Requests


class Seen(WallView):
    """The view of servers that policies read; it counts KV only by the tokens that the client has seen."""

    engine: Requests

    def weights(self, inst: Inst) -> Weights:
        """Return the state of an instance's weights; see View. If its place is a host, the state is always "in"."""
        up = self.engine.fleet.up.get(inst)
        return "in" if isinstance(inst.place, Host) else up.weights if up is not None else "out"

    def insts(self, home: int | Host) -> tuple[Inst, ...]:
        """Return the instances that have a server on a GPU; for a host, the instances of all models there; see View."""
        if isinstance(home, Host):
            return tuple(Inst(m, home) for m in self.engine.cluster.models)
        return tuple(inst for inst in self.engine.fleet.up if isinstance(inst.place, tuple) and home in inst.place)

    def free_bytes(self, home: int | Host) -> int:
        """Return the free bytes of a GPU, or 0 for a host, because no KV moves to hosts; see View."""
        if isinstance(home, Host):
            return 0
        free = self.engine.fleet.free_bytes(home)
        elastic = self.insts(home) if self.engine.kind.elastic else ()
        return free - sum(self._known(self.engine.fleet.up[inst]) for inst in elastic)

    def kv(self, model: str, gpu: int) -> KvState:
        """Return the KV memory of a model on a GPU: bytes in use, limit, and bytes left; see View.

        The bytes in use are those of the tokens that the client has seen.
        """
        servers = [self.engine.fleet.up[inst] for inst in self.insts(gpu) if inst.model == model]
        have, used = sum(up.kv_bytes for up in servers), sum(map(self._known, servers))
        left = have - used
        if self.engine.kind.elastic:
            left = max(0, min(left, self.free_bytes(gpu)))
        return KvState(used, self.engine.fleet.limits.get((model, gpu)), left)

    def _known(self, up: Up) -> int:
        """Return the KV bytes in use on a server, counted by the tokens that the client has seen."""
        return min(up.kv_bytes, sum(self.engine.kv_bytes(self.engine.live[r]) for r in up.flying))

    def lane(self, batch: Batch, phase: Phase) -> Run | None:
        """Return the present `Run` of a batch if the batch's lane "mixed" is open, else None; see View."""
        open_ = phase == "mixed" and batch in self.engine.lanes
        return Run(batch, sms=self.engine.fleet.sms.get(batch.inst)) if open_ else None
