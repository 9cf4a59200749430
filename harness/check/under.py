"""A digest of everything that a check depends on except the system's file: laws, cases, loop, engine, cost tables."""

from __future__ import annotations

from fnmatch import fnmatch
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
    """Return one SHA-256 over the meaning of all files that a check depends on, except the system's file.

    Rewrites that are recorded as giving the same rows do not change it. The record is that of harness/loop/meaning.py.
    """
    rewritten = {ROOT / name for now, _ in meaning.rewrites() for name, _ in now}
    every = {file for pattern in FILES for file in ROOT.glob(pattern)} | {file for file in rewritten if file.is_file()}
    known = meaning.as_before({(str(file.relative_to(ROOT)), meaning.digest(file)) for file in every})
    patterns = [pattern.replace("**/", "*") for pattern in FILES]
    lines = (f"{name}\0{digest}\n" for name, digest in sorted(known) if any(fnmatch(name, p) for p in patterns))
    return sha256("".join(lines).encode()).hexdigest()
