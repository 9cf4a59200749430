"""A paper's figure as data: the grid that follows, crossings beside the paper's, a second call that redoes nothing.

Over 600 lines: a figure passes through one chain of stages, which share their small figures here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure as Drawing

from harness.policy.types import UserError
from harness.report import explain
from harness.rows import record, statistics, tidy
from harness.rows.statistics import Crossing, Estimate
from harness.run import slo
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Failed
from harness.run.spec import Spec, from_dict
from harness.study import claims, compare, figure, reproduce
from harness.study.claims import judged, judged_reach
from harness.study.figure_text import lines
from harness.study.rates import grid, highest
from harness.study.reproduce import Reproduced
from plots import fig_paper, style
from tests.test_sweep import SYSTEM, files

# ------------------------------------------------------------------ figures as data

MINE = """
paper = "A test"
systems = ["chunked", "static"]
traces = ["sample"]
definitions = ["ttft", "tpot"]
host = "vllm-graph"
requests = 100
warmup_s = 10.0
quick = { seeds = 2, rates = 6, window_s = 50.0, replayed_s = 50.0 }
full = { seeds = 3, rates = 12, window_s = 60.0, replayed_s = 60.0 }

[[row]]
axis = "rate_scale"
models = "llama-3.1-8b*3"
gpus = 1
slo_scale = 2.0

[[row]]
axis = "slo_scale"
models = "llama-3.1-8b*3"
gpus = 1
slo_scale = [1.0, 2.0]
full = [1.5]

[[row]]
axis = "gpus"
models = "llama-3.1-8b*5"
gpus = [1, 2]
slo_scale = 2.0
rate_scale = 1.0

[[claim]]
axis = "rate_scale"
definition = "ttft"
system = "chunked"
over = "static"
paper = 2.3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return path


def test_figure_7_is_as_large_as_promised() -> None:
    fig7 = figure.figure("fig7")
    assert fig7.systems[0] == "prism"
    assert {"muxserve:plusplus", "elastic", "static:rate", "static:equal", "qlm"} < set(fig7.systems)
    assert len([one for one in fig7.systems if "quotas" in one]) == 1  # MuxServe++ with quotas and without
    rows = [row for row in fig7.rows if row.axis == "rate_scale" and not row.extra]
    rated = [(row.models[0], row.gpus, row.assign or "released", row.pool_gib) for row in rows]
    assert rated == [
        ("light8", (1,), "released", 67.28),
        ("heavy8", (2,), "released", 67.28),
        ("heavy8", (2,), "shuffled", 67.28),
        ("prism18", (2, 3), "released", 67.28),
        ("heavy8", (2,), "released", 0.0),  # processes inside the engines' share
    ]
    assert [(row.axis, row.models) for row in fig7.rows if row.extra] == [
        ("rate_scale", ("light8",)),
        ("rate_scale", ("heavy8",)),
        ("gpus", ("prism18",)),
    ]
    drift = next(row for row in fig7.rows if "drift" in " ".join(row.traces))
    assert drift.window_s >= 1800
    assert next(row for row in fig7.rows if row.axis == "gpus").gpus == tuple(range(2, 9))
    assert all(len(row.rate_rps) == 3 for row in fig7.rows if row.axis == "rate_scale")
    assert all(min(row.rate_rps) < 1 for row in fig7.rows if row.axis == "rate_scale" and not row.extra)
    assert fig7.requests >= 700
    assert (fig7.quick.seeds, fig7.full.seeds) == (5, 12)
    assert (fig7.quick.rates, fig7.full.rates) >= (5, 8)
    assert {claim.paper for claim in fig7.claims} == {2.3, 3.5, "reached", "never", 4, 5}
    assert all(claim.row for claim in fig7.claims)
    assert {claim.row for claim in fig7.claims if claim.over} == {2, 7}  # heavy8 as released, light8, on 2 GPUs
    assert {claim.row for claim in fig7.of(full=False).claims} == {2, 5}  # the others are of rows for --full
    unrated = [claim for claim in fig7.claims if not claim.comparable]  # the paper's third row states no rate
    assert unrated == [claim for claim in fig7.claims if claim.axis == "gpus"]
    assert all("no request rate" in claim.why for claim in unrated)


@pytest.mark.parametrize(("full", "most"), [(False, 3_500), (True, 20_000)])
def test_figure_7_keeps_its_budget_of_runs(full: bool, most: int) -> None:
    fig7 = figure.figure("fig7").of(full)
    scope, runs = fig7.full if full else fig7.quick, 0
    for row in fig7.rows:
        panels = len(row.traces or fig7.traces) * len(row.models)
        panels *= len(row.gpus) if row.axis == "rate_scale" else 1
        along = scope.rates if row.axis == "rate_scale" else len(row.along(full))
        bounds = 2 * (len(compare.CONTROLS) + (row.axis == "rate_scale"))  # at two places, with the A/A copy
        runs += panels * (along * len(row.systems or fig7.systems) + bounds) * scope.seeds
    assert most / 2 < runs < most


