"""Ratios of the rates at which systems hold a level, one a condition and a pair of systems: the table and its words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from harness.policy.types import UserError
from harness.rows.statistics import Estimate

FILE = "ratios.parquet"
ALIKE = 0.01  # what no reader would call a difference: crossings are interpolated between sampled rates
# of a ratio: its interval is above 1, below 1, covers 1 or all but equals it; or neither can be said
Verdict = Literal["ahead", "behind", "even", "open"]
SIGNS: Mapping[str, str] = {"ahead": "+", "behind": "-", "even": "=", "open": "?"}
MEANS: Mapping[str, str] = {
    "ahead": "the first holds a higher rate",
    "behind": "a lower rate",
    "even": "no difference told: the interval covers 1, or ends within 1 % of it",
    "open": "undecided",
}
SCHEMA = pa.schema(
    [
        ("condition", pa.int32()),
        ("kind", pa.string()),  # base | cumulative | alone, or regime
        ("name", pa.string()),
        ("origin", pa.string()),  # of an assumption; empty for others
        ("source", pa.string()),
        ("first", pa.string()),
        ("over", pa.string()),  # null: the row is the rate (req/s) of `first`
        ("paper", pa.float64()),  # the paper's ratio; null: it states none
        ("mean", pa.float64()),  # null: no ratio, `note` says why
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("n", pa.int32()),
        ("sign", pa.string()),  # as in statistics.Estimate
        ("verdict", pa.string()),  # null for a rate
        ("note", pa.string()),
    ]
)


def verdict(e: Estimate) -> Verdict:
    """Judge a ratio by its interval; one run, or one with bounds on both sides, says nothing.

    A winner's interval lies beyond 1 by more than `ALIKE`.
    """
    if e.n == 1 or e.sign == "~":
        return "open"
    if e.low is not None and e.low > 1.0 + ALIKE:
        return "ahead"
    if e.high is not None and e.high < 1.0 - ALIKE:
        return "behind"
    return "even"


def text(row: Mapping[str, Any], *, spread: bool = True) -> str:
    """A value and its interval, `1.74 [1.10, 2.76]`, `>3.20 [2.10, inf]`; the note where there is no value."""
    mean, low, high = row["mean"], row["low"], row["high"]
    if mean is None:
        return str(row["note"])
    sign = "" if row["sign"] == "=" else row["sign"]
    if not spread or (low is None and high is None):
        return f"{sign}{mean:.2f}"
    return f"{sign}{mean:.2f} [{'0' if low is None else _short(low)}, {'inf' if high is None else _short(high)}]"


def _short(bound: float) -> str:
    """A bound in few characters: the interval of few runs that differ much reaches far."""
    return f"{bound:.2f}" if bound < 1000 else ">999"


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of a stored table and its facts; UserError where there is none."""
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{folder}: no {FILE} here; bench bridge and bench regimes make it")
    facts = {key.decode(): json.loads(value) for key, value in (pq.read_metadata(path).metadata or {}).items()
             if key != b"ARROW:schema"}  # fmt: skip
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows, facts
