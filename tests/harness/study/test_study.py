"""Studies as data: those that come with the bench, parts of them, and a line for each mistake in a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.cli.options import FIGURES
from harness.cli.study import drawn_at
from harness.engines.costs import shapes
from harness.loop import system
from harness.policy.types import GIB, UserError
from harness.rows.tally import BLOCK_S
from harness.run.setup import load_trace
from harness.study import grid, load
from harness.study.load import study
from harness.study.study import AA, CONTROLS
from tests.cases import cases
from tests.harness.study.test_load import STEPS, written
from traces import deal, schema
from workloads.models import model_set

POOL = round(67.28 * GIB)

# ------------------------------------------------------------------ those that come with the bench


def test_every_file_is_a_study_with_claims() -> None:
    for name in load.names():
        asked = study(name)
        assert asked.name == name
        if asked.paper and name != "fig7-torch":  # scaled twins: what a paper says of its models is not theirs
            assert asked.claim
        assert asked.of(full=True).condition == asked.condition
        assert asked.of(full=False).systems == asked.systems


def test_figures_of_stand_ins_and_of_real_traces_lie_side_by_side() -> None:
    """A study's folder has a hash of its runs, hence of its traces, and so have the files of its figures."""
    real, stand_in = (drawn_at(Path("results/fig7") / f"fig7-{digits}") for digits in ("3f9c01ab", "aa00bb11"))
    assert (real.name, real.parent, stand_in.parent) == ("fig7-3f9c01ab", FIGURES, FIGURES)
    assert stand_in != real


@cases("name", ["fig7", "prism-bridge", "prism-regimes"])
def test_every_system_is_in_the_full_run_of_prisms_figures(name: str) -> None:
    asked = study(name)
    full = asked.of(full=True)
    assert {text.partition(":")[0].partition("+")[0] for text in full.systems.values()} == {*system.names()} - {
        "dedicated",
        "unshared",
    }  # bounds
    assert list(full.systems)[: len(asked.systems)] == list(asked.systems)
    assert asked.only(systems=["static", "elastic"]).of(full=True).systems.keys() == {"static", "elastic"}


def test_figure_7_is_as_large_as_promised() -> None:
    fig7 = study("fig7")
    assert {c.spec["pool_bytes"] for c in fig7.condition if "pool_bytes" in c.spec} == {POOL}
    assert fig7.full is not None
    for scope in (fig7.quick, fig7.full):  # enough blocks for a verdict, and more seeds where it is none
        assert scope.seeds * scope.window_s / BLOCK_S >= 30
        assert scope.budget
    assert fig7.requests >= 700
    ours = {claim.system for claim in fig7.claim if claim.what != "measure" and claim.paper != "never"}
    assert ours == {"prism:osdi26 or prism_released"}  # the tuned one stands beside
    assert all({"system": "prism"} in claim.also for claim in fig7.claim if claim.over)
    on = {claim.on["trace"] for claim in fig7.claim if "trace" in claim.on and claim.comparable}
    assert on == {"hyperbolic-like", "arena-like"}  # verdicts stand on fitted traces
    unrated = [claim for claim in fig7.claim if claim.on.get("condition") == "GPUs"]  # the third row states no rate
    assert all(not claim.comparable and "no request rate" in claim.why for claim in unrated)


@cases(("full", "most"), [(False, 27_000), (True, 180_000)])
def test_figure_7_keeps_its_budget_of_runs(full: bool, most: int) -> None:
    fig7 = study("fig7").of(full)
    scope, runs = fig7.scope(full), 0
    for condition in fig7.condition:
        panels = sum(1 for _ in grid.places(fig7, condition, full))
        rated = fig7.axis(condition) == "rate_scale"
        along = scope.points if rated else len(fig7.along_x(condition, full))
        bounds = 2 * (len(CONTROLS) + rated)  # at two places, with the A/A copy
        runs += panels * (along * len(fig7.contestants(condition)) + bounds) * scope.seeds
    assert most / 2 < runs < most


