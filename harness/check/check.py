"""Conformance: check on small workloads in the simulator that a system keeps the laws of all systems.

Most laws are functions of one trial, which is the run of a system with one preset in one case. For a broken law, the
workload is cut to the fewest requests that still break it. The failure has the number of the decision (0 is "start")
and a command that repeats it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, redirect_stderr
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

from harness.check.cases import cases
from harness.check.findings import Breach, Failure, known
from harness.check.laws import FILE_LAWS, LAWS, TRIAL_LAWS, deterministic, prints
from harness.check.reached import Reached
from harness.check.trial import Subject, TooLong, Trial, run, subject
from harness.loop import system
from harness.loop.guard import Endless
from harness.policy.fields import domains
from harness.policy.types import Option

SEEDS, LONG = 3, 8  # --full also tries this many workloads of each case, this many times as long


def subjects(name: str, quick: bool = True, case: str | None = None) -> dict[str, Subject]:
    """Return the subjects of a system's trials by key; the keys are the same in every process.

    A subject is a system with given settings in a case. Short cases are tried with the defaults, with each preset, and
    with the other values of tuned choices (`others`). Long cases (`quick=False`) are tried with the defaults alone. All
    presets share the file's code, and long trials of eight presets would take ten minutes.
    """
    make = system.find(name)
    sizes = [(0, 1)] if quick else [(0, 1), *((seed, LONG) for seed in range(1, SEEDS + 1))]
    named = {}
    for seed, size in sizes:
        for label, workload in cases(seed, size).items():
            if case in {None, label}:
                for preset in (None, *(make.presets if size == 1 else ())):
                    named[f"{label}/{preset}/{seed}"] = subject(make, preset, label, workload)
                for k, fields in enumerate(others(make) if size == 1 else (), 1):
                    values = subject(make, None, label, workload)._replace(fields=fields)
                    named[f"{label}/others-{k}/{seed}"] = values
    return named


def others(make: type) -> list[tuple[tuple[str, Option], ...]]:
    """Return the fewest combinations of settings that together have every value of every tuned choice.

    Defaults, and values that are never drawn (`undrawn`), are left out.
    """
    left = {
        name: [x for x in domain.choices if x not in (domain.default, *domain.undrawn)]
        for name, domain in domains(make).items()
        if domain.tuned and domain.choices
    }
    most = max(map(len, left.values()), default=0)
    return [tuple((name, values[k]) for name, values in left.items() if k < len(values)) for k in range(most)]


def check(
    name: str,
    *,
    quick: bool = True,
    only: str | None = None,
    case: str | None = None,
    twice: bool = True,
    reached: Reached | None = None,
) -> list[Failure]:
    """Return the failures of a system, at most one for each law; empty if the system conforms.

    Of all breaches of a law, only the first one found is reported. If a trial broke the law, its workload is cut to as
    few of its first requests as still break the law.

    `name` is the system's name or path. `only` names the one law to test, `case` the one case. `twice` runs all trials
    again in a second process, for the law "deterministic". Without it that law is not tested, and a short check takes
    less than half the time. Raises UserError if there is no such system, law or case.
    """
    known("law", only, LAWS)
    known("case", case, cases())
    wanted = {only} if only else set(LAWS)

    def failure(law: str, where: str, breach: Breach, of: str | None = None) -> Failure:
        options = [f"--law {law}", *([f"--case {of}"] if of else []), *([] if quick else ["--full"])]
        command = f"bench check {shlex.quote(name)} {' '.join(options)}"
        return Failure(law, where + breach.what, breach.event, command)

    of_file = ((law, breach) for law, test in FILE_LAWS.items() for breach in islice(test(name), 1))
    failures = {law: failure(law, "", breach) for law, breach in of_file}
    if "starts" in failures or only == "pure":
        return [f for law, f in failures.items() if law in wanted | {"starts"}]
    with nullcontext() if reached is None else reached.watched():
        trials = subjects(name, quick, case)
    second = partial(other_process, [name], quick, case) if twice and "deterministic" in wanted else None
    for law, where, breach, of in _broken(trials, wanted - set(failures), reached, second):
        failures[law] = failure(law, where, breach, of or case)
    return [failures[law] for law in LAWS if law in failures and law in wanted]


Start = Callable[[IO[bytes]], subprocess.Popen[bytes]]  # starts a process that writes to a file


def _broken(
    trials: Mapping[str, Subject], laws: set[str], reached: Reached | None, second: Start | None
) -> Iterator[tuple[str, str, Breach, str | None]]:
    """Run the trials, and yield (law, place, breach, case) once for each broken law, with the first breach found.

    The case is None if the breach does not belong to one case. `second` starts the second process for the law
    "deterministic"; if it is None, that law is not tested.
    """
    here: dict[str, list[str]] = {}
    reasons = []  # why subjects could not run
    broken = set[str]()
    with tempfile.TemporaryFile() as out, ExitStack() as stack:
        other = None
        for key, subject in trials.items():
            trial = run(subject) if reached is None else run(subject, reach=reached.watched)
            if reached is not None:
                reached.add(trial)
            if other is None and second is not None:  # the kernel is compiled by now
                other = second(out)
                stack.callback(_end, other)
            here[key] = prints(trial)
            if trial.impossible is not None:
                reasons.append(f"{subject}: {trial.impossible}")
                continue
            for law, where, breach in _breaches(subject, trial, laws - broken):
                broken.add(law)
                yield law, where, breach, subject.name
            if "livelock" in broken:  # every further trial would take its time
                return
        if len(reasons) == len(trials):
            yield "starts", "runs in no case: ", Breach(reasons[0]), None
        if other is not None and other.wait():
            yield "deterministic", "the same in a second process: ", Breach("an error"), None
        elif other is not None:
            out.seek(0)
            (there,) = json.load(out).values()
            differing = islice(deterministic(here, there), 1)
            yield from (("deterministic", f"{trials[k]}: ", breach, trials[k].name) for k, breach in differing)


def _breaches(subject: Subject, trial: Trial, laws: set[str]) -> Iterator[tuple[str, str, Breach]]:
    """Yield (law, place, breach) once for each of `laws` that the trial breaks.

    The workload is first cut to as few of its first requests as still break the law (`shrunk`). The breach is the first
    one in a trial of these requests. If the trial took too long, the workload is not cut, and the breach is the first
    one in the trial itself.
    """
    for law, of_trial in TRIAL_LAWS.items():
        for breach in islice(of_trial(trial) if law in laws else (), 1):
            slow = isinstance(trial.error, TooLong | Endless)  # every shorter workload would be slow too
            n, least = (len(subject.case.jobs), breach) if slow else shrunk(subject, of_trial, breach)
            yield law, f"{subject}, {_prefix(n)}: ", least


def shrunk(subject: Subject, law: Callable[[Trial], Iterator[Breach]], broken: Breach) -> tuple[int, Breach]:
    """Find by bisection the least n for which the first n requests of a workload still break a law.

    Return n, and the first breach in a trial of these requests.
    """
    low, high = 0, len(subject.case.jobs)
    while low < high:
        middle = (low + high) // 2
        breach = next(law(run(subject, subject.case.jobs.first(middle))), None)
        if breach is None:
            low = middle + 1
        else:
            high, broken = middle, breach
    return high, broken


def _prefix(n: int) -> str:
    return {0: "without a request", 1: "its first request"}.get(n, f"its first {n} requests")


def print_all(names: Sequence[str], quick: bool, case: str | None) -> None:
    """Write the `prints` of every trial, by system, as JSON to standard output.

    The second process of the law "deterministic" runs this. Systems cannot write there, because their standard output
    leads to /dev/null.
    """
    with os.fdopen(os.dup(1), "w") as out, Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        with redirect_stderr(nowhere):
            every = {
                name: {key: prints(run(tried, watched=False)) for key, tried in subjects(name, quick, case).items()}
                for name in names
            }
        json.dump(every, out)


def other_process(names: Sequence[str], quick: bool, case: str | None, out: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process that runs `print_all` with another hash seed and writes to `out`."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    path = os.pathsep.join([str(system.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = f"from harness.check.check import print_all; print_all({list(names)!r}, {quick!r}, {case!r})"
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=out, env=env)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
