"""A study in words: crossings beside the paper's, ratios of conditions, parts that are switched off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from harness.answers.ratios import borne_out
from harness.answers.text import RATES, Shown, lines
from harness.answers.without import offered_rps
from harness.rows.about import About
from harness.rows.estimate import Estimate
from harness.rows.ranking import CASE, NO_ROOM, Standing
from harness.study.study import START, Claim
from tests.cases import cases
from tests.harness.study.study_table import CLAIMS, PANELS, about, met, panel, table
from tests.harness.study.study_table import cells as scores

TABLE = table(list(scores()))
COUNTS = panel("counts", 0, "gpus", gpus=None, rate_rps=1.5, xs=(2.0, 5.0), slo="5xP95", slo_scale=None)
NO_SPACE: dict[str, Any] = {"infeasible": "no room", "ttft": 0.0}
XS = (1.0, 2.0, 4.0, 8.0, 16.0)


def altered(changes: Mapping[tuple[str, str, float, int], dict[str, Any]]) -> pa.Table:
    """Return the table with other cells in some rows, which are named by condition, system, x and seed."""
    places = ((row, (row["condition"], row["label"], row["x"], row["seed"])) for row in scores())
    return table([row | changes.get(at, {}) for row, at in places])


def printed(
    rows: pa.Table = TABLE, facts: About | None = None, *, markdown: bool = False, every: bool = False
) -> list[str]:
    shown = Shown(rows, facts or about(), Path("x"), markdown, every)
    return [" ".join(line.split()) for line in lines(shown)]


# ------------------------------------------------------------------ crossings

TOLD = """
on most of 2 panels prism, pooled over models, is ahead of static
rates: rate (req/s) at which each system holds 99 % (SLO 5x, 2 GPUs)
system 99 % TTFT slope prism over it
prism 15.0 [13.2, 16.7] 4.00 -
static 3.75 [3.29, 4.18] 4.00 + 4.00x [3.38, 4.74]
prism 2.00x [1.82, 2.36] -
static >5.00x + <0.40x [0, 0.47]
static >5 5 misses SLOs >5 ≤3
verdicts on prism: + ahead; 2 of 2 verdicts are decided, corrected together (Holm)
hyperbolic-like: windows cut to 600 of 7200 s.
the paper's claims, a panel each: 2 size; 4 direction; 1 not comparable
"""
EVERY = """
static 3.75 [3.29, 4.18] 4.00 [4.00, 4.00] >24.0 + 4.00x [3.38, 4.74]
static >5.00x ≤1.00x + <0.40x [0, 0.47]
prism / static, rate at 99 % TTFT rates 4x 4.00x [3.38, 4.74] size within a factor 1.25, its interval within 1.5
prism, SLO scale for 99 % TTFT SLOs reached reached by 12 of 12 seeds direction every seed reaches it
static, SLO scale for 99 % TTFT SLOs never reached by 0 of 12 seeds direction no seed reaches it
prism, GPUs for 99 % TTFT counts 7 4 [4, 4] not comparable -
not comparable: no rate is stated
"""


@cases(("every", "lines_"), [(False, TOLD), (True, EVERY)])
def test_crossings_stand_beside_each_other_and_the_papers(every: bool, lines_: str) -> None:
    told = printed(every=every)
    for line in lines_.strip().splitlines():
        assert line in told, line
    assert sum(" 4x 4.00x" in line for line in told) == 1  # not of the other trace


def test_the_copy_on_other_seeds_tells_how_much_is_chance() -> None:
    told = " ".join(printed())
    assert (  # the copy was given 1 where prism misses 1e-6 at 1, and 6.55 % at 16
        "A/A: prism against its copy on other seeds: 2 of 4 differences cover 0; the largest is -6.6 [-6.6, -6.6] "
        "points, TTFT of rates at 24 req/s, where single windows attain 93 to 100 %"
    ) in told
    shares = {"prism": 0.9, "prism (A/A)": 0.5, "static": 0.9}
    case = [
        {"condition": "case", "x": x, "label": label, "seed": 0, "ttft": share}
        for label, share in shares.items()
        for x in (1.0, 16.0)
    ]
    both = pa.concat_tables([TABLE, table(case, windows=1)])  # one window, of which no chance is known
    facts = about([*PANELS, panel("case", 3, "rate_scale")])
    assert "2 of 4 differences cover 0; the largest is -6.6 " in " ".join(printed(both, facts))
    rows = TABLE.filter(pc.invert(pc.equal(TABLE["label"].cast(pa.string()), "prism (A/A)")))
    assert not any(line.startswith("A/A") for line in printed(rows))


def test_windows_are_pooled_whatever_each_would_say_alone() -> None:
    """Prism's first window dips at the lowest rate, its second holds up to the highest: no window has a crossing."""
    changed = {("rates", "prism", 1.0, 0): {"ttft": 0.96}, ("rates", "prism", 16.0, 1): {"ttft": 1.0}}
    told = printed(altered(changed), every=True)
    row = next(line for line in told if line.startswith("prism 1"))
    assert row.startswith("prism 15.6 [")  # two thirds of the misses at 24 req/s: ln(2.44) / ln(10.7) of the octave
    stated = [line for line in told if line.startswith("prism / static")]
    assert len(stated) == 2
    assert all(" 4.16x [" in line for line in stated)


