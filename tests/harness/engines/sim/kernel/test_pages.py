"""Pages of elastic memory: kvcached's rule by hand, in the oracle, and in a simulated run."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.harness.engines.sim.kernel.replayed_pages import Pages as Replayed
from tests.harness.engines.sim.kernel.replayed_pages import replayed, simulated
from tests.harness.engines.sim.oracle import Pages


def test_a_page_stays_until_its_last_block_is_free_and_what_came_free_last_is_filled_first() -> None:
    pages = Pages(4)
    first, second, third = pages.take(6), pages.take(1), pages.take(3)
    assert (first, second, third) == ([0, 0, 0, 0, 1, 1], [1], [1, 2, 2])
    pages.give(first)  # page 1 first, page 0 last: that one is empty, and goes
    assert pages.taken == {1: 2, 2: 2}
    assert (pages.count(4), pages.count(5)) == (2, 3)
    assert pages.take(3) == [1, 1, 2]


def test_of_two_pages_a_request_frees_the_one_with_its_first_blocks_is_filled_first() -> None:
    pages = Pages(4)
    _, long, _ = pages.take(2), pages.take(4), pages.take(1)
    assert long == [0, 0, 1, 1]
    pages.give(long)
    assert pages.take(3) == [0, 0, 1]


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
def test_the_oracle_has_the_pages_that_the_replay_has(blocks: int, steps: list[tuple[bool, int]]) -> None:
    ours, theirs, held = Pages(blocks), Replayed(blocks), list[list[int]]()
    for takes, n in steps:
        if takes:
            expected = ours.count(n)
            held.append(ours.take(n))
            assert held[-1] == [theirs.take() for _ in range(n)]
            assert len(ours.taken) == expected
        elif held:
            gone = held.pop(n % len(held))
            ours.give(gone)
            theirs.give(gone)
        assert ours.taken == theirs.used


def test_a_simulated_run_counts_the_pages_of_its_requests(tmp_path: Path) -> None:
    """Its rows do not say when a prompt's step began, so that the replay takes its blocks some milliseconds late."""
    pages = replayed(simulated(2.5, tmp_path))
    assert abs(pages.replayed / pages.counted - 1) < 0.02
    assert pages.counted > 1.3 * pages.packed
