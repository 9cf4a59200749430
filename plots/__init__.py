"""Figures: one file each, which reads Parquet only. No other code uses matplotlib.

`bench plot FOLDER` finds a figure by its file, `fig_NAME.py`, if the file has two functions. `draws(folder)` tells
whether the figure can be drawn from a folder, by the names and footers of the folder's files. `render(folder, stem,
command, note="")` writes `stem`.pdf, .png and .csv (`style.save`) and returns their paths. The first line of the file's
docstring says what the figure shows. docs/contributing.md has an example.

Figures without `draws`, and those of scatter.py, are drawn by the commands that compute their points. A study is drawn
by fig_study.py with the module of the study's layout: lines.py (its first page is overview.py), matrix.py, parts.py or
tradeoff.py. The captions of studies come from caption.py. All figures are laid out and scaled by page.py: a legend,
lines of panels and a caption that never overlap, round ticks, curves, rows.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.policy.types import UserError

FOLDER = Path(__file__).parent
DRAWS = re.compile(r"^def draws\(", re.MULTILINE)


class Broken(UserError):
    """An error for a figure whose file cannot be imported or lacks a function, or whose function raised an error."""


def names() -> list[str]:
    """Return the names of the figures of stored results: files fig_NAME.py that define `draws`.

    Files are read, not imported.
    """
    files = (path for path in FOLDER.glob("fig_*.py") if DRAWS.search(path.read_text("utf-8", errors="replace")))
    return sorted(path.stem.removeprefix("fig_") for path in files)


def find(name: str) -> Any:
    """Import the module of a figure. Raises Broken."""
    try:
        figure = import_module(f"{__name__}.fig_{name}")
    except Exception as error:  # any error of that file is reported under its name
        raise Broken(f"plots/fig_{name}.py is broken: {type(error).__name__}: {error}") from error
    if not callable(getattr(figure, "render", None)):
        raise Broken(f"plots/fig_{name}.py is broken: it has no function `render`")
    return figure


def of(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the figures that can be drawn from a folder, by name, and an error line for each broken figure.

    If `draws` of a figure raises UserError, for example because a file cannot be read, that error is passed on.
    """
    figures, broken = dict[str, Any](), []
    for name in names():
        try:
            figure = find(name)
            if draws(figure, folder):
                figures[name] = figure
        except Broken as error:
            broken.append(str(error))
    return figures, broken


def draws(figure: Any, folder: Path) -> bool:
    """Tell whether a figure can be drawn from a folder. Raises Broken, and any UserError of the figure's `draws`."""
    with _guarded(figure, "draws"):
        return bool(figure.draws(folder))


def render(figure: Any, folder: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw a figure and return the paths of its files. Raises Broken, and any UserError of the figure's `render`."""
    with _guarded(figure, "render"):
        return [Path(path) for path in figure.render(folder, stem, command, note)]


@contextmanager
def _guarded(figure: Any, function: str) -> Iterator[None]:
    """Turn an exception of a figure's function into Broken, with the figure's file and line.

    A UserError is passed on.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a figure may be a user's code, and raise anything
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == figure.__file__]
        line = lines[-1] if lines else getattr(figure, function).__code__.co_firstlineno  # the call itself failed
        file = f"plots/{Path(figure.__file__).name}"
        raise Broken(f"{file}, line {line}: `{function}` raised {type(error).__name__}: {error}") from error
