"""Many specs become many runs: stored ones are kept, the rest is shared out to processes, and a comparison is scored.

A sweep holds no state of its own: what is current on disk is done. So it can be killed at any moment and started
again, with any number of workers, and ends with the same bytes.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from harness.experiment.run import (
    Failed,
    code,
    current,
    engine_of,
    execute,
    jobs_of,
    models_of,
    resolve,
    solo,
    trace_of,
)
from harness.experiment.spec import LINKS, Spec, canonical, digest, from_dict
from harness.loop.guard import LIMIT_S, Terminated
from harness.loop.system import ROOT
from harness.policy.types import UserError
from harness.rows import metrics, record

if TYPE_CHECKING:
    import pyarrow as pa

Pair = tuple[float, float]  # TTFT, TPOT in seconds

BASE = "dedicated"
CONTROLS = ("dedicated", "ideal")  # in every figure, but no contestants
TUNING_SEEDS = tuple(range(1000, 1005))  # never those of an evaluation
AA_SEED = 500  # the A/A copy draws from here, apart from both
AA = " (A/A)"  # what its label ends with
DRAIN_SLOS = 10  # a run goes on for so many of the largest end-to-end SLO
LEVEL, LOW = 0.99, 0.90  # the target; where a system is past its knee
TOP, FLOOR = 64.0, 1 / 8  # rate scales between which the knee is searched
FEW_S = 6.0  # estimated seconds below which starting processes would take longer than it saves
CLOSE_S = 30.0  # how long a worker that is ended may take to close its engine
REQUESTS_PER_S, RUN_S = 150_000.0, 0.06  # of an unknown run: its slowest speed asked for; start and write measured


class Teller(Protocol):
    """Who hears how a sweep goes on."""

    def say(self, line: str) -> None:
        """One line for the user."""
        ...

    def progress(self, what: str, done: int, total: int) -> None:
        """`done` of `total` runs of a phase stand; a phase begins with those that stood before."""
        ...


class Silent:
    """Hears nothing."""

    def say(self, line: str) -> None:
        """See Teller."""

    def progress(self, what: str, done: int, total: int) -> None:
        """See Teller."""


# ------------------------------------------------------------------ runs


class Task(NamedTuple):
    """A resolved spec and the hash of the sources that decide its rows."""

    spec: Spec
    code: str


def tasks(specs: Iterable[Spec]) -> list[Task]:
    """Resolve specs and hash their sources; UserError for what does not exist."""
    hashes: dict[tuple[str | None, ...], str] = {}

    def task(spec: Spec) -> Task:
        key = (spec.engine, spec.system, spec.models, spec.table, spec.slo)
        if key not in hashes:
            hashes[key] = code(spec)
        return Task(spec, hashes[key])

    return [task(resolve(spec)) for spec in specs]


def sweep(
    specs: Iterable[Spec], out: Path, *, workers: int | None = None, teller: Teller | None = None, what: str = "runs"
) -> list[Path]:
    """Make sure that the run of each spec stands in `out`; returns the folders in the order of the specs.

    `workers` processes (None: as many as pay). A system whose policy fails is not tried again; when all others are done
    that is raised as Failed. Raises UserError, and whatever an engine raised: runs that were finished before are kept.
    """
    teller = teller or Silent()
    every = tasks(specs)
    record.clean(out)
    todo = list({task.spec.folder: task for task in every if not current(task.spec, out, task.code)}.values())
    total = len({task.spec.folder for task in every})
    done = total - len(todo)
    teller.progress(what, done, total)
    failed: dict[str, str] = {}
    for why in _executed(todo, out, workers, teller, failed):
        failed |= why
        done += not why
        teller.progress(what, done, total)
    if failed:
        raise Failed(failed)
    return [out / task.spec.folder for task in every]


Why = Mapping[str, str]  # what failed, as Failed has it; empty: nothing


def _executed(todo: list[Task], out: Path, workers: int | None, teller: Teller, failed: Why) -> Iterator[Why]:
    """Yield what failed once for each task that was run; those of systems in `failed`, which grows, are left out.

    The first is run here: it compiles what the others then find compiled. Those of exclusive engines are run here too,
    one by one, when no worker is left.
    """
    if not todo:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot write results there: {error.strerror} (-o DIR names another folder)") from error
    if any(task.spec.engine == "sim" for task in todo) and not compiled():
        teller.say("compiling the simulator, once (about 20 s)")
    first, *rest = todo
    yield _tried(first, out)
    exclusive = {name for name, spec in {t.spec.engine: t.spec for t in rest}.items() if engine_of(spec).exclusive}
    shared = [task for task in rest if task.spec.engine not in exclusive]
    if workers is None:
        known = speeds(out)
        few = sum(estimate_s(task.spec, known) for task in shared) < FEW_S
        workers = 1 if few else cpus()
    if workers > 1 and len(shared) > 1:
        yield from _shared(shared, out, min(workers, len(shared)), failed)
        rest = [task for task in rest if task.spec.engine in exclusive]
    for task in rest:
        if task.spec.label not in failed:
            yield _tried(task, out)


def _tried(task: Task, out: Path) -> Why:
    """Execute a task; what failed in it."""
    try:
        execute(task.spec, out, task.code)
    except Failed as failed:
        return failed.why
    return {}


def compile_once() -> None:
    """Make the simulator's machine code, by a run that is not kept."""
    spec = resolve(Spec(BASE, trace="sample", models="llama-3.2-1b", slo=""))
    with tempfile.TemporaryDirectory() as folder:
        execute(spec, Path(folder), "")


