"""One HTML file that holds a whole answer: it loads nothing, so it opens without a network, from a mail or a disk.

A page is text, tables and SVG figures; a few lines of script sort tables. A policy in its head forbids any load.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.answers.table import Table


class Picture(NamedTuple):
    """A figure, as SVG, and the words below it."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Page:
    """The parts of a page, in their order."""

    question: str
    answer: str  # a sentence, with its interval
    pictures: Sequence[Picture]
    tables: Sequence[Table]
    notes: Sequence[str]  # what a reader must know of the tables
    conditions: Sequence[tuple[str, str]]
    fidelity: str  # simulated or real, and how far that was checked
    made: Sequence[tuple[str, str]]  # a number, and how it was made
    command: str  # that repeats it; "": none is known
    source: str  # the folder's name, and the version of the bench


def page(of: Page) -> str:
    """Render a page."""
    parts = [
        f"<h1>{_text(of.question)}</h1>",
        f'<p class="answer">{_text(of.answer[:1].upper() + of.answer[1:])}</p>',
        *map(_picture, of.pictures),
        *(table.html() for table in of.tables),
        _list("Notes", of.notes),
        _pairs("Conditions", of.conditions),
        f"<section><h2>Fidelity</h2><p>{_text(of.fidelity)}</p></section>",
        _pairs("How each number was made", of.made),
        _command(of.command),
        f"<footer>{_text(of.source)}</footer>",
    ]
    return HEAD.format(title=_text(of.question), style=STYLE) + "\n".join(filter(None, parts)) + TAIL.format(SCRIPT)


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _picture(picture: Picture) -> str:
    svg = re.sub(r"^\s*<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", "", picture.svg, flags=re.DOTALL).strip()
    wide = re.match(r'<svg[^>]*? width="([\d.]+)pt"', svg)
    least = "wide" if wide and float(wide[1]) > WIDE_PT else "narrow"
    spoken = f'role="img" aria-label="{_text(picture.caption)}"'
    svg = re.sub(r'^(<svg[^>]*?) width="[^"]*" height="[^"]*"', lambda match: f"{match[1]} {spoken}", svg)
    caption = f"<figcaption>{_text(picture.caption)}</figcaption>" if picture.caption else ""
    return f'<figure class="{least}"><div class="drawn" tabindex="0">{svg}</div>{caption}</figure>'


def _list(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<section><h2>{title}</h2><ul>{items}</ul></section>" if items else ""


def _pairs(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in pairs if text)
    return f"<section><h2>{title}</h2><dl>{items}</dl></section>" if items else ""


def _command(command: str) -> str:
    spoken = f"<pre>{_text(command)}</pre>" if command else "<p>None is stored beside these results.</p>"
    return f"<section><h2>The command that repeats it</h2>{spoken}</section>"


WIDE_PT = 300.0  # of a figure: beyond, a phone scrolls it
HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
"""
STYLE = """
:root { --ink: #1b1f24; --quiet: #5a636e; --line: #d8dde3; --paper: #fff; --shade: #f4f6f8; --mark: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --quiet: #a0a9b4; --line: #363d46; --paper: #14171b; --shade: #1d2228; --mark: #7ab7f5; }
  .drawn svg { filter: invert(0.92) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.45rem; line-height: 1.25; margin: 0 0 .75rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.answer { font-size: 1.1rem; border-left: 4px solid var(--mark); background: var(--shade); margin: 0 0 1.5rem;
  padding: .75rem 1rem; }
figure { margin: 1.5rem 0; }
.drawn, .table { overflow-x: auto; }
.drawn svg { display: block; width: 100%; height: auto; }
.narrow svg { max-width: 40rem; margin: 0 auto; }
.wide svg { min-width: 40rem; }
figcaption, footer { color: var(--quiet); font-size: .85rem; margin-top: .5rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { min-width: 4.5rem; vertical-align: bottom; border-bottom: 2px solid var(--line); }
tbody th { font-weight: 600; white-space: nowrap; }
td { min-width: 4.5rem; }
td.long { min-width: 16rem; }
th button { all: unset; cursor: pointer; color: var(--mark); font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--mark); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
dl { display: grid; grid-template-columns: minmax(7rem, 14rem) 1fr; gap: .25rem 1rem; margin: 0; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--shade); padding: .75rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; margin: 0; }
@media (max-width: 34rem) { dl { display: block; } dd { margin-bottom: .5rem; } }
@media print {
  :root { --ink: #000; --quiet: #333; --line: #999; --paper: #fff; --shade: #fff; --mark: #000; }
  body { font-size: 10pt; } main { max-width: none; padding: 0; }
  .drawn svg { filter: none; } .wide svg { min-width: 0; } .narrow svg { max-width: 9cm; }
  .drawn, .table { overflow: visible; } figure, tr, .answer { break-inside: avoid; } h2 { break-after: avoid; }
  table { font-size: 8pt; } thead th { white-space: normal; }
}
"""
SCRIPT = """
document.addEventListener("click", event => {
  const head = event.target.closest("thead th");
  if (!head) return;
  const table = head.closest("table"), body = table.tBodies[0];
  const at = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
  const key = row => {
    const cell = row.cells[at], number = parseFloat(cell.dataset.v);
    return [Number.isNaN(number) ? 1 : 0, Number.isNaN(number) ? cell.textContent : number];
  };
  const order = (a, b) => {
    const [p, x] = key(a), [q, y] = key(b);
    if (p !== q) return p - q;
    return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
  };
  body.append(...[...body.rows].sort(order));
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
});
"""
TAIL = "\n</main>\n<script>{}</script>\n</body>\n</html>\n"
