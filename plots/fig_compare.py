"""Attainment and P95 latency of systems by rate, drawn from the file attainment.parquet of a sweep alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from harness.policy.types import UserError
from harness.rows import crossings, record, summaries, tidy
from harness.rows.record import SWEEP
from plots import caption, form, page, style

COMPARISON = "comparison"  # the name of its study
LEVEL = 0.99  # the usual target
CHOOSES = frozenset({"--only", "--rename", "--panel"})
PERCENT, FLOOR = 100.0, 90.0  # unit of attainment; attainment is drawn from FLOOR on
LETTERS = "abcde"
BAR_IN, FEWEST = 0.13, 3  # height of a bar; fewest seeds that give an interval
EDGE, WIDEST, NEAR = 1.0, 2, 0.003  # points that a line gains per line that lies on it; most such gains; distance
HALVES = ("first", "second")
ALONG = 0.75  # least share of each line's rates that the other must have, for one to lie on it
THIN = 0.5  # width of the line of a half of a real trace
ATTAINMENT = {"both": "requests that meet both SLOs", "ttft": "TTFT SLO met", "tpot": "TPOT SLO met"}
LATENCY = {"ttft_p95_s": ("P95 TTFT (s)", 1.0), "tpot_p95_s": ("P95 TPOT (ms)", 1e3)}
PANELS = (
    *((name, f"{title} (%)", PERCENT) for name, title in ATTAINMENT.items()),
    *((name, title, unit) for name, (title, unit) in LATENCY.items()),
)
COLUMNS = ["series", "label", "gpus", "rate_scale", "definition", "mean", "low", "high", "n", "infeasible"]


def draws(folder: Path) -> bool:
    """Tell whether a folder holds a comparison, that is the stored study of a `bench compare` run."""
    return (folder / SWEEP).is_file() and record.footer(folder / SWEEP).get("study") == COMPARISON


def points(table: pa.Table) -> pd.DataFrame:
    """Return the table of the figure: a row for each (series, rate, definition), in the units of `table`.

    A series is named after a system's label. If its GPU count is not the most frequent one, the name has the count in
    brackets. If runs differ in fidelity, the brackets also have the fidelity.
    """
    frame = summaries.summary(table, [*ATTAINMENT, *LATENCY, "offered_rps"])
    common = frame.groupby("gpus").size().idxmax() if len(frame) else 0
    mixed = frame["fidelity"].nunique() > 1

    def name(row: pd.Series) -> str:
        extra = [f"{row['gpus']} GPUs"] * bool(row["gpus"] != common) + [str(row["fidelity"])] * mixed
        return f"{row['label']} ({', '.join(extra)})" if extra else str(row["label"])

    frame["series"] = [name(row) for _, row in frame.iterrows()]
    return _pooled(frame, table) if "x" in table.column_names else frame


def _pooled(frame: pd.DataFrame, table: pa.Table) -> pd.DataFrame:
    """Replace mean attainment over seeds by attainment over the requests of all windows, which bench compare prints."""
    runs = table.select(["label", "gpus", "fidelity"]).to_pandas()
    for (label, gpus, fidelity), group in frame.groupby(["label", "gpus", "fidelity"], observed=True):
        same = (runs["label"] == label) & (runs["gpus"] == gpus) & (runs["fidelity"] == fidelity)
        rows = table.filter(pa.array(same))
        for definition in ATTAINMENT:
            attained = crossings.attained(rows, "rate_scale", str(label), definition)
            for i, x in group.loc[group["definition"] == definition, "rate_scale"].items():
                if (e := attained.get(float(x))) is not None:
                    frame.loc[i, ["mean", "low", "high"]] = list(caption.floats(e).values())
    return frame


def parts(table: pa.Table, halves: Sequence[Collection[int]]) -> list[pa.Table]:
    """Split the table of a real trace into one table for each half of the trace.

    `halves` has the seeds that replay each half. If it is empty, the list has only the given table.
    """
    split = (table.filter(pc.is_in(table["seed"], pa.array(list(seeds), table["seed"].type))) for seeds in halves)
    return list(split) or [table]


def draw(table: pa.Table, note: str = "", every: Sequence[pd.DataFrame] = (), level: float = LEVEL) -> Figure:
    """Draw the figure, one column wide; call within `style.theme()`. Raises UserError if there is nothing to draw.

    A system that did not fit in some run is not drawn, and the caption says so. `every` has the frames to draw, each
    made by `points`: one of the whole table or, for a real trace, one of each half. Curves of halves are thin lines.
    """
    unfit = summaries.infeasible(table)
    frames = [part[~part["label"].isin(unfit)] for part in every or [points(table)]]
    frame = pd.concat(frames)
    if not len(frame):
        raise UserError(
            "nothing to draw: every run of this sweep was skipped or does not fit (why: bench list --matrix)"
        )
    looks, labels = style.looks(frame["label"]), dict(zip(frame["series"], frame["label"], strict=True))
    order = sorted(labels, key=lambda series: (series.startswith(("unshared", "dedicated")), series))
    of = {series: looks[labels[series]] for series in order}
    thin, wanted = len(frames) > 1, _panels()
    text = _caption(table, frame, unfit, note, halves=thin)
    if frame["rate_scale"].nunique() <= 1:
        return _bars(frames, of, text, wanted)
    several, per = len(wanted) > 1, _per(frame)
    figure, lines = page.panels(
        [(1, 1.3), (2, 0.95), (2, 0.95)] if several else [(1, 1.3)],
        wide_in=style.COLUMN_IN,
        left_in=0.38,
        beside_in=0.33,
        right_in=0.12,
        above_in=0.22,
        below_in=0.2,
        foot_in=0.14,
        stretch=True,
        text=text,
        handles=_handles(frame, of, level=level, thin=thin),
    )
    for axis, (letter, (name, title, unit)) in zip((axis for line in lines for axis in line), wanted, strict=True):
        shown = [part[part["definition"] == name] for part in frames]
        page.title(axis, f"({letter}) {title}" if several else title, 7, pad=4.5)  # clear of the triangles
        for part in shown:
            _curves(axis, part, of, unit, per, thin=thin)
        rates = np.array([x for part in shown for x in _drawn(part, unit)]) * per
        page.ruler(axis.xaxis, rates.min(), rates.max(), log=rates.max() >= 8 * rates.min())
        if name in ATTAINMENT:
            _percent(axis, pd.concat(shown), level)
        else:
            _latency(axis, pd.concat(shown)["mean"].to_numpy(np.float64) * unit)
    page.shared(lines[-1], f"requests per second (rate scale 1 = {per:.3g})")
    return figure


def _drawn(rows: pd.DataFrame, unit: float) -> Iterator[float]:
    """Yield the rate scales at which a panel has something to show: attainment of at least `FLOOR`, or any latency."""
    least, finite = _floor(rows, unit), rows[np.isfinite(rows["mean"])]
    for _, line in (finite if len(finite) else rows.assign(mean=math.inf)).sort_values("rate_scale").groupby("series"):
        x, y = line["rate_scale"].to_numpy(np.float64), line["mean"].to_numpy(np.float64) * unit
        x, y = page.missing(x, y) if unit == PERCENT else (x, y)
        yield from x[y >= least]
        for k in np.flatnonzero(np.diff(y >= least)):  # the line leaves the panel there
            yield x[k] + (x[k + 1] - x[k]) * (least - y[k]) / (y[k + 1] - y[k])


def _floor(rows: pd.DataFrame, unit: float) -> float:
    """Return the lower end of a panel's axis: `FLOOR` for attainment, or 0 if all values are below `FLOOR`.

    For latencies it is minus infinity.
    """
    if unit != PERCENT:
        return -math.inf
    return FLOOR if (rows["mean"] * unit >= FLOOR).any() else 0.0


Wanted = tuple[str, tuple[str, str, float]]  # a panel with its letter


def _panels() -> list[Wanted]:
    """Return the panels to draw, with their letters: all of them, or only the one that --panel names.

    Raises UserError for an unknown letter.
    """
    every = list(zip(LETTERS, PANELS, strict=True))
    letter = form.ASKED.get().panel
    if letter and letter not in tuple(LETTERS):
        raise UserError(f'--panel "{letter}" is not one of {", ".join(LETTERS)}')
    return [panel for panel in every if letter in {"", panel[0]}]


def _bars(frames: Sequence[pd.DataFrame], of: Mapping[str, style.Look], text: str, wanted: Sequence[Wanted]) -> Figure:
    """Draw a comparison at a single rate: a bar for each series, with its name and its number.

    A bar has an interval if it has at least `FEWEST` seeds. Each half of a real trace has its own bar.
    """
    halves = [f", {half} half" for half in HALVES] if len(frames) > 1 else [""]
    bars = [(series, half) for series in of for half in halves]
    names = [style.called(series) + half for series, half in bars]
    frame = pd.concat([part.assign(bar=part["series"] + half) for half, part in zip(halves, frames, strict=True)])
    at = f"At {_per(frame) * frame['rate_scale'].iloc[0]:.3g} requests per second."
    high = BAR_IN * len(bars)
    figure, lines = page.panels(
        [(1, high), (2, high), (2, high)] if len(wanted) > 1 else [(1, high)],
        wide_in=style.COLUMN_IN,
        beside_in=0.2,
        left_in=page.names_in(names),
        below_in=0.16,
        stretch=True,
        text=f"{at}\n{text}",
    )
    axes = [(axis, axis is line[0]) for line in lines for axis in line]
    for (axis, first), (letter, (name, title, unit)) in zip(axes, wanted, strict=True):
        numbers = frame[frame["definition"] == name].set_index("bar").reindex([series + half for series, half in bars])
        _bar_panel(axis, numbers, [of[series] for series, _ in bars], name, unit)
        page.rows(axis, names, labelled=first)
        page.title(axis, f"({letter}) {title}" if len(wanted) > 1 else title, pad=3)
    return figure


def _bar_panel(axis: Axes, rows: pd.DataFrame, looks: Sequence[style.Look], name: str, unit: float) -> None:
    """Draw a bar from 0 for each of `rows`, with its interval, and with its number at the end."""
    mean, low, high, seeds = (rows[column].to_numpy(np.float64) for column in ("mean", "low", "high", "n"))
    mean, low, high = unit * mean, unit * low, unit * high
    sure = np.isfinite(mean) & np.isfinite(low) & (seeds >= FEWEST)
    most = PERCENT if name in ATTAINMENT else max([*mean[np.isfinite(mean)], *high[sure], 1e-9])
    numbers = [f"{x:.3g}" if np.isfinite(x) else "over 5 % never end" if np.isinf(x) else "none" for x in mean]
    for y in np.flatnonzero(sure):
        axis.plot([low[y], high[y]], [y, y], color="#202020", linewidth=0.8, zorder=3)
    values, ends = np.where(np.isfinite(mean), mean, 0.0), np.where(sure, np.minimum(high, most), 0.0)
    page.bars(axis, list(zip(values, [look.color for look in looks], numbers, ends, strict=True)), most)


def _curves(
    axis: Axes, frame: pd.DataFrame, of: Mapping[str, style.Look], unit: float, per: float, *, thin: bool
) -> None:
    """Draw a line with a band for each series; attainment below the lower end of the axis is cut off.

    A line that other lines cover is drawn wider, so that its edges show. A band of attainment is left out where no
    request missed its SLOs, because it is then a bound and not a spread. A band of latencies needs at least `FEWEST`
    seeds.
    """
    share = unit == PERCENT
    under, least = _under(frame, list(of), share=share), _floor(frame, unit)
    for depth, (series, look) in enumerate(reversed([*of.items()])):  # the first of the legend lies on top
        rows, z = frame[frame["series"] == series].sort_values("rate_scale"), 3 + 0.1 * depth
        wider = 0.0 if thin else EDGE * min(WIDEST, under[series])
        width, size = (THIN, 2.0) if thin else (1.1 + wider, 4.0 + wider)
        look = look._replace(line="-") if wider else look
        x = rows["rate_scale"].to_numpy(np.float64) * per
        y, low, high = (rows[name].to_numpy(np.float64) * unit for name in ("mean", "low", "high"))
        bound = y >= PERCENT if share else rows["n"].to_numpy() < FEWEST
        low = np.where(thin | bound, np.nan, low)
        page.curve(axis, x, y, look, low, high, shares=share, width=width, size=size, least=least, z=z)
        never = np.isinf(y)
        edge = axis.get_xaxis_transform()
        axis.plot(x[never], np.ones(never.sum()), "^", color=look.color, ms=3, clip_on=False, zorder=z, transform=edge)


def _under(frame: pd.DataFrame, order: Sequence[str], *, share: bool) -> dict[str, int]:
    """Count, for each series, those series drawn above it whose lines cover its line.

    Two lines cover each other on two conditions. The rates that both have are at least the fraction `ALONG` of each
    line's rates. The lines are near at all these rates. With `share`, near means a difference of at most `NEAR`, and
    rates at which both values are below the axis (`FLOOR`) are ignored. Otherwise near means a difference of at most
    ten times `NEAR`, relative to the larger value.
    """
    of = {series: frame[frame["series"] == series].set_index("rate_scale")["mean"] for series in order}

    def near(a: str, b: str) -> bool:
        both = pd.concat([of[a], of[b]], axis=1, join="inner").to_numpy(np.float64)
        both = both[np.isfinite(both).all(axis=1)]
        if len(both) < max(2, ALONG * np.isfinite(of[a]).sum(), ALONG * np.isfinite(of[b]).sum()):
            return False
        drawn = both[(both > FLOOR / PERCENT).any(axis=1)] if share else both
        return bool((np.ptp(drawn, axis=1) <= (NEAR if share else 10 * NEAR * drawn.max(axis=1))).all())

    return {series: sum(near(series, other) for other in order[:k]) for k, series in enumerate(order)}


def _percent(axis: Axes, rows: pd.DataFrame, level: float) -> None:
    """Scale the axis of attainment, mark the level, and name the series that are below the axis at all rates."""
    axis.axhline(100 * level, color=page.GREY, linewidth=0.7, linestyle=page.LEVEL, zorder=1.5)
    floor = _floor(rows, PERCENT)
    page.ruler(axis.yaxis, floor, PERCENT, share=0.05)
    axis.set_ylim(bottom=floor)
    best = rows.groupby("series")["mean"].max()
    if low := [style.called(str(series)) for series in best.index[best < floor / PERCENT]]:
        text = page.wrapped(f"below {floor:g} %: {', '.join(low)}", 0.9 * page.length_in(axis.xaxis), 5.5)
        text = f"{len(low)} below {floor:g} %" if text.count("\n") > 2 else text
        words: dict[str, Any] = {"fontsize": 5.5, "color": "#404040", "style": "italic", "zorder": 9}
        under = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axis.text(0.015, 0.03, text, transform=axis.transAxes, bbox=under, **words)


def _latency(axis: Axes, values: NDArray[np.float64]) -> None:
    """Scale the axis of latencies from 0, or logarithmically where values differ by more than a factor of 5."""
    finite = values[np.isfinite(values) & (values > 0)]
    if len(finite):
        log = bool(finite.max() > 5 * finite.min())
        page.ruler(axis.yaxis, finite.min() if log else 0.0, finite.max(), log=log, share=0.05)


def _per(frame: pd.DataFrame) -> float:
    """Return the requests per second that a rate scale of 1 means; 1 if no run states an offered rate."""
    offered = frame[(frame["definition"] == "offered_rps") & np.isfinite(frame["mean"])]
    return float((offered["mean"] / offered["rate_scale"]).median()) if len(offered) else 1.0


def _handles(frame: pd.DataFrame, of: Mapping[str, style.Look], *, level: float, thin: bool) -> list[Line2D | Patch]:
    """Return the entries of the legend, for what is drawn."""
    handles: list[Line2D | Patch] = [style.handle(series, look) for series, look in of.items()]
    handles.append(page.dashed(f"{100 * level:g} %"))
    if frame["low"].notna().any() and not thin:
        handles.append(Patch(facecolor="#404040", alpha=0.2, linewidth=0, label="95 % interval"))
    if np.isinf(frame.loc[frame["definition"].isin(LATENCY), "mean"]).any():
        handles.append(page.mark("over 5 % never end", ("#404040", "^")))
    return handles


def _notes(frame: pd.DataFrame, unfit: Collection[str]) -> Iterator[str]:
    tail = frame[frame["definition"].isin(LATENCY)]["mean"]
    yield f"Not drawn, for their models do not fit: {', '.join(unfit)}." * bool(unfit)
    yield "Triangles at the top edge: over 5 % of requests never end." * bool(np.isinf(tail).any())
    yield f"Rates are scaled by {style.listed(frame, 'scaling')}." * bool(frame["scaling"].notna().any())


def _caption(table: pa.Table, frame: pd.DataFrame, unfit: Collection[str], note: str, *, halves: bool) -> str:
    """Write the short caption below the figure."""
    about = table.filter(table.column("skipped").is_null()).to_pandas()
    most = int(frame["n"].max())
    spread = "two thin lines: halves, case studies" if halves else "one run, no interval"
    if most > 1 and not halves:
        spread = f"{style.span(frame['n'])} seeds, 95 % intervals"
    below = frame["rate_scale"].nunique() > 1 and frame.loc[frame["definition"].isin(ATTAINMENT), "mean"].min() < 0.9
    trace = f"{style.listed(about, 'trace')} ({style.listed(about, 'tier')})"
    slo = f"SLO {caption.slos(about['slo'].unique())}"
    setting = style.setting(about, spread, trace=trace, models=style.listed(about, "models"), slo=slo)
    return caption.within(
        caption.WORDS,
        setting,
        style.invalid(about),
        style.unserved(),
        note,
        *_notes(frame, unfit),
        f"Points below {FLOOR:g} % are not drawn." * bool(below),
        style.unvetted(about),
        style.caps(table),
        style.departs(about),
        style.degrees(about),
    )


def full_caption(table: pa.Table, note: str, frame: pd.DataFrame) -> str:
    """Write the full caption for the CSV; `frame` has the table's `points`."""
    unfit = summaries.infeasible(table)
    about = table.filter(table.column("skipped").is_null()).to_pandas()
    sentences = (*_notes(frame, unfit), style.caps(table), style.departs(about), style.degrees(about), note)
    return style.caption(about, frame["n"], " ".join(filter(None, sentences)))


def render(sweep: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the sweep in folder `sweep` to `stem`.pdf, .png and .csv; return their paths. Raises UserError."""
    table, facts = form.chosen(tidy.stored(sweep / SWEEP)), record.footer(sweep / SWEEP)
    halves: list[list[int]] = next((panel.get("halves", []) for panel in facts.get("panels", [])), [])
    level, (first, *_) = facts.get("level", LEVEL), facts.get("definitions") or ["both"]
    labels = table["label"].unique().to_pylist()
    gone = {name: words for name in labels if (words := crossings.unserved(table, "rate_scale", name, first))}
    names = HALVES if halves else ("",)
    every = [points(part) for part in parts(table, halves)]
    drawn = pd.concat([part[COLUMNS].assign(half=half) for half, part in zip(names, every, strict=True)])
    with style.theme(), form.on(replace(form.ASKED.get(), unserved=gone)):
        figure = draw(table, note, every, level)
        caption = full_caption(table, note, points(table) if halves else every[0])
        return style.save(figure, stem, drawn, command, caption)
