"""Raw columns of a file, and the selection of the rows of served requests, each request id once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.policy.types import UserError
from traces import schema, usual


class Source(NamedTuple):
    """Raw columns of a file, and the line of each row."""

    path: Path
    columns: Mapping[str, pa.Array]
    lines: NDArray[np.int64]

    def where(self, row: int) -> str:
        """Return `file:line` of a row, for messages."""
        return f"{self.path}:{self.lines[row]}"

    def take(self, rows: NDArray[np.int64]) -> Source:
        """Select rows, in the order given."""
        columns = {name: values.take(pa.array(rows)) for name, values in self.columns.items()}
        return self._replace(columns=columns, lines=self.lines[rows])

    def only(self, keep: NDArray[np.bool_], left: Mapping[str, int]) -> Source:
        """Select the rows for which `keep` is true.

        Raises UserError if no row is left; the message has the counts in `left`.
        """
        if not keep.any():
            why = ", ".join(f"{n} {reason}" for reason, n in left.items())
            raise UserError(f"{self.path}: no row is left of {len(keep)}: {why}")
        return self.take(np.flatnonzero(keep))


def answered(source: Source, columns: Mapping[str, str], left: dict[str, int]) -> Source:
    """Return the rows of requests that were served, without rows that repeat an id.

    Each of the other rows is counted in `left`, under the first reason to leave it out.
    """
    keep = np.ones(len(source.lines), bool)
    if (column := columns.get("status")) is not None:
        for row, status in enumerate(source.columns[column].to_pylist()):
            if not usual.served(status):
                keep[row] = False
                count(left, f"with status {str(status).strip()[:20]}")
    if (column := columns.get("request_id")) is not None:
        known = set[Any]()
        for row in np.flatnonzero(keep).tolist():
            if (name := source.columns[column][row].as_py()) in known:
                keep[row] = False
                count(left, schema.AGAIN)
            elif name not in {None, ""}:
                known.add(name)
    return source if keep.all() else source.only(keep, left)


def count(left: dict[str, int], reason: str, rows: int = 1) -> None:
    """Add `rows` to the number of rows that `left` counts under a reason."""
    if rows:
        left[reason] = left.get(reason, 0) + rows
