"""A scored sweep as the table that answers the question: for a terminal, a paper, or another program.

Values come from `tidy.summary`; this file decides what stands beside what, and in which unit.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.report.causes import CAUSES
from harness.rows import statistics, tidy
from harness.rows.definitions import DEFINITIONS
from harness.rows.statistics import Crossing, Estimate

if TYPE_CHECKING:
    import pyarrow as pa

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
NONE = "-"


class Column(NamedTuple):
    """One column: what it holds, how it is headed, and whether more is better (None: neither)."""

    key: str
    group: str
    name: str
    unit: str
    factor: float
    more: bool | None
    definition: str
    over: str = "pooled"


def columns(definition: str) -> tuple[Column, ...]:
    """Columns of a comparison whose headline is this definition of attainment."""
    share = f"SLO attainment ({definition}) %"
    found = [
        Column(definition, share, "pooled", "%", 100, True, definition),
        Column("mean", share, "mean", "%", 100, True, definition, "mean"),
        Column("worst", share, "worst", "%", 100, True, definition, "worst"),
    ]
    found += [Column(x, "of each %", x.upper(), "%", 100, True, x) for x in DEFINITIONS[definition].beside]
    return (
        *found,
        Column("rate_99", "req/s at 99 %", "crosses", "req/s", 1, True, ""),
        Column("fails_99", "req/s at 99 %", "fails at", "req/s", 1, None, ""),
        Column("dip", "deepest", "dip %", "%", 1, None, ""),
        Column("ttft_p50_s", "TTFT s", "P50", "s", 1, False, "ttft_p50_s"),
        Column("ttft_p95_s", "TTFT s", "P95", "s", 1, False, "ttft_p95_s"),
        Column("tpot_p50_s", "TPOT ms", "P50", "ms", 1e3, False, "tpot_p50_s"),
        Column("tpot_p95_s", "TPOT ms", "P95", "ms", 1e3, False, "tpot_p95_s"),
        Column(tidy.HITS, "prefix", "hits %", "%", 100, None, tidy.HITS),
        Column("kv_used", "KV %", "used", "%", 100, None, "kv_used"),
        Column("loads", "weights", "loads", "", 1, None, "loads"),
        Column("evicts", "weights", "evicts", "", 1, None, "evicts"),
        Column("migrations", "weights", "moved", "", 1, None, "migrations"),
        Column(tidy.WAKES, "server's own", "wakes", "", 1, None, tidy.WAKES),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One system at the shown rate; values in the columns' units, None where there is none."""

    label: str
    gpus: int
    control: bool
    infeasible: bool
    values: Mapping[str, Estimate | None]
    invalid: bool = False  # of runs on real servers: some measured something else


@dataclass(frozen=True, slots=True)
class View:
    """What is shown: rows at one rate, and what the other rates add to them."""

    rate_scale: float
    offered_rps: float
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    gpus: int  # of most rows
    undefined_tpot: float  # share of offered requests with a TPOT that is not defined


# ------------------------------------------------------------------ values


def view(
    table: pa.Table, order: Sequence[str], definition: str, level: float, *, controls: Collection[str] = ()
) -> View:
    """The table of a sweep at its most telling rate: the highest at which a contestant still meets `level`.

    `order` lists the labels; `controls` those that contend for nothing.
    """
    wanted = columns(definition)
    names = [*dict.fromkeys(c.definition for c in wanted if c.definition), "offered_rps", "undefined_tpot"]
    points: dict[tuple[str, float, str, str], Estimate] = {}
    gpus: dict[str, int] = {}
    hollow: set[tuple[str, float]] = set()
    for p in tidy.summary(table, names, ("pooled", "mean", "worst")).to_dict("records"):
        low, high = (None if math.isnan(x) else float(x) for x in (p["low"], p["high"]))
        points[p["label"], p["rate_scale"], p["definition"], p["over"]] = Estimate(p["mean"], low, high, p["n"])
        gpus[p["label"]] = int(p["gpus"])
        if p["infeasible"]:
            hollow.add((p["label"], p["rate_scale"]))
    labels = [label for label in order if label in gpus]
    crossings = {label: _crossing(table, label, definition, level) for label in labels}
    rates = sorted({rate for _, rate, _, _ in points})
    contend = [label for label in labels if label not in controls] or labels

    def at(label: str, rate: float, name: str, over: str = "pooled") -> Estimate | None:
        found = points.get((label, rate, name, over))
        return None if found is None or math.isnan(found.mean) else found

    def score(label: str, rate: float) -> float:
        found = at(label, rate, definition)
        return found.mean if found else 0.0

    invalid = tidy.invalid(table)
    met = [rate for rate in rates if any(score(label, rate) >= level for label in contend)]
    shown = max(met, default=rates[0]) if rates else math.nan
    rows = tuple(
        Row(
            label,
            gpus[label],
            label in controls,
            (label, shown) in hollow,
            {
                c.key: _scaled(at(label, shown, c.definition, c.over), c.factor)
                if c.definition
                else crossings[label].get(c.key)
                for c in wanted
            },
            label in invalid,
        )
        for label in labels
    )
    peers = [e.mean for label in labels if (e := at(label, shown, "offered_rps"))]
    undefined = [e.mean for label in labels if (e := at(label, shown, "undefined_tpot"))]
    common = [gpus[label] for label in contend]
    return View(
        shown,
        sum(peers) / len(peers) if peers else math.nan,
        tuple(
            c
            for c in wanted
            if (c.definition and c.key not in {tidy.HITS, tidy.WAKES}) or any(row.values[c.key] for row in rows)
        ),
        rows,
        max(set(common), key=common.count) if common else 0,
        max(undefined, default=0.0),
    )