def compiled() -> bool:
    """Tell whether the simulator's machine code is on disk, as far as can be seen without loading it."""
    from harness.engines.sim.jit import CACHE, DISABLED

    return DISABLED or any(CACHE.rglob("loop.advance-*.nbi"))


def cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shared(todo: Sequence[Task], out: Path, workers: int, failed: Why) -> Iterator[Why]:
    """Share tasks out to processes, longest first; yield what failed once for each that was run.

    A process ends when its pipe closes, so none outlives this one, however it dies.
    """
    known = speeds(out)
    queue = sorted(todo, key=lambda task: estimate_s(task.spec, known))
    context = multiprocessing.get_context("spawn")
    crew: dict[Connection, tuple[BaseProcess, Task]] = {}
    idle: list[tuple[Connection, BaseProcess]] = []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_serve, args=(theirs, out, LIMIT_S.get()), daemon=True)
            process.start()
            theirs.close()
            idle.append((ours, process))
        while queue or crew:
            while queue and idle:
                task = queue.pop()
                if task.spec.label in failed:
                    continue
                pipe, process = idle.pop()
                with suppress(BrokenPipeError):  # it died: `recv` below says so
                    pipe.send(task)
                crew[pipe] = (process, task)
            for ready in wait(list(crew)):
                assert isinstance(ready, Connection)
                process, task = crew.pop(ready)
                why = _heard(ready, process, task)
                idle.append((ready, process))
                yield why
    finally:
        processes = [p for _, p in idle] + [p for p, _ in crew.values()]
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(CLOSE_S)
            process.kill()
            process.join()


def _heard(pipe: Connection, process: BaseProcess, task: Task) -> Why:
    """Take a worker's answer: what failed, or else what was raised there, which is raised here."""
    try:
        answer: Why | BaseException = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise UserError(
            f"a worker died while running {task.spec.folder} (exit code {process.exitcode}; -9 often means that memory "
            f"ran out: --workers 1 takes less)"
        ) from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _serve(pipe: Connection, out: Path, limit_s: float) -> None:
    """Be a worker: run what comes through the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    LIMIT_S.set(limit_s)
    with suppress(EOFError, BrokenPipeError):
        while True:
            task = Task(*pipe.recv())
            try:
                pipe.send(_tried(task, out))
            except UserError as error:
                pipe.send(error)
            except Terminated:  # by the parent
                return
            except BaseException as error:  # whatever it is, the parent shows it
                pipe.send(_portable(error))


def _portable(error: BaseException) -> BaseException:
    """The error with its traceback as a note; its text alone where it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"in a worker:\n{text}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(text)
    return error


