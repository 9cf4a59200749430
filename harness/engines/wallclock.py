"""The base of engines in real time: clock, arrivals, members of batches, causes of waiting, time stamps, and rows.

An engine derives from `WallClock` and adds its own part: `poll`, the actions, and its memory.
"""

from __future__ import annotations

import heapq
import math
import os
import platform
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from harness.engines import stamps
from harness.engines.machine import Config, Refusal
from harness.engines.stamps import Noted
from harness.policy.actions import Action, Admit
from harness.policy.events import Arrived, Done, Event, Finished, Freed, Preempted, Prefilled, TurnEnded
from harness.policy.types import Batch, Cluster, Fidelity, Gpus, Host, Jobs, Request, Unsupported
from harness.policy.view import BatchState, RequestState

if TYPE_CHECKING:
    import pyarrow as pa

ORDER = (Done, Finished, Prefilled, Preempted, TurnEnded, Arrived)  # the order in which events of one instant are told


@dataclass(slots=True)
class Live:
    """A request that has arrived and has not ended."""

    rid: int
    model: str
    prompt_tokens: int
    output_tokens: int
    since_s: float  # its waits are booked up to then; `cause` holds since then
    cause: str = "admission"  # one of record.WAITS
    batch: Batch | None = None
    made: int = 0
    kv_tokens: int = 0  # tokens whose KV is held; 0: its prompt is still to be computed

    @property
    def ctx_tokens(self) -> int:
        """The tokens of the prompt and of the output made so far."""
        return self.prompt_tokens + self.made


@dataclass(slots=True)
class Counts:
    """Counters of a batch since the start."""

    steps: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    busy_s: float = 0.0


