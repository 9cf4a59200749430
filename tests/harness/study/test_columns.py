"""Studies about measures: their columns fit together, their settings are the papers', and their claims name columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.answers import text
from harness.policy.types import UserError
from harness.rows import record
from harness.rows.requests import rows
from harness.run.setup import Setup, load_models
from harness.run.sweep import tasks
from harness.study import columns, load, measured
from harness.study.columns import COLUMNS
from harness.study.grid import panels
from plots import fig_weaver
from tests.cases import cases
from tests.harness.study.measuring import run, short, value
from traces import laws
from workloads.models import shape

NAMES = ("muxserve", "pagedattention", "weaver")
OWN = "hot-cold+span_s=100+rate_rps={}+lengths=azure-conv"


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with a log of 400 requests of 700 and 240 tokens, and one that is too long."""
    path = tmp_path / laws.CONV
    path.parent.mkdir()
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023,700,240\n" * 400 + "2023,2000,240\n2023,9,0\n")
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    laws.rows.cache_clear()
    yield tmp_path
    laws.rows.cache_clear()


# ------------------------------------------------------------------ claims


@cases("name", list(NAMES))
def test_every_claim_has_a_measure_or_lacks_a_datum_and_every_column_is_asked_for(name: str) -> None:
    study = load.study(name)
    assert all(bool(claim.measure) != bool(claim.lacks) for claim in study.claim)
    assert all(claim.why for claim in study.claim if not claim.comparable)
    used = {claim.measure for claim in study.claim} | {*study.shown}
    beside = {"muxserve": {"done_rps", "within"}, "weaver": {"ended"}}  # of a rate that is held; of the figure
    assert {*study.measures} <= used | beside.get(name, set())


@cases("name", list(NAMES))
def test_each_claim_is_about_systems_that_run_in_its_condition(name: str) -> None:
    study = load.study(name)
    for claim in study.claim:
        for condition in study.condition:
            if claim.on.get("condition") == condition.name:
                assert {claim.system, claim.over} - {""} <= {*study.contestants(condition)}, claim.says


# ------------------------------------------------------------------ Weaver


def test_table_1_is_of_decode_steps_alone() -> None:
    llama = shape("llama-3.1-8b")
    for batch in (16, 128):
        of_one, of_two = (columns._tokens_per_s(llama, "a100-40g", "vllm-0.6", batch, tp) for tp in (1, 2))
        assert 0 < of_two < of_one < 2 * batch / 11e-3 * batch / 16  # no step is shorter than reading the weights


def test_weavers_runs_prefill_at_full_length_on_gpus_of_their_own(azure: Path) -> None:
    study = short("weaver", {"30 req/s": OWN.format(8)})
    (panel,) = panels(study, full=False)
    for name, tp in (("weaver", 1), ("dedicated", 1), ("muxserve", 2), ("temporal", 2)):
        (task,) = tasks([panel.specs[name]])
        setup = Setup(task.spec)
        assert (task.spec.gpus, task.spec.scaled, task.spec.host, task.spec.window_s) == (4, (), "vllm-0.6", 100.0)
        assert setup.machine.host.scale_prefill == 1.0
        assert setup.keywords.get("prefill", "apart") == "apart"
        assert {m.name: m.tp for m in setup.models.members} == {"cold": tp, "hot": tp}
        jobs = setup.jobs()
        hot = jobs.model == jobs.models.index("hot")
        assert (jobs.arrival_s.min() >= -50.0, jobs.arrival_s.max() < 100.0) == (True, True)
        assert (hot & (jobs.arrival_s >= 0)).sum() == round(setup.cluster.plan["hot"].rate_rps * 100)
        assert setup.cluster.plan["hot"].rate_rps == pytest.approx(8.0, rel=0.15)


