"""Worlds run, and a digest of every record printed.

    python -m tests.harness.engines.sim.dump FIRST LAST [SEED OLD NEW]...

Each triple is a kernel of its own, with OLD replaced by NEW in its source, to see whether the oracle notices that it is
wrong. From SEED, then from FIRST on, the first seed on which the two differ is printed instead, or none.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np

from harness.engines.sim import state
from tests.harness.engines.sim.world import drive
from tests.harness.engines.sim.worlds import world  # with them comes the kernel


def mutate(old: str, new: str) -> None:
    """Put a changed kernel in the place of the one before. Raises ValueError when the text to replace is not there.

    Its modules are made anew from their files, in the order of their imports: all of them call what was changed, and
    nothing is left of an earlier change.
    """
    names = [name for name in sys.modules if name.startswith("harness.engines.sim.kernel")]
    files = {name: Path(str(sys.modules[name].__file__)) for name in names}
    sources = {name: files[name].read_text() for name in names}
    if not any(old in source for source in sources.values()):
        raise ValueError(f"not in the kernel: {old!r}")
    sources = {name: source.replace(old, new) for name, source in sources.items()}
    package = "harness.engines.sim.kernel"
    constants = {key: value for key, value in vars(state).items() if key.isupper()}  # a change may name any
    for name in (*(name for name in names if name != package), package):  # as they were imported: the package came last
        module = sys.modules[name]
        vars(module).update(constants)
        exec(compile(sources[name], files[name], "exec"), module.__dict__)


def digest(seed: int) -> str:
    """Return the bytes of all request records of one world."""
    sim, _ = drive(world(seed), 30.0)
    R = sim.S.requests
    columns = b"".join(np.ascontiguousarray(R[name]).tobytes() for name in R.dtype.names or ())
    return hashlib.sha256(columns).hexdigest()


def noticed(seed: int) -> bool:
    """Tell whether the changed kernel differs from the oracle, or fails where it should not."""
    from tests.harness.engines.sim.kernel.agree import differences

    try:
        return bool(differences(seed))
    except (ArithmeticError, IndexError, ValueError):
        return True


if __name__ == "__main__":
    first, last, *texts = sys.argv[1:]
    seeds = range(int(first), int(last))
    for known, old, new in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
        mutate(old, new)
        print(next((seed for seed in (int(known), *seeds) if noticed(seed)), "none"))
    if not texts:
        for seed in seeds:
            print(digest(seed))
