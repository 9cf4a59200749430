"""Checks of a trace's columns; the error names the first bad row and a way to correct it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness import spilled
from harness.policy.types import UserError

Where = Callable[[int], str]  # row -> "file:line"
MOST_TOKENS = np.iinfo(np.int32).max
MOST_S = 1e9  # nanoseconds of 63 bits end at 9.2e9 s


def times(seconds: NDArray[np.float64], where: Where, column: str, way_out: str) -> None:
    """Raise UserError for a time that is not finite or is negative."""
    _none(~np.isfinite(seconds), seconds, where, column, f"not a finite time ({way_out})")
    _none(seconds < 0, seconds, where, column, f"a negative time ({way_out})")


def reached(seconds: NDArray[np.float64], where: Where, column: str) -> None:
    """Raise UserError for a time later than `MOST_S` seconds."""
    _none(seconds > MOST_S, seconds, where, column, f"later than {MOST_S:g} s")


def ordered(
    seconds: NDArray[np.float64],
    where: Where,
    column: str,
    way_out: str,
    after_s: float = -np.inf,
    shown: NDArray[Any] | None = None,
) -> None:
    """Raise UserError for a time that is earlier than the time of the previous row.

    The first row is compared with `after_s`. `shown` has the timestamps as the file writes them. If it is given, the
    message shows these instead of seconds.
    """
    later = np.diff(seconds, prepend=after_s) < 0
    _none(later, seconds if shown is None else shown, where, column, f"earlier than the row before ({way_out})")


def tokens(counts: NDArray[np.int64], where: Where, column: str, way_out: str) -> None:
    """Raise UserError for a number of tokens that is below 1 or above `MOST_TOKENS`."""
    _none(counts < 0, counts, where, column, f"a negative number of tokens ({way_out})")
    _none(counts == 0, counts, where, column, f"no tokens at all ({way_out})")
    _none(counts > MOST_TOKENS, counts, where, column, f"more tokens than any model serves ({way_out})")


def names(values: list[str], codes: NDArray[Any], where: Where, column: str, way_out: str) -> None:
    """Raise UserError for a row whose name is empty or not printable; `codes` has each row's index into `values`."""
    bad = np.array([not (name and name.isprintable()) for name in values], bool)[codes]
    _none(bad, np.array(values, object)[codes], where, column, f"no name ({way_out})")


def unique(ids: NDArray[Any], where: Where, column: str) -> None:
    """Raise UserError for an id that occurs twice.

    To save memory, a long array of ids is checked in several parts.
    """
    if len(ids) <= spilled.MOST_HELD:
        _unique(ids, where, column)
    elif not _rising(ids):
        shares = -(-len(ids) // spilled.MOST_HELD)
        for k in range(shares):
            rows = np.concatenate(
                [z.start + np.flatnonzero(ids[z] % shares == k) for z in spilled.pieces(len(ids), ids)]
            )
            _unique(ids[rows], lambda row, rows=rows: where(int(rows[row])), column)  # type: ignore[misc]


def _rising(ids: NDArray[Any]) -> bool:
    """Tell whether each id is greater than the previous one, as in most files."""
    ends = [(ids[z][0], ids[z][-1], bool((ids[z][1:] > ids[z][:-1]).all())) for z in spilled.pieces(len(ids), ids)]
    return all(rises for *_, rises in ends) and all(a[1] < b[0] for a, b in pairwise(ends))


def _unique(ids: NDArray[Any], where: Where, column: str) -> None:
    order = np.argsort(ids, kind="stable")
    same = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if len(same):
        first, again = order[same[0] : same[0] + 2].tolist()
        raise UserError(f'{where(again)}: column "{column}" is {_show(ids[again])}, as in {where(first)} already')


def _none(bad: NDArray[np.bool_], values: NDArray[Any], where: Where, column: str, why: str) -> None:
    if bad.any():
        row = int(bad.argmax())
        raise UserError(f'{where(row)}: column "{column}" is {_show(values[row])}, {why}')


def _show(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) else value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
