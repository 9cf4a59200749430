"""A study in words: crossings beside the paper's, ratios of conditions, parts that are switched off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from harness.report.text_table import laid
from harness.rows import tidy
from harness.rows.crossings import of_panel
from harness.study.claims import SAYS
from harness.study.study import START, Claim
from harness.study.text import Shown, lines, offered_rps
from tests.cases import cases
from tests.study_table import CLAIMS, PANELS, about, panel, table
from tests.study_table import cells as scores

TABLE = table(list(scores()))
FLEET = [panel("counts", 0, "gpus", gpus=None, rate_rps=1.5, xs=(2.0, 5.0), slo=rule, slo_scale=None)
         for rule in ("5xP95", "9xP95")]  # fmt: skip


def said(rows: pa.Table = TABLE, facts: dict[str, Any] | None = None, *, markdown: bool = False) -> list[str]:
    shown = Shown(rows, facts or about(), Path("x"), markdown)
    return [" ".join(line.split()) for line in lines(shown)]


# ------------------------------------------------------------------ crossings

TOLD = """
rates: rate (req/s) at which each system holds 99 % (SLO 5x, 2 GPUs)
trace models system 99 % TTFT fails at 99 % TPOT | at TTFT % TPOT % loads evicts moved
hyperbolic-like heavy8 prism 12.2 [12.2, 12.2] 24.0 >24.0 | 6 100.0 100.0 7 6 2
hyperbolic-like heavy8 1.5 static >5 5 ≤2 misses SLOs >5 | 4 80.0 100.0 7 6 2
prism / static, rate at 99 % TTFT rates 2.3x 4.00x [4.00, 4.00] differs our interval holds the paper's
prism, SLO scale for 99 % TTFT SLOs reached reached by 3 of 3 seeds agrees every seed reaches it
static, SLO scale for 99 % TTFT SLOs never reached by 0 of 3 seeds agrees no seed reaches it
prism, GPUs for 99 % TTFT counts 4 4 agrees ours is the paper's
prism, GPUs for 99 % TTFT counts 7 4 not comparable -
not comparable: no rate is stated
"""


def test_crossings_stand_beside_the_papers() -> None:
    told = said()
    for line in TOLD.strip().splitlines():
        assert line in told, line
    assert sum("4x 4.00x" in line for line in told) == 1  # not of the other trace
    counts = [f"{n} {one}: {SAYS[one]}" for n, one in ((5, "agrees"), (1, "differs"), (1, "not comparable"))]
    assert "; ".join(counts) in told


def test_the_copy_on_other_seeds_tells_how_much_is_chance() -> None:
    (line,) = (line for line in said() if line.startswith("A/A: "))
    assert line == (  # at 16 the copy was given 1 where prism has 0.5
        "A/A: prism against its copy on other seeds: 3 of 4 differences cover 0, the largest is 50.00 points"
    )
    rows = TABLE.filter(pc.invert(pc.equal(TABLE["label"].cast(pa.string()), "prism (A/A)")))
    assert not any(line.startswith("A/A") for line in said(rows))


def test_a_dip_and_a_cut_crossing_are_shown() -> None:
    """Prism's first seed dips at the lowest rate, its second holds up to the highest."""
    lower = {("rates", "prism", 1.0, 0): 0.96, ("rates", "prism", 16.0, 1): 1.0}
    places = ((row, (row["condition"], row["label"], row["x"], row["seed"])) for row in scores())
    told = said(table([row | ({"ttft": lower[at]} if at in lower else {}) for row, at in places]))
    row = next(line for line in told if line.startswith("hyperbolic-like heavy8 prism"))
    assert row.startswith("hyperbolic-like heavy8 prism >24.0 [0, inf] (1 of 3 seeds) 1.50 3.0 >24.0")  # .96 below .99
    stated = [line for line in told if line.startswith("prism / static")]
    assert len(stated) == 2
    assert all(">7.84x [" in line and " agrees our" not in line for line in stated)


def test_a_system_that_takes_its_own_gpus_says_how_many() -> None:
    facts = about(claims=[], systems=["prism", "static", "dedicated"], controls=["ideal", "prism (A/A)"])
    told = said(facts=facts)
    assert any(line.startswith("hyperbolic-like heavy8 dedicated (8 GPUs) ") for line in told)
    assert any(line.startswith("hyperbolic-like heavy8 1.5 dedicated (8 GPUs) ≤8 ") for line in told)
    assert not any("prism (" in line for line in told if "A/A" not in line)


