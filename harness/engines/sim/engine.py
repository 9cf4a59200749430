"""The simulator as an `Engine`: it runs the kernel from event to event, and turns kernel events into Python objects."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness import spilled
from harness.engines.machine import Config, Machine, cluster, machine
from harness.engines.sim import kernel, records, state
from harness.engines.sim.names import Names
from harness.engines.sim.orders import Orders
from harness.engines.sim.requests import Requests
from harness.engines.sim.span import Span
from harness.engines.sim.start import Mode
from harness.engines.sim.state import State
from harness.engines.sim.view import SimView
from harness.policy.actions import Action, Evict, Load, Move
from harness.policy.events import Arrived, Done, Event, Failed, Finished, Preempted, Prefilled, TurnEnded, Woke
from harness.policy.options import OPTIONS
from harness.policy.types import Batch, Fidelity, Jobs, Option, Phase, UserError
from harness.policy.view import View

if TYPE_CHECKING:
    import pyarrow as pa

TELLS: dict[type, int] = {
    Finished: state.E_FINISHED,
    Prefilled: state.E_PREFILLED,
    Preempted: state.E_PREEMPTED,
    TurnEnded: state.E_TURN,
    Arrived: state.E_ARRIVED,
}
ENDS: dict[int, Any] = {state.DONE: "done", state.DROPPED: "dropped", state.FAILED: "failed"}
MOST_BLOCK_TOKENS = records.REMOTE["residues"].shape[0]
PHASE: tuple[Phase, ...] = ("mixed", "prefill", "decode")
WHY: tuple[Literal["time", "steps", "empty", "stuck"], ...] = ("time", "steps", "empty", "stuck")


class Sim:
    """A deterministic engine that simulates time: the same spec always gives the same results, byte for byte."""

    fidelity: Fidelity = "simulated"
    wall_clock = exclusive = False
    lacks = ""
    measured_on: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, config: Config, options: Mapping[str, Option] | None = None, priced: Machine | None = None
    ) -> None:
        if config.block_tokens > MOST_BLOCK_TOKENS:
            raise UserError(f"block_tokens is {config.block_tokens}: the simulator takes at most {MOST_BLOCK_TOKENS}")
        options, self._machine = options or {}, priced or machine(config)
        self.config = config
        self.offers: Mapping[str, tuple[Option, ...]] = {name: tuple(values) for name, values in OPTIONS.items()}
        self._mode = Mode.of(config, options)
        self.cluster = cluster(config, self._mode.elastic, self._machine, self._mode.layout)
        self.can = frozenset(
            {
                "Load", "Evict", "Evict.drain", "Limit", "Admit", "Drop", "Run", "Run.phase:prefill",
                "Run.phase:decode", "Run.for_s", "Run.steps", "Run.steps:0", "Run.seqs", "Run.chunk_tokens", "Run.sms",
                "Run.slice_layers", "Run.op_s", "Move", "Move.to:gpu", "Move.to:host", "Move.to:none", "Move.attend",
                "view.oracle_tokens",
            }
            | {f"Load.way:{way}" for way in self._machine.ladder}
        )  # fmt: skip
        self.tells = frozenset({Woke, Arrived, Prefilled, Finished, Preempted, TurnEnded, Done, Load, Evict, Move})
        self._options, self._host = options, self._machine.host
        self.requests: Requests | None = None  # made when the run begins
        self.oracle = False  # the policy may ask for the tokens that requests will make
        self._jobs: Jobs | None = None
        self._settled = False
        self._logs: list[NDArray[Any]] = []
        self._view = SimView(self, config.start_s)
        self._span = Span(config.window_s)

    @cached_property
    def names(self) -> Names:
        """The maps from a policy's instances and batches to their rows in the kernel's records, and back.

        They are built on first use. An engine that is only asked for its abilities never needs them.
        """
        return Names(self.config, self.cluster, self._machine, self._mode)

    @cached_property
    def S(self) -> State:  # noqa: N802 - capital as in the kernel
        """The simulator's state: arrays of the kernel's records."""
        return self.names.S

    @cached_property
    def orders(self) -> Orders:
        """The object that passes a policy's actions to the kernel."""
        return Orders(self.names, self.config, self._machine)

    # ------------------------------------------------------------ the protocol

    def take(self, jobs: Jobs) -> None:
        """Store the workload for the run.

        Raises ValueError unless the workload lists the engine's models in the engine's order.
        """
        if jobs.models != tuple(self.names.model):
            raise ValueError("the workload's models are not the engine's")
        self._jobs = jobs

    def begin(self, hears: frozenset[type], oracle: bool, end_s: float = math.inf) -> None:
        """Start the clock: from now on, requests arrive and actions take time.

        `hears` contains the types of events that the policy receives. `oracle` allows the policy to ask for the number
        of output tokens of a request. The run ends at `end_s`.
        """
        assert self._jobs is not None
        host = self._host
        self.oracle = oracle
        self.S.set(
            round_trip_s=host.api_in_s + host.api_out_s,
            end=end_s,
            heard=sum(1 << code for kind, code in TELLS.items() if kind in hears) | 1 << state.E_DONE,
        )
        self.requests = Requests(self.names, self.config, self._mode, host.api_in_s, self._jobs)
        self.orders.begin(self.requests, hears)

    def ready(self) -> None:
        """Do nothing: a simulator has no processes to start."""

    def close(self) -> None:
        """Do nothing: a simulator has no resources to release."""

    def view(self) -> View:
        """Return the object through which a policy queries the simulator."""
        return self._view

    def came(self, rid: int) -> bool:
        """Tell whether `rid` is a request of the workload that has arrived."""
        return self.requests is not None and self.requests.came(rid)

    def idle(self) -> bool:
        """Tell whether every request has ended and the queue `orders.events` is empty."""
        return not (self.S.left[0] or self.orders.events)

    def do(self, action: Action) -> Done | None:
        """Start an action.

        Return a `Done` marked "not now" if the action cannot start yet but may start later, else None. `poll` reports
        every other refusal as an event.
        """
        return self.orders.do(action)

    def poll(self, until_s: float) -> Event | None:
        """Return the next event due by `until_s`, or None if no event is due by then.

        Before returning None, advance the clock to `until_s`, or to the end of the run if that is earlier.
        """
        S = self.S
        if until_s < S.quiet_s[0] and until_s < self._span.next_s:  # no call into the kernel
            if until_s > S.now[0]:
                S.now[0] = self._view.now_s = until_s
            return None
        orders = self.orders
        while True:
            i = S.events_read[0]
            if i < S.events_told[0]:
                S.events_read[0] = i + 1
                event = self._event(*S.events.item(i))
                return orders.landed(event) if orders.landing else event
            if orders.events:  # the kernel's events happened before these
                return orders.events.popleft()
            code = kernel.advance(S.at, min(until_s, self._span.next_s))
            self._view.now_s = S.now[0]
            if code == state.NOTHING:
                if S.now[0] < self._span.next_s:
                    return None
                self._span.note(S.gpus[: self.config.gpus])
            elif code == state.GROW:
                self._grow()
            elif code == state.OVER and not orders.give_up():
                end_s = S.s["end"].item()
                S.now[0] = self._view.now_s = end_s if end_s < math.inf else S.now[0]
                return None

    def _grow(self) -> None:
        """Enlarge the logs that are almost full.

        In a long workload, also create records for the next requests once all requests with records have arrived.
        """
        S, cap = self.S, self.config.batch_cap
        w = S.s
        if w["to_come"] and w["arrived"] == w["opened"]:
            assert self.requests is not None
            self.requests.refill()
        most = 4 * cap + 64 + int(S.batches["count"][:, state.WAITING].max(initial=0))
        if len(S.events) - w["events_told"] < 2 * most:
            S.grow("events", len(S.events) + most)
        if w["transfer_spare"] < 18 * (cap + 8):
            S.more_free("transfer", len(S.transfers) + 9 * cap)
        if self.config.token_times and len(S.log) - w["log_used"] < 2 * (most + len(S.lanes)):
            self._logs.append(np.array(S.log[: w["log_used"]]))
            S.set(log_used=0)
            S.put(log=np.zeros(max(len(S.log), 4 * (most + len(S.lanes))), records.LOG))

    def _event(self, ran_s: float, kind: int, a: int, b: int, c: int) -> Event:
        """Return a kernel event as a Python object.

        `kind`, `ran_s`, `a` (subject), `b` (batch) and `c` (detail) are the fields of the record EVENT.
        """
        if kind == state.E_ARRIVED:
            assert self.requests is not None
            return Arrived(self.requests.request(a))
        batch = self.names.batches[b] if b >= 0 else None
        if kind == state.E_FINISHED:
            return Finished(a, batch, ENDS[c])
        if kind == state.E_DONE:
            action = self.orders.actions[a]
            if c == 0:
                return Done(action)
            failed: Failed = "never" if c % 2 else "gone"
            if isinstance(action, Move) and isinstance(action.who, Batch):
                return Done(action, failed, f"the KV of {c // 2} of its members could not go there")
            return Done(action, failed, "too much KV to go there" if c % 2 else "no KV that could go there")
        assert batch is not None
        if kind == state.E_TURN:
            return TurnEnded(batch, PHASE[c // 4], WHY[c % 4], a, ran_s)
        return Prefilled(a, batch) if kind == state.E_PREFILLED else Preempted(a, batch)

    # ------------------------------------------------------------ results

    def stats(self) -> dict[str, float]:
        """Return counters of the whole run, and sums over its measurement window, for the run's metadata."""
        S, n = self.S, self.config.gpus
        w = S.s
        steps = max(1.0, float(S.batches["steps"].sum()))  # each step of a span counts
        return {
            "steps": float(w["steps"]),
            "loads": float(w["loads"]),
            "evicts": float(w["evicts"]),
            "migrations": float(w["migrations"]),  # weights that left a place for another
            "moves": float(w["moves"]),
            "preemptions": float(w["preempts"]),
            "cap_bound": float(w["by_cap"]) / steps,
            "chunk_bound": float(w["by_chunk"]) / steps,
            "prefill_bound": float(w["by_prefill"]) / steps,
            **self._hit_share(),
            **self._span.stats(S.gpus[:n], float(w["now"])),
            "link_busy_s": float(S.links["busy_s"].sum()),
            "gpus": float(n),
        }

    def _hit_share(self) -> dict[str, float]:
        """Return the share of prompt tokens found in the prefix cache when the prompt first got KV blocks.

        The result is empty if there is no prefix cache.
        """
        if not self.names.prompt_ids:
            return {}
        R = self.S.requests
        came = R["found"] >= 0
        asked = int(R["prompt"][came].sum())
        return {"hit_share": int(R["found"][came].sum()) / asked if asked else 0.0}

    def finish(self) -> None:
        """Charge unfinished requests for their waits until the present simulated time. A second call does nothing."""
        if self._settled:
            return
        self._settled = True
        if self.config.token_times:
            self.S.grow("log", len(self.S.requests) + len(self.S.lanes))
        end_s = float(self.S.s["now"])
        kernel.settle(self.S.at, end_s)
        while self.requests is not None and self.S.s["to_come"]:  # the run ended before they came
            self.requests.refill()
        R = self.S.requests
        for piece in spilled.pieces(len(R), R):
            kernel.settle_requests(self.S.at, end_s, piece.start, piece.stop)

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of requests.parquet in order of request id."""
        from harness.engines import rows, stamps

        self.finish()
        R, jobs, host, end_s = self.S.requests, self._jobs, self._host, float(self.S.s["now"])
        assert jobs is not None
        arrivals_s, tokens, gaps = stamps.arrivals(R, jobs, end_s, host.api_in_s), None, None
        if self.config.token_times:
            log = np.concatenate([*self._logs, self.S.log[: self.S.s["log_used"]]])
            tokens, gaps = rows.token_times(R, arrivals_s, log, host.api_out_s)
        yield from rows.batches(
            R,
            lambda piece: np.maximum(R["state"][piece] - state.DONE + 1, 0),
            jobs,
            self.names.places,
            arrivals_s=arrivals_s,
            fidelity=self.fidelity,
            end_s=end_s,
            api_in_s=host.api_in_s,
            api_out_s=host.api_out_s,
            tokens=tokens,
            gaps=gaps,
            alone_s=self._alone_s,
        )

    def _alone_s(self, piece: slice) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the prefill seconds and the decode seconds of each request in `piece` on GPUs without other work.

        The model has its configured tensor-parallel degree. The GPUs are of the kind on which the request's first
        prefill ended. For a request without a prefill, they are of the first kind.
        """
        from harness.engines.costs.alone import alone_s

        assert self._jobs is not None
        jobs = self._jobs.part(piece.start, piece.stop)
        row: NDArray[np.int64] = np.array([self.names.cost_rows[m.name, m.tp] for m in self.config.models])[jobs.model]
        if self._machine.others:
            first_rows = np.array([self.names.first_rows[gpus[0]] if gpus else 0 for gpus in self.names.places] + [0])
            row += first_rows[self.S.requests["first_inst"][piece]]  # -1, the last: no prefill
        return alone_s(self._machine.stacked, row, jobs.prompt_tokens, jobs.output_tokens, self.config.chunk_tokens)