def test_where_rates_tell_nothing_points_do() -> None:
    """Both hold 99 % at every rate; prism misses 0.1 % and static 0.9 %, far from chance at the two higher rates."""
    rows = [
        {"condition": "rates", "x": x, "label": label, "seed": seed, "ttft": 1.0 - share * x / 16, "n": 90_000}
        for label, share in (("prism", 0.001), ("static", 0.009))
        for seed in range(3)
        for x in (4.0, 8.0, 16.0)
    ]
    told = printed(table(rows), about(PANELS[:1], []))
    assert told[0] == "prism, pooled over models, is ahead of static"
    assert told[2:5] == ["system 99 % TTFT prism over it", "prism >24.0 -", "static >24.0 + +0.2 +0.4 +0.8 points"]
    assert told[5:9] == [
        RATES,
        "verdicts on prism: + ahead; one verdict",
        "common random numbers save 0 % of a difference's variance (median)",
        "points: difference of attainment at 6, 12 and 24 req/s, where a ratio of rates does not decide",
    ]
    told = printed(table([row | {"ttft": 0.999} for row in rows]), about(PANELS[:1], []))
    assert told[4].endswith(" = 0.0 0.0 0.0 points")
    assert "verdicts on prism: = equal within 25 %; one verdict" in told
    assert "= with points: equal within 0.5 points" in told


def test_a_claim_about_a_system_that_took_no_part_is_named() -> None:
    told = printed(facts=about(claims=[*CLAIMS, Claim("ratio", "prism", "qlm", paper=2.0)], paper=""))
    assert "claims about systems that took no part are not judged: qlm" in told
    assert any(line.startswith("claims, a panel each: ") for line in told)


def test_a_system_that_takes_its_own_gpus_says_how_many() -> None:
    facts = about(claims=[], systems=["prism", "static", "dedicated"], controls=["unshared", "prism (A/A)"])
    told = printed(facts=facts)
    assert any(line.startswith("dedicated (8 GPUs) >1.50 ") for line in told)
    assert any(line.startswith("dedicated (8 GPUs) ≤8 ") for line in told)
    assert not any("prism (" in line for line in told if "A/A" not in line)


def test_the_mean_over_models_and_the_worst_one_cross_beside_it() -> None:
    """Of two models, each half of the requests, one crosses 99 % at 10 and one at 5: the mean is between."""
    rows = [
        row | {"over": "model", "model": model, "ttft": met(row["x"], knee)}
        for row in scores()
        if row["condition"] == "rates" and row["label"] == "prism"
        for model, knee in (("small", 10.0), ("large", 5.0))
    ]
    both = pa.concat_tables([TABLE, table(rows)])
    told = printed(both)
    assert "system 99 % TTFT slope mean worst prism over it" in told
    mean = 1.5 * (2 / (1 / 10**4 + 1 / 5**4)) ** 0.25  # where the mean share of misses is 1 %
    assert mean == pytest.approx(8.78, abs=0.01)
    assert any(line.startswith("prism 15.0 [13.2, 16.7] 4.00 8.78 7.50") for line in told)


