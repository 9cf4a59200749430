"""A summary for a terminal, a paper, or another program."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.report.columns import Column
from harness.report.summary import Summary, SystemSummary
from harness.report.text_table import aligned
from harness.rows import estimate, tidy
from harness.rows.statistics import Estimate

if TYPE_CHECKING:
    import pyarrow as pa

MOST_LATEX = 8  # columns of a table in a paper, the systems' names among them
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


def cell(system: SystemSummary, column: Column, *, spread: bool = True) -> str:
    """Render a system's value in a column; with its interval where more or less of it is better."""
    return estimate.text(system.values[column.key], column.style, spread=spread and column.more is not None)


# ------------------------------------------------------------------ for a terminal


def terminal(
    shown: Summary, *, bold: bool, room: int = 0, unfit: Mapping[str, str] = MappingProxyType({}), every: bool = False
) -> list[str]:
    """Return the lines of the aligned table: groups, names, a line a system; the best of a column bold if asked.

    A system without room stands below the others, with its text in `unfit` in place of cells. Without `every` only the
    brief columns are shown. Where a line would be longer than `room` characters, only headlines keep their intervals.
    """
    if not every:
        shown = replace(shown, columns=tuple(column for column in shown.columns if column.brief))
    lines = [f"{system.label}  {unfit[system.label]}" for system in shown.systems if system.label in unfit]
    if all(system.infeasible for system in shown.systems):
        return lines
    wide = list(_terminal(shown, bold, True))
    longest = max(len(line.replace(BOLD, "").replace(PLAIN, "")) for line in wide)
    return [*(wide if longest <= room else _terminal(shown, bold, False)), *lines]


def _terminal(shown: Summary, bold: bool, spread: bool) -> Iterator[str]:
    cells = [
        [shown.name(system), *(cell(system, c, spread=spread or c.headline) for c in shown.columns)]
        for system in shown.systems
        if not system.infeasible
    ]
    heads = ["system", *(c.name for c in shown.columns)]
    groups, width = _widths(shown.columns, [heads, *cells])
    yield groups
    yield "  ".join(head.ljust(w) for head, w in zip(heads, width, strict=True)).rstrip()
    winners = [set(), *(shown.best(c) for c in shown.columns)]
    for system, line in zip((row for row in shown.systems if not row.infeasible), cells, strict=True):
        padded = [text.ljust(w) for text, w in zip(line, width, strict=True)]
        marked = [
            f"{BOLD}{text}{PLAIN}" if bold and system.label in won else text
            for text, won in zip(padded, winners, strict=True)
        ]
        yield "  ".join(marked).rstrip()


