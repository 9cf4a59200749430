"""Rates of a figure by bisection; rows with a setting of their own, panels for several GPUs, rows for --full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.policy.types import UserError
from harness.rows import record, statistics, tidy
from harness.study import figure, reproduce
from harness.study.figure_text import lines
from harness.study.rates import between
from plots import fig_paper, style
from tests.test_reproduce import ABOUT, cells, said, table

# ------------------------------------------------------------------ which rate is next


def bisect(attained: Callable[[float], float], count: int, least: float = 1 / 64) -> list[float]:
    """Rates in the order in which they are sampled, the fixed ones first."""
    order = [1.0, 4.0, 16.0]
    while len(order) < count:
        found = between({rate: attained(rate) for rate in order}, 0.99, least)
        if found is None:
            break
        order.append(found)
    return order


def test_bisection_by_hand() -> None:
    assert bisect(lambda rate: 1.0 if rate <= 5 else 0.5, 6) == [1, 4, 16, 8, 5.65685, 4.75683]
    assert bisect(lambda rate: 1.0, 5) == [1, 4, 16, 32, 64]  # holds all
    assert bisect(lambda rate: 0.5, 5) == [1, 4, 16, 0.5, 0.25]  # holds none
    assert bisect(lambda rate: 0.5, 9, least=0.4) == [1, 4, 16, 0.5, 0.4]  # below are too few requests


@given(st.floats(0.05, 500.0), st.integers(4, 16))
def test_bisection_closes_in_on_a_step(knee: float, count: int) -> None:
    order = bisect(lambda rate: 1.0 if rate <= knee else 0.9, count)
    assert len(order) == count
    assert len(set(order)) == count  # no rate is sampled twice
    holds = max((rate for rate in order if rate <= knee), default=None)
    fails = min((rate for rate in order if rate > knee), default=None)
    if holds is not None and fails is not None:  # each sample since the first bracket halved it, on a logarithm
        bracketed = next(
            k
            for k in range(3, count + 1)
            if min(order[:k]) <= knee < max(order[:k])
        )  # fmt: skip
        assert fails / holds <= 4.0 ** (0.5 ** (count - bracketed)) * (1 + 1e-4)


@given(
    st.dictionaries(st.sampled_from([1.0, 4.0, 16.0]), st.floats(0, 1), min_size=3), st.randoms(), st.integers(3, 12)
)
def test_bisection_of_a_noisy_curve_ends_and_repeats_nothing(
    first: dict[float, float], random: Random, count: int
) -> None:
    noise = {**first}

    def attained(rate: float) -> float:
        return noise.setdefault(rate, random.random())

    order = bisect(attained, count)
    assert len(order) == len(set(order)) <= count
    assert len(order) == count or statistics.held(noise, 0.99) is None  # it stops early only at the least rate
    assert min(order) >= 1 / 64


# ------------------------------------------------------------------ the worst model


def test_the_worst_model_stands_beside_the_crossing() -> None:
    """Prism holds 99 % up to x = 8 on rates, from 2 on SLO scales and 4 on GPUs; worst models attain less."""
    rows = table(list(cells()))
    worst = [
        row | {"over": "worst", "value": row["value"] - 0.1 * (1 + row["seed"]) - 0.01 * row["x"]}
        for row in rows.to_pylist()
        if row["definition"] in {"ttft", "tpot"}
    ]
    both = pa.concat_tables([rows, pa.Table.from_pylist(worst, schema=rows.schema)])
    panels = {p["axis"]: p for p in ABOUT["panels"]}
    for axis, x in (("rate_scale", 8.0), ("slo_scale", 2.0), ("gpus", 4.0)):
        own = both.filter(pa.compute.equal(both["panel"].cast(pa.string()), panels[axis]["panel"]))
        found = tidy.worst(own, axis, "prism", "ttft", 0.99)
        assert found == pytest.approx(1.0 - (0.1 + 0.2 + 0.3) / 3 - 0.01 * x), axis
        pooled = tidy.curves(own, "prism", "ttft", "x")
        assert pooled == tidy.curves(own.filter(pa.compute.equal(own["over"].cast(pa.string()), "pooled")),
                                     "prism", "ttft", "x")  # fmt: skip
    assert tidy.worst(own, "gpus", "static", "ttft", 0.99) is None  # it holds nowhere
    told = said(both)
    assert any("99 % TTFT fails at worst % 99 % TPOT worst %" in line for line in told)
    assert any(line.startswith("hyperbolic-like heavy8 prism 12.2 [12.2, 12.2] 24.0 72.0 >24.0") for line in told)


def test_a_system_that_does_not_fit_is_shown_as_such() -> None:
    rows = table(
        [row | ({"infeasible": "no room", "ttft": 0.0} if row["label"] == "static" else {}) for row in cells()]
    )
    told = said(rows)
    assert "hyperbolic-like heavy8 static does not fit - does not fit | - - - - - -" in told
    assert "static does not fit (hyperbolic-like, heavy8): no room" in told
    ratio = [line for line in told if line.startswith("prism / static")]
    assert ratio
    assert all(" does not fit " in line for line in ratio)  # nobody is compared with it
    some = table([
        row | ({"infeasible": "no room", "ttft": 0.0} if (row["label"], row["seed"]) == ("static", 1) else {})
        for row in cells()
    ])  # fmt: skip
    assert "static does not fit (hyperbolic-like, heavy8 with 1 of 3 seeds): no room" in said(some)


# ------------------------------------------------------------------ rows

ROWS = """
paper = "A test"
systems = ["chunked", "static:equal"]
traces = ["sample"]
definitions = ["ttft", "tpot"]
slo = "absolute:ttft=2,tpot=0.1"
requests = 40
warmup_s = 10.0
quick = { seeds = 2, rates = 5, window_s = 40.0 }
full = { seeds = 3, rates = 8, window_s = 40.0 }

