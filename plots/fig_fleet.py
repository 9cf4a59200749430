"""Attainment over the GPU counts that a fleet sampled: a line of panels a workload, a column an SLO.

python -m plots.fig_fleet results/fig12/fig12-3f9c01ab plots/out/fig12
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.policy.types import UserError
from harness.rows import statistics, tidy
from harness.rows.record import SWEEP
from plots import style

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from matplotlib.axes import Axes

PANEL_IN, GAP_IN = 1.0, 0.42  # height of a panel, and of what stands below it
NEAR = (0.955, 1.003)  # the attainment that is shown: where systems are told apart


def about(sweep: Path) -> dict[str, Any]:
    """Facts of a stored fleet; UserError where there is none."""
    path = sweep / SWEEP
    if not path.is_file():
        raise UserError(f"{sweep}: no fleet here ({SWEEP} is missing); bench fleet makes one")
    return {key.decode(): json.loads(value) for key, value in (pq.read_metadata(path).metadata or {}).items()
            if not key.startswith((b"ARROW", b"pandas"))}  # fmt: skip


def draws(sweep: Path) -> bool:
    """Tell whether a folder holds a fleet."""
    return (sweep / SWEEP).is_file() and "fleet" in about(sweep)


def points(table: pa.Table, facts: Mapping[str, Any]) -> pd.DataFrame:
    """Return what is drawn: one row a (workload, SLO, system, GPUs), the mean, least and most over seeds.

    `answer` marks the fewest GPUs that reach the level.
    """
    import pandas as pd

    frame = table.to_pandas()
    frame = frame[(frame["definition"] == facts["definition"]) & (frame["over"] == "pooled")]
    keys = ["trace", "rate_scale", "slo", "label"]
    rows = []
    for key, own in frame.groupby(keys, observed=True, sort=True):
        curves = {seed: dict(zip(x["gpus"].astype(float), x["value"], strict=True)) for seed, x in own.groupby("seed")}
        at = statistics.fewest(curves, facts["level"]).at
        for gpus, x in own.groupby("gpus", sort=True):
            value = x["value"]
            row = dict(zip(keys, key, strict=True)) | {"gpus": int(gpus), "mean": value.mean(), "low": value.min()}
            row |= {"high": value.max(), "n": len(x), "infeasible": bool(x["infeasible"].notna().any())}
            rows.append({**row, "answer": at.sign != ">" and at.mean == gpus})
    return pd.DataFrame(rows)


def draw(table: pa.Table, facts: Mapping[str, Any], note: str = "") -> Figure:
    """Draw the figure, a page wide; call within `style.theme()`. Raises UserError if nothing is there."""
    frame = points(table, facts)
    if not len(frame):
        raise UserError("nothing to draw: no run of this fleet has a value")
    series = [label for label in facts["systems"] if label in set(frame["label"])]
    looks = style.looks(series)
    workloads, slos = facts["workloads"], facts["slos"]
    figure = Figure(figsize=(style.PAGE_IN, 1))
    handles = [Line2D([], [], label=x, linestyle=looks[x].line, **looks[x].marks()) for x in series]
    top = style.legend(figure, handles, 6, handlelength=2.2, columnspacing=1.2) + 0.25
    text = textwrap.fill(_caption(table, facts, frame, note), 165)
    below = 0.1 + 0.078 * (1 + text.count("\n"))
    height = top + len(workloads) * (PANEL_IN + GAP_IN) + below
    figure.set_size_inches(style.PAGE_IN, height)
    grid = figure.add_gridspec(len(workloads), len(slos), left=0.095, right=0.99, top=1 - top / height, wspace=0.08,
                               bottom=(below + GAP_IN - 0.05) / height, hspace=GAP_IN / PANEL_IN)  # fmt: skip
    for i, workload in enumerate(workloads):
        for j, slo in enumerate(slos):
            axis = figure.add_subplot(grid[i, j])
            mine = (frame["trace"] == workload["name"]) & (frame["rate_scale"] == workload["rate_scale"])
            _panel(axis, frame[mine & (frame["slo"] == slo)], series, looks, facts)
            if i == 0:
                axis.set_title(f"SLO {slo}", pad=3, fontsize=6.5)
            if j:
                axis.tick_params(labelleft=False)
            else:
                name = workload["trace"].partition("+")[0]
                axis.set_ylabel(
                    f"{name}\n{workload['rate_rps']:.3g} req/s\n{facts['definition'].upper()} met (%)", fontsize=6
                )
            if i == len(workloads) - 1:
                axis.set_xlabel("GPUs", labelpad=1)
    figure.text(0.005, 0.004, text, fontsize=5, color="#404040", va="bottom", linespacing=1.25)
    return figure


def _panel(
    axis: Axes, frame: pd.DataFrame, series: list[str], looks: Mapping[str, style.Look], facts: Mapping[str, Any]
) -> None:
    """Curves over the counts that were sampled; a dotted drop at each answer."""
    axis.axhline(facts["level"], color="#808080", linewidth=0.6, linestyle=(0, (4, 2)))
    for label in series:
        own, look = frame[frame["label"] == label].sort_values("gpus"), looks[label]
        axis.plot(own["gpus"], own["mean"], linestyle=look.line, color=look.color, linewidth=0.9)
        for row in own.to_dict("records"):
            axis.plot([row["gpus"]] * 2, [row["low"], row["high"]], color=look.color, linewidth=0.5, alpha=0.6)
            axis.plot([row["gpus"]], [row["mean"]], **look.marks(hollow=row["infeasible"]), linestyle="none")
        for gpus in own.loc[own["answer"], "gpus"]:
            axis.axvline(gpus, ymax=0.5, color=look.color, linewidth=0.9, linestyle=(0, (1, 1)), alpha=0.8)
    least, most = facts["gpus"]
    axis.set_xscale("log", base=2)
    axis.set_xlim(least / 1.08, most * 1.08)
    axis.set_ylim(*NEAR)
    axis.xaxis.set_major_locator(FixedLocator([x for x in (4, 6, 8, 12, 16, 24, 32, 64) if least <= x <= most]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}"))


def _caption(table: pa.Table, facts: Mapping[str, Any], frame: pd.DataFrame, note: str) -> str:
    """What a reader must know."""
    runs = table.to_pandas()
    own = runs[runs["label"].isin(facts["systems"])]
    seeds = int(frame["n"].max())

    def each(column: str) -> str:
        return " and ".join(str(x) for x in sorted(own[column].dropna().unique()))

    traces = ", ".join(dict.fromkeys(f"{x['name']} ({x['tier']})" for x in facts["workloads"]))
    facts_of_all = [
        f"After {facts['paper']}. {traces}",
        f"models: {each('models')}",
        each("gpu"),
        each("machine"),
        each("fidelity"),
        f"mean, least and most of {seeds} seed{'s' * (seeds > 1)}",
        tidy.plans(own["plan_origin"].dropna().unique()),
    ]
    dotted = f"Dotted: the fewest GPUs that reach {100 * facts['level']:g} %, by bracketing."
    shown = f"Only counts with a marker were run; below {100 * NEAR[0]:g} % none is shown."
    told = [" · ".join(fact for fact in facts_of_all if fact) + ".", dotted, shown, style.caps(table)]
    told += [style.departs(own), style.invalid(own), style.unchecked(own), note, style.TAILS]
    return " ".join(part for part in told if part)


def render(sweep: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the fleet stored in folder `sweep` to `stem`.pdf, .png and .csv; returns their paths. Raises UserError."""
    facts, table = about(sweep), pq.read_table(sweep / SWEEP)
    with style.theme():
        return style.save(draw(table, facts, note), stem, points(table, facts), command)


if __name__ == "__main__":
    render(Path(sys.argv[1]), Path(sys.argv[2]), "python -m plots.fig_fleet " + " ".join(sys.argv[1:]))
