"""Fields of a system or an engine that a user may set: each declaration states the default and the allowed values.

order: str = choice("moore-hodgson", "fcfs")    the first one is the default
idle_s: float = number(45.0, 1, 600)            both ends belong to the range
keep: str = by_model(0, 600)                    for some models: "a=60 b=0"; for all but some: "*=60 b=0"
z: float = number(2.0, 0, 5, tuned=True)        its paper states no value: `bench tune` draws one
evict: str = choice("pressure", "out", tuned=True, undrawn=("never",))    "never" switches a part off: never drawn

A user writes NAME[:PRESET][+FIELD=VALUE...]: `chunked:strict+tau=256`, `./mine.py+idle_s=5`,
`attach+urls=http://a:8000,http://b:8000/v1+key_env=KEY`. A value ends at the next +FIELD=, so it may contain colons,
commas and other plus signs. It is read as TOML, and a bare word as a string. A value in double quotes may contain
anything.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from harness.policy.types import Option, UserError

DOMAIN = "domain"  # key of a dataclass field's metadata
FIELD = re.compile(r"\+(?=[A-Za-z_]\w*=)")  # begins a field
BARE = re.compile(r"[+-]?(?:\.[0-9]+|[0-9]+\.)(?:[eE][+-]?[0-9]+)?")  # numbers that TOML does not know
MOST_SHOWN = 60  # characters of a wrong value
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


class Domain(NamedTuple):
    """The values that a field may have: some choices, numbers in a range, or else any value of the default's type."""

    default: Any  # inspect.Parameter.empty where a value must be given
    choices: tuple[Option, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    tuned: bool = False  # `bench tune` draws it: what the paper leaves open, never what it states
    undrawn: tuple[Option, ...] = ()  # choices never drawn: a part switched off, or what no other system may do

    @property
    def stated(self) -> bool:
        """True if the declaration states choices or a range, not only a type."""
        return bool(self.choices) or (self.least, self.most) != (-math.inf, math.inf)


def choice(default: Option, *others: Option, tuned: bool = False, undrawn: tuple[Option, ...] = ()) -> Any:
    """Declare a field of a dataclass that has `default` or one of `others` as its value."""
    domain = Domain(default, (default, *others, *undrawn), tuned=tuned, undrawn=undrawn)
    return dataclasses.field(default=default, metadata={DOMAIN: domain})


def number(default: float, least: float, most: float, *, tuned: bool = False) -> Any:
    """Declare a field of a dataclass that has a number from `least` to `most` as its value."""
    return dataclasses.field(default=default, metadata={DOMAIN: Domain(default, (), least, most, tuned)})


def by_model(least: float, most: float) -> Any:
    """Declare a field of a dataclass that has numbers for some models, as "a=60 b=0" or "*=60 b=0"; see `numbers`."""
    return dataclasses.field(default="", metadata={DOMAIN: Domain("", (), least, most)})


def numbers(system: Any, name: str, models: Iterable[str], default: float) -> dict[str, float]:
    """Return a number for each model: the number in the system's field `name`, or the default for models without one.

    The field was declared by `by_model`. A star means all models. If a model has two numbers, the later one applies.

    Raises UserError for an unknown model, text that is no number, and a number out of range. The error names the field
    and its wrong part.
    """
    domain = domains(type(system))[name]
    given = dict.fromkeys(models, default)
    for pair in getattr(system, name).split():
        model, _, value = pair.rpartition("=")
        if model not in {*given, "*"}:
            raise UserError(f'field {name}: no model "{model}"{meant(model, given)} (there are: {", ".join(given)})')
        try:
            number = float(value)
        except ValueError:
            raise UserError(f'field {name}: "{pair}" is not MODEL=NUMBER') from None
        if not domain.least <= number <= domain.most:
            raise UserError(f'field {name}: "{pair}" is not in [{domain.least:g}, {domain.most:g}]')
        given |= dict.fromkeys(given if model == "*" else [model], number)
    return given


def domains(make: type) -> dict[str, Domain]:
    """Return the domain of each field of a class, in order.

    A field without a declaration may have any value of its default's type.
    """
    declared = dataclasses.fields(make) if dataclasses.is_dataclass(make) else ()
    stated = {field.name: field.metadata[DOMAIN] for field in declared if DOMAIN in field.metadata}
    takes = inspect.signature(make).parameters
    return {name: stated.get(name, Domain(parameter.default)) for name, parameter in takes.items() if name != "cluster"}


# ------------------------------------------------------------------ asked for


class Asked(NamedTuple):
    """A parsed text NAME[:PRESET][+FIELD=VALUE...]."""

    name: str  # or the path of a .py
    preset: str | None = None
    fields: Mapping[str, Option] = {}

    def __str__(self) -> str:
        """Return the text that parses to this value, with fields in order of their names."""
        pairs = (f"+{name}={_written(value)}" for name, value in sorted(self.fields.items()))
        return self.name + (f":{self.preset}" if self.preset is not None else "") + "".join(pairs)


def asked(text: str) -> Asked:
    """Parse NAME[:PRESET][+FIELD=VALUE...]. Raises UserError for a field without a value, or one that appears twice."""
    quoted = [match.span() for match in QUOTED.finditer(text)]
    starts = [match.start() for match in FIELD.finditer(text)]
    starts = [at for at in starts if not any(a < at < b for a, b in quoted)]
    head, *pairs = (text[a:b] for a, b in zip([0, *starts], [*starts, len(text)], strict=True))
    name, preset = _named(head)
    if not name.endswith(".py") and "+" in name + (preset or ""):
        raise UserError(f'"{text}": +{head.partition("+")[2]} is not +FIELD=VALUE')
    given = [pair[1:].split("=", 1) for pair in pairs]
    fields = [field for field, _ in given]
    if twice := next((field for field in fields if fields.count(field) > 1), None):
        raise UserError(f'"{text}": {twice} is there twice')
    return Asked(name, preset, {field: toml_value(value) for field, value in given})


def _named(head: str) -> tuple[str, str | None]:
    """Split a text into name and preset. A colon may be part of a file's name, but not of any other name."""
    if head.endswith(".py"):
        return head, None
    stem, of_file, preset = head.rpartition(".py:")
    if of_file:
        return f"{stem}.py", preset
    name, colon, preset = head.partition(":")
    return name, preset if colon else None


def toml_value(text: str) -> Any:
    """Parse a TOML value, or a number such as `.5` or `5.`; return any other text as a string.

    Raises UserError if the value is nested too deeply.
    """
    if BARE.fullmatch(text):
        return float(text)
    try:
        table = tomllib.loads(f"x = {text}")
    except ValueError:  # not TOML, or thousands of digits
        return text
    except RecursionError:
        raise UserError(f'"{text[:MOST_SHOWN]}..." is nested too deeply') from None
    return table["x"] if len(table) == 1 else text


def _written(value: Option) -> str:
    """Return a value as text: without quotes if this text parses to the value, else in quotes."""
    if not isinstance(value, str):
        return json.dumps(value)
    bare = '"' not in value and not FIELD.search(value) and toml_value(value) == value
    return value if bare else json.dumps(value, ensure_ascii=False)


def values(given: Asked, takes: Mapping[str, Domain], presets: Mapping[str, Mapping[str, Option]]) -> dict[str, Option]:
    """Return the fields that are set: those of the preset, overridden by the fields in `given`.

    Raises UserError for an unknown preset or field, and for a value that the field may not have.
    """
    if given.preset is not None and given.preset not in presets:
        have = ", ".join(presets) or "none"
        raise UserError(f'{given.name} has no preset "{given.preset}"{meant(given.preset, presets)} (it has: {have})')
    chosen = dict(presets[given.preset]) if given.preset is not None else {}
    for name, value in given.fields.items():
        if name not in takes:
            have = ", ".join(takes) or "none"
            raise UserError(f'{given.name} has no field "{name}"{meant(name, takes)} (it has: {have})')
        chosen[name] = _fitting(name, value, takes[name])
    return chosen


def _fitting(name: str, value: Option, domain: Domain) -> Option:
    kind = type(domain.default)
    if kind is float and type(value) is int:
        value = float(value)
    if domain.default is not inspect.Parameter.empty and type(value) is not kind:
        raise UserError(f"field {name} is {value!r}, not of the kind of {domain.default!r}")
    if domain.choices and value not in domain.choices:
        have = [str(option) for option in domain.choices]
        raise UserError(f"field {name} is {value!r}{meant(str(value), have)} ({', '.join(have)})")
    if not isinstance(value, str) and not domain.least <= value <= domain.most:
        raise UserError(f"field {name} is {value!r}, not in [{domain.least:g}, {domain.most:g}]")
    return value


def meant(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean X?` if one of `names` is similar to `name`, else ""."""
    close = get_close_matches(name, list(names), 1)
    return f"; did you mean {close[0]}?" if close else ""