def test_a_system_that_does_not_fit_is_shown_as_such() -> None:
    def without(*seeds: int) -> list[str]:
        return printed(altered({("rates", "static", x, seed): NO_SPACE for x in XS for seed in seeds}))

    told = without(0, 1, 2)
    assert "static does not fit -" in told
    assert "static does not fit (hyperbolic-like): no room" in told
    assert "verdicts on prism: + ahead; one verdict" in told  # only the SLO scales count
    # nobody is compared with it: both claims of its rates
    assert "the paper's claims, a panel each: 1 size; 3 direction; 1 not comparable; 2 does not fit" in told
    some = without(1)
    assert "static does not fit (hyperbolic-like with 4 of 12 seeds): no room" in some
    assert any(line.startswith("static 3.75 [3.18, 4.28] 4.00 + 4.00x [") for line in some)  # the other two count


@cases(
    ("gone", "says"),
    [({}, "misses SLOs"), ({3.0: (0, 1, 2)}, "does not fit"), ({3.0: (1,)}, "does not fit (4 of 12 seeds)")],
)
def test_what_ends_the_fewest_gpus_is_room_or_load(gone: dict[float, tuple[int, ...]], says: str) -> None:
    """Prism holds from 4 GPUs on; on 3 it misses, or some seeds have no room."""
    told = printed(altered({("counts", "prism", x, seed): NO_SPACE for x, seeds in gone.items() for seed in seeds}))
    counts = told[next(k for k, line in enumerate(told) if line.startswith("counts: ")) :]
    (line,) = (line for line in counts if line.startswith("prism 4 "))
    assert f" {says} " in line


# ------------------------------------------------------------------ a fleet


def test_a_fleet_tells_the_count_of_each_seed() -> None:
    rows = altered({("counts", "prism", 3.0, 0): {"ttft": 1.0}, ("counts", "static", 5.0, 1): {"ttft": 1.0}})
    facts = about([COUNTS], [], layout="fleet", definitions=["ttft"], controls=["dedicated"])
    told = printed(rows, facts, every=True)
    assert told[:5] == [
        "counts: GPUs at which each system reaches 99 % (hyperbolic-like (synthetic) at 1.5 req/s)",
        "system 99 % TTFT fails at below that each seed",
        "prism 4 3 misses SLOs 3 to 4",  # of all windows together; the first seed alone takes 3
        "static >5 5 misses SLOs 5 to >5",
        "dedicated (8 GPUs) 8 - - -",  # a bound, on what it takes
    ]
    assert told[5:9] == [
        "system at TTFT % loads evicts moved",
        "prism 4 100.0 7 6 2",
        "static 5 86.7 7 6 2",
        "dedicated (8 GPUs) 8 100.0 7 6 2",
    ]


# ------------------------------------------------------------------ ratios


def walk(kind: str, name: str, row: int) -> dict[str, Any]:
    sources = {} if kind == "base" else {"origin": "unknown", "source": "a section"}
    return panel(f"{name} ({kind})", row, "rate_rps", name=name, kind=kind, xs=(1.0, 16.0), unit_rps=1.0, **sources)


def rates(panels: Sequence[Mapping[str, Any]], held: dict[str, float]) -> pa.Table:
    """Return a table: prism crosses 99 % at 8 x, static at the rate named for the panel or for its condition.

    A half of a real trace has one window.
    """
    return table(
        [
            {"condition": entry["condition"], "x": x, "label": name, "seed": seed, "ttft": met(x, most)}
            | {"windows": 1 if entry["half"] else 4}
            for entry in panels
            for name, most in (("prism", 8.0), ("static", held.get(entry["condition"]) or held[entry["name"]]))
            for seed in range(1 if entry["half"] else 3)
            for x in XS
        ]
    )


