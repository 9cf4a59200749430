"""Weaver's claims: each has a measure or names what it lacks, and comes out by the one rule."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.policy.types import UserError
from harness.study import weaving
from harness.study.rule import SAYS
from plots import fig_weaver


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace of 400 requests of 700 and 240 tokens, and one that is too long."""
    path = tmp_path / weaving.LENGTHS
    path.parent.mkdir()
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023,700,240\n" * 400 + "2023,2000,240\n2023,9,0\n")
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    for cached in (weaving.lengths, weaving.ran):
        cached.cache_clear()
    return tmp_path


def test_every_claim_has_a_measure_or_lacks_a_datum_and_every_measure_a_claim() -> None:
    claims = tomllib.loads(weaving.CLAIMS.read_text("utf-8"))["claim"]
    assert all(("measure" in claim) != ("lacks" in claim) for claim in claims)
    assert {claim["measure"] for claim in claims if "measure" in claim} == set(weaving.MEASURES)
    assert all(len(claim.get("paper", ())) == 2 for claim in claims if isinstance(claim["paper"], list))


def test_lengths_beyond_the_papers_bound_are_left_out(azure: Path) -> None:
    assert np.unique(weaving.lengths(), axis=0).tolist() == [[700, 240]]
    assert len(weaving.lengths()) == 400


def test_without_the_trace_it_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACES_DIR", raising=False)
    weaving.lengths.cache_clear()
    with pytest.raises(UserError, match=r"no file azure2023.*_conv\.csv in TRACES_DIR \(not set\)"):
        weaving.lengths()


def test_what_a_run_gives_fits_together(azure: Path) -> None:
    """Little's law on the hot model's decodes, KV where it was drawn to, and no more finished than offered."""
    dedicated, woven = weaving.weaver(8.0, 0, **weaving.OFF), weaving.weaver(8.0, 0)
    for found in (dedicated, woven):
        assert found.done_rps == pytest.approx(8.0, rel=0.15)
        assert found.batch == pytest.approx(found.done_rps * 239 * found.hot_ms / 1e3, rel=0.1)
    tokens = weaving.weaver(8.0, 0).kv_hot + woven.kv_cold
    assert woven.kv_cold / tokens == pytest.approx(0.45, abs=0.12)  # the cold model's own KV is there too
    assert dedicated.kv_cold < woven.kv_cold
    assert woven.cold_ms > dedicated.cold_ms


def test_verdicts_are_those_of_the_one_rule(azure: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weaving, "MEASURES", {name: lambda seed: 15.0 + seed / 10 for name in weaving.MEASURES})
    verdicts = [line.verdict for line in weaving.lines()]
    assert {"size", "contradicted", "input", "not testable"} <= {one.says for one in verdicts} <= set(SAYS)
    (one,) = (one for one in verdicts if one.claim.subject.startswith("dedicated serving reaches 15"))
    assert one.here is not None
    assert one.says == "size"
    assert (one.here.n, one.claim.paper) == (weaving.SEEDS, 15.0)
    assert all(one.note.startswith("lacks ") for one in verdicts if one.says == "not testable")


def test_the_figure_has_a_panel_for_each_of_what_is_measured(
    azure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weaving, "RATES", (5.0,))
    monkeypatch.setattr(weaving, "RATIOS", (0.25, 0.5))
    points = list(weaving.curves(1))
    assert {point.panel for point in points} == set(fig_weaver.TITLES)
    assert {p.series for p in points if p.panel in {"hot", "cold", "muxserve", "share"}} == set(fig_weaver.COLORS)
    assert all(point.value > 0.0 for point in points)
    hot = {point.series: point.value for point in points if point.panel == "hot"}
    assert hot == {"Weaver": weaving.weaver(5.0, 0).hot_ms, "dedicated": weaving.weaver(5.0, 0, ratio=0.0).hot_ms}
    pd.DataFrame(points).to_csv(tmp_path / "weaver.csv", index=False)
    paths = fig_weaver.render(tmp_path / "weaver.csv", "x")
    assert [path.name for path in paths] == ["weaver.pdf", "weaver.png", "weaver.csv"]
    assert len(pd.read_csv(paths[2], comment="#")) == len(points)


def test_the_figure_marks_what_the_claims_say_of_the_paper() -> None:
    claims = tomllib.loads(weaving.CLAIMS.read_text("utf-8"))["claim"]
    said = {claim["measure"]: claim["paper"] for claim in claims if "measure" in claim}
    gpu_ms = said["cpu_ms"] / said["gpu_gain"]
    assert fig_weaver.PAPER["highest"] == {"dedicated": said["dedicated_rps"], "Weaver": said["weaver_rps"]}
    controls = {"CPU": said["cpu_ms"], "GPU": gpu_ms, "GPU, split": gpu_ms * said["split_gain"]}
    assert fig_weaver.PAPER["control"] == pytest.approx(controls)


@pytest.mark.parametrize("sharing", ["fluid", "turns"])
def test_muxserve_runs_as_the_measures_ask_for_it(azure: Path, sharing: str) -> None:
    """As much is finished as is offered, at a load that both models on both GPUs carry."""
    found = weaving.muxserve(5.0, 0, sharing)
    assert found.done_rps == pytest.approx(5.0, rel=0.15)
    assert found.hot_ms > 0
