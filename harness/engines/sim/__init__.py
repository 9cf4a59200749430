"""The simulator: a discrete-event model of LLM engines that share GPUs, calibrated on public measurements.

`engine` contains the engine that `replay` drives. `kernel` contains the compiled functions, and `jit` compiles them.
`state` stores the records on which these functions work. Importing this package compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from harness.policy.types import Option

if TYPE_CHECKING:
    from harness.engines.machine import Config, Machine
    from harness.engines.sim.engine import Sim


def make(config: Config, options: Mapping[str, Option], machine: Machine) -> Sim:
    """Return a simulator with this configuration, these engine options and this machine; see harness/loop/engine.py."""
    from harness.engines.sim.engine import Sim

    return Sim(config, options, machine)


def compiled() -> bool:
    """Tell whether the kernel's machine code is on disk, without loading it.

    Also return True if numba's JIT is disabled.
    """
    from harness.engines.sim.jit import CACHE, DISABLED

    return DISABLED or any(CACHE.rglob("loop.advance-*.nbi"))
