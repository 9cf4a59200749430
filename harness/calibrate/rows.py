"""The measurements to which every table is fitted.

A `Measurement` is a line of a journal (raw.jsonl), which probes, servers and the torch engine write. `Rows` stores all
measurements of one quantity as columns, which suits the public profiles with their 20,000 rows for each GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from harness.policy.types import UserError
from probe import conduct

F8 = NDArray[np.float64]
Mask = NDArray[np.bool_]
RAW, HOST = conduct.RAW, conduct.HOST
CORE = ("quantity", "at", "seconds", "n", "source")


class Measurement(NamedTuple):
    """A measurement of a quantity, in seconds, under the conditions `at`."""

    quantity: str
    at: Mapping[str, Any]
    seconds: float  # the median
    n: int = 1  # measurements that it is the median of
    source: str = ""  # a probe, a round or a scripted run: what a second call need not do again
    facts: Mapping[str, Any] = {}  # beside it: bytes, tokens of context, seconds alone, cores that others took

    @property
    def held_out(self) -> bool:
        """True for a row that is left out of fits, so that their errors can be checked on it."""
        return bool(self.at.get("held"))

    @property
    def text(self) -> str:
        """The measurement in words, on one line."""
        return f"{self.quantity} " + ", ".join(f"{name} {value}" for name, value in self.at.items() if value)

    @property
    def key(self) -> tuple[str, str]:
        """The key that identifies a measurement, the same in all sources."""
        return self.quantity, json.dumps(dict(self.at), sort_keys=True)


def measured(
    quantity: str, at: Mapping[str, Any], seconds: Sequence[float], source: str = "", **facts: Any
) -> Measurement:
    """Return a measurement whose seconds are the median of `seconds`; the fact `all` lists every value."""
    return Measurement(
        quantity, dict(at), float(median(seconds)), len(seconds), source, {"all": list(seconds), **facts}
    )


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a journal, without a last line that was cut off.

    Raises UserError for rows of an older form.
    """
    try:
        return list(conduct.lines(path))
    except conduct.OldRows as error:
        raise UserError(str(error)) from None


def append(path: Path, *made: Mapping[str, Any]) -> None:
    """Append lines to a journal and sync them to the disk.

    If the file ends in a line that was cut off, the first appended line begins on a new line.
    """
    with conduct.opened(path) as file:
        for line in made:
            conduct.write(file, json.dumps(line))


def read(path: Path) -> list[Measurement]:
    """Read the measurements of a journal: its lines that have seconds. Raises UserError for rows of an older form."""
    known = list[Measurement]()
    for line in lines(path):
        if "quantity" in line and "seconds" in line:
            more = {k: v for k, v in line.items() if k not in {*CORE, "facts"}} | (line.get("facts") or {})
            known.append(Measurement(line["quantity"], line["at"], line["seconds"], line["n"], line["source"], more))
    return known


class Journal:
    """A file of measurements: it is read when the object is created, and new measurements are appended to it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.rows = path, read(path)

    def add(self, *rows: Measurement) -> None:
        """Append rows to the file, and keep them in memory."""
        append(self.path, *(row._asdict() for row in rows))
        self.rows += rows


def of(rows: Iterable[Measurement], quantity: str, **at: Any) -> Iterator[Measurement]:
    """Yield the rows of a quantity whose conditions include `at`."""
    return (row for row in rows if row.quantity == quantity and at.items() <= row.at.items())


def disturbed(rows: Sequence[Measurement], most: float) -> Iterator[str]:
    """Yield a warning with the number of rows that other processes disturbed; yield nothing if there are none.

    A row is disturbed if other processes took more than `most` cores during the measurement.
    """
    cores = [row.facts["other_cores"] for row in rows if row.facts["other_cores"] > most]
    if cores:
        yield (
            f"{len(cores)} of {len(rows)} measurements while others took more than {most:g} cores "
            f"(at most {max(cores):.2f}): measure again, in another folder, on a quiet machine"
        )


class Rows(NamedTuple):
    """The measurements of one quantity as columns, with a mask of held-out rows for each reason to hold rows out."""

    at: Mapping[str, Any]  # arrays by name
    seconds: F8
    held_out: Mapping[str, Mask]  # keyed by reason; a row may have several

    @property
    def out(self) -> Mask:
        """Mask of the rows that are held out for any reason."""
        return cast("Mask", np.logical_or.reduce(list(self.held_out.values())))

    @property
    def fitted(self) -> Rows:
        """The rows that are not held out."""
        return self.pick(~self.out)

    def pick(self, rows: Mask | NDArray[np.int64]) -> Rows:
        """Return some of the rows, by mask or index."""
        at, held = ({k: v[rows] for k, v in columns.items()} for columns in (self.at, self.held_out))
        return Rows(at, self.seconds[rows], held)

    def few(self, most: int) -> Rows:
        """Return at most `most` of the rows that are not held out; the random choice is the same each time."""
        fitted = np.flatnonzero(~self.out)
        return self.pick(np.sort(np.random.default_rng(0).permutation(fitted)[:most]))


def columns(rows: Sequence[Measurement], *names: str) -> dict[str, F8]:
    """Return the conditions `names` of measurements as columns, by name."""
    return {name: np.array([row.at[name] for row in rows], np.float64) for name in names}


def seconds(rows: Sequence[Measurement]) -> F8:
    """Return the seconds of rows."""
    return np.array([row.seconds for row in rows], np.float64)
