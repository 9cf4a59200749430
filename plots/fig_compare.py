"""Attainment and P95 latency of systems over the rate, from a sweep's attainment.parquet alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from harness.policy.types import UserError
from harness.rows import record, tidy
from harness.rows.record import SWEEP
from plots import style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

COMPARISON = "comparison"  # the name of its study
LEVEL = 0.99  # the papers' target
HEIGHT_IN = 4.6
ATTAINMENT = {"both": "TTFT and TPOT met", "ttft": "TTFT met", "tpot": "TPOT met"}
LATENCY = {"ttft_p95_s": ("P95 TTFT (s)", 1.0), "tpot_p95_s": ("P95 TPOT (ms)", 1e3)}
COLUMNS = ["series", "label", "gpus", "rate_scale", "definition", "mean", "low", "high", "n", "infeasible"]


def draws(folder: Path) -> bool:
    """A comparison: a study that bench compare makes of its options."""
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
    return frame


def draw(table: pa.Table, note: str = "") -> Figure:
    """Draw the figure, one column wide; call within `style.theme()`. Raises UserError if there is nothing to draw.

    A system of which a run had no room is not drawn; the caption says so.
    """
    frame = points(table)
    unfit = tidy.infeasible(table)
    frame = frame[~frame["label"].isin(unfit)]
    if not len(frame):
        raise UserError("nothing to draw: every run of this sweep was skipped or does not fit (bench list tells why)")
    looks = style.looks(frame["label"])
    of = {series: looks[label] for series, label in zip(frame["series"], frame["label"], strict=True)}
    order = sorted(of, key=lambda series: (series.startswith(("ideal", "dedicated")), series))
    about = table.filter(table.column("skipped").is_null()).to_pandas()
    notes = " ".join(part for part in (_notes(frame, unfit), style.caps(table), style.departs(about), note) if part)
    text, foot = style.foot(style.caption(about, frame["n"], notes), 88)

    figure = Figure(figsize=(style.COLUMN_IN, HEIGHT_IN))
    top = 1 - (_legend(figure, of, order) + 0.2) / HEIGHT_IN
    bottom = (0.36 + foot) / HEIGHT_IN  # inches: the axis' words, then lines of the caption
    grid = figure.add_gridspec(3, 2, height_ratios=(1.3, 1, 1), left=0.11, right=0.975, top=top, bottom=bottom,
                               hspace=0.42, wspace=0.26)  # fmt: skip
    axes = [figure.add_subplot(grid[0, :]), *(figure.add_subplot(grid[i, j]) for i in (1, 2) for j in (0, 1))]
    panels = [(name, f"{title} (%)", 100.0) for name, title in ATTAINMENT.items()]
    panels += [(name, title, unit) for name, (title, unit) in LATENCY.items()]
    for axis, letter, (name, title, unit) in zip(axes, "abcde", panels, strict=True):
        own = frame[frame["definition"] == name]
        axis.set_title(f"({letter}) {title}", loc="left", pad=4.5)  # clear of the triangles
        _curves(axis, own, of, order, unit)
        _rates(axis, sorted(frame["rate_scale"].unique()), len(order))
        if name in ATTAINMENT:
            _percent(axis, 100 * float(np.nanmin(own[["mean", "low"]].to_numpy(np.float64), initial=1.0)))
        else:
            _latency(axis, own["mean"].to_numpy(np.float64) * unit)
    axes[0].set_title(f"dashed: {100 * LEVEL:g} %", loc="right", pad=4.5, fontsize=6, color="#404040")
    figure.text(0.55, bottom - 0.24 / HEIGHT_IN, _rate_label(frame), ha="center", va="center", fontsize=7)
    style.write_foot(figure, text)
    return figure


def _curves(axis: Axes, frame: pd.DataFrame, of: Mapping[str, style.Look], order: Sequence[str], unit: float) -> None:
    """Draw a line with its band per series; at a single rate a dot with its interval, side by side."""
    single = frame["rate_scale"].nunique() <= 1
    for depth, series in enumerate(reversed(order)):  # the first of the legend lies on top
        own = frame[frame["series"] == series].sort_values("rate_scale")
        look, z = of[series], 3 + 0.1 * depth
        x = np.full(len(own), float(order.index(series))) if single else own["rate_scale"].to_numpy(np.float64)
        y, low, high = (own[name].to_numpy(np.float64) * unit for name in ("mean", "low", "high"))
        finite = np.isfinite(y)
        sure = finite & np.isfinite(low)
        if single:
            axis.vlines(x[sure], low[sure], high[sure], color=look.color, linewidth=1.0, zorder=z)
        else:
            axis.fill_between(x, low, high, where=sure, color=look.color, alpha=0.14, linewidth=0)
            axis.plot(x, np.where(finite, y, np.nan), color=look.color, linestyle=look.line, zorder=z)
        axis.plot(x[finite], y[finite], linestyle="", zorder=z, clip_on=False, **look.marks())
        never = np.isinf(y)
        edge = axis.get_xaxis_transform()
        axis.plot(x[never], np.ones(never.sum()), "^", color=look.color, ms=3, clip_on=False, zorder=z, transform=edge)


def _percent(axis: Axes, lowest: float) -> None:
    axis.axhline(100 * LEVEL, color="#404040", linewidth=0.7, dashes=(4, 2), zorder=1.5)
    floor = min(80.0, 20 * np.floor(lowest / 20))
    axis.set_ylim(floor - 0.03 * (100 - floor), 100 + 0.03 * (100 - floor))


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


def _rates(axis: Axes, rates: Sequence[float], series: int) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    if len(rates) <= 1:
        axis.set_xticks([])
        axis.set_xlim(-0.6, series - 0.4)
        return
    if rates[-1] >= 8 * rates[0] > 0:
        axis.set_xscale("log", base=2)
    axis.margins(x=0.03)
    axis.xaxis.set_major_locator(FixedLocator(_apart(axis, rates)))
    axis.xaxis.set_minor_locator(FixedLocator(list(rates)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _apart(axis: Axes, rates: Sequence[float]) -> list[float]:
    """Rates to label: from the highest down, each that leaves a digit's room to the label at its right."""
    axis.get_xlim()  # or the transform would not know the data yet
    at = axis.get_xaxis_transform().transform([(rate, 0.0) for rate in rates])[:, 0] * 72 / axis.figure.dpi
    size = mpl.rcParams["xtick.labelsize"]
    room = [TextPath((0, 0), f"{rate:g}0", size).get_extents().width for rate in rates]  # points, as `at`
    shown = [len(rates) - 1]
    for i in range(len(rates) - 2, -1, -1):
        if at[shown[-1]] - at[i] >= (room[shown[-1]] + room[i]) / 2:
            shown.append(i)
    return [rates[i] for i in reversed(shown)]


