"""Markdown of `bench validate`: `docs/validation.md`, written by `make validate`, and single comparisons."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from harness.validate import idle, ranks
from harness.validate.names import Skipped
from harness.validate.ranks import Cell, Pair
from harness.validate.validate import GROUP_AIM, furthest, groups, notes, scores, worst

Table = Callable[[Iterable[Sequence[str]]], Iterable[str]]  # rows, the first of which is the head, as Markdown
WIDE = 100  # characters of a line
PAGE_WIDE = 120  # characters of a line of docs/validation.md
PROSE = Path(__file__).with_suffix(".txt")  # texts of the page, each below a line with its name


class Comparison(NamedTuple):
    """A comparison of the simulator with the measurements of one folder."""

    title: str
    answer: str
    how: str  # says how it was measured and simulated
    rows: Sequence[tuple[str, ...]]  # the first is the head
    note: str = ""
    predictions: Sequence[str] = ()  # earlier predictions beside it, a line each

    def page(self, command: str, table: Table) -> str:
        """Return the comparison as Markdown, with the command that wrote it."""
        parts = (f"# {self.title}", self.answer, f"{self.how} Written by `{command}`.")
        lines = [line for part in parts for line in (*textwrap.wrap(part, WIDE, break_on_hyphens=False), "")]
        after = [x for line in self.predictions for x in ("", f"- {line.strip()}" if line[0] == " " else line)]
        return "\n".join([*lines[:-1], *table(self.rows), *[self.note] * bool(self.note), *after]).rstrip() + "\n"


def page(
    frame: pd.DataFrame, skipped: Sequence[Skipped], shared: Sequence[str], kept: idle.Footprint, table: Table
) -> str:
    """Return the page as Markdown.

    `shared` has lines on models that share a card. `kept` is the KV memory that an idle model keeps.
    """
    return "\n".join(_lines(frame, skipped, shared, kept, table)) + "\n"


def _lines(
    frame: pd.DataFrame, skipped: Sequence[Skipped], shared: Sequence[str], kept: idle.Footprint, table: Table
) -> Iterator[str]:
    prose = dict(re.findall(r"=== (\w+)\n(.*?)\n(?==== |\Z)", PROSE.read_text("utf-8"), re.DOTALL))
    yield prose["head"]
    everything, frame = frame, frame[frame["group"] == ""]
    yield f"{frame.groupby(['file', 'row']).ngroups} cases of {frame['file'].nunique()} files; {len(skipped)} skipped."
    yield from table(scores(frame))
    yield from (f"- {line}" for line in (*notes(frame), *map(str, skipped)))
    yield "\n## The ten worst rows\n\nBy the mean with the largest error, as a ratio. Seconds, or tokens per second."
    yield from table(worst_rows(frame))
    if rows := groups(everything):
        yield prose["groups"].format(*(f"{x:g}" for x in GROUP_AIM))
        yield from table(rows)
        yield "\nThe ten rows whose TPOT is furthest off:\n"
        yield from (f"- {line}" for line in furthest(everything))
        yield ""
    yield prose["sort"]
    yield ""
    if shared:
        yield "## Models that share a card\n"
        yield from (f"- {line}" for line in shared)
    yield prose["idle"]
    yield from table(idle.rows(kept))
    yield "\n" + textwrap.fill(idle.words(kept), PAGE_WIDE, break_on_hyphens=False)
    yield prose["tail"]


def compared(
    command: str,
    told: Sequence[str],
    pairs: Sequence[Pair],
    cells: Sequence[Cell],
    attainment: str,
    met: Sequence[str],
    table: Table,
) -> str:
    """Return a comparison of an engine with the simulator as Markdown.

    The Markdown has the command, notes (`told`), a table of pairs of systems, a table of cells, and lines that say
    which aims are met (`met`).
    """
    lines = [f"`{command}`\n", *(f"- {line}" for line in told), ""]
    lines += [*table(ranks.pair_rows(pairs)), ""] if pairs else []
    lines += ["Attainment in %; errors of simulated latencies, beside the spread of the measured repeats.\n"]
    lines += [*table(ranks.cell_rows(cells, attainment)), "", *(f"- {line}" for line in met)]
    return "\n".join(lines) + "\n"


def worst_rows(frame: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """Yield a heading, and then the worst rows with their conditions."""
    yield ("row", "engine", "GPUs", "model", "load", "flags", "rows", "metric", "measured", "ours", "error %")
    for row in worst(frame).to_dict("records"):
        load = f"{row['load']}, stage {row['stage']}" if row["stage"] else row["load"]
        which = "fitted" if row["fitted"] else "left out"
        numbers = f"{row['measured']:.4g}", f"{row['ours']:.4g}", f"{100 * row['error']:+.1f}"
        where = f"{row['file']}:{row['row']}", row["engine"], f"{row['tp']} x {row['gpu']}", row["model"]
        yield (*where, load, row["flags"] or "defaults", which, row["metric"], *numbers)
