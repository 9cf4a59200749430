"""The card of an entry, as text, JSON and one HTML page, and pieces of HTML that the table's page uses too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from harness.answers.page import document
from harness.answers.table import Table
from harness.rows import record, vetted
from harness.rows.estimate import NONE
from harness.suite.score import Card, Row, told
from harness.suite.suite import Suite

HEADS = (
    "scenario|req/s at 99 %|[low, high]|worst model|of best|best known|of bound|misses wait for|µs a decision|"
    "failed requests"
).split("|")
ABOUT = (
    "The rate at which 99 % of all requests meet their SLO, and that of the model that misses most. Its share of the "
    "highest rate of any shipped system is the score; the total is the mean of the shares."
)
POOL = (
    "unified KV: models of a GPU draw KV from one pool of blocks (kv=paged without limits), as in MuxServe's engine. "
    "Separate processes lack such a pool and share memory by pages (kv=elastic)."
)
MICROSECONDS = 1e6


def cells(row: Row, suite: Suite) -> list[str]:
    """Return the cells of a scenario's row on the card."""
    scenario = next(s for s in suite.scenario if s.name == row["scenario"])
    best = NONE if scenario.best_rps is None else f"{scenario.best_rps:.3g} {scenario.best}"
    share = NONE if row.get("share") is None else f"{row['share']:.2f}"
    bound = NONE if scenario.bound_rps is None else f"{row.get('rps', 0.0) / scenario.bound_rps:.2f}"
    if row.get("failed"):
        return [row["scenario"], NONE, "", NONE, share, best, bound, str(row["failed"]), NONE, NONE]
    short = next(iter(row["binds"]), NONE)
    charged = f" charged {MICROSECONDS * row['charged_s']:.0f}" if row["charged_s"] else ""
    return [
        row["scenario"],
        told(row).removesuffix(" req/s"),
        interval(row["low_rps"], row["high_rps"]),
        f"{row['worst_rps']:.3g}",
        share,
        best,
        bound,
        f"{short} {100 * row['binds'][short]:.0f} %" if short in row["binds"] else short,
        f"{MICROSECONDS * row['decision_s']:.0f}{charged}",
        str(row["never"]),
    ]


def interval(low: float | None, high: float | None) -> str:
    """Render an interval; an open end is a dash."""
    return f"[{NONE if low is None else f'{low:.3g}'}, {NONE if high is None else f'{high:.3g}'}]"


def summed(of: Card) -> str:
    """Return a card's total in words, with its interval and the number of scenarios that count as 0."""
    if of.total is None:
        return "no total: this version has no best known rates yet"
    zero = sum(not row["share"] for row in of.rows)
    ends = interval(of.low, of.high).replace("[-, -]", "without an interval")
    counted = f", {zero} of which count{'s' if zero == 1 else ''} 0" if zero else ""
    return f"total {of.total:.3f} {ends}, the mean of {len(of.rows)} scenarios{counted}"


def seeds(of: Card) -> str:
    """Say in words which seeds a card was scored on: those of a beacon, or the public ones."""
    return f"seeds of beacon {of.beacon}" if of.beacon else "public seeds, for development: no ranking"


def lines(of: Card, suite: Suite) -> Iterator[str]:
    """Yield the card as text."""
    yield f"{of.label} on {of.version}: {summed(of)} ({seeds(of)})"
    yield from Table(HEADS, [cells(row, suite) for row in of.rows]).text()
    if suite.seeds == 1:
        yield "--quick: one window a scenario; its rates may be 20 % off those of eight, so compare none with the best"
    if any(row.get("pool") for row in of.rows):
        yield POOL
    if unreached := vetted.unreached(of.label):
        yield f"no case of its check reached {unreached}"


def facts(of: Card, suite: Suite) -> dict[str, Any]:
    """Return the card as JSON values."""
    lists = {"rows": list(of.rows), "refused": list(of.refused)}
    return {**of._asdict(), **lists, "scenarios": [s.name for s in suite.scenario]}


def write(of: Card, suite: Suite, out: Path) -> Path:
    """Write the card's page."""
    seeds_of = f"-{of.beacon[:8]}" if of.beacon else ""
    path = out / f"{of.label.replace(':', '-').replace(' ', '-')}-{of.version}{seeds_of}.html"
    out.mkdir(parents=True, exist_ok=True)
    record.write_bytes(path, page(of, suite).encode())
    return path


def page(of: Card, suite: Suite) -> str:
    """Render the card as one HTML page that loads no other file."""
    title = f"{of.label} on {of.version}"
    drawn = "".join(figure(row, of.label) for row in of.rows if row.get("curve"))
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="answer">{escape(summed(of))} ({escape(seeds(of))}).</p>',
        Table(HEADS, [cells(row, suite) for row in of.rows]).html(),
        f'<section><h2>Curves</h2><div class="curves">{drawn}</div></section>',
        f"<section><h2>How each number was made</h2><p>{escape(ABOUT)}</p>",
        f"<p>{escape(POOL)}</p></section>" if any(row.get("pool") for row in of.rows) else "</section>",
        f"<footer>{escape(of.version)} · policy {of.content[:12]} · code {of.code}</footer>",
    ]
    return document(title, parts, CURVES)


CURVES = """
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: 1rem; }
.curves figure { margin: 0; } .curves svg { width: 100%; height: auto; color: var(--mark); }
"""
WIDTH, HEIGHT, LEAST = 200.0, 90.0, 0.8  # a curve's size in SVG units; attainment at which its axis begins


def figure(row: Row, label: str) -> str:
    """Draw attainment over the rate as a small SVG curve, with a horizontal line at 99 %."""
    points: Sequence[Sequence[float]] = row["curve"]
    most = max(x for x, _ in points)

    def at(x: float, y: float) -> str:
        return f"{x / most * WIDTH:.1f},{HEIGHT - (max(y, LEAST) - LEAST) / (1 - LEAST) * HEIGHT:.1f}"

    level = at(0.0, 0.99).split(",")[1]
    drawn = " ".join(at(x, y) for x, y in points)
    spoken = f"{label} in {row['scenario']}: {told(row)}"
    return (
        f'<figure><svg viewBox="0 -4 {WIDTH:g} {HEIGHT + 8:g}" role="img" aria-label="{escape(spoken)}">'
        f'<line x1="0" x2="{WIDTH:g}" y1="{level}" y2="{level}" stroke="currentColor" stroke-opacity=".3"/>'
        f'<polyline points="{drawn}" fill="none" stroke="currentColor" stroke-width="2"/></svg>'
        f"<figcaption>{escape(row['scenario'])}: {escape(told(row))}; to {most:.3g} req/s</figcaption></figure>"
    )