[[row]]
axis = "rate_scale"
models = "llama-3.1-8b*3"
gpus = [1, 2]
slo_scale = 1.0
rate_rps = [1.0, 8.0]
pool_gib = 60.5
assign = "shuffled"

[[row]]
axis = "rate_scale"
models = "llama-3.1-8b*5"
gpus = 1
slo_scale = 1.0
rate_rps = [1.0, 8.0]

[[row]]
axis = "slo_scale"
models = "llama-3.1-8b*3"
gpus = 1
slo_scale = [0.5, 1.0]
rate_rps = 2.0
plan = "trace"
full = true

[[claim]]
axis = "rate_scale"
row = 2
definition = "ttft"
system = "chunked"
over = "static:equal"
paper = 2.3

[[claim]]
axis = "slo_scale"
row = 3
definition = "ttft"
system = "chunked"
paper = "reached"
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "rows.toml"
    path.write_text(ROWS)
    return path


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [
        (
            "rate_rps = 2.0",
            "rate_rps = [2.0, 3.0]",
            "row 3: rate_rps is [2.0, 3.0]: one number, but along its own axis",
        ),
        ("rate_rps = 2.0", "rate_rps = 0.0", "row 3: rate_rps is [0.0]: above 0"),
        ("rate_rps = 2.0", "rate_rps = 2.0\nrate_scale = 1.0", "row 3: rate_rps is [2.0]: above 0, without rate_scale"),
        ("pool_gib = 60.5", 'pool_gib = "60"', "row 1: pool_gib is '60', not numbers"),
        ("pool_gib = 60.5", "pool_gib = 60.5\nfull = [2.0]", "row 1: full is [2.0]: with rate_rps"),
        ('assign = "shuffled"', 'assign = "shufled"', 'row 1: assign is "shufled"; did you mean shuffled?'),
        ('plan = "trace"', 'plan = "traces"', 'row 3: plan is "traces"; did you mean trace?'),
        ("full = true", 'full = true\ntraces = ["a", "b"]', "row 3: traces are 2, the figure has 1"),
    ],
)
def test_a_mistake_in_a_row_is_one_line(mine: Path, line: str, instead: str, says: str) -> None:
    assert line in ROWS
    mine.write_text(ROWS.replace(line, instead))
    with pytest.raises(UserError) as error:
        figure.figure(str(mine))
    assert says in str(error.value)


def test_rows_for_full_and_their_claims_wait(mine: Path) -> None:
    found = figure.figure(str(mine))
    assert [row.extra for row in found.rows] == [False, False, True]
    quick = found.of(full=False)
    assert (len(quick.rows), [claim.row for claim in quick.claims]) == (2, [2])
    assert found.of(full=True) == found
    assert found.rows[0].spec == {"assign": "shuffled", "pool_bytes": round(60.5 * 2**30)}


