"""The simulator's state as a policy sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from harness.engines.sim import kernel, state
from harness.policy.actions import Run
from harness.policy.types import Batch, Host, Inst, Phase
from harness.policy.view import BatchState, KvState, RequestState, Transit, Weights

if TYPE_CHECKING:
    from typing import Any, Protocol

    from harness.engines.machine import Config
    from harness.engines.sim.names import Names
    from harness.engines.sim.requests import Requests
    from harness.engines.sim.state import State

    class Seen(Protocol):
        """The attributes of the simulator that `SimView` reads."""

        config: Config
        requests: Requests | None
        oracle: bool

        @property
        def names(self) -> Names:
            """The maps from a policy's instances and batches to their rows in the kernel's records, and back."""
            ...

        @property
        def orders(self) -> Any:
            """The object that passes a policy's actions to the kernel."""
            ...

        @property
        def S(self) -> State:  # noqa: N802 - capital as in the kernel
            """The simulator's state: arrays of the kernel's records."""
            ...

        def came(self, rid: int) -> bool:
            """Tell whether a request has arrived."""
            ...


WEIGHTS: tuple[Weights, ...] = ("out", "waiting", "loading", "in", "leaving", "leaving")
TRANSIT: tuple[Transit, ...] = ("none", "waiting", "moving")
PHASES: Mapping[Phase, int] = {"mixed": 0, "prefill": 1, "decode": 2}


class SimView:
    """The simulator's state at the last step boundary, read from the kernel's records; `View` documents the queries."""

    def __init__(self, sim: Seen, now_s: float) -> None:
        self._sim = sim
        self.now_s = now_s  # only `Sim.poll` moves it on

    def weights(self, inst: Inst) -> Weights:
        """Return the state of an instance's weights: out, waiting, loading, in or leaving."""
        sim = self._sim
        if isinstance(inst.place, Host):
            memories = sim.orders.memories
            return memories[inst.place.node].weights(inst.model) if memories else "in"
        i = sim.names.inst.get(inst)
        return "out" if i is None else WEIGHTS[sim.names.weights.item(i)]

    def insts(self, home: int | Host) -> tuple[Inst, ...]:
        """Return the instances whose weights are on a GPU or host or on their way there; the last loaded comes last."""
        sim = self._sim
        if isinstance(home, Host):
            memories = sim.orders.memories
            return tuple(Inst(model, home) for model in (memories[home.node].models if memories else sim.names.model))
        names = sim.names
        return tuple([names.insts[i] for i in sim.orders.loaded.get(home, ()) if names.weights.item(i) != state.OUT])

    def free_bytes(self, home: int | Host) -> int:
        """Return the free bytes of a GPU or a host."""
        g = self._sim.config.gpus + home.node if isinstance(home, Host) else home
        return kernel.peek_free(self._sim.S.at, g)

    def kv(self, model: str, gpu: int) -> KvState:
        """Return the state of a model's KV account on a GPU."""
        sim = self._sim
        limit = sim.names.limits.get((model, gpu))
        free = self.free_bytes(gpu)
        used = sum(int(kernel.peek_used(sim.S.at, i)) for i in sim.names.accounts(model, gpu))
        return KvState(used, limit, max(0, free if limit is None else min(free, limit - used)))

    def batch(self, batch: Batch) -> BatchState:
        """Return a batch's members, tokens and counters since the start; all are 0 for an unknown batch."""
        b = self._sim.names.batch.get(batch)
        if b is None:
            return BatchState(0, 0, 0, 0, 0, 0, 0, 0, 0.0)
        return BatchState._make(kernel.peek_batch(self._sim.S.at, b))

    def members(self, batch: Batch) -> tuple[int, ...]:
        """Return the ids of a batch's requests in order of admission."""
        b = self._sim.names.batch.get(batch)
        if b is None:
            return ()
        at, ids = self._sim.S.at, list[int]()
        r = kernel.members(at, b)
        while r >= 0:
            ids.append(r)
            r = kernel.next_member(at)
        return tuple(ids)

    def request(self, rid: int) -> RequestState:
        """Return the state of a request. Raises KeyError if it has not arrived."""
        sim = self._sim
        if not sim.came(rid):
            raise KeyError(f"no request {rid} yet")
        made, size, b, home, transit = kernel.peek_request(sim.S.at, rid)
        batch, place = sim.names.batches[b] if b >= 0 else None, sim.names.insts[home].place if home >= 0 else None
        return RequestState(batch, made, size, place, TRANSIT[transit])

    def lane(self, batch: Batch, phase: Phase) -> Run | None:
        """Return the order that keeps a batch's lane open for a phase, or None if that lane is not open."""
        sim = self._sim
        b = sim.names.batch.get(batch)
        slot = int(phase == "decode")
        if b is None or not sim.S.lanes[2 * b + slot]["open"]:
            return None
        order = sim.orders.standing.get((b, slot))
        return order if order is not None and order.phase == phase else None

    def oracle_tokens(self, rid: int) -> int:
        """Return the number of output tokens that a request will make.

        Raises PermissionError if the system does not declare this query, and KeyError if the request has not arrived.
        """
        sim = self._sim
        if not sim.oracle:
            raise PermissionError('"view.oracle_tokens" is not among what this system uses')
        if sim.requests is None or not sim.came(rid):
            raise KeyError(f"no request {rid} yet")
        return int(sim.requests.jobs.output_tokens[rid])