def test_pd_multiplexing_is_compared_where_its_authors_do() -> None:
    one, eight = figure.figure("pdmux"), figure.figure("pdmux-70b")
    assert (one.gpu, one.slo, one.rows[0].models, one.rows[0].gpus) == (
        "h200", "absolute:ttft=1,tpot=0.06", ("codellama-34b",), (1,),
    )  # fmt: skip
    chunks = {name.partition("tau=")[2] for name in one.systems} - {""}
    assert chunks >= {"512", "1024", "2048"}  # about the size that the claim is of
    assert (eight.gpu, eight.slo) == ("a100-80g", "absolute:ttft=10,tpot=0.1")
    assert [(row.models[0], row.gpus[0], row.slo_scale[0]) for row in eight.rows[:2]] == [
        ("llama-3.3-70b-tp8", 8, 1.0), ("llama-3.1-8b-tp2", 2, 0.5),
    ]  # fmt: skip
    untested = [claim for claim in eight.claims if not claim.comparable]
    assert [claim.paper for claim in untested] == [3.06, 1.62, 2.6, 1.3]
    assert all("Tool&Agent" in claim.why for claim in untested)
    assert ["LooGLE" in claim.why for claim in one.claims if not claim.comparable] == [True]
    assert all("itl" in found.definitions for found in (one, eight))


def test_aegaeon_is_compared_where_the_paper_does() -> None:
    found = figure.figure("aegaeon")
    assert set(found.systems) == {"aegaeon", "aegaeon:prefill-first", "aegaeon:decode-first", "serverlessllm",
                                  "serverlessllm:plus", "muxserve:plusplus"}  # fmt: skip
    assert [row.axis for row in found.rows] == ["models", "models", "rate_scale", "slo_scale", "models"]
    assert [row.process for row in found.rows] == ["", "", "", "", "model"]
    sizes = [[int(one.partition("=")[2]) for one in row.along(full=True)] for row in found.rows[:2]]
    assert [(min(x), max(x)) for x in sizes] == [(16, 80), (16, 54)]
    assert found.rows[2].models == ("aegaeon+models=40",)
    assert [0.05 * x for x in found.rows[2].along()][:: len(found.rows[2].along()) - 1] == pytest.approx([0.05, 0.7])
    assert found.rows[3].along() == (0.3, 0.5, 1.0)
    assert all(row.gpus == (16,) for row in found.rows)
    assert (found.level, found.slo) == (0.9, "absolute:ttft=10,tpot=0.1")
    assert (found.gpu, found.host) == ("h100", "vllm-eager")  # fitted to its artifact's latency.csv
    claims = [((2.0, 2.5), "qos"), ((65, 75), "qos"), (32, "qos")]  # 7 models a GPU, rounded, of 10
    assert [(c.paper, c.definition) for c in found.claims[::2]] == claims
    assert found.only(systems=("static",)).rows[1].systems == ()
    assert found.rows[4].along() == found.rows[0].along()
    part = found.only(models=("aegaeon+models=40", "aegaeon+models=54"))
    assert [row.axis for row in part.rows] == ["models", "rate_scale"]
    assert [(c.axis, c.row) for c in part.claims] == [("rate_scale", 2)] * 2  # claims of a row go with it


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [
        ('paper = "A test"', "", 'the key "paper" is missing'),
        ("warmup_s", "warmups", 'unknown key "warmups"; did you mean warmup_s?'),
        ('axis = "gpus"', 'axis = "gpu"', 'row 3: axis is "gpu"; did you mean gpus?'),
        ("gpus = [1, 2]", "gpus = 1\nslo = 2", 'row 3: unknown key "slo"'),
        ("slo_scale = [1.0, 2.0]", "slo_scale = [1.0, 2.0]\ngpu = 2", "row 2: unknown key"),
        ("paper = 2.3", 'paper = "always"', 'claim 1: paper is "always"'),
        (
            'models = "llama-3.1-8b*3"\ngpus = 1\nslo_scale = [',
            'models = "x"\ngpus = 1\nslo_scale = [',
            "row 2: no rate",
        ),
        ("paper = 2.3", "paper = [3, 2]", "claim 1: paper is [3, 2]"),
        ("paper = 2.3", "paper = 2.3\ncomparable = false", 'claim 1: comparable is false, and the key "why"'),
        ("paper = 2.3", 'paper = 2.3\ncomparable = "no"', "claim 1: comparable is 'no', not true or false"),
        ("paper = 2.3", "paper = 2.3\nrow = 2", "claim 1: row 2 is none along rate_scale"),
        ('axis = "gpus"', 'axis = "gpus"\nsystems = "static"', "row 3: systems are without chunked"),
        ('axis = "gpus"', 'axis = "gpus"\nsystems = ["chunked", "qlm"]', 'row 3: system "qlm" is none'),
        (
            "gpus = [1, 2]\nslo_scale = 2.0\nrate_scale = 1.0",
            "gpus = [1, 2]\nslo_scale = 2.0\nrate_scale = [1, 2]",
            "row 3: rate_scale is [1, 2]: one number, but along its own axis",
        ),
        (
            'axis = "gpus"\nmodels = "llama-3.1-8b*5"\ngpus = [1, 2]\nslo_scale = 2.0\nrate_scale = 1.0',
            'axis = "models"\nmodels = "llama-3.1-8b*5"\ngpus = 2\nslo_scale = 2.0',
            "row 3: no rate_scale",
        ),
        ('axis = "gpus"', 'axis = "gpus"\nprocess = "two"', 'row 3: process is "two"'),
        ("requests = 100", 'requests = 100\ntitles = ["a", "b"]', "titles are 2, the figure has 1 traces"),
        ("[[row]]", "[[row", "mine.toml"),
    ],
)
def test_a_mistake_in_a_figure_is_one_line(mine: Path, line: str, instead: str, says: str) -> None:
    assert line in MINE
    mine.write_text(MINE.replace(line, instead))
    with pytest.raises(UserError) as error:
        figure.figure(str(mine))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(("mine.toml: ", str(mine)))