def _rate_label(frame: pd.DataFrame) -> str:
    """Name the scaling and tie the scale to requests per second."""
    offered = frame[(frame["definition"] == "offered_rps") & np.isfinite(frame["mean"])]
    per = float((offered["mean"] / offered["rate_scale"]).median()) if len(offered) else np.nan
    how = " and ".join(sorted(frame["scaling"].dropna().unique()))
    rates = frame["rate_scale"].unique()
    facts = [how] * bool(how) + [f"1 = {per:.3g} req/s"] * bool(np.isfinite(per))
    return ("rate scale" if len(rates) > 1 else f"at rate scale {rates[0]:g}") + (
        f" ({', '.join(facts)})" if facts else ""
    )


def _legend(figure: Figure, of: Mapping[str, style.Look], order: Sequence[str]) -> float:
    """Put the legend on top in as many columns as fit; returns its height in inches."""
    handles = [style.handle(series, of[series]) for series in order]
    return style.legend(figure, handles, 4, handlelength=2.2, columnspacing=1.0, labelspacing=0.3)


def _notes(frame: pd.DataFrame, unfit: Collection[str]) -> str:
    tail = frame[frame["definition"].isin(LATENCY)]["mean"]
    notes = [f"Not drawn, for their models do not fit: {', '.join(unfit)}."] * bool(unfit)
    notes += ["Triangles at the top edge: over 5 % never finished."] * bool(np.isinf(tail).any())
    return " ".join(notes)


def render(sweep: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the sweep in folder `sweep` to `stem`.pdf, .png and .csv; returns their paths.

    Raises UserError where there is no sweep or the disk refuses.
    """
    path = sweep / SWEEP
    if not path.is_file():
        raise UserError(f"{sweep}: no sweep here ({SWEEP} is missing); bench compare makes one")
    table = tidy.stored(path)
    with style.theme():
        return style.save(draw(table, note), stem, points(table)[COLUMNS], command)
