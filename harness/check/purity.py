"""What a system's file may not import or call: it is policy alone, without clock, randomness, threads or I/O."""

from __future__ import annotations

import ast
from collections.abc import Iterator

OURS = ("harness.policy",)
NUMERIC = ("numpy", "scipy")
STANDARD = {  # modules without clock, randomness, threads, files or a way into the interpreter
    *("__future__", "abc", "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "hashlib"),
    *("heapq", "itertools", "math", "operator", "statistics", "string", "types", "typing"),
}
IMPURE_CALLS = {
    *("__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "open", "print"),
    *("hash", "id"),  # differ between two processes
}
IMPURE_NUMPY = {
    *("fromfile", "genfromtxt", "load", "loadtxt", "memmap", "random", "save", "savetxt", "savez"),
    *("savez_compressed", "tofile"),
}


def impure(source: str) -> Iterator[tuple[int, str]]:
    """Lines of a system's source with what it may not import or call. Raises SyntaxError."""
    tree = ast.parse(source)
    numpy: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import(names=aliases):
                names = [a.name for a in aliases]
                numpy |= {a.asname or a.name for a in aliases if a.name == "numpy"}
            case ast.ImportFrom(module=module, names=aliases, level=level):
                names = ["." * level + f"{module or ''}.{a.name}" for a in aliases]
            case ast.Call(func=ast.Name(id=call)) if call in IMPURE_CALLS:
                yield node.lineno, f"calls {call}()"
        yield from ((node.lineno, f"imports {name}") for name in names if not _importable(name))  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=np), attr=name) if np in numpy and name in IMPURE_NUMPY:
                yield node.lineno, f"uses numpy.{name}"


def _importable(name: str) -> bool:
    top, _, rest = name.partition(".")
    if top in NUMERIC:
        return rest.partition(".")[0] not in IMPURE_NUMPY
    return top in STANDARD or any(name == ours or name.startswith(f"{ours}.") for ours in OURS)