def test_the_worst_model_stands_beside_the_crossing() -> None:
    """Prism holds 99 % up to x = 8 on rates, from 2 on SLO scales and 4 on GPUs; worst models attain less."""
    worst = [
        row | {"over": "worst", "value": row["value"] - 0.1 * (1 + row["seed"]) - 0.01 * row["x"]}
        for row in TABLE.to_pylist()
        if row["definition"] in {"ttft", "tpot"}
    ]
    both = pa.concat_tables([TABLE, pa.Table.from_pylist(worst, schema=TABLE.schema)])
    for one, x in zip(PANELS, (8.0, 2.0, 4.0), strict=True):
        own = of_panel(both, one)
        least = tidy.worst(own, one["axis"], "prism", "ttft", 0.99)
        assert least == pytest.approx(1.0 - (0.1 + 0.2 + 0.3) / 3 - 0.01 * x), one["axis"]
        pooled = own.filter(pc.equal(own["over"].cast(pa.string()), "pooled"))
        assert tidy.curves(own, "prism", "ttft", "x") == tidy.curves(pooled, "prism", "ttft", "x")
    assert tidy.worst(of_panel(both, PANELS[2]), "gpus", "static", "ttft", 0.99) is None  # it holds nowhere
    told = said(both)
    assert any("99 % TTFT fails at worst % 99 % TPOT worst %" in line for line in told)
    assert any(line.startswith("hyperbolic-like heavy8 prism 12.2 [12.2, 12.2] 24.0 72.0 >24.0") for line in told)


def test_a_system_that_does_not_fit_is_shown_as_such() -> None:
    def without(*seeds: int) -> list[str]:
        gone = {"infeasible": "no room", "ttft": 0.0}
        return said(table([
            row | (gone if row["label"] == "static" and row["condition"] == "rates" and row["seed"] in seeds else {})
            for row in scores()
        ]))  # fmt: skip

    told = without(0, 1, 2)
    assert "hyperbolic-like heavy8 static does not fit - does not fit | - - - - - -" in told
    assert "static does not fit (hyperbolic-like, heavy8): no room" in told
    ratio = [line for line in told if line.startswith("prism / static")]
    assert ratio
    assert all(" does not fit " in line for line in ratio)  # nobody is compared with it
    assert "static does not fit (hyperbolic-like, heavy8 with 1 of 3 seeds): no room" in without(1)


@cases(
    ("gone", "says"),
    [({}, "misses SLOs"), ({3.0: (0, 1, 2)}, "does not fit"), ({3.0: (1,)}, "does not fit (1 of 3 seeds)")],
)
def test_what_ends_the_fewest_gpus_is_room_or_load(gone: dict[float, tuple[int, ...]], says: str) -> None:
    """Prism holds from 4 GPUs on; on 3 it misses, or some seeds have no room."""
    told = said(table([
        row | ({"infeasible": "no room", "ttft": 0.0, "tpot": 0.0}
               if (row["condition"], row["label"]) == ("counts", "prism") and row["seed"] in gone.get(row["x"], ())
               else {})
        for row in scores()
    ]))  # fmt: skip
    (line,) = (line for line in told if line.startswith("hyperbolic-like heavy8 1.5 prism "))
    assert line.startswith("hyperbolic-like heavy8 1.5 prism 4 "), line
    assert f" {says} " in line


# ------------------------------------------------------------------ a fleet


def test_a_fleet_tells_the_count_of_each_seed() -> None:
    fewer = {("prism", 3.0, 0): 1.0, ("static", 5.0, 1): 1.0}
    rows = [row | {"ttft": fewer.get((row["label"], row["x"], row["seed"]), row["ttft"])} for row in scores()
            if row["condition"] == "counts"]  # fmt: skip
    facts = about(FLEET[:1], [], layout="fleet", definitions=["ttft"], controls=["dedicated"])
    told = said(table(rows), facts)
    assert told[0] == "counts: GPUs at which each system reaches 99 % (hyperbolic-like (synthetic) at 1.5 req/s)"
    assert told[1].startswith("trace models req/s system 99 % TTFT fails at below that each seed |")
    by_system = {name: next(line for line in told if f" {name} " in line) for name in ("prism", "static", "dedicated")}
    assert " prism 4 3 misses SLOs 3 to 4 | " in by_system["prism"]  # of the mean; the first seed alone takes 3
    assert " static >5 5 misses SLOs 5 to >5 | " in by_system["static"]
    assert " dedicated (8 GPUs) 8 - - - | " in by_system["dedicated"]  # a bound, on what it takes


# ------------------------------------------------------------------ ratios


def walk(kind: str, name: str, row: int, origin: str = "unknown") -> dict[str, Any]:
    return panel(f"{name} ({kind})", row, "rate_rps", name=name, kind=kind, origin=origin * (kind != "base"),
                 source="a section" * (kind != "base"), xs=(1.0, 16.0), unit_rps=1.0)  # fmt: skip


def rates(panels: Sequence[dict[str, Any]], held: dict[str, float]) -> pa.Table:
    """Prism holds up to 8 x; what stands beside it up to the rate named for the panel's condition."""
    return table([
        {"condition": one["condition"], "x": x, "label": name, "seed": seed, "ttft": float(x <= most)}
        for one in panels for name, most in (("prism", 8.0), ("static", held[one["name"]]))
        for seed in range(3) for x in (1.0, 2.0, 4.0, 8.0, 16.0)
    ])  # fmt: skip


