"""Experiments as data: TOML files read into dataclasses; a mistake names the file and the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from harness import toml
from harness.policy.fields import meant
from harness.policy.types import UserError

T = TypeVar("T")


def names(folder: Path) -> list[str]:
    """What comes with the bench in a folder, by name."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def path_of(name: str, folder: Path, kind: str) -> Path:
    """The file of a name, or the path of one's own; UserError where there is none of that name."""
    if name.endswith(".toml"):
        return Path(name)
    if name not in (have := names(folder)):
        raise UserError(f'no {kind} "{name}"{meant(name, have)} (there is: {", ".join(have)}; or a .toml)')
    return folder / f"{name}.toml"


def read(path: Path) -> dict[str, Any]:
    """The tables of a file."""
    return toml.tables(path)


def load(name: str, folder: Path, kind: str, make: Callable[[str, dict[str, Any]], T]) -> T:
    """What `make` makes of a file's name and tables; UserError names the file before the key of a mistake."""
    path = path_of(name, folder, kind)
    rows = read(path)
    try:
        return make(path.stem, rows)
    except UserError as error:
        raise UserError(f"{path.name}: {error}") from None


def made(kind: type[T], where: str, data: Mapping[str, Any]) -> T:
    """A dataclass of TOML values, lists as tuples; UserError for a key too many or too few."""
    takes = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    if unknown := next((key for key in data if key not in takes), None):
        raise UserError(f'{where}unknown key "{unknown}"{meant(unknown, takes)}')
    needs = (name for name, one in takes.items() if one.default is MISSING and one.default_factory is MISSING)
    if missing := next((key for key in needs if key not in data), None):
        raise UserError(f'{where}the key "{missing}" is missing')
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


def each(kind: type[T], name: str, value: Any) -> tuple[T, ...]:
    """A list of tables as dataclasses."""
    return tuple(made(kind, f"{name} {i}: ", one) for i, one in enumerate(tables(name, value), 1))


def table(name: str, value: Any) -> Mapping[str, Any]:
    """A table; UserError for anything else."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {value!r}, not a table ([{name}])")
    return value


def tables(name: str, value: Any) -> list[Mapping[str, Any]]:
    """A list of tables; UserError for anything else."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise UserError(f"{name} is {value!r}, not a list of tables ([[{name}]])")
    return value
