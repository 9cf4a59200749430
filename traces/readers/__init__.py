"""Readers of released trace formats, one module per format, found by name (`bench trace convert --from NAME FILE`).

The first line of a reader's docstring says what it reads. FILES has patterns of the names of such files. KEYS has one
set of names for each form of the format; a record of that form has all names of the set. MARK is a word that such a
file must contain as well.

A reader defines a map of columns:

    COLUMNS     for a table of requests in order of arrival: canonical name -> the table's column (traces.convert)
    FIELDS      for a log with records in any order: canonical name -> the record's field (traces.log)
    ALSO        further fields that `skip` and `expand` use; if given, other columns of a CSV or Parquet are not read
    skip        a function of a record: None keeps it, "" says that it is no request, a text says why to leave it out
    expand      a function of the records with their lines, which may split records or add fields
    OPTIONS     options of the conversion that the format fixes; `options(path)` if they depend on the file

If a map of columns is not enough, the reader defines a function `read(path)` that makes a canonical table of a file.
Its keyword parameters are the options of `bench trace convert` that it takes. A reader with FOLDER = True reads folders
too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.guarded import reading, regular

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = Path(__file__).parent
HEAD_BYTES = 1 << 20  # a MARK is looked for in these


def names() -> list[str]:
    """List the names of the readers, one for each module of this folder."""
    return sorted(path.stem.replace("_", "-") for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def find(name: str) -> Any:
    """Import the module of a reader; UserError if there is none, or if its file is broken."""
    from harness.policy.types import UserError

    if name not in names():
        raise UserError(f'no reader "{name}" (there is: {", ".join(names())})')
    stem = name.replace("-", "_")
    try:
        reader = import_module(f"{__name__}.{stem}")
    except Exception as error:  # any error in the file is reported with its name
        raise UserError(f"traces/readers/{stem}.py is broken: {type(error).__name__}: {error}") from error
    if not any(hasattr(reader, name) for name in ("read", "COLUMNS", "FIELDS")):
        raise UserError(f"traces/readers/{stem}.py is broken: it has no COLUMNS, no FIELDS and no function `read`")
    return reader


def read(name: str, path: Path, /, **asked: Any) -> pa.Table:
    """Read a file with the reader `name`; UserError for an option that the reader does not take, and for a bad file."""
    from harness.policy.types import UserError

    module = find(name)
    takes = signature(module.read).parameters if hasattr(module, "read") else None
    if takes and all(param.kind is not Parameter.VAR_KEYWORD for param in takes.values()):
        for option in asked.keys() - takes.keys():
            raise UserError(f"the reader {name} takes no --{option.replace('_', '-')}: its format leaves no choice")
    regular(path)
    if path.is_dir() and not getattr(module, "FOLDER", False):
        raise UserError(f"{path}: a folder; {name} reads a file")
    with reading(path):
        table: pa.Table = module.read(path, **asked) if takes else _mapped(module, path, asked)
    return table


def _mapped(module: Any, path: Path, asked: dict[str, Any]) -> pa.Table:
    """Read a file with a reader that defines a map of columns or fields instead of a function `read`."""
    from traces import convert, log

    known: dict[str, Any] = module.options(path) if hasattr(module, "options") else getattr(module, "OPTIONS", {})
    if hasattr(module, "COLUMNS"):
        return convert.convert(path, module.COLUMNS, **known | asked)
    functions: dict[str, Any] = {key: getattr(module, key, None) for key in ("skip", "expand")}
    return log.read(path, module.FIELDS, also=getattr(module, "ALSO", None), **functions, **known | asked)


def known(path: Path) -> str | None:
    """Return the name of the reader whose format a file has; None if no reader knows it.

    The file's first record and its first bytes decide.
    """
    from traces import records

    if path.is_dir():
        return None
    with reading(path):
        first = next(iter(records.records(path)))[1]
        with records.opened(path) as file:
            head = file.read(HEAD_BYTES)
    fits = {name: len(mark) for name in names() if (mark := _mark(find(name), first, head)) is not None}
    return max(fits, key=fits.__getitem__, default=None)


def _mark(module: Any, first: Mapping[str, Any], head: bytes) -> bytes | None:
    """Return the MARK of a reader (b"" if it has none) if a file is in the reader's format, else None.

    The file must contain the mark, and its first record must have all names of one set in the reader's KEYS.
    """
    mark = getattr(module, "MARK", "").encode()
    return mark if mark in head and any(keys <= first.keys() for keys in getattr(module, "KEYS", ())) else None


def converted(path: Path, **asked: Any) -> tuple[pa.Table, str]:
    """Convert any log to a canonical table, and return a line that says how.

    The reader that knows the log's format reads it. If no reader does, the columns are found by their usual names.
    """
    from traces import convert, schema

    regular(path)
    name = known(path)
    rows = read(name, path, **asked) if name else convert.table(path, **asked)
    return rows, f"{path.name} read as {f'a log of {name}' if name else 'a table'}{summary(schema.metadata(rows))}"


def summary(meta: Mapping[str, Any]) -> str:
    """Return words that say how a log's timestamps were read, and which of its rows were left out."""
    from traces import usual

    unit = usual.UNIT_NAMES.get(meta.get("time_unit", ""), "dates (UTC where they have no zone)")
    report = f", times guessed to be {unit} (--time-unit)" if meta.get("time_unit_guessed") else ""
    if left := meta.get("dropped"):
        report += "; left out: " + ", ".join(f"{count:,} {reason}" for reason, count in left.items())
    if bare := meta.get("without_blocks"):
        report += f"; {bare:,} prompts without all of their blocks"
    return report


def logs(folder: Path) -> dict[str, list[Path]]:
    """Find the files below a folder whose names match a reader's patterns, keyed by reader."""
    from harness.policy.types import UserError

    by_reader = dict[str, list[Path]]()
    for name in names():
        with suppress(UserError):
            patterns = getattr(find(name), "FILES", ())
            if files := sorted({path for pattern in patterns for path in folder.rglob(pattern)}):
                by_reader[name] = files
    return by_reader