# ------------------------------------------------------------------ how long it takes


def speeds(out: Path) -> dict[str, float]:
    """Seconds per request of each system, from what stored runs say beside their rows."""
    spent: dict[str, list[float]] = {}
    for path in sorted(out.glob(f"*/{record.SIDE}"))[:200]:
        with suppress(OSError, ValueError, KeyError):
            side = json.loads(path.read_text("utf-8"))
            sums = spent.setdefault(path.parent.name.rpartition("-")[0], [0.0, 0.0])
            sums[0] += max(0.0, side["cpu_s"] - RUN_S)
            sums[1] += side["requests"]
    return {name: seconds / requests for name, (seconds, requests) in spent.items() if requests}


def estimate_s(spec: Spec, known: Mapping[str, float] | None = None) -> float:
    """Seconds that a run may take: from stored runs of its system where there are any."""
    scale = 1.0 if spec.scaling == "time" else spec.rate_scale
    each = (known or {}).get(spec.folder.rpartition("-")[0], 1 / REQUESTS_PER_S)
    return RUN_S + len(trace_of(spec.trace)) * scale * each


# ------------------------------------------------------------------ SLOs


def base_specs(spec: Spec) -> list[Spec]:
    """Runs that measure the SLO bases of a spec: each model alone, default engine settings, the tuning seeds."""
    one = Spec(BASE, engine=spec.engine, gpu=spec.gpu, node_gpus=spec.node_gpus, models=spec.models, trace=spec.trace,
               served=spec.served, host=spec.host, table=spec.table, process_bytes=spec.process_bytes, workload="base",
               slo="", **{name: getattr(spec, name) for name in LINKS})  # fmt: skip
    return [replace(one, seed=seed) for seed in TUNING_SEEDS]


def bases(folders: Sequence[Path]) -> dict[str, Pair]:
    """P95 of TTFT and TPOT in seconds by model, over all requests of base runs that came in the window or after it."""
    import numpy as np

    columns = ["model", "arrival_ns", "first_ns", "done_ns", "prompt_tokens", "output_tokens", "made_tokens"]
    columns += ["first_tokens", "state", *(f"{cause}_ns" for cause in record.WAITS)]
    ttft: dict[str, list[Any]] = {}
    tpot: dict[str, list[Any]] = {}
    for folder in folders:
        rows = metrics.rows(record.read(folder, columns))
        rows = metrics.take(rows, rows.arrival_s >= 0)
        each = metrics.tpot_s(rows)
        for i, model in enumerate(rows.models):
            mine = rows.model == i
            ttft.setdefault(model, []).append(rows.ttft_s[mine])
            tpot.setdefault(model, []).append(each[mine][rows.output_tokens[mine] > 1])
    found = {}
    for model, parts in ttft.items():
        first = metrics.quantile(np.concatenate(parts), 0.95)
        later = metrics.quantile(np.concatenate(tpot[model]), 0.95)
        if not math.isfinite(first) or later == math.inf:
            raise UserError(f"{model} has no SLO base: over 5 % of its requests never end on a GPU of its own")
        found[model] = (first, first if math.isnan(later) else later)  # one-token outputs alone: any TPOT is met
    return found


class Judge(NamedTuple):
    """An SLO rule with what it takes to apply it to every run of a sweep."""

    rule: str
    seconds: Mapping[str, Pair] | None  # by model; None: by each request's own latency
    drain_s: float = math.nan  # how long runs go on after the window

    def spec(self, spec: Spec) -> Spec:
        """The spec under this rule."""
        rows = tuple((model, *pair) for model, pair in (self.seconds or {}).items())
        drain_s = self.drain_s if spec.drain_s is None else spec.drain_s
        return replace(spec, slo=self.rule, slo_s=spec.slo_s or rows, drain_s=drain_s)

    @property
    def definition(self) -> str:
        """The attainment that this rule is about."""
        return "both" if self.seconds is not None else "e2e"