def test_rates_by_bisection_of_every_seed(mine: Path, tmp_path: Path) -> None:
    found = reproduce.reproduce(figure.figure(str(mine)), tmp_path / "out", workers=1)
    assert [p["panel"] for p in found.about["panels"]] == [
        "1/1/llama-3.1-8b*3/1", "1/1/llama-3.1-8b*3/2", "2/1/llama-3.1-8b*5",
    ]  # fmt: skip
    rows = found.table.to_pandas()
    rows = rows[(rows["definition"] == "ttft") & (rows["over"] == "pooled")]
    unit_rps = {p["panel"]: p["unit_rps"] for p in found.about["panels"]}
    for (panel, label), own in rows.groupby(["panel", "label"], observed=True):
        if label in found.about["controls"]:
            continue
        by_x = own.groupby("x")
        assert set(by_x["seed"].nunique()) == {2}  # every rate is run with every seed
        fits = own["infeasible"].isna()
        assert fits.all() == fits.any() == (panel[0] == "1")  # five models do not fit on a GPU
        assert len(by_x) == (5 if fits.all() else 2)  # and are asked at the fixed rates alone
        assert {1.0, 8.0} <= {round(x * unit_rps[str(panel)], 4) for x in by_x.groups}
        if fits.all():
            assert by_x["n"].sum().min() >= 40  # requests of a point
            mean = by_x["value"].mean().to_dict()
            holds = statistics.held(mean, 0.99)
            fails = min((x for x in mean if holds is None or x > holds), default=None)
            assert holds is not None
            assert fails is None or fails / holds < 8  # nearer than the fixed rates
    specs = {row["run"]: record.meta(tmp_path / "out" / row["run"])["spec"] for row in found.table.to_pylist()}
    first = {row["run"] for row in found.table.to_pylist() if row["panel"][0] == "1"}
    assert {specs[run]["pool_bytes"] for run in first} == {round(60.5 * 2**30)}
    assert {specs[run]["assign"] for run in first} == {"shuffled"}
    assert not any("assign" in spec or "pool_bytes" in spec for run, spec in specs.items() if run not in first)
    again = reproduce.reproduce(figure.figure(str(mine)), tmp_path / "out", workers=1)
    assert again.table.equals(found.table)

    told = list(lines(found))
    assert any("1 and 2 GPUs, assign: shuffled, pool_gib: 60.5)" in line for line in told)
    assert sum(line.startswith("static:equal does not fit (sample, llama-3.1-8b*5): ") for line in told) == 1
    assert any(line.startswith("chunked / static:equal") and "does not fit" in line for line in told)
    with style.theme():
        drawn = fig_paper.draw(found.table, found.about)
    caption = " ".join(" ".join(text.get_text() for text in drawn.texts).split())
    least = int(rows[rows["infeasible"].isna()].groupby(["panel", "label", "x"], observed=True)["n"].sum().min())
    for fact in (
        "preliminary (--full: 3 seeds, 8 rates)",
        "synthetic traces are planned from another seed's draw",
        f"At least {least:,} requests a point, over its seeds.",
        "Rates: 1, 8 req/s, then by bisection of each system's crossing.",
        "static:oracle is static:rate whose plan knows the window",
        "streams as released, processes inside 0.90",
        "models do not fit",
    ):
        assert fact in caption, fact
    assert len(drawn.axes) == 3 * 2  # a line for each number of GPUs of the first row, and one for the second


def test_what_planners_saw_is_told_of_both_halves() -> None:
    panel = {"trace": "hyperbolic", "models": "heavy8", "axis": "rate_scale", "plan": "held-out"}
    said = " ".join(fig_paper.seen([panel | {"seen": [[539, 132, 3], [619, 118, 0]]}]))
    assert "heavy8 on hyperbolic: 539 132 3 or 619 118 0." in said
    assert said.endswith("Where planners saw 0 requests, a prior of one decides.")
    assert "prior" not in " ".join(fig_paper.seen([panel | {"seen": [[5, 1]]}]))
    assert not list(fig_paper.seen([panel | {"plan": "trace", "seen": [[5, 1]]}]))
