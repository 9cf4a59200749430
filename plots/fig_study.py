"""A study in its layout: crossings and curves, a table of ratios, fewest GPUs, losses without parts, or a trade-off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from harness.policy.types import UserError
from harness.rows import crossings, record, tidy
from harness.rows.about import About
from harness.rows.record import SWEEP
from plots import form, lines, matrix, parts, style, tradeoff

# A drawer has points(table, facts), draw(table, facts, note) and full_caption(table, facts, note); one that draws many
# pages has pages(table, facts, note) too.
DRAWERS: Mapping[str, ModuleType] = {
    "lines": lines,
    "fleet": lines,
    "steps": matrix,
    "matrix": matrix,
    "parts": parts,
    "tradeoff": tradeoff,
    "ideas": lines,
}
CHOOSES = frozenset({"--only", "--rename"})
CURVES = frozenset({"lines", "fleet", "ideas"})  # layouts with a curve for each system


def draws(folder: Path) -> bool:
    """Tell whether a folder holds a study with a layout that has a figure."""
    return (folder / SWEEP).is_file() and record.footer(folder / SWEEP).get("layout") in DRAWERS


def render(sweep: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the study stored in folder `sweep` to `stem`.pdf, .png and .csv; return their paths.

    A study with the layout of a table has no figure. Raises UserError if a file cannot be written, or if --only is
    given for a layout without curves.
    """
    facts = About.read(sweep / SWEEP)
    if facts.layout not in DRAWERS:
        return []
    if form.ASKED.get().only and facts.layout not in CURVES:
        raise UserError(f"{sweep.name}: --only is of curves; this figure shows systems in pairs, or parts of one")
    table, drawer = form.chosen(tidy.stored(sweep / SWEEP)), DRAWERS[facts.layout]
    if only := form.ASKED.get().only:
        systems, controls = (tuple(name for name in names if name in only) for names in (facts.systems, facts.controls))
        claims = tuple(claim for claim in facts.claims if {claim["system"], claim["over"]} <= {*only, ""})
        facts = replace(facts, systems=systems, controls=controls, claims=claims)
    pages = drawer.pages if hasattr(drawer, "pages") else drawer.draw
    gone = {name: max(words) for name, words in crossings.all_unserved(table, facts).items()}
    with style.theme(), form.on(replace(form.ASKED.get(), unserved=gone)):
        drawn = pages(table, facts, note)
        return style.save(drawn, stem, drawer.points(table, facts), command, drawer.full_caption(table, facts, note))
