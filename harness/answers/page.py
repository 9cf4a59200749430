"""The page of a stored answer: a comparison, a study, or `bench size` as one HTML file that loads nothing.

The page is made from the answer's folder alone. Only its table of causes also needs the stored runs. A page is text,
tables and SVG figures; a few lines of script sort tables. A content security policy in its head forbids any load. So
the page opens without a network, from a mail or a disk.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from itertools import chain
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from harness.answers import caveats, comparison, text
from harness.answers.misses import table as misses_table
from harness.answers.notes import by_model
from harness.answers.notes import why as misses_of
from harness.answers.table import Table, joined
from harness.answers.text import Shown
from harness.answers.verdict import verdict
from harness.policy import mix
from harness.policy.types import UserError
from harness.rows import crossings, estimate, record, setting, summaries, tidy
from harness.rows.about import About
from harness.rows.checked import note
from harness.rows.definitions import DEFINITIONS
from harness.rows.estimate import NONE, Estimate
from harness.rows.sealed import WAY_OUT, Damaged
from harness.run import slo as slos
from harness.run import streams
from harness.study import misses, size_kept
from harness.study.compare import NAME, summary
from harness.study.summary import Column, Summary

if TYPE_CHECKING:
    import pyarrow as pa

LAYOUT = Path(__file__).with_suffix(".html")  # every page's head, style and script
TAILS = "Simulated tails are optimistic: steps vary by their noise alone, without a server's rare stalls."
MADE = tomllib.loads(Path(__file__).with_name("made.toml").read_text("utf-8"))  # how numbers come about, by column


class Picture(NamedTuple):
    """A figure, as SVG, and the words below it."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Page:
    """The parts of a page, in their order."""

    question: str
    answer: str  # a sentence, with its interval
    tables: Sequence[Table]
    notes: Sequence[str]  # what a reader must know of the tables
    conditions: Sequence[tuple[str, str]]
    fidelity: str  # simulated or real, and how far that was checked
    made: Sequence[tuple[str, str]]  # a number, and how it was made
    command: str  # repeats the answer; "" if none is known
    source: str  # the folder's name, and the version of the bench
    pictures: Sequence[Picture] = ()  # figures stand below the answer


def question(folder: Path) -> str:
    """Return the kind of answer that a folder holds: "size", "comparison" or "study".

    Raises UserError if it holds none.
    """
    if (folder / record.SIZE).is_file():
        return "size"
    if (folder / record.SWEEP).is_file():
        return "comparison" if record.footer(folder / record.SWEEP).get("study") == NAME else "study"
    if record.exists(folder):
        raise UserError(f"{folder}: one run is no answer: bench explain {folder.name} --misses")
    raise UserError(f"{folder}: no answer here (bench compare, bench study and bench size make one)")


def paged(folder: Path, version: str) -> Page:
    """Return the page of the answer in a folder, without figures, with the bench's version.

    Raises UserError if there is no answer.
    """
    kind = question(folder)
    command = folder / record.COMMAND
    words = command.read_text("utf-8", errors="replace").strip() if command.is_file() else ""
    source = f"{folder.name} · bench {version}"
    make = {"size": _sized, "comparison": _compared, "study": _studied}[kind]
    return make(folder, words, source)


# ------------------------------------------------------------------ a comparison