def _scaled(e: Estimate | None, factor: float) -> Estimate | None:
    return None if e is None else e.times(factor)


def _crossing(table: pa.Table, label: str, definition: str, level: float) -> dict[str, Estimate]:
    """The rate at `level`, the lowest that fails and the deepest dip, by column; none where there is a single rate."""
    found = tidy.curves(table, label, definition)
    if not found or max(len(curve) for curve in found.values()) < 2:
        return {}
    c = statistics.crossing(found, level)
    columns = {"rate_99": c.at}
    if c.fails is not None:
        columns["fails_99"] = Estimate(c.fails, None, None, c.at.n)
    if dips(c):
        columns["dip"] = Estimate(100 * c.dip, None, None, c.at.n)
    return columns


def dips(c: Crossing) -> bool:
    """Tell whether the deepest dip is more than 0 where it is shown with one decimal of a percent."""
    return c.dip >= 0.0005


# ------------------------------------------------------------------ sentences


def verdict(table: pa.Table, shown: View, definition: str, level: float) -> str | None:
    """Who meets the level at the highest rate, by how much over the next, and whether that is more than chance."""
    rivals = [row for row in shown.rows if not row.control]
    if len(rivals) < 2:
        return None
    if any(row.values["rate_99"] is None for row in rivals):  # a single rate crosses nothing
        return _difference(table, rivals, shown.rate_scale, definition)
    best, second = sorted(rivals, key=lambda row: -_mean(row, "rate_99"))[:2]
    ours, theirs = best.values["rate_99"], second.values["rate_99"]
    assert ours is not None
    assert theirs is not None
    if ours.sign == theirs.sign and ours.sign in {"<", ">"} and all(e.cut == e.n for e in (ours, theirs)):
        where = "neither, not even at the lowest rate" if ours.sign == "<" else "both up to the highest rate asked"
        return f"{100 * level:g} % is met by {where}: {best.label}, {second.label}"
    curves = [tidy.curves(table, row.label, definition) for row in (best, second)]
    ratio = statistics.crossing_ratio(curves[0], curves[1], level)
    text = f"{best.label} meets {100 * level:g} % at {_sign(ratio)}{_three(ratio.mean)} x the rate of {second.label}"
    beyond = f"{ratio.cut} of {_count(ratio.n)} beyond the rates asked" if ratio.cut else ""
    if ratio.low is None and ratio.high is None:
        return f"{text} ({beyond or _count(ratio.n)}, no interval)"
    spanned = f"[{_three(ratio.low)} - {_three(ratio.high)}]".replace("? - ", "up to ").replace(" - ?", " or more")
    if beyond:
        spanned += f" ({beyond})"
    if ratio.low is not None and ratio.low > 1:
        return f"{text} {spanned}"
    return f"{text}, which {_count(ratio.n)} do not tell from chance {spanned}"


