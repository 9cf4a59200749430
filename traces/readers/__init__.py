"""Readers of released trace formats: a file a format, found by its name (`bench trace convert --from NAME FILE`).

The first line of a reader's docstring says what it reads, and FILES the names of such files, as patterns. Its
`read(path)` makes a canonical table of a file; further keyword parameters are the options of `bench trace convert` that
it takes, and `**asked` passes any on to `traces.convert.convert`.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Readers on hand: the directory is the registry."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def find(name: str) -> Any:
    """Import the module of a reader; UserError where there is none, or its file is broken."""
    from harness.policy.types import UserError

    if name not in names():
        raise UserError(f'no reader "{name}" (there is: {", ".join(names())})')
    try:
        reader = import_module(f"{__name__}.{name}")
    except Exception as error:  # whatever is wrong in that file is told of that file
        raise UserError(f"traces/readers/{name}.py is broken: {type(error).__name__}: {error}") from error
    if not callable(getattr(reader, "read", None)):
        raise UserError(f"traces/readers/{name}.py is broken: it has no function `read`")
    return reader


def read(name: str, path: Path, /, **asked: Any) -> pa.Table:
    """Read a file by the reader of this name; UserError for what the reader does not take, and for a bad file."""
    from harness.policy.types import UserError

    reader = find(name).read
    takes = signature(reader).parameters
    if all(param.kind is not Parameter.VAR_KEYWORD for param in takes.values()):
        for option in asked.keys() - takes.keys():
            raise UserError(f"the reader {name} takes no --{option.replace('_', '-')}: its format leaves no choice")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    table: pa.Table = reader(path, **asked)
    return table


def logs(folder: Path) -> dict[str, list[Path]]:
    """Find the files below a folder that a reader knows by their names, by reader."""
    from harness.policy.types import UserError

    by_reader = dict[str, list[Path]]()
    for name in names():
        with suppress(UserError):
            patterns = getattr(find(name), "FILES", ())
            if files := sorted({path for pattern in patterns for path in folder.rglob(pattern)}):
                by_reader[name] = files
    return by_reader


def listing() -> list[tuple[str, str]]:
    """Each reader and what it reads, or how its file is broken."""
    from harness.policy.types import UserError

    lines = []
    for name in names():
        try:
            lines.append((name, (find(name).__doc__ or "").strip().partition("\n")[0]))
        except UserError as error:
            lines.append((name, str(error)))
    return lines