def test_an_unknown_figure_or_set_is_named() -> None:
    with pytest.raises(UserError, match=r'no figure "fig77"; did you mean fig7\?'):
        figure.figure("fig77")
    with pytest.raises(UserError, match="has no model set"):
        figure.figure("fig7").only(models=("light9",))
    part = figure.figure("fig7").only(systems=("static",), traces=("sample",), models=("heavy8",), seeds=1)
    assert [(row.axis, row.models, row.traces) for row in part.of(full=False).rows] == [
        ("rate_scale", ("heavy8",), ()),
        ("rate_scale", ("heavy8",), ()),
        ("slo_scale", ("heavy8",), ()),
        ("rate_scale", ("heavy8",), ()),
    ]
    assert [claim.row for claim in part.claims if claim.over] == [1, 1]  # light8 went, and rows are counted anew
    assert part.quick.seeds == 1


# ------------------------------------------------------------------ rates


def seen(holds: int, falls: int, lowest: float = 1.0) -> dict[float, dict[str, float]]:
    """What a search saw of a system that holds `holds` octaves and is below 90 % after `falls`."""
    return {
        lowest * 2.0**k: {"ttft": 1.0 if k < holds else 0.95 if k < falls else 0.5, "tpot": 1.0}
        for k in range(falls + 1)
    }


@given(st.integers(0, 6), st.integers(0, 3), st.integers(2, 14), st.sampled_from([0.25, 1.0, 2.0]))
def test_rates_reach_from_the_lowest_to_the_fall(holds: int, more: int, least: int, lowest: float) -> None:
    found = seen(holds, holds + more, lowest)
    rates = grid(found, least)
    assert len(rates) >= least
    assert list(rates) == sorted(set(rates))
    assert set(found) <= set(rates)  # what was searched is not run in vain
    assert (rates[0], rates[-1]) == (lowest, max(*found, 4 * lowest))
    assert set(rates) <= set(grid(found, 2 * least))  # --full holds the default


def test_rates_are_finer_around_the_knee() -> None:
    assert grid(seen(3, 4), 6) == (1, 2, 4, 5.66, 8, 11.3, 16)
    assert len(grid(seen(0, 0), 6)) == 9  # fell at once: quarters of the two octaves above


def test_a_dip_at_a_low_rate_is_not_the_knee() -> None:
    """A system that attains 98.4 to 99.3 % at the lowest rates, holds 99 % at 8, and has fallen at 16."""
    shares = {0.5: 0.984, 1.0: 0.993, 2.0: 0.996, 4.0: 0.999, 8.0: 0.995, 16.0: 0.8}
    dips = {rate: {"ttft": share, "tpot": 1.0} for rate, share in shares.items()}
    assert highest(dips.items(), 0.99) == 8.0
    assert {8.0, 11.3, 16.0} <= set(grid(dips, 6))
    assert set(grid(dips, 6)) - set(shares) == {11.3}  # no rate is spent on the dip
    worse = {rate: scores | {"tpot": 1.0 if rate <= 2 else 0.9} for rate, scores in dips.items()}
    assert highest(worse.items(), 0.99) == 2.0  # by every definition
    unlucky = [*dips.items(), *((rate, {"ttft": 0.9, "tpot": 1.0}) for rate in shares)]
    assert highest(unlucky, 0.99) is None  # of the mean over seeds


# ------------------------------------------------------------------ crossings and claims


def test_the_least_scale_and_the_fewest_gpus_that_hold() -> None:
    curve = {1.0: 0.5, 2.0: 0.98, 4.0: 1.0, 8.0: 1.0}
    assert statistics.least({0: curve}, 0.99).at.mean == pytest.approx(3.0)
    assert statistics.least({0: curve}, 0.99).fails == 2.0  # the largest scale that fails
    assert statistics.fewest({0: curve}, 0.99).at == Estimate(4.0, None, None, 1, "=")
    dip = {0: curve | {8.0: 0.98}}  # on average of 4 and 8 it is .99
    assert statistics.least(dip, 0.985).at.mean == pytest.approx(2.0 + 2.0 * 0.5)
    few = statistics.fewest(dip, 0.985)
    assert (few.at, few.fails) == (Estimate(4.0, None, None, 1), 8.0)
    assert few.dip == pytest.approx(0.01)
    low = {0: curve | {8.0: 0.9}}
    assert statistics.least(low, 0.99).at == Estimate(8.0, 8.0, None, 1, ">", 1, 8.0)
    assert statistics.fewest(low, 0.99).at == Estimate(8.0, None, None, 1, ">", 1, 8.0)
    assert statistics.fewest({0: {2.0: 1.0, 3.0: 1.0}}, 0.99).at == Estimate(2.0, None, None, 1, "<", 1, 2.0)
    assert statistics.fewest({0: curve, 1: curve | {2.0: 1.0}}, 0.99).at.mean == 2.0  # of the mean over seeds


