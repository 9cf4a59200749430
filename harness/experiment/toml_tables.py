"""Tables of a TOML file become dataclasses; a key too many, too few or of the wrong kind is named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from harness.experiment.spec import meant
from harness.policy.types import UserError

T = TypeVar("T")


def made(kind: type[T], where: str, data: Mapping[str, Any]) -> T:
    """A dataclass of TOML values, lists as tuples; UserError for a key too many or too few."""
    takes = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    if unknown := next((key for key in data if key not in takes), None):
        raise UserError(f'{where}unknown key "{unknown}"{meant(unknown, takes)}')
    needs = (name for name, one in takes.items() if one.default is MISSING and one.default_factory is MISSING)
    if missing := next((key for key in needs if key not in data), None):
        raise UserError(f'{where}the key "{missing}" is missing')
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


def table(name: str, value: Any) -> Mapping[str, Any]:
    """A table; UserError for anything else."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {value!r}, not a table ([{name}])")
    return value


def tables(name: str, value: Any) -> Iterable[Mapping[str, Any]]:
    """A list of tables; UserError for anything else."""
    if not isinstance(value, list):
        raise UserError(f"{name} is {value!r}, not a list of tables ([[{name}]])")
    return [table(name, one) for one in value]
