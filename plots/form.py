"""The form of a figure: width, systems and their names, caption, formats, a style file.

`bench plot` sets the form while it draws (`on`); `style` and the figures read it.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pyarrow as pa
import pyarrow.compute as pc

from harness.policy.fields import meant
from harness.policy.types import UserError

FORMATS = ("pdf", "png", "svg", "pgf")
LATEX = ("xelatex", "lualatex", "pdflatex")  # any of them writes pgf
LEAST, MOST_IN = 0.65, 40.0  # share of the width that a figure is made for; inches
MACHINE = ("backend", "interactive", "toolbar", "webagg", "tk.", "savefig.directory", "docstring")
MOST_STYLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Form:
    """The form of a figure: the options of `bench plot`, and the systems whose names have a mark."""

    width_in: float | None = None  # None: one or two columns, as the figure has it
    only: tuple[str, ...] = ()  # systems that are drawn; none: all
    rename: Mapping[str, str] = field(default_factory=dict)  # names in place of labels
    panel: str = ""  # the letter of the only panel
    caption: bool = True
    formats: tuple[str, ...] = ("pdf", "png")
    style: Path | None = None  # a file of matplotlib's, above ours
    unserved: Mapping[str, str] = field(default_factory=dict)  # what some systems fail: "4 of 16 models at 0 %"

    def words(self) -> tuple[str, ...]:
        """List the given options that only some figures accept: those that choose or rename systems and panels."""
        given = {"--only": self.only, "--rename": self.rename, "--panel": self.panel}
        return tuple(name for name, value in given.items() if value)


ASKED: ContextVar[Form] = ContextVar("form", default=Form())  # noqa: B039 - frozen, and nobody writes its table


@contextmanager
def on(asked: Form) -> Iterator[None]:
    """Set the form of all figures that are drawn within the block.

    Raises UserError for a wrong style file, or for pgf without LaTeX.
    """
    if asked.style is not None:
        style_of(asked.style)
    if "pgf" in asked.formats and latex() is None:
        raise UserError(f"pgf needs LaTeX ({' or '.join(LATEX)}), which is not here; pdf and svg need nothing")
    token = ASKED.set(asked)
    try:
        yield
    finally:
        ASKED.reset(token)


def latex() -> str | None:
    """Return the first command of `LATEX` that is installed; None if none is."""
    return next((name for name in LATEX if shutil.which(name)), None)


def style_of(path: Path) -> dict[str, Any]:
    """Read a matplotlib style file, without the settings that depend on the machine.

    Raises UserError if it is not a style file, or if a line is wrong.
    """
    if path.exists() and not (path.is_file() and path.stat().st_size <= MOST_STYLE_BYTES):
        raise UserError(f"--style {path}: not a style file")
    log, heard = logging.getLogger("matplotlib"), BufferingHandler(1 << 20)
    log.addHandler(heard)
    try:
        params = mpl.rc_params_from_file(str(path), use_default_template=False)
    except (OSError, ValueError, KeyError, RuntimeError, Warning) as error:
        raise UserError(f"--style {path}: {getattr(error, 'strerror', None) or ' '.join(str(error).split())}") from None
    finally:
        log.removeHandler(heard)
    if heard.buffer:
        line = heard.buffer[0].getMessage().partition("You probably")[0]
        raise UserError(f"--style {path}: {' '.join(line.split())}")
    return {key: value for key, value in params.items() if not key.startswith(MACHINE)}


def width(made_for: float) -> float:
    """Return the width of a figure in inches: the one asked for, or `made_for`.

    Raises UserError if the width asked for is so small that words would collide.
    """
    width_in = ASKED.get().width_in
    if width_in is None:
        return made_for
    if width_in < LEAST * made_for:
        least = math.ceil(100 * LEAST * made_for) / 100
        raise UserError(
            f"--width {width_in:g}: this figure is made for {made_for:g} inches, and its words collide below {least:g}"
        )
    return width_in


def called(label: str) -> str | None:
    """Return the name that --rename gives a label; None if it gives none.

    If --rename names only the part of the label before the brackets, the brackets are appended to the new name.
    """
    rename = ASKED.get().rename
    head, bracket, rest = label.partition(" (")
    if label in rename:
        return rename[label]
    return f"{rename[head]}{bracket}{rest}" if head in rename else None


def chosen(table: pa.Table) -> pa.Table:
    """Return the rows of the systems asked for. Raises UserError if --only or --rename names one that has no rows."""
    form = ASKED.get()
    labels = list(dict.fromkeys(table["label"].to_pylist()))
    for option, names in (("--only", form.only), ("--rename", form.rename)):
        for name in names:
            if name not in labels:
                raise UserError(f'{option}: no system "{name}" here{meant(name, labels)} (it has: {", ".join(labels)})')
    if not form.only:
        return table
    return table.filter(pc.is_in(table["label"].cast(pa.string()), pa.array(form.only)))
