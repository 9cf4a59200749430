"""Every system on real kernels: an engine of our own for all actions of the vocabulary. `engine.py` says how."""

from __future__ import annotations

from collections.abc import Mapping

from harness.engines.machine import Config, Machine
from harness.engines.torch.engine import Torch
from harness.policy.types import Option


def make(config: Config, options: Mapping[str, Option], machine: Machine) -> Torch:  # noqa: ARG001 - not priced
    """Configure the engine; see harness/loop/engine.py."""
    return Torch(config, options)
