"""Probes that measure nothing and end in every way, for the conductor's tests; a worker imports this by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from probe.worker import Box, Sample, sample


def hello() -> dict[str, Any]:
    if why := os.environ.get("FAKE_NO_GPU"):
        raise RuntimeError(why)
    return {"name": "NVIDIA Fake 1", "short": "fake-1", "sms": 132}


def tidy() -> None:
    if marker := os.environ.get("FAKE_BROKEN"):
        path = Path(marker)
        if path.exists():  # as a context that an earlier probe broke, once
            path.unlink()
            raise RuntimeError("the context is broken")


def good(box: Box) -> Iterator[Sample]:
    for i in range(3):
        if box.todo("seconds", i=i):
            yield sample("seconds", [3.0, 1.0, 2.0], "s", 64, {"bytes": 8}, i=i)


def also(box: Box) -> Iterator[Sample]:
    if box.todo("worker"):
        yield sample("worker", float(os.getpid()), "1")


def again(box: Box) -> Iterator[Sample]:
    yield from also(box)


def raises(box: Box) -> Iterator[Sample]:
    del box
    yield sample("before", 1, "1")
    raise ValueError("it cannot be\nand more lines")


def hangs(box: Box) -> Iterator[Sample]:
    del box
    yield sample("before", 1, "1")
    read, _write = os.pipe()
    os.read(read, 1)  # for ever: nobody writes


def crashes(box: Box) -> Iterator[Sample]:
    del box
    yield sample("before", 1, "1")
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(box: Box) -> Iterator[Sample]:
    del box
    yield sample("before", 1, "1")
    os.write(2, b"some library says why\n")
    os._exit(3)


def breaks(box: Box) -> Iterator[Sample]:
    del box
    Path(os.environ["FAKE_BROKEN"]).touch()
    yield sample("before", 1, "1")


def endless(box: Box) -> Iterator[Sample]:
    i = 0
    while True:
        i += 1
        if box.todo("seconds", i=i):
            yield sample("seconds", i, "s", i=i)
