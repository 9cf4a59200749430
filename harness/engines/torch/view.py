"""The view of the engine that policies read."""

from __future__ import annotations

from harness.engines.torch.core import Core
from harness.engines.wallclock import Counts, WallView
from harness.policy.actions import Run
from harness.policy.types import Batch, Host, Inst, Phase
from harness.policy.view import BatchState, KvState, RequestState, Weights


class Seen(WallView):
    """The view of the engine that policies read. It reads the engine's state in place, without a copy."""

    engine: Core

    def weights(self, inst: Inst) -> Weights:
        """Return the state of an instance's weights; see View.

        The state is "out" as long as a load waits for memory, because such a load waits in the event loop, not in the
        engine.
        """
        if isinstance(inst.place, Host):
            return "in"
        resident = self.engine.residents.by_inst.get(inst)
        return "out" if resident is None else resident.state

    def insts(self, home: int | Host) -> tuple[Inst, ...]:
        """Return the instances with weights on a GPU or being copied to it, or all models on a host; see View."""
        if isinstance(home, Host):
            return tuple(Inst(m, home) for m in self.engine.nets)
        return tuple(inst for inst in self.engine.residents.by_inst if inst.place == (home,))

    def free_bytes(self, home: int | Host) -> int:
        """Return the free bytes of a GPU or a host; see View."""
        return self.engine.arenas[home].free_bytes

    def kv(self, model: str, gpu: int) -> KvState:
        """Return the KV bytes of a model on a GPU: those in use, their limit, and those still free for it; see View."""
        account = self.engine.accounts[model, gpu]
        return KvState(account.used_bytes, account.limit_bytes, account.room_bytes)

    def batch(self, batch: Batch) -> BatchState:
        """Return the counts of a batch's members, and its counters since the start; see View."""
        engine = self.engine
        counts, members, place = engine.counts.get(batch, Counts()), engine.members(batch), batch.inst.place
        moving = engine.moves.moving
        prompts = [request for request in members if not request.kv_tokens]
        whole = [request for request in members if request.kv_tokens]
        assert not isinstance(place, Host)
        away = {request.rid for request in whole if request.rid in moving or not engine.attendable(request, place)}
        here = [request for request in whole if request.rid not in away]
        begun = {request.rid: engine.kv[request.rid].tokens for request in prompts if request.rid in engine.kv}
        left = sum(request.ctx_tokens - begun.get(request.rid, 0) for request in prompts)
        return BatchState(
            len(prompts) - len(begun),
            len(here),
            len(away),
            left,
            sum(request.ctx_tokens for request in here),
            counts.steps,
            counts.decoded_tokens,
            counts.prefilled_tokens,
            counts.busy_s,
            sum(rid in moving and moving[rid].kv is None for rid in away),
        )

    def request(self, rid: int) -> RequestState:
        """Return the state of a request, including where its KV is stored; see View."""
        state, kv = super().request(rid), self.engine.kv.get(rid)
        transfer = self.engine.moves.moving.get(rid)
        if kv is None:
            return state._replace(home=None)
        if transfer is None or (transfer.kv is None and rid in self.engine.stepping):
            return state._replace(home=kv.home)
        return state._replace(home=kv.home, transit="waiting" if transfer.kv is None else "moving")

    def lane(self, batch: Batch, phase: Phase) -> Run | None:
        """Return the `Run` order that a lane follows; None if the lane is closed; see View."""
        lane = self.engine.lanes.get((batch, phase == "decode"))
        return lane.order if lane is not None and lane.phase == phase else None