@given(st.dictionaries(st.floats(1, 9), st.floats(0, 1), min_size=1, max_size=6))
def test_least_mirrors_the_crossing(curve: dict[float, float]) -> None:
    up, down = statistics.least({0: curve}, 0.9), statistics.crossing({0: {-x: y for x, y in curve.items()}}, 0.9)
    assert up.at.mean == -down.at.mean
    assert (up.at.sign, down.at.sign) in {("=", "="), ("<", ">"), (">", "<")}
    assert (up.fails is None and down.fails is None) or up.fails == -(down.fails or 0.0)
    assert up.dip == down.dip


@given(st.dictionaries(st.integers(1, 9).map(float), st.floats(0, 1), min_size=1, max_size=6))
def test_the_fewest_gpus_hold_by_themselves(curve: dict[float, float]) -> None:
    at = statistics.fewest({0: curve}, 0.9).at
    assert at.mean in curve
    assert (curve[at.mean] >= 0.9 - 1e-12) == (at.sign != ">")


VERDICTS = [  # of what is found, beside a claim of 2.3
    (Estimate(2.0, 1.5, 2.5, 5), "agrees"),
    (Estimate(2.0, 1.9, 2.1, 5), "differs"),
    (Estimate(2.3, None, None, 1), "agrees"),
    (Estimate(4.0, None, None, 1), "differs"),
    (Estimate(1.5, 1.2, None, 5, ">"), "open"),  # at least 1.2: it may be 2.3
    (Estimate(3.0, 2.8, None, 5, ">"), "differs"),
    (Estimate(1.5, None, 1.8, 5, "<"), "differs"),
    (Estimate(1.0, None, None, 5, "~"), "open"),
    (Estimate(2.3, 1.2, None, 2, ">", 1, 2.5), "open"),  # no cut crossing stands beside "agrees"
    (None, "not run"),
]


@pytest.mark.parametrize(("here", "says"), VERDICTS)
def test_a_range_of_the_paper_is_met_in_part(here: Estimate | None, says: str) -> None:
    assert judged((2.3, 2.3), here) == says
    if here is not None and here.sign == "=":
        assert judged((0.0, 9.0), here) == "agrees"


@pytest.mark.parametrize(("here", "says"), VERDICTS)
def test_the_paper_is_held_against_the_interval(here: Estimate | None, says: str) -> None:
    assert judged(2.3, here) == says


@pytest.mark.parametrize("paper", ["reached", "never"])
def test_a_claim_of_reach_is_judged_seed_by_seed(paper: str) -> None:
    said = [judged_reach(paper, n, 3) for n in range(4)]
    assert said == ["differs", "open", "open", "agrees"][:: 1 if paper == "reached" else -1]
    assert judged_reach(paper, 0, 0) == "not run"
    assert {*said, "not run"} < set(claims.SAYS)


PANELS: list[dict[str, Any]] = [
    {"panel": "1/1/heavy8", "row": 0, "column": 0, "axis": "rate_scale", "gpus": 2, "slo_scale": 5.0, "rate_rps": None,
     "unit_rps": 1.5, "at": 4.0, "trace": "hyperbolic-like"},
    {"panel": "2/1/heavy8", "row": 1, "column": 0, "axis": "slo_scale", "gpus": 2, "slo_scale": None, "rate_rps": 6.0,
     "unit_rps": 1.5, "at": 5.0, "trace": "hyperbolic-like"},
    {"panel": "3/1/heavy8", "row": 2, "column": 0, "axis": "gpus", "gpus": None, "slo_scale": 5.0, "rate_rps": 1.5,
     "unit_rps": 1.5, "at": None, "trace": "hyperbolic-like"},
]  # fmt: skip
CLAIMS: list[dict[str, Any]] = [
    {"axis": "rate_scale", "system": "prism", "over": "static", "paper": 2.3, "definition": "ttft", "trace": "hyper"},
    {"axis": "rate_scale", "system": "prism", "over": "static", "paper": 4.0, "definition": "ttft", "trace": ""},
    {"axis": "rate_scale", "system": "prism", "over": "static", "paper": 4.0, "definition": "ttft", "trace": "arena"},
    {"axis": "slo_scale", "system": "prism", "over": None, "paper": "reached", "definition": "ttft", "trace": ""},
    {"axis": "slo_scale", "system": "static", "over": None, "paper": "never", "definition": "ttft", "trace": ""},
    {"axis": "gpus", "system": "prism", "over": None, "paper": 4, "definition": "ttft", "trace": ""},
    {
        "axis": "gpus",
        "system": "prism",
        "over": None,
        "paper": 7,
        "definition": "ttft",
        "trace": "",
        "comparable": False,
        "why": "no rate is stated",
    },
    {"axis": "gpus", "system": "static", "over": None, "paper": "never", "definition": "ttft", "trace": ""},
]
ABOUT: dict[str, Any] = {
    "figure": "fig7",
    "paper": "A paper, figure 7",
    "level": 0.99,
    "definitions": ["ttft", "tpot"],
    "systems": ["prism", "static"],
    "controls": ["dedicated", "ideal", "prism (A/A)"],
    "seeds": 3,
    "panels": [{"models": "heavy8", "tier": "synthetic", "count": 8, "window_s": 600.0} | one for one in PANELS],
    "claims": CLAIMS,
    "notes": ["hyperbolic-like: windows cut to 600 of 7200 s."],
    "runs": {},
    "key": "x",
}


