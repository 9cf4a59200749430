"""Measure servers from outside, for `bench calibrate ENGINE`.

    prefill     seconds to the first token of a prompt that is alone on its server
    decode      seconds of a step in which all streams of a server (its open requests) make a token
    beside      seconds of a prefill or a decode step while servers of the same shape do the same at the same time;
                the facts state the median of the first server alone (`alone_s`)
    start,stop  seconds until a server answers, and until it is gone
    sleep,wake  seconds from the order until a server has given its memory back, and until it has its memory again

Each measurement has a separate client, and is a median over its repeats. Each round makes all measurements once.

A try is disturbed if other processes kept more than MOST_OTHERS cores busy during it. The measurement is then tried
again, at most TRIES times in all. If every try was disturbed, the least disturbed one counts. The facts state the cores
that other processes kept busy. A try in which the quantity was not observed is repeated too. If no try observed it, the
measurement is left out.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from harness.client.body import Style
from harness.client.client import Client
from harness.client.load import OtherLoad
from harness.client.log import DONE, Log
from harness.client.verdict import OTHER_CORES
from harness.engines.machine import Config
from harness.engines.servers.fleet import READY_S, SILENT_S, Fleet, Kind, Seat, Sleep, tell
from harness.engines.servers.process import PortTaken
from harness.policy.types import Inst, Jobs, UserError

I8 = NDArray[np.int64]

PROMPTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
HELD_PROMPTS = frozenset({3, 12, 24, 96, 192, 768, 1536})
SEQS = (1, 2, 3, 4, 8, 16, 32, 64)
HELD_SEQS = frozenset({3})
CONTEXTS = (0.02, 0.3, 0.85)  # shares of the longest
HELD_CONTEXT = 1  # the context of a third of the longest is held out with several streams
REPEATS = 5
WARM_UPS = 1  # before the repeats, and not counted
STEPS = 24  # tokens of a stream
BESIDE = (2, 4)  # servers side by side
ROUNDS = 3  # times that the plan is measured, as a host that others share changes its speed within minutes
TRIES = 3
MOST_OTHERS = OTHER_CORES  # as in a run's verdict
LEAD_NS = 20_000_000  # from the order to begin to the client's time 0


class Wanted(NamedTuple):
    """A measurement to be made: its quantity, its settings and its round."""

    quantity: str
    at: Mapping[str, int | str | bool]
    source: str = ""

    @property
    def text(self) -> str:
        """The measurement in words, on one line."""
        parts = [f"{name} {value}" for name, value in self.at.items() if value]
        return f"{self.quantity} " + ", ".join([*parts, self.source] if self.source else parts)


class Timing(NamedTuple):
    """The seconds of each repeat of a measurement, and facts about it. `seconds` is empty if none were observed."""

    seconds: list[float]
    facts: Mapping[str, Any] = {}
    why: str = ""  # nothing was seen; "" if something was


class Unseen(Exception):
    """The error of a measurement whose quantity was not observed."""


class Subject(NamedTuple):
    """The servers to measure, and the settings of their measurements."""

    servers: Mapping[str, Sequence[Inst]]  # keyed by their shape's name; of each as many as BESIDE needs
    seat: Callable[[Inst, Path], Seat]
    roots: Callable[[], Sequence[int]]  # processes of servers that are not ours
    style: Style
    slots: int  # requests that a server steps together
    most: int  # tokens of a step, and of a prompt
    about: Mapping[str, str]  # machine and versions
    sleeps: Mapping[str, Sleep] = {}  # keyed by way, as Kind has them


def subject(kind: Kind, config: Config, about: Mapping[str, str]) -> Subject:
    """Return the servers of a kind, and the settings with which they are measured.

    Each server starts with the KV memory that it would take if the whole GPU were free.
    """
    servers: dict[str, list[Inst]] = {}
    for model in config.models:
        servers.setdefault(model.shape.name, []).append(Inst(model.name, (0,)))
    longest = min(model.max_tokens for model in kind.cluster.models.values())
    most = min(config.chunk_tokens or config.prefill_tokens, longest - 1)
    fleet, room = Fleet(kind), kind.cluster.gpus[0].mem_bytes

    def seat(inst: Inst, log: Path) -> Seat:
        return kind.seat(inst, fleet.kv_bytes(inst, room), log, None)

    return Subject(servers, seat, kind.roots, kind.style, config.batch_cap, most, dict(about), kind.sleeps)


def plan(subject: Subject, rounds: int = ROUNDS) -> list[Wanted]:
    """List every measurement in order, shape by shape, with single servers first; repeat the list for each round."""
    each, most = list[Wanted](), subject.most
    seqs = [n for n in SEQS if n <= subject.slots]
    prompts = sorted({*(p for p in PROMPTS if p < most), most})
    contexts = [max(1, int(share * (most - STEPS))) for share in CONTEXTS]
    for shape in subject.servers:
        each += [Wanted("start", {"shape": shape}), Wanted("stop", {"shape": shape})]
        each += [Wanted(what, {"shape": shape, "way": way}) for way in subject.sleeps for what in ("sleep", "wake")]
        each += [Wanted("prefill", {"shape": shape, "tokens": p, "held": p in HELD_PROMPTS}) for p in prompts]
        for n in seqs:
            for k, ctx in enumerate(contexts):
                held = n in HELD_SEQS or (k == HELD_CONTEXT and n > 1)
                each.append(Wanted("decode", {"shape": shape, "seqs": n, "ctx": ctx, "held": held}))
        for k in BESIDE:
            for tokens in sorted({max(1, most // 16), max(1, most // 4)}):
                each.append(Wanted("beside", {"shape": shape, "servers": k, "tokens": tokens, "seqs": 0, "ctx": 0}))
            for n in sorted({1, seqs[-1]}):
                ctx = contexts[0]
                each.append(Wanted("beside", {"shape": shape, "servers": k, "tokens": 0, "seqs": n, "ctx": ctx}))
    return [wanted._replace(source=f"round {k}") for k in range(1, rounds + 1) for wanted in each]


class Rig:
    """The servers of a subject during the measurements; each server is started when a measurement first needs it."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self._subject, self._logs = subject, folder / "logs"
        self._up: dict[Inst, Seat] = {}
        self._sent = 0
        self._ends: dict[str, float] = {}  # seconds of a stop or a wake that was measured with its beginning
        self.about = subject.about

    def plan(self, rounds: int = ROUNDS) -> list[Wanted]:
        """List every measurement that these servers allow, in order."""
        return plan(self._subject, rounds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for inst in list(self._up):
            self._stop(inst)

    def measured(self, wanted: Wanted) -> Timing:
        """Make a measurement, and return its seconds.

        The result has no seconds if these servers do not allow the measurement, or if the quantity was not observed in
        any try. In the second case, the result's `why` states the reason.
        """
        best, others, tries, why = Timing([]), math.inf, 0, ""
        while tries < TRIES:
            tries += 1
            self._prepare(wanted)
            load = OtherLoad([os.getpid(), *self._subject.roots()])
            try:
                got = self._take(wanted)
            except Unseen as unseen:
                why = str(unseen)
                continue
            if got is None:
                return Timing([])
            again = load.cores()
            if again < others:
                best, others = Timing(*got), again
            if others <= MOST_OTHERS:
                break
        if not best.seconds:
            return Timing([], why=why)
        facts = {**best.facts, "other_cores": round(others, 3), "tries": tries}
        return Timing([round(s, 9) for s in best.seconds], facts)

    def _prepare(self, wanted: Wanted) -> None:
        """Start the servers that a measurement needs and stop all others, before the timing begins."""
        count = 0 if wanted.quantity in {"start", "stop"} else int(wanted.at.get("servers", 1))
        needed = self._subject.servers[str(wanted.at["shape"])][:count]
        for inst in [inst for inst in self._up if inst not in needed]:
            self._stop(inst)
        for inst in needed:
            if inst not in self._up:
                self._start(inst)

    def _take(self, wanted: Wanted) -> tuple[list[float], dict[str, Any]] | None:
        shape = str(wanted.at["shape"])
        every = self._subject.servers[shape]
        first = every[0]
        number = {name: int(value) for name, value in wanted.at.items() if name not in {"shape", "way"}}
        match wanted.quantity:
            case "start" | "stop" | "sleep" | "wake":
                span_s = self._span(wanted, first)
                return None if span_s is None else ([span_s], {})
            case "prefill":
                return self._prefills([first], number["tokens"]), {}
            case "decode":
                seconds, ctx = self._decodes([first], number["seqs"], number["ctx"])
                return seconds, {"ctx_tokens": ctx}
        both = [first], every[: number["servers"]]
        if number["tokens"]:
            alone, beside = (self._prefills(insts, number["tokens"]) for insts in both)
        else:
            alone, beside = (self._decodes(insts, number["seqs"], number["ctx"])[0] for insts in both)
        return beside, {"alone_s": float(np.median(alone))}

    # ------------------------------------------------------------ servers

    def _start(self, inst: Inst, tries: int = TRIES) -> float | None:
        """Start a server and return the seconds until it answers; None if the server is not ours and runs already."""
        seat = self._up[inst] = self._subject.seat(inst, self._logs / f"{inst.model.replace('/', '-')}.log")
        if seat.process is None:
            return None
        begun_s = time.monotonic()
        seat.process.start()
        try:
            seat.process.wait_ready(READY_S)
        except PortTaken:
            if tries == 1:
                raise
            return self._start(inst, tries - 1)
        return time.monotonic() - begun_s

    def _stop(self, inst: Inst) -> float:
        process, begun_s = self._up.pop(inst).process, time.monotonic()
        if process is not None:
            process.stop()
        return time.monotonic() - begun_s

    def _span(self, wanted: Wanted, inst: Inst) -> float | None:
        """Return the seconds of a start, a stop, a sleep or a wake; None if we did not start the server.

        A stop is measured together with a start, and a wake together with a sleep.
        """
        begin, end = ("sleep", "wake") if "way" in wanted.at else ("start", "stop")
        if wanted.quantity == end and end in self._ends:
            return self._ends.pop(end)
        pair = self._cycle(inst) if begin == "start" else self._nap(inst, str(wanted.at["way"]))
        if pair is None:
            return None
        if wanted.quantity == end:
            return pair[1]
        self._ends[end] = pair[1]
        return pair[0]

    def _cycle(self, inst: Inst) -> tuple[float, float] | None:
        start_s = self._start(inst)
        stop_s = self._stop(inst)
        return None if start_s is None else (start_s, stop_s)

    def _nap(self, inst: Inst, way: str) -> tuple[float, float] | None:
        """Put a server to sleep and wake it, and return the seconds of each; None if we did not start the server."""
        process, sleep = self._up[inst].process, self._subject.sleeps[way]
        if process is None:
            return None
        begun_s = time.monotonic()
        tell(process, sleep.down)
        asleep_s = time.monotonic()
        tell(process, sleep.up)
        return asleep_s - begun_s, time.monotonic() - asleep_s

    # ------------------------------------------------------------ requests

    def _prefills(self, insts: Sequence[Inst], tokens: int) -> list[float]:
        """Return the seconds to the first token of prompts.

        Each server gets its prompts one after the other, and all servers work at the same time.
        """
        rounds = WARM_UPS + REPEATS
        log = self._log([(tokens, 1)] * (rounds * len(insts)), insts, rounds)
        return [float(s) for s in 1e-9 * (log.first_ns - log.write_ns)[WARM_UPS * len(insts) :]]

    def _decodes(self, insts: Sequence[Inst], seqs: int, ctx: int) -> tuple[list[float], float]:
        """Return the seconds of decode steps while all streams of all servers decode.

        Return also the median context tokens of one server in these steps, summed over its streams.
        """
        log = self._log([(ctx, STEPS)] * (seqs * len(insts)), insts, 1)
        streams = np.split(log.chunk_ns, log.offsets[1:-1])
        counts = [np.cumsum(tokens, dtype=np.int64) for tokens in np.split(log.chunk_tokens, log.offsets[1:-1])]
        since_ns, until_ns = max(int(ns[0]) for ns in streams), min(int(ns[-1]) for ns in streams)
        steps, contexts = list[float](), list[float]()
        for k in range(len(insts)):
            mine = range(k, len(streams), len(insts))
            last = max(mine, key=lambda i: int(streams[i][0]))
            ns, made = streams[last].tolist(), counts[last].tolist()
            for a, b, tokens in zip(ns[:-1], ns[1:], np.diff(made).tolist(), strict=True):
                if a >= since_ns and b <= until_ns and b > a:
                    steps.append(1e-9 * (b - a) / tokens)
                    contexts.append(sum(ctx + _made(streams[i], counts[i], a) for i in mine))
        if not steps:
            raise Unseen(_why_unseen(len(insts), seqs))
        return steps, float(np.median(contexts))

    def _log(self, sizes: Sequence[tuple[int, int]], insts: Sequence[Inst], rounds: int) -> Log:
        """Send a request for each item of `sizes` to the servers in turn, and return the client's log.

        An item is a request's numbers of prompt and output tokens. The requests are sent in `rounds` groups; each group
        is sent after all requests of the group before have ended. Raises UserError if a request fails, or if its output
        has another number of tokens.
        """
        models, n = tuple(inst.model for inst in insts), len(sizes)
        prompt, output = np.array(sizes, np.int32).T
        never = np.full(n, np.inf)
        jobs = Jobs(models, np.zeros(n), np.arange(n, dtype=np.int32) % len(insts), prompt, output, never, never)
        self._sent += 1  # other prompts each time: a server that is not ours may have a cache of prefixes
        with Client(jobs, seed=self._sent, timeout_s=SILENT_S, style=self._subject.style) as client:
            client.begin(time.monotonic_ns() + LEAD_NS)
            for batch in np.split(np.arange(n), rounds):
                for rid in batch.tolist():
                    client.send(rid, self._up[insts[rid % len(insts)]].at)
                _wait(client, set(batch.tolist()))
            log = client.log()
        bad = np.flatnonzero((log.state != DONE) | (log.tokens != output))
        if len(bad):
            rid = int(bad[0])
            why = log.error[rid] or f"{log.tokens[rid]} tokens came of {output[rid]}"
            raise UserError(f"{models[rid % len(models)]}: a request of {prompt[rid]} tokens failed: {why}")
        return log


def _why_unseen(servers: int, seqs: int) -> str:
    """Explain in words why there was no step in which all streams made a token.

    The explanation depends on the numbers of servers and of streams.
    """
    if servers * seqs == 1:
        return "all tokens of its request came at once: the client was kept from reading, or the server is too fast"
    where = f"{servers} servers with a request each" if seqs == 1 else f"{seqs} requests of a server"
    if servers > 1 and seqs > 1:
        where = f"{servers} servers with {seqs} requests each"
    return f"{where} were never all decoding at one time: some ended before others began (a busy machine, few slots)"


def _wait(client: Client, rids: set[int]) -> None:
    """Wait until the requests `rids` have all ended."""
    while rids:
        rids -= {told.rid for told in client.poll(SILENT_S) if told.kind in {"done", "failed", "dropped"}}


def _made(ns: I8, tokens: I8, at_ns: int) -> int:
    """Return the number of tokens of a stream that had come by the time `at_ns`."""
    k = int(np.searchsorted(ns, at_ns, "right"))
    return int(tokens[k - 1]) if k else 0
