"""A recorded run as trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing can open.

The format is that of the Trace Event document. `X` is a slice of a track. `b` and `e` are the ends of a slice that may
overlap others. `C` is a counter, and `M` names a track. Each GPU is shown as a process. It has a track for each lane,
for the turns of each lane, and for each of the GPU's links. It also has slices of the loads and moves to the GPU, and
counters of its memory. If its lanes have partitions, it has counters of their SMs too. Requests are slices by model,
with their parts inside. Time 0 is the start of the warm-up.

Decode steps that are simulated together are one slice, with the number of steps in `args`. Waits between similar steps
of a request are joined into one slice, with their seconds by cause. Memory that such a span reserves for its later
steps counts as used. A system without a memory limit (`memory=unlimited`) may exceed the GPU's memory.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from harness.engines.sim.trace import Trace, Transfer, link_of
from harness.policy.types import GIB, Batch, Host
from harness.run.retrace import every

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

Event = dict[str, Any]
REQUESTS = 1  # process of all requests; GPUs and hosts follow
FIRST_GPU = 2
STAGES = ("waits for memory", "on its links", "its last seconds")  # phases of a transfer; a stamp ends each


class Tracks:
    """Processes and threads, numbered in the order in which their names are first used."""

    def __init__(self, start_s: float, gpus: int) -> None:
        self._start_ns, self._gpus = round(start_s * 1e9), gpus
        self._threads: dict[tuple[int, str], int] = {}
        self._processes: dict[int, str] = {}

    def us(self, at_s: float) -> float:
        """Return the microseconds from the run's start to a time in s, rounded to nanoseconds."""
        return self.us_of(round(at_s * 1e9))

    def us_of(self, at_ns: int) -> float:
        """Return the microseconds from the run's start to a time in ns."""
        return (at_ns - self._start_ns) / 1000

    def process(self, home: int | Host | None) -> int:
        """Return the process id of a GPU, of a host, or (None) of the requests."""
        if home is None:
            process, name = REQUESTS, "requests"
        elif isinstance(home, Host):
            process, name = FIRST_GPU + self._gpus + home.node, f"host {home.node}"
        else:
            process, name = FIRST_GPU + home, f"GPU {home}"
        self._processes.setdefault(process, name)
        return process

    def thread(self, home: int | Host, name: str) -> dict[str, int]:
        """Return the process and thread ids of a track."""
        process = self.process(home)
        thread = self._threads.setdefault((process, name), len(self._threads) + 1)
        return {"pid": process, "tid": thread}

    def slice(self, at: Mapping[str, int], name: str, start_s: float, end_s: float, **args: Any) -> Event:
        """Return an event for a slice with a start and an end on a track."""
        start_us = self.us(start_s)
        dur_us = round(self.us(end_s) - start_us, 3)
        return {"ph": "X", **at, "name": name, "cat": "run", "ts": start_us, "dur": dur_us, "args": args}

    def names(self) -> Iterator[Event]:
        """Yield the metadata: names of processes and threads, and their order."""
        for process, name in sorted(self._processes.items()):
            yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
            yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
        for (process, name), thread in self._threads.items():
            yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}


def events(trace: Trace, stored: pa.Table) -> list[Event]:
    """List all events of a run whose rows are `stored`: names of tracks, then the rest in order of time."""
    tracks = Tracks(trace.start_s, len(trace.gpu_bytes))
    rest = [
        *_lanes(trace, tracks),
        *_links(trace, tracks),
        *_transfers(trace, tracks),
        *_memory(trace, tracks),
        *_partitions(trace, tracks),
        *_requests(trace, stored, tracks),
    ]
    rest.sort(key=lambda event: event["ts"])  # stable: an end stands before a beginning at the same instant
    return [*tracks.names(), *rest]


def lane(batch: Batch, phase: str) -> str:
    """Return the name of a lane: its model, the tag of its batch unless that is the model's first, and its phase."""
    tag = f" batch {batch.tag}" if batch.tag else ""
    return f"{batch.inst.model}{tag} {phase}"


def _lanes(trace: Trace, tracks: Tracks) -> Iterator[Event]:
    for step in sorted(trace.steps, key=lambda s: s.start_s):
        kind = "decode" if step.decode_lane else "prompts"
        name = f"{step.phase} {step.tokens} tokens" if step.prompts else f"decode {step.decodes} x {step.steps}"
        args: Event = {"steps": step.steps, "decodes": step.decodes}
        args |= {"prompts": step.prompts, "prompt_tokens": step.tokens}
        args |= {"alone_ms": round(1e3 * step.solo_s, 6), "sms": step.sms if step.sms >= 0 else trace.sms}
        for gpu in _gpus(step.batch):
            yield tracks.slice(tracks.thread(gpu, lane(step.batch, kind)), name, step.start_s, step.end_s, **args)
    for turn in sorted(trace.turns, key=lambda t: t.start_s):
        for gpu in _gpus(turn.batch):
            at = tracks.thread(gpu, f"{lane(turn.batch, turn.phase)} turns")
            yield tracks.slice(at, f"turn of {turn.batch.inst.model}", turn.start_s, turn.end_s, steps=turn.steps)


def _gpus(batch: Batch) -> tuple[int, ...]:
    place = batch.inst.place
    return () if isinstance(place, Host) else place


def _links(trace: Trace, tracks: Tracks) -> Iterator[Event]:
    for carriage in sorted(trace.carried, key=lambda x: x.start_s):
        home, name = link_of(carriage.link, len(trace.gpu_bytes))
        what = trace.transfers[carriage.transfer]
        at = tracks.thread(home, f"link {name}")
        yield tracks.slice(at, _title(what), carriage.start_s, carriage.end_s, **_facts(what))


