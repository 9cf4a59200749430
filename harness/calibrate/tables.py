"""The result of a calibration: a cost table in TOML, notes on it, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs import quantities

F8 = NDArray[np.float64]
Quantity = dict[str, Any]
ACROSS = 14  # numbers in a row of a long list
LONG = 24  # the most numbers that stand in one row


class Table(NamedTuple):
    """A cost table, and a function that returns notes on it.

    The function takes the path to which the table was written.
    """

    name: str  # is the name of its file: h200-measured
    file: Mapping[str, Any]
    notes: Callable[[Path], Iterable[str]]


def error(predicted: F8, measured: F8) -> dict[str, float | int]:
    """Return the median and P95 of the relative error of predicted seconds, and the number of values."""
    e = np.abs(predicted / measured - 1)
    return {"median": round(float(np.median(e)), 4), "p95": round(float(np.quantile(e, 0.95)), 4), "n": len(e)}


def check(path: Path, file: Mapping[str, Any]) -> None:
    """Check a written table by reading it as a user's table. Raises UserError that names the first wrong key."""
    quantities.forget()
    if "steps" in file:
        quantities.machine(str(path))
    else:
        quantities.quantities(file["kind"], str(path))


def dumps(file: Mapping[str, Any]) -> str:
    """Return a cost table as TOML text: a section for each nested table, and errors inline.

    Grids of factors are written with 14 numbers on each line, so that people can read them. The library tomli-w would
    write one number on each line.
    """

    def section(name: str, table: Mapping[str, Any]) -> Iterable[str]:
        plain = {k: v for k, v in table.items() if not isinstance(v, dict) or k in quantities.ERRORS}
        if plain or not table:
            if name:
                yield f"\n[{name}]\n"
            yield from (f"{_key(k, '_-')} = {_value(v)}\n" for k, v in plain.items())
        for k, v in table.items():
            if k not in plain:
                yield from section(f"{name}.{_key(k, '_-')}" if name else _key(k, "_-"), v)

    return "".join(section("", file)).lstrip("\n")


def _key(name: str, beside: str) -> str:
    return name if "".join(c for c in name if c not in beside).isalnum() else json.dumps(name)


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value, ensure_ascii=False)
        case float():
            return repr(value)
        case dict():
            return "{ " + ", ".join(f"{_key(k, '_')} = {_value(v)}" for k, v in value.items()) + " }"
        case list() if len(value) <= LONG:
            return "[" + ", ".join(map(_value, value)) + "]"
        case list():
            text = [_value(v) for v in value]
            lines = (", ".join(text[i : i + ACROSS]) for i in range(0, len(text), ACROSS))
            return "[\n" + "".join(f"    {line},\n" for line in lines) + "]"
    return str(value)
