"""The meaning of a source file as a digest, which is equal for files that differ only in words.

In Python, words are comments, docstrings, annotations, lines that only a type checker reads, and names of local
variables that are not parameters. Annotations in a class are not words, because they declare fields. In TOML, words are
comments and layout. For other files, the meaning is their bytes.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

from harness.loop.system import ROOT, user_cache
from harness.policy.types import UserError

SILENT = frozenset({"ctx", "kind", "type_comment", "type_params", "type_ignores"})
NAMED = (
    (ast.alias, "asname"),
    (ast.ExceptHandler, "name"),
    (ast.MatchAs, "name"),
    (ast.MatchStar, "name"),
    (ast.MatchMapping, "rest"),
)
# Rewrites of code that make the same rows: files as they are now, and as they were when runs were stored.
# Written by `python -m tests.tools.as_before`. A file that changes again counts as itself, and the entry goes.
REWRITES = ROOT / "harness/run/as_before.toml"
MOST_KEPT = 4000  # sources of which the meaning is kept on this machine


class Source(NamedTuple):
    """A Python file: the digest of its meaning, and the dotted names of all its imports."""

    digest: str
    imports: tuple[str, ...]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's meaning. Raises UserError if a .py file is not valid Python."""
    return source(path).digest if path.suffix == ".py" else _values(path, path.stat().st_mtime_ns)


@cache
def _values(path: Path, stamp: int) -> str:  # noqa: ARG001 - the stamp is part of the key
    content = path.read_bytes()
    if path.suffix == ".toml":
        with suppress(ValueError, RecursionError):  # reported where the file is read
            content = json.dumps(tomllib.loads(content.decode()), default=str).encode()
    return sha256(content).hexdigest()


def source(path: Path) -> Source:
    """Return the meaning and the imports of a Python file. Raises UserError if it is not valid Python."""
    return _source(path, path.stat().st_mtime_ns)


@cache
def _source(path: Path, stamp: int) -> Source:  # noqa: ARG001
    content = path.read_bytes()
    name = sha256(content).hexdigest()
    if (made := _kept().get(name)) is not None:
        return made
    try:
        tree = ast.parse(content)
        imports = tuple(_imports(tree))
        text = told(Wordless().visit(tree))
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, or nested too deep
        raise UserError(f"{path}: not Python: {error}") from None
    made = Source(sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), imports)
    _kept()[name] = made
    _NEW.add(name)
    return made


# ------------------------------------------------------------------ rewrites of files that make the same rows


def as_before(files: AbstractSet[tuple[str, str]]) -> AbstractSet[tuple[str, str]]:
    """Undo rewrites in a set of (name, digest) pairs: replace rewritten files by the files before the rewrite.

    The hashes of stored runs were made from those earlier files. A rewrite is undone only if `files` contains all files
    that the rewrite made.
    """
    for now, before in rewrites():
        if now <= files:
            files = files - now | before
    return files


@cache
def rewrites() -> tuple[tuple[AbstractSet[tuple[str, str]], AbstractSet[tuple[str, str]]], ...]:
    """Read the rewrites of sources: for each, the (name, digest) pairs of the new files, then of the old files."""
    entries = tomllib.loads(REWRITES.read_text("utf-8")).get("rewrite", [])
    return tuple((frozenset(entry["now"].items()), frozenset(entry["before"].items())) for entry in entries)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# ------------------------------------------------------------------ kept on this machine: to parse takes long


_NEW = set[str]()  # contents of sources whose meaning is not kept yet


def _file() -> Path:
    here = sha256(Path(__file__).read_bytes() + sys.version.encode()).hexdigest()[:12]
    return user_cache() / f"meaning-{here}.json"


@cache
def _kept() -> dict[str, Source]:
    with suppress(OSError, RuntimeError, ValueError, TypeError, AttributeError):  # none yet, no home, or cut
        kept: Mapping[str, Any] = json.loads(_file().read_bytes())
        return {name: Source(str(of[0]), tuple(map(str, of[1]))) for name, of in kept.items()}
    return {}


def keep() -> None:
    """Save the meanings of new sources on this machine; if that fails, a later process computes them again."""
    if not _NEW:
        return
    _NEW.clear()
    with suppress(OSError, RuntimeError):
        file = _file()
        part = file.with_name(f"{file.name}.{os.getpid()}")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(dict([*_kept().items()][-MOST_KEPT:])), "utf-8")
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


# ------------------------------------------------------------------ a syntax tree without words


def told(node: object) -> str:
    """Return a syntax tree as text. The text is equal in all versions of Python that have the tree's nodes.

    Empty fields of nodes are left out.
    """
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__} {node.value!r}"
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return f"{type(node).__name__}({', '.join(f'{n}={told(v)}' for n, v in fields if n not in SILENT)})"
    return f"[{', '.join(map(told, node))}]" if isinstance(node, list) else repr(node)


