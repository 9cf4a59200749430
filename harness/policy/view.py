"""The state of the run as a policy may read it: queries whose answers are immutable values."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from harness.policy.actions import Run
from harness.policy.types import Batch, Gpus, Host, Inst, Phase

# waiting: a Load waits for memory; loading: it has memory; leaving: an Evict waits for members or for a boundary
Weights = Literal["out", "waiting", "loading", "in", "leaving"]
Transit = Literal["none", "waiting", "moving"]  # waiting: a Move waits for memory where it is to go


class BatchState(NamedTuple):
    """Counts of a batch's members, and counters since the start of the run (subtract two readings)."""

    waiting: int  # prefill not begun
    decoding: int  # KV whole and here, or attended where it is
    away: int  # KV not where it can be attended
    prefill_tokens: int  # still to prefill, of waiting members and of prefills in flight
    ctx_tokens: int  # sum of contexts of `decoding`
    steps: int  # made since the start
    seq_steps: int  # decode tokens made
    prefilled_tokens: int  # of prompts, since the start
    busy_s: float  # seconds in steps
    waiting_to_move: int = 0  # of `away`: a Move waits for memory where it is to go


class KvState(NamedTuple):
    """The KV memory of a model on a GPU (its account)."""

    used_bytes: int  # by requests
    limit_bytes: int | None  # of a `Limit`; None: there is none
    room_bytes: int  # by which it can still grow


class RequestState(NamedTuple):
    """The state of a request."""

    batch: Batch | None  # None: it was not admitted
    made_tokens: int  # of its output
    kv_bytes: int  # on each GPU of its group
    home: Gpus | Host | None  # of its KV; on its way, where it comes from; None: it has no KV
    transit: Transit = "none"  # of its KV; also "none" while a Move waits for the end of the request's step


class View(Protocol):
    """Queries that read the engine's state in place. Creating a view costs nothing; it is valid only during `on`."""

    @property
    def now_s(self) -> float:
        """Return the engine's clock, seconds from the window's start (negative in the warm-up).

        Example: `view.now_s`
        """
        ...

    def weights(self, inst: Inst) -> Weights:
        """Return the state of an instance's weights at its place: on its GPUs, or in the memory of its host.

        Example: `view.weights(Inst("chat", (0,))) == "in"`
        """
        ...

    def insts(self, home: int | Host) -> tuple[Inst, ...]:
        """Return a GPU's instances whose `weights` are not "out", in order of `Load`; for a host, those in its memory.

        Example: `view.insts(0)`
        """
        ...

    def free_bytes(self, home: int | Host) -> int:
        """Return the free bytes, without the engine's reserve and the memory promised to waiting loads and moves.

        A request takes KV memory when the engine begins its prompt. An admitted request that still waits has taken
        none.

        Example: `view.free_bytes(0)`
        """
        ...

    def kv(self, model: str, gpu: int) -> KvState:
        """Return a model's KV account on a GPU.

        Example: `view.kv("chat", 0).used_bytes`
        """
        ...

    def batch(self, batch: Batch) -> BatchState:
        """Return a batch's counts; O(1).

        Example: `view.batch(Batch(Inst("chat", (0,)))).waiting`
        """
        ...

    def members(self, batch: Batch) -> tuple[int, ...]:
        """Return the ids of a batch's requests in order of Admit; O(members).

        Example: `view.members(Batch(Inst("chat", (0,))))`
        """
        ...

    def request(self, rid: int) -> RequestState:
        """Return the state of a request that has arrived, by its id.

        Example: `view.request(17).made_tokens`
        """
        ...

    def lane(self, batch: Batch, phase: Phase) -> Run | None:
        """Return the `Run` in force on a lane, with the SMs that were granted; None if the lane is closed.

        Example: `view.lane(Batch(Inst("chat", (0,))), "mixed")`
        """
        ...

    def oracle_tokens(self, rid: int) -> int:
        """Return a request's true output length in tokens. Raises unless `uses` declares "view.oracle_tokens".

        Example: `view.oracle_tokens(17)`
        """
        ...