class WallClock:
    """The bookkeeping of requests for engines that run in real time; see Engine."""

    fidelity: Fidelity
    cluster: Cluster
    lacks = ""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.now_s = config.start_s  # when the clock was last read: it stands still while a policy decides
        self.live: dict[int, Live] = {}
        self.batches: dict[Batch, dict[int, Live]] = {}  # members by id, in order of Admit
        self.counts: dict[Batch, Counts] = {}
        self.routes: dict[str, Batch] = {}
        self.oracle = False
        self._hears: frozenset[type] = frozenset()
        self._told: deque[Event] = deque()
        self._lacking = False  # an action was refused for now
        self._zero_s = self._end_s = math.inf  # the process's clock at 0 s, infinite before `begin`; the run's end
        self._R = np.zeros(0, stamps.FIELDS)
        self._places: dict[Gpus, int] = {}
        self._busy_at: dict[float, float] = {}  # seconds of steps ended by the window's start, and by its end
        self._future: list[tuple[float, int]] = []  # a heap of (arrival, request)
        self._heirs: dict[int, int] = {}  # a request maps to its successor in a closed loop

    # ------------------------------------------------------------ what an engine adds

    def charge(self) -> None:
        """Charge the time of all requests up to now to the causes of their waits."""
        raise NotImplementedError

    def waits_for(self, request: Live) -> str:
        """Return why a request of a batch is waiting while it is in no step: one of record.WAITS."""
        raise NotImplementedError

    def release(self, request: Live) -> None:
        """Free the KV of a request that leaves its batch or ends."""
        raise NotImplementedError

    def kv_bytes(self, request: Live) -> int:
        """Return the bytes of a request's KV."""
        raise NotImplementedError

    def act(self, action: Action) -> Refusal | None:
        """Start an action; return the reason if it is refused, else None.

        After a refusal "not now" an engine has to call `freed` as soon as memory or another resource becomes free.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ the run

    def take(self, jobs: Jobs) -> None:
        """Store the workload. Raises Unsupported if the workload has a prefix cache."""
        if jobs.prefix is not None:
            raise Unsupported("a prefix cache (--no-prefix-cache)")
        self.jobs = jobs

    def begin(self, hears: frozenset[type], oracle: bool, end_s: float = math.inf) -> None:
        """Start the clock."""
        jobs, n = self.jobs, len(self.jobs)
        self._hears, self.oracle, self._end_s = hears, oracle, end_s
        self._R, self._ends, self._due_s = np.zeros(n, stamps.FIELDS), np.zeros(n, np.int8), jobs.arrival_s.copy()
        for name, none in (("arrival", math.inf), ("admit", math.nan), ("first", math.nan), ("done", math.nan)):
            self._R[name] = none
        self._R["first_inst"] = self._R["last_inst"] = -1
        self._stamps_s: list[list[float]] = [[] for _ in range(n)]
        opened = range(n) if jobs.after is None else np.flatnonzero(jobs.after < 0).tolist()
        self._future = [(jobs.arrival_s.item(r), r) for r in opened]
        heapq.heapify(self._future)
        if jobs.after is not None:
            self._heirs = {before: r for r, before in enumerate(jobs.after.tolist()) if before >= 0}
        self._zero_s = time.monotonic() - self.config.start_s

    @property
    def begun(self) -> bool:
        """True once `begin` has started the clock."""
        return self._zero_s < math.inf

    @property
    def over(self) -> bool:
        """True once the run's end has come."""
        return self.now_s >= self._end_s

    def clock(self) -> float:
        """Return the present time in seconds; the time stops at the run's end."""
        if self.begun:
            self.now_s = min(time.monotonic() - self._zero_s, self._end_s)
            for at_s in (0.0, self.config.window_s):
                if at_s <= self.now_s and at_s not in self._busy_at:
                    self._busy_at[at_s] = self._busy_s()
        return self.now_s

    def _busy_s(self) -> float:
        return float(sum(counts.busy_s for counts in self.counts.values()))

    def arrivals(self) -> None:
        """Take in the requests that are due."""
        while self._future and self._future[0][0] <= self.now_s:
            self._arrive(*heapq.heappop(self._future))

    def do(self, action: Action) -> Done | None:
        """Start an action; return a "not now" `Done` if the action cannot start now but may later, else None.

        Queue a `Done` for any other refusal.
        """
        self.clock()
        refusal = self.act(action)
        if refusal is None:
            return None
        done = Done(action, *refusal)
        if done.failed == "not now":
            self._lacking = True
            return done
        self._told.append(done)
        return None

    def freed(self) -> None:
        """Queue a `Freed` event if an action was refused "not now" since the last `Freed` event."""
        if self._lacking:
            self._told.append(Freed())
            self._lacking = False

    def tell(self, events: Iterable[Event]) -> None:
        """Queue events of one instant in the order of ORDER, but only those that the policy hears.

        A `Done` of an action that failed is always queued.
        """
        wanted = (e for e in events if type(e) in self._hears or (type(e) is Done and self._wanted(e)))
        self._told.extend(sorted(wanted, key=lambda event: ORDER.index(type(event))))

    def _wanted(self, done: Done) -> bool:
        return done.failed is not None or type(done.action) in self._hears

    def _arrive(self, due_s: float, r: int) -> None:
        jobs = self.jobs
        model, prompt = jobs.models[jobs.model.item(r)], jobs.prompt_tokens.item(r)
        self._due_s[r], self._R["arrival"][r] = due_s, self.now_s
        self.live[r] = Live(r, model, prompt, jobs.output_tokens.item(r), self.now_s)
        if model in self.routes:
            self.admit(Admit(r, self.routes[model]))
        slos = jobs.ttft_slo_s.item(r), jobs.tpot_slo_s.item(r)
        self.tell([Arrived(Request(r, model, due_s, prompt, *slos))])

    def _book(self, request: Live) -> None:
        """Charge a request's time up to now to its present cause."""
        self._R[request.cause][request.rid] += self.now_s - request.since_s
        request.since_s = self.now_s

    def stats(self) -> dict[str, float]:
        """Return the run's counters; see Engine. The seconds of a step count if the step ends within the window."""
        window_s = self.config.window_s
        busy_s = self._busy_at.get(window_s, self._busy_s())
        return {
            "steps": float(sum(counts.steps for counts in self.counts.values())),
            "preemptions": float(self._R["preemptions"].sum()),
            "gpu_busy_s": busy_s - self._busy_at.get(0.0, busy_s),
            "gpus": float(len(self.cluster.gpus)),
            "span_s": window_s if math.isfinite(window_s) else max(0.0, self.now_s),
        }

    # ------------------------------------------------------------ requests

    def members(self, batch: Batch) -> Collection[Live]:
        """Return the requests of a batch, in the order in which they were admitted."""
        return self.batches.get(batch, {}).values()

    def gone(self, rid: int) -> Refusal | None:
        """Return the refusal of an action on a request that has ended or never arrived; None if the request is live."""
        if rid in self.live:
            return None
        came = 0 <= rid < len(self._R) and self._R["arrival"][rid] < math.inf
        return ("gone", "the request has ended") if came else ("never", f"no request {rid}")

    def state(self, rid: int) -> RequestState:
        """Return the state of a request. Raises KeyError if it has not arrived."""
        request = self.live.get(rid)
        if request is None:
            if not (0 <= rid < len(self._R) and self._R["arrival"][rid] < math.inf):
                raise KeyError(f"no request {rid} yet")
            return RequestState(None, len(self._stamps_s[rid]), 0, None)
        home = request.batch.inst.place if request.batch is not None and request.kv_tokens else None
        return RequestState(request.batch, request.made, self.kv_bytes(request), home)

    def admit(self, action: Admit) -> Refusal | None:
        """Make a request, or all later ones of a model, members of a batch; return the reason if refused, else None."""
        who, batch = action.who, action.batch
        if isinstance(who, str):
            if who != batch.inst.model:
                return "never", f"a batch of {batch.inst.model} cannot serve {who}"
            self.routes[who] = batch
            return None
        if failed := self.gone(who):
            return failed
        request = self.live[who]
        if request.model != batch.inst.model:
            return "never", f"a batch of {batch.inst.model} cannot serve request {who}"
        if np.isnan(self._R["admit"][who]):
            self._R["admit"][who] = self.now_s
        if request.batch != batch:
            self.withdrawn(request)
            request.batch = batch
            self.batches.setdefault(batch, {})[who] = request
            self.charge()
        return None

    def withdrawn(self, request: Live) -> None:
        """Take a request out of its batch before it joins another one, and free its KV; an engine may override this."""
        self._leave(request)

    def _leave(self, request: Live) -> None:
        if request.batch is not None:
            self.release(request)
            del self.batches[request.batch][request.rid]

    def _token(self, request: Live, batch: Batch) -> None:
        r, place = request.rid, batch.inst.place
        assert not isinstance(place, Host)
        last = self._places.setdefault(place, len(self._places))
        if not request.made:
            self._R["first"][r], self._R["first_inst"][r] = self.now_s, last
            self._book(request)
            for wait in stamps.ENGINE_WAITS:
                self._R[f"ttft_{wait}"][r] = self._R[wait][r]
        request.made += 1
        self._R["last_inst"][r] = last
        self._stamps_s[r].append(self.now_s)

    def preempted(self, request: Live) -> Preempted:
        """Record that a request lost its KV, and return the event; its prompt has to be computed again."""
        assert request.batch is not None
        self._R["preemptions"][request.rid] += 1
        return Preempted(request.rid, request.batch)

    def end(self, request: Live, state: Literal["done", "dropped", "failed"]) -> Finished:
        """End a request now; in a closed loop, its successor arrives one think time later."""
        self.charge()
        self._R["done"][request.rid], self._ends[request.rid] = self.now_s, stamps.NAMES.index(state)
        self._leave(request)
        del self.live[request.rid]
        if (heir := self._heirs.get(request.rid)) is not None and self.jobs.think_s is not None:
            heapq.heappush(self._future, (self.now_s + self.jobs.think_s.item(heir), heir))
        return Finished(request.rid, request.batch, state)

    def idle(self) -> bool:
        """Tell whether every request has ended, and every event was returned."""
        return not (self._told or self.live or self._future)

    def noted(self) -> Noted:
        """Return the records of all requests up to now."""
        self.charge()
        R = self._R
        R["made"] = [len(times) for times in self._stamps_s]
        late_s = np.where(np.isfinite(R["arrival"]), R["arrival"] - self._due_s, 0.0)  # arrivals wait for a step's end
        return Noted(R, self._ends, self._stamps_s, list(self._places), late_s, self.now_s)

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of requests.parquet, one per request."""
        from harness.engines import rows

        yield from rows.noted(self.noted(), self.jobs, self.fidelity, token_times=self.config.token_times)


class WallView:
    """The part of a View that concerns only requests and batches."""

    def __init__(self, engine: WallClock) -> None:
        self.engine = engine

    @property
    def now_s(self) -> float:
        """See View."""
        return self.engine.now_s

    def batch(self, batch: Batch) -> BatchState:
        """See View."""
        counts, members = self.engine.counts.get(batch, Counts()), self.engine.members(batch)
        prompts = [request.ctx_tokens for request in members if not request.kv_tokens]
        decodes = [request.ctx_tokens for request in members if request.kv_tokens]
        return BatchState(
            len(prompts),
            len(decodes),
            0,
            sum(prompts),
            sum(decodes),
            counts.steps,
            counts.decoded_tokens,
            counts.prefilled_tokens,
            counts.busy_s,
        )

    def members(self, batch: Batch) -> tuple[int, ...]:
        """See View."""
        return tuple(self.engine.batches.get(batch, ()))

    def request(self, rid: int) -> RequestState:
        """See View."""
        return self.engine.state(rid)

    def oracle_tokens(self, rid: int) -> int:
        """See View."""
        if not self.engine.oracle:
            raise PermissionError('"view.oracle_tokens" is not among what this system uses')
        self.engine.state(rid)  # KeyError where it has not come
        return int(self.engine.jobs.output_tokens[rid])


class NoProfile:
    """A profile of a machine without a cost table: every query raises."""

    def _none(self, *_: Any, **__: Any) -> Any:
        raise Unsupported("cost table")

    prefill_s = step_s = attend_s = kernels_s = load_s = move_s = _none


@cache
def machine_facts(*libraries: str) -> Mapping[str, str]:
    """Return host, processors and versions of libraries, for `measured_on`, without touching a device."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {}
    for library in libraries:
        with suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    return {"host": platform.node(), "cpu": f"{os.cpu_count()} x {name}", **versions}
