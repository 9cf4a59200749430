"""The parts of a system's file that the cases of a check reached: lines of its functions, actions and events.

Laws cannot judge code that no case runs: an error in such code breaks no law. Lines that only raise Infeasible do not
count. They run only where models do not fit, and such a run reports this itself.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from harness.check.trial import ACTIONS, EVENTS, Trial, needs
from harness.loop import system
from harness.policy.actions import Wake

SHOWN = 12  # runs of lines in a sentence


class Reached:
    """The lines, actions and events of a system's file that trials have reached so far."""

    def __init__(self, name: str) -> None:
        """Read the file of the system with this name or path.

        Raises UserError if there is none, and SyntaxError if the file is not Python.
        """
        self.file = str(system.path(name))
        tree = ast.parse(Path(self.file).read_bytes(), self.file)
        refusals, functions = set(_refusals(tree)), _functions(compile(tree, self.file, "exec"))
        self._left = {_key(inner): lines - refusals for inner, lines in functions}  # still to be reached
        self._lines = {line for lines in self._left.values() for line in lines}
        self._ran = set[int]()
        self._uses, self._needs, self._hears, self._heard = set[str](), set[str](), set[str](), set[str]()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the lines of the file that run within the context."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        left = self._left.get(_key(code)) if code.co_filename == self.file else None
        if not left:
            return None

        def line(frame: FrameType, event: str, _arg: Any) -> Any:
            if event == "line":
                left.discard(frame.f_lineno)
                ran.add(frame.f_lineno)
            return line

        ran = self._ran
        return line(frame, "line", None)

    def add(self, trial: Trial) -> None:
        """Note the actions and events that a trial reached."""
        kinds = {kind.__name__ for kind in ACTIONS if kind is not Wake}  # a timer is the loop's
        self._uses |= {use for use in trial.uses if use.partition(".")[0] in kinds}
        self._hears |= {kind.__name__ for kind in trial.hears if kind in EVENTS}
        self._heard |= {type(decision.event).__name__ for decision in trial.decisions}
        for action in {action for decision in trial.decisions for action in decision.actions}:
            for need in needs(action):
                self._needs |= {need, need.partition(":")[0]}

    @property
    def lines(self) -> list[int]:
        """The lines of functions that no trial reached, in order."""
        return sorted(self._lines - self._ran)

    @property
    def text(self) -> str:
        """The parts that no trial reached, in words; "" if all were reached."""
        events = (f"the event {name}" for name in sorted(self._hears - self._heard))
        parts = [*sorted(self._uses - self._needs), *events]
        if lines := self.lines:
            runs = _runs(lines)
            more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
            parts.append(f"line{'s' * (len(lines) > 1)} {', '.join(runs[:SHOWN])}{more}")
        return ", ".join(parts)


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _refusals(tree: ast.Module) -> Iterator[int]:
    """Yield the numbers of all lines of statements that raise Infeasible."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = node.exc.func
            if isinstance(name, ast.Name) and name.id == "Infeasible":
                yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _functions(code: CodeType) -> Iterator[tuple[CodeType, set[int]]]:
    """Yield each function of a file, with the numbers of its lines.

    Lines outside of functions are left out, because an import runs them.
    """
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & inspect.CO_OPTIMIZED:  # a function
                lines = {line for _, _, line in inner.co_lines() if line is not None}
                yield inner, lines - {inner.co_firstlineno} if inner.co_name[0] != "<" else lines
            yield from _functions(inner)


def _runs(lines: list[int]) -> list[str]:
    """Return line numbers as texts, with consecutive lines joined to ranges: 47, 58-66."""
    runs: list[list[int]] = []
    for line in lines:
        if runs and line == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], line]
        else:
            runs.append([line])
    return ["-".join(map(str, run)) for run in runs]
