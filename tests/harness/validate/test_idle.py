"""KV memory of an idle model: kvcached's arithmetic, and what the simulator counts."""

from __future__ import annotations

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


def test_an_idle_model_keeps_nothing_of_its_cache_from_others(ours: idle.Footprint) -> None:
    head, *rows = idle.rows(ours)
    assert len({len(row) for row in (head, *rows)}) == 1
    assert ours.cached_pages > 73  # more than kvcached's cap lets it keep: here there is none
    assert 0.9 * idle.HIT_TOKENS < ours.hit_tokens < 1.1 * idle.HIT_TOKENS
    assert "leaves 3.1 to 10.6 GiB more" in idle.words(ours)
