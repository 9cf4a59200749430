"""What a user may set of a system: each field states its default and its domain where it is declared.

order: str = choice("moore-hodgson", "fcfs")    the first one is the default
idle_s: float = number(45.0, 1, 600)            both ends belong to the range
z: float = number(2.0, 0, 5, tuned=True)        what its paper leaves open: `bench tune` draws it
evict: str = choice("pressure", "out", tuned=True, undrawn=("never",))    a part switched off is never drawn
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any, NamedTuple

from harness.policy.types import Option

DOMAIN = "domain"  # key of a dataclass field's metadata


class Domain(NamedTuple):
    """The values of a field: some choices, or a range of numbers; anything of the default's type where neither is."""

    default: Any  # inspect.Parameter.empty where a value must be given
    choices: tuple[Option, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    tuned: bool = False  # `bench tune` draws it: what the paper leaves open, never what it states
    undrawn: tuple[Option, ...] = ()  # choices never drawn: a part switched off, or what no other system may do

    @property
    def stated(self) -> bool:
        """Whether the declaration says more than a type."""
        return bool(self.choices) or (self.least, self.most) != (-math.inf, math.inf)


def choice(default: Option, *others: Option, tuned: bool = False, undrawn: tuple[Option, ...] = ()) -> Any:
    """Declare a field of a dataclass that takes one of these values."""
    domain = Domain(default, (default, *others, *undrawn), tuned=tuned, undrawn=undrawn)
    return dataclasses.field(default=default, metadata={DOMAIN: domain})


def number(default: float, least: float, most: float, *, tuned: bool = False) -> Any:
    """Declare a field of a dataclass that takes a number from `least` to `most`."""
    return dataclasses.field(default=default, metadata={DOMAIN: Domain(default, (), least, most, tuned)})


def domains(make: type) -> dict[str, Domain]:
    """The fields of a system's class, in order of declaration; a class that is no dataclass states types only."""
    declared = dataclasses.fields(make) if dataclasses.is_dataclass(make) else ()
    stated = {one.name: one.metadata[DOMAIN] for one in declared if DOMAIN in one.metadata}
    takes = inspect.signature(make).parameters
    return {name: stated.get(name, Domain(one.default)) for name, one in takes.items() if name != "cluster"}