def _compared(folder: Path, command: str, source: str) -> Page:
    table, about = tidy.stored(folder / record.SWEEP), About.read(folder / record.SWEEP)
    if (count := len(about.panels)) != 1:
        raise Damaged(f"{folder / record.SWEEP}: a comparison has one panel, and this has {count}; {WAY_OUT}")
    (panel,), rule = about.panels, about.definitions[0]
    shown = summary(table, about, rule)
    names = [system.label for system in shown.systems if not system.control]
    if not names:
        raise Damaged(f"{folder / record.SWEEP}: no row is of a system; {WAY_OUT}")
    where = mix.told(panel["gpu"], shown.gpus) if shown.gpus else panel["gpu"]
    sentence = verdict(table, shown, rule)
    notes = [*shown.marked, *about.notes]
    for caveat in (caveats.departures, caveats.own_degrees, caveats.unchecked_lines, caveats.invalid):
        notes += caveat(table)
    notes += [f"{label} does not fit: {why}" for label, why in summaries.infeasible(table).items()]
    notes += filter(None, [misses_of(table, shown, rule)])
    causes = list(_causes(folder, rule))
    notes += (note for of in causes for note in of.notes)
    return Page(
        f"Which of {joined(names)} serves the highest rate of {panel['trace']} within its SLOs, on {where}?",
        f"{sentence} ({panel['models']}, {where})" if sentence else "No system ran.",
        [
            _summary(shown),
            *_curves(table, shown, rule),
            *(replace(of, title="Models at that rate") for of in by_model(table, shown.rate_scale, rule)),
            *(replace(of, title="Why requests missed").filled() for of in causes),
        ],
        notes,
        _conditions(table, about),
        _fidelity(table),
        [*_definitions(rule), *MADE["compared"].items()],
        command,
        f"{source} · {len(about.runs)} runs",
    )


def _summary(shown: Summary) -> Table:
    more = {"mean", "ttft", "tpot", "of_bound", "ttft_p50_s", "tpot_p50_s", "loads"}
    columns = [c for c in shown.columns if c.brief or c.key in more]
    rows = [[shown.name(system), *(comparison.cell(system, c) for c in columns)] for system in shown.systems]
    at = f"{shown.offered_rps:.3g} requests per second (rate scale {shown.rate_scale:g})"
    return Table(["system", *map(_head, columns)], rows, title=f"Systems at {at}").filled()


def _head(column: Column) -> str:
    """Return a column's head: name and "%" for an attainment ("pooled %"), else group and name ("TTFT s P95")."""
    return f"{column.name} %" if column.definition and column.unit == "%" else f"{column.group} {column.name}"


def _curves(table: pa.Table, shown: Summary, rule: str) -> Iterator[Table]:
    """Yield a table of attainment with a row per rate, if several rates ran."""
    frame = summaries.summary(table, ["offered_rps"])
    offered = frame.groupby("rate_scale")["mean"].mean()
    labels = [system.label for system in shown.systems if not system.infeasible]
    by = {label: crossings.attained(table, "rate_scale", label, rule) for label in labels}
    if len(offered) > 1 and by:
        rows = []
        for x, rps in offered.items():
            shares = (of.get(float(str(x))) for of in by.values())
            rows.append([f"{rps:.3g}", *(estimate.text(e and e.times(100), estimate.SHARE) for e in shares)])
        yield Table(["req/s", *by], rows, title=f"SLO attainment ({rule}) by rate, %")


def _causes(folder: Path, rule: str) -> Iterator[Table]:
    """Yield the table of why requests missed, if the runs are still stored."""
    with suppress(UserError):
        yield misses_table(misses.of_sweep(folder, definition=rule).rows, "system")


def _conditions(table: pa.Table, about: About) -> list[tuple[str, str]]:
    panels = about.panels

    def joined_values(key: str) -> str:
        return ", ".join(dict.fromkeys(str(panel[key]) for panel in panels if panel.get(key) not in {None, ""}))

    traces = (f"{p['trace']} ({p['tier']}{': ' + p['note'] if p['note'] else ''})" for p in panels)
    plans = setting.plans(value for value in table["plan_origin"].unique().to_pylist() if value)
    gpus = (mix.told(p["gpu"], p["gpus"]) if p["gpus"] else p["gpu"] for p in panels)
    machines = (setting.machine(panel["own"]) for panel in panels)
    windows = dict.fromkeys(f"{panel['window_s']:g} s" for panel in panels if panel.get("window_s"))
    return [
        ("Traffic", "; ".join(dict.fromkeys(traces))),
        ("Models", joined_values("models")),
        ("GPUs", ", ".join(dict.fromkeys(gpus))),
        ("Engine's host costs", joined_values("host")),
        ("Server", "; ".join(dict.fromkeys(p["server"].removeprefix("server: ") for p in panels if p.get("server")))),
        ("Machine", ", ".join(dict.fromkeys(filter(None, machines)))),
        ("SLO", ", ".join(sorted({*table["slo"].unique().to_pylist()}))),
        ("Seconds of the SLO", _seconds(about)),
        ("Windows", f"{about.seeds} of {', '.join(windows)}" if windows else str(about.seeds)),
        ("Rates", f"scaled by {', '.join(sorted(table['scaling'].cast('string').unique().drop_null().to_pylist()))}"),
        ("Planners see", plans),
    ]


