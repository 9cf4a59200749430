"""Read TOML into dataclasses: a class's types define the form of its file, and an error is a line with its place.

    @dataclass(frozen=True, slots=True)
    class Row:
        system: str
        seeds: Count = 5
        plan: Literal["held-out", "window"] = "held-out"

    @dataclass(frozen=True, slots=True)
    class Figure:
        row: tuple[Row, ...]  # [[row]]
        fields: Pairs[Option] = ()  # [fields], kept as (key, value) pairs

    toml.read(Path("mine.toml"), Figure)
    UserError: mine.toml: row 3: seeds is "x", not a whole number

A field `class_` is the key `class`. Types are strict: `true` is not a number and 1.0 not a whole number, but a float
may be written as a whole number. Numbers are finite. A class may check more in its `__post_init__`. A ValueError that
is raised there is reported with the place of the class's table.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from datetime import date, time
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge as Ge  # noqa: PLC0414 - others import it from here
from annotated_types import Gt as Gt  # noqa: PLC0414 - others import it from here
from annotated_types import Le as Le  # noqa: PLC0414 - others import it from here
from annotated_types import MinLen as MinLen  # noqa: PLC0414 - others import it from here

from harness.policy.fields import meant
from harness.policy.types import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel, GetCoreSchemaHandler
    from pydantic_core import CoreSchema, ErrorDetails


T = TypeVar("T")
MOST_BYTES = 4 << 20
MOST_SHOWN = 60  # characters of a wrong value
MOST_LISTED = 12  # keys


class _Table:
    """An annotation for a tuple of pairs; the file has a table in place of the tuple.

    A pair is (key, value) or (key, value, value, ...).
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        flat = len(get_args(get_args(source)[0])) > 2

        def pairs(table: Mapping[str, Any]) -> tuple[Any, ...]:
            return tuple((key, *value) if flat else (key, value) for key, value in table.items())

        return core_schema.no_info_after_validator_function(pairs, handler.generate_schema(_mapping(source)))