def test_pd_multiplexing_is_compared_where_its_authors_do() -> None:
    single, eight = study("pdmux"), study("pdmux-70b")
    _, limit, starved = single.condition[:3]
    assert starved.spec == {**limit.spec, "scaled": {"passes": 0.5}}  # a layer a turn
    limits = [c.spec.get("slo", eight.slo).rpartition("=")[2] for c in eight.condition[:3]]
    assert limits == ["0.1", "0.05", "0.05"]  # section 4.1
    assert all("Tool&Agent" in claim.lacks for claim in eight.claim if claim.lacks)
    assert all(
        "kernels take turns" in claim.why.lower()
        for claim in (*single.claim, *eight.claim)
        if claim.system.startswith("pdmux") and not claim.lacks
    )
    assert all("itl" in asked.definitions for asked in (single, eight))


def test_aegaeon_is_compared_where_the_paper_does() -> None:
    asked = study("aegaeon")
    simulators, estimate = 16.0, 0.15 * 64 * 2**30 / 1e9  # the artifact's simulator, and its estimate of a switch
    assert [condition.spec.get("pcie_gbps") for condition in asked.condition] == pytest.approx(
        [None] * 8 + [simulators] * 2 + [estimate] * 2
    )
    sizes = [[int(x.partition("=")[2]) for x in asked.along_x(c, full=True)] for c in asked.condition[:2]]
    assert [(min(x), max(x)) for x in sizes] == [(16, 80), (16, 54)]
    along = asked.along_x(asked.condition[2])
    assert {round(0.05 * x, 2) for x in along} >= {0.05, 0.1, 0.7}  # the paper's ends at 0.7, the grid beyond
    assert [asked.condition[i].spec["slo_scale"] for i in (0, 4, 5)] == [1.0, 0.5, 0.3]  # 10 s, 5 s and 3 s
    assert all(condition.spec["gpus"] == 16 for condition in asked.condition)
    assert {c.definition for c in asked.claim if c.definition} == {"qos"}
    assert asked.only(systems=("static",)).condition[1].among == ()


def test_a_part_of_the_model_sets_leaves_the_conditions_that_have_some_of_them() -> None:
    asked = study("aegaeon")
    both = ("aegaeon+models=32", "aegaeon+models=40")
    part = asked.only(models=both[::-1])
    sets = {c.name: part.along_x(c) for c in part.condition if part.axis(c) == "models"}
    assert sets["models at 0.1 req/s"] == sets["models at 0.5 req/s"] == both
    assert sets["stricter: 5 s, 50 ms"] == both[:1]
    assert "rate of 40 models" in {condition.name for condition in part.condition}
    fewer = asked.only(models=("aegaeon+models=54",))
    assert [condition.name for condition in fewer.condition] == ["models at 0.5 req/s"]
    assert all(claim.what == "measure" for claim in fewer.claim)  # the others go with their conditions
    other = study("pdmux").only(models=("light8",))  # its only set
    assert {other.sets(condition) for condition in other.condition} == {("light8",)}


def test_figure_12_and_the_ablations_of_prism_as_data() -> None:
    fleet, parts = study("fig12"), study("prism-ablations")
    assert "prism_released" not in fleet.systems  # its models have one degree
    assert {claim.over for claim in parts.claim if claim.what == "difference"} == set(parts.systems) - {"prism"}
    assert fleet.spec["pool_bytes"] == parts.spec["pool_bytes"] == POOL
    figures = " ".join(claim.says for claim in parts.claim)
    assert all(f"figure {k}" in figures for k in (8, 9, 10, 11))