def test_the_ratios_of_a_walk_from_the_fair_default() -> None:
    steps = [(kind, name) for kind in ("cumulative", "alone") for name in ("pools", "turns")]
    panels = [walk("base", START, 0), *(walk(kind, name, k) for k, (kind, name) in enumerate(steps, 1))]
    facts = about(panels, [Claim("ratio", "prism", "static", paper=3.5)], layout="steps", definitions=["ttft"])
    rows = rates(panels, {START: 8.0, "pools": 4.0, "turns": 1.0})
    told = printed(rows, facts)
    assert told[:8] == [
        "prism / static, 3.5 in the paper: reached under 2 of 5 conditions, not excluded under 0",
        "prism over each: ratios of the rates that hold 99 % TTFT attainment at P95",
        "condition static",
        "fair default = 1.00x [0.84, 1.19]",
        "+ pools + 2.00x [1.68, 2.38]",
        "+ turns + >8.00x [6.72, inf]",  # static misses more than 1 % at the lowest rate
        "only pools + 2.00x [1.68, 2.38]",
        "only turns + >8.00x [6.72, inf]",
    ]
    signs = "verdicts on the first of a pair: + ahead; = equal within 25 %; "
    words = f"{signs}5 of 5 verdicts are decided, corrected together (Holm)"
    assert words in " ".join(told)
    every = printed(rows, facts, every=True)
    assert "condition origin prism req/s static req/s static" in every
    assert "pools: unknown, a section" in every
    assert "| condition | static |" in printed(rows, facts, markdown=True)


def test_a_case_without_an_interval_does_not_count_in_the_first_line() -> None:
    panels = [panel(name, k, "rate_rps", xs=(1.0, 16.0), unit_rps=1.0) for k, name in enumerate("abcde")]
    facts = about(panels, [], layout="lines", definitions=["ttft"])
    rows = rates(panels, {"a": 2.0, "b": 2.0, "c": 16.0, "d": 16.0, "e": 16.0})
    single = pc.or_(pc.equal(rows["seed"], 0), pc.is_in(rows["condition"], pa.array(["a", "b"])))
    assert printed(rows.filter(single), facts)[0] == "on most of 2 panels prism, pooled over models, is ahead of static"
    assert printed(rows, facts)[0] == "on most of 5 panels prism, pooled over models, is behind static"


def test_without_a_number_of_the_paper_it_says_who_is_ahead() -> None:
    panels = [panel(name, k, "rate_rps", xs=(1.0, 16.0), unit_rps=1.0) for k, name in enumerate("abcd")]
    facts = about(panels, [Claim("ratio", "prism", "static")], layout="matrix", definitions=["ttft"])
    told = printed(rates(panels, {"a": 2.0, "b": 16.0, "c": 8.0, "d": 1.0}), facts)
    assert told[0] == "against static prism has no verdict that holds on most of 4"
    assert told[2:7] == ["condition static", "a + 4.00x", "b - 0.50x", "c = 1.00x", "d + >8.00x"]
    words = "ahead under a and d; equal within 25 % under c; behind under b"
    assert f"prism / static: depends on the condition: {words}." in " ".join(map(str.strip, told))
    assert told[-2:] == ["0 runs", *facts.notes]
    signs = "verdicts on the first of a pair: + ahead; = equal within 25 %; - behind"
    assert f"{signs}; 4 of 4 verdicts are decided, corrected together (Holm)" in " ".join(told)


