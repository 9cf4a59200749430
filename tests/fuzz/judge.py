"""A judge of cases: each runs in a process forked from one that has imported the bench, and a bad end has its reason.

A good end is exit code 2 (of `bench check` also 1), one line that names the culprit, and an empty folder. So is exit
code 0 where the case has it for sane. Either stays within limits of processor time and memory.
"""

from __future__ import annotations

import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from shlex import quote
from shutil import rmtree
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Literal, NamedTuple, NoReturn

from tests import ROOT

CPU_S = 30.0
PEAK_BYTES = 5 << 29  # 2.5 GiB
WALL_S = 120.0  # ends what waits for ever; no verdict on speed, which is processor time
ROOM_BYTES = 4 << 30  # addresses that a case may have beyond those of its parent
FILE_BYTES = 1 << 30
USAGE = ("Usage: ", "Try ")  # click's lines before the one that tells a wrong option
Around = Literal["", "stdout closed", "stderr closed", "reader gone", "folder gone"]


class Case(NamedTuple):
    """A command line for an empty folder, and the end that is asked of it."""

    name: str  # group/what
    argv: tuple[str, ...]  # `bench` takes these; "{here}" is the folder that `put` fills
    culprit: str = ""  # a part that the line of a refusal must contain; "": not judged
    accept: bool = True  # whether exit code 0 is a sane answer
    put: Callable[[Path], object] | None = None
    env: Mapping[str, str] = MappingProxyType({})  # changes of the environment; "": unset
    around: Around = ""  # what is wrong with the process itself
    skips: bool = False  # whether a sane answer has to name the culprit, which it leaves out


class End(NamedTuple):
    """A case's end."""

    case: Case
    code: int  # exit code, or minus the signal
    cpu_s: float
    peak_bytes: int
    out: str
    err: str
    left: tuple[str, ...]  # files in its folder
    late: bool  # it was ended by WALL_S

    @property
    def bad(self) -> str:
        """The fault of it; "" where it has none."""
        return "; ".join(_faults(self))

    @property
    def line(self) -> str:
        """The line that tells what is wrong: the last of stderr, else of stdout."""
        return ([*self.out.splitlines(), *self.err.splitlines()] or [""])[-1]

    @property
    def command(self) -> str:
        """The case as a shell takes it, from an empty folder."""
        env = [f"{key}={quote(value)}" for key, value in self.case.env.items()]
        return " ".join([*env, "bench", *map(quote, self.case.argv)])


def _faults(end: End) -> Iterator[str]:
    if end.cpu_s > CPU_S:
        yield f"{end.cpu_s:.0f} s of processor time"
    if end.late:
        yield f"no end within {WALL_S:.0f} s"
    if end.peak_bytes > PEAK_BYTES:
        yield f"{end.peak_bytes / (1 << 30):.1f} GiB"
    if "Traceback (most recent call last)" in end.err:
        yield "traceback"
    yield from _of_refusal(end) if end.code else _of_answer(end)


def _of_answer(end: End) -> Iterator[str]:
    if not end.case.accept:
        yield "accepted"
    elif end.case.skips and end.case.culprit not in end.out + end.err:
        yield f'"{end.case.culprit}" is not named'


def _of_refusal(end: End) -> Iterator[str]:
    case = end.case
    if end.code != 2 and not (end.code == 1 and case.argv[:1] == ("check",)):
        yield f"exit code {end.code}"
        return
    lines = end.err.splitlines()
    while lines and (not lines[0] or lines[0].startswith(USAGE)):
        lines.pop(0)
    if not lines and not end.out and case.around != "stderr closed":
        yield "no line"
    elif len(lines) > 1:
        yield f"{len(lines)} lines on stderr"
    if case.culprit and case.culprit not in (end.err if lines else end.out):
        yield f'"{case.culprit}" is not named'
    if lines and end.left:  # an empty stderr means that a part was done and reported
        yield f"left {', '.join(end.left[:3])}"


# ------------------------------------------------------------------ running


def warm() -> None:
    """Import what commands import, so that a forked process has it, and compile what they would compile each."""
    from harness.cli.app import COMMANDS, load

    for name in COMMANDS:
        load(name)
    for module in WARM:
        import_module(module)
    with TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "harness", *RUN],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )


