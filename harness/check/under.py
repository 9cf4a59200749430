"""The digest of what a check depends on beside the system's file: laws, cases, loop, engine and cost tables."""

from __future__ import annotations

import ast
from functools import cache
from hashlib import sha256
from pathlib import Path

from harness.loop.system import ROOT

FILES = (
    "harness/check/*.py",
    "harness/loop/*.py",
    "harness/policy/*.py",
    "harness/engines/machine.py",
    "harness/engines/rows.py",
    "harness/engines/stamps.py",
    "harness/engines/sim/**/*.py",
    "harness/engines/costs/*.py",
    "harness/engines/costs/tables/*.toml",
    "workloads/shapes.toml",
)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def under() -> str:
    """Return the SHA-256 over the files, by what they mean: a comment or a docstring changes nothing."""
    files = sorted({file for pattern in FILES for file in ROOT.glob(pattern)})
    lines = (f"{file.relative_to(ROOT)}\0{meaning(file)}\n" for file in files)
    return sha256("".join(lines).encode()).hexdigest()


def meaning(file: Path) -> str:
    """Return a file's text, and of Python what is left without comments and docstrings."""
    text = file.read_text("utf-8")
    if file.suffix != ".py":
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.unparse(tree)
