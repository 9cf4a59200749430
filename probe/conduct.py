"""The parent process: it hands probes to workers with deadlines, and writes one line for each measurement.

It does not import torch and does not use the GPU, so a probe that faults, hangs or raises loses only its own results.
Each line is synced to the disk. A second call on the same folder resumes: it repeats no measurement, and it skips
probes that faulted or hung unless they are asked for.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
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


class NoGpuError(Exception):
    """There is no GPU to probe. The message is one line with the reason and the remedy."""


class OldRows(Exception):
    """A file has rows of an older form that is no longer read. The message is one line with the remedy."""


class Child:
    """A worker process that exchanges lines of JSON with this process; its own output goes to a temporary file."""

    def __init__(self, rig: str) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the child
        read, write = os.pipe()
        self._read, self._rest = os.fdopen(read, "rb", buffering=0), b""
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
        """Send one line to the child. Raises EOFError if the child has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EOFError(self.last_words()) from None

    def hear(self, deadline: float) -> Line:
        """Wait for the child's next line. Raises TimeoutError at the deadline, and EOFError if the child has ended."""
        while b"\n" not in self._rest:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            more = self._read.read(1 << 16)
            if not more:
                raise EOFError(self.last_words())
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        message: Line = json.loads(line)
        return message

    def last_words(self) -> str:
        """Return the child's exit code and the last line of its own output."""
        try:
            code = self._process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe and did not end"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{end}: {lines[-1][:200]}" if lines else end

    def close(self, *, kill: bool = False) -> bool:
        """End the child process; return False if it does not end."""
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
            self._read.close()
        self._log.close()
        return True


def lines(path: Path) -> Iterator[Line]:
    """Yield the complete lines of a file whose last line may have been cut off. Raises OldRows."""
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
    """Return the keys of a probe's measurements among `known`, the lines of a journal."""
    return [key(line["quantity"], line["at"]) for line in known if line["source"] == probe and "quantity" in line]


def ended(known: Sequence[Line], probe: str) -> str | None:
    """Return the state in which the last try of a probe ended; None if the probe has never ended."""
    states = [str(line["state"]) for line in known if line["source"] == probe and "state" in line]
    return states[-1] if states else None


def opened(path: Path) -> IO[bytes]:
    """Open a file of lines for appending; begin a new line if its last line was cut off."""
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
    """The journal raw.jsonl.

    Each appended line has the number of this call and the time, and is synced to the disk.
    """

    def __init__(self, known: list[Line], file: IO[bytes]) -> None:
        self.known, self._file = known, file
        self.call = 1 + max((int(line.get("call", 0)) for line in known), default=0)

    def add(self, line: Line) -> None:
        """Append one line."""
        line = {**line, "call": self.call, "t": round(time.time(), 3)}
        self.known.append(line)
        write(self._file, json.dumps(line))


def conduct(plan: Plan, out: Path, minutes: float, *, again: Collection[str] = (), only: Collection[str] = ()) -> Path:
    """Run the probes of the plan that have not ended yet, for at most `minutes`, and return the folder of results.

    The folder is `out`/<GPU name>. With `only`, all other probes are left out. `again` names probes to repeat even if
    they finished, faulted or hung on an earlier call. Raises NoGpuError if a worker cannot open the device.
    """
    end = time.monotonic() + 60 * minutes
    child: Child | None
    child, hello = _greet(plan)
    try:
        folder = out / str(hello["short"])
        folder.mkdir(parents=True, exist_ok=True)
        known = list(lines(folder / RAW))
        with opened(folder / RAW) as file:
            book = Journal(known, file)
            _remember(folder / HOST, book.call, hello)
            for probe in plan.probes:
                if only and probe.name not in only:
                    continue
                state = ended(known, probe.name)
                if probe.name not in again and (state == "done" or state in BAD):
                    asked = " (--again)" if state in BAD else ""
                    print(f"{probe.name:10} {state} on an earlier call{asked}", flush=True)
                    continue
                begun = time.monotonic()
                if end - begun < LEAST_S:
                    print(f"{probe.name:10} not reached: call again", flush=True)
                    continue
                done = [] if probe.name in again else made(known, probe.name)
                child, closing = _turn(plan, probe, child, book, min(probe.box_s, end - begun), done)
                closing["s"] = round(time.monotonic() - begun, 3)
                book.add(closing)
                why = f": {closing['why']}" if "why" in closing else ""
                print(f"{probe.name:10} {closing['state']} in {closing['s']:.1f} s{why}", flush=True)
                if closing.get("stuck"):
                    break
    finally:
        if child is not None:
            child.close()
    return folder


def _greet(plan: Plan) -> tuple[Child, Line]:
    child, deadline = Child(plan.rig), time.monotonic() + plan.start_s
    try:
        first = child.hear(deadline)
        if "hello" in first:
            child.hear(deadline)  # "ready"
            return child, first["hello"]
        why = str(first.get("sorry"))
    except TimeoutError:
        why = f"the device did not open within {plan.start_s:g} s"
    except EOFError as gone:
        why = str(gone)
    child.close(kill=True)
    raise NoGpuError(f"no GPU can be probed here: {why} (another interpreter: make gpu PYTHON=...)")


def _turn(
    plan: Plan, probe: Probe, child: Child | None, book: Journal, box_s: float, done: Sequence[Key]
) -> tuple[Child | None, Line]:
    """Run one probe in a worker, and return two things: the worker, and the line that ends the probe.

    The worker is `child`. If `child` is None or the probe must run alone, it is a new one. If the worker cannot run the
    next probe, None is returned in its place. The measurements in `done` are not repeated.
    """
    if child is not None and probe.alone:
        child.close()
        child = None
    try:
        child = child or _greet(plan)[0]
    except NoGpuError as error:  # it opened before: what came since broke it
        return None, {"source": probe.name, "state": "raise", "why": str(error), "stuck": True}
    closing: Line | None = None
    deadline = time.monotonic() + box_s + probe.grace_s
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
    except TimeoutError:
        why = f"no answer {probe.grace_s:g} s after its time box of {box_s:.0f} s"
        closing = closing or {"source": probe.name, "state": "hang", "why": why}
    except EOFError as gone:
        closing = closing or {"source": probe.name, "state": "fault", "why": str(gone)}
    else:
        assert closing is not None
        if not probe.alone:
            return child, closing
    return None, closing if child.close(kill=True) else {**closing, "stuck": True}


def _remember(path: Path, call: int, hello: Line) -> None:
    """Add this call's machine to host.json."""
    known = json.loads(path.read_text(encoding="utf-8"))["calls"] if path.exists() else []
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"calls": [*known, {"call": call, **hello}]}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
