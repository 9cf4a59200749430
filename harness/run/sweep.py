"""Sweeps: the runs of many specs. Current stored runs are used again; worker processes execute the others.

A sweep stores no state of its own: a run that is current on disk is done. So a sweep can be killed at any moment and
started again, with any number of workers, and its results have the same bytes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain, groupby
from pathlib import Path

from harness.engines import sim
from harness.policy.fields import asked
from harness.policy.types import UserError
from harness.rows import parts, record, whole
from harness.rows.parts import Partition
from harness.run import arithmetic, crew, executor, realtime
from harness.run.estimates import Ahead, Costs, requests_in
from harness.run.execute import execute
from harness.run.executor import Ended, Why
from harness.run.resolve import resolve
from harness.run.setup import Failed, Setup
from harness.run.shard import Progress
from harness.run.sources import Task, codes, current, relocate
from harness.run.spec import Spec
from harness.run.teller import Silent, Teller

BASE = "dedicated"  # each model on GPUs of its own: SLO bases are measured on it
MOST_LEARNED = 1_000  # stored runs of a sweep from which its costs are learned
FEW_S = 6.0  # estimated seconds below which starting processes would take longer than it saves


class Missing(UserError):
    """The error for runs that are not stored, in a block that may not execute any (`stored_only`)."""

    exits = "MISSING"  # the name of the exit code of the command

    def __init__(self, what: str, missing: Sequence[Task], total: int) -> None:
        super().__init__(f"{len(missing):,} of {total:,} runs are missing ({what})")
        self.what, self.missing, self.total = what, missing, total


_STORED: ContextVar[bool] = ContextVar("_STORED", default=False)


@contextmanager
def stored_only() -> Iterator[None]:
    """Forbid the execution of runs within the block: a sweep that lacks a stored run raises Missing."""
    token = _STORED.set(True)
    try:
        yield
    finally:
        _STORED.reset(token)


def stored_so_far(search: tuple[str, ...], act: Callable[[], object], made: Callable[[], int]) -> Progress:
    """Return the progress of a search: the numbers of its runs that are stored and that are missing.

    `act` performs the search, up to its first sweep that lacks a stored run. `made` returns the number of runs in the
    sweeps before that one.
    """
    with stored_only():
        try:
            act()
        except Missing as gone:
            return Progress(search, made() + gone.total - len(gone.missing), len(gone.missing), gone.what)
    return Progress(search, made(), 0, "")


# ------------------------------------------------------------------ runs


def tasks(specs: Iterable[Spec]) -> list[Task]:
    """Resolve specs and hash their sources. Raises UserError for a name that does not exist."""
    code = codes()
    return [Task.of(spec, code(spec)) for spec in map(resolve, specs)]


def sweep(
    specs: Iterable[Spec],
    out: Path,
    *,
    workers: int | None = None,
    teller: Teller | None = None,
    what: str = "runs",
    later: float = 0.0,
    into: Partition | None = None,
) -> list[Path]:
    """Execute the specs without a current run in `out`; return all folders in the order of the specs.

    `workers` is the number of processes (None: as many as are worth starting). For the estimate of the time left,
    `later` is the number of requests in further sweeps that may follow (inf: no bound). With `into`, runs that have no
    folder yet are stored in parts of that partition (`rows/parts.py`).

    If a system's policy fails, the system's remaining runs are skipped, and Failed is raised after the runs of all
    other systems. Also raises UserError, and an engine's own errors; finished runs stay stored. Within `stored_only`,
    Missing is raised before anything is executed.
    """
    teller = teller or Silent()
    every = tasks(specs)
    whole.clean(out)
    once = list({task.folder: task for task in every}.values())
    batches = None if into is None else Batches(into, out)
    if batches is not None:  # those of a part one after the other
        once.sort(key=batches.key)
    todo, stored = _todo_and_stored(once, out, teller)
    total = len(once)
    if todo and _STORED.get():
        raise Missing(what, todo, total)
    waiting = set[Task]() if batches is None else batches.waiting(todo)
    new = [task for task in todo if task not in waiting]
    done = total - len(new)
    ahead = _ahead(new, stored, out, later, workers or cpus())
    real = any(task.spec.measured_on for task in new)
    teller.progress(what, done, total, ahead.left() if new and not real else None)
    failed = dict[str, str]()

    def note(ended: Ended, at: Path) -> None:
        """Count a run that has ended, and report the progress of the sweep."""
        nonlocal done
        failed.update(ended.why)
        done += not ended.why
        ahead.ended(ended.task, at)
        ahead.without(ended.why)
        teller.progress(what, done, total, None if real else ahead.left())

    def run(some: list[Task], at: Path) -> Iterator[Ended]:
        for ended in _executed(some, at, workers=workers, teller=teller, failed=failed, ahead=ahead):
            note(ended, at)  # before its part is written: a part may take hours to be complete
            yield ended

    for _ in run(todo, out) if batches is None else batches.filled(todo, run):
        pass
    if failed:
        raise Failed(failed)
    return [out / task.folder for task in every]


def _todo_and_stored(tasks: Iterable[Task], out: Path, teller: Teller) -> tuple[list[Task], list[Task]]:
    """Return the tasks to execute, and the tasks whose run in `out` is current.

    The user gets a line if stored runs were made on a machine whose arithmetic differs from this one's.
    """
    todo, stored, elsewhere = list[Task](), list[Task](), 0
    here = arithmetic.digest()[: arithmetic.SHOWN]
    for task in tasks:
        if about := current(task, out, teller.say):
            relocate(task.spec, out)
            stored.append(task)
            elsewhere += about.get("arithmetic", here) != here
        else:
            todo.append(task)
    if elsewhere:
        teller.say(
            f"{elsewhere:,} of {len(stored):,} stored runs were made where arithmetic differs: their last digits may"
            " differ from those of runs made here (-o DIR names another folder)"
        )
    return todo, stored


def _ahead(todo: Sequence[Task], stored: Sequence[Task], out: Path, later: float, slots: int) -> Ahead:
    """Return the remaining runs of a sweep, with costs learned from its own stored runs and others in its folder."""
    costs = Costs.of(out) if todo else Costs()
    for task in stored[:: max(1, len(stored) // MOST_LEARNED)] if todo else ():
        costs.learn(task.spec, out / task.folder, requests_in(task.spec))
    return Ahead(todo, costs, later, slots)


def _executed(
    todo: list[Task], out: Path, workers: int | None, teller: Teller, failed: Why, ahead: Ahead
) -> Iterator[Ended]:
    """Yield each executed task, with its failures. Leave out tasks of systems in `failed`, to which the caller may add.

    If the simulator is not compiled, this process first compiles it, so that workers find it compiled. Tasks of
    exclusive engines are executed in this process, one by one, after all workers have ended.
    """
    if not todo:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot write results there: {error.strerror} (-o DIR names another folder)") from error
    if (cluster := executor.CHOSEN.get()) is not None:
        cluster.submit(todo, out)
        ahead.slots = cluster.slots
        yield from cluster.as_completed(failed)
        return
    clock = _Clock(todo, teller)
    if any(asked(task.spec.engine).name == "sim" for task in todo) and not sim.compiled():
        teller.say("compiling the simulator, once (about 20 s)")
        compile_once()
    engines = {task.spec.engine: Setup(task.spec).bare_engine for task in {t.spec.engine: t for t in todo}.values()}
    exclusive = {name for name, engine in engines.items() if engine.exclusive}
    shared = [task for task in todo if task.spec.engine not in exclusive]
    with crew.hired() as workforce:
        few = workers is None and not workforce.started and ahead.left().cpu_s < FEW_S
        most = cpus() if workers is None else workers
        ahead.slots = workers = 1 if few else most
        if workers > 1 and len(shared) > 1:
            workforce.slots = workers
            calls = [(task.folder, (task, out)) for task in ahead.longest(shared)]
            for (task, _), why in workforce.each(crew.tried, calls, lambda task, _: task.spec.label in failed):
                yield Ended(task, why)
            todo = [task for task in todo if task.spec.engine in exclusive]
        if exclusive:
            workforce.shutdown()
        for task in ahead.order(todo) if not exclusive else todo:
            if task.spec.label not in failed:
                yield Ended(task, clock.execute(task, out))


def part_order(run: str | Path) -> str:
    """Return the sort key with which many runs are best read: the runs of a part then come one after the other.

    The facts of a part are checked as a whole, and only those of a few parts are cached. In any other order, a part
    would be checked again for most of its runs.
    """
    return Path(run).name.rpartition("-")[2]


class Batches:
    """Runs to be stored in parts. Each is executed into a folder; a part is written when all its runs have ended."""

    def __init__(self, into: Partition, out: Path) -> None:
        self._into, self._out = into, out
        self._staged = into.staged(out)

    def key(self, task: Task) -> tuple[str, str]:
        """Return a sort key: the part of a task's run, then the run's name. So tasks complete part after part."""
        name = task.folder
        return name.rpartition("-")[2][: self._into.digits], name

    def waiting(self, todo: Iterable[Task]) -> set[Task]:
        """Return the tasks that need no execution, because an earlier, killed call left their complete runs staged."""
        return {task for task in todo if not self._apart(task) and current(task, self._staged)}

    def _apart(self, task: Task) -> bool:
        """Tell whether a task's run already has its own folder outside the parts. Such a run stays there."""
        return (self._out / task.folder / record.ROWS).exists()

    def filled(self, todo: Sequence[Task], execute: Callable[[list[Task], Path], Iterator[Ended]]) -> Iterator[Ended]:
        """Execute tasks, and yield each once its run is stored: in its own folder if it has one, else in a part.

        A task is not executed if an earlier call, which was killed, left its complete run in the folder of staged runs.
        That folder has at most `parts.MANY` runs, plus those of one part, at a time.
        """
        parts.clean(self._into, self._out)
        self._tidied({task.folder for task in todo})
        apart = [task for task in todo if self._apart(task)]
        if apart:
            yield from execute(apart, self._out)
        wave, gone = list[Task](), set(apart)
        for _, batch in groupby((task for task in todo if task not in gone), lambda task: self.key(task)[0]):
            wave += batch
            if len(wave) >= parts.MANY:
                yield from self._wave(wave, execute)
                wave = []
        yield from self._wave(wave, execute)
        parts.dismissed(self._staged)

    def _tidied(self, wanted: AbstractSet[str]) -> None:
        """Remove staged folders of runs that parts already have. A call leaves some if it is killed at that point."""
        for run in self._staged.glob("*-*"):
            if run.name not in wanted and record.exists(self._out / run.name):
                shutil.rmtree(run)

    def _wave(self, tasks: Sequence[Task], execute: Callable[[list[Task], Path], Iterator[Ended]]) -> Iterator[Ended]:
        """Execute the tasks of several complete parts; yield the tasks of a part when it is written."""
        lacking = Counter(self.key(task)[0] for task in tasks)
        ended: dict[str, list[Ended]] = {}
        new = dict.fromkeys(task for task in tasks if not current(task, self._staged))
        made = (Ended(task, {}) for task in tasks if task not in new)
        for outcome in chain(made, execute([*new], self._staged) if new else ()):
            batch = self.key(outcome.task)[0]
            ended.setdefault(batch, []).append(outcome)
            if len(ended[batch]) == lacking[batch]:
                yield from self._stored(ended.pop(batch))
        for every in ended.values():  # without the runs of systems whose policy failed
            yield from self._stored(every)

    def _stored(self, ended: Sequence[Ended]) -> Sequence[Ended]:
        """Write the runs of ended tasks into their parts, and remove the runs' folders."""
        by_part: dict[Path, list[Path]] = {}
        for task, why in ended:
            if not why:
                name = task.folder
                by_part.setdefault(self._into.part(self._out, name), []).append(self._staged / name)
        for part, runs in by_part.items():
            if not all(run.is_dir() for run in runs):  # the other call has put them into its part
                raise UserError(f"{self._staged}: another call runs the same study; wait until it ends, and call again")
            record.write_part(part, runs)
            for run in runs:
                shutil.rmtree(run)
        return ended


