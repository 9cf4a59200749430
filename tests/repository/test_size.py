"""Lengths of each system's rules: its code without prose and declarations.

A line counts if code stands on it; blank lines and comments never do. Docstrings, imports and what the body of a class
declares (fields, state, presets) are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.loop import system
from tests import ROOT
from tests.cases import cases
from tests.tools.lines import code, main, spanned

MOST = 300
MOST_OF = {
    "prism": 371,  # two levels, an algorithm each, elastic or fixed memory; changes by the GPUs concerned
    "muxserve": 317,  # as published, its port to SGLang, and as Weaver's artifact runs it: degrees chosen or given
}


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


@cases("name", system.names())
def test_the_rules_of_a_system_are_short(name: str) -> None:
    assert len(rules((ROOT / f"systems/{name}.py").read_text("utf-8"))) <= MOST_OF.get(name, MOST)


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


def test_lines_of_code_are_those_without_prose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(COUNTED)
    main([str(tmp_path), str(tmp_path / "mine.py")])
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["16", "16", "32"]
