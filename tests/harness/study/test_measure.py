"""Studies on the sample in the simulator: sampled, scored into one table, held against claims; nothing made twice."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.answers import explain
from harness.answers.text import Shown, lines
from harness.rows import by_window, crossings, record, setting, tidy
from harness.rows.estimate import Estimate
from harness.run import slo
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Failed
from harness.run.spec import Spec, from_dict
from harness.study import claims, load, rule
from harness.study.measure import Measured, measure
from harness.study.study import AA, CONTROLS, Study
from tests.harness.run.test_sweep import SYSTEM, Heard, files


def study(folder: Path, text: str) -> Study:
    """Return a study from a file."""
    (path := folder / "mine.toml").write_text(text)
    return load.study(str(path))


def told(measured: Measured, *, every: bool = False) -> list[str]:
    shown = Shown(measured.table, measured.about, measured.folder, every=every)
    return [" ".join(line.split()) for line in lines(shown)]


def runs_of(measured: Measured, name: str) -> set[str]:
    """Return the runs of a condition, but for bounds."""
    keys = {panel["condition"] for panel in measured.about.panels if panel["name"] == name}
    rows = measured.table.select(["condition", "run", "label"]).to_pylist()
    return {row["run"] for row in rows if row["condition"] in keys and row["label"] in measured.about.systems}


def spec_of(measured: Measured, run: str) -> dict[str, Any]:
    spec: dict[str, Any] = record.meta(measured.folder.parent / run)["spec"]
    return spec


# ------------------------------------------------------------------ lines: knees, scales, counts

LINES = """
paper = "A test"
systems = ["chunked", "static"]
definitions = ["ttft", "tpot"]
slo = "P95"
controls = true
requests = 100
warmup_s = 10.0
sample = { rule = "knee" }
quick = { seeds = 1, points = 6, window_s = 50.0, replayed_s = 50.0 }
full = { seeds = 3, points = 12, window_s = 60.0, replayed_s = 60.0 }
spec = { trace = "sample", host = "vllm-graph", models = "llama-3.1-8b*3" }
condition = [
  { name = "rates", spec = { gpus = 1, slo_scale = 2 } },
  { name = "scales", along = "slo_scale", at = [1.0, 2.0], full = [1.5], spec = { gpus = 1, rate_scale = "held" } },
  { name = "counts", along = "gpus", at = [1, 2], spec = { models = "llama-3.1-8b*5", slo_scale = 2, rate_scale = 1 } },
]
claim = [{ what = "ratio", on = { condition = "rates" }, system = "chunked", over = "static", paper = 2.3 }]
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Return the study of lines, run once."""
    folder = tmp_path_factory.mktemp("lines")
    return measure(study(folder, LINES), folder / "out", workers=1)


def test_a_curve_reaches_from_all_met_to_the_fall(shown: Measured) -> None:
    panels = {panel["condition"]: panel for panel in shown.about.panels}
    assert list(panels) == ["rates", "scales", "counts"]
    assert "Windows cut to 50 of 60 s." in shown.about.notes
    assert set(tidy.CAPS) <= set(shown.table["definition"].to_pylist())  # for the caption
    scores = by_window.curves(crossings.of_panel(shown.table, panels["rates"]), "static", "ttft", "x")[0]
    assert len(scores) >= 6
    assert scores[min(scores)] > 0.99
    assert scores[max(scores)] < 0.9
    rows = crossings.of_panel(shown.table, panels["counts"]).to_pylist()
    hollow = {(x["x"], x["infeasible"] is not None) for x in rows if x["label"] == "static"}
    assert hollow == {(1.0, True), (2.0, False)}  # 75 GiB of weights
    by_condition = [row["condition"] for row in shown.table.select(["condition"]).to_pylist()]
    assert by_condition == sorted(by_condition)


def test_bounds_and_a_copy_stand_at_both_ends(shown: Measured) -> None:
    rows = crossings.of_panel(shown.table, shown.about.panels[0])
    xs = {
        name: sorted({x for curve in by_window.curves(rows, name, "ttft", "x").values() for x in curve})
        for name in ("chunked", *CONTROLS, "chunked" + AA)
    }
    assert all(xs[name] == [xs["chunked"][0], xs["chunked"][-1]] for name in (*CONTROLS, "chunked" + AA))
    assert shown.about.controls == (*CONTROLS, "chunked" + AA)
    seeds = {row["label"]: row["seed"] for row in rows.to_pylist()}
    assert seeds["chunked" + AA] - seeds["chunked"] == 504


def test_conditions_share_runs_and_systems_that_read_no_slo_are_scored_again(shown: Measured) -> None:
    rates, scales, counts = (runs_of(shown, name) for name in ("rates", "scales", "counts"))
    assert len(scales) == 2  # a system has one run for every SLO scale
    assert not counts & rates
    held = {spec_of(shown, run)["rate_scale"] for run in scales}
    assert held <= {row["x"] for row in crossings.of_panel(shown.table, shown.about.panels[0]).to_pylist()}


def test_explain_judges_a_studys_run_as_its_panels_do(shown: Measured) -> None:
    rows = [r for r in shown.table.to_pylist() if (r["label"], r["condition"]) == ("static", "scales")]
    (run,) = {r["run"] for r in rows}  # one for every SLO scale
    folder = shown.folder.parent / run
    judges = {ruling.under.rule: ruling for ruling in slo.rulings(folder)[0]}
    assert set(judges) >= {"1xP95", "2xP95"}
    spec, table = from_dict(record.meta(folder)["spec"]), record.read(folder)
    scored = [r for r in rows if r["definition"] in {"ttft", "tpot"} and r["over"] == "pooled"]
    assert len(scored) == 4
    for row in scored:
        limits = slo.limits(folder, judges[row["slo"]].under)
        line = next(explain.misses(table, spec.window_s or math.inf, limits, row["definition"], ""))
        missed, offered = map(int, line.split()[:3:2])
        assert 1 - missed / offered == pytest.approx(row["value"])


def test_a_second_call_does_nothing(shown: Measured) -> None:
    kept, heard = files(shown.folder.parent), Heard()
    again = measure(shown.study, shown.folder.parent, workers=1, teller=heard)
    assert not heard.ran
    total = len(shown.about.runs)
    assert heard.lines[-1] == f"{total} of {total} points current, nothing to do"
    assert files(shown.folder.parent) == kept
    assert again.table.equals(shown.table)
    assert told(again) == told(shown)


@pytest.mark.full
def test_full_is_another_table_of_more_seeds(shown: Measured) -> None:
    full = measure(shown.study, shown.folder.parent, full=True)
    assert full.folder != shown.folder
    assert full.about.seeds == 3
    assert {row["x"] for row in crossings.of_panel(full.table, full.about.panels[1]).to_pylist()} == {1.0, 1.5, 2.0}


FAILS = (SYSTEM % "").replace("for name in", "raise ValueError('planted')\n            for name in")


def test_a_system_that_fails_leaves_the_study(tmp_path: Path) -> None:
    (path := tmp_path / "bad.py").write_text(FAILS)
    asked = study(tmp_path, LINES).only(["counts"])
    for systems in ((str(path), "chunked"), ("chunked", str(path))):  # whoever stands first
        heard = Heard()
        left = measure(asked.only(systems=systems), tmp_path / "out", workers=1, teller=heard)
        assert left.failed["bad"].startswith("ValueError at bad.py:30 (planted), t = -10 s, Woke(key='start')")
        assert left.about.systems == ("chunked",)
        assert set(left.table["label"].to_pylist()) == {"chunked", *CONTROLS}
        assert len(heard.lines) == len(set(heard.lines))
        assert not list((tmp_path / "out").glob("bad-*"))
    alone = measure(asked.only(systems=("chunked",)), tmp_path / "out", workers=1)
    assert (alone.folder, alone.table, alone.failed) == (left.folder, left.table, {})
    with pytest.raises(Failed, match=r"^bad: ValueError"):
        measure(asked.only(systems=(str(path),)), tmp_path / "out", workers=1)


# ------------------------------------------------------------------ lines: over the number of models

SIZES = """
paper = "A test"
systems = ["chunked", "dedicated", "static"]
vary = { trace = ["aegaeon-like+span_s=30", "aegaeon-like+span_s=30+lengths=sharegpt-ox2"] }
titles = ["one", "two"]
definitions = ["qos", "token"]
controls = true
requests = 10
warmup_s = 5.0
level = 0.9
slo = "absolute:ttft=10,tpot=0.1"
quick = { seeds = 1, window_s = 20.0, replayed_s = 20.0 }
claim = [
  { what = "crossing", on = { condition = "sizes", column = 2 }, system = "static", paper = [4, 9], why = "no room" },
]

