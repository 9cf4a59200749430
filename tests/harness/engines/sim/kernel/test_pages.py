"""Pages of elastic memory: kvcached's rule by hand, in the oracle."""

from __future__ import annotations

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
