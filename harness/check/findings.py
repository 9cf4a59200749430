"""Findings of a check: breaches of laws, failures with the command that repeats them, and wrong names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from harness.policy.fields import meant
from harness.policy.types import UserError


@dataclass(frozen=True, slots=True)
class Failure:
    """A law that a system or an engine breaks, with the breach, its decision, and the command that repeats it."""

    law: str
    message: str
    event: int | None  # index of the decision, 0 = "start"
    command: str


class Breach(NamedTuple):
    """A breach of a law, and the decision at which it occurs."""

    what: str
    event: int | None = None


def known(kind: str, name: str | None, names: Iterable[str]) -> None:
    """Raise UserError, with a suggestion, if a name is given and is not one of `names`."""
    if name is not None and name not in (have := list(names)):
        raise UserError(f'no {kind} "{name}"{meant(name, have)} ({", ".join(have)})')