def test_the_ratios_of_a_walk_from_the_fair_default() -> None:
    panels = [walk("base", START, 0), walk("cumulative", "pools", 1), walk("cumulative", "turns", 2),
              walk("alone", "pools", 3), walk("alone", "turns", 4)]  # fmt: skip
    facts = about(panels, [Claim("ratio", "prism", "static", paper=3.5)], layout="steps", definitions=["ttft"])
    told = said(rates(panels, {START: 8.0, "pools": 4.0, "turns": 1.0}), facts)
    assert told[0].startswith("rates (req/s) that hold 99 % TTFT attainment at P95, and their ratios: mean and 95 %")
    assert told[1] == "condition origin prism req/s static req/s prism / static"
    assert [line.split(" ")[0:2] for line in told[2:7]] == [["fair", "default"], ["+", "pools"], ["+", "turns"],
                                                            ["only", "pools"], ["only", "turns"]]  # fmt: skip
    assert told[2].endswith(" = 1.00x [1.00, 1.00]")
    assert told[4].endswith(" + 8.00x [8.00, 8.00]")
    assert "pools: unknown, a section" in told
    assert ("prism / static, 3.5 in the paper, of 5 conditions: beyond the interval: + turns, only turns.") in told
    page = said(rates(panels, {START: 8.0, "pools": 4.0, "turns": 1.0}), facts, markdown=True)
    assert "| condition | origin | prism req/s | static req/s | prism / static |" in page


def test_without_a_number_of_the_paper_it_says_who_is_ahead() -> None:
    panels = [panel(name, k, "rate_rps", xs=(1.0, 16.0), unit_rps=1.0) for k, name in enumerate("abcd")]
    facts = about(panels, [Claim("ratio", "prism", "static")], layout="matrix", definitions=["ttft"])
    told = said(rates(panels, {"a": 2.0, "b": 16.0, "c": 8.0, "d": 1.0}), facts)
    assert told[1] == "condition prism req/s static req/s prism / static"
    assert "prism / static: ahead under a and d; behind under b; no difference under c." in told
    assert told[-1].startswith("0 runs; + the first holds a higher rate, - a lower rate, =")


# ------------------------------------------------------------------ parts


def test_parts_that_are_switched_off() -> None:
    panels = [panel("hyperbolic", 0, "rate_scale")]
    claim = Claim("difference", "prism", "prism+evict=never", subject="eviction", paper=(0.4, 1.0), says="it helps")
    shares = {"prism": {"": 0.9, "x": 0.9, "y": 0.9}, "prism+evict=never": {"": 0.8, "x": 0.9, "y": 0.4}}
    rows = table([
        {"condition": "hyperbolic", "x": 2.0, "label": name, "seed": seed, "ttft": share + 0.01 * seed,
         "over": "model" if model else "pooled", "model": model or None}
        for name, by_model in shares.items() for model, share in by_model.items() for seed in range(3)
    ])  # fmt: skip
    offered = [row | {"definition": "offered_rps", "value": 3.25} for row in rows.to_pylist()
               if row["definition"] == "ttft" and row["over"] == "pooled"]  # fmt: skip
    rows = pa.concat_tables([rows, pa.Table.from_pylist(offered, schema=rows.schema)])
    assert offered_rps(rows) == {("hyperbolic-like", 2.0): pytest.approx(3.25)}
    facts = about(panels, [claim], layout="parts", definitions=["ttft"], systems=[*shares], slo="5/2xP95")
    told = said(rows, facts)
    assert told[0] == (
        "TTFT attainment (SLO 5/2xP95, heavy8) with all parts, and the points by which it changes without each "
        "[95 % interval, 3 seeds paired]"
    )
    assert told[1:4] == ["switched off hyperbolic-like 3.25 req/s loses most", "nothing 91.0",
                         "eviction -10.0 [-10.0, -10.0] y -50.0"]  # fmt: skip
    assert "the paper, of eviction: it helps" in told
    assert any(line.startswith("eviction, the model that gains most") and "40-100 points" in line for line in told)


# ------------------------------------------------------------------ tables

LAID = [
    (True, ["", "| a | b |", "| --- | --- |", r"| 1 | x\|y |", ""]),
    (False, ["a  b", "1  x|y"]),
]


@cases(("markdown", "expected"), LAID)
def test_tables_are_aligned_or_markdown(markdown: bool, expected: list[str]) -> None:
    assert list(laid([["a", "b"], ["1", "x|y"]], markdown=markdown)) == expected


def test_a_page_of_markdown_has_the_same_cells() -> None:
    page = said(facts=about(claims=CLAIMS[:1]), markdown=True)
    assert (
        "| hyperbolic-like | heavy8 | prism | 12.2 [12.2, 12.2] | 24.0 | >24.0 | \\| | 6 | 100.0 | 100.0 | 7 | 6 | 2 |"
        in page
    )
