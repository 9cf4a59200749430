"""The table of a version: a row for each shipped system, preset and entry, as Parquet and as one static page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.answers.page import document
from harness.answers.table import section
from harness.loop import system as systems
from harness.policy.types import UserError
from harness.rows import record
from harness.study.size import own_count
from harness.study.study import CONTROLS
from harness.suite.card import POOL, interval
from harness.suite.score import WINDOW, Card, Entry, bounds, score
from harness.suite.suite import Suite

# Each has a further row that knows the window, to show what perfect forecasts are worth.
KNOWS = ("prism", "static", "alpaserve", "warmserve")
HERE, SELF = "here", "self-reported"  # marks of rows: made by this bench, or reported by others and not made again
WIDE = """
main { max-width: 80rem; } p, code { overflow-wrap: anywhere; } td a { color: inherit; } .zero { color: var(--quiet); }
th, td, thead th { min-width: 3.2rem; } tbody th { position: sticky; left: 0; background: var(--paper); }
"""
FACTS = "version beacon entry content code made scenario failed".split()
NUMBERS = "rps low_rps high_rps worst_rps bound_rps decision_s charged_s".split()
WORDS = "sign unserved binds pool".split()
SCHEMA = pa.schema([(name, pa.float64() if name in NUMBERS else pa.string()) for name in (*FACTS, *NUMBERS, *WORDS)])


def entries(folder: Path, texts: Sequence[str] | None = None) -> list[Entry]:
    """List the table's entries: those in `texts` or, without `texts`, all that the bench has.

    The bench has the shipped systems, their presets, and the policies in `folder`. The systems of KNOWS have a second
    entry, with forecasts computed from the window. Controls, and systems that set their own GPU count, are left out.
    """
    if texts is not None:
        return [Entry(text.removesuffix("+window"), text.endswith("+window")) for text in texts]
    every = []
    for name in systems.names():
        if name not in CONTROLS and not own_count(name):
            every += [Entry(name), *(Entry(f"{name}:{preset}") for preset in systems.find(name).presets)]
    every += [Entry(name, window=True) for name in KNOWS]
    return every + [Entry(str(path)) for path in sorted(folder.glob("*.py"))]


def make(
    every: Sequence[Entry],
    suite: Suite,
    beacon: str,
    out: Path,
    published: Path,
    workers: int,
    tell: Callable[[str], None],
) -> Iterator[Path]:
    """Score entries, write the table and its page, and yield their two paths.

    Both files are written after each entry, and again once the bounds are known. An entry that is refused has rows that
    state the reason. An entry that raises UserError is reported and has no rows.
    """
    path, page_path = published / f"{suite.version}.parquet", published / f"{suite.version}.html"
    published.mkdir(parents=True, exist_ok=True)
    rows = [row for row in read(path) if row["version"] == suite.version and row["beacon"] == beacon]
    for k, entry in enumerate(every, 1):
        tell(f"{k} of {len(every)}: {entry.label}")
        try:
            made = score(entry, suite, beacon, out, workers, tell)
        except UserError as error:
            tell(f"{entry.label}: {error}")
            continue
        rows = [row for row in rows if row["entry"] != made.label] + [*of_card(made, suite)]
        _write(rows, suite, beacon, path, page_path)
    tell("bounds")
    most = bounds(suite, beacon, out)
    rows = [{**row, "bound_rps": most.get(row["scenario"])} for row in rows]
    _write(rows, suite, beacon, path, page_path)
    yield from (path, page_path)


def _write(rows: Sequence[dict[str, Any]], suite: Suite, beacon: str, path: Path, page_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, compression="zstd")
    record.write_bytes(page_path, page(rows, suite, beacon).encode())


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a table; none where there is none."""
    return pq.read_table(path).to_pylist() if path.is_file() else []


def of_card(of: Card, suite: Suite) -> Iterator[dict[str, Any]]:
    """Yield a card's rows for the table; a refused entry has a row per scenario that states the reason."""
    facts = {name: getattr(of, name) for name in ("version", "beacon", "content", "code")}
    facts |= {"entry": of.label, "made": HERE}
    rows = of.rows or [{"scenario": s.name, "failed": f"refused: {'; '.join(of.refused)}"} for s in suite.scenario]
    for row in rows:
        kept = {name: row.get(name) for name in SCHEMA.names}
        short = next(iter(row.get("binds") or {}), "")
        yield {**kept, **facts, "binds": short}


# ------------------------------------------------------------------ the page


def best(rows: Sequence[dict[str, Any]], scenario: str) -> dict[str, Any] | None:
    """Return a scenario's row with the highest rate among entries that served all models; None if there is none.

    Self-reported rows are left out.
    """
    mine = [r for r in rows if r["scenario"] == scenario and r["rps"] and not r["unserved"] and r["made"] != SELF]
    return max(mine, key=lambda row: float(row["rps"]), default=None)


def gaps(rows: Sequence[dict[str, Any]], suite: Suite) -> list[tuple[float, dict[str, Any]]]:
    """List each scenario's ratio of bound to best known rate, with the row of that rate; the largest ratio is first."""
    known = [best(rows, s.name) for s in suite.scenario]
    return sorted(((r["bound_rps"] / r["rps"], r) for r in known if r and r["bound_rps"]), key=lambda of: -of[0])


