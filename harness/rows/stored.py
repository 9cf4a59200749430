"""The kinds of files stored in addition to runs (`harness/store.py`), and stamps of the files that a result uses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.policy.types import UserError
from harness.rows import forms, record, tidy
from harness.store import Facts, Kind

LOST = (OSError, UserError)  # the second: damaged, or of a later release
Stamp = list[int] | None  # bytes, and ns of the last change; None: no file


def stamp(path: Path) -> Stamp:
    """Return a file's size in bytes and the time of its last change in ns; None if there is no file."""
    with suppress(OSError):
        about = path.stat()
        return [about.st_size, about.st_mtime_ns]
    return None


def unchanged(stamps: Mapping[str, Stamp], root: Path = Path()) -> bool:
    """Tell whether files still have these stamps. `root` is the folder to which their paths are relative."""
    return all(stamp(root / path) == at for path, at in stamps.items())


def _tables(form: pa.Schema, rows: Callable[[Path], object] = lambda _: None) -> Kind[pa.Table]:
    """Return the kind (`store.Kind`) of stored tables that have the columns of a form.

    A table's footer stores the inputs from which the table was made, except the input "rows". The function `rows`
    computes that input from the table's path.
    """

    def write(path: Path, table: pa.Table, inputs: Facts) -> None:
        record.write_table(path, table, {key: value for key, value in inputs.items() if key != "rows"})

    return Kind(partial(record.table, form=form), write, lambda at: {**record.footer(at), "rows": rows(at)}, LOST)


def _note(path: Path) -> dict[str, Any]:
    """Read a note, a JSON object that may have stamps of files.

    Raises ValueError for any other JSON, or if one of the files has changed since.
    """
    note = json.loads(path.read_bytes())
    if not isinstance(note, dict) or not unchanged(dict(note.get("files", ()))):
        raise ValueError(path)
    return note


def _jot(path: Path, note: Facts, inputs: Facts) -> None:
    record.write_bytes(path, record.dumps({**note, **inputs}).encode())


RUNS: Kind[Any] = Kind(record.read, record.write, record.whole, LOST)  # read as a table, written as batches
SCORES = Kind(tidy.stored, record.write_table, record.footer, LOST)
LEADS = _tables(forms.LEAD_COLUMNS)
SOLO = _tables(record.SOLO_COLUMNS, lambda path: pq.read_metadata(path).num_rows)
SIZES = _tables(forms.SIZE_COLUMNS, lambda path: record.table(path, forms.SIZE_COLUMNS).to_pylist())
NOTES: Kind[Facts] = Kind(_note, _jot, _note, (OSError, ValueError, TypeError))
TEXTS = Kind(lambda path: path.read_text("utf-8"), lambda path, text, _: record.write_bytes(path, text.encode()))