def test_prisms_bridge_ends_where_the_paper_stands() -> None:
    prism = study("prism-bridge")
    assert all(claim.evidence for claim in prism.claim)  # of statements that figure 7 is judged by
    assert {claim.name for claim in prism.claim} < {claim.name for claim in study("fig7").claim}
    first, *_, last = [step for step in prism.steps() if step.kind in {"base", "cumulative"}]
    specs = [prism.spec_of(first, name) for name in prism.systems]
    assert {(spec.plan, spec.assign, spec.scaling) for spec in specs} == {("held-out", "square", "rotate")}
    specs = [prism.spec_of(last, name) for name in prism.systems]
    assert {(spec.plan, spec.assign, spec.scaling, spec.sharing, spec.host) for spec in specs} == {
        ("window", "released", "replicate", "turns", "sglang-eager-2024")
    }
    assert {spec.pool_bytes for spec in specs} == {POOL}


def test_prisms_bridge_shows_both_ends_of_old_sglangs_host_time() -> None:
    prism = study("prism-bridge")
    steps = prism.steps()
    hosts = [[prism.spec_of(step, name).host for name in prism.systems] for step in steps]
    ends = ("sglang-eager-2024-high", "sglang-eager-2024")
    old = [i for i, names in enumerate(hosts) if ends[0] in names]
    assert [steps[i].kind for i in old] == ["cumulative"] * 5 + ["alone"]
    assert all(steps[i].other_end and not steps[i + 1].other_end for i in old)
    assert all(set(hosts[i]) == {ends[0]} and set(hosts[i + 1]) == {ends[1]} for i in old)
    assert all(steps[i].name == f"{steps[i + 1].name}; host {ends[0]}" for i in old)
    assert len(steps) == 1 + 2 * len(prism.condition) + len(old)


def test_real_logs_are_dealt_three_ways_beside_fitted_traces() -> None:
    asked = study("real-logs")
    fitted = {condition.spec["trace"] for condition in asked.condition if "trace" in condition.spec}
    assert fitted == {"hyperbolic-like", "arena-like"}
    for condition in (condition for condition in asked.condition if "trace" in condition.vary):
        dealt = [deal.parsed(str(name)) for name in condition.vary["trace"]]
        assert [(each.models, each.deal, each.max_tokens) for each in dealt] == [(8, k, 8192) for k in range(3)]
        (log,) = {each.log for each in dealt}
        assert condition.seeds == (1 if log == "fineserve-30-100b" else 0)  # of an hour either half is a case already
    assert asked.spec["pool_bytes"] == POOL


def test_one_seed_of_a_real_trace_is_the_case_of_its_half(tmp_path: Path) -> None:
    rows = {
        "request_id": range(80),
        "arrival_s": [100.0 * k for k in range(80)],
        "model": ["one"] * 80,
        "prompt_tokens": [8] * 80,
        "output_tokens": [8] * 80,
    }
    long, text = tmp_path / "long.parquet", STEPS.replace("cumulative = true", "").replace('"steps"', '"matrix"')
    schema.write(schema.table({name: list(column) for name, column in rows.items()}, {"span_s": 8000.0}), long)
    text = re.sub(r"\[\[condition\]\].*", "", text, flags=re.DOTALL).replace("llama-3.2-1b*4", "llama-3.2-1b")
    text = text.replace('trace = "sample"', f'trace = "{long}"')
    both = '[[condition]]\nname = "a"\n[[condition]]\nname = "b"\nseeds = 1\n'
    panels = list(grid.panels(study(written(tmp_path, text + both)), full=False))
    assert [(panel.key, panel.half, panel.seeds) for panel in panels] == [
        ("a", None, (0, 1, 2, 3, 4)),
        ("b / second half", 1, (0,)),
    ]
    assert panels[1].replayed_s == 4000.0
    drawn = text.replace(str(long), "aegaeon-like+models=1")
    assert [panel.half for panel in grid.panels(study(written(tmp_path, drawn + both)), full=False)] == [None, None]