def test_what_weavers_runs_give_fits_together(azure: Path) -> None:
    """Little's law on the hot model's decodes, KV where it was drawn to, and no more finished than offered."""
    study = short("weaver", {"30 req/s": OWN.format(8)})
    of = run(study, azure / "out")

    def at(system: str, name: str, model: str = "hot") -> float:
        return value(of, "30 req/s", system, name, model)

    for system in ("dedicated", "weaver"):
        assert at(system, "ended") == 1.0
        assert at(system, "done_rps") == pytest.approx(8.0, rel=0.15)
        assert at(system, "decoding") == pytest.approx(
            at(system, "done_rps") * 239 * at(system, "tpot_ms") / 1e3, rel=0.05
        )
    hot, cold = (at("weaver", "kv_used", model) for model in ("hot", "cold"))
    assert cold / (hot + cold) == pytest.approx(0.45, abs=0.12)  # with the cold model's own
    assert at("dedicated", "kv_used", "cold") < cold
    assert at("weaver", "tpot_ms", "cold") > at("dedicated", "tpot_ms", "cold")
    assert at("weaver", "tpot_p99_ms") - at("weaver", "tpot_ms") == pytest.approx(at("weaver", "tpot_tail_ms"))
    room = Setup(of.reference).cluster
    tokens = room.gpus[0].mem_bytes - room.models["hot"].weight_bytes
    held = at("dedicated", "decoding") * (700 + 120) * room.models["hot"].kv_token_bytes
    assert at("dedicated", "kv_used") == pytest.approx(held / tokens, rel=0.05)
    for system in ("muxserve", "temporal"):  # they prefill where Weaver does
        assert at(system, "ttft_s") == pytest.approx(at("weaver", "ttft_s"), rel=1e-6)
    shown = list(text.lines(text.Shown(of.table, of.about, of.folder)))
    assert shown[0].startswith("Weaver's highest rate is 1.")
    assert shown[1] == f"simulated, {study.setting}; 1 seed"
    assert not fig_weaver.draws(of.folder)  # it needs all conditions


def test_without_the_log_it_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACES_DIR", raising=False)
    laws.rows.cache_clear()
    with pytest.raises(UserError, match=r"no file azure2023.*_conv\.csv in TRACES_DIR \(not set\)"):
        list(panels(load.study("weaver"), full=False))


def test_the_figure_marks_what_the_claims_say_of_the_paper() -> None:
    hot = [claim for claim in load.study("weaver").claim if claim.model == "hot"]
    paper = {(c.system, c.over, c.measure, c.on.get("condition")): c.paper for c in hot}
    highest = {
        name: paper[system, "", "done_rps", "30 req/s"]
        for name, system in (("dedicated", "dedicated"), ("Weaver", "weaver"))
    }
    assert fig_weaver.PAPER["highest"] == highest
    slow = paper["CPU control", "", "tpot_ms", "L40S, 2 req/s"]
    split = paper["weaver", "unsplit", "tpot_ms", "L40S, 2 req/s"]
    assert isinstance(slow, float)
    assert isinstance(split, float)
    fast = slow / 4.83
    assert paper["unsplit", "", "tpot_ms", "L40S, 2 req/s"] == pytest.approx(fast, abs=0.05)
    assert fig_weaver.PAPER["control"] == pytest.approx({"CPU": slow, "GPU": fast, "GPU, split": fast * split})


# ------------------------------------------------------------------ PagedAttention

KV_GIB = {"opt-13b": (12, 15_700), "opt-66b": (21, 9_700), "opt-175b": (264, 60_100)}  # of table 1, in all; slots