def _seconds(about: About) -> str:
    """Return the limits on TTFT and TPOT of each model.

    If all models have the same limits, these are stated once. The text is empty if the study has several SLOs.
    """
    judges = about.judges
    seconds = slos.target_of(judges[0]).seconds if len(judges) == 1 else None
    models = {f"TTFT {ttft:.3g} s, TPOT {1e3 * tpot:.3g} ms": name for name, (ttft, tpot) in (seconds or {}).items()}
    if len(models) == 1:
        return next(iter(models))
    limits = (f"{name} {ttft:.3g} s, {1e3 * tpot:.3g} ms" for name, (ttft, tpot) in (seconds or {}).items())
    return "; ".join(limits)


def _fidelity(table: pa.Table) -> str:
    """Say whether runs are simulated or real and, if simulated, whether the simulator was checked by measurements."""
    kinds = sorted(table["fidelity"].cast("string").unique().to_pylist())
    if kinds != ["simulated"]:
        on = table["machine"].cast("string").unique().to_pylist() if "machine" in table.column_names else []
        return f"{' and '.join(kinds).capitalize()}{': ' + ', '.join(filter(None, on)) if any(on) else ''}."
    pairs = sorted({*zip(table["gpu"].to_pylist(), table["host"].to_pylist(), strict=True)})
    return _simulated([(str(gpu), str(host)) for gpu, host in pairs])


def _simulated(pairs: Iterable[tuple[str, str]]) -> str:
    sentences = [
        f"{gpu} with {host}: {note(gpu, host) or 'compared with measured end-to-end runs (bench validate)'}"
        for gpu, host in pairs
    ]
    return f"Simulated. {'; '.join(sentences)}. {TAILS}"


def _definitions(rule: str) -> Iterator[tuple[str, str]]:
    for name in (rule, *DEFINITIONS[rule].beside):
        yield name, f"The mean over requests of: {' '.join(DEFINITIONS[name].formula.split())}"


# ------------------------------------------------------------------ a study


def _studied(folder: Path, command: str, source: str) -> Page:
    table, about = tidy.stored(folder / record.SWEEP), About.read(folder / record.SWEEP)
    parts = list(chain(*text.parts(Shown(table, about, folder, every=True))))
    notes = [part for part in parts if isinstance(part, str) and part]
    answer = notes.pop(0) if parts[:1] == notes[:1] else "See the tables."
    after = f", after {about.paper}" if about.paper else ""
    return Page(
        f"{about.study}: how do {joined(list(about.systems))} compare{after}?",
        answer,
        [part.filled() for part in parts if isinstance(part, Table)],
        notes,
        _conditions(table, about),
        _fidelity(table),
        [*_definitions(about.definitions[0]), *MADE["compared"].items()],
        command or f"bench study {about.study}",
        f"{source} · {len(about.runs)} runs",
    )


# ------------------------------------------------------------------ a size