class Wordless(ast.NodeTransformer):
    """A transformer that removes the words from a tree in place. Local variables get numbers as names."""

    def __init__(self) -> None:
        self.scopes = list[tuple[dict[str, str], bool]]()  # names with what they become, and whether they are a class's
        self.made = 0

    def name(self, name: str) -> str:
        """Return the new name of a local variable in the present scope; other names stay the same.

        Functions do not see the names of a class around them.
        """
        for k, (names, of_class) in enumerate(reversed(self.scopes)):
            if name in names and (k == 0 or not of_class):
                return names[name]
        return name

    def scope(self, bound: Iterable[str], same: Iterable[str] = ()) -> dict[str, str]:
        """Return a mapping from a new scope's names to their replacements; the names in `same` stay unchanged."""
        names = {name: name for name in same}
        for name in bound:
            if name not in names:
                self.made += 1
                names[name] = f"#{self.made}"
        return names

    def lists(self, *parts: list[Any]) -> None:
        """Visit the nodes in lists, and replace the content of each list by the results."""
        for part in parts:
            part[:] = [x for node in part for x in _listed(self.visit(node))]

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        """Visit a function; its parameters keep their names.

        Its decorators and defaults belong to the scope around it.
        """
        arguments, body = node.args, node.body if isinstance(node.body, list) else [node.body]
        self.lists(getattr(node, "decorator_list", []), arguments.defaults)
        arguments.kw_defaults = [default and self.visit(default) for default in arguments.kw_defaults]
        every = [x for x in ast.walk(arguments) if isinstance(x, ast.arg)]
        for arg in every:
            arg.annotation = None
        if not isinstance(node, ast.Lambda):
            node.returns, node.name = None, self.name(node.name)
        outer = {name for x in _own(body) if isinstance(x, ast.Global | ast.Nonlocal) for name in x.names}
        names = self.scope((name for name in _bound(body) if name not in outer), (arg.arg for arg in every))
        self.scopes.append((names, False))
        self.lists(body)
        self.scopes.pop()
        node.body = body
        return cast("ast.AST", node)

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_ListComp(self, node: Any) -> ast.AST:
        """Visit a comprehension; its first iterable belongs to the scope around it."""
        first = node.generators[0]
        first.iter = self.visit(first.iter)
        names = self.scope(_bound(generator.target for generator in node.generators))
        self.scopes.append((names, False))
        for k, generator in enumerate(node.generators):
            generator.target, generator.ifs = self.visit(generator.target), [self.visit(x) for x in generator.ifs]
            generator.iter = self.visit(generator.iter) if k else generator.iter
        for field in ("elt", "key", "value"):
            if hasattr(node, field):
                setattr(node, field, self.visit(getattr(node, field)))
        self.scopes.pop()
        return cast("ast.AST", node)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Visit a class; the names in its body do not change."""
        self.lists(node.decorator_list, node.bases, node.keywords)
        node.name = self.name(node.name)
        self.scopes.append(({name: name for name in _bound(node.body)}, True))
        self.lists(node.body)
        self.scopes.pop()
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Remove a statement that is only a string, such as a docstring."""
        alone = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if alone else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        """Remove a block that only a type checker reads."""
        self.generic_visit(node)
        checked = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node.orelse if checked else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        """Remove an annotation that does not declare a field."""
        if self.scopes and self.scopes[-1][1]:
            return self.generic_visit(node)
        return node.value and self.visit(ast.Assign(targets=[node.target], value=node.value))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Rename a local variable."""
        node.id = self.name(node.id)
        return node

    def generic_visit(self, node: Any) -> ast.AST:
        """Visit a node, and rename local variables whose names are text in its fields."""
        super().generic_visit(node)
        for kind, field in NAMED:
            if isinstance(node, kind) and getattr(node, field):
                setattr(node, field, self.name(getattr(node, field)))
        if isinstance(node, ast.Global | ast.Nonlocal):
            node.names = [self.name(name) for name in node.names]
        return cast("ast.AST", node)


def _listed(node: Any) -> list[Any]:
    return [] if node is None else node if isinstance(node, list) else [node]


def _own(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes, and all nodes below them that belong to the same scope.

    An inner function or class contributes only its decorators, and a comprehension only its assignments (`:=`).
    """
    for node in nodes:
        yield node
        inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = node.decorator_list
        elif isinstance(node, ast.Lambda):
            inner = ()
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            inner = (x for x in ast.walk(node) if isinstance(x, ast.NamedExpr))
        yield from _own(inner)


def _bound(body: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that nodes bind in their own scope, in order."""
    for node in _own(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        else:
            yield from filter(None, (getattr(node, field) for kind, field in NAMED if isinstance(node, kind)))
