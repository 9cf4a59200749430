"""Predicted against measured values, as points along a diagonal: kernels, steps, end-to-end runs, specs on servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from plots import page, style

ACROSS = 3  # panels in a line
PALETTE = (style.BLUE, style.ORANGE, style.GREEN, style.RED, style.PURPLE, style.BROWN, style.SKY, style.GREY)
Looks = Mapping[str, tuple[str, str]]  # colour and marker
NAMES = ("a100-80g", "h100", "h200", "l40s", "h800", "h20", "b200", "rtx-pro-6000")
GPUS: Looks = dict(zip(NAMES, zip(PALETTE, "osD^vPX<", strict=True), strict=True))
KERNELS = {"kernels": "Kernels of a layer (GEMM, attention)", "steps": "Whole steps, eager vLLM"}
MOST = 250  # most points drawn of one GPU, op and side of the fit; errors count all
STEPS: Looks = {"first token of a prompt": (style.BLUE, "o"), "step of a batch": (style.ORANGE, "s")}
OF_STEPS = {"prefill": "first token of a prompt", "decode": "step of a batch"}
RUNS = {  # title; unit of both axes; its factor
    "ttft": ("Mean TTFT", "ms", 1e3),
    "tpot": ("Mean TPOT", "ms", 1e3),
    "e2e": ("Mean E2E", "s", 1.0),
    "throughput": ("Throughput", "tokens/s", 1.0),
    "kv_blocks": ("KV memory", "blocks of 16 tokens", 1.0),
}
QUANTILES: Looks = {"P50": (style.BLUE, "o"), "P95": (style.ORANGE, "s"), "P99": (style.GREY, "^")}
FITTED, LEFT_OUT = "used in the fit", "left out of the fit"


def render(draw: Callable[..., Figure], frame: pd.DataFrame, stem: Path, command: str, *more: str) -> list[Path]:
    """Draw points with the function `draw` to `stem`.pdf, .png and .csv; return their paths.

    Raises UserError if a file cannot be written.
    """
    with style.theme():
        return style.save(draw(frame, *more), stem, thinned(frame) if draw is kernels else frame, command)


def _panels(
    count: int, looks: Looks, band: float, text: str, *more: Line2D, columns: int = 4
) -> tuple[Figure, list[Axes]]:
    """Lay out square panels under a legend of the `looks`, the entries in `more`, and the line of equal values."""
    handles = [*(page.mark(label, look) for label, look in looks.items()), *more, *page.alike_key(band)]
    figure, lines = page.panels(
        page.grid(count, ACROSS, 0.0),
        wide_in=style.COLUMN_IN if count == 1 else style.PAGE_IN,
        left_in=0.6,
        beside_in=0.6,
        right_in=0.15,
        handles=handles,
        columns=columns,
        text=text,
    )
    return figure, [axis for line in lines for axis in line]


def thinned(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the kernel measurements to draw, at most `MOST` of each group and evenly spaced by measured time.

    A group has one panel, GPU, op, and use in the fit (used, or held out).
    """
    frame = frame.sort_values(["panel", "gpu", "op", "held", "measured_s", "predicted_s"], ignore_index=True)
    keep = [
        rows[np.unique(np.linspace(0, len(rows) - 1, MOST).astype(np.int64))]
        for rows in frame.groupby(["panel", "gpu", "op", "held"]).indices.values()
    ]
    return frame.loc[np.sort(np.concatenate(keep))]


def kernels(frame: pd.DataFrame) -> Figure:
    """Draw predicted against measured times of the cost tables, with the errors of rows left out of their fit.

    `frame` is what `harness.calibrate.kernels.points` returns; call within `style.theme()`.
    """
    band = 1.25  # the target: 95 % of the rows within it
    frame = frame.assign(measured=1e3 * frame["measured_s"], predicted=1e3 * frame["predicted_s"])
    looks = {gpu: look for gpu, look in GPUS.items() if gpu in set(frame["gpu"])}
    text = "GPUs: rows left out of the fit; errors in the panels are of these, absolute."
    figure, axes = _panels(2, looks, band, text, page.mark(FITTED, ("#b9b9b9", "o")))
    for axis, (panel, title) in zip(axes, KERNELS.items(), strict=True):
        drawn, every = (rows[rows["panel"] == panel] for rows in (thinned(frame), frame))
        page.alike(axis, every["measured"].to_numpy(np.float64), band)
        small: dict[str, Any] = {"markeredgewidth": 0, "rasterized": True}
        fitted, words = drawn[~drawn["held"]], []
        page.scatter(axis, fitted["measured"], fitted["predicted"], ("#b9b9b9", "o"), markersize=1.2, **small)
        for gpu, look in looks.items():
            holding, rows = drawn[drawn["held"] & (drawn["gpu"] == gpu)], every[every["held"] & (every["gpu"] == gpu)]
            page.scatter(axis, holding["measured"], holding["predicted"], look, markersize=1.9, alpha=0.75, **small)
            off = (rows["predicted"] / rows["measured"] - 1).abs()
            words += [f"{gpu}: median {off.median():.1%}, P95 {off.quantile(0.95):.1%}"] * bool(len(rows))
        axis.text(0.03, 0.97, "\n".join(words), transform=axis.transAxes, va="top", fontsize=5.5, linespacing=1.3)
        page.named(axis, title, "measured (ms)", "predicted (ms)")
    return figure


