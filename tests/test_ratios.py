"""Bridges and regimes: conditions as data, ratios by bisection, and what is said of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.policy.types import UserError
from harness.rows import ratios
from harness.rows.statistics import Estimate
from harness.study import conditions, ratios_text
from harness.study.conditions import START, Study, study
from harness.study.rates import between
from harness.study.ratios import Measured, measure
from plots import fig_bridge, fig_regimes, style
from tests.test_cli import bench, ok

# Serves all while the forecast is at most `most_rps` for all models together, and drops all beyond: so it holds any
# level up to that rate and none above.
CAPPED = '''
"""Serves up to a rate of the forecast."""

from dataclasses import dataclass

from harness.policy.actions import Admit, Drop, Load, Run
from harness.policy.events import Arrived, Woke
from harness.policy.fields import number
from harness.policy.types import Batch, Cluster, Inst


@dataclass
class Capped:
    cluster: Cluster
    most_rps: float = number(1.0, 0, 1000)
    presets = {}
    hears = frozenset({Arrived, Woke})
    uses = frozenset({"Load", "Run", "Admit", "Drop"})
    options = {"kv": "paged"}

    def on(self, event, view):
        if event == Woke("start"):
            for name in self.cluster.models:
                batch = Batch(Inst(name, (0,)))
                yield Load(batch.inst)
                yield Run(batch)
        if isinstance(event, Arrived):
            rid = event.request.id
            over = sum(one.rate_rps for one in self.cluster.plan.values()) > self.most_rps
            yield Drop(rid) if over else Admit(rid, Batch(Inst(event.request.model, (0,))))
'''
HEAD = """
paper = "A test"
slo = "absolute:ttft=10,tpot=1"
seeds = 2
rates_rps = [1.0, 8.0]
bisections = 5

[systems]
ours = "{ours}"
theirs = "{theirs}"

[spec]
trace = "sample"
models = "llama-3.2-1b*4"
gpus = 1
plan = "trace"
window_s = 30.0
warmup_s = 5.0

[[ratio]]
first = "ours"
over = "theirs"
paper = 2.0
"""
STEPS = """
[[step]]
name = "larger steps"
spec = { chunk_tokens = 4096 }
origin = "paper states"
source = "a section"

