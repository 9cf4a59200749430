"""The simulator: a discrete-event model of LLM engines that share GPUs, calibrated on public measurements.

`engine` has the engine, which `replay` drives. `kernel` holds the compiled functions, `state` lays out the records that
they work on, and `jit` compiles them. Importing this package compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from harness.policy.types import Option

if TYPE_CHECKING:
    from harness.engines.machine import Config, Machine
    from harness.engines.sim.engine import Sim


def make(config: Config, options: Mapping[str, Option], machine: Machine) -> Sim:
    """Configure the simulator; see harness/loop/engine.py."""
    from harness.engines.sim.engine import Sim

    return Sim(config, options, machine)


def compiled() -> bool:
    """Tell whether the kernel's machine code is on disk, without loading it.

    Also return True if numba's JIT is disabled.
    """
    from harness.engines.sim.jit import CACHE, DISABLED

    return DISABLED or any(CACHE.rglob("loop.advance-*.nbi"))
