"""PagedAttention's claims: each has a measure or names what it lacks; memory is table 1's, lengths have its means."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from harness.answers.ledger import driven
from harness.run.setup import Setup
from harness.study import paging
from harness.study.paging import LONGEST, SERVERS, Run
from workloads.lengths import LAWS, MEANS, lengths

CLAIMS = tomllib.loads(paging.CLAIMS.read_text("utf-8"))["claim"]


def test_every_claim_has_a_measure_or_lacks_a_datum_and_every_measure_a_claim() -> None:
    assert all(("measure" in claim) != ("lacks" in claim) for claim in CLAIMS)
    assert {claim["measure"] for claim in CLAIMS if "measure" in claim} == {*paging.MEASURES, *paging.SHARED}


def test_shares_of_figure_2_sum_to_one() -> None:
    """Of each version of Orca, what the paper's bars add up to."""
    for policy, parts in (("max", 0.999), ("pow2", 0.999), ("oracle", 1.0)):
        paper = [claim["paper"] for claim in CLAIMS if claim.get("measure", "").partition("_")[2] == policy
                 and claim["section"] == "3.1, figure 2"]  # fmt: skip
        assert sum(paper) == pytest.approx(parts, abs=1e-9)


def test_lengths_have_the_papers_means_and_fit() -> None:
    for data, means in MEANS.items():
        for law in LAWS:
            drawn = lengths(data, law, 20_000, np.random.default_rng(5), longest=LONGEST)
            assert drawn.mean(0) == pytest.approx(means, rel=0.04)
            assert drawn.min() >= 1
            assert drawn.sum(1).max() <= LONGEST


@pytest.mark.parametrize("model", SERVERS)
def test_a_run_has_the_kv_slots_of_table_1(model: str, tmp_path: Path) -> None:
    server = SERVERS[model]
    setup = Setup(Run("paged", model).spec("geometric", 0, tmp_path))
    (served,) = setup.cluster.models.values()
    free = setup.cluster.gpus[0].mem_bytes - served.weight_bytes
    assert (served.tp, free // served.kv_token_bytes) == (server.gpus, server.slots)
    kv_gib = {"opt-13b": 12, "opt-66b": 21, "opt-175b": 264}[model]  # of table 1, in all
    assert free * served.tp / 2**30 == pytest.approx(kv_gib, rel=0.02)


def test_memory_and_batches_of_short_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "WARM_S", 10.0)
    monkeypatch.setattr(paging, "WINDOW_S", 30.0)
    paging.written.cache_clear()
    results = paging.ran([Run("max"), Run("oracle"), Run("paged")], 1, tmp_path, workers=1)
    paging.written.cache_clear()
    for law in LAWS:
        most, oracle, paged = (results[Run(policy), law, 0] for policy in ("max", "oracle", "paged"))
        for x in (most, oracle, paged):
            assert x.tokens + x.ahead + x.over + x.rest == pytest.approx(1.0)
            assert min(x) >= 0.0
        assert 6.0 < most.batch <= 7.0  # 15,700 slots are 7 times 2,048
        assert most.tokens + most.ahead + most.over == pytest.approx(most.batch * LONGEST / 15_700)
        assert (oracle.over, paged.over, paged.ahead) == (0.0, 0.0, 0.0)
        assert most.tokens < oracle.tokens < paged.tokens
        assert most.done_rps < oracle.done_rps < paged.done_rps


def test_the_runs_are_counted_without_one() -> None:
    assert paging.count(2) == 2 * paging.count(1) == 4 * len(paging.needed())


def test_the_first_line_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = {name: paging.Measure((), lambda: 2.0) for name in paging.MEASURES}
    monkeypatch.setattr(paging, "MEASURES", two)
    monkeypatch.setattr(paging, "SHARING", 2)
    first, _, *rest = driven(paging.parts(2, tmp_path))
    assert first == ("paged KV serves 2.0 to 2.0 times Orca (Oracle)'s, 2.0 to 2.0 times Orca (Max)'s, "
                     "2.0 to 2.0 times FasterTransformer's highest rate (ShareGPT's means)")  # fmt: skip
    assert any(line.startswith("size") and "2.2 times as many" in line for line in rest)
    assert sum(line.startswith("not testable") for line in rest) == 2
    assert sum(line.startswith("input") and "beams share" in line for line in rest) == 4 * len(LAWS)