def test_cases_of_real_logs_stand_in_one_row_beside_the_verdicts_on_fitted_traces() -> None:
    made = panel("fitted", 0, "rate_rps", xs=(1.0, 16.0), unit_rps=1.0)
    log = {"xs": (1.0, 16.0), "unit_rps": 1.0, "tier": "composed", "name": "a log", "trace": "log+models=8"}
    log |= {"left_out": "5 of 90 requests beyond 8 tokens"}
    halves = [panel(f"a log / {half} half", 1, "rate_rps", half=half, **log) for half in ("first", "second")]
    other = [panel("elsewhere", 2, "rate_rps", **log | {"name": "elsewhere", "gpus": 9, "half": "first"})]
    facts = about([made, *halves, *other], [Claim("ratio", "prism", "static")], layout="matrix", definitions=["ttft"])
    knees = {"fitted": 2.0, "a log / first half": 2.0, "a log / second half": 16.0, "elsewhere": 2.0}
    rows = rates(facts.panels, knees)
    told = printed(rows, facts)
    fitting = "real logs on which both systems fit confirm 0 of 1 fitted verdicts in every case"
    assert " ".join(told).startswith(f"{fitting}, 0 in most, 1 in half or fewer")
    ahead, unfit = Standing(None, "ahead", ""), Standing(None, NO_ROOM, "static does not fit")
    both = Standing(Estimate(2.0, None, None, 1), CASE, "")
    known = {("fitted", "prism", "static"): ahead, ("fitted", "prism", "elastic"): ahead}
    known |= {(halves[0]["condition"], "prism", "static"): both, (halves[1]["condition"], "prism", "static"): unfit}
    known |= {(half["condition"], "prism", "elastic"): unfit for half in halves}
    (counted,) = borne_out(facts.panels, known)
    assert counted == f"{fitting.replace('0 of', '1 of')}, 0 in most, 0 in half or fewer; 1 more have none"
    assert told[3:7] == ["condition static", "fitted + 4.00x", "a log 0.50 to 4.00x", "elsewhere 4.00x"]
    words = "ahead under fitted; one case under elsewhere; in 2 cases of real logs above 1 in 1, below in 1"
    assert f"prism / static: {words}." in " ".join(told)
    assert "Left out: 5 of 90 requests beyond 8 tokens of log." in told
    every = printed(rows, facts, every=True)
    assert any(line.startswith("a log / second half") and line.endswith("0.50x") for line in every)
    apart = [{**entry, "own": {"scaling": "time"}} if entry["half"] else entry for entry in facts.panels]
    told = printed(rows, replace(facts, panels=tuple(apart)))
    assert told[0].startswith("prism over each")  # nothing is in the same setting


# ------------------------------------------------------------------ parts


def test_parts_that_are_switched_off() -> None:
    panels = [panel("hyperbolic", 0, "rate_scale")]
    claim = Claim("difference", "prism", "prism+evict=never", subject="eviction", paper=(0.4, 1.0), says="it helps")
    shares = {"prism": {"": 0.9, "x": 0.9, "y": 0.9}, "prism+evict=never": {"": 0.8, "x": 0.9, "y": 0.4}}
    rows = table(
        [
            {"condition": "hyperbolic", "x": 2.0, "label": name, "seed": seed, "ttft": share + 0.01 * seed}
            | {"over": "model" if model else "pooled", "model": model or None}
            for name, by_model in shares.items()
            for model, share in by_model.items()
            for seed in range(3)
        ]
    )
    offered = [
        row | {"definition": "offered_rps", "value": 3.25}
        for row in rows.to_pylist()
        if row["definition"] == "ttft" and row["over"] == "pooled"
    ]
    rows = pa.concat_tables([rows, pa.Table.from_pylist(offered, schema=rows.schema)])
    assert offered_rps(rows, 2.0) == pytest.approx(3.25)
    facts = about(panels, [claim], layout="parts", definitions=["ttft"], systems=[*shares], slo="5/2xP95")
    told = printed(rows, facts, every=True)
    assert told[0] == (
        "TTFT attainment (SLO 5/2xP95, heavy8) with all parts, and the change in points without each part "
        "(3 seeds, paired; ? its 95 % interval covers 0)"
    )
    assert told[1:4] == [
        "all worst a",
        "hyperbolic-like, 3.25 req/s 91.0 91.0 -10.0",
        "a without eviction; y loses most, -50.0",
    ]
    assert "the paper on eviction: it helps" in told
    assert any(line.startswith("eviction, the model that gains most") and "40-100 points" in line for line in told)
