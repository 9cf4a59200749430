"""Rows of a table that were served, each request once: by the columns of states and ids, where it has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.policy.types import UserError
from traces import schema, usual


class Source(NamedTuple):
    """Raw columns of a file, and the place of each row in it."""

    columns: Mapping[str, pa.Array]
    where: Callable[[int], str]
    line: Callable[[NDArray[np.int64]], NDArray[np.int64]]  # lines of some rows


def answered(path: Path, source: Source, columns: Mapping[str, str], left: dict[str, int]) -> Source:
    """Return the rows of requests that were served, without rows that repeat an id.

    The others are counted in `left`, each by the first reason to leave it out.
    """
    count = len(next(iter(source.columns.values())))
    keep = np.ones(count, bool)
    if (column := columns.get("status")) is not None:
        for row, status in enumerate(source.columns[column].to_pylist()):
            if not usual.served(status):
                keep[row] = False
                reason = f"with status {str(status).strip()[:20]}"
                left[reason] = left.get(reason, 0) + 1
    if (column := columns.get("request_id")) is not None:
        known = set[Any]()
        for row in np.flatnonzero(keep).tolist():
            if (name := source.columns[column][row].as_py()) in known:
                keep[row] = False
                left[schema.AGAIN] = left.get(schema.AGAIN, 0) + 1
            elif name not in {None, ""}:
                known.add(name)
    return source if keep.all() else only(path, source, keep, left)


def only(path: Path, source: Source, keep: NDArray[np.bool_], left: Mapping[str, int]) -> Source:
    """Return the rows of a source for which `keep` is true. Raises UserError if there are none."""
    if not keep.any():
        raise UserError(f"{path}: no row is left of {len(keep)}: " + ", ".join(f"{n} {why}" for why, n in left.items()))
    kept = np.flatnonzero(keep)
    columns = {name: values.take(pa.array(kept)) for name, values in source.columns.items()}
    return Source(columns, lambda row: source.where(int(kept[row])), lambda rows: source.line(kept[rows]))