def located(rule: str) -> str:
    """The rule with its file's path as it holds from any folder."""
    return f"classes:{Path(rule[8:]).resolve()}" if rule.startswith("classes:") else rule


def rule(base: str, scale: float) -> str:
    """The SLO rule that is `scale` times a base, as `judge` takes it; UserError where it has no scale."""
    from workloads.slo import scaled

    return scaled(base, scale)


def judge(spec: Spec, rule: str, out: Path, *, workers: int | None = None, teller: Teller | None = None) -> Judge:
    """Turn a rule (workloads/slo.py) into seconds for a spec's trace, models and GPU kind; runs the bases it needs.

    A spec that holds seconds already keeps them.
    """
    from workloads import slo

    rule = located(rule)
    parsed = slo.parse(rule)
    given = {model: (ttft_s, tpot_s) for model, ttft_s, tpot_s in spec.slo_s}
    spec = resolve(replace(spec, system=BASE, preset=None, fields=()))
    models = models_of(spec.models)
    if given:
        return Judge(rule, given, _drain_s(spec, given))
    if isinstance(parsed, slo.Scaled) and parsed.base == "solo":
        return Judge(rule, None, _drain_s(spec, _solo_slos(spec, parsed)))
    measured = None
    if isinstance(parsed, slo.Scaled) and parsed.base == "P95":
        measured = bases(sweep(base_specs(spec), out, workers=workers, teller=teller, what="SLO bases"))
    seconds = slo.resolve(parsed, models, measured)
    return Judge(rule, seconds, _drain_s(spec, seconds))


def _drain_s(spec: Spec, slos: Mapping[str, Pair]) -> float:
    """`DRAIN_SLOS` x the largest time that an SLO leaves a request, up to a power of 2: near SLOs share their runs."""
    longest = int(trace_of(spec.trace).output_tokens.max())
    largest = max(ttft_s + (longest - 1) * tpot_s for ttft_s, tpot_s in slos.values())
    return float(2.0 ** math.ceil(math.log2(DRAIN_SLOS * largest)))


def _solo_slos(spec: Spec, rule: Any) -> dict[str, Pair]:
    """The SLOs of each model's longest request under a rule by its own latency."""
    import numpy as np

    from harness.policy.types import Jobs

    trace, models = trace_of(spec.trace), models_of(spec.models)
    n = len(models.members)
    prompt, output = (np.full(n, int(x.max()), np.int32) for x in (trace.prompt_tokens, trace.output_tokens))
    none = np.full(n, np.inf)
    longest = Jobs(models.names, np.zeros(n), np.arange(n, dtype=np.int32), prompt, output, none, none)
    ttft_s, tpot_s = solo(spec, longest)
    pairs = zip((rule.ttft_x * ttft_s).tolist(), (rule.tpot_x * tpot_s).tolist(), strict=True)
    return dict(zip(models.names, pairs, strict=True))


# ------------------------------------------------------------------ comparison


class Entry(NamedTuple):
    """A contestant: how tables name it, and its spec, whose rate and seeds are still to be set."""

    label: str
    spec: Spec


@dataclass(frozen=True, slots=True)
class Compared:
    """A scored sweep."""

    folder: Path
    table: pa.Table  # metrics.TABLE_SCHEMA
    judge: Judge
    entries: tuple[Entry, ...]
    rates: tuple[float, ...]
    seeds: int
    reference: Spec  # a resolved spec of the sweep: what all have in common
    failed: Mapping[str, str]  # what contestants that are not among the entries did, by label (see Failed)