def cells() -> Iterator[dict[str, Any]]:
    """Made-up scores: prism holds 4 x the rate of static, 99 % from SLO scale 2, 4 GPUs; static neither."""
    for label, knee, infeasible in (("prism", 8.0, None), ("static", 2.0, "no room")):
        for seed in range(3):
            for x in (1.0, 2.0, 4.0, 8.0, 16.0):
                yield {"panel": "1/1/heavy8", "x": x, "label": label, "seed": seed, "ttft": 1.0 if x <= knee else 0.5}
            for x in (1.0, 2.0, 5.0):
                met = label == "prism" and x >= 2
                yield {"panel": "2/1/heavy8", "x": x, "label": label, "seed": seed, "ttft": 1.0 if met else 0.8}
            for x in (2.0, 3.0, 4.0, 5.0):
                met = label == "prism" and x >= 4
                none = infeasible if x == 2 else None
                yield {"panel": "3/1/heavy8", "x": x, "label": label, "seed": seed, "infeasible": none, "gpus": int(x),
                       "ttft": 1.0 if met else 0.0 if none else 0.8}  # fmt: skip
    for seed in range(3):  # a GPU a model, whatever is asked
        yield {"panel": "1/1/heavy8", "x": 1.0, "label": "dedicated", "seed": seed, "gpus": 8, "ttft": 1.0}
        yield {"panel": "3/1/heavy8", "x": 8.0, "label": "dedicated", "seed": seed, "gpus": 8, "ttft": 1.0}
    for label in ("ideal", "prism (A/A)"):
        for seed in range(3):
            for x in (1.0, 16.0):
                yield {"panel": "1/1/heavy8", "x": x, "label": label, "seed": seed, "ttft": 1.0}


def table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows of a figure's table, as `reproduce.scored` makes them."""
    plain = pa.schema([(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type) for f in reproduce.schema()])
    out = []
    for row in rows:
        base = {"run": "r", "system": row["label"], "trace": "hyperbolic-like", "models": "heavy8", "gpu": "h100",
                "gpus": 2, "scaling": "rotate", "rate_scale": 1.0, "slo": "5xP95", "tier": "synthetic", "n": 9,
                "fidelity": "simulated", "plan_origin": "trace", "over": "pooled"}  # fmt: skip
        base |= {key: value for key, value in row.items() if key != "ttft"}
        values = {"ttft": row["ttft"], "tpot": 1.0, "both": row["ttft"], "loads": 7.0, "evicts": 6.0, "migrations": 2.0}
        out += [base | {"definition": name, "value": value} for name, value in values.items()]
    return pa.Table.from_pylist(out, schema=plain).cast(reproduce.schema())


ROWS = table(list(cells()))


def said(rows: pa.Table, **about: Any) -> list[str]:
    return [" ".join(line.split()) for line in lines(Reproduced(Path("x"), rows, ABOUT | about))]


def test_crossings_stand_beside_the_papers() -> None:
    told = said(ROWS)
    assert "trace models system 99 % TTFT fails at 99 % TPOT | at TTFT % TPOT % loads evicts moved" in told
    line = "hyperbolic-like heavy8 prism 12.2 [12.2, 12.2] 24.0 >24.0 | 6 100.0 100.0 7 6 2"
    assert line in told  # 8 + 1/50 of 8 octaves, x 1.5; fails at 16
    assert "hyperbolic-like heavy8 1.5 static >5 5 ≤2 | 4 80.0 100.0 7 6 2" in told
    ratio = "prism / static, rate at 99 % TTFT hyperbolic-like heavy8 2.3x 4.00x [4.00, 4.00]"
    assert f"{ratio} differs our interval holds the paper's" in told
    assert sum("4x 4.00x" in line for line in told) == 1  # not of the other trace
    every = "hyperbolic-like heavy8 reached reached by 3 of 3 seeds agrees every seed reaches it"
    assert f"prism, SLO scale for 99 % TTFT {every}" in told
    none = "hyperbolic-like heavy8 never reached by 0 of 3 seeds agrees no seed reaches it"
    assert f"static, SLO scale for 99 % TTFT {none}" in told
    assert f"static, GPUs for 99 % TTFT {none}" in told
    assert "prism, GPUs for 99 % TTFT hyperbolic-like heavy8 4 4 agrees ours is the paper's" in told
    assert "prism, GPUs for 99 % TTFT hyperbolic-like heavy8 7 4 not comparable -" in told
    assert "not comparable: no rate is stated" in told
    counts = [f"{n} {one}: {claims.SAYS[one]}" for n, one in ((5, "agrees"), (1, "differs"), (1, "not comparable"))]
    assert "; ".join(counts) in told
    assert any(line.startswith("A/A: prism against its copy") for line in told)


def test_a_dip_and_a_cut_crossing_are_shown() -> None:
    """Prism's first seed dips at the lowest rate, its second holds up to the highest."""
    lower = {(1.0, 0): 0.96, (16.0, 1): 1.0}
    dips = [row | ({"ttft": lower[row["x"], row["seed"]]} if row["label"] == "prism" and row["panel"][0] == "1"
                   and (row["x"], row["seed"]) in lower else {}) for row in cells()]  # fmt: skip
    told = said(table(dips))
    row = next(line for line in told if line.startswith("hyperbolic-like heavy8 prism"))
    assert row.startswith("hyperbolic-like heavy8 prism >24.0 [0, inf] (1 of 3 seeds) 1.50 3.0 >24.0")  # .96 below .99
    claims = [line for line in told if line.startswith("prism / static")]
    assert len(claims) == 2
    cut = re.compile(r">7\.84x \[[\d.]+, inf\] \(1 of 3 seeds\)")
    assert all(cut.search(line) and " agrees our" not in line for line in claims)