TABLE = _Table()
Pairs = Annotated[tuple[tuple[str, T], ...], TABLE]
MOST_INT = (1 << 63) - 1  # the largest integer that a column, a kernel and other readers of a run's facts can hold
Count = Annotated[int, Ge(1), Le(MOST_INT)]
Natural = Annotated[int, Ge(0), Le(MOST_INT)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
MOST_S = 1e9  # nanoseconds of 63 bits end at 9.2e9 s
Seconds = Annotated[float, Ge(0), Le(MOST_S)]
Span = Annotated[float, Gt(0), Le(MOST_S)]
Share = Annotated[float, Gt(0), Le(1)]


def tables(path: Path) -> dict[str, Any]:
    """Parse a TOML file without checking its keys. UserError names the file and, for wrong TOML, the line."""
    if path.is_fifo() and path.absolute().parts[1] not in {
        "dev",
        "proc",
    }:  # named pipes lie elsewhere; the pipe of a shell's `<(...)` lies in these
        raise UserError(f"{path}: a pipe, not a file")
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(f"{path}: longer than {MOST_BYTES >> 20} MiB")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # not UTF-8, not TOML, or a number of thousands of digits
        raise UserError(f"{path}: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None


def read(path: Path, kind: type[T]) -> T:
    """Read a file as a dataclass or another type. UserError names the file and the wrong key."""
    return convert(tables(path), kind, f"{path}: ")


def convert(data: Any, kind: type[T], where: str = "") -> T:
    """Convert parsed TOML to a type. UserError begins with `where` and names the wrong key."""
    try:
        value: T = _validated(kind, data)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    return value


def checked(value: Any) -> dict[str, Any]:
    """Validate the fields of a dataclass as if they came from a file; return them by name, after conversion.

    A class whose objects are also made in code calls it in its `__post_init__`. UserError names the wrong field.
    """
    kind: Any = type(value)
    converted = _validated(_unchecked(kind), _plain(value))
    return {name: getattr(converted, name) for name in _hints(kind)}


def shown(value: Any) -> str:
    """Return a value as TOML text; a long one is cut."""
    match value:
        case bool() | str():
            text = json.dumps(value, ensure_ascii=False)
        case date() | time():
            text = value.isoformat()
        case Mapping():
            text = f"{{{', '.join(f'{_key(str(k))} = {shown(member)}' for k, member in value.items())}}}"
        case list() | tuple():
            text = f"[{', '.join(shown(item) for item in value)}]"
        case _:
            text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


# ------------------------------------------------------------------ values


def _validated(kind: Any, data: Any) -> Any:
    """Return parsed TOML converted to a type. UserError names the wrong key.

    The data is validated as JSON, whose strict types are those of TOML. Strict validation of Python values would ask
    for tuples and dataclasses.
    """
    from pydantic import ValidationError

    try:
        text = json.dumps({"value": data}, default=_plain)
        return _model(kind).model_validate_json(text).value  # type: ignore[attr-defined]  # see `_model`
    except ValidationError as error:
        raise UserError(_line(kind, data, error.errors(include_url=False))) from None
    except RecursionError:
        raise UserError("nested too deeply") from None


@cache
def _model(kind: Any) -> type[BaseModel]:
    """Build a pydantic model around a type. Its strict settings also hold for dataclasses within the type."""
    from pydantic import ConfigDict, create_model

    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, alias_generator=_written)
    return create_model("Value", __config__=config, value=(kind, ...))


@cache
def _unchecked(kind: Any) -> Any:
    """Build a dataclass with the same fields but without `__post_init__`."""
    return make_dataclass(kind.__name__, _hints(kind).items())


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent: a date or time to text, a dataclass to its table in a file."""
    if isinstance(value, date | time):
        return value.isoformat()
    kind: Any = type(value)
    if not _is_class(kind):
        raise TypeError(f"{value!r} is no value of TOML")
    given = {name: getattr(value, name) for name in _hints(kind)}
    return {_written(n): dict(_keyed(member)) if n in _paired(kind) else member for n, member in given.items()}


def _keyed(pairs: Sequence[tuple[Any, ...]]) -> Iterator[tuple[Any, Any]]:
    return ((key, values[0] if len(values) == 1 else values) for key, *values in pairs)


# ------------------------------------------------------------------ types


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def _written(name: str) -> str:
    """Return the key of a field. A field whose key is a Python keyword has a name that ends with "_"."""
    return name.removesuffix("_")


@cache
def _paired(kind: Any) -> frozenset[str]:
    """Return the names of a dataclass's fields that are pairs in Python and tables in a file."""
    return frozenset(name for name, hint in _hints(kind).items() if TABLE in _metadata(hint))


def _is_class(kind: Any) -> bool:
    return is_dataclass(kind)


def _names(kind: Any) -> list[str]:
    return [_written(name) for name in _hints(_bare(kind))] if _is_class(_bare(kind)) else []


def _mapping(pairs: Any) -> Any:
    key, *values = get_args(get_args(pairs)[0])
    return dict[key, values[0] if len(values) == 1 else tuple[tuple(values)]]  # type: ignore[misc,valid-type]  # computed


def _members(kind: Any) -> list[Any]:
    """Return the types of a union except None; [] for a type that is not a union."""
    return [arg for arg in get_args(kind) if arg is not NoneType] if get_origin(kind) in {Union, UnionType} else []


def _metadata(kind: Any) -> tuple[Any, ...]:
    """Return the metadata of an annotated type; for `T | None`, that of T."""
    if len(members := _members(kind)) == 1:
        return _metadata(members[0])
    return kind.__metadata__ if get_origin(kind) is Annotated else ()


def _bare(kind: Any) -> Any:
    """Return a type without annotations and without None; for pairs, return the type of their table in a file."""
    if len(members := _members(kind)) == 1:
        return _bare(members[0])
    if get_origin(kind) is not Annotated:
        return kind
    inner = get_args(kind)[0]
    return _mapping(inner) if TABLE in _metadata(kind) else _bare(inner)


def _is_table(kind: Any) -> bool:
    origin = get_origin(_bare(kind)) or _bare(kind)
    return _is_class(origin) or (isinstance(origin, type) and issubclass(origin, Mapping))


def _is_list(kind: Any) -> bool:
    return (get_origin(_bare(kind)) or _bare(kind)) is tuple


def _items(kind: Any) -> tuple[Any, ...]:
    """Return the item types of a list; for a list of any length, its item type and `...`."""
    return get_args(_bare(kind)) or (Any, ...)


def _inside(kind: Any, step: int | str) -> Any:
    """Return the type of a field or an item of `kind`, with its annotations."""
    bare = _bare(kind)
    if _is_class(bare):
        return {_written(name): hint for name, hint in _hints(bare).items()}.get(str(step), Any)
    if _is_list(bare) and isinstance(step, int):
        items = _items(bare)
        return items[0] if ... in items else items[min(step, len(items) - 1)]
    return (*get_args(bare), Any, Any)[1]


# ------------------------------------------------------------------ the line of a mistake

UNKNOWN = {"unexpected_keyword_argument", "extra_forbidden"}
WORDS = {
    str: ("a string", "strings"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "truth values"),
}


class _Place(NamedTuple):
    """A value in a file, and its place in the file.

    `table` names the table that holds the value; it is empty or ends with a colon. `key` is the dotted key within it.
    """

    table: str
    key: str
    value: Any
    kind: Any

    def inside(self, step: int | str) -> _Place:
        """Return the place of a field, by its key, or of an item, by its index from 0."""
        kind, held = _inside(self.kind, step), _plain(self.value) if is_dataclass(self.value) else self.value
        if isinstance(step, str):
            value = held.get(step) if isinstance(held, Mapping) else None
            return _Place(self.table, f"{self.key}.{_key(step)}" if self.key else _key(step), value, kind)
        value = held[step] if isinstance(held, list | tuple) and step < len(held) else None
        if isinstance(value, Mapping) or is_dataclass(value):
            return _Place(f"{self.table}{self.key or 'item'} {step + 1}: ", "", value, kind)
        return _Place(self.table, f"item {step + 1}" + (f" of {self.key}" if self.key else ""), value, kind)

    @property
    def named(self) -> str:
        """The place as the beginning of an error message, with a colon at its end; empty for the whole file."""
        return f"{self.table}{self.key}: " if self.key else self.table


def _line(kind: Any, data: Any, errors: Sequence[ErrorDetails]) -> str:
    """Describe the most important error in one line: an unknown key first, else the error deepest in the file."""
    error = min(errors, key=lambda e: (e["type"] not in UNKNOWN, -len(e["loc"]), e["type"] != "finite_number"))
    what, loc = error["type"], list(error["loc"][1:])
    if what in UNKNOWN:
        table = _place(kind, data, loc[:-1])
        return f'{table.named}unknown key "{loc[-1]}"{_known(str(loc[-1]), _names(table.kind))}'
    if loc[-1:] == ["[key]"]:
        table = _place(kind, data, loc[:-2])
        return f'{table.named}unknown key "{loc[-2]}"{_among(loc[-2], get_args(_bare(table.kind))[0])}'
    if what == "missing" and isinstance(loc[-1], int):
        what, loc = "too_short", loc[:-1]
    at = _place(kind, data, loc)
    if what == "missing":
        return f"{at.table}{_form(at)} is missing"
    if what in {"value_error", "json_invalid"}:
        return f"{at.named}{error['ctx']['error']}"
    if what == "literal_error":
        return f"{at.table}{at.key} is {shown(at.value)}{_among(at.value, _bare(at.kind))}"
    return f"{at.table}{at.key or 'this'} is {shown(at.value)}, not {_wanted(what, at)}"


def _place(kind: Any, data: Any, loc: Sequence[int | str]) -> _Place:
    """Return the place in a file that the steps of an error's location describe.

    At a union, a step names one of its types. If none of them fits the value, return the place of the union.
    """
    at, steps = _Place("", "", data, kind), iter(loc)
    for step in steps:
        if not (members := _members(_bare(at.kind))):
            at = at.inside(step)
            continue
        fitting = [member for member in members if _fits(member, at.value)]
        if not fitting:
            break
        at = at._replace(kind=next((k for k in fitting if getattr(k, "__name__", "") == step), fitting[0]))
    return at


def _fits(kind: Any, value: Any) -> bool:
    return (_is_table(kind) and isinstance(value, Mapping)) or (_is_list(kind) and isinstance(value, list | tuple))


def _form(at: _Place) -> str:
    """Return a key as errors show it; for a table, this is its header in the file, `[key]` or `[[key]]`."""
    if at.table or not _is_table(_items(at.kind)[0] if _is_list(at.kind) else at.kind):
        return at.key
    return f"[[{at.key}]]" if _is_list(at.kind) else f"[{at.key}]"


def _known(key: str, names: Sequence[str]) -> str:
    """Return a text that suggests the key that was meant or, if keys are few, lists them all; else ""."""
    return meant(key, names) or (f" ({', '.join(names)})" if len(names) <= MOST_LISTED else "")


def _among(value: Any, choices: Any) -> str:
    """Return a text with the choices of a Literal; if one is similar to the value, a suggestion comes first."""
    names = [str(choice) for choice in get_args(choices)]
    return f"{meant(str(value), names)} ({', '.join(names)})"


def _wanted(what: str, at: _Place) -> str:
    """Return a text that says what values are allowed at a place."""
    if what == "finite_number":
        return "a finite number"
    if what.startswith(("greater_than", "less_than")):
        if at.value is not None and isinstance(at.value, int) and at.value > MOST_INT:
            return "below 2^63"
        return _bounds([bound for bound in _metadata(at.kind) if bound != Le(MOST_INT)])
    if what == "too_short" and (least := next((m for m in _metadata(at.kind) if isinstance(m, MinLen)), None)):
        return f"a {'table' if _is_table(at.kind) else 'list'} of {least.min_length} or more"
    return _words(at.kind, at.key)


def _bounds(metadata: Sequence[Any]) -> str:
    above, least, most = (
        next((getattr(limit, name) for limit in metadata if isinstance(limit, bound)), None)
        for name, bound in (("gt", Gt), ("ge", Ge), ("le", Le))
    )
    low = f"({above:g}" if above is not None else f"[{least:g}" if least is not None else ""
    if most is not None:
        return f"in {low}, {most:g}]" if low else f"at most {most:g}"
    return f"above {above:g}" if above is not None else f"at least {least:g}"


def _words(kind: Any, key: str = "") -> str:
    """Describe a type in words. With `key`, a table is described with its header in a file."""
    if set(members := _members(bare := _bare(kind))) == {int, float}:
        return WORDS[float][0]
    if members:
        *others, last = [_words(member, key) for member in members]
        return f"{', '.join(others)} or {last}"
    if _is_table(bare):
        return "a table" if " " in key or not key else f"a table ([{key}])"
    if not _is_list(bare):
        return WORDS.get(bare, ("one of " + ", ".join(map(str, get_args(bare))),))[0]
    items = _items(bare)
    if _is_table(items[0]):
        return f"a list of tables ([[{key}]])"
    first = float if {*_members(_bare(items[0]))} == {int, float} else _bare(items[0])
    many = "lists" if _is_list(items[0]) else WORDS.get(first, ("", "values"))[1]
    return f"a list of {many}" if ... in items else f"a list of {len(items)} {many}"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
