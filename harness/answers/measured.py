"""The text of a study whose claims are about measured quantities: its answer, its setting, tables, then its claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

import pyarrow as pa

from harness.answers.table import WIDTH, folded, printed
from harness.rows import crossings
from harness.rows.about import About
from harness.study import claims, measured
from harness.study.claims import Verdict, paper_text, reason


def lines(table: pa.Table, about: About) -> Iterator[str]:
    """Yield the text of a stored study: the answer in a line, the setting, tables, one or two lines per claim."""
    every = claims.verdicts(table, about)
    yield answer(about, every)
    yield f"simulated, {about.setting}; {about.seeds} seed{'s' * (about.seeds > 1)}"
    for name in about.shown:
        rate = f", the rate up to which {100 * about.level:g} % are within"
        yield name + (rate if name == measured.HELD_RPS else " at the highest rate")
        yield from printed([list(_table(table, about, name))])
    yield from claimed(every)


def answer(about: About, every: Sequence[Verdict]) -> str:
    """Return the headline of a study with the ratios to other systems filled in.

    The ratio to a system is the range over all headline claims about it.
    """
    means: dict[str, list[float]] = {}
    for verdict in every:
        if (here := verdict.here) is not None and verdict.claim.headline:
            means.setdefault(verdict.claim.headline, []).append(here.mean)
    ranges = {name: dict.fromkeys(f"{x:.2f}" for x in (min(of), max(of))) for name, of in means.items()}
    return about.headline.format(", ".join(f"{' to '.join(of)} times {name}'s" for name, of in ranges.items()))


def _table(table: pa.Table, about: About, name: str) -> Iterator[list[str]]:
    """Yield the rows of a measure's table, one per system: the mean over seeds, in a column per condition.

    The measure HELD_RPS, the rate at which a system meets the level, is computed over all panels of a condition. Any
    other measure is taken from the condition's last panel.
    """
    groups = crossings.by_condition(about.panels)
    yield ["system", *(str(group[0]["name"]) for group in groups)]
    for system in about.systems:
        statements = [
            measured.column(about, table, group if name == measured.HELD_RPS else group[-1:], system, name)
            for group in groups
        ]
        yield [system, *(f"{fmean(seeds.values()):.3g}" if seeds else "-" for seeds in statements)]


def claimed(every: Sequence[Verdict]) -> Iterator[str]:
    """Yield a line for each claim: its class, the paper's number, the result here, and the claim in words.

    If the verdict has a note, or the numbers differ for a known reason, that text follows below.
    """
    width = max((len(verdict.text) for verdict in every), default=0)
    for verdict in every:
        claim, law = verdict.claim, measured.law(verdict.panel)
        says = f"{claim.says}, {law}" if law else claim.says
        yield f"{verdict.says:12} {paper_text(claim):>10}  here {verdict.text:{width}} {says} ({claim.section})"
        if why := reason(verdict):
            indent = " " * 13
            yield from folded(indent + why, WIDTH, indent)
