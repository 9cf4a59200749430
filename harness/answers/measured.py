"""A study of claims about measures in words: its answer, its setting, tables of measures, then its claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

import pyarrow as pa

from harness.answers.table import WIDTH, folded, printed
from harness.rows import crossings
from harness.rows.about import About
from harness.study import claims, measured
from harness.study.claims import SectionVerdict, paper_text, reason


def lines(table: pa.Table, about: About) -> Iterator[str]:
    """Yield the text of a stored study: the answer in a line, the setting, tables, one or two lines per claim."""
    every = judged(table, about)
    yield answer(about, every)
    yield f"simulated, {about.setting}; {about.seeds} seed{'s' * (about.seeds > 1)}"
    for name in about.shown:
        rate = f", the rate up to which {100 * about.level:g} % are within"
        yield name + (rate if name == measured.HELD_RPS else " at the highest rate")
        yield from printed([list(_table(table, about, name))])
    yield from claimed(every)


def judged(table: pa.Table, about: About) -> list[SectionVerdict]:
    """Judge every claim of a study; each verdict has the law of lengths that its panel's trace draws from."""
    return [
        SectionVerdict(verdict.claim.section, verdict, measured.law(verdict.panel))
        for i in range(len(about.claims))
        for verdict in claims.of_claim(table, about, i)
    ]


def answer(about: About, every: Sequence[SectionVerdict]) -> str:
    """Return the headline of a study with the ratios to other systems filled in.

    The ratio to a system is the range over all headline claims about it.
    """
    means: dict[str, list[float]] = {}
    for line in every:
        if (here := line.verdict.here) is not None and line.verdict.claim.headline:
            means.setdefault(line.verdict.claim.headline, []).append(here.mean)
    ranges = {name: dict.fromkeys(f"{x:.2f}" for x in (min(of), max(of))) for name, of in means.items()}
    return about.headline.format(", ".join(f"{' to '.join(of)} times {name}'s" for name, of in ranges.items()))


def _table(table: pa.Table, about: About, name: str) -> Iterator[list[str]]:
    """Yield the rows of a measure's table, one per system: the mean over seeds, in a column per condition.

    The measure HELD_RPS is taken over all panels of a condition. Any other measure is taken from its last panel.
    """
    groups = crossings.by_condition(about.panels)
    yield ["system", *(str(group[0]["name"]) for group in groups)]
    for system in about.systems:
        statements = [
            measured.column(about, table, group if name == measured.HELD_RPS else group[-1:], system, name)
            for group in groups
        ]
        yield [system, *(f"{fmean(seeds.values()):.3g}" if seeds else "-" for seeds in statements)]


def claimed(lines: Sequence[SectionVerdict]) -> Iterator[str]:
    """Yield a line for each claim: its class, the paper's number, the result here, and the claim in words.

    If the verdict has a note, or the numbers differ for a known reason, that text follows below.
    """
    width = max((len(line.verdict.text) for line in lines), default=0)
    for section, verdict, law in lines:
        of = f", {law}" if law else ""
        paper = paper_text(verdict.claim)
        yield f"{verdict.says:12} {paper:>10}  here {verdict.text:{width}} {verdict.claim.says}{of} ({section})"
        if why := reason(verdict):
            indent = " " * 13
            yield from folded(indent + why, WIDTH, indent)
