"""A system without one of its parts: what each part adds, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import ascii_lowercase
from typing import Any, NamedTuple

import pyarrow as pa

from harness.answers.table import Table
from harness.rows import crossings
from harness.rows.about import About
from harness.rows.estimate import POINTS, Estimate

Place = tuple[str, float]  # a panel's condition, and x


class Ablation(NamedTuple):
    """A part of a system that is switched off, and the paper's statement about it."""

    subject: str
    says: str
    lost: Mapping[Place, Estimate]  # loss of attainment, as a share
    most: str  # text on the model that loses most and its points; may be empty


def parts(about: About, table: pa.Table, switched: Sequence[Ablation]) -> Iterator[str | Table]:
    """Yield one row per panel and rate, one column per ablated part; '?' marks intervals that cover 0."""
    definition, first = about.definitions[0], about.systems[0]
    yield (
        f"{definition.upper()} attainment (SLO {about.slo}, {about.panels[0]['models']}) with all parts, and the "
        f"change in points without each part ({about.seeds} seeds, paired; ? its 95 % interval covers 0)"
    )
    whole = {
        (panel["condition"], x): shares
        for panel in about.panels
        for x, shares in sorted(crossings.by_model(crossings.of_panel(table, panel), first, definition).items())
    }
    by_model = ({model: sum(of.values()) / len(of) for model, of in shares.items()} for shares in whole.values())
    rows = [
        [place, *(f"{100 * share:.1f}" for share in (means[""], min(means.values())))]
        for place, means in zip(_places(about, table, whole), by_model, strict=True)
    ]
    head, legend = ["", "all", "worst"], list[str]()
    for name, part in zip(ascii_lowercase, switched, strict=False):
        head.append(name)
        legend.append(f"{name}  without {part.subject}{part.most}")
        for row, at in zip(rows, whole, strict=True):
            row.append(_change(part.lost[at]))
    yield Table(head, rows)
    yield from legend
    yield from (f"the paper on {part.subject}: {part.says}" for part in switched if part.says)


def _places(about: About, table: pa.Table, whole: Mapping[Place, Any]) -> Iterator[str]:
    """Name for each row its panel's trace, the half of the trace if the panel has one, and the offered rate."""
    panels = {panel["condition"]: panel for panel in about.panels}
    for condition, x in whole:
        panel = panels[condition]
        half = f", {panel['half']} half" if panel.get("half") else ""
        yield f"{panel['trace']}{half}, {offered_rps(crossings.of_panel(table, panel), x):.3g} req/s"


def offered_rps(rows: pa.Table, x: float) -> float:
    """Return the requests per second that a panel's runs were offered at `x`, averaged over the runs."""
    frame = rows.select(["x", "definition", "over", "value"]).to_pandas()
    offered = frame[(frame["definition"] == "offered_rps") & (frame["over"] == "pooled") & (frame["x"] == x)]
    return float(offered["value"].mean())


def _change(lost: Estimate) -> str:
    """Render how switching the part off changes attainment, in points."""
    doubtful = lost.low is not None and lost.high is not None and lost.low < 0.0 < lost.high
    return f"{points(lost)}{' ?' if doubtful else ''}"


def points(lost: Estimate) -> str:
    """Render a loss of attainment as a change of it, in points."""
    return lost.times(-100).text(POINTS, spread=False)