def _widths(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> tuple[str, list[int]]:
    """Return the line of the groups' titles, and the width of each column; the first is that of the labels."""
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    spans: list[tuple[str, int]] = [("", width[0])]
    for c, w in zip(columns, width[1:], strict=True):
        if spans[-1][0] == c.group:
            spans[-1] = (c.group, spans[-1][1] + 2 + w)
        else:
            spans.append((c.group, w))
    # a group's title may be wider than its columns: its last column takes the difference
    at = 0
    for k, (title, w) in enumerate(spans):
        at += 1 if k == 0 else sum(c.group == title for c in columns)
        if len(title) > w:
            width[at - 1] += len(title) - w
            spans[k] = (title, len(title))
    return "  ".join(title.ljust(w) for title, w in spans).rstrip(), width


# ------------------------------------------------------------------ for a paper


def markdown(shown: Summary) -> Iterator[str]:
    """Yield the lines of a Markdown table; the best of a column is bold where it is decided."""
    yield "| system | " + " | ".join(_title(c) for c in shown.columns) + " |"
    yield "|---" * (1 + len(shown.columns)) + "|"
    for system in shown.systems:
        cells = [_strong(cell(system, c), system.label in shown.decided(c), "**", "**") for c in shown.columns]
        yield f"| {shown.name(system)} | " + " | ".join(cells) + " |"


def latex(shown: Summary) -> Iterator[str]:
    """Yield the lines of a LaTeX tabular (booktabs): at most `MOST_LATEX` columns, those that answer at a glance.

    The best of a column is bold where it is decided: where its interval lies apart from those of all others.
    """
    brief = [c for c in shown.columns if c.brief and any(system.values[c.key] is not None for system in shown.systems)]
    ordered = sorted(brief, key=lambda c: not c.headline)[: MOST_LATEX - 1]  # headlines are kept first
    shown = replace(shown, columns=tuple(c for c in shown.columns if c in ordered))
    yield r"% bold: the best of a column, where its 95 % interval lies apart from all others"
    yield rf"\begin{{tabular}}{{l{'r' * len(shown.columns)}}}"
    yield r"\toprule"
    yield "system & " + " & ".join(_escaped(_title(c)) for c in shown.columns) + r" \\"
    yield r"\midrule"
    for system in shown.systems:
        cells = [
            _strong(_escaped(cell(system, c)), system.label in shown.decided(c), r"\textbf{", "}")
            for c in shown.columns
        ]
        yield _escaped(shown.name(system)) + " & " + " & ".join(cells) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _title(c: Column) -> str:
    return f"{c.group} {c.name}"


def _strong(text: str, won: bool, before: str, after: str) -> str:
    return f"{before}{text}{after}" if won else text


def _escaped(text: str) -> str:
    for plain, tex in (("\\", r"\textbackslash{}"), ("%", r"\%"), ("_", r"\_"), ("&", r"\&"), ("#", r"\#")):
        text = text.replace(plain, tex)
    return text.replace("<", "$<$").replace(">", "$>$").replace("≤", r"$\le$").replace("~", r"$\sim$")


# ------------------------------------------------------------------ for another program


def records(shown: Summary) -> list[dict[str, Any]]:
    """Return a flat record a system: label, gpus, then mean, low and high of every column in its own unit."""
    return [_record(shown, system) for system in shown.systems]


def _record(shown: Summary, system: SystemSummary) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "system": system.label,
        "gpus": system.gpus,
        "control": system.control,
        "infeasible": system.infeasible,
        "invalid": system.invalid,
        "unchecked": system.unchecked,
        "rate_scale": shown.rate_scale,
        "offered_rps": shown.offered_rps,
    }
    for c in shown.columns:
        e = system.values[c.key]
        unit = {"%": "_pct", "ms": "_ms", "req/s": "_rps"}.get(c.unit, "")
        key = f"{c.key.removesuffix('_s')}{unit}" if c.unit == "ms" else f"{c.key}{unit}"
        flat[key] = None if e is None else e.mean
        flat[f"{key}_low"] = None if e is None else e.low
        flat[f"{key}_high"] = None if e is None else e.high
        if c.key == "rate_99":
            flat[f"{key}_sign"] = None if e is None else e.sign
            flat["flat"] = system.flat
        flat["n"] = max(flat.get("n", 0), 0 if e is None else e.n)
    return flat


def as_csv(shown: Summary) -> str:
    """Render the records as CSV; cells are empty where there is no value."""
    flat = records(shown)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in each.items()} for each in flat)
    return out.getvalue()


def as_json(shown: Summary, about: Mapping[str, Any]) -> str:
    """Render the facts of the sweep and its records as JSON; infinities and NaN are null, which JSON lacks."""
    return json.dumps(_plain({**about, "systems": records(shown)}), indent=1)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------ by model


def by_model(scored: pa.Table, rate_scale: float, definition: str) -> list[str]:
    """Return a line for each model of each system at a rate, over all seeds: requests, attainment, latencies."""
    wanted = {definition: 100.0, "ttft_p50_s": 1.0, "ttft_p95_s": 1.0, "tpot_p50_s": 1e3, "tpot_p95_s": 1e3}
    frame = tidy.summary(scored, [*wanted], ("model",))
    frame = frame[frame["rate_scale"] == rate_scale]
    offered = scored.select(["label", "model", "rate_scale", "definition", "n"]).to_pandas()
    offered = offered[(offered["definition"] == definition) & (offered["rate_scale"] == rate_scale)]
    counts = offered.groupby(["label", "model"], observed=True)["n"].sum()
    heads = [f"{definition} %", "TTFT P50 s", "P95 s", "TPOT P50 ms", "P95 ms"]
    lines = [["system", "model", "offered", *heads]]
    for (label, model), values in frame.groupby(["label", "model"], observed=True, sort=False):
        means = dict(zip(values["definition"], values["mean"], strict=True))
        cells = [_mean(factor * means.get(name, math.nan)) for name, factor in wanted.items()]
        lines.append([str(label), str(model), str(counts[label, model]), *cells])
    return list(aligned(lines)) if len(lines) > 1 else []


def _mean(value: float) -> str:
    return estimate.text(Estimate(value, None, None, 1))