class _Clock:
    """Reports on runs in real time: expected duration, and each run's outcome. Simulated runs are not reported."""

    def __init__(self, todo: Sequence[Task], teller: Teller) -> None:
        spans = {task.folder: realtime.span(task.spec) for task in todo}
        real = {task.folder: task.spec for task in todo if spans[task.folder] is not None}
        self._left = {
            name: span for name, span in spans.items() if span and not realtime.lacking(real[name], here=True)
        }
        self._total, self._teller = len(self._left), teller
        if self._left:
            engines = ", ".join(dict.fromkeys(real[name].engine for name in self._left))
            teller.say(f"{engines}: {realtime.duration(self._left.values())} of real time, beside starts of servers")

    def execute(self, task: Task, out: Path) -> Why:
        """Execute a task and report its outcome; return its failures."""
        begun = time.monotonic()
        why, spec = crew.tried(task, out), task.spec
        if self._left.pop(spec.folder, None) and not why:
            about = record.meta(out / spec.folder)
            unfit = f"infeasible: {about['infeasible']}" if about["infeasible"] else ""
            verdict = unfit or (about.get("verdict") or {}).get("text", "")
            rest = f"{realtime.range_of([*self._left.values()])} left" if self._left else ""
            nth = f"{self._total - len(self._left)} of {self._total}"
            outcome = "; ".join(filter(None, [f"{time.monotonic() - begun:.0f} s", verdict, rest]))
            self._teller.say(f"{nth}: {spec.label} at {spec.rate_scale:g} x, seed {spec.seed}: {outcome}")
        return why


def compile_once() -> None:
    """Compile the simulator's machine code with a run whose results are dropped."""
    spec = resolve(Spec(BASE, trace="sample", models="llama-3.2-1b", slo=""))
    with tempfile.TemporaryDirectory() as folder:
        execute(spec, Path(folder), "")


def cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