def test_runs_have_the_kv_slots_of_table_1() -> None:
    for panel in panels(load.study("pagedattention"), full=False):
        model = panel.first.models.partition(":")[0]
        setup = Setup(panel.first)
        (served,) = setup.cluster.models.values()
        free = setup.cluster.gpus[0].mem_bytes - served.weight_bytes
        gib, slots = KV_GIB[model]
        assert (len(setup.cluster.gpus), free // served.kv_token_bytes) == (served.tp, slots)
        assert free * served.tp / 2**30 == pytest.approx(gib, rel=0.02)


def test_memory_and_batches_of_short_runs(tmp_path: Path) -> None:
    name = "OPT-13B, ShareGPT, 10 req/s"
    study = short("pagedattention", {name: "poisson+span_s=30+rate_rps=10+lengths=lognormal-sharegpt"}, warmup_s=10.0)
    of = run(study, tmp_path)

    def at(system: str, column: str) -> float:
        return value(of, name, system, column)

    for system in study.systems:
        parts = [at(system, f"kv_{part}") for part in ("tokens", "ahead", "over", "rest")]
        assert sum(parts) == pytest.approx(1.0)
        assert min(parts) >= 0.0
    assert 6.0 < at("Orca (Max)", "batch") <= 7.0  # 15,700 slots are 7 times 2,048
    taken = sum(at("Orca (Max)", f"kv_{part}") for part in ("tokens", "ahead", "over"))
    assert taken == pytest.approx(at("Orca (Max)", "batch") * 2048 / 15_700)
    assert (at("Orca (Oracle)", "kv_over"), at("vLLM", "kv_over"), at("vLLM", "kv_ahead")) == (0.0, 0.0, 0.0)
    for column in ("kv_tokens", "done_rps"):
        assert at("Orca (Max)", column) < at("Orca (Oracle)", column) < at("vLLM", column)
    assert 0.0 < at("vLLM", "samples_2") < at("vLLM", "samples_6") < at("vLLM", "beams_6") < 1.0


# ------------------------------------------------------------------ MuxServe


@pytest.mark.usefixtures("profiles_dir")  # which the study's specs name
def test_muxserves_rates_and_models_are_the_releases() -> None:
    """MuxServe 2249cfa, bench_end_to_end_muxserve.py: model2num, model2placement (1 x 16, 4, 4, 8: 32 GPUs), rates."""
    study = load.study("muxserve")
    members = load_models(study.spec["models"]).members
    kinds = [(member.shape.name, member.tp) for member in members]
    assert kinds == [("llama-7b", 1)] * 12 + [("llama-13b", 1)] * 4 + [("llama-30b", 4)] * 2 + [("llama-65b", 8)]
    law = [(x + 1) ** -1.3 for x in range(19)]
    scaled = 40 * 0.75 / (law[0] / sum(law))
    (panel,) = [p for p in panels(study, full=False) if "rate_rps=30" in p.first.trace and "alpha=1.3" in p.first.trace]
    rates = measured._preset({"trace": panel.first.trace})
    assert rates is not None
    assert rates.rates == pytest.approx([x / sum(law) * scaled for x in law])
    assert panel.unit_rps == pytest.approx(sum(rates.rates))


def test_muxserves_systems_have_what_is_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    study = load.study("muxserve")
    monkeypatch.setenv("PROFILES_DIR", "/there")
    specs = {name: study.spec_of(study.condition[0], name) for name in study.systems}
    assert {spec.profile for spec in specs.values()} == {"/there/muxserve/llama-a100-sm-share.json"}
    assert {name: spec.placement for name, spec in specs.items() if spec.placement} == {
        "temporal": "muxserve:original",
        "first-fit": "first-fit",
        "random": "random",
    }
    assert {name for name, spec in specs.items() if spec.batch_cap == 256} == {"spatial", "muxserve++", "alpaserve"}
    monkeypatch.delenv("PROFILES_DIR")
    with pytest.raises(UserError, match="the environment variable PROFILES_DIR is not set"):
        list(panels(study, full=False))
    monkeypatch.setenv("PROFILES_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"profile .*muxserve/llama-a100-sm-share.json: No such file"):
        list(panels(study, full=False))


def test_short_runs_of_muxserve(profiles_dir: Path, tmp_path: Path) -> None:
    """At a low rate all serve what comes, and all but the floors within SLOs; columns are those of the rows."""
    assert profiles_dir.is_dir()
    study = short("muxserve", {"alpha 2.1": "power-law+span_s=20+rate_rps=2.5+alpha=2.1"})
    of = run(study, tmp_path)
    for system in study.systems:
        assert value(of, "alpha 2.1", system, "done_rps") == pytest.approx(3.9, rel=0.6)
        assert value(of, "alpha 2.1", system, "within") > 0.9 or system in {"first-fit", "random"}
    folder = next(path for path, name in of.about.runs.items() if name == "spatial")
    table = rows(record.read(tmp_path / folder))
    done = (table.arrival_s + table.e2e_s)[table.done]
    in_window = int(((done >= 0) & (done < 20)).sum())
    assert value(of, "alpha 2.1", "spatial", "done_rps") == pytest.approx(in_window / 20)


def test_all_columns_have_a_line_in_the_docstring() -> None:
    words = (columns.__doc__ or "").replace("_N", "_2").replace("_B", "_16").replace(",", " ").split()
    assert {name.replace("_6", "_2").replace("_128", "_16") for name in COLUMNS} - {"decode_tps_1628"} <= {
        *words,
        *(word.rstrip(":") for word in words),
    }
