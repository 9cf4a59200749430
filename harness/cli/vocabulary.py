"""The generated parts of docs/vocabulary.md: all actions, events and queries of a policy, from `harness.policy` itself.

Texts are docstrings and comments of fields; an example is the line `Example: ...` at the end of a docstring.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from textwrap import fill
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, get_args

from harness.cli.reference import body, code, comments, table
from harness.policy import actions, chance, events, fields, memory, placement, search, slot, types, view
from harness.policy.options import OPTIONS

EXAMPLE = re.compile(r"\n+Example: `(.+)`\s*$")
NOUNS = (types.Inst, types.Batch, types.Host, types.Request)
FACTS = (types.Cluster, types.Gpu, types.Model, types.Sizes, types.Plan)
STATES = (view.BatchState, view.KvState, view.RequestState)
SHARED = (placement, memory, slot, search, chance)
READS: Mapping[str, str] = {  # names in `uses` of what a policy reads, beside those of actions
    "Request.slo": "decisions depend on SLOs",
    "Cluster.homes": "a placement that the user gives (`--placement`) is obeyed",
    "Cluster.plan:window": "the forecast is the window's own traffic: a bound",
    "Cluster.degrees": "it chooses the tensor-parallel degree of each model",
    "view.oracle_tokens": "true output lengths are read: a bound",
}
TRIED: Mapping[str, Sequence[Any]] = {  # values tried of an action's field, to show its names in `uses`; else 1
    "way": ("WAY",),
    "drain": (False,),
    "phase": ("PHASE",),
    "steps": (1, 0),
    "attend": (True,),
    "to": ((0,), types.Host(), None),
}


class FieldRow(NamedTuple):
    """A field of a class, as the source writes it."""

    name: str
    type: str
    default: str
    note: str


def parts() -> dict[str, Iterator[str]]:
    """Return the lines of each part of docs/vocabulary.md, by its name."""
    # Only the loop hears Freed.
    policies_hear = (event for event in get_args(events.Event) if event is not events.Freed)
    options = ((code(name), code(value), what) for name, of in OPTIONS.items() for value, what in of.items())
    alias = "name,is,meaning"
    return {
        "imports": _imports(),
        "actions": chain.from_iterable(_said(action, uses=True) for action in get_args(actions.Action)),
        "ways to load": table("way,fixed s,link", _ways()),
        "events": chain.from_iterable(map(_said, policies_hear)),
        "aliases of events": table(alias, _aliases(events, "Failed")),
        "queries": _methods(view.View, "view"),
        "aliases of answers": table(alias, _aliases(view, "Weights", "Transit")),
        "answers": chain.from_iterable(_said(state, "####") for state in STATES),
        "aliases of nouns": table(alias, _aliases(types, "Gpus", "Phase", "Option")),
        "nouns": chain.from_iterable(map(_said, NOUNS)),
        "facts": chain.from_iterable(map(_said, FACTS)),
        "profile": chain([f"{_doc(types.Profile)}\n"], _methods(types.Profile, "profile", level="####")),
        "declarations": table("declaration,takes", _functions(fields, "choice", "number", "by_model")),
        "options": table("option,value,what the engine does", options),
        "reads": table("name,what it declares", ((f"`{name}`", what) for name, what in READS.items())),
        "shared algorithms": chain.from_iterable(map(_shared, SHARED)),
    }


def _shared(module: ModuleType) -> Iterator[str]:
    yield f"From `{module.__name__}`:\n"
    yield from table("function,what it does", _functions(module))


def _imports() -> Iterator[str]:
    from harness.check.purity import MEMBERS

    ours = ", ".join(code(name) for name in MEMBERS if not name.startswith(("numpy", "scipy", "__")))
    yield fill(f"A file may import `harness.policy`, numpy, scipy and, of Python, {ours}.", 120) + "\n"


# ------------------------------------------------------------------ entries


def _said(kind: type, level: str = "###", *, uses: bool = False) -> Iterator[str]:
    """Describe a class: docstring, example and a table of its fields.

    With `uses`, the table also has the names that a system must declare.
    """
    yield f"{level} `{kind.__name__}`\n"
    yield f"{_doc(kind)}\n"
    if line := example(kind):
        yield f"```python\n{line}\n```\n"
    given = eval_example(line) if uses else None
    cells = [
        (code(row.name), code(row.type), code(row.default), row.note, _uses(given, row) if uses else "")
        for row in rows(kind)
    ]
    columns = zip(("field", "type", "default", "meaning", "in `uses`"), *cells, strict=True)
    head, *lines = zip(*(column for column in columns if any(column[1:])), strict=True)
    yield from table(",".join(head), lines)


def _uses(action: Any, row: FieldRow) -> str:
    """Return the names that a system must declare in `uses` if it sets this field.

    The action's own name, which it must declare too, is left out.
    """
    from harness.check.trial import needs

    field = f"{type(action).__name__}.{row.name}"
    tried = (replace(action, **{row.name: value}) for value in TRIED.get(row.name, (1,)))
    names = dict.fromkeys(name for system in tried for name in needs(system) if name.partition(":")[0] == field)
    return ", ".join(map(code, names))


def rows(kind: type) -> list[FieldRow]:
    """Return the fields that a class declares, as its source writes them; properties are left out."""
    notes = comments(kind)
    return [
        FieldRow(
            name := ast.unparse(node.target), _double(ast.unparse(node.annotation)), _default(node.value), notes[name]
        )
        for node in body(kind)
        if isinstance(node, ast.AnnAssign)
    ]


def _default(value: ast.expr | None) -> str:
    match value:
        case None:
            return ""
        case ast.Call(keywords=[ast.keyword(arg="default_factory", value=ast.Name(id="dict"))]):
            return "{}"
        case ast.Name(id=name):  # a constant of the module
            return str(getattr(types, name))
    return _double(ast.unparse(value))


def _doc(thing: Any) -> str:
    """Return a docstring without its example, as Markdown."""
    return EXAMPLE.sub("", inspect.getdoc(thing) or "")


def example(thing: Any) -> str:
    """Return the example of a class or a method; "" if its docstring has none."""
    match = EXAMPLE.search(inspect.getdoc(thing) or "")
    return match[1] if match else ""


def eval_example(line: str) -> Any:
    """Evaluate an example, in which the names of `harness.policy` are defined; the view's time is 0."""
    return eval(line, {**vars(types), **vars(actions), **vars(events), "view": SimpleNamespace(now_s=0.0)})