def compare(
    entries: Sequence[Entry],
    out: Path,
    *,
    rates: Sequence[float] | None,
    seeds: int,
    rule: str,
    definition: str | None = None,
    workers: int | None = None,
    teller: Teller | None = None,
) -> Compared:
    """Run the grid of entries x rates x seeds and score it under an SLO rule.

    Without rates the knee of a definition of attainment (None: the rule's) is searched by doubling with the first seed,
    then sampled. All entries share trace, models, GPU kind and engine. An entry whose policy fails leaves the
    comparison; Failed where none is left. Raises UserError.
    """
    left, failed = list(entries), dict[str, str]()
    while True:
        try:
            found = _compared(left, out, rates, seeds, rule, definition, workers, teller)
        except Failed as why:  # again without it: finished runs cost nothing
            failed |= why.why
            remain = [entry for entry in left if entry.spec.label not in failed]
            if not remain or len(remain) == len(left):
                raise Failed(failed) from why
            left = remain
        else:
            labels = dict.fromkeys(entry.spec.label for entry in entries)
            return replace(found, failed={label: failed[label] for label in labels if label in failed})


def _compared(
    entries: Sequence[Entry],
    out: Path,
    rates: Sequence[float] | None,
    seeds: int,
    rule: str,
    definition: str | None,
    workers: int | None,
    teller: Teller | None,
) -> Compared:
    """See `compare`; raises Failed where the policy of any entry fails."""
    if definition in metrics.BY_TOKEN:
        entries = [Entry(label, replace(spec, token_times=True)) for label, spec in entries]
    if rates is None and entries[0].spec.scaling == "none":
        rates = (1.0,)
    for entry in entries:  # a mistake shows before anything is run
        jobs_of(resolve(replace(entry.spec, slo="", rate_scale=1.0 if rates is None else float(max(rates)))))
    under = judge(entries[0].spec, rule, out, workers=workers, teller=teller)

    def grid(rates: Sequence[float], seeds: int) -> list[tuple[Entry, Spec]]:
        return [
            (entry, under.spec(replace(entry.spec, rate_scale=float(rate), seed=entry.spec.seed + seed)))
            for entry in entries
            for rate in rates
            for seed in range(seeds)
        ]

    def scores(rate: float) -> dict[str, float]:
        cells = grid([rate], 1)
        folders = sweep([spec for _, spec in cells], out, workers=workers, teller=teller, what=f"search, rate {rate:g}")
        pairs = zip(cells, folders, strict=True)
        return {entry.label: attained(folder, under, definition) for (entry, _), folder in pairs}

    if rates is None:
        rates = knee(scores)
    cells = grid(rates, seeds)
    sweep([spec for _, spec in cells], out, workers=workers, teller=teller)
    found = [(entry, task) for (entry, _), task in zip(cells, tasks(spec for _, spec in cells), strict=True)]
    folder, table = scored(found, under, out)
    return Compared(folder, table, under, tuple(entries), tuple(rates), seeds, found[0][1].spec, {})


def knee(attained: Callable[[float], Mapping[str, float]]) -> tuple[float, ...]:
    """Rates around the knees: doubled from 1 until all are below `LOW` (or halved, if all are at 1), then sampled.

    At least 6 rates, from the last at which all meet `LEVEL` to the first at which none meets `LOW`.
    """
    seen = {1.0: attained(1.0)}
    while max(seen[max(seen)].values()) >= LOW and max(seen) < TOP:
        rate = 2 * max(seen)
        seen[rate] = attained(rate)
    while max(seen[min(seen)].values()) < LOW and min(seen) > FLOOR:
        rate = min(seen) / 2
        seen[rate] = attained(rate)
    met = [rate for rate in sorted(seen) if all(min(seen[r].values()) >= LEVEL for r in seen if r <= rate)]
    low, high = max(met, default=min(seen)), max(seen)
    octaves = round(math.log2(high / low))
    if octaves == 0:
        return tuple(sorted(seen))
    steps = octaves * max(2, math.ceil(5 / octaves))
    return tuple(float(f"{low * 2 ** (k * octaves / steps):.3g}") for k in range(steps + 1))


def attained(folder: Path, under: Judge, definition: str | None = None) -> float:
    """Pooled attainment of a run by a definition (None: the rule's); 0 where it could not run."""
    import pyarrow.compute as pc

    table = metrics.score(scorable("", folder, under))
    here = pc.and_(pc.equal(table["definition"], definition or under.definition), pc.equal(table["over"], "pooled"))
    return float(table.filter(here)["value"][0].as_py() or 0.0)


