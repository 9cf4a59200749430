"""Claims about measures by worked numbers: ratios, differences, the greatest, the least, and rates that are held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from harness.answers import measured as words
from harness.rows.about import About
from harness.study import claims, measured
from harness.study.study import Claim
from tests.cases import cases
from tests.harness.study import study_table

RATES = (2.5, 5.0, 10.0, 20.0)


def about(*panels: dict[str, Any], claims: Sequence[Claim] = (), **more: Any) -> About:
    facts = {"definitions": ["both"], "systems": ["a", "b"], "seeds": 2, "setting": "here"}
    return study_table.about(panels, claims, **facts | more)


def panel(name: str, trace: str = "sample", condition: str = "") -> dict[str, Any]:
    return study_table.panel(condition or name, 0, "gpus", name=name, trace=trace, xs=[4.0], unit_rps=1.0)


def table(*rows: tuple[str, str, str, str, int, float | None]) -> pa.Table:
    """Return rows of (condition, system, measure, model, seed, value)."""
    columns = list(
        zip(*((*row[:3], "model" if row[3] else "pooled", row[3] or None, *row[4:]) for row in rows), strict=True)
    )
    names = ("condition", "label", "definition", "over", "model", "seed", "value")
    return pa.table(dict(zip(names, map(list, columns), strict=True))).append_column("x", pa.array([4.0] * len(rows)))


def claim(**more: Any) -> Claim:
    return Claim("measure", "a", **{"paper": 2.0, "measure": "m", "says": "it is so", "section": "1", **more})


ROWS = table(
    *(("c", system, "m", "hot", seed, of * (seed + 1)) for system, of in (("a", 6.0), ("b", 2.0)) for seed in (0, 1)),
    ("d", "a", "m", "hot", 0, 9.0),
    ("d", "b", "m", "hot", 0, 3.0),
    ("d", "a", "m", "hot", 1, 1.0),
    ("d", "b", "m", "hot", 1, 1.0),
)
BOTH = about(panel("c"), panel("d"))


@cases(
    ("more", "values"),
    {
        "a column": ({"on": {"condition": "c"}}, [[6.0, 12.0]]),
        "a panel each": ({}, [[6.0, 12.0], [9.0, 1.0]]),
        "a ratio": ({"over": "b", "even": 1.0, "on": {"condition": "c"}}, [[3.0, 3.0]]),
        "a difference": ({"over": "b", "even": 0.0, "on": {"condition": "c"}}, [[4.0, 8.0]]),
        "the greatest of all panels": ({"over": "b", "most": True}, [[3.0, 3.0]]),
        "of another model": ({"model": "cold"}, []),
        "of a system that is not there": ({"over": "c"}, []),
    },
)
def test_values_by_hand(more: dict[str, Any], values: list[list[float]]) -> None:
    given = claim(**{"model": "hot", **more})
    assert [each for _, each in measured.of_claim(ROWS, BOTH, given)] == values


def test_the_least_is_told_by_the_field_of_its_system() -> None:
    texts = {"a": "weaver", "x": "weaver+ratio=0.25", "y": "weaver+ratio=0.5"}
    rows = table(
        *(("c", name, "m", "", seed, of) for name, of in (("a", 0.0), ("x", 2.0), ("y", 1.0)) for seed in (0, 1))
    )
    ((_, values),) = measured.of_claim(rows, about(panel("c"), texts=texts), claim(least="ratio"))
    assert values == [0.5, 0.5]


@cases(
    ("shares", "held"),
    {
        "half-way in logarithms": ([1.0, 0.995, 0.985, 0.999], 5.0 * 2**0.5),  # what holds later counts not
        "nowhere": ([0.5, 1.0, 1.0, 1.0], 2.5),
        "everywhere": ([1.0, 1.0, 1.0, 1.0], 20.0),
    },
)
def test_the_rate_within_slos_lies_where_attainment_falls_below_the_level(shares: list[float], held: float) -> None:
    panels = [panel("alpha", f"power-law+rate_rps={rps:g}", f"alpha {rps}") for rps in RATES]
    rows = table(
        *(
            (f"alpha {rps}", system, "within", "", 0, share)
            for system in ("a", "b")
            for rps, share in zip(RATES, shares, strict=True)
        )
    )
    of = about(*panels)
    assert measured.column(of, rows, panels, "a", measured.HELD_RPS) == {0: pytest.approx(held)}
    ((_, ratio),) = measured.of_claim(rows, of, claim(measure="held_rps", over="b", most=True))
    assert ratio == [1.0]
    assert [len(each) for _, each in measured.of_claim(rows, of, claim(measure="within", at=10.0))] == [1, 1]


def test_laws_of_lengths_are_lines_of_a_claim_and_the_answer_spans_them() -> None:
    panels = [panel("c", f"poisson+lengths={law}-alpaca", law) for law in ("geometric", "lognormal")]
    rows = table(
        *((law, "a", "m", "", seed, of) for law, of in (("geometric", 2.0), ("lognormal", 3.0)) for seed in (0, 1))
    )
    stated = [claim(headline="B"), claim(says="nothing is known", measure="", lacks="the rows")]
    of = about(*panels, claims=stated, headline="A is {} rate")
    every = claims.verdicts(rows, of)
    assert [(measured.law(verdict.panel), verdict.text) for verdict in every] == [
        ("geometric", "2.00 [2.00, 2.00]"),
        ("lognormal", "3.00 [3.00, 3.00]"),
        ("", "-"),
    ]
    assert words.answer(of, every) == "A is 2.00 to 3.00 times B's rate"
    assert [verdict.says for verdict in every] == ["size", "contradicted", "not testable"]
    assert claims.reason(every[-1]) == "lacks the rows"
    assert list(words.lines(rows, of))[1] == "simulated, here; 2 seeds"
