"""Figures: one file each, reading Parquet only; the one place with matplotlib.

`bench plot FOLDER` finds a figure by its file, `fig_NAME.py`, if that has two functions. `draws(folder)` tells by names
of files and their footers whether it draws what lies there. `render(folder, stem, command, note="")` writes `stem`.pdf,
.png and .csv (`style.save`) and returns their paths. The first line of the file's docstring says what it shows.
Figures without `draws` are drawn by the commands that have their points. A study's layouts are files of their own
(lines.py with overview.py as its first page, steps.py, matrix.py, fleet.py, parts.py), which fig_study.py chooses from
and caption.py describes.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DRAWS = re.compile(r"^def draws\(", re.MULTILINE)


def names() -> list[str]:
    """Figures of stored results: the directory is the registry. Files are read, not imported."""
    files = (path for path in FOLDER.glob("fig_*.py") if DRAWS.search(path.read_text("utf-8", errors="replace")))
    return sorted(path.stem.removeprefix("fig_") for path in files)


def find(name: str) -> Any:
    """Import the module of a figure; UserError where its file is broken."""
    from harness.policy.types import UserError

    try:
        figure = import_module(f"{__name__}.fig_{name}")
    except Exception as error:  # whatever is wrong in that file is told of that file
        raise UserError(f"plots/fig_{name}.py is broken: {type(error).__name__}: {error}") from error
    if not callable(getattr(figure, "render", None)):
        raise UserError(f"plots/fig_{name}.py is broken: it has no function `render`")
    return figure


def of(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the figures that draw what lies in a folder, by name, and a line for each figure whose file is broken.

    UserError where the folder's content cannot be read: a figure's `draws` raises it.
    """
    from harness.policy.types import UserError

    figures, broken = dict[str, Any](), []
    for name in names():
        try:
            figures[name] = find(name)
        except UserError as error:
            broken.append(str(error))
    return {name: figure for name, figure in figures.items() if figure.draws(folder)}, broken


def listing() -> list[tuple[str, str]]:
    """Each figure of stored results and what it shows, or how its file is broken."""
    from harness.policy.types import UserError

    lines = []
    for name in names():
        try:
            lines.append((name, (find(name).__doc__ or "").strip().partition("\n")[0]))
        except UserError as error:
            lines.append((name, str(error)))
    return lines
