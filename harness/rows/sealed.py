"""Checks of Parquet files: of their bytes against digests (`harness/store.py`), and of their facts against a form.

Files of earlier releases and of other programs have no digests, so only their form is checked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.policy.types import UserError
from harness.store import whole

WAY_OUT = "delete its folder and run again"
MOST_SHOWN = 60  # characters of a wrong value
WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", None: "null"}


class Damaged(UserError):
    """The error for a stored file that is damaged, or that is not of the form in which the bench writes it."""


class Facts(dict[str, Any]):
    """Facts of a file, by key; a missing key raises Damaged. `where` names the file, or a table within its facts."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        super().__init__((key, _told(f"{where}: {key}", value)) for key, value in values.items())
        self.where = where

    def __missing__(self, key: str) -> Any:
        raise Damaged(f'{self.where}: "{key}" is missing; {WAY_OUT}')


def _told(where: str, value: Any) -> Any:
    """Convert a dict, or each dict within a list, to Facts. The `where` of each names its place in the file."""
    if isinstance(value, dict):
        return Facts(where, value)
    if isinstance(value, list):
        return [_told(f"{where} {i + 1}", x) if isinstance(x, dict | list) else x for i, x in enumerate(value)]
    return value


def intact(path: Path, *, rows: bool) -> None:
    """Check a file's footer, and with `rows` also its rows, against its digests; do nothing if it has none.

    Raises Damaged, and OSError if the file cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # one look, as a writer may replace it at any instant
        raise Damaged(f"{path}: not a file; move it away and run again")
    if not whole(path, rows=rows):
        raise Damaged(f"{path}: damaged: its bytes are not those that were written; {WAY_OUT}")


# ------------------------------------------------------------------ facts and columns


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error that the block raises while reading a file into a UserError of one line that names the file.

    FileNotFoundError passes unchanged. A file on a network file system that was just replaced raises it too.
    """
    try:
        yield
    except (UserError, FileNotFoundError):
        raise
    except PermissionError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.ESTALE:  # on a network file system
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
        raise Damaged(f"{path}: not a Parquet file of bench; {WAY_OUT}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, MemoryError, pa.ArrowException):
        raise Damaged(f"{path}: not a Parquet file of bench; {WAY_OUT}") from None


def facts(path: Path, form: Mapping[str, Any]) -> Facts:
    """Read the facts in a file's footer and check them against `form` (see `fault`).

    Raises Damaged, and FileNotFoundError.
    """
    with reading(path):
        intact(path, rows=False)
        stored = pq.read_metadata(path).metadata or {}
        ours = (key for key in stored if not key.startswith((b"ARROW", b"pandas")))
        about = {key.decode(): json.loads(stored[key]) for key in ours}
    for key, value in about.items():
        if key in form and (wrong := fault(value, form[key], key)):
            raise Damaged(f"{path}: {wrong}; {WAY_OUT}")
    return Facts(str(path), about)


def fault(value: Any, form: Any, name: str) -> str:
    """Describe how a value departs from a form, beginning with `name`; empty if it has the form.

    A form is a type, None, or a tuple of alternative forms. [form] is a list of any length, [form, form] a list of two.
    {str: form} is a table with any keys. {"key": form} is a table whose named keys, if present, have these forms. A
    frozenset has the allowed words. Where a form is float, a whole number is allowed too.
    """
    if isinstance(form, tuple):
        if type(value) in form or (value is None and None in form):
            return ""
        faults = [fault(value, part, name) for part in form if _is_like(value, part)]
        deeper = [wrong for wrong in faults if not wrong.startswith(f"{name} is ")]
        if deeper:  # "": it has this form; else the fault of a part
            return min(deeper, key=len)
    elif _is_like(value, form):
        odd = ((x, part, where) for x, part, where in _inside(value, form, name) if type(x) is not part)
        return next((wrong for x, part, where in odd if (wrong := fault(x, part, where))), "")
    text = json.dumps(value)
    return f"{name} is {text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + '...'}, not {_words(form)}"


def _inside(value: Any, form: Any, name: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield each item of a list or table for which `form` has a form: the item, its form and its name."""
    match form:
        case [_, _, *_]:
            yield from ((x, part, name) for x, part in zip(value, form, strict=True))
        case [part]:
            yield from ((x, part, f"item {i + 1} of {name}") for i, x in enumerate(value))
        case dict():
            for key, x in value.items():
                if key in form or str in form:
                    yield x, form.get(key, form.get(str)), f"{name}.{key}"


def _is_like(value: Any, form: Any) -> bool:
    """Tell whether a value has the type that a form requires. The items within the value are not checked."""
    match form:
        case tuple():
            return any(_is_like(value, part) for part in form)
        case [_, _, *_]:
            return isinstance(value, list) and len(value) == len(form)
        case list() | dict():
            return isinstance(value, type(form))
        case frozenset():
            return isinstance(value, str) and value in form
        case type():
            return type(value) is form or (form is float and type(value) is int)
    return value is form


def _words(form: Any) -> str:
    match form:
        case tuple():
            return " or ".join(_words(part) for part in form)
        case frozenset():
            return f"one of {', '.join(sorted(form))}"
        case list():
            return f"a list of {len(form)}" if len(form) > 1 else "a list"
        case dict():
            return "a table"
    return WORDS[form]


def columns(path: Path, table: pa.Table, form: pa.Schema, absent: frozenset[str] = frozenset()) -> None:
    """Check that a table has each column of a schema once, of its type, and without nulls that the schema forbids.

    A column may be dictionary-encoded or not. Columns in `absent` may be missing. Raises Damaged.
    """
    there = Counter(table.column_names)
    for field in form:
        times = there[field.name]
        if times == 1:
            column = table.column(field.name)
            if column.type != field.type and spelt(column.type) != spelt(field.type):
                raise Damaged(f"{path}: column {field.name} is of {column.type}, not {field.type}; {WAY_OUT}")
            if column.null_count and not field.nullable:
                row = column.is_null().index(True).as_py()
                raise Damaged(f"{path}: row {row}: {field.name} is null; {WAY_OUT}")
        elif times or field.name not in absent:
            raise Damaged(f"{path}: column {field.name} is {'there twice' if times else 'missing'}; {WAY_OUT}")


def filled(path: Path, table: pa.Table, form: pa.Schema) -> pa.Table:
    """Return a table with the columns of a schema, in the schema's order.

    Missing columns are added with nulls, for files of earlier releases. Only nullable columns may be missing. Raises
    Damaged.
    """
    columns(path, table, form, frozenset(field.name for field in form if field.nullable))
    there = set(table.column_names)
    for field in form:
        if field.name not in there:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(form.names)


def spelt(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionary encoding: for a dictionary, the type of its values.

    A list becomes `pa.list_` of its values' type; other types stay.
    """
    if pa.types.is_dictionary(kind):
        return spelt(kind.value_type)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_type)
    return kind