def scorable(label: str, folder: Path, under: Judge) -> metrics.Run:
    """A run as metrics scores it under a rule."""
    about = record.meta(folder)
    about["spec"] = about["spec"] | {"slo": under.rule}
    return metrics.Run(folder.name, about, record.read(folder), limits(from_dict(about["spec"]), under), label)


def limits(spec: Spec, under: Judge) -> metrics.Slo:
    """The SLO seconds of a run under a rule: by model, or of each of its requests."""
    if under.seconds is not None:
        return under.seconds
    jobs = jobs_of(replace(spec, slo=under.rule))
    return metrics.Limits(jobs.ttft_slo_s, jobs.tpot_slo_s)


def scored(cells: Sequence[tuple[Entry, Task]], under: Judge, out: Path) -> tuple[Path, pa.Table]:
    """The sweep's folder and tidy table; scored anew only if a run, the rule or the metrics changed."""
    import pyarrow.parquet as pq

    asked = [[entry.label, canonical(task.spec)] for entry, task in cells]
    reference = cells[0][1].spec
    trace = Path(reference.trace).stem if reference.trace.endswith(".parquet") else reference.trace
    trace = trace.partition("+")[0].replace("/", "-")
    folder = out / f"{trace}-{digest(record.dumps([sorted(asked), under.rule, under.seconds]))}"
    codes = sorted((task.spec.folder, task.code) for _, task in cells)
    scorers = [
        (ROOT / "harness" / name).read_bytes().hex()
        for name in ("rows/metrics.py", "rows/record.py", "experiment/sweep.py")
    ]
    about = {
        "judges": judgements((under, task.spec.folder) for _, task in cells),
        "runs": {task.spec.folder: entry.label for entry, task in cells},
        "key": digest(record.dumps([codes, scorers])),
    }
    path = folder / record.SWEEP
    if path.is_file():
        with suppress(Exception):  # whatever stands there, it is made anew
            stored = (pq.read_metadata(path).metadata or {}).get(b"key", b"")
            if stored == record.dumps(about["key"]).encode():
                return folder, pq.read_table(path)
    table = metrics.attainment(scorable(entry.label, out / task.spec.folder, under) for entry, task in cells)
    record.write_table(path, table, about)
    return folder, table


# ------------------------------------------------------------------ who judged a run


def judgements(pairs: Iterable[tuple[Judge, str]]) -> list[dict[str, Any]]:
    """What a table says of its judges: rule, seconds, and the names of the runs that each judged."""
    found: dict[str, dict[str, Any]] = {}
    for under, run in pairs:
        about = {"rule": under.rule, "seconds": under.seconds}
        found.setdefault(record.dumps(about), {**about, "runs": set()})["runs"].add(run)
    return [{**found[key], "runs": sorted(found[key]["runs"])} for key in sorted(found)]


class Ruling(NamedTuple):
    """A judge of a run, and the table that says so."""

    under: Judge
    table: Path  # its folder


def rulings(run: Path) -> list[Ruling]:
    """Judges of a run in the tables beside it, those of the newest table first; each (rule, seconds) once."""
    import pyarrow.parquet as pq

    tables = sorted(run.parent.glob(f"*/{record.SWEEP}"), key=lambda path: -path.stat().st_mtime_ns)
    found: dict[str, Ruling] = {}
    for path in tables:
        with suppress(Exception):  # a table that cannot be read says nothing
            stored = json.loads((pq.read_metadata(path).metadata or {}).get(b"judges", b"[]"))
            for rule, seconds in [(one["rule"], one["seconds"]) for one in stored if run.name in one["runs"]]:
                pairs = seconds and {model: (ttft_s, tpot_s) for model, (ttft_s, tpot_s) in seconds.items()}
                found.setdefault(record.dumps([rule, seconds]), Ruling(Judge(rule, pairs), path.parent))
    return list(found.values())