def steps(frame: pd.DataFrame, note: str) -> Figure:
    """Draw seconds of servers' steps, measured against fitted, a panel per model; call within `style.theme()`.

    `frame` is what `harness.calibrate.steps.points` returns.
    """
    band, models = 1.1, list(dict.fromkeys(frame["model"]))
    figure, axes = _panels(len(models), STEPS, band, note, page.mark(LEFT_OUT, hollow=True), columns=2)
    for axis, model in zip(axes, models, strict=True):
        mine = frame[frame["model"] == model]
        page.alike(axis, 1e3 * mine[["measured_s", "fitted_s"]].to_numpy(np.float64), band)
        for (what, holds), rows in mine.groupby(["what", "held"]):
            page.scatter(
                axis, 1e3 * rows["measured_s"], 1e3 * rows["fitted_s"], STEPS[OF_STEPS[str(what)]], hollow=bool(holds)
            )
        page.named(axis, model, "measured (ms)", "fitted (ms)")
    return figure


def runs(frame: pd.DataFrame) -> Figure:
    """Draw measured end-to-end runs against simulated ones, with a panel per metric and a colour per engine.

    Call within `style.theme()`. `frame` is what `harness.validate.validate.points` returns.
    """
    band, frame = 1.15, frame[frame["unscored"] == ""]
    shown = [metric for metric in RUNS if (frame["metric"] == metric).any()]
    engines = sorted(frame["engine"].unique())
    looks = {engine: (PALETTE[k % len(PALETTE)], "os^Dv<>p"[k % 8]) for k, engine in enumerate(engines)}
    pairs = sorted(set(zip(frame["engine"], frame["gpu"], strict=True)))
    which = ", ".join(f"{engine} on {gpu}" for engine, gpu in pairs)
    cases = frame.groupby(["file", "row"]).ngroups
    text = f"{cases} measured cases: {which}. Each is replayed under its own conditions."
    figure, axes = _panels(len(shown), looks, band, text, page.mark(FITTED), page.mark(LEFT_OUT, hollow=True))
    for axis, metric in zip(axes, shown, strict=True):
        title, unit, factor = RUNS[metric]
        mine = frame[frame["metric"] == metric]
        page.alike(axis, factor * mine[["measured", "ours"]].to_numpy(np.float64), band, 10**0.6)
        for (engine, fitted), rows in mine.groupby(["engine", "fitted"]):
            page.scatter(
                axis, factor * rows["measured"], factor * rows["ours"], looks[str(engine)], hollow=not fitted, alpha=0.8
            )
        page.named(axis, title, f"measured ({unit})", f"simulated ({unit})")
    return figure


def servers(frame: pd.DataFrame, attainment: str, note: str) -> Figure:
    """Draw simulated against measured values of the same specs: attainment, and quantiles of TTFT and TPOT.

    `frame` has the cells that `harness.validate.ranks.cells` returns, a row each. Call within `style.theme()`.
    """
    over = page.mark("servers over repeats (±1 s.d.)", (page.GREY, "_"))
    figure, (share, *others) = _panels(3, QUANTILES, 1.1, note, over, columns=6)
    rows = frame[frame["measure"] == attainment]
    share.plot([0, 100], [0, 100], color="#000000", linewidth=0.6)
    small: dict[str, Any] = {"markersize": 3, "linewidth": 0.8}
    x, y, spread = 100 * rows["servers"], 100 * rows["simulator"], 100 * rows["spread"].fillna(0)
    share.errorbar(x, y, xerr=spread, fmt="o", color=style.GREEN, **small)
    for axis in (share.xaxis, share.yaxis):
        page.ruler(axis, 0, 100)
    page.named(share, "Attainment", "servers (%)", "simulator (%)")
    for axes, (metric, title) in zip(others, {"ttft": "TTFT", "tpot": "TPOT"}.items(), strict=True):
        known = frame[frame["error"].notna()]
        of = {name: known[known["measure"] == f"{metric}_{name.lower()}_s"] for name in QUANTILES}
        page.alike(axes, 1e3 * pd.concat(of.values())[["servers", "simulator"]].to_numpy(np.float64), 1.1)
        for name, mine in of.items():
            color, marker = QUANTILES[name]
            x, y = 1e3 * mine["servers"], 1e3 * mine["simulator"]
            spread = x * np.minimum(mine["spread"].fillna(0), 0.95)  # a bar to 0 has no end on this axis
            axes.errorbar(x, y, xerr=spread, fmt=marker, color=color, **small)
        page.named(axes, title, "servers (ms)", "simulator (ms)")
    return figure