RUN = (
    "compare --systems static --trace sample --models llama-3.2-1b*8 --rate-scale 1 --seeds 1 --no-plot -o res".split()
)
WARM = (
    "harness.check.check harness.answers.comparison harness.answers.explain harness.answers.ledger "
    "harness.answers.text harness.run.execute harness.run.perfetto harness.run.retrace harness.run.sweep "
    "harness.study.grid harness.study.judged harness.study.ledger harness.study.load harness.study.measure "
    "harness.study.misses harness.study.sensitivity harness.study.summary harness.study.tune harness.study.varying "
    "harness.validate.ranks harness.validate.validate pandas plots.fig_compare plots.fig_study pydantic pyarrow.csv "
    "traces.convert traces.realism workloads.build"
).split()


class _Running(NamedTuple):
    case: Case
    folder: Path
    pid: int
    fd: int
    until_s: float


def ends(cases: Iterable[Case], folder: Path, workers: int = 1) -> Iterator[End]:
    """Run cases below a folder, some at once; yield each when it has ended."""
    left, running, number = iter(cases), dict[int, _Running](), 0
    poll = select.poll()
    more = True
    while more or running:
        while more and len(running) < workers:
            case = next(left, None)
            if case is None:
                more = False
                break
            run_folder = folder / f"run-{number}"
            number += 1
            started = _started(case, run_folder)
            running[started.fd] = started
            poll.register(started.fd, select.POLLIN)
        for fd, _ in poll.poll(1000):
            poll.unregister(fd)
            yield _ended(running.pop(fd), late=False)
        for run in [run for run in running.values() if time.monotonic() > run.until_s]:
            poll.unregister(run.fd)
            yield _ended(running.pop(run.fd), late=True)


def _started(case: Case, folder: Path) -> _Running:
    (folder / "cwd").mkdir(parents=True)
    if case.put is not None:
        (here := folder / "here").mkdir()
        case.put(here)
        case = case._replace(argv=tuple(word.replace("{here}", str(here)) for word in case.argv))
    sys.stdout.flush()
    sys.stderr.flush()
    if not (pid := os.fork()):
        _child(case, folder)
    return _Running(case, folder, pid, os.pidfd_open(pid), time.monotonic() + WALL_S)


def _ended(run: _Running, *, late: bool) -> End:
    if late:
        _kill(run.pid)
    _, status, usage = os.wait4(run.pid, 0)
    os.close(run.fd)
    _kill(run.pid)  # what it started and left behind
    out, err = ((run.folder / name).read_text("utf-8", "replace") for name in ("out", "err"))
    cwd = run.folder / "cwd"
    left = tuple(str(path.relative_to(cwd)) for path in sorted(cwd.rglob("*")) if not path.is_dir())
    rmtree(run.folder)
    cpu_s, peak_bytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10
    return End(run.case, os.waitstatus_to_exitcode(status), cpu_s, peak_bytes, out, err, left, late)


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _child(case: Case, folder: Path) -> NoReturn:
    """Become the command. Never returns into the process that was forked."""
    code = 1
    try:
        os.setsid()
        for fd, name in ((0, ""), (1, "out"), (2, "err")):
            path, flags = (folder / name, os.O_WRONLY | os.O_CREAT) if name else (Path(os.devnull), os.O_RDONLY)
            os.dup2(os.open(path, flags, 0o600), fd)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - the process's own
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        _limit()
        os.chdir(folder / "cwd")
        for key, value in case.env.items():
            os.environ[key] = value
            if not value:
                del os.environ[key]
        if case.env or case.around:
            _exec(case, folder)
        from harness.cli import terminal
        from harness.cli.app import main

        terminal.FIRST_S = math.inf  # a slow stage is no second line of an error
        main(args=list(case.argv), prog_name="bench")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        with suppress(ValueError):  # a stderr that was closed
            traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            code = 1
        finally:
            os._exit(code)


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
    most = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (int(CPU_S) + 1, int(CPU_S) + 2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _exec(case: Case, folder: Path) -> NoReturn:
    """Run the command in an interpreter of its own: its start is what is tried."""
    os.environ["PYTHONPATH"] = str(ROOT)
    if case.around == "stdout closed":
        os.close(1)
    elif case.around == "stderr closed":
        os.close(2)
    elif case.around == "reader gone":
        gone, to = os.pipe()
        os.close(gone)
        os.dup2(to, 1)
        os.close(to)
    elif case.around == "folder gone":
        (folder / "cwd").rmdir()
        (folder / "cwd").parent.joinpath("gone").mkdir()
    os.execv(sys.executable, [sys.executable, "-m", "harness", *case.argv])
