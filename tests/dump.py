"""Run worlds and print a digest of every record: `python -m tests.dump FIRST LAST [OLD NEW]...`.

Pairs OLD NEW are replaced in the kernel's source first, to see whether the oracle notices a wrong kernel; then the
first seed on which the two differ is printed instead.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

import numpy as np

from harness.engines import sim
from tests.worlds import drive, world


def mutate(pairs: list[str]) -> None:
    """Put a changed kernel in the place of the real one. Raises ValueError when a text to replace is not there."""
    spec = importlib.util.find_spec("harness.engines.kernel")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        if old not in source:
            raise ValueError(f"not in the kernel: {old!r}")
        source = source.replace(old, new)
    module = importlib.util.module_from_spec(spec)
    sys.modules["harness.engines.kernel"] = module
    setattr(sim, "kernel", module)  # noqa: B010 - a module is not meant to be assigned to
    exec(compile(source, spec.origin, "exec"), module.__dict__)


def digest(seed: int) -> str:
    """The bytes of all request records of one world."""
    sim, _ = drive(world(seed), 30.0)
    R = sim.S.R
    columns = b"".join(np.ascontiguousarray(R[name]).tobytes() for name in R.dtype.names or ())
    return hashlib.sha256(columns).hexdigest()


if __name__ == "__main__":
    first, last, *pairs = sys.argv[1:]
    if pairs:
        mutate(pairs)
        from tests.test_kernel import differences

        print(next((seed for seed in range(int(first), int(last)) if differences(seed)), ""))
    else:
        for seed in range(int(first), int(last)):
            print(digest(seed))
