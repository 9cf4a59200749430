"""Faults that tests plant: none is given up, and each is found by laws that are named."""

from __future__ import annotations

from collections import Counter

from tests.tools.faults import rows

LEAST = {"cheat": 42, "broken": 23, "engine": 15, "breach": 34}


def test_no_planted_fault_is_given_up() -> None:
    every = list(rows())
    assert Counter(kind for kind, _, _ in every) >= Counter(LEAST)
    assert all(laws for _, _, laws in every)
