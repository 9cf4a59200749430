"""Claims beside what came out: the rule with worked numbers, and statements on a made-up table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from harness.rows.about import About
from harness.rows.estimate import Estimate
from harness.rows.ranking import Standing
from harness.study import claims
from harness.study.claims import Verdict, lowest, weak
from harness.study.rule import judged_order, of_statement
from harness.study.study import Claim
from tests.harness.study.study_table import AT, about, panel, point, table
from tests.harness.study.test_rule import gain, here

# ------------------------------------------------------------------ the best of several


def test_over_the_best_is_over_whichever_it_is() -> None:
    each = {"rate": here(4.6, 4.5, 4.7), "equal": here(3.6, 3.2, 4.1), "tuned": here(3.8, 3.0, 4.8)}
    assert lowest(each) == ("equal", here(3.6, 3.0, 4.1))
    name, bound = lowest({"rate": here(9.0, 5.0, None, ">"), "equal": here(3.6, None, 4.1, "<")})
    assert (name, bound.low, bound.high, bound.sign) == ("equal", None, 4.1, "<")
    assert lowest({"a": here(2.0, 1.0, 3.0), "b": here(1.0, None, None, "~")})[1].sign == "~"


def test_a_flat_curve_has_an_order_and_no_size() -> None:
    def verdict_of(words: str, claim: Claim, ratio: Estimate | None = None, flat: bool = True) -> str:
        return judged_order(claim, Standing(ratio, words, "", flat=flat))

    assert verdict_of("ahead", gain()) == verdict_of("ahead, by less than 25 %", gain()) == "direction"
    assert verdict_of("behind", gain()) == "contradicted"
    assert {verdict_of(words, gain()) for words in ("turns", "equal within 25 %", "not decided")} == {"open"}
    assert (verdict_of("behind", gain(0.6)), verdict_of("ahead", gain("behind"))) == ("direction", "contradicted")
    assert (verdict_of("equal within 25 %", gain("equal")), verdict_of("ahead", gain("equal"))) == ("size", "open")
    assert verdict_of("behind", gain(input="a constant")) == "input"
    assert verdict_of("behind", gain(), here(3.0, 2.6, 3.4), flat=False) == "direction"  # beside a flat one: no size


# ------------------------------------------------------------------ a made-up table

SEEDS = 8


def attained(label: str, knee: float, xs: Sequence[float], condition: str, rises: bool = False) -> list[dict[str, Any]]:
    """Return misses that grow as x^3, 1 % at the knee; a little more in odd seeds and less in even ones."""
    rows = []
    for x in xs:
        share = min(1.0, 0.01 * ((knee / x) if rises else (x / knee)) ** 3)
        attained_by = [1.0 - share * (1.05 if seed % 2 else 0.95) for seed in range(SEEDS)]
        rows += [point(condition, x, label, seed, each, n=20_000) for seed, each in enumerate(attained_by)]
    return rows


RATES = (1.0, 2.0, 4.0, 8.0, 16.0)
KNEES: Mapping[str, float] = {"prism": 8.0, "prism:osdi26": 6.0, "static:rate": 2.0, "static:equal": 3.0, "qlm": 12.0}
NAMES = {name: name for name in KNEES}


def rated() -> list[dict[str, Any]]:
    return [row for name, knee in KNEES.items() for row in attained(name, knee, RATES, "rates")]


RATED = panel("rates", 0, "rate_scale", unit_rps=1.0, xs=RATES)


def judged_as(claim: Claim, *panels: Mapping[str, Any]) -> About:
    """Return the facts of a study with this claim, on some panels."""
    return about(panels, [claim], systems=list(KNEES), texts=NAMES, seeds=SEEDS)


def verdicts(claim: Claim, rows: Sequence[Mapping[str, Any]], *panels: Mapping[str, Any]) -> list[Verdict]:
    return claims.verdicts(table(rows, 1), judged_as(claim, *(panels or (RATED, panel("limit", 1, "slo_scale")))))


def test_a_ratio_is_judged_over_the_best_static() -> None:
    (v,) = verdicts(Claim("ratio", "prism", "best static", on=AT["rates"], paper=8 / 3), rated())
    assert v.here is not None
    assert v.here.mean == pytest.approx(8 / 3, rel=1e-3)
    assert v.says == "size"
    assert v.text.endswith("(the best is static:equal)")
    assert v.support is not None
    assert v.support.windows == SEEDS
    assert v.support.misses is not None
    assert v.support.misses > 1000
    assert weak(v) == ""


def test_each_system_over_each_other_is_judged_and_evidence_stands_beside() -> None:
    claim = Claim(
        "ratio",
        "prism:osdi26 or prism",
        "static:rate and qlm",
        on=AT["rates"],
        paper="ahead",
        also=({"over": "best static"}, {"system": "prism"}, {"condition": "elsewhere"}),
    )
    results = verdicts(claim, rated())
    assert [(v.claim.system, v.claim.over, v.says, v.claim.evidence) for v in results] == [
        ("prism:osdi26", "static:rate", "direction", False),
        ("prism:osdi26", "qlm", "contradicted", False),
        ("prism", "static:rate", "direction", False),
        ("prism", "qlm", "contradicted", False),
        ("prism:osdi26", "best static", "direction", True),
        ("prism", "best static", "direction", True),
    ]
    judged = [(v.says, v.reading) for v in results if not v.claim.evidence]
    assert of_statement(judged) == "contradicted"  # by qlm, of either
    assert of_statement([(says, of) for says, of in judged if says == "direction"]) == "direction"


def test_what_takes_no_part_is_told() -> None:
    claim = Claim("ratio", "prism and prism_released", "best static", on=AT["rates"], paper=2.0)
    known = judged_as(claim, RATED)
    assert claims.lacking(claim, known) == ["prism_released"]
    assert [v.claim.system for v in claims.verdicts(table(rated(), 1), known)] == ["prism"]
    assert claims.lacking(Claim("ratio", "prism", "best muxserve"), known) == ["best muxserve"]


def test_along_slo_scales_a_ratio_says_how_many_times_sooner() -> None:
    xs = (0.5, 1.0, 2.0, 4.0)
    rows = [*attained("prism", 1.0, xs, "limit", rises=True), *attained("qlm", 1.5, xs, "limit", rises=True)]
    (v,) = verdicts(Claim("ratio", "prism", "qlm", on={"condition": "limit"}, paper=1.5), rows)
    assert v.here is not None
    assert v.here.mean == pytest.approx(1.5, rel=0.02)
    assert v.says == "size"
    (turned,) = verdicts(Claim("ratio", "qlm", "prism", on={"condition": "limit"}, paper="ahead"), rows)
    assert turned.says == "contradicted"


def test_a_level_is_met_at_an_x_by_every_seed() -> None:
    xs = (0.5, 1.0, 2.0, 4.0)
    rows = [*attained("prism", 0.9, xs, "limit", rises=True), *attained("qlm", 1.5, xs, "limit", rises=True)]
    rows += attained("static:rate", 1.0, xs, "limit", rises=True)  # odd seeds miss
    met = Claim("crossing", "prism and static:rate", on={"condition": "limit"}, paper="met", at=1.0)
    assert [(v.text, v.says) for v in verdicts(met, rows)] == [
        ("met by 8 of 8 seeds", "direction"),
        ("met by 4 of 8 seeds", "open"),
    ]
    (missed,) = verdicts(Claim("crossing", "qlm", on={"condition": "limit"}, paper="missed", at=1.0), rows)
    assert (missed.text, missed.says) == ("met by 0 of 8 seeds", "direction")
    assert missed.note.startswith("at least 69 %")  # 0.05 ** (1 / 8)


def test_every_static_is_one_that_never_reaches() -> None:
    rows = [row for name in ("static:rate", "static:equal") for row in attained(name, 3.0, (5.0, 9.0), "rates")]
    results = verdicts(Claim("crossing", "best static", on=AT["rates"], paper="never"), rows)
    assert [(v.claim.system, v.text, v.says) for v in results] == [
        ("static:rate", "reached by 0 of 8 seeds", "direction"),
        ("static:equal", "reached by 0 of 8 seeds", "direction"),
    ]


def test_a_half_of_a_real_trace_decides_nothing() -> None:
    first_half = RATED | {"half": "first"}
    for paper in (4.0, "ahead"):
        (v,) = verdicts(Claim("ratio", "prism", "static:rate", on=AT["rates"], paper=paper), rated(), first_half)
        assert (v.says, v.note) == ("open", claims.CASE)
    (v,) = verdicts(Claim("crossing", "prism", on=AT["rates"], paper="reached"), rated(), first_half)
    assert v.says == "open"


def test_nobody_is_compared_with_a_system_that_finds_no_room() -> None:
    gone = {"infeasible": "no room", "ttft": 0.0}
    rows = [row | (gone if row["label"] == "static:rate" else {}) for row in rated()]
    both = [row | (gone if row["label"].startswith("static") else {}) for row in rated()]
    alone = Claim("ratio", "prism", "static:rate", on=AT["rates"], paper=4.0)
    best = Claim("ratio", "prism", "best static", on=AT["rates"], paper=8 / 3)
    assert [v[2:6] for v in verdicts(alone, rows)] == [(None, "-", "does not fit", "-")]
    assert [v.says for v in verdicts(best, rows)] == ["size"]  # the best is among those that fit
    (none,) = verdicts(best, both)
    assert (none.says, none.note) == ("does not fit", "static:rate: no room; static:equal: no room")
    untested = Claim("ratio", "prism", "static:rate", on=AT["rates"], paper=2.3, comparable=False, why="no rate")
    assert [v.says for v in verdicts(untested, rows)] == ["not comparable"]


def test_a_count_lies_between_those_of_its_seeds() -> None:
    xs = (2.0, 3.0, 4.0, 5.0)
    counts = panel("counts", 0, "gpus", gpus=None, xs=xs)
    held = {"prism": [3, 3, 4], "static:rate": [5, 5, 5]}
    rows = [
        point("counts", x, name, seed, float(x >= least), gpus=int(x))
        for name, counts in held.items()
        for seed, least in enumerate(counts)
        for x in xs
    ]
    (count,) = verdicts(Claim("fewest", "prism", paper=4), rows, counts)
    assert count.here is not None
    assert (count.here.low, count.here.mean, count.here.high) == (3.0, 4.0, 4.0)
    (saved,) = verdicts(Claim("fewest", "static:rate", "prism", paper="ahead"), rows, counts)
    assert saved.here is not None
    assert (saved.here.low, saved.says) == (1.25, "direction")
    assert saved.here.high == pytest.approx(5 / 3)
    (halved,) = verdicts(Claim("fewest", "static:rate", "prism", paper=2.0, bound="at least"), rows, counts)
    assert halved.says == "direction"


def test_a_value_is_the_studys_own() -> None:
    claim = Claim("value", "prism", shape="llama-3.1-8b", paper=0.5, bound="up to")
    (verdict,) = claims.verdicts(table(rated()), about(claims=[claim], values=[0.74]))
    assert (verdict.panel, verdict.text, verdict.says) == (None, "0.74 s", "contradicted")
    assert claims.claim_text(claim, about()) == "activation of llama-3.1-8b, TP 1"
    assert claims.paper_text(claim) == "up to 0.5 s"


def test_a_system_that_was_not_run_has_no_verdict_but_of_its_own_panel() -> None:
    assert verdicts(Claim("ratio", "prism", "elastic", paper=2.0), rated()) == []
    (elsewhere,) = verdicts(Claim("crossing", "dedicated", on={"condition": "limit"}, paper=2.0), rated())
    assert elsewhere.says == "not run"


# ------------------------------------------------------------------ differences


def shares(label: str, by_model: dict[str, Sequence[float]], x: float = 2.0) -> list[dict[str, Any]]:
    """Return attainment by model (pooled: ""), a number a seed."""
    return [
        point("t", x, label, seed, share, over="model" if model else "pooled", model=model or None)
        for model, each in by_model.items()
        for seed, share in enumerate(each)
    ]


def test_a_loss_is_paired_by_seed_and_names_the_model_that_loses_most() -> None:
    whole = shares("a", {"": [0.9, 0.7], "x": [0.9, 0.9], "y": [0.8, 0.6]})
    without = shares("a+b=false", {"": [0.8, 0.6], "x": [0.9, 0.9], "y": [0.3, 0.1]})
    claim = Claim("difference", "a", "a+b=false", subject="b", paper=0.4, bound="at least")
    facts = about([panel("t", 0, "rate_scale")], [claim], systems=["a", "a+b=false"], layout="parts")
    rows = table([*whole, *without])
    (loss,) = claims.losses(rows, facts, claim)
    assert (loss.x, loss.model) == (2.0, "y")
    assert loss.pooled.mean == pytest.approx(0.1)
    assert loss.pooled.low == pytest.approx(0.1)  # both seeds differ by the same: no spread
    assert loss.most.mean == pytest.approx(0.5)
    (verdict,) = claims.verdicts(rows, facts)
    assert (verdict.panel, verdict.text, verdict.says) == (None, "50.0 points (y)", "size")
    assert claims.claim_text(claim, facts) == "b, the model that gains most"
    assert claims.paper_text(claim) == "at least 40 points"


# ------------------------------------------------------------------ the ends of a bridge


def walk(kind: str, row: int) -> dict[str, Any]:
    return panel(f"{kind} {row}", row, "rate_rps", kind=kind, unit_rps=1.0, xs=RATES)


def test_a_cumulative_study_is_held_against_the_paper_at_its_ends_alone() -> None:
    panels = [walk("base", 0), walk("cumulative", 1), walk("cumulative", 2), walk("alone", 3), walk("alone", 4)]
    rates = [row for row in rated() if row["label"] in {"prism", "static:rate"}]
    rows = table([row | {"condition": entry["condition"]} for entry in panels for row in rates])
    names = {"systems": list(KNEES), "texts": NAMES}
    claim = Claim("ratio", "prism", "static:rate", paper=4.0)
    results = claims.verdicts(rows, about(panels, [claim], layout="steps", **names))
    assert [v.says for v in results] == ["size", "ahead", "size", "ahead", "ahead"]
    assert [v.rule == "-" for v in results] == [False, True, False, True, True]
    unstated = claims.verdicts(rows, about(panels, [Claim("ratio", "static:rate", "prism")], layout="matrix", **names))
    assert {(v.says, v.here and round(v.here.mean, 6)) for v in unstated} == {("behind", 0.25)}