def _difference(table: pa.Table, rivals: Sequence[Row], rate: float, definition: str) -> str | None:
    best, second = sorted(rivals, key=lambda row: -_mean(row, definition))[:2]
    ours, theirs = (scores(table, row.label, rate, definition) for row in (best, second))
    if not ours.keys() & theirs.keys():
        return None
    gap = statistics.paired(ours, theirs)
    text = f"{best.label} meets {100 * gap.mean:+.2f} points more than {second.label}"
    if gap.mean == 0:
        return f"{best.label} and {second.label} meet the same share"
    if gap.low is None or gap.high is None:
        return f"{text} ({_count(gap.n)}, no interval)"
    spanned = f"[{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]"
    if statistics.wins(gap):
        return f"{text} {spanned}"
    return f"{text}, which {_count(gap.n)} do not tell from chance {spanned}"


def same(table: pa.Table, label: str, copy: str, rate: float, definition: str) -> str | None:
    """The A/A line: a system against its copy on other seeds; the interval should cover 0."""
    ours, theirs = (list(scores(table, x, rate, definition).values()) for x in (label, copy))
    n = min(len(ours), len(theirs))
    if not n:
        return None
    gap = statistics.paired(dict(enumerate(ours[:n])), dict(enumerate(theirs[:n])))
    text = f"A/A: {label} against its copy on other seeds {100 * gap.mean:+.2f} points"
    if gap.low is None or gap.high is None:
        return f"{text} ({_count(gap.n)}, no interval)"
    told = (
        "covers 0, as it should" if gap.low <= 0 <= gap.high else "does not cover 0: differences so small mean nothing"
    )
    return f"{text} [{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]: {told}"


def scores(table: pa.Table, label: str, rate: float, definition: str) -> dict[int, float]:
    """Pooled attainment by seed at one rate."""
    found = tidy.curves(table, label, definition, "rate_scale")
    return {seed: curve[rate] for seed, curve in found.items() if rate in curve}


def why(table: pa.Table, shown: View, definition: str, level: float) -> str | None:
    """What most requests of each contestant that falls short were waiting for."""
    found = []
    for row in shown.rows:
        if row.control or row.infeasible or _mean(row, definition) >= 100 * level:
            continue
        shares = {
            cause: sum(seen.values()) / len(seen)
            for cause in CAUSES
            if (seen := scores(table, row.label, shown.rate_scale, f"missed_{cause}"))
        }
        if shares:
            cause = max(shares, key=lambda x: shares[x])
            found.append(f"{row.label} {100 * shares[cause]:.0f} % {CAUSES[cause].phrase}")
    return "Why requests miss: " + ", ".join(found) if found else None


def caps(table: pa.Table, spec: Mapping[str, Any]) -> list[str]:
    """A line for each cap of the engine that bound more than 1 % of steps: where, and how to lift it."""
    bound = tidy.bound(table)
    lines = []
    for cap in dict.fromkeys(b.cap for b in bound):
        mine = [b for b in bound if b.cap == cap]
        where = ", ".join(f"{b.label} from {_three(b.offered_rps)} req/s ({100 * b.share:.1f} %)" for b in mine)
        over = f"more than {100 * tidy.BINDS:g} % of steps"
        lines.append(f"{cap} = {spec[cap]} bound {over}: {where}; --set {cap}={2 * spec[cap]}")
    return lines


def _mean(row: Row, key: str) -> float:
    e = row.values[key]
    return -math.inf if e is None else e.mean


