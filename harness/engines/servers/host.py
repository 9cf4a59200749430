"""Look up the cards of this host, and the programs by which servers can share them. Nothing is started or changed.

No other module looks for KV memory on demand (kvcached), or for servers that run at the same time on parts of the SMs
(MPS). An engine's `can` and `offers` follow from what is found here.
"""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from harness.engines.servers import environments

DEVICES = Path("/dev")  # the driver has one file per card there
MPS = "nvidia-cuda-mps-control"  # https://docs.nvidia.com/deploy/mps/appendix-tools-and-interface-reference.html
MOUNTED = Path("/usr/local/nvidia/bin")  # containers have the driver's programs there, often not on PATH


class Card(NamedTuple):
    """The cards of a host, and the ways of sharing them that a Python environment supports."""

    gpus: int = 1
    mps: str | None = None  # the program that starts the daemon of MPS
    kvcached: bool = False  # the environment has it


def card(environment: str) -> Card | None:
    """Return the cards of this host, and the ways of sharing them; None if it has no card."""
    gpus = sum(path.name.removeprefix("nvidia").isdecimal() for path in DEVICES.glob("nvidia*"))
    mounted = MOUNTED / MPS
    mps = shutil.which(MPS) or (str(mounted) if mounted.is_file() else None)
    return Card(gpus, mps, version(environment, "kvcached") is not None) if gpus else None


def version(environment: str, package: str, root: Path | None = None) -> str | None:
    """Return the version of a package in a Python environment; None if the package is not installed there."""
    paths = [
        str(path) for path in ((root or environments.ROOT) / f".venv-{environment}").glob("lib/python*/site-packages")
    ]
    return next((distribution.version for distribution in metadata.distributions(name=package, path=paths)), None)
