"""Columns and other results read from a table, each cached for as long as the table exists."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyarrow as pa

P = ParamSpec("P")
T = TypeVar("T")


def once(work: Callable[Concatenate[pa.Table, P], T]) -> Callable[Concatenate[pa.Table, P], T]:
    """Cache a function of a table and further arguments; the cached results are dropped with the table.

    Callers must not change the results.
    """
    known: dict[int, tuple[weakref.ref[pa.Table], dict[tuple[Any, ...], T]]] = {}

    @wraps(work)
    def kept(table: pa.Table, /, *args: P.args, **kwargs: P.kwargs) -> T:
        at = id(table)
        if at not in known:
            known[at] = weakref.ref(table, lambda _: known.pop(at, None)), {}
        answers, key = known[at][1], (*args, *sorted(kwargs.items()))
        if key not in answers:
            answers[key] = work(table, *args, **kwargs)
        return answers[key]

    return kept


@once
def column(table: pa.Table, name: str) -> list[Any]:
    """Return a column as Python's values."""
    array = table[name].combine_chunks()
    if pa.types.is_dictionary(array.type):
        words = [*array.dictionary.to_pylist(), None]
        return [words[code] for code in array.indices.fill_null(-1).to_numpy().tolist()]
    values: list[Any] = array.to_pylist() if array.null_count else array.to_numpy(zero_copy_only=False).tolist()
    return values


@once
def places(table: pa.Table) -> dict[tuple[str, str, str], list[int]]:
    """Return the row indices for each combination of label, definition and `over`."""
    places: dict[tuple[str, str, str], list[int]] = {}
    for i, key in enumerate(zip(*(column(table, name) for name in ("label", "definition", "over")), strict=True)):
        places.setdefault(key, []).append(i)
    return places


def along(table: pa.Table) -> str:
    """Return the name of the column along which curves are drawn: "x" if the table has it, else "rate_scale"."""
    return "x" if "x" in table.column_names else "rate_scale"