def totals(rows: Sequence[dict[str, Any]], suite: Suite) -> dict[str, float]:
    """Return each entry's mean over scenarios of its share of the best known rate, the highest first."""
    by_entry: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_entry.setdefault(row["entry"], {})[row["scenario"]] = row
    rate = {s.name: s.best_rps or (top["rps"] if (top := best(rows, s.name)) else None) for s in suite.scenario}
    shares = {
        name: sum(_rate(of.get(s)) / most for s, most in rate.items() if most) / max(1, len(rate))
        for name, of in by_entry.items()
    }
    return dict(sorted(shares.items(), key=lambda of: -of[1]))


def _rate(row: dict[str, Any] | None) -> float:
    return 0.0 if row is None or row["failed"] or row["unserved"] else float(row["rps"] or 0.0)


def page(rows: Sequence[dict[str, Any]], suite: Suite, beacon: str) -> str:
    """Render the table's HTML page, which loads no other file.

    Its first sentence names the scenario in which the best policy is furthest below the bound.
    """
    wide = gaps(rows, suite)
    first = "No bound is known yet."
    if wide:
        times, row = wide[0]
        first = (
            f"The gap between the best known policy and the bound is widest in {row['scenario']}: "
            f"{_marked(row['entry'], rows)} holds {shown(row['rps'])} req/s, and no policy more than "
            f"{shown(row['bound_rps'])}, {shown(times)} times as many."
        )
    parts = [
        f"<h1>{escape(suite.version)}: policies that share GPUs among models</h1>",
        f'<p class="answer">{escape(first)}</p>',
        _ranking(rows, suite, beacon),
        _scenarios(rows, suite),
        _asked(suite),
        _commands(rows, suite, beacon),
    ]
    return document(suite.version, parts, WIDE)


def _ranking(rows: Sequence[dict[str, Any]], suite: Suite, beacon: str) -> str:
    at = {(row["entry"], row["scenario"]): row for row in rows}
    names = [s.name for s in suite.scenario]
    body = []
    for k, (entry, total) in enumerate(totals(rows, suite).items()):
        of = "".join(_cell(at.get((entry, name)), k) for name in names)
        body.append(f'<th scope="row">{escape(_marked(entry, rows))}</th><td data-v="{total}">{total:.3f}</td>{of}')
    note = (
        f"Requests per second at which {100 * suite.level:g} % meet their SLO, on "
        f"{f'seeds of beacon {beacon}' if beacon else 'public seeds'}; the total is the mean of the shares of the best "
        f"known. A dash: the policy did not fit, a model was not served, or the level was never held. {POOL}"
    )
    return section("Ranking", ("policy", "total", *names), body, note)


def _marked(entry: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return an entry's name with its marks.

    One mark says who made the entry's rows, if it was not this bench. Another says that the entry uses a pool of KV
    which separate processes do not have.
    """
    marks = {word for row in rows if row["entry"] == entry for word in (row["made"], row["pool"])} - {HERE, "", None}
    return entry + "".join(f" ({mark})" for mark in sorted(marks))


def _cell(row: dict[str, Any] | None, k: int) -> str:
    rate = _rate(row)
    if row is None or not rate:
        why = (row and (row["failed"] or row["unserved"])) or "below every rate that was tried"
        return f'<td class="zero" data-v="0" title="{escape(str(why))}">-</td>'
    sign = "" if row["sign"] == "=" else row["sign"]
    title = f"{interval(row['low_rps'], row['high_rps'])}; worst model {row['worst_rps']:.3g}; binds: {row['binds']}"
    return f'<td data-v="{rate}" title="{escape(title)}"><a href="#c{k}">{escape(sign)}{shown(rate)}</a></td>'


def shown(x: float) -> str:
    """Render a number to three digits, without an exponent."""
    return f"{x:,.0f}" if x >= 999.5 else f"{x:.3g}"


def _number(x: float | None) -> str:
    return f'<td data-v="{x}">{shown(x)}</td>' if x else "<td>-</td>"


def _scenarios(rows: Sequence[dict[str, Any]], suite: Suite) -> str:
    body = []
    for s in suite.scenario:
        top = best(rows, s.name)
        rate, by = (top["rps"], _marked(top["entry"], rows)) if top else (None, "-")
        most = next((row["bound_rps"] for row in rows if row["scenario"] == s.name), None)
        numbers = f"{_number(rate)}<td>{escape(by)}</td>{_number(most)}{_number(most and rate and most / rate)}"
        body.append(f'<th scope="row">{s.name}</th>{numbers}')
    note = (
        "The bound is for policies that leave GPUs whole: neither partitions nor slices of time. It counts kernels and "
        "the KV that they read; loads of weights and KV that waits cost it nothing: it is far off where memory binds."
    )
    return section("What is open", ("scenario", "best known", "by", "bound", "bound / best"), body, note)


def _asked(suite: Suite) -> str:
    items = "".join(f"<dt>{s.name}</dt><dd>{escape(s.question)} SLO {escape(s.slo)}</dd>" for s in suite.scenario)
    return f"<section><h2>The scenarios</h2><dl>{items}</dl></section>"


def _commands(rows: Sequence[dict[str, Any]], suite: Suite, beacon: str) -> str:
    made = {row["entry"]: row for row in rows}
    items = []
    for k, entry in enumerate(totals(rows, suite)):
        text = entry.removesuffix(WINDOW)
        words = ["bench", "score", *([text] if text == entry else ["--table", "--systems", f"{text}+window"])]
        command = shlex.join([*words, *(["--beacon", beacon] if beacon else [])])
        of = f"policy {made[entry]['content'][:12]} · code {made[entry]['code']}"
        items.append(f'<dt id="c{k}">{escape(entry)}</dt><dd><code>{escape(command)}</code> · {of}</dd>')
    return f"<section><h2>The command behind each row</h2><dl>{''.join(items)}</dl></section>"