def _sized(folder: Path, command: str, source: str) -> Page:
    stored = size_kept.read(folder)
    asked = stored.asked
    best = next((row for row in stored.tried if row.answer and (row.gpu, row.label, row.gpus) == stored.best), None)
    sure = ""
    if best is not None and best.pooled is not None:
        share = Estimate(best.pooled, best.low, best.high, 1).times(100)
        sure = f". Of all requests {share.text(estimate.SHARE)} % meet their SLO"
    trace = Path(str(asked.setting["trace"])).name
    prices = dict.fromkeys(name for kind in asked.kinds for name in mix.names(kind) if name in asked.prices)
    head, *rows = stored.words.cells
    heads = ["GPU", "system", "GPUs", "met %", "worst model %", "worst model", "$/day", "no room"]
    tried = list[list[str]]()
    for row in stored.tried:
        shares = (NONE if x is None else f"{100 * x:.1f}" for x in (row.pooled, row.worst))
        usd = NONE if row.usd_day is None else f"{row.usd_day:,.0f}"
        tried.append([row.gpu, row.label, str(row.gpus), *shares, row.worst_model or NONE, usd, row.unfit or NONE])
    host = str(asked.setting.get("host") or "vllm-0.15")
    kinds = " or ".join(f"clusters of {kind}" if mix.mixed(kind) else kind for kind in asked.kinds)
    return Page(
        f"How many {kinds} hold {100 * asked.target:g} % of SLOs for every model of "
        f"{streams.stem(str(asked.setting['models']))} on {trace}?",
        f"{stored.words.sentence}{sure}.",
        [
            Table(head, rows, title="Strategies, the cheapest first").filled(),
            Table(heads, tried, title="All that was tried").filled(),
        ],
        [f"{name}: {words}" for name, words in stored.words.facts],
        [
            ("Traffic", trace),
            ("Views", ", ".join(stored.views.values())),
            ("Models", str(asked.setting["models"])),
            ("SLO", asked.rule),
            ("Judged by", asked.definition),
            ("GPUs tried", f"{asked.least} to {asked.most}"),
            ("Spare GPUs", str(asked.spare)),
            ("GPUs a node", str(asked.node)),
            ("Prices", "; ".join(f"{name}: {asked.prices[name].told}" for name in prices)),
            *((key, str(value)) for key, value in asked.setting.items() if key not in {"trace", "models"}),
        ],
        _simulated((kind, host) for kind in asked.kinds),
        [*_definitions(asked.definition), *MADE["sized"].items()],
        command,
        f"{source} · {sum(len(row.runs) for row in stored.tried)} runs",
    )


# ------------------------------------------------------------------ as HTML


def page(of: Page) -> str:
    """Render a page."""
    parts = [
        f"<h1>{escape(of.question)}</h1>",
        f'<p class="answer">{escape(of.answer[:1].upper() + of.answer[1:])}</p>',
        *map(_picture, of.pictures),
        *(table.html() for table in of.tables),
        _list("Notes", of.notes),
        _pairs("Conditions", of.conditions),
        f"<section><h2>Fidelity</h2><p>{escape(of.fidelity)}</p></section>",
        _pairs("How each number was made", of.made),
        _command(of.command),
        f"<footer>{escape(of.source)}</footer>",
    ]
    return document(of.question, filter(None, parts))


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """Render parts in HTML as a page with a script that sorts tables; `style` is CSS that is added to the usual one."""
    return Template(LAYOUT.read_text("utf-8")).substitute(title=escape(title), style=style, body="\n".join(parts))


def _picture(picture: Picture) -> str:
    svg = re.sub(r"^\s*<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", "", picture.svg, flags=re.DOTALL).strip()
    wide = re.match(r'<svg[^>]*? width="([\d.]+)pt"', svg)
    least = "wide" if wide and float(wide[1]) > WIDE_PT else "narrow"
    spoken = f'role="img" aria-label="{escape(picture.caption)}"'
    svg = re.sub(r'^(<svg[^>]*?) width="[^"]*" height="[^"]*"', lambda match: f"{match[1]} {spoken}", svg)
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    return f'<figure class="{least}"><div class="drawn" tabindex="0">{svg}</div>{caption}</figure>'


def _list(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<section><h2>{title}</h2><ul>{items}</ul></section>" if items else ""


def _pairs(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs if text)
    return f"<section><h2>{title}</h2><dl>{items}</dl></section>" if items else ""


def _command(command: str) -> str:
    spoken = f"<pre>{escape(command)}</pre>" if command else "<p>None is stored beside these results.</p>"
    return f"<section><h2>The command that repeats it</h2>{spoken}</section>"


WIDE_PT = 300.0  # pt; a phone scrolls a wider figure
