"""How long the rules of each system are: its code without prose and declarations, wherever it stands.

A line counts if code stands on it; blank lines and comments never do. Docstrings, imports and what the body of a class
declares (fields, state, presets) are left out. A definition of harness/policy that one system alone reaches counts as
that system's, so that nothing becomes short by moving there.
"""

from __future__ import annotations

import ast
import io
import token
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from harness.loop import system
from tests.cases import cases

ROOT = Path(__file__).resolve().parent.parent
POLICY = "harness.policy"
MOST = 300
MOST_OF = {
    "prism": 355,  # two levels, an algorithm each, with memory on demand or in fixed parts
}
PROSE = {tokenize.COMMENT, tokenize.NL, token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER}


class Named(NamedTuple):
    """A definition of a module; `*`: all of them."""

    module: str
    name: str


def rules(source: str) -> set[int]:
    """The numbers of the lines that count."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for one in tokens if one.type not in PROSE for line in range(one.start[0], one.end[0] + 1)}
    return code - {line for node in _left_out(ast.parse(source)) for line in _lines(node)}


def _left_out(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant(str())):
                yield node
            case ast.ClassDef():
                yield from (one for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign))


def _lines(node: ast.stmt) -> range:
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    return range(first, (node.end_lineno or first) + 1)


# ------------------------------------------------------------------ who reaches what of harness/policy


def imported(tree: ast.Module) -> dict[str, Named]:
    """What a module imports from harness/policy, by the name that it has there."""
    found: dict[str, Named] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{POLICY}."):
            found |= {one.asname or one.name: Named(node.module or "", one.name) for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == POLICY:
            found |= {one.asname or one.name: Named(f"{POLICY}.{one.name}", "*") for one in node.names}
        elif isinstance(node, ast.Import):
            found |= {one.name: Named(one.name, "*") for one in node.names if one.name.startswith(f"{POLICY}.")}
    return found


@cache
def policy() -> Mapping[Named, tuple[ast.stmt, frozenset[Named]]]:
    """The definitions of harness/policy, and what each of them names of it."""
    found: dict[Named, tuple[ast.stmt, frozenset[Named]]] = {}
    for path in sorted((ROOT / "harness/policy").glob("*.py")):
        module, tree = f"{POLICY}.{path.stem}", ast.parse(path.read_text("utf-8"))
        own = {name: Named(module, name) for node in tree.body for name in _defined(node)}
        known = imported(tree) | own
        for node in tree.body:
            uses = frozenset(known[x.id] for x in ast.walk(node) if isinstance(x, ast.Name) and x.id in known)
            found |= {own[name]: (node, uses) for name in _defined(node)}
    return found


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for one in targets if isinstance(one, ast.Name)]


@cache
def reached(path: Path) -> frozenset[Named]:
    """The definitions of harness/policy that a file imports, and those that these need."""
    todo, found = [*imported(ast.parse(path.read_text("utf-8"))).values()], set[Named]()
    while todo:
        one = todo.pop()
        if one.name == "*":
            todo += [other for other in policy() if other.module == one.module]
        elif one not in found and one in policy():
            found.add(one)
            todo += policy()[one][1]
    return frozenset(found)


def alone(path: Path, others: Iterable[Path]) -> set[Named]:
    """The definitions of harness/policy that one file reaches and none of the others does."""
    return set(reached(path).difference(*map(reached, others)))


@cache
def size(name: str) -> Mapping[str, int]:
    """Lines that count, by module."""
    path = ROOT / f"systems/{name}.py"
    folders = ("harness", "systems", "workloads", "traces", "plots")
    files = [one for folder in folders for one in sorted((ROOT / folder).rglob("*.py"))]
    others = [one for one in files if one != path and one.parent != ROOT / "harness/policy"]
    found = {f"systems.{name}": len(rules(path.read_text("utf-8")))}
    for one in sorted(alone(path, others)):
        lines = rules((ROOT / f"{one.module.replace('.', '/')}.py").read_text("utf-8"))
        found[one.module] = found.get(one.module, 0) + len(lines & set(_lines(policy()[one][0])))
    return found


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
        "K = 3  # counts: a number of the paper", "class Mine:", "@property", "def on(self, event):",
        'said = """two', 'lines"""', "return (  # counts", "said", ")",
    ]  # fmt: skip


def test_what_only_one_system_reaches_is_its_own(tmp_path: Path) -> None:
    mine, yours = tmp_path / "mine.py", tmp_path / "yours.py"
    mine.write_text("from harness.policy.placement import spread as homes\n")
    yours.write_text("def f():\n    from harness.policy.placement import one_request\n")
    found = {one.name for one in alone(mine, [yours]) if one.module.endswith(".placement")}
    spread = {"spread", "given", "_heaviest_first", "searched"}
    assert found == {*spread, "demand", "groups", "footprint"}  # one_request is both's
    for all_of_it in ("from harness.policy import placement", "import harness.policy.placement"):
        (theirs := tmp_path / f"{len(all_of_it)}.py").write_text(all_of_it)
        assert alone(mine, [theirs]) == set()
