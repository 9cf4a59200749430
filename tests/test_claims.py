"""Claims beside what came out: one rule of verdicts, reach seed by seed, ratios and differences paired by seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from harness.rows import crossings
from harness.rows.crossings import of_counts
from harness.rows.statistics import Estimate
from harness.study import claims
from harness.study.claims import RULES, SAYS, Verdict, by_number, judged, judged_reach
from harness.study.study import Claim
from tests.cases import cases
from tests.study_table import AT, PANELS, about, met, panel, table
from tests.study_table import cells as scores

TABLE = table(list(scores()))


def verdict(claim: Claim, rows: Any = TABLE, **facts: Any) -> Verdict:
    (one,) = claims.verdicts(rows, about(claims=[claim], **facts))
    return one


# ------------------------------------------------------------------ one rule

BESIDE = [  # of what came out, beside a claim of 2.3
    (Estimate(2.0, 1.5, 2.5, 5), "agrees"),
    (Estimate(2.0, 1.9, 2.1, 5), "differs"),
    (Estimate(2.3, None, None, 1), "agrees"),
    (Estimate(4.0, None, None, 1), "differs"),
    (Estimate(1.5, 1.2, None, 5, ">"), "open"),  # at least 1.2: it may be 2.3
    (Estimate(3.0, 2.8, None, 5, ">"), "differs"),
    (Estimate(1.5, None, 1.8, 5, "<"), "differs"),
    (Estimate(1.0, None, None, 5, "~"), "open"),
    (Estimate(2.3, 1.2, None, 2, ">"), "open"),  # no cut crossing stands beside "agrees"
    (None, "not run"),
]


@cases(("here", "says"), BESIDE)
def test_the_paper_is_held_against_the_interval(here: Estimate | None, says: str) -> None:
    assert judged(2.3, here) == judged((2.3, 2.3), here) == says
    if here is not None and here.sign == "=":
        assert judged((0.0, 9.0), here) == "agrees"  # a range of the paper is met in part


def test_a_verdict_says_when_it_agrees() -> None:
    alone, among = Estimate(2.0, None, None, 1), Estimate(2.0, 1.5, 2.5, 5)
    told = [claims.rule(paper, here) for paper in (2.3, (2.0, 8.0)) for here in (alone, among)]
    assert told == [RULES["value"], RULES["value, interval"], RULES["range"], RULES["range, interval"]]
    claim = Claim("measure", "weaver", paper=(2.0, 8.0))
    assert by_number(claim, None, among)[4:6] == ("agrees", RULES["range, interval"])
    untested = Claim("measure", "weaver", paper=2.3, comparable=False, why="no rate")
    assert by_number(untested, None, among)[4:6] == ("not comparable", "-")


@cases("paper", ["reached", "never"])
def test_a_claim_of_reach_is_judged_seed_by_seed(paper: str) -> None:
    said = [judged_reach(paper, n, 3) for n in range(4)]
    assert said == ["differs", "open", "open", "agrees"][:: 1 if paper == "reached" else -1]
    assert judged_reach(paper, 0, 0) == "not run"
    assert {*said, "not run"} < set(SAYS)


def test_a_ratio_of_bounds_is_a_bound() -> None:
    def counts(mean: float, sign: Any = "=") -> Estimate:
        return Estimate(mean, None, None, 3, sign)

    assert of_counts(counts(32), counts(16)) == Estimate(2.0, None, None, 3)
    assert of_counts(counts(32, ">"), counts(16)) == Estimate(2.0, None, None, 3, ">")
    assert of_counts(counts(32), counts(16, ">")) == Estimate(2.0, None, None, 3, "<")
    assert of_counts(counts(32, ">"), counts(16, ">")) == Estimate(2.0, None, None, 3, "~")


# ------------------------------------------------------------------ a made-up table


def test_each_claim_stands_on_the_panels_that_it_is_about() -> None:
    every = claims.verdicts(TABLE, about())
    said = [(v.claim.label, v.claim.paper, v.panel and v.panel["condition"], v.says) for v in every]
    assert said == [
        ("prism / static", 2.3, "rates", "differs"), ("prism / static", 4.0, "rates", "agrees"),  # not of arena
        ("prism", "reached", "SLOs", "agrees"), ("static", "never", "SLOs", "agrees"), ("prism", 4, "counts", "agrees"),
        ("prism", 7, "counts", "not comparable"), ("static", "never", "counts", "agrees"),
    ]  # fmt: skip
    ratio, count = every[0].here, every[4].here
    assert ratio is not None
    assert (ratio.mean, ratio.sign, ratio.n) == (pytest.approx(4.0), "=", 12)  # three windows of four blocks
    assert count == Estimate(4.0, None, None, 12)


def test_crossings_are_in_requests_per_second() -> None:
    rows = crossings.of_panel(TABLE, PANELS[0])
    c = crossings.crossing(rows, PANELS[0], "prism", "ttft", 0.99)
    assert c is not None
    assert c.at.mean == pytest.approx(15.0)  # 10 x 1.5
    assert c.fails == 24.0
    assert crossings.crossing(rows, PANELS[0], "qlm", "ttft", 0.99) is None


def test_what_some_seeds_reach_is_open() -> None:
    lucky = [
        row | ({"ttft": 1.0} if (row["condition"], row["x"], row["seed"]) == ("SLOs", 5, 0) else {}) for row in scores()
    ]
    found = verdict(Claim("crossing", "static", on=AT["SLOs"], paper="never"), table(lucky))
    assert (found.text, found.says) == ("reached by 1 of 3 seeds", "open")


def without_room(seeds: Sequence[int]) -> Any:
    gone = {"infeasible": "no room", "ttft": 0.0}
    return table([row | (gone if row["label"] == "static" and row["seed"] in seeds else {}) for row in scores()])


def test_nobody_is_compared_with_a_system_that_finds_no_room() -> None:
    rows = without_room(range(3))
    assert verdict(CLAIM_OF_RATES, rows)[2:] == (None, "-", "does not fit", "-", "static: no room")
    untested = Claim("ratio", "prism", "static", on=AT["rates"], paper=2.3, comparable=False, why="no rate")
    assert verdict(untested, rows).says == "not comparable"
    some = verdict(CLAIM_OF_RATES, without_room([1]))
    assert some.says in {"agrees", "differs", "open"}
    fewer = verdict(Claim("fewest", "static", on=AT["counts"], paper=7), without_room(range(3)))
    assert (fewer.text, fewer.says) == (">5", "open")  # more GPUs may have room


CLAIM_OF_RATES = Claim("ratio", "prism", "static", on=AT["rates"], paper=4.0)


def test_a_ratio_of_counts_is_the_other_ones_over_ours() -> None:
    rows = [row | ({"ttft": 1.0} if (row["label"], row["x"]) == ("static", 5.0) else {}) for row in scores()]
    found = verdict(Claim("fewest", "static", "prism", on=AT["counts"], paper=(1.0, 2.0)), table(rows))
    assert (found.here, found.says) == (Estimate(1.25, None, None, 12), "agrees")
    bound = verdict(Claim("fewest", "static", "prism", on=AT["counts"], paper=(1.0, 2.0)))
    assert (bound.here, bound.says) == (Estimate(1.25, None, None, 12, ">"), "open")


def test_a_system_that_was_not_run_has_no_verdict_but_of_its_own_panel() -> None:
    assert claims.verdicts(TABLE, about(claims=[Claim("ratio", "prism", "qlm", paper=2.0)])) == []
    elsewhere = Claim("crossing", "dedicated", on=AT["SLOs"], paper=2.0)
    assert verdict(elsewhere).says == "not run"


def test_a_value_is_the_studys_own() -> None:
    claim = Claim("value", "prism", shape="llama-3.1-8b", paper=(0.0, 0.7))
    found = verdict(claim, values=[0.74])
    assert (found.panel, found.text, found.says, found.rule) == (None, "0.74 s", "differs", RULES["range"])
    assert claims.claim_text(claim, about()) == "activation of llama-3.1-8b, TP 1"
    assert claims.paper_text(claim) == "0-0.7 s"


# ------------------------------------------------------------------ differences


def shares(label: str, by_model: dict[str, Sequence[float]], x: float = 2.0) -> list[dict[str, Any]]:
    """Attainment by model (pooled: ""), a number a seed."""
    return [
        {"condition": "t", "x": x, "label": label, "seed": seed, "ttft": share, "over": "model" if model else "pooled",
         "model": model or None}
        for model, each in by_model.items() for seed, share in enumerate(each)
    ]  # fmt: skip


def test_a_loss_is_paired_by_seed_and_names_the_model_that_loses_most() -> None:
    whole = shares("a", {"": [0.9, 0.7], "x": [0.9, 0.9], "y": [0.8, 0.6]})
    without = shares("a+b=false", {"": [0.8, 0.6], "x": [0.9, 0.9], "y": [0.3, 0.1]})
    claim = Claim("difference", "a", "a+b=false", subject="b", paper=(0.4, 1.0))
    facts = about([panel("t", 0, "rate_scale")], [claim], systems=["a", "a+b=false"], layout="parts")
    rows = table([*whole, *without])
    (loss,) = claims.losses(rows, facts, claim)
    assert (loss.x, loss.model) == (2.0, "y")
    assert loss.pooled.mean == pytest.approx(0.1)
    assert loss.pooled.low == pytest.approx(0.1)  # both seeds differ by the same: no spread
    assert loss.most.mean == pytest.approx(0.5)
    (found,) = claims.verdicts(rows, facts)
    assert (found.panel, found.text, found.says) == (None, "50.0 points (y)", "agrees")
    assert (claims.claim_text(claim, facts), claims.paper_text(claim)) == (
        "b, the model that gains most", "40-100 points",
    )  # fmt: skip


# ------------------------------------------------------------------ standings


def walk(kind: str, row: int) -> dict[str, Any]:
    return panel(f"{kind} {row}", row, "rate_rps", kind=kind, unit_rps=1.5, xs=(1.0, 16.0))


def test_a_cumulative_study_is_held_against_the_paper_at_its_ends_alone() -> None:
    panels = [walk("base", 0), walk("cumulative", 1), walk("cumulative", 2), walk("alone", 3), walk("alone", 4)]
    rates = [row for row in scores() if row["condition"] == "rates" and row["label"] in {"prism", "static"}]
    rows = table([row | {"condition": one["condition"]} for one in panels for row in rates])
    found = claims.verdicts(rows, about(panels, [Claim("ratio", "prism", "static", paper=4.0)], layout="steps"))
    assert [(v.says, v.rule) for v in found] == [
        ("agrees", RULES["value, interval"]), ("ahead", "-"), ("agrees", RULES["value, interval"]), ("ahead", "-"),
        ("ahead", "-"),
    ]  # fmt: skip
    unstated = claims.verdicts(rows, about(panels, [Claim("ratio", "static", "prism")], layout="matrix"))
    assert {(v.says, v.here and round(v.here.mean, 9)) for v in unstated} == {("behind", 0.25)}


def test_what_is_beyond_the_rates_has_no_ratio() -> None:
    one = walk("", 0)

    def found(ours: float, theirs: float, missing: str = "") -> Verdict:
        held = {"prism": ours, "static": theirs}
        rows = [
            {"condition": one["condition"], "x": x, "label": name, "seed": seed, "ttft": met(x, held[name]),
             "infeasible": "no room" if name == missing else None}
            for name in held for seed in range(3) for x in (1.0, 4.0, 16.0)
        ]  # fmt: skip
        (v,) = claims.verdicts(table(rows), about([one], [Claim("ratio", "prism", "static")]))
        return v

    assert found(99, 99)[2:5] == (None, "both hold 99 % at 16 req/s", "equal within 25 %")  # by points
    assert found(0.9, 0.8)[2:4] == (None, "neither holds 99 % at 1 req/s")
    assert found(4, 1, "static")[2:5] == (None, "static does not fit", "not decided")  # nobody is ahead of it
    assert found(1, 4, "prism")[2:5] == (None, "prism does not fit", "not decided")
    above = found(4, 0.5).here
    assert above is not None
    assert (above.sign, above.high) == (">", None)
