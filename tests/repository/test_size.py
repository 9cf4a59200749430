"""Lengths of each system's rules: its code without prose and declarations, wherever it stands.

A line counts if code stands on it; blank lines and comments never do. Docstrings, imports and what the body of a class
declares (fields, state, presets) are left out. A definition of harness/policy that one system alone reaches counts as
that system's, so that nothing becomes short by moving there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.loop import system
from tests import ROOT
from tests.cases import cases
from tests.tools.lines import code, main, spanned

POLICY = "harness.policy"
MOST = 300
MOST_OF = {
    "prism": 371,  # two levels, an algorithm each, elastic or fixed memory; changes by the GPUs concerned
    "muxserve": 317,  # as published, its port to SGLang, and as Weaver's artifact runs it: degrees chosen or given
}


class Named(NamedTuple):
    """A definition of a module; `*`: all of them."""

    module: str
    name: str


def rules(source: str) -> set[int]:
    """Return the numbers of the lines that count."""
    return code(source) - {line for node in _left_out(ast.parse(source)) for line in spanned(node)}


def _left_out(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node
            case ast.ClassDef():
                yield from (statement for statement in node.body if isinstance(statement, ast.Assign | ast.AnnAssign))


# ------------------------------------------------------------------ who reaches what of harness/policy


def imported(tree: ast.Module) -> dict[str, Named]:
    """Return a module's imports from harness/policy, by the name that each has there."""
    names: dict[str, Named] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{POLICY}."):
            names |= {alias.asname or alias.name: Named(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == POLICY:
            names |= {alias.asname or alias.name: Named(f"{POLICY}.{alias.name}", "*") for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name: Named(alias.name, "*") for alias in node.names if alias.name.startswith(f"{POLICY}.")}
    return names


@cache
def policy() -> Mapping[Named, tuple[ast.stmt, frozenset[Named]]]:
    """Return the definitions of harness/policy, and what each of them names of it."""
    defined: dict[Named, tuple[ast.stmt, frozenset[Named]]] = {}
    for path in sorted((ROOT / "harness/policy").glob("*.py")):
        module, tree = f"{POLICY}.{path.stem}", ast.parse(path.read_text("utf-8"))
        named = {name: Named(module, name) for node in tree.body for name in _defined(node)}
        known = imported(tree) | named
        for node in tree.body:
            uses = frozenset(known[x.id] for x in ast.walk(node) if isinstance(x, ast.Name) and x.id in known)
            defined |= {named[name]: (node, uses) for name in _defined(node)}
    return defined


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def reached(path: Path) -> frozenset[Named]:
    """Return the definitions of harness/policy that a file imports, and those that these need."""
    todo, seen = [*imported(ast.parse(path.read_text("utf-8"))).values()], set[Named]()
    while todo:
        symbol = todo.pop()
        if symbol.name == "*":
            todo += [other for other in policy() if other.module == symbol.module]
        elif symbol not in seen and symbol in policy():
            seen.add(symbol)
            todo += policy()[symbol][1]
    return frozenset(seen)


def alone(path: Path, others: Iterable[Path]) -> set[Named]:
    """Return the definitions of harness/policy that one file reaches and none of the others does."""
    return set(reached(path).difference(*map(reached, others)))


@cache
def size(name: str) -> Mapping[str, int]:
    """Return lines that count, by module."""
    path = ROOT / f"systems/{name}.py"
    folders = ("harness", "systems", "workloads", "traces", "plots")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    others = [file for file in files if file != path and file.parent != ROOT / "harness/policy"]
    sizes = {f"systems.{name}": len(rules(path.read_text("utf-8")))}
    for symbol in sorted(alone(path, others)):
        lines = rules((ROOT / f"{symbol.module.replace('.', '/')}.py").read_text("utf-8"))
        sizes[symbol.module] = sizes.get(symbol.module, 0) + len(lines & set(spanned(policy()[symbol][0])))
    return sizes


@cases("name", system.names())
def test_the_rules_of_a_system_are_short(name: str) -> None:
    assert sum(size(name).values()) <= MOST_OF.get(name, MOST), size(name)


COUNTED = '''"""What it does."""

import math
from harness.policy.fields import number  # left out

K = 3  # counts: a number of the paper


class Mine:
    """What it is."""

    idle_s: float = number(
        45.0, 1, 600
    )
    presets = {}

    @property
    def on(self, event):
        """What it does."""
        import numpy

        # why
        said = """two
lines"""
        return (  # counts
            said
        )
'''


def test_what_counts() -> None:
    lines = COUNTED.splitlines()
    assert [lines[k - 1].strip() for k in sorted(rules(COUNTED))] == [
        "K = 3  # counts: a number of the paper",
        "class Mine:",
        "@property",
        "def on(self, event):",
        'said = """two',
        'lines"""',
        "return (  # counts",
        "said",
        ")",
    ]


def test_lines_of_code_are_those_without_prose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(COUNTED)
    main([str(tmp_path), str(tmp_path / "mine.py")])
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["16", "16", "32"]


def test_what_only_one_system_reaches_is_its_own(tmp_path: Path) -> None:
    mine, yours = tmp_path / "mine.py", tmp_path / "yours.py"
    mine.write_text("from harness.policy.placement import spread as homes\n")
    yours.write_text("def f():\n    from harness.policy.placement import one_request\n")
    names = {symbol.name for symbol in alone(mine, [yours]) if symbol.module.endswith(".placement")}
    spread = {"spread", "given", "_heaviest_first", "_memory", "searched"}
    assert names == {*spread, "demand", "groups", "footprint"}  # one_request is both's
    for all_of_it in ("from harness.policy import placement", "import harness.policy.placement"):
        (theirs := tmp_path / f"{len(all_of_it)}.py").write_text(all_of_it)
        assert alone(mine, [theirs]) == set()
