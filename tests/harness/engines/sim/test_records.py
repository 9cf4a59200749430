"""The pages of the simulator's records are complete, say what is so, and hold nothing that nobody reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.engines import rows, stamps
from harness.engines.costs.coef import COST
from harness.engines.costs.layout import UNITS, Field, fields, record
from harness.engines.sim import engine, kernel, names, orders, records, requests, span, state, world
from harness.rows.record import WAITS
from tests.cases import cases

PAGES = {name: page for name, page in (vars(records) | vars(world)).items() if name.isupper()} | {"COST": COST}
FIELDS = [(name, field) for name, page in PAGES.items() for field in fields(page)]
ACCESSORS = {f"{name}_at": page for page, name in {
    "GPU": "gpu", "LINK": "link", "INST": "inst", "MODEL": "model", "BATCH": "batch", "LANE": "lane",
    "DEMAND": "demand", "REQUEST": "req", "EVENT": "event", "TRANSFER": "xfer", "ACTION": "action", "LOG": "log",
    "CHAIN": "chain", "ENTRY": "entry", "REMOTE": "remote", "NODE": "node", "PAGE": "page", "EXTENT": "extent",
    }.items()} | {"world": "WORLD"}  # fmt: skip


# ---------------------------------------------------------------- pages


def test_a_page_is_the_layout() -> None:
    page = record(
        """A tank.

        Its paragraphs tell no fields.

        volume  f8  bytes  of what is in it
        taps    2i8 row    of GPU: those that
        """
    )
    assert fields(page) == (
        Field("volume", "f8", "bytes", "of what is in it"),
        Field("taps", "2i8", "row", "of GPU: those that"),
    )
    assert page == np.dtype([("volume", "f8"), ("taps", "i8", (2,))])


@cases("line", ["x", "x f8", "x f8 s", "x f4 s seconds", "x i8 miles far", "x S8 s seconds", "x f8 s  "])
def test_a_line_that_lacks_something_is_no_field(line: str) -> None:
    with pytest.raises(ValueError, match="not a field's name, type, unit and meaning"):
        record(f"Something.\n\n{line}\n")


@cases("name", [*PAGES])
def test_every_field_of_a_record_has_a_line(name: str) -> None:
    page = PAGES[name]
    assert page.names == tuple(field.name for field in fields(page))
    assert all(field.unit in UNITS and field.meaning.strip() for field in fields(page))
    # 8-byte numbers without gaps: the kernel reads an address or a length so many of them into a record
    assert page.itemsize == sum(np.dtype(field.type).itemsize for field in fields(page))


def test_a_name_of_one_or_two_letters_is_that_of_a_stored_column() -> None:
    """One is left: the wait for KV memory. Coefficients are named as in the formulas above them."""
    assert {field.name for _, field in FIELDS if len(field.name) < 3} == {"kv"}
    assert "kv" in WAITS
    formulas = (Path(rows.__file__).parent / "costs/coef.py").read_text().partition("COST = ")[0]
    assert not [field.name for field in fields(COST) if not re.search(rf"\b{field.name}\b", formulas)]


def test_what_a_line_names_is_there() -> None:
    for _, field in FIELDS:
        if field.unit == "row":
            assert re.match(r"of (\w+)", field.meaning)[1] in PAGES, field  # type: ignore[index]
        for other in re.findall(r"`(\w+)`", field.meaning):
            assert other in {f.name for _, f in FIELDS}, field
        if field.unit == "code":
            codes = re.findall(r"\b[A-Z][A-Z_]+\b", field.meaning)
            assert codes, field
            assert all(any(name.startswith(code) for name in vars(state)) for code in codes), field


def test_engines_share_what_becomes_a_row() -> None:
    """An engine of its own keeps `stamps.FIELDS`; the simulator's requests have the same among theirs."""
    for name in stamps.FIELDS.names or ():
        assert stamps.FIELDS[name] == records.REQUEST[name]


# ---------------------------------------------------------------- readers


def read(source: str) -> Iterator[tuple[str, str]]:
    """Return the (record, field) that functions of the kernel read, not those that are only written or counted up."""
    for function in (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)):
        known: dict[str, str] = {}

        def of(value: ast.expr, known: dict[str, str] = known) -> str | None:
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                return ACCESSORS.get(value.func.id)
            if isinstance(value, ast.Subscript) and ast.unparse(value.value) == "cost_at(S)":
                return "COST"
            return known.get(value.id) if isinstance(value, ast.Name) else None

        written = set()
        for node in ast.walk(function):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                value = node.value  # type: ignore[attr-defined]
                both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                for to, what in zip(target.elts, value.elts, strict=True) if both else [(target, value)]:  # type: ignore[attr-defined]
                    if isinstance(to, ast.Name) and not isinstance(what, ast.Name) and (page := of(what)):
                        known[to.id] = page
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                written.add(node.value)
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load) or node in written:
                continue
            if page := of(node.value):
                yield page, node.attr


def named(source: str) -> Iterator[str]:
    """Yield fields that the engine reads from its arrays, by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        if isinstance(node, ast.GeneratorExp) and isinstance(node.generators[0].iter, ast.Tuple):
            yield from (str(x.value) for x in node.generators[0].iter.elts if isinstance(x, ast.Constant))


def test_readers_are_told_from_writers() -> None:
    source = (
        "def f(S):\n W, n = world(S), lane_at(S, 1)\n W.now = n.end\n W.steps += 1\n W.walk[0] = gpu_at(S, 0).cap\n"
    )
    assert sorted(read(source)) == [("GPU", "cap"), ("LANE", "end")]
    assert set(named("w['now'] = R['made']\nS.left")) == {"made", "left"}


def test_every_field_is_read() -> None:
    sources = sorted(Path(kernel.__file__).parent.glob("*.py"))
    reads = {pair for path in sources for pair in read(path.read_text())}
    known = {(name, field.name) for name, field in FIELDS}
    assert reads <= known
    by_name = {
        name
        for module in (engine, names, orders, requests, rows)
        for name in named(Path(str(module.__file__)).read_text())
    }
    by_name |= set(span.SUMS.values())
    addresses = {*state.TABLES, *state.NUMBERS, *(n for _, lengths in state.NUMBERS.values() for n in lengths.split())}
    assert {
        (name, field)
        for name, field in known - reads
        if field not in by_name
        and not (name == "WORLD" and field in addresses)
        and not (name in {"REQUEST", "LOG"} and field in (stamps.FIELDS.names or ()))  # `rows` reads them all, by cause
    } == set()
