"""The child process: it runs the probes named on stdin, one after another, and sends their samples through a pipe.

A probe is a generator of samples. After each sample, the time limit of the probe is checked. If a probe ends this
process, the parent still has all samples that were sent before.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

Value = str | int | float | bool
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """A measurement of `what`: repeated values in `unit`, under the conditions `params`.

    `sms` is the number of SMs on which it really ran; None if that does not matter.
    """

    what: str
    values: Sequence[float]
    unit: str
    params: Mapping[str, Value]
    sms: int | None = None
    facts: Mapping[str, Value] | None = None  # bytes, FLOPs and what else a reader needs to judge it


def sample(
    what: str,
    values: float | Sequence[float],
    unit: str,
    sms: int | None = None,
    facts: Mapping[str, Value] | None = None,
    **params: Value,
) -> Sample:
    """Return a `Sample` whose `params` are the keyword arguments."""
    many = [float(values)] if isinstance(values, int | float) else [float(v) for v in values]
    return Sample(what, many, unit, params, sms, facts)


def key(what: str, params: Mapping[str, Any]) -> Key:
    """Return a key that identifies a measurement of a probe."""
    return what, json.dumps(dict(params), sort_keys=True)


def _digits(value: float) -> float:
    """Round a number to six digits, which is more than any clock here has."""
    return float(f"{value:.6g}")


def record(probe: str, s: Sample) -> dict[str, Any]:
    """Return a sample as a row of raw.jsonl, without the time at which it was measured.

    Measured seconds are stored as `seconds`, and other quantities as a `value` with its `unit`.
    """
    v = sorted(s.values)
    middle, p95 = _digits(median(v)), _digits(quantiles(v, n=20, method="inclusive")[-1] if len(v) > 1 else v[0])
    out: dict[str, Any] = {"quantity": s.what, "at": dict(s.params)}
    out |= {"seconds": middle} if s.unit == "s" else {"value": middle, "unit": s.unit}
    out |= {"n": len(v), "source": probe, "min": _digits(v[0]), "p95": p95, "sms": s.sms}
    return out | ({"facts": dict(s.facts)} if s.facts else {})


class Box:
    """A probe's time limit: the seconds left, and the measurements that an earlier call has made."""

    def __init__(self, seconds: float, done: Iterable[Key] = ()) -> None:
        self._end, self._done = time.monotonic() + seconds, frozenset(done)

    def left_s(self) -> float:
        """Return the seconds until the probe should stop; negative if it should have stopped already."""
        return self._end - time.monotonic()

    def todo(self, what: str, **params: Value) -> bool:
        """Tell whether this measurement must still be made."""
        return key(what, params) not in self._done


def play(probe: str, module: str, box: Box, send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run a probe, send its samples as rows, and return the line that ends the probe.

    Its `state` is `done`, or `boxed` if the time limit was reached, or `raise` with the error as `why`.
    """
    try:
        samples = find(module, probe, box)
        for sample in samples:
            send(record(probe, sample))
            if box.left_s() <= 0:
                samples.close()  # type: ignore[attr-defined]  # a generator
                return {"source": probe, "state": "boxed", "why": "its time was over"}
    except Exception as error:  # any exception is a finding
        return {"source": probe, "state": "raise", "why": f"{type(error).__name__}: {error}".split("\n")[0][:300]}
    return {"source": probe, "state": "done"}


def find(module: str, name: str, box: Box) -> Iterator[Sample]:
    """Return the samples of a probe, which is the function `name` of a module."""
    samples: Iterator[Sample] = getattr(importlib.import_module(module), name)(box)
    return samples


def die_with_parent() -> None:
    """Ask Linux to kill this worker when its parent ends, even if the worker hangs in the driver."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(rig: str, fd: int) -> None:
    """Serve as a worker: run the probes that lines of stdin ask for, and write rows to the descriptor `fd`.

    The worker first sends the facts of the machine (`hello`). It sends "ready" before it reads each line. A line is a
    JSON object: {"probe", "module", "box_s", "done"}.
    """
    die_with_parent()
    out = os.fdopen(fd, "w", buffering=1, encoding="utf-8")

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")

    try:
        bench = importlib.import_module(rig)
        send({"hello": bench.hello()})
    except Exception as error:
        send({"sorry": f"{type(error).__name__}: {error}".split("\n")[0]})
        return
    send({"ready": True})
    for line in sys.stdin:
        ask = json.loads(line)
        box = Box(ask["box_s"], [(what, params) for what, params in ask["done"]])
        send(play(ask["probe"], ask["module"], box, send))
        bench.tidy()  # raises where the probe broke the device's context: the parent then starts a new worker
        send({"ready": True})
