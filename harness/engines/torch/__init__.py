"""An engine that runs every system on real kernels and carries out all actions of a policy; see `engine.py`."""

from __future__ import annotations

from collections.abc import Mapping

from harness.engines.machine import Config, Machine
from harness.engines.torch.engine import Torch
from harness.engines.torch.setting import Fields
from harness.policy.types import Option

__all__ = ["Fields", "make"]


def make(config: Config, options: Mapping[str, Option], machine: Machine, fields: Fields) -> Torch:  # noqa: ARG001
    """Configure the engine; see harness/loop/engine.py."""
    return Torch(config, options, fields)
