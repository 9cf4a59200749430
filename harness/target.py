"""The target processor of all computations: one for each architecture, whichever machine computes the results.

NumPy, its BLAS and numba each choose code by the processor on which they run, and results differ in the last digit:
`exp` with AVX-512 is not `exp` without. Environment variables set one target for all three, before any of them is
imported. A variable that the user has set stays unchanged. `harness.run.arithmetic` hashes the results of this
arithmetic.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})  # as /proc/cpuinfo names them
V4 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
CPUINFO = Path("/proc/cpuinfo")


@cache
def name() -> str:
    """Return the target of this machine: x86-64-v3, x86-64 for older processors, or another architecture's name."""
    return named(platform.machine(), flags())


def named(architecture: str, has: frozenset[str]) -> str:
    """Return the target for a processor of an architecture with the features `has`; an empty set means all features."""
    if architecture.lower() not in {"x86_64", "amd64"}:
        return {"aarch64": "arm64"}.get(architecture.lower(), architecture.lower())
    return "x86-64-v3" if not has or has >= V3 else "x86-64"


def flags(path: Path = CPUINFO) -> frozenset[str]:
    """Return the features of this machine's first processor as Linux lists them; empty if it lists none."""
    with suppress(OSError):
        for line in path.read_text("utf-8", "replace").splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def variables(target: str, has: frozenset[str]) -> dict[str, str]:
    """Return the environment variables that set a target for numba, NumPy and BLAS.

    `has` are the features of the processor.
    """
    chosen = {
        "NUMBA_CPU_NAME": target if target.startswith("x86") else "generic",
        "NUMBA_CPU_FEATURES": "",
        "OPENBLAS_NUM_THREADS": "1",
    }
    cores = {"x86-64-v3": "Haswell", "x86-64": "Nehalem", "arm64": "ARMV8"}
    if target in cores:
        chosen["OPENBLAS_CORETYPE"] = cores[target]
    if target == "x86-64-v3" and has >= V4:
        chosen["NPY_DISABLE_CPU_FEATURES"] = "X86_V4"
    return chosen


def pin() -> None:
    """Set the environment variables of this machine's target, for this process and the processes that it starts."""
    for key, value in variables(name(), flags()).items():
        os.environ.setdefault(key, value)


def compiled() -> str:
    """Return the processor and features that numba compiles for."""
    return f"{os.environ.get('NUMBA_CPU_NAME', '')}{os.environ.get('NUMBA_CPU_FEATURES', '')}"