[[step]]
name = "equal parts"
systems = { theirs = "static:equal" }
origin = "unknown"
source = "nothing says so"
"""
REGIME = """
[[regime]]
name = "{name}"
source = "a test"
"""


def write(path: Path, ours: str, theirs: str, rest: str) -> Path:
    path.write_text(HEAD.format(ours=ours, theirs=theirs) + rest)
    return path


def regime(tmp_path: Path, ours: str, theirs: str, **spec: Any) -> Study:
    """One regime of two systems."""
    path = write(tmp_path / "mine.toml", ours, theirs, REGIME.format(name="alone"))
    return study("regimes", str(path)).only(**spec)


def ratio(found: Measured) -> dict[str, Any]:
    (row,) = (row for row in found.table.to_pylist() if row["over"] is not None)
    return dict(row)


@pytest.fixture
def capped(tmp_path: Path) -> Path:
    path = tmp_path / "capped.py"
    path.write_text(CAPPED)
    return path


# ------------------------------------------------------------------ bisection


@pytest.mark.parametrize(
    ("seen", "next_"),
    [
        ({1.0: 1.0, 4.0: 0.5}, 2.0),
        ({1.0: 1.0, 2.0: 1.0, 4.0: 0.5, 64.0: 0.0}, 2.83),
        ({1.0: 1.0, 2.0: 0.98, 4.0: 1.0, 8.0: 0.5}, 5.66),  # a dip: 2 and 4 pool to 0.99
        ({1.0: 1.0, 2.0: 0.9, 4.0: 0.95, 8.0: 0.5}, 1.41),
        ({1.0: 1.0, 4.0: 0.99}, None),  # it holds everywhere
        ({1.0: 0.98, 4.0: 0.5}, None),  # it holds nowhere
        ({1.0: 1.0, 1.2345: 1.0}, None),  # nor is there a rate beside the highest that differs by its digits alone
        ({1.2345: 0.5, 4.0: 0.5}, None),
    ],
)
def test_the_next_rate_halves_the_bracket_of_the_fit(seen: dict[float, float], next_: float | None) -> None:
    assert between(seen, 0.99, min(seen), max(seen), digits=3) == next_


def test_a_bracket_shrinks_to_its_root_with_each_step() -> None:
    seen = {1.0: 1.0, 16.0: 0.0}
    for _ in range(5):
        x = between(seen, 0.99, 1.0, 16.0)
        assert x is not None
        seen[x] = float(x <= 3.0)
    low, high = max(x for x in seen if x <= 3.0), min(x for x in seen if x > 3.0)
    assert math.log2(high / low) == pytest.approx(4 / 2**5, rel=0.1)


# ------------------------------------------------------------------ ratios


def test_a_system_against_itself_is_1(tmp_path: Path, capped: Path) -> None:
    twins = regime(tmp_path, f"{capped}+most_rps=4.0", f"{capped}+most_rps=4")
    row = ratio(measure(twins, tmp_path / "runs"))
    assert (row["mean"], row["low"], row["high"], row["n"], row["sign"]) == (1.0, 1.0, 1.0, 2, "=")
    assert row["verdict"] == "even"


def test_a_known_factor_is_found(tmp_path: Path, capped: Path) -> None:
    asked = regime(tmp_path, f"{capped}+most_rps=6.0", f"{capped}+most_rps=2.0")
    found = measure(asked, tmp_path / "runs")
    row = ratio(found)
    assert row["mean"] == pytest.approx(3.0, rel=0.1)
    assert row["verdict"] == "ahead"
    rates = {row["first"]: row["mean"] for row in found.table.to_pylist() if row["over"] is None}
    assert rates["ours"] == pytest.approx(6.0, rel=0.07)
    assert rates["theirs"] == pytest.approx(2.0, rel=0.07)
    assert row["mean"] == pytest.approx(rates["ours"] / rates["theirs"])
    text = ratios_text.cells(found)
    assert text[0] == ("condition", "ours req/s", "theirs req/s", "ours / theirs")
    assert text[1][-1] == f"+ {ratios.text(row)}"
    other = measure(regime(tmp_path, f"{capped}+most_rps=2.0", f"{capped}+most_rps=6.0"), tmp_path / "runs")
    assert ratio(other)["mean"] == pytest.approx(1 / row["mean"])
    assert ratio(other)["verdict"] == "behind"


def test_stored_runs_are_not_made_again(tmp_path: Path, capped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.run import sweep

    asked = regime(tmp_path, f"{capped}+most_rps=6.0", f"{capped}+most_rps=2.0")
    before = measure(asked, tmp_path / "runs")
    monkeypatch.setattr(sweep, "execute", None)
    again = measure(asked, tmp_path / "runs")
    assert again.folder == before.folder
    assert again.table.equals(before.table)


def test_a_rate_below_the_fixed_ones_is_found_down_to_a_quarter(tmp_path: Path, capped: Path) -> None:
    found = measure(regime(tmp_path, f"{capped}+most_rps=6.0", f"{capped}+most_rps=0.6"), tmp_path / "runs")
    rates = {row["first"]: row for row in found.table.to_pylist() if row["over"] is None}
    assert rates["theirs"]["mean"] == pytest.approx(0.6, rel=0.07)
    assert (rates["theirs"]["sign"], ratio(found)["sign"]) == ("=", "=")
    assert found.about["requests"] == math.floor(0.5 * 30.0 * 2)  # at the lowest rate that was run, over both seeds


def test_a_rate_below_the_grid_bounds_the_ratio_on_one_side(tmp_path: Path, capped: Path) -> None:
    row = ratio(measure(regime(tmp_path, f"{capped}+most_rps=6.0", f"{capped}+most_rps=0.1"), tmp_path / "runs"))
    assert (row["sign"], row["high"], row["verdict"]) == (">", None, "ahead")
    assert row["low"] > 1.0
    assert ratios.text(row).startswith(">")
    assert ratios.text(row).endswith(", inf]")


def test_beyond_the_grid_is_said(tmp_path: Path, capped: Path) -> None:
    above = ratio(measure(regime(tmp_path, f"{capped}+most_rps=90.0", f"{capped}+most_rps=80.0"), tmp_path / "runs"))
    assert (above["mean"], above["verdict"], above["note"]) == (None, "open", "both hold 99 % at 8 req/s")
    below = ratio(measure(regime(tmp_path, f"{capped}+most_rps=0.2", f"{capped}+most_rps=0.1"), tmp_path / "runs"))
    assert (below["mean"], below["verdict"], below["note"]) == (None, "open", "neither holds 99 % at 0.25 req/s")


def test_what_has_no_room_is_said(tmp_path: Path) -> None:
    heavy = {"models": "nemo-12b*4"}  # 91 GiB of weights on one GPU
    found = measure(regime(tmp_path, "dedicated", "static", **heavy), tmp_path / "runs")
    row = ratio(found)
    assert (row["mean"], row["verdict"], row["note"]) == (None, "ahead", "theirs is infeasible")
    assert ratios_text.cells(found)[1][2] == "infeasible"
    turned = ratio(measure(regime(tmp_path, "static", "dedicated", **heavy), tmp_path / "runs"))
    assert (turned["verdict"], turned["note"]) == ("behind", "ours is infeasible")
    both = ratio(measure(regime(tmp_path, "static", "static:equal", **heavy), tmp_path / "runs"))
    assert (both["verdict"], both["note"]) == ("open", "ours is infeasible, theirs is infeasible")


@pytest.mark.parametrize(
    ("e", "verdict"),
    [
        (Estimate(2.0, 1.1, 3.0, 5), "ahead"),
        (Estimate(0.5, 0.3, 0.9, 5), "behind"),
        (Estimate(1.4, 0.9, 2.2, 5), "even"),
        (Estimate(0.997, 0.995, 0.999, 5), "even"),  # crossings are no finer
        (Estimate(2.0, None, None, 1), "open"),
        (Estimate(4.0, 2.0, None, 5, ">", 2, 3.0), "ahead"),
        (Estimate(4.0, 0.5, None, 5, ">", 2, 3.0), "even"),
        (Estimate(0.2, None, 0.5, 5, "<", 2, 0.4), "behind"),
        (Estimate(1.0, None, None, 5, "~", 2), "open"),
    ],
)
def test_a_verdict_needs_the_whole_interval(e: Estimate, verdict: str) -> None:
    assert ratios.verdict(e) == verdict


# ------------------------------------------------------------------ bridges


def test_steps_add_up_in_their_order_and_stand_alone(tmp_path: Path) -> None:
    walk = study("bridge", str(write(tmp_path / "mine.toml", "chunked", "static", STEPS))).conditions()
    said = [(one.kind, one.change.name, one.specs["theirs"].preset, one.specs["ours"].chunk_tokens) for one in walk]
    assert said == [
        ("base", START, None, 2048),
        ("cumulative", "larger steps", None, 4096),
        ("cumulative", "equal parts", "equal", 4096),
        ("alone", "larger steps", None, 4096),
        ("alone", "equal parts", "equal", 2048),
    ]
    some = study("bridge", str(tmp_path / "mine.toml")).only(["equal parts"]).conditions()
    assert [(one.kind, one.specs["theirs"].preset, one.specs["theirs"].chunk_tokens) for one in some] == [
        ("base", None, 2048),
        ("cumulative", "equal", 2048),
        ("alone", "equal", 2048),
    ]


def test_a_bridge_is_printed_and_drawn(tmp_path: Path, capped: Path) -> None:
    steps = STEPS.replace("static:equal", f"{capped}+most_rps=6.0")
    path = write(tmp_path / "mine.toml", f"{capped}+most_rps=6.0", f"{capped}+most_rps=2.0", steps)
    said = ok("bridge", path, "-o", tmp_path / "runs")
    holds = f"{START}, + larger steps, only larger steps"
    assert f"ours / theirs, 2 in the paper, of 5 conditions: beyond the interval: {holds}.\n" in said
    assert "equal parts: unknown, nothing says so" in said
    table = ok("bridge", path, "--markdown", "--no-plot", "-o", tmp_path / "runs")
    assert table.startswith(
        "| condition | origin | ours req/s | theirs req/s | ours / theirs |\n|---|---|---|---|---|\n"
    )
    assert "\n| + equal parts | unknown | " in table
    assert {path.suffix for path in (tmp_path / "runs").glob("bridge-mine.*")} == {".pdf", ".png", ".csv"}
    (folder,) = (tmp_path / "runs").glob("bridge-mine-*")
    rows, facts = ratios.read(folder)
    with style.theme():
        (axis,) = fig_bridge.draw(rows, facts).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == [START, "+ larger steps", "+ equal parts"]
    lines = {(len(line.get_xdata()), str(line.get_linestyle())) for line in axis.get_lines()}  # type: ignore[arg-type]
    assert (3, "-") in lines, "the walk has a corner a condition"
    caption = fig_bridge.caption(facts)
    for part in ("sample (synthetic)", "1 x h100", "simulated", "2 seeds", "at least 60 requests at each rate"):
        assert part in caption


def test_only_names_what_there_is(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.toml", "chunked", "static", STEPS)
    result = bench("bridge", path, "--only", "equal part")
    assert result.exit_code == 2
    assert 'mine has no step "equal part"; did you mean equal parts?' in result.output


# ------------------------------------------------------------------ regimes


def test_regimes_are_drawn_by_verdict(tmp_path: Path, capped: Path) -> None:
    rest = REGIME.format(name="open field") + REGIME.format(name="narrow") + 'systems = { ours = "static" }\n'
    rest += 'spec = { models = "nemo-12b*4" }\n'
    path = write(tmp_path / "mine.toml", f"{capped}+most_rps=6.0", f"{capped}+most_rps=2.0", rest)
    said = ok("regimes", path, "-o", tmp_path / "runs")
    assert "ours / theirs, 2 in the paper, of 2 conditions: beyond the interval: open field.\n" in said
    (folder,) = (tmp_path / "runs").glob("regimes-mine-*")
    rows, facts = ratios.read(folder)
    with style.theme():
        (axis,) = fig_regimes.draw(rows, facts).axes
    filled = [patch.get_facecolor() for patch in axis.patches]
    assert len(filled) == 2
    assert [text.get_text()[0] for text in axis.texts if text.get_text()[0] in "+-=?"] == ["+", "?"]
    assert filled[0] != filled[1]


def test_hatches_and_lightness_tell_verdicts_apart_in_grey() -> None:
    def lightness(color: str) -> int:
        red, green, blue = (int(color[k : k + 2], 16) for k in (1, 3, 5))
        return round(0.3 * red + 0.59 * green + 0.11 * blue)

    looks = [(fill.hatch, lightness(fill.color) // 20) for fill in fig_regimes.FILLS.values()]
    assert len(set(looks)) == len(fig_regimes.FILLS) == len(ratios.SIGNS)


# ------------------------------------------------------------------ data


def test_prisms_bridge_names_the_origin_of_each_step() -> None:
    prism = study("bridge", "prism")
    assert [(one.label, one.paper) for one in prism.ratios] == [("prism / static", 3.5), ("prism / muxserve++", 2.3)]
    assert all(change.origin in conditions.ORIGINS and change.source for change in prism.changes)
    assert prism.seeds >= 5
    assert min(prism.rates_rps) < 1.0
    base, *_ = prism.conditions()
    assert {(spec.plan, spec.assign, spec.scaling) for spec in base.specs.values()} == {
        ("held-out", "shuffled", "rotate")
    }
    last = prism.conditions()[len(prism.changes)]
    assert {(spec.plan, spec.assign, spec.scaling, spec.sharing, spec.host) for spec in last.specs.values()} == {
        ("window", "released", "replicate", "turns", "sglang-eager-2024")
    }
    assert {spec.pool_bytes for spec in last.specs.values()} == {round(67.28 * 2**30)}
    assert last.specs["static"].label == "static:equal"


def test_prisms_regimes_have_a_condition_each() -> None:
    prism = study("regimes", "prism")
    assert prism.seeds >= 5
    assert {one.first for one in prism.ratios} == {"prism", "elastic"}
    assert [one.change.name for one in prism.conditions()] == [change.name for change in prism.changes]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("seeds = 2", "seads = 2", 'unknown key "seads"; did you mean seeds?'),
        ("seeds = 2", "seeds = 0", "seeds is 0, below 1"),
        ("bisections = 5\n", "", 'the key "bisections" is missing'),
        ("rates_rps = [1.0, 8.0]", "rates_rps = [0.0]", r"rates_rps is \[0.0\], not numbers above 0"),
        ('slo = "absolute:ttft=10,tpot=1"', 'slo = "P59"', "P59"),
        ('slo = "absolute:ttft=10,tpot=1"', 'definition = "bth"', 'definition is "bth"; did you mean both?'),
        ('over = "theirs"', 'over = "thers"', 'ratio 1: no system "thers"; did you mean theirs?'),
        ('paper = 2.0\n', 'papre = 2.0\n', 'ratio 1: unknown key "papre"'),
        ("gpus = 1", "gpsu = 1", 'spec: unknown key "gpsu"; did you mean gpus?'),
        ("gpus = 1", "seed = 1", 'spec: "seed" is set by the bench'),
        ("chunk_tokens = 4096", "chunk_token = 4096", 'step 1: spec: unknown key "chunk_token"'),
        ("chunk_tokens = 4096", 'chunk_tokens = "x"', 'step 1: spec: chunk_tokens is "x", not a whole number'),
        ("chunk_tokens = 4096", "chunk_tokens = 2048", "step 1: it changes nothing of the fair default"),
        ('origin = "unknown"', 'origin = "unkown"', 'step 2: origin is "unkown"; did you mean unknown?'),
        ('source = "a section"\n', "", 'step 1: the key "source" is missing'),
        ('name = "equal parts"', 'name = "larger steps"', 'step "larger steps" is listed twice'),
        ('{ theirs = "static:equal" }', '{ their = "x" }', 'step 2: no system "their"; did you mean theirs?'),
        ('systems = { theirs = "static:equal" }', "spec = { chunk_tokens = 512 }",
         'step 2: chunk_tokens is changed by step "larger steps" already'),
        ("[[ratio]]", "[ratio]", r"ratio is .*, not a list of tables \(\[\[ratio\]\]\)"),
        ("[[step]]", "[[stp]]", 'unknown key "stp"'),
    ],
)  # fmt: skip
def test_a_mistake_names_file_and_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = write(tmp_path / "mine.toml", "chunked", "static", STEPS)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=rf"mine\.toml: .*{says}"):
        study("bridge", str(path))


def test_an_unknown_study_is_named() -> None:
    with pytest.raises(UserError, match=r'no bridge "prsm"; did you mean prism\?'):
        study("bridge", "prsm")
    with pytest.raises(UserError, match=r"nowhere\.toml: No such file"):
        study("regimes", "nowhere.toml")


def test_a_folder_without_ratios_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no ratios\.parquet here; bench bridge and bench regimes make it"):
        ratios.read(tmp_path)
