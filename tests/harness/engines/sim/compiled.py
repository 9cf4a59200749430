"""The simulator's machine code, made before the time of any test counts: it takes a core most of a minute."""

from __future__ import annotations

import fcntl
import os

from harness.engines.sim.jit import CACHE, DISABLED
from tests.harness.engines.sim.world import drive
from tests.harness.engines.sim.worlds import CUT, LAYERED, LENT, SHARED, SLICED, TURNED, WILD, world

MADE = "tests"  # a file beside the code: locked while one process compiles and others wait, not empty when it is done
EACH = 2  # worlds of a kind; on more of them nothing further is compiled (seen with 100)


def once() -> None:
    """Compile what tests use, unless it stands."""
    if DISABLED:
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / MADE).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_size:
            return
        for first in (0, TURNED, WILD, CUT, SLICED, SHARED, LAYERED, LENT):
            for seed in range(first, first + EACH):
                drive(world(seed))
        file.write(b"made\n")
