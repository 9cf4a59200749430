"""Weaver's claims: each has a measure or names what it lacks, its runs are specs, and verdicts come by the one rule."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.policy.types import UserError
from harness.rows import record
from harness.run.setup import Setup
from harness.run.sweep import tasks
from harness.study import weaving
from harness.study.rule import SAYS
from harness.study.weaving import MUXSERVE, OFF, WEAVER, Measured, Run
from plots import fig_weaver

CLAIMS = tomllib.loads(weaving.CLAIMS.read_text("utf-8"))["claim"]


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a trace of 400 requests of 700 and 240 tokens, and one that is too long; windows of a minute."""
    path = tmp_path / weaving.LENGTHS
    path.parent.mkdir()
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023,700,240\n" * 400 + "2023,2000,240\n2023,9,0\n")
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    monkeypatch.setattr(weaving, "WINDOW_S", 100.0)
    for cached in (weaving.lengths, weaving.written):
        cached.cache_clear()
    return tmp_path


def measured(run: Run, out: Path, seed: int = 0) -> Measured:
    """Run with one seed."""
    return weaving.ran([run], seed + 1, out, workers=1)[run, seed]


# ------------------------------------------------------------------ claims


def test_every_claim_has_a_measure_or_lacks_a_datum_and_every_measure_a_claim() -> None:
    assert all(("measure" in claim) != ("lacks" in claim) for claim in CLAIMS)
    assert {claim["measure"] for claim in CLAIMS if "measure" in claim} == set(weaving.MEASURES)
    assert all(len(claim.get("paper", ())) == 2 for claim in CLAIMS if isinstance(claim["paper"], list))
    assert all("why" in claim for claim in CLAIMS if not claim.get("comparable", True))


