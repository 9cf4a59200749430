"""Staggered ramps: their rates, their stagger, their lengths."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases import cases
from workloads.ramps import outputs, ramp, ramps


def test_a_small_ramp_by_hand() -> None:
    assert ramp(1).tolist() == [0.0]
    assert ramp(3).tolist() == pytest.approx([0, 1, 1.5, 2, 2 + 1 / 3, 2 + 2 / 3, 3, 3.5, 4])


@cases("peak", [1, 5, 25, 40])
def test_models_are_alike_and_staggered(peak: int) -> None:
    drawn = ramps(peak, 6, 256, 1024, 943.0)
    assert len(drawn.arrival_s) == 6 * peak**2
    assert (np.diff(drawn.arrival_s) >= 0).all()
    for k in range(6):
        times_s = drawn.arrival_s[drawn.model == k]
        assert times_s == pytest.approx(ramp(peak) + k * (peak // 4 + 2 * peak))
        in_second = np.bincount(np.floor(times_s - times_s[0] + 1e-9).astype(int))
        assert in_second.tolist() == [*range(1, peak + 1), *range(peak - 1, 0, -1)]


def test_outputs_have_the_mean_and_end_at_the_cap() -> None:
    lengths = outputs(10_000, 1024, 943.0)
    assert lengths.min() >= 1
    assert lengths.max() == 1024
    assert lengths.mean() == pytest.approx(943.0, abs=0.5)
    below = lengths[lengths < 1024]
    assert len(below) / len(lengths) == pytest.approx(1 - (1 - 1 / 6340) ** 1023, abs=0.01)  # a chance of 1 / 6,340
    assert outputs(3, 1024, 1024.0).tolist() == [1024] * 3  # nothing ends before the cap
    assert outputs(3, 1024, 1.0).tolist() == [1] * 3
    with pytest.raises(ValueError, match="a mean of 1025"):
        outputs(10, 1024, 1025.0)


def test_a_seed_moves_outputs_and_nothing_else() -> None:
    first, other = ramps(9, 3, 256, 1024, 943.0), ramps(9, 3, 256, 1024, 943.0, seed=1)
    assert first.arrival_s.tolist() == other.arrival_s.tolist()
    assert first.model.tolist() == other.model.tolist()
    assert first.output_tokens.tolist() != other.output_tokens.tolist()
    assert sorted(first.output_tokens) == sorted(other.output_tokens)
    assert ramps(9, 3, 256, 1024, 943.0).output_tokens.tolist() == first.output_tokens.tolist()
