"""The parent process: it hands probes to workers under deadlines and writes one synced line a measurement.

It knows no torch and touches no GPU, so a probe that faults, hangs or raises costs that probe alone. A second call on
the same folder goes on: measurements that were made are not repeated, what faulted or hung is left out unless asked.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from probe.plan import Plan, Probe
from probe.worker import Key, key

ROOT = Path(__file__).resolve().parents[1]
RAW, HOST = "raw.jsonl", "host.json"
GONE_S = 10.0  # a killed process leaves within this, or is stuck in the driver
LEAST_S = 2.0  # a probe is not started with less time left
BAD = frozenset({"fault", "hang"})  # how a probe may end that a second call leaves alone

Line = dict[str, Any]


def aloud(line: str) -> None:
    """Print a line and flush it, so that it appears at once in a pipe too."""
    print(line, flush=True)


class NoGpuError(Exception):
    """An error: there is no GPU to probe. Its message is one line with the reason and what to do."""


class OldRows(Exception):
    """An error: a file has rows of an older form that is no longer read.

    Its message is one line that says what to do.
    """


class Late(Exception):
    """A child said nothing until its deadline."""


class Gone(Exception):
    """A child has ended."""


class Child:
    """A worker process that exchanges lines of JSON with this one; its own output goes to a temporary file."""

    def __init__(self, rig: str, clock: Callable[[], float]) -> None:
        self._clock, self._rest = clock, b""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the child
        self._read, write = os.pipe()
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __package__, "worker", rig, str(write)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(write,),
            start_new_session=True,  # an interrupt is the parent's to handle
            env={**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        )
        os.close(write)

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send one line. Raises Gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Gone(self.last_words()) from None

    def hear(self, deadline: float) -> Line:
        """Wait for the next line. Raises Late at the deadline and Gone at the child's end."""
        while b"\n" not in self._rest:
            if not select.select([self._read], [], [], max(0.0, deadline - self._clock()))[0]:
                raise Late
            more = os.read(self._read, 1 << 16)
            if not more:
                raise Gone(self.last_words())
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        message: Line = json.loads(line)
        return message

    def last_words(self) -> str:
        """Return the exit code and the last line of the child's own output."""
        try:
            code = self._process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe and did not end"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{end}: {lines[-1][:200]}" if lines else end

    def close(self, *, kill: bool = False) -> bool:
        """End the child; return False if it does not die."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        if kill:
            self._process.kill()
        try:
            self._process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            if not kill:
                return self.close(kill=True)
            return False
        finally:
            if self._read >= 0:
                os.close(self._read)
                self._read = -1
        self._log.close()
        return True


def lines(path: Path) -> Iterator[Line]:
    """Yield the whole lines of a file that may have been cut off anywhere. Raises OldRows."""
    if not path.exists():
        return
    for text in path.read_bytes().split(b"\n")[:-1]:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            if "what" in line and "params" in line:
                raise OldRows(f"{path}: its rows are of an earlier version; move it away, and measure again")
            yield line


def made(known: Sequence[Line], probe: str) -> list[Key]:
    """Return the keys of a probe's measurements among the known lines of a journal."""
    return [key(line["quantity"], line["at"]) for line in known if line["source"] == probe and "quantity" in line]


def ended(known: Sequence[Line], probe: str) -> str | None:
    """Return the state in which a probe ended last, or None."""
    states = [str(line["state"]) for line in known if line["source"] == probe and "state" in line]
    return states[-1] if states else None


def opened(path: Path) -> IO[bytes]:
    """Open a file of lines to append to it, on a new line if a kill has cut off the last one."""
    file = path.open("ab+")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        file.write(b"" if file.read(1) == b"\n" else b"\n")
    return file