def test_verdicts_are_those_of_the_one_rule(azure: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {name: weaving.Measure((), lambda: 15.0) for name in weaving.MEASURES}
    monkeypatch.setattr(weaving, "MEASURES", same)
    verdicts = [line.verdict for line in weaving.lines(weaving.SEEDS, azure)]
    assert {"size", "contradicted", "input", "not testable", "not comparable"} <= {verdict.says for verdict in verdicts}
    assert {verdict.says for verdict in verdicts} <= set(SAYS)
    (line,) = (verdict for verdict in verdicts if verdict.claim.subject.startswith("dedicated serving reaches 15"))
    assert line.here is not None
    assert line.says == "size"
    assert (line.here.n, line.claim.paper) == (weaving.SEEDS, 15.0)
    assert all(verdict.note.startswith("lacks ") for verdict in verdicts if verdict.says == "not testable")


def test_table_1_is_of_decode_steps_alone() -> None:
    """8,011 tokens/s at a batch of 128 leave 4.09 s for 128 x 128 tokens of a GPU; the prompts alone would take 5.9."""
    all_s, prompts_s = 128 * 128 / (8011 / 2), 128 * 1024 * 2 * 6.98e9 / 312e12
    assert all_s == pytest.approx(4.09, abs=0.01)
    assert prompts_s == pytest.approx(5.9, abs=0.05)
    paper = {16: (2024, 1487, 0.266), 32: (3343, 2645, 0.209), 64: (5392, 4443, 0.176), 128: (8011, 6606, 0.175)}
    for separate, tp2, loss in paper.values():  # the table's own columns: each instance has the batch
        assert 1 - tp2 / separate == pytest.approx(loss, abs=1e-3)
    for batch in (16, 128):
        of_one, of_two = weaving.tokens_per_s(batch, 1), weaving.tokens_per_s(batch, 2)
        assert 0 < of_two < of_one < 2 * batch / 11e-3 * batch / 16  # no step is shorter than reading the weights
        assert weaving.tp2_loss(batch) == pytest.approx(1 - of_two / of_one)


# ------------------------------------------------------------------ runs


def test_lengths_beyond_the_papers_bound_are_left_out(azure: Path) -> None:
    assert np.unique(weaving.lengths(), axis=0).tolist() == [[700, 240]]
    assert len(weaving.lengths()) == 400


def test_without_the_trace_it_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACES_DIR", raising=False)
    weaving.lengths.cache_clear()
    with pytest.raises(UserError, match=r"no file azure2023.*_conv\.csv in TRACES_DIR \(not set\)"):
        weaving.lengths()


def test_a_run_is_a_spec_that_prefills_at_full_length_on_gpus_of_its_own(azure: Path) -> None:
    for run, tp in ((WEAVER, 1), (OFF, 1), (MUXSERVE, 2), (weaving.TEMPORAL, 2)):
        (task,) = tasks([run.at(8.0).spec(3, azure)])
        setup = Setup(task.spec)
        assert (task.spec.gpus, task.spec.scaled, task.spec.host) == (4, (), "vllm-0.6")
        assert setup.machine.host.scale_prefill == 1.0
        assert setup.keywords.get("prefill", "apart") == "apart"
        assert {m.name: m.tp for m in setup.models.members} == {"cold": tp, "hot": tp}
        assert setup.cluster.plan["hot"].rate_rps == pytest.approx(8.0, rel=0.15)
        jobs = setup.jobs()
        hot = jobs.model == jobs.models.index("hot")
        assert (jobs.arrival_s.min() >= -weaving.WARM_S, jobs.arrival_s.max() < 100.0) == (True, True)
        assert (hot & (jobs.arrival_s >= 0)).sum() == round(setup.cluster.plan["hot"].rate_rps * 100)


def test_what_a_run_gives_fits_together(azure: Path) -> None:
    """Little's law on the hot model's decodes, KV where it was drawn to, and no more finished than offered."""
    dedicated, woven = measured(OFF.at(8.0), azure), measured(WEAVER.at(8.0), azure)
    for outcome in (dedicated, woven):
        assert outcome.held == 1.0
        assert outcome.done_rps == pytest.approx(8.0, rel=0.15)
        assert outcome.batch == pytest.approx(outcome.done_rps * 239 * outcome.hot_ms / 1e3, rel=0.05)
    assert woven.kv_cold / (woven.kv_hot + woven.kv_cold) == pytest.approx(0.45, abs=0.12)  # with the cold model's own
    assert dedicated.kv_cold < woven.kv_cold
    assert woven.cold_ms > dedicated.cold_ms
    room = Setup(OFF.at(8.0).spec(0, azure)).cluster
    tokens = room.gpus[0].mem_bytes - room.models["hot"].weight_bytes
    held = dedicated.batch * (700 + 120) * room.models["hot"].kv_token_bytes
    assert dedicated.kv_hot == pytest.approx(held / tokens, rel=0.05)


def test_what_stands_is_not_run_again(azure: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weaving.ran([OFF.at(2.0)], 2, azure, workers=1)
    before = {path: path.stat().st_mtime_ns for path in azure.glob(f"*/{record.ROWS}")}
    assert len(before) == 2
    weaving.written.cache_clear()
    assert weaving.ran([OFF.at(2.0)], 2, azure, workers=1) == first
    assert {path: path.stat().st_mtime_ns for path in azure.glob(f"*/{record.ROWS}")} == before


def test_muxserve_prefills_where_weaver_does(azure: Path) -> None:
    """As much is finished as is offered, and first tokens come when Weaver's do."""
    for run in (MUXSERVE.at(5.0), weaving.TEMPORAL.at(5.0)):
        muxserve = measured(run, azure)
        assert muxserve.done_rps == pytest.approx(5.0, rel=0.15)
        assert muxserve.hot_ttft_s == pytest.approx(measured(WEAVER.at(5.0), azure).hot_ttft_s, rel=1e-6)


# ------------------------------------------------------------------ the figure


@pytest.mark.full
def test_the_figure_has_a_panel_for_each_of_what_is_measured(
    azure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weaving, "RATES", (5.0,))
    monkeypatch.setattr(weaving, "RATIOS", (0.25, 0.5))
    monkeypatch.setattr(weaving, "LONG_WINDOW_S", 100.0)
    points = list(weaving.curves(1, out=azure, workers=1))
    assert {point.panel for point in points} == set(fig_weaver.TITLES)
    assert {p.series for p in points if p.panel in {"hot", "cold", "muxserve", "share"}} == set(fig_weaver.LOOKS)
    slow = {"CPU", "Weaver, long outputs", "MuxServe, long outputs"}  # nothing ends in so short a window
    assert all(point.value > 0.0 for point in points if point.series not in slow)
    hot = {point.series: point.value for point in points if point.panel == "hot"}
    there = azure / "weaver"
    assert hot == {"Weaver": measured(WEAVER.at(5.0), there).hot_ms, "dedicated": measured(OFF.at(5.0), there).hot_ms}
    pd.DataFrame(points).to_csv(tmp_path / "weaver.csv", index=False)
    paths = fig_weaver.render(tmp_path / "weaver.csv", "x")
    assert [path.name for path in paths] == ["weaver.pdf", "weaver.png", "weaver.csv"]
    assert len(pd.read_csv(paths[2], comment="#")) == len(points)


def test_no_claim_rests_on_shares_of_sms_unsaid() -> None:
    beside = [claim for claim in CLAIMS if claim.get("measure") in {"gain_muxserve", "tpot_muxserve", "gain_long"}]
    assert len(beside) == 3
    assert all("co-running is unmeasured" in text for text in (fig_weaver.CAPTION.lower(), *(c["why"] for c in beside)))


def test_the_figure_marks_what_the_claims_say_of_the_paper() -> None:
    paper = {claim["measure"]: claim["paper"] for claim in CLAIMS if "measure" in claim}
    gpu_ms = paper["cpu_ms"] / 4.83
    assert paper["gpu_ms"] == pytest.approx(gpu_ms, abs=0.05)
    assert fig_weaver.PAPER["highest"] == {"dedicated": paper["dedicated_rps"], "Weaver": paper["weaver_rps"]}
    controls = {"CPU": paper["cpu_ms"], "GPU": gpu_ms, "GPU, split": gpu_ms * paper["split_gain"]}
    assert fig_weaver.PAPER["control"] == pytest.approx(controls)
