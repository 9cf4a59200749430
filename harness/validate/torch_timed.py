"""Timing of the torch engine for `bench calibrate torch`: rows of scripted runs in real time.

    prefill    seconds of a step that prefills one prompt
    decode     seconds from one decode step to the next, which include the engine's own time
    kernels    seconds of the kernels of such steps, run back to back on a card without the engine's own time
    beside     seconds of prefills or decode steps of several models on one device, and of one model alone
    load       seconds of a `Load` by each way of loading, one of which starts a process

Each model has a process of its own. A second call on the same folder resumes: it does not repeat runs that have rows in
the folder's journal. If other processes kept more than MOST_OTHERS cores busy during a run, the run is tried again, up
to TRIES times in all. The last try is kept, and its rows say how many cores the others kept busy.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from harness.calibrate.rows import RAW, Journal, Measurement, measured, of
from harness.calibrate.torch import ABOUT, MOST_OTHERS, Card, link_gbps
from harness.engines.machine import Config, Served
from harness.engines.torch import kind, nets
from harness.engines.torch.engine import Torch
from harness.engines.torch.kind import WAYS, Way
from harness.engines.torch.lanes import TimedStep
from harness.engines.torch.processes import Nursery, WorkerProcess
from harness.engines.torch.setting import Fields, rates
from harness.engines.torch.wire import send_files
from harness.engines.wallclock import machine_facts
from harness.loop.interrupted import terminable
from harness.loop.replay import replay
from harness.policy.actions import Action, Admit, Drop, Evict, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Finished, Prefilled, TurnEnded, Woke
from harness.policy.types import GIB, Batch, Inst, Jobs, Option, Shape, UserError
from harness.policy.view import View
from harness.validate import names

PROMPTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
HELD_PROMPTS = frozenset({8, 128})
SEQS = (1, 2, 4, 8, 16, 32)
HELD_SEQS = frozenset({4})
CONTEXTS = (16, 128, 512, 1000)
KERNELS, AGAIN = ((1, 256, 1), (1, 128, 4), (8, 128, 4), (32, 128, 4)), 5  # sequences, context, output; times
BESIDE = (2, 4)  # models side by side
ROOM = 1.15  # least ratio of a device's bytes to those of the weights on it, which leaves room for KV
BESIDE_PROMPT, BESIDE_SEQS = 256, (1, 8)
REPEATS, OUTPUT = 5, 20
STARTS = 3
TRIES = 3
MOST_BYTES = 40 * GIB  # a card gives no more to weights and KV

QUICK = (Way(), Way(spread=True))  # loads that are repeated

Script = Generator[Iterable[Action], Event, None]


class Scripted:
    """A policy that follows a script: a generator that receives events and yields actions."""

    hears = frozenset({Woke, Arrived, Prefilled, Finished, TurnEnded, Done, Load, Evict, Move})

    def __init__(self, script: Script, uses: Iterable[str], options: Mapping[str, Option]) -> None:
        self.uses, self.options = frozenset(uses), options
        self._script: Script | None = script
        next(script)

    def on(self, event: Event, view: View) -> Iterable[Action]:  # noqa: ARG002 - scripts look at the engine
        """Send the event to the script, and return the actions that it yields."""
        if self._script is None:
            return ()
        try:
            return list(self._script.send(event))
        except StopIteration:
            self._script = None
            return ()


def jobs(models: tuple[str, ...], each: Iterable[tuple[int, int, int]]) -> Jobs:
    """Return requests that all arrive at the start; each is given as (index of its model, prompt, output tokens)."""
    model, prompt, output = np.array(list(each), np.int32).reshape(-1, 3).T.copy()
    none = np.full(len(model), np.inf)
    return Jobs(models, np.zeros(len(model)), model, prompt, output, none, none)


def wait(event_type: type, actions: Iterable[Action] = (), count: int = 1) -> Generator[Iterable[Action], Event, Any]:
    """Yield the actions, then wait for `count` events of a type; return the last one."""
    event = yield actions
    while True:
        count -= isinstance(event, event_type)
        if not count:
            return event
        event = yield ()


class Bench:
    """Measurements in the journal of a folder; `measure` does a run only if the journal lacks it."""

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, Shape],
        say: Callable[[str], None],
        fields: Fields,
        given: Mapping[str, Any],
    ) -> None:
        self.shapes, self.say, self.fields, self.given = shapes, say, fields, dict(given)
        self.book = Journal(folder / RAW)
        if other := next((w for row in self.book.rows if (w := row.facts["wide"]) != fields.wide), None):
            raise UserError(
                f"{self.book.path} is of networks with wide={other}; take another folder for wide={fields.wide}"
            )

    def measure(self, run: str, made: Callable[[], tuple[list[Measurement], float]]) -> None:
        """Do a run and write its rows to the journal, unless the journal has them already."""
        if any(row.source == run for row in self.book.rows):
            return
        with terminable():
            for left in reversed(range(TRIES)):
                rows, others = made()
                if others <= MOST_OTHERS or not left:
                    break
        about = {"wide": self.fields.wide, "other_cores": others}
        self.book.add(*(row._replace(source=run, facts={**row.facts, **about}) for row in rows))
        self.say(f"{run}: {len(rows)} measurements")

    def config(self, models: Iterable[str], of: str) -> Config:
        """Return the configuration of a device with `models`, which all have the shape named `of`."""
        return Config(tuple(Served(m, self.shapes[of]) for m in models), watermark=0.0, **self.given)


def ran(
    bench: Bench,
    config: Config,
    options: Mapping[str, Option],
    uses: Iterable[str],
    work: Jobs,
    script: Callable[[Torch], Script],
    repeat: int = 0,
) -> tuple[Torch, list[TimedStep], float]:
    """Run a script on a new engine; return the engine, its steps, and the cores that other processes kept busy."""
    engine = Torch(config, options, bench.fields)
    engine.repeat = repeat
    watched = engine.timed_steps = list[TimedStep]()
    try:
        replay(Scripted(script(engine), uses, options), engine, work)
        others = float(engine.stats()["other_cores"])
    finally:
        engine.close()
    return engine, watched, others


def measure(
    folder: Path, shapes: Mapping[str, Shape], say: Callable[[str], None], fields: Fields, given: Mapping[str, Any]
) -> list[Measurement]:
    """Make the measurements that a folder lacks, for each shape; return all rows of the folder's journal.

    On a card, the engine uses the card's own link rates, and the file `ABOUT` in the folder describes the card. On
    CPUs, the engine uses the rates of `link_gbps`. Calls that map pages on a card are timed by the probe, not here.
    """
    if os.environ.get("DEVICE") == "cuda" and "gpu" not in given and (cards := kind.cards()):
        given = {**given, "gpu": names.gpu(cards[0])}
    bench = Bench(folder, shapes, say, fields, given)
    on = kind.kind(bench.config([], ""))
    if on.name == "cuda":
        bench.given["pool_bytes"] = min(MOST_BYTES, on.mem_bytes)
        gpu, facts = bench.config([], "").gpu, machine_facts("torch")
        about = Card(gpu, on.on, bench.given["pool_bytes"], on.sms, on.links, facts)
        (folder / ABOUT).write_text(json.dumps(about._asdict(), indent=1) + "\n", "utf-8")
    for name in shapes:
        bench.measure(f"steps of {name}", partial(steps, bench, name))
        if on.name == "cuda":
            bench.measure(f"kernels of {name}", partial(kernels, bench, name))
    bench.given |= link_gbps(bench.book.rows, shapes, fields.wide) if on.name == "cpu" else {}
    gbps = rates(bench.config([], ""), on)["h2d"]
    for name in shapes:
        bench.measure(f"side by side {name}", partial(side_by_side, bench, name))
        bench.measure(f"loads of {name} at {gbps:g} GB/s", partial(loads, bench, name))
    return bench.book.rows


# ------------------------------------------------------------------ steps


def steps(bench: Bench, name: str) -> tuple[list[Measurement], float]:
    """Time prefills and decode steps of a model alone, one group of requests after another."""
    groups = [(1, prompt, 1) for prompt in PROMPTS for _ in range(REPEATS + 1)]
    groups += [(seqs, ctx, OUTPUT) for seqs in SEQS for ctx in CONTEXTS]
    watched, others = grouped(bench, name, groups)

    prefills = defaultdict[int, list[float]](list)
    decodes = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for step, after in pairwise([*watched, TimedStep("", (), 0.0, 0.0)]):
        (start, tokens), took_s = step.parts[0], step.ended_s - step.ordered_s
        if start == 0 and len(step.parts) == 1:
            prefills[tokens].append(took_s)
        elif [a + 1 for a, _ in step.parts] == [a for a, _ in after.parts]:
            ctx = sum(a + 1 for a, _ in step.parts)
            longest = max(c for c in CONTEXTS if c <= ctx / len(step.parts))
            decodes[len(step.parts), longest].append((ctx, after.ordered_s - step.ordered_s))
    timed = [
        measured("prefill", {"shape": name, "tokens": tokens, "held": tokens in HELD_PROMPTS}, took[1:] or took)
        for tokens, took in prefills.items()
        if tokens in PROMPTS
    ]
    for (seqs, ctx), pairs in decodes.items():
        params = {"shape": name, "seqs": seqs, "ctx": ctx, "held": seqs in HELD_SEQS}
        ctx_tokens = float(np.median([tokens for tokens, _ in pairs]))
        timed.append(measured("decode", params, [took for _, took in pairs], ctx_tokens=ctx_tokens))
    return timed, others


def grouped(
    bench: Bench, name: str, groups: Sequence[tuple[int, int, int]], repeat: int = 0
) -> tuple[list[TimedStep], float]:
    """Serve groups of requests of a model alone, one group after another.

    A group is (requests, prompt tokens of each, output tokens of each). Return the steps, and the cores that other
    processes kept busy.
    """
    batch = Batch(Inst(name, (0,)))

    def script(_engine: Torch) -> Script:
        yield from wait(Woke)
        yield from wait(Arrived, [Load(batch.inst), Run(batch)], sum(seqs for seqs, *_ in groups))
        rid = 0
        for seqs, *_ in groups:
            yield from wait(Finished, [Admit(rid + k, batch) for k in range(seqs)], seqs)
            rid += seqs

    each = [(0, prompt, output) for seqs, prompt, output in groups for _ in range(seqs)]
    uses, options = ("Load", "Run", "Admit"), {"kv": "paged", "process": "gpu"}
    _, watched, others = ran(bench, bench.config([name], name), options, uses, jobs((name,), each), script, repeat)
    return watched, others


def kernels(bench: Bench, name: str) -> tuple[list[Measurement], float]:
    """Time the kernels of a prefill and of decode steps, run back to back without the rest of the step.

    Each row also has the seconds of the whole step, as `steps` timed it.
    """
    watched, others = grouped(bench, name, KERNELS, AGAIN)
    timed = []
    for seqs, ctx, output in KERNELS:
        what, at = ("prefill", {"tokens": ctx}) if output == 1 else ("decode", {"seqs": seqs, "ctx": ctx})
        rows = seqs, ctx if output == 1 else 1  # rows of a step, and tokens of each
        took = [w.kernels_s for w in watched if w.kernels_s and (len(w.parts), w.parts[0][1]) == rows]
        (step,) = of(bench.book.rows, what, shape=name, **at)
        timed.append(measured("kernels", {"shape": name, "phase": what, **at}, took, step_s=step.seconds))
    return timed, others


def side_by_side(bench: Bench, name: str) -> tuple[list[Measurement], float]:
    """Time steps of models of one shape that share a device, each model in a process of its own.

    First one model is timed alone. Then ever more models run at once, as long as their weights fit.
    """
    config = bench.config([name], name)
    on = kind.kind(config)
    size = nets.net(bench.shapes[name], on.as_it_is, on.float_bytes, bench.fields.wide).weight_bytes
    counts = [1, *(count for count in BESIDE if count * size * ROOM <= (config.pool_bytes or on.mem_bytes))]
    models = tuple(f"{name}/{k + 1}" for k in range(counts[-1]))
    batches = [Batch(Inst(m, (0,))) for m in models]
    each = list[tuple[int, int, int]]()
    plan = dict[tuple[int, int], list[list[int]]]()  # requests, a list a model, keyed by count and sequences
    for count, seqs in product(counts, (0, *BESIDE_SEQS)):  # prefills come one by one, decodes all at once
        n, (prompt, output) = seqs or 3 * REPEATS, (CONTEXTS[1], 2 * OUTPUT) if seqs else (BESIDE_PROMPT, 1)
        first = len(each)
        plan[count, seqs] = [list(range(first + k * n, first + (k + 1) * n)) for k in range(count)]
        each += [(k, prompt, output) for k in range(count) for _ in range(n)]
    begun = dict[int, int]()  # steps done before each count began

    def script(engine: Torch) -> Script:
        assert engine.timed_steps is not None
        yield from wait(Woke)
        yield from wait(Arrived, (), len(each))
        for (count, seqs), lists in plan.items():
            start: list[Action] = []
            if count not in begun:
                begun[count] = len(engine.timed_steps)
                fresh = batches[max((c for c in counts if c < count), default=0) : count]
                yield from wait(Done, [Load(batch.inst) for batch in fresh], len(fresh))
                start = [Run(batch) for batch in fresh]
            queues = [list(rids) for rids in lists]
            left, at_once = sum(map(len, queues)), seqs or 1
            answer = [*start, *(Admit(q.pop(0), batches[k]) for k, q in enumerate(queues) for _ in range(at_once))]
            while left:
                event = yield from wait(Finished, answer)
                left -= 1
                queue = queues[batches.index(event.batch)]
                answer = [Admit(queue.pop(0), event.batch)] if queue else []

    config, work = bench.config(models, name), jobs(models, each)
    _, watched, others = ran(bench, config, {"kv": "paged"}, ("Load", "Run", "Admit"), work, script)
    timed, alone, ends = list[Measurement](), dict[int, float](), [*list(begun.values())[1:], len(watched)]
    for (count, first), end in zip(begun.items(), ends, strict=True):
        for seqs in (0, *BESIDE_SEQS):
            took = _together(watched[first:end], models[:count], seqs)
            if count == 1:
                alone[seqs] = float(np.median(took))
            else:
                params = {"shape": name, "servers": count, "seqs": seqs}
                timed.append(measured("beside", params, took, alone_s=alone[seqs]))
    return timed, others


def _together(watched: Iterable[TimedStep], models: Iterable[str], seqs: int) -> list[float]:
    """Return the seconds of steps that ran within the time during which all models ran such steps.

    Such steps are decode steps of `seqs` sequences; if `seqs` is 0, they are prefills. If no step ran within such a
    time, return the seconds of all of them.
    """
    spans_of = {m: list[tuple[float, float]]() for m in models}
    for m, spans in spans_of.items():
        steps_of = [step for step in watched if step.model == m]
        for step, after in pairwise([*steps_of, TimedStep("", (), 0.0, 0.0)]):
            (start, tokens), n = step.parts[0], len(step.parts)
            if not seqs and start == 0 and tokens == BESIDE_PROMPT:
                spans.append((step.ordered_s, step.ended_s))
            elif seqs == n and start and [a + 1 for a, _ in step.parts] == [a for a, _ in after.parts]:
                spans.append((step.ordered_s, after.ordered_s))
    first = max(spans[0][0] for spans in spans_of.values())
    last = min(spans[-1][1] for spans in spans_of.values())
    every = [span for spans in spans_of.values() for span in spans]
    return [b - a for a, b in every if a >= first and b <= last] or [b - a for a, b in every]


# ------------------------------------------------------------------ weights


def loads(bench: Bench, name: str) -> tuple[list[Measurement], float]:
    """Time a load by each way of loading; if a way starts a process, the start is included."""
    inst, config = Inst(name, (0,)), bench.config([name], name)
    on, first = kind.kind(config), next(iter(bench.shapes))
    ways = [way for way, how in WAYS.items() if not how.starts or on.starts]
    if on.name == "cuda" and name != first:  # slow ways are bound by their rate, so one shape is enough
        ways = [way for way in ways if WAYS[way] in QUICK]
    took = {way: list[float]() for way in ways}

    def script(engine: Torch) -> Script:
        yield from wait(Woke)
        yield from wait(Arrived)
        for way in ways:
            for _ in range(3 if WAYS[way] in QUICK else 1):
                begun_s = engine.now_s
                yield from wait(Done, [Load(inst, way)])
                took[way].append(engine.now_s - begun_s)
                yield from wait(Done, [Evict(inst)])
        yield [Drop(0)]

    uses = ("Load", "Evict", "Drop", *(f"Load.way:{way}" for way in ways))
    engine, _, others = ran(bench, config, {"process": "gpu"}, uses, jobs((name,), [(0, 1, 1)]), script)
    about, size = {"shape": name, "gbps": engine.links["h2d"]}, engine.nets[name].weight_bytes
    links = {way: config.gpus if WAYS[way].spread else 1 for way in took}
    return [measured("load", {**about, "way": way}, s, bytes=size, links=links[way]) for way, s in took.items()], others


# ------------------------------------------------------------------ for policies


def alone(shapes: Mapping[str, Shape], say: Callable[[str], None]) -> tuple[list[Measurement], float]:
    """Time the steps of models alone, and the start of a process, without a journal; policies may know these times."""
    rows = list[Measurement]()
    with TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), shapes, say, Fields(), {"pool_bytes": 2 * GIB})
        for name in shapes:
            rows += steps(bench, name)[0]
            say(f"{name}: {len(rows)} steps so far")
    return rows, float(np.median([start_s() for _ in range(STARTS)]))


def start_s() -> float:
    """Return the seconds from the start of a worker's process until it is ready."""
    nursery, memory = Nursery(), os.memfd_create("device")
    try:
        begun_s = time.monotonic()
        worker = WorkerProcess(nursery, 0, cold=True)
        worker.send("begin", 0, os.sched_getaffinity(0), {}, False)
        send_files(worker.conn, [memory])
        assert worker.conn.recv() == "ready"
        return time.monotonic() - begun_s
    finally:
        nursery.close()
        os.close(memory)