def _title(transfer: Transfer) -> str:
    return f"{transfer.kind} {transfer.model}"


def _facts(transfer: Transfer) -> dict[str, Any]:
    request = {"request": transfer.request} if transfer.request >= 0 else {}
    return {"model": transfer.model, "gib": round(transfer.size_bytes / GIB, 6), "to": _place(transfer.to), **request}


def _place(home: Any) -> str:
    return f"host {home.node}" if isinstance(home, Host) else "gpu " + "+".join(map(str, home))


def _transfers(trace: Trace, tracks: Tracks) -> Iterator[Event]:
    """Yield the events of loads and moves, each from the time when the policy asked for it.

    A transfer has three stages: it waits for memory, is copied over links, and takes fixed seconds.
    """
    for number, transfer in enumerate(trace.transfers):
        home: int | Host | None = transfer.to if isinstance(transfer.to, Host) else transfer.to[0]
        common = {"pid": tracks.process(home), "tid": 0, "cat": "transfer", "id": f"t{number}"}
        stamps = [transfer.asked_s, transfer.granted_s, transfer.moved_s, transfer.end_s]
        end_s = trace.end_s if math.isnan(transfer.end_s) else transfer.end_s
        times = [tracks.us(end_s if math.isnan(x) else x) for x in stamps]
        title = {**common, "name": _title(transfer)}
        yield {**title, "ph": "b", "ts": times[0], "args": {**_facts(transfer), "done": transfer.done}}
        for name, a, b in zip(STAGES, times[:-1], times[1:], strict=True):
            if b > a:
                yield {**common, "name": name, "ph": "b", "ts": a, "args": {}}
                yield {**common, "name": name, "ph": "e", "ts": b, "args": {}}
        yield {**title, "ph": "e", "ts": times[3], "args": {}}


def _memory(trace: Trace, tracks: Tracks) -> Iterator[Event]:
    for sample in trace.memory:
        values = {"weights": sample.weights_bytes / GIB, "KV": sample.kv_bytes / GIB}
        yield _counter(tracks, sample.gpu, "memory GiB", sample.at_s, values)


def _counter(tracks: Tracks, gpu: int, name: str, at_s: float, values: Mapping[str, float]) -> Event:
    return {"ph": "C", "pid": tracks.process(gpu), "tid": 0, "name": name, "ts": tracks.us(at_s), "args": dict(values)}


def _partitions(trace: Trace, tracks: Tracks) -> Iterator[Event]:
    """Yield the SMs of each running lane over time, on GPUs where some lane has a partition."""
    changes: dict[int, list[tuple[float, int, str, int]]] = {}  # keyed by GPU: time, ends before begins, lane, SMs
    for step in trace.steps:
        name = lane(step.batch, "decode" if step.decode_lane else "prompts")
        for gpu in _gpus(step.batch):
            sms = step.sms if step.sms >= 0 else trace.sms
            changes.setdefault(gpu, []).extend([(step.start_s, 1, name, sms), (step.end_s, 0, name, 0)])
    parted = {gpu for step in trace.steps if step.sms >= 0 for gpu in _gpus(step.batch)}
    for gpu in sorted(parted):
        now: dict[str, float] = dict.fromkeys(sorted({name for _, _, name, _ in changes[gpu]}), 0.0)
        counts: dict[str, float] = {}
        rows = sorted(changes[gpu])
        for i, (at_s, _, name, sms) in enumerate(rows):
            now[name] = float(sms)
            if (i + 1 == len(rows) or rows[i + 1][0] > at_s) and now != counts:
                counts = dict(now)
                yield _counter(tracks, gpu, "SMs", at_s, counts)


def _requests(trace: Trace, stored: pa.Table, tracks: Tracks) -> Iterator[Event]:
    for row, parts in every(trace, stored):
        if not parts:
            continue
        common = {"pid": tracks.process(None), "tid": 0, "cat": "request", "id": f"r{row['id']}"}
        whole = {**common, "name": row["model"]}
        facts = ("state", "prompt_tokens", "output_tokens")
        args = {"request": row["id"], **{name: row[name] for name in facts}}
        yield {**whole, "ph": "b", "ts": tracks.us_of(parts[0].start_ns), "args": args}
        for part in parts:
            ms = {f"{cause}_ms": ns / 1e6 for cause, ns in part.ns.items()}
            gaps = {"waits_between_steps": part.gaps} if part.gaps else {}
            slice_ = {**common, "name": part.doing}
            yield {**slice_, "ph": "b", "ts": tracks.us_of(part.start_ns), "args": {**ms, **gaps}}
            yield {**slice_, "ph": "e", "ts": tracks.us_of(part.end_ns), "args": {}}
        yield {**whole, "ph": "e", "ts": tracks.us_of(parts[-1].end_ns), "args": {}}


def document(events: Iterable[Event], about: Mapping[str, Any], path: Path) -> bytes:
    """Return the bytes of a trace file, gzipped if `path` ends in .gz; equal events give equal bytes."""
    head = json.dumps({"displayTimeUnit": "ms", "otherData": dict(about)}, sort_keys=True)
    lines = ",\n".join(json.dumps(event, separators=(",", ":"), allow_nan=False) for event in events)
    text = f'{head[:-1]}, "traceEvents": [\n{lines}\n]}}\n'.encode()
    return gzip.compress(text, mtime=0) if path.suffix == ".gz" else text
