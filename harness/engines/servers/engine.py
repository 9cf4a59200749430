"""Real servers behind the protocol of engines: one server for each model and place, and one open-loop client for all.

`Load` starts a server, and is done when the server answers. `Evict` stops the server once its requests have ended. If
the `Load` named a way that lets the server sleep, `Evict` puts it to sleep, and its next `Load` wakes it. If a model is
routed (`Admit(model, batch)`), the client sends its requests at their times, without the engine. Other requests are
sent when they are admitted. A request waits in the engine until its server is ready and its lane is open.

The engine cannot control a server's own scheduling: the server forms its batches, and shares the processors with other
servers. So a batch has one lane ("mixed"), which stays open once opened; there are no turns, and no KV moves. A
server takes its part of the SMs (`Run.sms`, for kinds that have it) when it starts, and keeps that part. The causes of
waiting are known until a request is written; after that, its time counts as `compute`.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from harness.client.client import Client, Told
from harness.client.load import OtherLoad
from harness.client.log import Log
from harness.client.verdict import verdict
from harness.engines import stamps
from harness.engines.machine import Config, Refusal
from harness.engines.servers import account
from harness.engines.servers.fleet import SILENT_S, Change, Kind
from harness.engines.servers.requests import Requests
from harness.engines.servers.view import Seen
from harness.engines.wallclock import machine_facts
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Run
from harness.policy.events import Arrived, Done, Event, Finished, Prefilled, Woke
from harness.policy.types import Batch, Fidelity, Host, Inst, UserError
from harness.policy.view import View

if TYPE_CHECKING:
    from harness.engines.servers.timed import Rig

LEAD_S = 0.1  # from the order to begin to the window's first moment, by which the client must have it
BEHIND_S = 10.0  # a run whose events wait longer than this to be taken in ends, and is invalid
CLIENT = "client.parquet"


class Servers(Requests):
    """An engine that serves a workload on servers of one kind."""

    tells = frozenset({Woke, Arrived, Prefilled, Finished, Done, Load, Evict})
    fidelity: Fidelity = "real"
    wall_clock = exclusive = True

    def __init__(self, config: Config, kind: Kind) -> None:
        super().__init__(config, kind)
        self.can, self.offers, self.cluster = kind.can, kind.offers, kind.cluster
        self.measured_on: Mapping[str, str] = {**machine_facts(), **kind.facts}
        self.lacks = kind.lacks
        self.log: Log  # the client's, once `rows` were asked for
        self.loads = self.evicts = 0
        self.behind = ""  # why the run ended early
        self._heard: deque[Told] = deque()  # the client's events that are not yet taken in
        self._other: OtherLoad | None = None
        self._other_cores = math.nan
        self._folder: TemporaryDirectory[str] | None = None

    def timed(self, config: Config, folder: Path) -> Rig:
        """Return a rig that measures these servers from outside, for a cost table; their logs go into `folder`."""
        from harness.engines.servers.timed import Rig, subject

        self.kind.ready(folder)
        return Rig(subject(self.kind, config, self.measured_on), folder)

    # ------------------------------------------------------------ life

    def ready(self) -> None:
        """Find the servers' programs and models; see Engine."""
        self._folder = TemporaryDirectory(prefix="bench-servers-", ignore_cleanup_errors=True)
        self.fleet.open(Path(self._folder.name))

    def begin(self, hears: frozenset[type], oracle: bool, end_s: float = math.inf) -> None:
        """Start the servers for the `Load`s so far, wait until all answer, then start the client; see Engine."""
        super().begin(hears, oracle, end_s)
        jobs = self.jobs
        self._future, self._heirs = [], {}  # the client keeps them
        self._zero_s = math.inf  # the clock stands until all is ready
        self._expected, self._sent_s = len(jobs), np.full(len(jobs), np.nan)
        self.fleet.size()
        for up in self.fleet.up.values():
            self.fleet.start(up)
        while any(up.weights == "loading" for up in self.fleet.up.values()):
            self.fleet.wait(math.inf)
            for change in self.fleet.changes():
                if change.what == "dead":
                    raise UserError(change.why)
        client = Client(jobs, seed=self.config.seed, timeout_s=SILENT_S, style=self.kind.style)
        self.client = client
        client.start()
        for model in self.routes:
            self._route(model)
        self._other = OtherLoad([os.getpid(), *self.kind.roots()])
        self._zero_ns = time.monotonic_ns() + round((LEAD_S - self.config.start_s) * 1e9)
        self._zero_s = self._zero_ns / 1e9
        client.begin(self._zero_ns)

    def close(self) -> None:
        """Stop all processes, even those that are still working; see Engine."""
        client, self.client = self.client, None
        try:
            if client is not None:
                client.close()
        finally:
            self.fleet.close()
            if self._folder is not None:
                self._folder.cleanup()

    def view(self) -> View:
        """Return the view that policies read; see Engine."""
        return Seen(self)

    def idle(self) -> bool:
        """Tell whether every request has ended, or the run has failed because the bench fell behind; see Engine."""
        return bool(self.behind) or (not self._expected and super().idle())

    def clock(self) -> float:
        """Return the time; it stays at the run's start until the client begins."""
        if self.begun:
            self.now_s = max(self.config.start_s, min(time.monotonic() - self._zero_s, self._end_s))
        return self.now_s

    def poll(self, until_s: float) -> Event | None:
        """Return the next event, or None if no event comes by `until_s`; see Engine.

        Sleep until the client or a server has something to report, or until `until_s`.
        """
        assert self.client is not None
        until_s = min(until_s, self._end_s)
        while True:
            self.clock()
            while not self._told and self._hear():
                pass
            if self._told:
                return self._told.popleft()
            if self.now_s >= until_s or self.idle() or (until_s == math.inf and not self._coming()):
                return None
            self.fleet.wait(until_s - self.now_s, self.client.fileno())

    def _coming(self) -> bool:
        """Tell whether an event can still come without a new action."""
        moving = any(up.state != "ready" for up in self.fleet.up.values())
        return bool(self._expected or self.sent or self.cancelled or self.unsure or moving)

    def _hear(self) -> bool:
        """Handle one event of the client and return True, or handle the changes of servers and return False.

        Events are handled one by one, so that at each event a policy's view shows the state at that time.
        """
        assert self.client is not None
        if not self._heard:
            self._heard.extend(self.client.poll(0.0))
            self.clock()  # no event lies ahead of the clock
        if self._heard:
            told = self._heard.popleft()
            if time.monotonic_ns() - told.at_ns > BEHIND_S * 1e9 and not self.behind:
                self.behind = (
                    f"the bench fell {BEHIND_S:g} s behind its client's events: it is the limit, not the servers"
                )
            self._take(told)
            return True
        for change in self.fleet.changes():
            self._changed(change)
        if not self.unsure:
            for up in self.fleet.up.values():
                if up.state == "draining" and not up.flying:
                    self.fleet.stop(up)
        return False

    # ------------------------------------------------------------ what became of a server

    def _changed(self, change: Change) -> None:
        up, what, why = change
        if what == "ready":
            asked, up.asked = up.asked, []
            self.tell(Done(action) for action in asked)
        elif what in {"stopped", "asleep"}:
            self.evicts += 1
            self.tell(Done(action) for action in up.asked)
        else:
            sys.stderr.write(f"{why}\n")
            self.errors |= dict.fromkeys(up.flying, why)
            self.tell(Done(x, "never", why) if isinstance(x, Load) else Done(x) for x in up.asked)
        self._flow(up.inst)
        if what != "ready":
            self.freed()

    # ------------------------------------------------------------ actions

    def act(self, action: Action) -> Refusal | None:
        """Carry out an action, or return the reason why it is refused; see WallClock.

        An action with a field that is not in `can` is refused.
        """
        match action:
            case Load(inst, way) if way in self.kind.ways:
                return self._place_refusal(inst) or self._load(action)
            case Evict(inst, True) if "Evict" in self.can:
                return self._place_refusal(inst) or self._evict(action)
            case Limit(model, gpu, kv_bytes) if "Limit" in self.can and self._there(model, gpu):
                return self._limit(model, gpu, kv_bytes)
            case Admit(_, batch):
                return self._place_refusal(batch.inst) or self._admit(action)
            case Drop(rid):
                if failed := self.gone(rid):
                    return failed
                self._cancel(rid)
            case Run(batch, sms=sms) if action == Run(batch, sms=sms) and (sms is None or "Run.sms" in self.can):
                return self._place_refusal(batch.inst) or self._run(batch, sms)
            case _:
                return "never", f"{self.kind.name} cannot do that"
        return None

    def _there(self, model: str, gpu: int) -> bool:
        return model in self.cluster.models and 0 <= gpu < len(self.cluster.gpus)

    def _place_refusal(self, inst: Inst) -> Refusal | None:
        place = inst.place
        if isinstance(place, tuple) and place and all(self._there(inst.model, g) for g in place):
            degree = self.cluster.models[inst.model].tp
            return None if len(place) == degree == len({*place}) else ("never", f"{inst.model} takes {degree} GPUs")
        return "never", f"no {inst.model} on {place}: there are {len(self.cluster.gpus)} GPUs"

    def _admit(self, action: Admit) -> Refusal | None:
        who = action.who
        if isinstance(who, int) and who in self.sent and self.live[who].batch != action.batch:
            return "never", f"request {who} is being served, and its KV does not move"
        if failed := self.admit(action):
            return failed
        if isinstance(who, str):
            self._route(who)
        elif who not in self.sent:
            self._offer(self.live[who])
        return None

    def _run(self, batch: Batch, sms: int | None) -> Refusal | None:
        inst = batch.inst
        assert not isinstance(inst.place, Host)
        if sms is not None and not 0 < sms <= min(self.cluster.gpus[g].sms for g in inst.place):
            return "never", f"GPU {inst.place[0]} has {self.cluster.gpus[inst.place[0]].sms} SMs, not {sms}"
        server = self.fleet.up.get(inst) or self.fleet.asleep.get(inst)
        if self.begun and server is not None and server.sms != sms:
            return "never", f"{self.kind.name} takes its part of the SMs when it starts"
        self.fleet.sms[inst] = sms
        self.lanes.add(batch)
        self._flow(inst)
        return None

    def _limit(self, model: str, gpu: int, kv_bytes: int | None) -> Refusal | None:
        if kv_bytes is not None and kv_bytes < (page := self.cluster.models[model].page_bytes):
            return "never", f"{self.kind.name} takes KV memory by {page} bytes"
        before = self.fleet.limits.get((model, gpu))
        self.fleet.limits[model, gpu] = kv_bytes
        mine = [up for inst, up in self.fleet.up.items() if self.begun and inst.model == model]
        if self.kind.elastic:
            for up in mine:
                self.fleet.resize(up, self.fleet.room(up.inst, sized=True)[0])
        elif any(self.fleet.limit(up.inst) not in {None, up.kv_bytes} for up in mine):
            self.fleet.limits[model, gpu] = before
            return "never", f"{self.kind.name} takes its KV memory when it starts"
        return None

    def _load(self, action: Load) -> Refusal | None:
        inst, up = action.inst, self.fleet.up.get(action.inst)
        if up is None:
            kv_bytes, failed = self.fleet.room(inst, self.begun)  # before the start, limits may follow
            if failed:
                return failed
            up = self.fleet.load(action, kv_bytes)
            if self.begun:
                self.loads += 1
                self.fleet.start(up)
        elif up.weights == "leaving":
            return "not now", f"{inst.model} is leaving"
        elif up.weights == "loading":
            up.asked.append(action)
        else:
            self.tell([Done(action)])
        return None

    def _evict(self, action: Evict) -> Refusal | None:
        up = self.fleet.up.get(action.inst)
        if up is None:
            return "gone", f"{action.inst.model} is not in"
        if up.weights == "leaving":
            return "gone", "it is leaving already"
        if up.weights == "loading":
            return "not now", f"{action.inst.model} is starting"
        self.fleet.evict(up, action)
        self._flow(up.inst)
        return None

    # ------------------------------------------------------------ what came of it

    def rows(self) -> Iterator[pa.RecordBatch]:
        """End the client, and yield the rows of all requests; see Engine."""
        assert self.client is not None
        for request in self.live.values():
            if request.rid not in self.sent:
                self._pass(request, self.now_s)
        self._other_cores = self._other.cores() if self._other is not None else math.nan
        self.log = self.client.log()
        self.fleet.faults += self.log.illegal
        yield from account.batches(
            self._R,
            self._ends,
            self._sent_s,
            self.log,
            self.jobs,
            list(self._places),
            zero_ns=self._zero_ns,
            end_s=self.now_s,
            token_times=self.config.token_times,
        )

    def stats(self) -> dict[str, float]:
        """Return counters of the run; see Engine."""
        return {
            "loads": float(self.loads),
            "evicts": float(self.evicts),
            "faults": float(len(self.fleet.faults)),
            "gpus": float(len(self.cluster.gpus)),
            "span_s": self.config.window_s if math.isfinite(self.config.window_s) else max(0.0, self.now_s),
        }

    def about(self) -> dict[str, Any]:
        """Return the verdict on whether the run measured its servers, and facts about these servers; see Observed."""
        judged = verdict(self.log, self._other_cores, self.behind)
        plain = {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in judged._asdict().items()}
        facts: dict[str, Any] = {
            "verdict": {**plain, "reasons": list(judged.reasons), "text": judged.text, "salt": self.kind.style.salt},
            "served": self.kind.served(),
        }
        failed = self._ends == stamps.NAMES.index("failed")  # those that the policy dropped are not
        if failures := account.failures(compress(account.whole(self.log, self.errors), failed)):
            facts["failures"] = failures
        return facts

    def side(self) -> dict[str, Any]:
        """Return the servers' faults, starts, stops, sleeps and wakes, and the client's own load; see Observed."""
        taken = {"cpu_s": self.log.cpu_s, "wall_s": self.log.wall_s, "peak_bytes": self.log.peak_bytes}
        return {"faults": self.fleet.faults, "servers": self.fleet.about(self._zero_s), "client": taken}

    def files(self) -> Mapping[str, Iterable[bytes]]:
        """Return the client's record of requests and the servers' logs, by file name; see Observed."""

        def client() -> Iterator[bytes]:
            yield account.parquet(account.table(self.log, self._zero_ns, self.errors))

        return {CLIENT: client(), **{f"server-{log.name}": _read(log) for log in self.fleet.logs}}


def _read(log: Path) -> Iterator[bytes]:
    if log.is_file():
        yield log.read_bytes()
