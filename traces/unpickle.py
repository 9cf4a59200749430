"""Pickles as plain data: only classes that the caller names are rebuilt, as records without any code of theirs.

A pickle is a program; the stock reader runs it. This one imports nothing: an allowed class name becomes `Record`
whatever module claims it, every other global is refused before it is looked up.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from harness.policy.types import UserError


class Record:
    """The attributes of one pickled object."""


def unpickle(path: Path, classes: frozenset[str]) -> Any:
    """Load a pickle whose only globals are classes of these names; UserError for any other, and for a broken file."""

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> type[Record]:
            if name not in classes:
                allowed = ", ".join(sorted(classes)) or "plain data"
                raise UserError(f"{path}: refuses to load {module}.{name} (a trace pickle may hold {allowed} only)")
            return Record

        def persistent_load(self, pid: Any) -> Any:
            raise UserError(f"{path}: refuses to load an outside object {pid!r}")

    try:
        with path.open("rb") as file:
            return Reader(file).load()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(f"{path}: not a pickle of records: {error}") from None