def write(file: IO[bytes], text: str) -> None:
    """Append one line, and sync it to the disk."""
    file.write(text.encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


class Journal:
    """The journal raw.jsonl; each line is appended with the call's number and the time, and synced to the disk."""

    def __init__(self, path: Path) -> None:
        self.known = list(lines(path))
        self.call = 1 + max((int(line.get("call", 0)) for line in self.known), default=0)
        self._file = opened(path)

    def add(self, line: Line) -> None:
        """Keep one line."""
        line = {**line, "call": self.call, "t": round(time.time(), 3)}
        self.known.append(line)
        write(self._file, json.dumps(line))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def conduct(
    plan: Plan,
    out: Path,
    minutes: float,
    *,
    again: Collection[str] = (),
    only: Collection[str] = (),
    say: Callable[[str], None] = aloud,
    clock: Callable[[], float] = time.monotonic,
) -> Path:
    """Run the probes of the plan that have not ended yet, for at most `minutes`, and return the folder of results.

    The folder is `out`/<GPU name>. `only`: leave out all other probes. `again`: probes to repeat although they
    finished, faulted or hung on an earlier call. Raises NoGpuError where a worker cannot open the device.
    """
    end = clock() + 60 * minutes
    child: Child | None
    child, hello = _greet(plan, clock)
    book: Journal | None = None
    try:
        folder = out / str(hello["short"])
        folder.mkdir(parents=True, exist_ok=True)
        book = Journal(folder / RAW)
        _remember(folder / HOST, book.call, hello)
        for probe in plan.probes:
            if only and probe.name not in only:
                continue
            state = ended(book.known, probe.name)
            if probe.name not in again and (state == "done" or state in BAD):
                say(f"{probe.name:10} {state} on an earlier call" + (" (--again)" if state in BAD else ""))
                continue
            left = end - clock()
            if left < LEAST_S:
                say(f"{probe.name:10} not reached: call again")
                continue
            begun = clock()
            try:
                turn = _turn(plan, probe, child, book, min(probe.box_s, left), clock, fresh=probe.name in again)
            except NoGpuError as error:  # it opened before: what came since broke it
                child, closing = None, {"source": probe.name, "state": "raise", "why": str(error), "stuck": True}
            else:
                child, closing = turn
            closing["s"] = round(clock() - begun, 3)
            book.add(closing)
            why = f": {closing['why']}" if "why" in closing else ""
            say(f"{probe.name:10} {closing['state']} in {closing['s']:.1f} s{why}")
            if closing.get("stuck"):
                break
    finally:
        if child is not None:
            child.close()
        if book is not None:
            book.close()
    return folder


def _greet(plan: Plan, clock: Callable[[], float]) -> tuple[Child, Line]:
    child = Child(plan.rig, clock)
    deadline = clock() + plan.start_s
    why = ""
    try:
        first = child.hear(deadline)
        if "hello" in first:
            child.hear(deadline)  # "ready"
            return child, first["hello"]
        why = str(first.get("sorry"))
    except Late:
        why = f"the device did not open within {plan.start_s:g} s"
    except Gone as gone:
        why = str(gone)
    child.close(kill=True)
    raise NoGpuError(f"no GPU can be probed here: {why} (another interpreter: make gpu PYTHON=...)")


def _turn(
    plan: Plan,
    probe: Probe,
    child: Child | None,
    book: Journal,
    box_s: float,
    clock: Callable[[], float],
    *,
    fresh: bool,
) -> tuple[Child | None, Line]:
    """Run one probe in a worker; return the worker if it can run the next probe, and the line on the probe's end.

    The worker is `child`, or a new one for a probe that must run alone. `fresh`: repeat measurements that are on file.
    """
    if child is not None and probe.alone:
        child.close()
        child = None
    child = child or _greet(plan, clock)[0]
    done = [] if fresh else made(book.known, probe.name)
    deadline = clock() + box_s + probe.grace_s
    closing: Line | None = None
    try:
        child.tell({"probe": probe.name, "module": probe.module, "box_s": box_s, "done": done})
        while closing is None or not probe.alone:  # the worker is ready again once it has tidied up
            message = child.hear(deadline)
            if "ready" in message:
                break
            if "state" in message:
                closing = message
            else:
                book.add(message)
    except Late:
        stuck = not child.close(kill=True)
        hung: Line = {"state": "hang", "why": f"no answer {probe.grace_s:g} s after its time box of {box_s:.0f} s"}
        return None, closing or {"source": probe.name, **hung, **({"stuck": True} if stuck else {})}
    except Gone as gone:
        child.close(kill=True)
        return None, closing or {"source": probe.name, "state": "fault", "why": str(gone)}
    assert closing is not None
    if probe.alone:
        child.close(kill=True)
        return None, closing
    return child, closing


def _remember(path: Path, call: int, hello: Line) -> None:
    """Add this call's machine to host.json."""
    known = json.loads(path.read_text(encoding="utf-8"))["calls"] if path.exists() else []
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"calls": [*known, {"call": call, **hello}]}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
