"""Blocks that several sequences share, by the laws of section 4.4, and by the lineages of beams."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.study.sharing import BLOCK_TOKENS, in_use, saved


@given(st.integers(1, 70), st.integers(1, 60), st.integers(1, 6))
def test_samples_share_the_blocks_that_the_prompt_fills(prompt: int, output: int, n: int) -> None:
    full = prompt // BLOCK_TOKENS
    assert in_use(prompt, output, n, None) == [
        full + n * (-(-(prompt + made) // BLOCK_TOKENS) - full) for made in range(1, output)
    ]


@given(st.integers(1, 40), st.integers(2, 50), st.integers(1, 6), st.integers(0, 9))
def test_beams_hold_a_block_for_each_lineage_that_wrote_its_last_token(
    prompt: int, output: int, n: int, seed: int
) -> None:
    held = in_use(prompt, output, n, np.random.default_rng(seed))
    rng = np.random.default_rng(seed)
    written: list[list[int]] = [[] for _ in range(n)]  # by beam, who wrote each token of the output
    for made in range(1, output):
        if made > 1:
            written = [list(written[parent]) for parent in rng.integers(n, size=n)]
        for beam, lineage in enumerate(written):
            lineage.append(made * n + beam)
        ends = range(0, prompt + made, BLOCK_TOKENS)
        last = [min(first + BLOCK_TOKENS, prompt + made) - 1 - prompt for first in ends]  # of a block, in the output
        assert held[made - 1] == sum(len({lineage[k] for lineage in written}) if k >= 0 else 1 for k in last)


def test_one_sequence_saves_nothing_and_more_save_more() -> None:
    lengths = np.array([[19, 58], [40, 30], [5, 200]], np.int32)
    assert saved(lengths, 1) == 0.0
    assert saved(lengths, 1, np.random.default_rng(0)) == 0.0
    samples = [saved(lengths, n) for n in (2, 4, 6)]
    beams = [saved(lengths, n, np.random.default_rng(0)) for n in (2, 4, 6)]
    assert sorted(samples) == samples
    assert sorted(beams) == beams
    assert all(few < many < 1 - 1 / n for few, many, n in zip(samples, beams, (2, 4, 6), strict=True))
    assert saved(np.array([[BLOCK_TOKENS, 17]], np.int32), 2) == pytest.approx(1 / 4)  # one of two blocks, of two beams
