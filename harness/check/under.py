"""The digest of what a check depends on beside the system's file: laws, cases, loop, engine and cost tables."""

from __future__ import annotations

from functools import cache
from hashlib import sha256

from harness.loop import meaning
from harness.loop.system import ROOT

FILES = (
    "harness/check/*.py",
    "harness/loop/*.py",
    "harness/policy/*.py",
    "harness/engines/machine.py",
    "harness/engines/rows.py",
    "harness/engines/stamps.py",
    "harness/engines/sim/**/*.py",
    "harness/engines/costs/*.py",
    "harness/engines/costs/tables/*.toml",
    "workloads/shapes.toml",
)


@cache
def under() -> str:
    """Return the SHA-256 over the files, by what they mean."""
    files = sorted({file for pattern in FILES for file in ROOT.glob(pattern)})
    lines = (f"{file.relative_to(ROOT)}\0{meaning.digest(file)}\n" for file in files)
    return sha256("".join(lines).encode()).hexdigest()
