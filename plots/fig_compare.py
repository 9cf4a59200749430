"""Attainment and P95 latency of systems over the rate, from a sweep's attainment.parquet alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from harness.policy import mix
from harness.policy.types import UserError
from harness.rows import crossings, record, tidy
from harness.rows.record import SWEEP
from harness.rows.setting import fidelities, plans
from plots import caption, form, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

COMPARISON = "comparison"  # the name of its study
LEVEL = 0.99  # the usual target
HEIGHT_IN, ALONE_IN = 4.75, 2.3  # of all panels, of one
CHOOSES = frozenset({"--only", "--rename", "--panel"})
PERCENT, FLOOR = 100.0, 90.0  # attainment is drawn from here on
LETTERS = "abcde"
BAR_IN, BETWEEN_IN, FEWEST = 0.13, 0.45, 3  # a bar, what stands between panels, and seeds of which there is an interval
EDGE, NEAR = 1.5, 0.003  # points that a line is wider than one on it; attainment by which these differ at most
APART = 0.06  # of the width, between two panels of bars
HALVES = ("first", "second")
LETTER_IN = 0.05  # width of a letter of a name
ALONG = 0.75  # share of the rates of either that they have in common
THIN = 0.5  # width of the line of a half of a real trace
ATTAINMENT = {"both": "requests that meet both SLOs", "ttft": "TTFT SLO met", "tpot": "TPOT SLO met"}
LATENCY = {"ttft_p95_s": ("P95 TTFT (s)", 1.0), "tpot_p95_s": ("P95 TPOT (ms)", 1e3)}
PANELS = (*((name, f"{title} (%)", PERCENT) for name, title in ATTAINMENT.items()),
          *((name, title, unit) for name, (title, unit) in LATENCY.items()))  # fmt: skip
COLUMNS = ["series", "label", "gpus", "rate_scale", "definition", "mean", "low", "high", "n", "infeasible"]


def draws(folder: Path) -> bool:
    """Tell whether a folder holds a comparison: a study that bench compare makes of its options."""
    return (folder / SWEEP).is_file() and record.footer(folder / SWEEP).get("study") == COMPARISON


def points(table: pa.Table) -> pd.DataFrame:
    """Return what is drawn: one row a (series, rate, definition), in units of the table.

    A series is a label, with its GPU count where that is not the common one, and its fidelity where they differ.
    """
    frame = tidy.summary(table, [*ATTAINMENT, *LATENCY, "offered_rps"])
    common = frame.groupby("gpus").size().idxmax() if len(frame) else 0
    mixed = frame["fidelity"].nunique() > 1

    def name(row: pd.Series) -> str:
        extra = [f"{row['gpus']} GPUs"] * bool(row["gpus"] != common) + [str(row["fidelity"])] * mixed
        return f"{row['label']} ({', '.join(extra)})" if extra else str(row["label"])

    frame["series"] = [name(row) for _, row in frame.iterrows()]
    return _pooled(frame, table) if "x" in table.column_names else frame


def _pooled(frame: pd.DataFrame, table: pa.Table) -> pd.DataFrame:
    """Replace means over seeds by attainment of all windows together, as tables have it."""
    for (label, gpus, fidelity), group in frame.groupby(["label", "gpus", "fidelity"], observed=True):
        words = {"label": label, "gpus": gpus, "fidelity": fidelity}
        which = reduce(pc.and_, (pc.equal(_plain(table[name]), word) for name, word in words.items()))
        rows = table.filter(which)
        for definition in ATTAINMENT:
            attained = crossings.attained(rows, "rate_scale", str(label), definition)
            for i, x in group.loc[group["definition"] == definition, "rate_scale"].items():
                if (e := attained.get(float(x))) is not None:
                    ends = (math.nan if end is None else end for end in (e.mean, e.low, e.high))
                    frame.loc[i, ["mean", "low", "high"]] = list(ends)
    return frame


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column


def parts(table: pa.Table, halves: Sequence[Collection[int]]) -> list[pa.Table]:
    """Split the table of a real trace by the half that seeds replay, each a case by itself; leave others whole."""
    split = (table.filter(pc.is_in(table["seed"], pa.array(list(seeds), table["seed"].type))) for seeds in halves)
    return list(split) or [table]


def draw(
    table: pa.Table,
    note: str = "",
    halves: Sequence[Collection[int]] = (),
    every: Sequence[pd.DataFrame] = (),
    level: float = LEVEL,
) -> Figure:
    """Draw the figure, one column wide; call within `style.theme()`. Raises UserError if there is nothing to draw.

    A system of which a run had no room is not drawn; the caption says so. `halves` are the seeds that replay each half
    of a real trace: a thin line each. `every` are the `points` of its parts, where they are in hand.
    """
    frames, unfit = every or [points(part) for part in parts(table, halves)], tidy.infeasible(table)
    frames = [part[~part["label"].isin(unfit)] for part in frames]
    frame = pd.concat(frames)
    if not len(frame):
        raise UserError(
            "nothing to draw: every run of this sweep was skipped or does not fit (why: bench list systems --all)"
        )
    looks = style.looks(frame["label"])
    of = {series: looks[label] for series, label in zip(frame["series"], frame["label"], strict=True)}
    order = sorted(of, key=lambda series: (series.startswith(("unshared", "dedicated")), series))
    text, foot = style.foot(_caption(table, frame, unfit, note, len(halves)), 88)

    wanted = _panels()
    if frame["rate_scale"].nunique() <= 1:
        return _bars(frames, of, order, text, foot, wanted)
    high = HEIGHT_IN if len(wanted) > 1 else ALONE_IN
    figure = Figure(figsize=(form.width(style.COLUMN_IN), high))
    top = 1 - (_legend(figure, frame, of, order, level=level, thin=len(frames) > 1) + 0.2) / high
    bottom = (0.36 + foot) / high  # inches: the axis' words, then lines of the caption
    several = len(wanted) > 1
    grid = figure.add_gridspec(3 if several else 1, 2, height_ratios=(1.3, 1, 1) if several else None, left=0.11,
                               right=0.975, top=top, bottom=bottom, hspace=0.42, wspace=0.26)  # fmt: skip
    places = [(0, slice(None)), *((i, j) for i in (1, 2) for j in (0, 1))][: len(wanted)]
    axes = [figure.add_subplot(grid[place]) for place in places]
    for axis, (letter, (name, title, unit)) in zip(axes, wanted, strict=True):
        rows = frame[frame["definition"] == name]
        axis.set_title(f"({letter}) {title}" if several else title, loc="left", pad=4.5)  # clear of the triangles
        for part in frames:
            _curves(axis, part[part["definition"] == name], of, order, unit, thin=len(frames) > 1)
        _rates(axis, sorted(frame["rate_scale"].unique()), _per(frame))
        if name in ATTAINMENT:
            _percent(axis, rows, level)
        else:
            _latency(axis, rows["mean"].to_numpy(np.float64) * unit)
    figure.text(0.55, bottom - 0.24 / high, _rate_label(frame), ha="center", va="center", fontsize=7)
    style.write_foot(figure, text)
    return figure


def _panels() -> list[tuple[str, tuple[str, str, float]]]:
    """Return the panels to draw with their letters: all, or the one that is asked for. UserError for one not there."""
    every = list(zip(LETTERS, PANELS, strict=True))
    asked = form.ASKED.get().panel
    if asked and asked not in tuple(LETTERS):
        raise UserError(f'--panel "{asked}" is not one of {", ".join(LETTERS)}')
    return [panel for panel in every if asked in {"", panel[0]}]


def _bars(
    frames: Sequence[pd.DataFrame], of: Mapping[str, style.Look], order: Sequence[str], text: str, foot: float,
    wanted: Sequence[tuple[str, tuple[str, str, float]]],
) -> Figure:  # fmt: skip
    """Draw a single rate: a bar for each series with its name and number, and an interval from `FEWEST` seeds on.

    Halves of a real trace have a bar each.
    """
    halves = [f", {half} half" for half in HALVES] if len(frames) > 1 else [""]
    bars = [(series, half) for series in order for half in halves]
    names = [style.called(series) + half for series, half in bars]
    frame = pd.concat([part.assign(bar=part["series"] + half) for half, part in zip(halves, frames, strict=True)])
    rows, below = BAR_IN * len(bars), foot + 0.2
    height = (3 if len(wanted) > 1 else 1) * (rows + BETWEEN_IN) + below
    figure = Figure(figsize=(form.width(style.COLUMN_IN), height))
    left, right = 0.05 + LETTER_IN * max(map(len, names)) / form.width(style.COLUMN_IN), 0.94
    half_wide = (right - left - APART) / 2
    for k, (letter, (name, title, unit)) in enumerate(wanted):
        line, column = divmod(k + 1, 2) if k else (0, 0)
        bottom = height - (line + 1) * (rows + BETWEEN_IN) + BETWEEN_IN - 0.22
        axis = figure.add_axes((left + column * (half_wide + APART), bottom / height,
                                half_wide if k else right - left, rows / height))  # fmt: skip
        numbers = frame[frame["definition"] == name].set_index("bar").reindex([series + half for series, half in bars])
        _bar_panel(axis, numbers, [of[series] for series, _ in bars], name, unit)
        style.name_rows(axis, names, fontsize=6)
        axis.tick_params(labelleft=not column, labelsize=6)
        axis.set_title(f"({letter}) {title}" if len(wanted) > 1 else title, loc="left", pad=3)
    figure.text(0.01, (foot + 0.05) / height, _rate_label(frame), fontsize=6.5)
    style.write_foot(figure, text)
    return figure


def _bar_panel(axis: Axes, rows: pd.DataFrame, looks: Sequence[style.Look], name: str, unit: float) -> None:
    """Draw a bar for each of `rows` from 0 on, its interval, and its number at the end."""
    mean, low, high, seeds = (rows[column].to_numpy(np.float64) for column in ("mean", "low", "high", "n"))
    mean, low, high = unit * mean, unit * low, unit * high
    sure = np.isfinite(mean) & np.isfinite(low) & (seeds >= FEWEST)
    most = PERCENT if name in ATTAINMENT else max([*mean[np.isfinite(mean)], *high[sure], 1e-9])
    for y, look in enumerate(looks):
        finite = bool(np.isfinite(mean[y]))
        number = f"{mean[y]:.3g}" if finite else "over 5 % never end" if np.isinf(mean[y]) else "none"
        axis.barh(y, mean[y] if finite else 0.0, 0.7, color=look.color)
        if sure[y]:
            axis.plot([low[y], high[y]], [y, y], color="#202020", linewidth=0.8, zorder=3)
        end = max(mean[y] if finite else 0.0, high[y] if sure[y] else 0.0)
        axis.annotate(number, (min(end, most), y), (2, 0), textcoords="offset points", va="center", fontsize=5)
    axis.set_xlim(0, 1.25 * most)
    axis.xaxis.set_major_locator(FixedLocator([0, 50, 100]) if name in ATTAINMENT else MaxNLocator(3))


def _curves(
    axis: Axes,
    frame: pd.DataFrame,
    of: Mapping[str, style.Look],
    order: Sequence[str],
    unit: float,
    *,
    thin: bool,
) -> None:
    """Draw a line with its band per series. What lies below an axis of attainment is cut.

    A line that others lie on is wider than these, so that its edges show. A band of which nothing missed is left out:
    it is a bound, not a spread.
    """
    under = _under(frame, order, share=unit == PERCENT)
    for depth, series in enumerate(reversed(order)):  # the first of the legend lies on top
        rows = frame[frame["series"] == series].sort_values("rate_scale")
        look, z = of[series], 3 + 0.1 * depth
        x = rows["rate_scale"].to_numpy(np.float64)
        y, low, high = (rows[name].to_numpy(np.float64) * unit for name in ("mean", "low", "high"))
        finite = np.isfinite(y)
        sure = finite & np.isfinite(low) & (not thin) & ((unit != PERCENT) | (y < PERCENT))
        wider = 0.0 if thin else EDGE * under[series]
        axis.fill_between(x, low, high, where=sure, color=look.color, alpha=0.14, linewidth=0)
        axis.plot(x, np.where(finite, y, np.nan), color=look.color, linestyle=look.line if not wider else "-", zorder=z,
                  linewidth=THIN if thin else mpl.rcParams["lines.linewidth"] + wider)  # fmt: skip
        marks = look.marks()
        marks |= {"markersize": 0.5 * marks["markersize"] if thin else marks["markersize"] + wider}
        axis.plot(x[finite], y[finite], linestyle="", zorder=z, clip_on=unit == PERCENT, **marks)
        never = np.isinf(y)
        edge = axis.get_xaxis_transform()
        axis.plot(x[never], np.ones(never.sum()), "^", color=look.color, ms=3, clip_on=False, zorder=z, transform=edge)


def _under(frame: pd.DataFrame, order: Sequence[str], *, share: bool) -> dict[str, int]:
    """Count for each series how many of those drawn above it lie on it wherever both were run, which is most rates.

    Values lie on each other within `NEAR` of attainment where they are a share, else within ten times that of them.
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
    """Scale attainment, mark the level, and name the series that lie below the axis."""
    axis.axhline(100 * level, color="#404040", linewidth=0.7, dashes=(4, 2), zorder=1.5)
    axis.set_ylim(FLOOR, 100 + 0.05 * (100 - FLOOR))
    best = rows.groupby("series")["mean"].max()
    if low := [style.called(str(series)) for series in best.index[best < FLOOR / PERCENT]]:
        axis.text(0.015, 0.03, f"below {FLOOR:g} %: {', '.join(low)}", transform=axis.transAxes, fontsize=5.5,
                  color="#404040", style="italic", zorder=9,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip


def _latency(axis: Axes, values: NDArray[np.float64]) -> None:
    """Scale from 0, or by the logarithm where values span a factor of 5 (of 100: labels at powers of 10 only)."""
    finite = values[np.isfinite(values) & (values > 0)]
    if len(finite) and finite.max() > 5 * finite.min():
        axis.set_yscale("log")
        axis.set_ylim(finite.min() / 1.3, finite.max() * 1.3)
        subs = (1.0, 2.0, 5.0) if finite.max() < 100 * finite.min() else (1.0,)
        axis.yaxis.set_major_locator(LogLocator(subs=subs))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    else:
        axis.set_ylim(bottom=0.0)


def _rates(axis: Axes, rates: Sequence[float], per: float) -> None:
    """Scale the rates that were run, and label them in requests per second, of which rate scale 1 has `per`."""
    axis.spines[["top", "right"]].set_visible(False)
    if rates[-1] >= 8 * rates[0] > 0:
        axis.set_xscale("log", base=2)
    axis.margins(x=0.03)
    axis.xaxis.set_major_locator(FixedLocator(_apart(axis, rates, per)))
    axis.xaxis.set_minor_locator(FixedLocator(list(rates)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _rate(x, per)))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _rate(rate_scale: float, per: float) -> str:
    return f"{rate_scale * per:.3g}"


def _apart(axis: Axes, rates: Sequence[float], per: float) -> list[float]:
    """Rates to label: from the highest down, each that leaves a digit's room to the label at its right."""
    axis.get_xlim()  # or the transform would not know the data yet
    at = axis.get_xaxis_transform().transform([(rate, 0.0) for rate in rates])[:, 0] * 72 / axis.figure.dpi
    size = mpl.rcParams["xtick.labelsize"]
    room = [TextPath((0, 0), f"{_rate(rate, per)}0", size).get_extents().width for rate in rates]  # points, as `at`
    shown = [len(rates) - 1]
    for i in range(len(rates) - 2, -1, -1):
        if at[shown[-1]] - at[i] >= (room[shown[-1]] + room[i]) / 2:
            shown.append(i)
    return [rates[i] for i in reversed(shown)]


def _per(frame: pd.DataFrame) -> float:
    """Return the requests per second of rate scale 1; 1 where no run knows them."""
    offered = frame[(frame["definition"] == "offered_rps") & np.isfinite(frame["mean"])]
    return float((offered["mean"] / offered["rate_scale"]).median()) if len(offered) else 1.0


def _rate_label(frame: pd.DataFrame) -> str:
    """Name the axis, tie it to rate scales, and name the scaling."""
    rates, per = frame["rate_scale"].unique(), _per(frame)
    how = " and ".join(sorted(frame["scaling"].dropna().unique()))
    by = f", scaled by {how}" * bool(how)
    if len(rates) > 1:
        return f"requests per second (rate scale 1 = {per:.3g}{by})"
    return f"At {per * rates[0]:.3g} requests per second (rate scale {rates[0]:g}{by})."


def _legend(
    figure: Figure, frame: pd.DataFrame, of: Mapping[str, style.Look], order: Sequence[str], *, level: float, thin: bool
) -> float:
    """Put the legend on top in as many columns as fit; returns its height in inches."""
    handles: list[Line2D | Patch] = [style.handle(series, of[series]) for series in order]
    handles.append(Line2D([], [], color="#404040", linewidth=0.7, dashes=(4, 2), label=f"{100 * level:g} %"))
    if frame["low"].notna().any() and not thin:
        handles.append(Patch(facecolor="#404040", alpha=0.2, linewidth=0, label="95 % interval"))
    if np.isinf(frame.loc[frame["definition"].isin(LATENCY), "mean"]).any():
        handles.append(Line2D([], [], color="#404040", marker="^", markersize=3, linestyle="none",
                              label="over 5 % never end"))  # fmt: skip
    return style.legend(figure, handles, 4, handlelength=2.2, columnspacing=1.0, labelspacing=0.3)


def _notes(frame: pd.DataFrame, unfit: Collection[str]) -> str:
    tail = frame[frame["definition"].isin(LATENCY)]["mean"]
    notes = [f"Not drawn, for their models do not fit: {', '.join(unfit)}."] * bool(unfit)
    notes += ["Triangles at the top edge: over 5 % of requests never end."] * bool(np.isinf(tail).any())
    return " ".join(notes)


def _caption(table: pa.Table, frame: pd.DataFrame, unfit: Collection[str], note: str, halves: int) -> str:
    """Write the short caption below the figure."""
    about = table.filter(table.column("skipped").is_null()).to_pandas()
    fewest, most = int(frame["n"].min()), int(frame["n"].max())
    count = f"{most} seed{'s' * (most > 1)}" if fewest == most else f"{fewest} to {most} seeds"
    setting = [
        " and ".join(sorted(about["trace"].unique())) + f" ({' and '.join(sorted(about['tier'].dropna().unique()))})",
        " and ".join(sorted(map(str, about["models"].unique()))),
        mix.all_told(about["gpus"].mode()[:1], sorted(about["gpu"].unique()), " and "),
        fidelities(sorted(about["fidelity"].unique())),
        style.unchecked(about),
        f"SLO {caption.slos(about['slo'].unique())}",
        "two thin lines: halves, case studies" if halves else "one run, no interval" if most == 1 else
        f"{count}, 95 % intervals",
        plans(about["plan_origin"].dropna().unique()),
    ]  # fmt: skip
    below = (
        frame["rate_scale"].nunique() > 1
        and frame[frame["definition"].isin(ATTAINMENT)]["mean"].min() < FLOOR / PERCENT
    )
    return caption.within(
        caption.WORDS, " · ".join(filter(None, setting)) + ".", style.invalid(about), style.unserved(),
        _notes(frame, unfit),
        note, f"Points below {FLOOR:g} % are not drawn." * bool(below), style.unvetted(about), style.caps(table),
        _machine(about), style.departs(about), style.degrees(about),
    )  # fmt: skip


def _machine(about: pd.DataFrame) -> str:
    machines = about["machine"].dropna().unique() if "machine" in about else ()
    return f"Machine: {' and '.join(sorted(machines))}." if len(machines) else ""


def told(table: pa.Table, note: str, frame: pd.DataFrame) -> str:
    """Write the full caption, which the CSV holds; `frame` are the table's `points`."""
    unfit = tidy.infeasible(table)
    about = table.filter(table.column("skipped").is_null()).to_pandas()
    told = (_notes(frame, unfit), style.caps(table), style.departs(about), style.degrees(about), note)
    notes = " ".join(part for part in told if part)
    return style.caption(about, frame["n"], notes)


def render(sweep: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the sweep in folder `sweep` to `stem`.pdf, .png and .csv; returns their paths.

    Raises UserError where there is no sweep or the disk refuses.
    """
    path = sweep / SWEEP
    if not path.is_file():
        raise UserError(f"{sweep}: no sweep here ({SWEEP} is missing); bench compare makes one")
    table = form.chosen(tidy.stored(path))
    facts = record.footer(path)
    halves: list[list[int]] = next((panel.get("halves", []) for panel in facts.get("panels", [])), [])
    level, (first, *_) = facts.get("level", LEVEL), facts.get("definitions") or ["both"]
    labels = table["label"].unique().to_pylist()
    gone = {name: words for name in labels if (words := crossings.unserved(table, "rate_scale", name, first))}
    names = HALVES if halves else ("",)
    every = [points(part) for part in parts(table, halves)]
    drawn = pd.concat([part[COLUMNS].assign(half=half) for half, part in zip(names, every, strict=True)])
    with style.theme(), form.marking(gone):
        figure = draw(table, note, halves, every, level)
        caption = told(table, note, points(table) if halves else every[0])
        return style.save(figure, stem, drawn, command, caption)