def test_what_some_seeds_reach_is_open() -> None:
    lucky = [
        row | ({"ttft": 1.0} if row["panel"][0] == "2" and row["x"] == 5 and row["seed"] == 0 else {})
        for row in cells()
    ]
    found = claims.verdicts(Reproduced(Path("x"), table(lucky), ABOUT))
    never = next(one for one in found if one.claim.paper == "never" and one.claim.axis == "slo_scale")
    assert (never.here, never.says) == ("reached by 1 of 3 seeds", "open")


def test_a_system_that_takes_its_own_gpus_says_how_many() -> None:
    told = said(ROWS, systems=["prism", "static", "dedicated"], controls=["ideal", "prism (A/A)"], claims=[])
    assert any(line.startswith("hyperbolic-like heavy8 dedicated (8 GPUs) ") for line in told)
    assert any(line.startswith("hyperbolic-like heavy8 1.5 dedicated (8 GPUs) ≤8 ") for line in told)
    assert not any("prism (" in line for line in told if "A/A" not in line)


# ------------------------------------------------------------------ the figure


def stored(path: Path, rows: pa.Table) -> Path:
    record.write_table(path / record.SWEEP, rows, ABOUT)
    return path


def test_equal_tables_are_equal_bytes(tmp_path: Path) -> None:
    shuffled = ROWS.take(pa.array(np.random.default_rng(0).permutation(len(ROWS))))
    one = fig_paper.render(stored(tmp_path / "a", ROWS), tmp_path / "a" / "fig7", "bench plot x")
    mpl.rcParams["font.size"] = 30  # another's settings change nothing
    two = fig_paper.render(stored(tmp_path / "b", shuffled), tmp_path / "b" / "fig7", "bench plot x")
    mpl.rcdefaults()
    assert [path.name for path in one] == ["fig7.pdf", "fig7.png", "fig7.csv"]
    for a, b in zip(one, two, strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name
    csv = one[2].read_text().splitlines()
    assert csv[0] == "# bench plot x"
    assert {"loads", "evicts", "migrations", "ttft_mean", "ttft_low", "infeasible"} <= set(csv[1].split(","))
    assert fig_paper.draws(tmp_path / "a")


def drawing() -> Drawing:
    with style.theme():
        return fig_paper.draw(ROWS, ABOUT, "2 runs are stale.")


def test_the_figure_says_what_it_shows() -> None:
    said = " ".join(" ".join(text.get_text() for text in drawing().texts).split())
    facts = """After A paper, figure 7 | hyperbolic-like (synthetic) | heavy8 | 2 to 5 x h100 | simulated | SLO 5 x P95
        | 3 seeds | plans know the trace | at 6 (heavy8, hyperbolic-like) | windows cut to 600 of 7200 s | Hollow
        | 2 runs are stale | requests per second (8 models, 2 GPUs, SLO scale 5) | models: heavy8"""
    for fact in map(str.strip, facts.split("|")):
        assert fact in said, fact


def test_the_figure_says_which_caps_of_the_engine_bound() -> None:
    static = [row for row in ROWS.to_pylist() if row["label"] == "static" and row["definition"] == "loads"]
    bound = pa.Table.from_pylist(
        [row | {"definition": "cap_bound", "value": 0.02 * row["x"]} for row in static], schema=ROWS.schema
    )
    with style.theme():
        said = " ".join(text.get_text() for text in fig_paper.draw(pa.concat_tables([ROWS, bound]), ABOUT).texts)
    most = max(row["x"] for row in static)
    says = f"batch_cap bound more than 1 % of steps: static up to {2 * most:g} %."
    assert says in " ".join(said.split())


def test_crossings_are_dashed_and_infeasible_is_hollow() -> None:
    figure = drawing()
    upright = [
        [float(x) for x in np.asarray(line.get_xdata(), np.float64)]
        for axis in figure.axes
        for line in axis.lines
        if list(np.asarray(line.get_ydata(), np.float64)) == [0, 1] and line.is_dashed()
    ]
    assert sorted({round(xs[0], 2) for xs in upright}) == [1.95, 3.06, 4.0, 12.24]
    faces = {line.get_markerfacecolor() for line in figure.axes[4].lines}
    assert "white" in faces
    assert len(figure.axes) == 6  # 3 rows x (1 trace x 2 definitions)


def test_lines_of_panels_are_called_by_their_set_and_measure() -> None:
    assert [axis.get_ylabel() for axis in drawing().axes[::2]] == [
        f"models: heavy8\n({letter}) SLO met (%)" for letter in "abc"
    ]


def test_a_system_with_its_own_gpus_is_never_drawn_above_another_count() -> None:
    figure = drawing()
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["prism", "static", "dedicated (8 GPUs)", "ideal", "prism (A/A)", "crosses 99 %"]
    axis = figure.axes[4]
    shown = dict(zip(axis.get_xticks(), (x.get_text() for x in axis.get_xticklabels()), strict=True))
    own = [line for line in axis.lines if line.get_marker() == style.SYSTEMS["dedicated"].marker]
    (place,) = {float(x) for line in own for x in np.asarray(line.get_xdata(), np.float64)}
    assert all(line.get_transform() == axis.transData for line in own)  # at its place, not beside it
    assert place > 5  # beyond those asked for
    assert shown[place] == "8"
    assert [text.get_text() for text in axis.texts] == ["//"]
    assert not figure.axes[0].texts


def test_nothing_to_draw_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no figure here"):
        fig_paper.render(tmp_path, tmp_path / "f", "x")
    assert not fig_paper.draws(tmp_path)


# ------------------------------------------------------------------ all of it, on the sample


class Heard:
    """A teller that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ran = 0

    def say(self, line: str) -> None:
        self.said.append(line)

    def progress(self, what: str, done: int, total: int) -> None:
        self.ran += done < total


def test_a_system_that_fails_leaves_the_figure(mine: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text((SYSTEM % "").replace("for name in", "raise ValueError('planted')\n            for name in"))
    asked = replace(figure.figure(str(mine)), rows=figure.figure(str(mine)).rows[::2])
    for systems in ((str(path), "chunked"), ("chunked", str(path))):  # whoever stands first
        heard = Heard()
        found = reproduce.reproduce(asked.only(systems=systems, seeds=1), tmp_path / "out", workers=1, teller=heard)
        assert found.failed["bad"].startswith("ValueError at bad.py:30 (planted), t = -10 s, Woke(key='start')")
        assert found.about["systems"] == ["chunked"]
        assert set(found.table["label"].to_pylist()) == {"chunked", *compare.CONTROLS, "chunked (A/A)"}
        assert len(heard.said) == len(set(heard.said))
        assert not list((tmp_path / "out").glob("bad-*"))
    alone = reproduce.reproduce(asked.only(systems=("chunked",), seeds=1), tmp_path / "out", workers=1)
    assert (alone.folder, alone.table, alone.failed) == (found.folder, found.table, {})
    with pytest.raises(Failed, match=r"^bad: ValueError"):
        reproduce.reproduce(asked.only(systems=(str(path),), seeds=1), tmp_path / "out", workers=1)


def test_a_figure_goes_on_with_a_system_that_is_in_every_row() -> None:
    aegaeon = figure.figure("aegaeon")
    left = aegaeon.without({"aegaeon"})
    assert left is not None
    assert left.systems[0] == "serverlessllm"  # prefill first and decode first are in one row only
    assert set(left.systems) == set(aegaeon.systems) - {"aegaeon"}
    assert all("aegaeon" not in row.systems for row in left.rows)
    common = {"aegaeon", "serverlessllm", "serverlessllm:plus", "muxserve:plusplus"}
    assert aegaeon.without(common) is None


def test_explain_judges_a_figures_run_as_its_panels_do(mine: Path, tmp_path: Path) -> None:
    asked = figure.figure(str(mine)).only(systems=("static",), seeds=1)
    found = reproduce.reproduce(replace(asked, rows=asked.rows[:2]), tmp_path / "out", workers=1)
    rows = [r for r in found.table.to_pylist() if r["label"] == "static" and r["panel"][0] == "2"]
    (run,) = {r["run"] for r in rows}  # one for every SLO scale
    judges = {one.under.rule: one for one in slo.rulings(tmp_path / "out" / run)}
    assert set(judges) == {"1xP95", "2xP95"}
    spec, table = from_dict(record.meta(tmp_path / "out" / run)["spec"]), record.read(tmp_path / "out" / run)
    for row in (r for r in rows if r["definition"] in {"ttft", "tpot"} and r["over"] == "pooled"):
        limits = slo.limits(tmp_path / "out" / run, judges[row["slo"]].under)
        line = next(explain.misses(table, spec.window_s or math.inf, limits, row["definition"], ""))
        missed, offered = map(int, line.split()[:3:2])
        assert 1 - missed / offered == pytest.approx(row["value"])


def test_a_second_call_does_nothing(mine: Path, tmp_path: Path) -> None:
    asked = replace(figure.figure(str(mine)), rows=figure.figure(str(mine)).rows[::2]).only(seeds=1)
    first, second = Heard(), Heard()
    one = reproduce.reproduce(asked, tmp_path / "out", workers=1, teller=first)
    kept = files(tmp_path / "out")
    two = reproduce.reproduce(asked, tmp_path / "out", workers=1, teller=second)
    assert first.ran
    assert not second.ran
    total = len(one.about["runs"])
    assert second.said[-1] == f"{total} of {total} points current, nothing to do"
    assert files(tmp_path / "out") == kept
    assert two.table.equals(one.table)
    assert list(lines(one)) == list(lines(two))
    panels = {panel["panel"]: panel for panel in one.about["panels"]}
    assert list(panels) == ["1/1/llama-3.1-8b*3", "2/1/llama-3.1-8b*5"]
    assert "Windows cut to 50 of 60 s." in one.about["notes"]
    assert set(tidy.CAPS) <= set(one.table["definition"].to_pylist())  # for the caption
    scores = tidy.curves(claims.of_panel(one.table, "1/1/llama-3.1-8b*3"), "static", "ttft", "x")[0]
    assert len(scores) >= 6
    assert scores[min(scores)] == 1.0
    assert scores[max(scores)] < 0.9
    rows = claims.of_panel(one.table, "2/1/llama-3.1-8b*5").to_pylist()
    hollow = {(x["x"], x["infeasible"] is not None) for x in rows if x["label"] == "static"}
    assert hollow == {(1.0, True), (2.0, False)}  # 75 GiB of weights


@pytest.mark.slow
def test_rows_share_runs_and_slo_blind_systems_are_scored_again(mine: Path, tmp_path: Path) -> None:
    found = reproduce.reproduce(figure.figure(str(mine)), tmp_path / "out")
    by_panel: dict[str, set[str]] = {}
    for row in found.table.select(["panel", "run", "label"]).to_pylist():
        if row["label"] in {"chunked", "static"}:
            by_panel.setdefault(row["panel"][0], set()).add(row["run"])
    assert by_panel["2"] <= by_panel["1"]  # another SLO is no other run, and its rate is one of row 1
    assert not by_panel["3"] & by_panel["1"]
    assert {line.split()[0] for line in lines(found) if line.startswith("sample")} == {"sample"}
    full = reproduce.reproduce(figure.figure(str(mine)), tmp_path / "out", full=True)
    assert full.folder != found.folder
    assert math.isclose(full.about["seeds"], 3)


SIZES = """
paper = "A test"
systems = ["chunked", "dedicated", "static"]
traces = ["aegaeon-like+span_s=30", "aegaeon-like+span_s=30+lengths=sharegpt-ox2"]
titles = ["one", "two"]
definitions = ["qos", "token"]
requests = 10
warmup_s = 5.0
level = 0.9
slo = "absolute:ttft=10,tpot=0.1"
quick = { seeds = 1, rates = 6, window_s = 20.0, replayed_s = 20.0 }
full = { seeds = 1, rates = 12, window_s = 20.0, replayed_s = 20.0 }

[[row]]
axis = "models"
models = ["aegaeon+models=3", "aegaeon+models=10"]
full = ["aegaeon+models=5"]
gpus = 2
slo_scale = 1.0
rate_scale = 4.0

[[row]]
axis = "rate_scale"
systems = ["chunked", "static"]
models = "aegaeon+models=3"
gpus = 2
slo_scale = 1.0
rate_scale = [2.0, 4.0]
process = "model"
sharing = "turns"

[[claim]]
axis = "models"
row = 1
column = 2
definition = "qos"
system = "static"
paper = [4, 9]
why = "the models do not fit"
"""


def test_a_figure_over_the_number_of_models(tmp_path: Path) -> None:
    path = tmp_path / "sizes.toml"
    path.write_text(SIZES)
    found = reproduce.reproduce(figure.figure(str(path)), tmp_path / "out", workers=1)
    panels = {panel["panel"]: panel for panel in found.about["panels"]}
    assert list(panels) == ["1/1/aegaeon", "1/2/aegaeon", "2/1/aegaeon+models=3", "2/2/aegaeon+models=3"]
    first = panels["1/1/aegaeon"]
    assert (first["axis"], first["count"], first["gpus"]) == ("models", None, 2)
    assert first["rate_rps"] == pytest.approx(0.4)  # of each model: as the generator means it
    rows = found.table.to_pandas()
    xs = rows.groupby(["panel", "label"], observed=True)["x"].unique().map(sorted).to_dict()
    assert xs["1/1/aegaeon", "chunked"] == [3.0, 10.0]
    assert xs["2/1/aegaeon+models=3", "static"] == [2.0, 4.0]
    assert ("2/1/aegaeon+models=3", "dedicated") not in xs  # the row is without it
    assert xs["1/1/aegaeon", "ideal"] == xs["1/1/aegaeon", "chunked"]  # controls stand at the ends
    here = claims.where(claims.of_panel(found.table, "1/2/aegaeon"), panels["1/2/aegaeon"], "static", "qos", 0.9)
    assert here == Crossing(Estimate(3.0, None, None, 1), 10.0, 0.0)  # ten do not fit: three hold, not between
    (one,) = claims.verdicts(found)
    assert (one.panel["panel"], one.says) == ("1/2/aegaeon", "differs")
    said = list(lines(found))
    assert "where it differs: the models do not fit" in said
    assert any(line.startswith("models at which each system holds 90 %") for line in said)
    assert any("static, models for 90 % QOS" in line and "4-9" in line for line in said)
    processes = {
        row["panel"][0]: record.meta(tmp_path / "out" / row["run"])["spec"]["process"]
        for row in found.table.select(["panel", "run"]).to_pylist()
    }
    assert processes == {"1": "own", "2": "model"}
    assert any("(SLO 1x, 2 GPUs, process: model, sharing: turns)" in line for line in said)
    paths = fig_paper.render(found.folder, tmp_path / "sizes", "x")
    assert [one.suffix for one in paths] == [".pdf", ".png", ".csv"]
    kept = [
        record.read(run)["token_ns"] for run in record.runs(tmp_path / "out") if record.meta(run)["infeasible"] is None
    ]
    assert all(len(tokens) and not tokens.null_count for tokens in kept)


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
    path = tmp_path / "moves.py"
    path.write_text(MOVES)
    spec = resolve(Spec(str(path), trace="sample", models="llama-3.2-1b", gpus=2, slo="", control_s=0.0, drain_s=64.0))
    stats = record.meta(execute(spec, tmp_path, ""))["stats"]
    assert (stats["loads"], stats["evicts"], stats["migrations"]) == (3, 3, 2)
