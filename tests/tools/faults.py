"""The faults that tests plant, a row each with the laws that find it: `python -m tests.tools.faults`.

`bench check` finds policies that cheat or break a law, and engines that break one; imports that breach the
architecture are found by its table.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.harness.check.cheats import CHEATS
from tests.harness.check.test_cheats import BEHAVE
from tests.harness.check.test_check import BROKEN
from tests.harness.check.test_engine import WRONG
from tests.repository.test_layers import PLANTED


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield the kind of each fault, its name, and what finds it."""
    yield from (("cheat", name, "pure" if name in BEHAVE else "pure and laws of trials") for name in CHEATS)
    yield from (("broken", name, laws) for name, (laws, _) in BROKEN.items())
    yield from (("engine", f"wrong_{law}", law) for law in WRONG)
    yield from (("breach", f"{module}: {source!r:.60}", says) for module, source, says in PLANTED)


if __name__ == "__main__":
    for row in rows():
        print("{:7} {:90} {}".format(*row))