def _count(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"


def _sign(e: Estimate) -> str:
    return {"=": "", "<": "less than ", ">": "more than ", "~": "about "}[e.sign]


def _three(x: float | None) -> str:
    return "?" if x is None else f"{x:.{_digits(x)}f}"


def _digits(x: float) -> int:
    """Decimals that show three significant digits."""
    return max(0, 2 - math.floor(math.log10(abs(x)))) if math.isfinite(x) and x else 0


# ------------------------------------------------------------------ text


def text(e: Estimate | None, column: Column, *, spread: bool = True) -> str:
    """A value as a cell: shares with one decimal, others with three digits; half its interval at the same decimals.

    Where a part of the runs lies beyond the grid, its edge and how many: `> 20.0 (1 of 2 seeds)`.
    """
    if e is None:
        return NONE
    if not math.isfinite(e.mean):
        return "never"
    part = 0 < e.cut < e.n
    value = e.edge if part and e.edge is not None else e.mean
    digits = 1 if column.unit == "%" else 0 if column.unit == "" else _digits(value)
    if part:
        return f"{e.sign} {value:.{digits}f} ({e.cut} of {e.n} seeds)"
    mark = "" if e.sign == "=" else e.sign
    if not spread or e.low is None or e.high is None or column.more is None:
        return f"{mark}{e.mean:.{digits}f}"
    return f"{mark}{e.mean:.{digits}f} ±{(e.high - e.low) / 2:.{digits}f}"


def best(shown: View, column: Column) -> set[str]:
    """Labels with the best value of a column among contestants, where one is better than another."""
    rivals = [
        row
        for row in shown.rows
        if not (row.control or row.infeasible or row.invalid) and row.values[column.key] is not None
    ]
    values = {row.label: _mean(row, column.key) for row in rivals}
    if column.more is None or len(set(values.values())) < 2:
        return set()
    top = max(values.values()) if column.more else min(values.values())
    return {label for label, value in values.items() if value == top}


TIGHT = (
    "both",
    "e2e",
    "ttft",
    "tpot",
    "token",
    "qos",
    "itl",
    "rate_99",
)  # columns that keep their intervals where there is little room


def terminal(shown: View, *, bold: bool, room: int = 0) -> list[str]:
    """Lines of the aligned table: groups, names, a row a system; the best of a column bold if asked.

    Lines longer than `room` characters leave the intervals of latencies to --json and --csv.
    """
    wide = list(_terminal(shown, bold, True))
    plain = max(len(line.replace(BOLD, "").replace(PLAIN, "")) for line in wide)
    return wide if plain <= room else list(_terminal(shown, bold, False))


def _terminal(shown: View, bold: bool, spread: bool) -> Iterator[str]:
    cells = [
        [name(row, shown), *(text(row.values[c.key], c, spread=spread or c.key in TIGHT) for c in shown.columns)]
        for row in shown.rows
    ]
    heads = ["system", *(c.name for c in shown.columns)]
    width = [max(len(line[k]) for line in [heads, *cells]) for k in range(len(heads))]
    spans: list[tuple[str, int]] = [("", width[0])]
    for c, w in zip(shown.columns, width[1:], strict=True):
        if spans[-1][0] == c.group:
            spans[-1] = (c.group, spans[-1][1] + 2 + w)
        else:
            spans.append((c.group, w))
    # a group's title may be wider than its columns: its last column takes what is missing
    at = 0
    for k, (title, w) in enumerate(spans):
        at += 1 if k == 0 else sum(c.group == title for c in shown.columns)
        if len(title) > w:
            width[at - 1] += len(title) - w
            spans[k] = (title, len(title))
    yield "  ".join(title.ljust(w) for title, w in spans).rstrip()
    yield "  ".join(head.ljust(w) for head, w in zip(heads, width, strict=True)).rstrip()
    winners = [set(), *(best(shown, c) for c in shown.columns)]
    for row, line in zip(shown.rows, cells, strict=True):
        out = []
        for cell, w, won in zip(line, width, winners, strict=True):
            padded = cell.ljust(w)
            out.append(f"{BOLD}{padded}{PLAIN}" if bold and row.label in won else padded)
        yield "  ".join(out).rstrip()


def name(row: Row, shown: View) -> str:
    """The label, with the number of GPUs where it is not that of most rows: `dedicated (8 GPUs)`."""
    label = row.label if row.gpus == shown.gpus else tidy.with_gpus(row.label, [row.gpus])
    return label + (" (infeasible)" if row.infeasible else "") + (" (invalid)" if row.invalid else "")


def markdown(shown: View) -> Iterator[str]:
    """Lines of a Markdown table; the best of a column bold."""
    yield "| system | " + " | ".join(_title(c) for c in shown.columns) + " |"
    yield "|---" * (1 + len(shown.columns)) + "|"
    for row in shown.rows:
        cells = [_strong(text(row.values[c.key], c), row.label in best(shown, c), "**", "**") for c in shown.columns]
        yield f"| {name(row, shown)} | " + " | ".join(cells) + " |"


def latex(shown: View) -> Iterator[str]:
    """Lines of a LaTeX tabular (booktabs); the best of a column bold."""
    yield rf"\begin{{tabular}}{{l{'r' * len(shown.columns)}}}"
    yield r"\toprule"
    yield "system & " + " & ".join(_escaped(_title(c)) for c in shown.columns) + r" \\"
    yield r"\midrule"
    for row in shown.rows:
        cells = [
            _strong(_escaped(text(row.values[c.key], c)), row.label in best(shown, c), r"\textbf{", "}")
            for c in shown.columns
        ]
        yield _escaped(name(row, shown)) + " & " + " & ".join(cells) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _title(c: Column) -> str:
    return f"{c.group} {c.name}"


def _strong(cell: str, won: bool, before: str, after: str) -> str:
    return f"{before}{cell}{after}" if won else cell


def _escaped(cell: str) -> str:
    for plain, tex in (("\\", r"\textbackslash{}"), ("%", r"\%"), ("_", r"\_"), ("&", r"\&"), ("#", r"\#")):
        cell = cell.replace(plain, tex)
    return cell.replace(" ±", r" $\pm$ ").replace("<", "$<$").replace(">", "$>$")


def records(shown: View) -> list[dict[str, Any]]:
    """A flat record a row: label, gpus, then mean, low, high and sign of every column in its own unit."""
    out = []
    for row in shown.rows:
        flat: dict[str, Any] = {
            "system": row.label,
            "gpus": row.gpus,
            "control": row.control,
            "infeasible": row.infeasible,
            "invalid": row.invalid,
            "rate_scale": shown.rate_scale,
            "offered_rps": shown.offered_rps,
        }
        for c in shown.columns:
            e = row.values[c.key]
            unit = {"%": "_pct", "ms": "_ms", "req/s": "_rps"}.get(c.unit, "")
            key = f"{c.key.removesuffix('_s')}{unit}" if c.unit == "ms" else f"{c.key}{unit}"
            flat[key] = None if e is None else e.mean
            flat[f"{key}_low"] = None if e is None else e.low
            flat[f"{key}_high"] = None if e is None else e.high
            if c.key == "rate_99":
                for part in ("sign", "cut", "edge"):
                    flat[f"{key}_{part}"] = None if e is None else getattr(e, part)
            flat["n"] = max(flat.get("n", 0), 0 if e is None else e.n)
        out.append(flat)
    return out


def by_model(scored: pa.Table, rate_scale: float, definition: str) -> list[str]:
    """Lines of each model of each system at a rate, over all seeds: what was offered, attainment, latencies."""
    wanted = {definition: 100.0, "ttft_p50_s": 1.0, "ttft_p95_s": 1.0, "tpot_p50_s": 1e3, "tpot_p95_s": 1e3}
    frame = tidy.summary(scored, [*wanted], ("model",))
    frame = frame[frame["rate_scale"] == rate_scale]
    offered = scored.select(["label", "model", "rate_scale", "definition", "n"]).to_pandas()
    offered = offered[(offered["definition"] == definition) & (offered["rate_scale"] == rate_scale)]
    counts = offered.groupby(["label", "model"], observed=True)["n"].sum()
    heads = [f"{definition} %", "TTFT P50 s", "P95 s", "TPOT P50 ms", "P95 ms"]
    rows = [["system", "model", "offered", *heads]]
    for (label, model), own in frame.groupby(["label", "model"], observed=True, sort=False):
        means = dict(zip(own["definition"], own["mean"], strict=True))
        cells = [_cell(factor * means.get(name, math.nan)) for name, factor in wanted.items()]
        rows.append([str(label), str(model), str(counts[label, model]), *cells])
    return list(aligned(rows)) if len(rows) > 1 else []


def _cell(value: float) -> str:
    return NONE if math.isnan(value) else "never" if math.isinf(value) else f"{value:.{_digits(value)}f}"


def as_csv(shown: View) -> str:
    """The records as CSV; empty cells where there is no value."""
    rows = records(shown)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return out.getvalue()


def as_json(shown: View, about: Mapping[str, Any]) -> str:
    """The facts of the sweep and its records; infinities as null, for JSON has none."""
    return json.dumps(_plain({**about, "systems": records(shown)}), indent=1)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of left-aligned columns."""
    lines = [list(row) for row in rows]
    width = [max(map(len, column)) for column in zip(*lines, strict=True)]
    yield from ("  ".join(cell.ljust(w) for cell, w in zip(line, width, strict=True)).rstrip() for line in lines)


def laid(rows: Iterable[Sequence[str]], *, markdown: bool = False) -> Iterator[str]:
    """Lines of a table whose first row is its head: aligned, or as Markdown between blank lines."""
    if not markdown:
        yield from aligned(rows)
        return
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    yield ""
    yield from ("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
    yield ""