def test_a_trace_that_stands_in_for_another_has_one_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    load_trace.cache_clear()
    panels = list(grid.panels(study("fig7").of(full=False), full=False))
    load_trace.cache_clear()
    two = [("hyperbolic-like", "hyperbolic"), ("arena-like", "arena-chat")]
    assert [panel.traces for panel in panels] == [*two * 2, *[("hyperbolic-like",)] * 2, *two]
    twice = ["light8 on 1 GPU at 10 x P95", "heavy8 at 10 x P95"]
    first = [*["light8 on 1 GPU"] * 2, *["heavy8"] * 2]
    assert [panel.condition.name for panel in panels] == [*first, *twice, *["SLO scale"] * 2]
    assert not any("half" in panel.key for panel in panels)


def test_prism58_is_what_its_header_says() -> None:
    members = model_set("prism58").members
    gib = [shapes.weight_bytes(member.shape, 1) / GIB for member in members]
    assert len(members) == len({member.name for member in members}) == 58
    assert sum(gib) == pytest.approx(596, abs=0.5)
    assert sum(gib) / 67.28 == pytest.approx(8.9, abs=0.05)
    small = [member.shape.name for member in members if member.tp == 1 and member.shape.name != "qwen-2.5-14b"]
    assert sorted(small) == sorted(3 * [member.shape.name for member in model_set("prism18").members])
    assert [member.tp for member in members if member.tp > 1] == [4, 4, 4]
    assert all(member.tp in shapes.degrees(member.shape) and member.tp <= 8 for member in members)
    assert all(member.stream is None for member in members)


# ------------------------------------------------------------------ parts of one


def test_a_part_of_a_study_keeps_the_claims_that_are_about_it() -> None:
    part = study("fig7").only(systems=("static",), traces=("sample",), models=("heavy8",), seeds=1)
    quick = part.of(full=False)
    assert [(condition.name, quick.axis(condition), quick.sets(condition)) for condition in quick.condition] == [
        ("heavy8", "rate_scale", ("heavy8",)),
        ("heavy8 at 10 x P95", "rate_scale", ("heavy8",)),
        ("SLO scale", "slo_scale", ("heavy8",)),
    ]
    assert {quick.varied(condition)["trace"] for condition in quick.condition} == {("sample",)}
    assert {claim.on.get("condition") for claim in part.claim} == {"heavy8", "SLO scale", None}  # the third row went
    assert (part.quick.seeds, part.full and part.full.seeds) == (1, 1)
    assert list(part.systems) == ["static"]


UNKNOWN = {
    "study": (lambda: study("fig77"), r'no study "fig77"; did you mean fig7\?'),
    "file": (lambda: study("nowhere.toml"), r"nowhere\.toml: No such file"),
    "set": (lambda: study("fig7").only(models=("light9",)), r'fig7 has no model set "light9"; did you mean light8\?'),
    "condition": (lambda: study("fig7").only(["heavy"]), r'fig7 has no condition "heavy"; did you mean heavy8\?'),
    "twice": (lambda: study("fig7").only(systems=("static", "static")), 'system "static" is listed twice'),
}


@cases(("ask", "says"), UNKNOWN)
def test_what_there_is_not_is_named(ask, says: str) -> None:  # type: ignore[no-untyped-def]  # a table of lambdas
    with pytest.raises(UserError, match=says):
        ask()


def test_a_study_goes_on_with_a_system_that_is_under_every_condition() -> None:
    aegaeon = study("aegaeon")
    left = aegaeon.without({"aegaeon"})
    assert left is not None
    assert left.first == "serverlessllm_released"  # prefill first and decode first are under one condition only
    assert set(left.systems) == set(aegaeon.systems) - {"aegaeon"}
    assert all("aegaeon" not in condition.among for condition in left.condition)
    assert aegaeon.without({"aegaeon", "serverlessllm_released"}) is None


def test_a_copy_runs_on_seeds_of_its_own() -> None:
    asked = study("fig7")
    plain, copy = (asked.spec_of(asked.condition[0], name) for name in ("prism", "prism" + AA))
    assert (copy.seed - plain.seed, copy.system) == (504, "prism")