def _methods(kind: type, name: str, level: str = "###") -> Iterator[str]:
    """Describe the queries of a protocol."""
    for node in body(kind):
        if isinstance(node, ast.FunctionDef):
            method = getattr(kind, node.name)
            method = method.fget if isinstance(method, property) else method
            call = "" if isinstance(vars(kind)[node.name], property) else f"({_arguments(node)})"
            yield f"{level} `{name}.{node.name}{call} -> {ast.unparse(node.returns or ast.Constant(None))}`\n"
            yield f"{_doc(method)}\n"
            if line := example(method):
                yield f"```python\n{line}\n```\n"


def _arguments(node: ast.FunctionDef) -> str:
    """Return the arguments of a method with their types, without `self`."""
    return _double(ast.unparse(node.args).removeprefix("self").removeprefix(", ").replace("=", " = "))


# ------------------------------------------------------------------ lists


def _aliases(module: ModuleType, *names: str) -> Iterator[tuple[str, str, str]]:
    """Yield type aliases of a module: name, value and comment, which is at the end of the line or above it."""
    source = Path(inspect.getfile(module)).read_text("utf-8")
    for name in names:
        match = re.search(rf"((?:^# .+\n)*)^{name} = (.+?)(?:  # (.+))?$", source, re.MULTILINE)
        assert match is not None, name
        yield code(name), code(match[2]), match[3] or match[1].replace("# ", "")


def _functions(module: ModuleType, *names: str) -> Iterator[tuple[str, str]]:
    """Yield the public functions and classes of a module with the first paragraph of their docstrings."""
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not names or node.name in names:
            text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            call = ""
            if isinstance(node, ast.FunctionDef):
                returns = ast.unparse(node.returns or ast.Constant(None))
                call = f"({_names(node)}) -> {_double(returns)}"
            yield code(f"{node.name}{call}"), text


def _names(node: ast.FunctionDef) -> str:
    """Return the arguments of a function without their types."""
    for arg in ast.walk(node.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    return _double(ast.unparse(node.args))


def _ways() -> Iterator[tuple[str, str, str]]:
    from harness.engines.costs import quantities

    for name, way in quantities.ladder("h100").items():
        slow = f", at {way.bytes_s / 1e9:g} GB/s at most" if way.bytes_s < float("inf") else ""
        yield code(name), f"{way.fixed_s:g}", f"{way.source}{slow}"


def _double(source: str) -> str:
    """Return Python source with double quotes, as ruff formats it."""
    return source.replace("'", '"')
