"""Worker processes that execute and score runs. Each gets its calls through a pipe, one at a time.

A worker ends when its pipe closes or its parent process is gone. So it never outlives its parent, even a parent that
was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness.loop.guard import LIMIT_S
from harness.loop.interrupted import Terminated
from harness.policy.types import UserError
from harness.run.execute import execute
from harness.run.executor import Why
from harness.run.setup import Failed
from harness.run.sources import Task

ORPHAN_S = 0.8  # how long a worker whose parent died may take to remove what it writes
CLOSE_S = 30.0  # how long a worker that is ended may take to close its engine

Args = tuple[Any, ...]
Calls = Iterable[tuple[str, Args]]  # the name of a run, for errors, and the arguments of a call about it
Work = Callable[..., Any]


class Crew:
    """Workers on this machine, at most `slots` of them, started when they are first needed."""

    def __init__(self) -> None:
        self.slots = 1
        self._idle: list[tuple[Connection, BaseProcess]] = []
        self._busy: dict[Connection, tuple[BaseProcess, str, Args]] = {}

    @property
    def started(self) -> int:
        """The number of running processes."""
        return len(self._idle) + len(self._busy)

    def each(self, work: Work, calls: Calls, left_out: Work = lambda *_: False) -> Iterator[tuple[Args, Any]]:
        """Call `work` in the workers; yield the arguments and the answer of each call when the call ends.

        `work` is a function of a module. An item of `calls` has a run's name and the arguments of one call. A call is
        skipped if `left_out` is true of its arguments just before it would start. If a call raises an error, all
        processes are ended, and then the error is raised here.
        """
        queue = [*calls][::-1]
        try:
            while queue or self._busy:
                while queue and len(self._busy) < self.slots:
                    run, args = queue.pop()
                    if not left_out(*args):
                        self._give(run, work, args)
                for ready in wait(list(self._busy)):
                    assert isinstance(ready, Connection)
                    process, run, args = self._busy.pop(ready)
                    answer = _heard(ready, process, run)
                    self._idle.append((ready, process))
                    yield args, answer
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """End all processes."""
        processes = [process for _, process in self._idle] + [process for process, *_ in self._busy.values()]
        pipes = [*(pipe for pipe, _ in self._idle), *self._busy]
        self._idle, self._busy = [], {}
        for process in processes:
            process.terminate()
        for pipe in pipes:  # before any is waited for: one that did not hear the signal ends by its pipe
            pipe.close()
        until_s = time.monotonic() + CLOSE_S  # for all together
        for process in processes:
            process.join(max(0.0, until_s - time.monotonic()))
            process.kill()
            process.join()

    def _give(self, run: str, work: Work, args: Args) -> None:
        pipe, process = self._idle.pop() if self._idle else _started()
        self._busy[pipe] = (process, run, args)
        with suppress(BrokenPipeError):  # it died: `_heard` reports it
            pipe.send((work, args))


_KEPT: ContextVar[Crew | None] = ContextVar("_KEPT", default=None)


@contextmanager
def shared() -> Iterator[None]:
    """Keep one crew for all sweeps within the block. Outside of such a block each sweep starts its own."""
    with hired() as crew:
        token = _KEPT.set(crew)
        try:
            yield
        finally:
            _KEPT.reset(token)


@contextmanager
def hired() -> Iterator[Crew]:
    """Yield the crew that `shared` keeps. Without one, yield a new crew and shut it down at the end of the block."""
    if crew := _KEPT.get():
        yield crew
        return
    crew = Crew()
    try:
        yield crew
    finally:
        crew.shutdown()


def tried(task: Task, out: Path) -> Why:
    """Execute a task; return the failures of its policy."""
    try:
        execute(task.spec, out, task.code)
    except Failed as failed:
        return failed.why
    return {}


def _started() -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process: BaseProcess = context.Process(target=_serve, args=(theirs, LIMIT_S.get()), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _heard(pipe: Connection, process: BaseProcess, run: str) -> Any:
    """Receive a worker's answer to a call. If the answer is an error, raise it."""
    try:
        answer = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        if process.exitcode in {0, -signal.SIGTERM}:  # a batch system ends all processes of a job at once
            raise Terminated from None
        raise UserError(
            f"a worker died while running {run} (exit code {process.exitcode}; -9 often means that memory "
            f"ran out: --workers 1 takes less)"
        ) from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _serve(pipe: Connection, limit_s: float) -> None:
    """Execute the calls that come through the pipe until it closes. This is the main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_follow, daemon=True).start()
    LIMIT_S.set(limit_s)
    with suppress(EOFError, BrokenPipeError):
        while True:
            work, args = pipe.recv()
            try:
                pipe.send(work(*args))
            except UserError as error:
                pipe.send(error)
            except Terminated:  # the parent closes it
                return
            except BaseException as error:  # whatever it is, the parent shows it
                pipe.send(_portable(error))


def _follow() -> None:
    """Wait until the parent process is gone, and then end this process by SIGTERM.

    If this process is still alive `ORPHAN_S` later, exit at once.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_S)
        os._exit(1)


def _portable(error: BaseException) -> BaseException:
    """Add an error's traceback to it as a note, and return it.

    If the error cannot be pickled, return a RuntimeError with that text instead.
    """
    text = "".join(traceback.format_exception(error))
    error.add_note(f"in a worker:\n{text}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(text)
    return error
