"""The kernel against its independent oracle, and against itself as plain Python."""

from __future__ import annotations

import pytest

from tests.harness.engines.sim.dump import digest
from tests.harness.engines.sim.kernel.agree import FULL, apart, differences, plain
from tests.harness.engines.sim.worlds import (
    BESIDE,
    CUT,
    HOSTED,
    LAYERED,
    LENT,
    MEASURED,
    MIXED,
    RESERVED,
    SHARED,
    SLICED,
    TURNED,
    WILD,
    looped,
)

WORLDS = {  # by what they have: the first seed, how many (half in the fast tests), and how many more in the slow ones
    "whole prompts": (0, 100, 400),
    "turns": (TURNED, 50, 400),
    "anything at any time": (WILD, 50, 600),
    "models on several numbers of GPUs": (CUT, 50, 300),
    "processes that take turns": (SLICED, 50, 400),
    "prompts that begin alike": (SHARED, 100, 400),
    "prefills in slices": (LAYERED, 50, 400),
    "KV attended on other GPUs": (LENT, 50, 400),
    "steps that disturb each other": (BESIDE, 50, 400),
    "shares that were measured": (MEASURED, 90, 450),
    "two kinds of GPU": (MIXED, 50, 400),
    "contiguous KV": (RESERVED, 100, 400),
    "weights that hosts have no room for": (HOSTED, 50, 400),
}


@pytest.mark.parametrize("kind", WORLDS)
def test_kernel_agrees_with_the_oracle(kind: str) -> None:
    first, few, _ = WORLDS[kind]
    assert [d for seed in range(first, first + few // 2) for d in differences(seed)] == []


@pytest.mark.full
@pytest.mark.parametrize("kind", WORLDS)
def test_kernel_agrees_with_the_oracle_on_many_worlds(kind: str) -> None:
    first, few, many = WORLDS[kind]
    assert [d for seed in range(first + few // 2, first + few + many) for d in differences(seed)] == []


def test_closed_loops_are_the_oracles() -> None:
    each = 15 if FULL else 5
    seeds = [k + i for k in (0, 50, 100, TURNED, TURNED + 50, WILD, WILD + 50) for i in range(each)]
    assert [f"{seed}: {d}" for seed in seeds for d in apart(looped(seed))] == []


@pytest.mark.slow
def test_compiled_and_plain_python_give_the_same_bits() -> None:
    each = 15 if FULL else 2
    for first in (0, TURNED, WILD, CUT, SLICED, SHARED, LAYERED, LENT, BESIDE, MEASURED, MIXED, RESERVED, HOSTED):
        assert plain(str(first), str(first + each)).split() == [digest(seed) for seed in range(first, first + each)]
