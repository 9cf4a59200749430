"""KV memory of an idle model: kvcached's arithmetic, and what the simulator counts."""

from __future__ import annotations

import numpy as np
import pytest

from harness.engines.costs.shapes import kv_token_bytes
from harness.policy.types import GIB, MIB
from harness.validate import idle
from workloads.models import shape


@pytest.fixture(scope="module")
def ours() -> idle.Footprint:
    return idle.footprint()


def test_measured_gibibytes_are_pages_of_144_mib(ours: idle.Footprint) -> None:
    assert ours.page_bytes == 2 * MIB * 36 * 2  # a page id in every layer, for K and for V
    for gib, pages in idle.MEASURED.values():
        assert gib == pytest.approx([n * ours.page_bytes / GIB for n in pages], abs=0.006)
    *_, (_, (floor,)) = idle.MEASURED.values()
    assert -(-1000 * 16 * kv_token_bytes(shape(idle.MODEL)) // ours.page_bytes) == floor


def test_traffic_is_of_the_lengths_that_the_benchmark_states() -> None:
    jobs = idle.traffic()
    hot = jobs.prompt_tokens == 192
    assert len(jobs) == 2500
    assert hot.mean() == pytest.approx(0.3, abs=0.03)
    assert (jobs.prompt_tokens[~hot].min(), jobs.prompt_tokens[~hot].max()) == (192 + 1, 1024)
    assert (jobs.output_tokens.min(), jobs.output_tokens.max()) == (16, 256)
    assert np.isfinite(jobs.arrival_s).sum() == 96
    assert jobs.prefix is not None
    ids, times = np.unique(jobs.prefix.ids, return_counts=True)
    assert (ids[times > 1] < 16 * 8).all()  # eight blocks of each of sixteen hot prefixes, and no others, come again


def test_an_idle_model_keeps_nothing_of_its_cache_from_others(ours: idle.Footprint) -> None:
    head, *rows = idle.rows(ours)
    assert len({len(row) for row in (head, *rows)}) == 1
    assert ours.cached_pages > 73  # more than kvcached's cap lets it keep: here there is none
    assert 0.9 * idle.HIT_TOKENS < ours.hit_tokens < 1.1 * idle.HIT_TOKENS
    assert "leaves 3.1 to 10.6 GiB more" in idle.words(ours)