[[condition]]
name = "sizes"
along = "models"
at = ["aegaeon+models=3", "aegaeon+models=10"]
full = ["aegaeon+models=5"]
spec = { gpus = 2, slo_scale = 1.0, rate_scale = 4.0 }

[[condition]]
name = "rates"
among = ["chunked", "static"]
at = [2.0, 4.0]
spec = { models = "aegaeon+models=3", gpus = 2, slo_scale = 1.0, process = "model", sharing = "turns" }
"""


def test_a_study_over_the_number_of_models(tmp_path: Path) -> None:
    measured = measure(study(tmp_path, SIZES), tmp_path / "out", workers=1)
    panels = {panel["condition"]: panel for panel in measured.about.panels}
    first, second, third, _ = panels
    assert [(panel["row"], panel["column"]) for panel in panels.values()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "aegaeon+models" not in first  # sets along x share a panel
    assert (panels[first]["axis"], panels[first]["count"], panels[first]["gpus"]) == ("models", None, 2)
    assert panels[first]["rate_rps"] == pytest.approx(0.4)  # of each model: as the generator means it
    rows = measured.table.to_pandas()
    xs = rows.groupby(["condition", "label"], observed=True)["x"].unique().map(sorted).to_dict()
    assert xs[first, "chunked"] == [3.0, 10.0]
    assert xs[third, "static"] == [2.0, 4.0]
    assert xs[first, "unshared"] == xs[first, "chunked"]  # controls stand at the ends
    here = crossings.crossing(crossings.of_panel(measured.table, panels[second]), panels[second], "static", "qos", 0.9)
    assert here is not None
    assert replace(here.at, mean=round(here.at.mean, 9)) == Estimate(3.0, None, None, 1)
    assert (here.fails, here.dip) == (10.0, 0.0)  # ten do not fit: three hold, not between
    (verdict,) = claims.verdicts(measured.table, measured.about)
    assert verdict.panel is not None
    assert (verdict.panel["condition"], verdict.says) == (second, "open")
    lines = told(measured, every=True)
    assert any(line.startswith("sizes: models at which each system holds 90 %") for line in lines)
    assert any("static, models for 90 % QOS" in line and "4-9" in line for line in lines)
    processes = [{spec_of(measured, run)["process"] for run in runs_of(measured, name)} for name in ("sizes", "rates")]
    assert processes == [{"own"}, {"model"}]
    assert any(f"(SLO 1x, 2 GPUs, {setting.machine(panels[third]['own'])})" in line for line in lines)
    runs = [run for run in record.runs(tmp_path / "out") if record.meta(run)["infeasible"] is None]
    kept = [record.read(run)["token_ns"] for run in runs]
    assert all(len(tokens) and not tokens.null_count for tokens in kept)


# ------------------------------------------------------------------ a fleet

FLEET = """
paper = "A test"
systems = ["static", "chunked"]
bounds = ["dedicated"]
definitions = ["ttft"]
along = "gpus"
at = [1, 3]
sample = { rule = "bracket" }
vary = { slo = ["5xP95", "absolute:ttft=5,tpot=1"] }
layout = "fleet"
quick = { seeds = 2 }
spec = { models = "llama-3.1-8b*5", warmup_s = 5.0, trace = "sample", rate_scale = 1.0 }
condition = [{ name = "sample" }]
claim = [
  { what = "fewest", on = { slo = "5xP95" }, system = "static", paper = 2 },
  { what = "fewest", on = { slo = "5xP95" }, system = "static", over = "chunked", paper = [0.5, 2.0] },
]
"""


def test_a_small_fleet(tmp_path: Path) -> None:
    measured = measure(study(tmp_path, FLEET), tmp_path / "out", workers=1)
    at: dict[tuple[str, str], Estimate] = {}
    for panel in measured.about.panels:
        rows = crossings.of_panel(measured.table, panel)
        for name in measured.about.systems:
            count = crossings.fewest(rows, name, "", "ttft", 0.99)
            assert count is not None
            assert count.mean >= 2  # five of 15 GiB do not fit one GPU
            curves = by_window.curves(rows, name, "ttft", "x")
            assert sorted(curves) == [0, 1]
            assert 1 <= len(curves[0]) <= 3
            at[panel["slo"], name] = count
        taken = by_window.curves(rows, "dedicated", "ttft", "x")
        assert {x for curve in taken.values() for x in curve} == {5.0}  # a GPU a model, whatever is asked
    assert at["absolute:ttft=5,tpot=1", "static"].mean <= at["5xP95", "static"].mean
    first, second = claims.verdicts(measured.table, measured.about)
    assert first.here is not None
    assert first.here.mean == at["5xP95", "static"].mean
    assert first.says == rule.judged(first.claim, first.here)
    assert second.here is not None
    assert 1 / 3 <= second.here.mean <= 3
    lines = told(measured, every=True)
    assert any(line.startswith("sample: GPUs at which each system reaches 99 % (sample") for line in lines)
    assert any(line.startswith("static / chunked, GPUs for 99 % TTFT") for line in lines)
    heard = Heard()
    assert measure(measured.study, tmp_path / "out", workers=1, teller=heard).table.equals(measured.table)
    assert not heard.ran


# ------------------------------------------------------------------ migrations

MOVES = '''
"""A system of a test: its one model goes to GPU 1 after 10 s, comes back after 20 s, is away from 30 to 40 s."""

from harness.policy.actions import Admit, Evict, Load, Run, Wake
from harness.policy.events import Woke
from harness.policy.types import Batch, Inst


class Moves:
    presets = {}
    hears = frozenset({Woke})
    uses = frozenset({"Load", "Run", "Admit", "Evict", "Evict.drain", "Wake"})
    options = {"kv": "paged"}

    def __init__(self, cluster):
        self.name = next(iter(cluster.models))

    def on(self, event, view):
        here, there = Inst(self.name, (0,)), Inst(self.name, (1,))
        match event.key:
            case "start":
                yield from (Load(here), Run(Batch(here)), Run(Batch(there)), Admit(self.name, Batch(here)))
                yield from (Wake(10.0 * k, str(k)) for k in range(1, 5))
            case "1":  # a second copy first
                yield from (Load(there), Evict(here), Admit(self.name, Batch(there)))
            case "2":  # out, and in elsewhere at once
                yield from (Evict(there, drain=False), Load(here), Admit(self.name, Batch(here)))
            case "3":
                yield Evict(here)
            case "4":
                yield Load(here)
'''


def test_migrations_are_counted_and_swaps_are_none(tmp_path: Path) -> None:
    (path := tmp_path / "moves.py").write_text(MOVES)
    spec = resolve(Spec(str(path), trace="sample", models="llama-3.2-1b", gpus=2, slo="", control_s=0.0, drain_s=64.0))
    stats = record.meta(execute(spec, tmp_path, ""))["stats"]
    assert (stats["loads"], stats["evicts"], stats["migrations"]) == (3, 3, 2)
