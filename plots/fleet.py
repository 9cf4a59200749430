"""Attainment over the numbers of GPUs that were tried: a line of panels a workload, a column an SLO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.policy.types import UserError
from harness.rows import crossings
from plots import form, style
from plots.caption import Facts, Panel, brief, caption, definition, slos

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes

PANEL_IN, GAP_IN = 1.0, 0.42  # height of a panel, and of what stands below it
LEVEL, DROP = (0, (4, 2)), (0, (1, 1))  # dashes of the level, and at each answer
NEAR = (0.955, 1.003)  # the attainment that is shown: where systems are told apart


def points(table: pa.Table, facts: Facts) -> pd.DataFrame:
    """Return what is drawn: one row a (condition, system, GPUs), the mean, least and most over seeds.

    `answer` marks the fewest GPUs that reach the level.
    """
    definition = facts["definitions"][0]
    rows: list[dict[str, Any]] = []
    for panel in facts["panels"]:
        here = crossings.of_panel(table, panel)
        frame = here.select(["definition", "over", "value", "label", "gpus", "infeasible"]).to_pandas()
        frame = frame[(frame["definition"] == definition) & (frame["over"] == "pooled") & frame["value"].notna()]
        place = {key: panel[key] for key in ("condition", "trace", "rate_rps", "slo")}
        for (label, gpus), group in frame.groupby(["label", "gpus"], observed=True, sort=True):
            at = crossings.fewest(here, str(label), "", definition, facts["level"])
            value = group["value"]
            rows.append({**place, "label": str(label), "gpus": int(gpus), "mean": value.mean(), "low": value.min(),
                         "high": value.max(), "n": len(group), "infeasible": bool(group["infeasible"].notna().any()),
                         "answer": at is not None and at.sign != ">" and at.mean == gpus})  # fmt: skip
    return pd.DataFrame(rows)


def draw(table: pa.Table, facts: Facts, note: str = "") -> Figure:
    """Draw the figure, a page wide; call within `style.theme()`. Raises UserError if nothing is there."""
    frame = points(table, facts)
    if not len(frame):
        raise UserError("nothing to draw: no run of this study has a value")
    series = [label for label in facts["systems"] if label in set(frame["label"])]
    looks = style.looks(series)
    lines: dict[tuple[Any, ...], dict[str, Panel]] = {}
    for panel in facts["panels"]:
        lines.setdefault((panel["row"], panel["column"], panel["models"]), {})[_slo(panel)] = panel
    rules = list(dict.fromkeys(map(_slo, facts["panels"])))
    figure = Figure(figsize=(form.width(style.PAGE_IN), 1))
    handles = [style.handle(label, looks[label]) for label in series]
    handles.append(Line2D([], [], color="#808080", linewidth=0.6, linestyle=LEVEL,
                          label=f"{100 * facts['level']:g} %"))  # fmt: skip
    handles.append(Line2D([], [], color="#404040", linewidth=0.9, linestyle=DROP,
                          label=f"fewest GPUs for {100 * facts['level']:g} %"))  # fmt: skip
    top = style.legend(figure, handles, 6, handlelength=2.2, columnspacing=1.2) + 0.25
    text, below = style.foot(brief(table, facts, note, _spread(facts), *_shown(facts)), 165)
    height = top + len(lines) * (PANEL_IN + GAP_IN) + below + 0.1
    figure.set_size_inches(form.width(style.PAGE_IN), height)
    grid = figure.add_gridspec(len(lines), len(rules), left=0.095, right=0.99, top=1 - top / height, wspace=0.08,
                               bottom=(below + GAP_IN + 0.05) / height, hspace=GAP_IN / PANEL_IN)  # fmt: skip
    for i, panels in enumerate(lines.values()):
        for j, slo in enumerate(rules):
            axis = figure.add_subplot(grid[i, j])
            if slo not in panels:
                axis.set_axis_off()
                continue
            _panel(axis, panels[slo], frame[frame["condition"] == panels[slo]["condition"]], looks, facts["level"])
            if i == 0:
                axis.set_title(f"SLO {slos([slo])}", pad=3, fontsize=6.5)
            if j:
                axis.tick_params(labelleft=False)
            else:
                axis.set_ylabel(_ylabel(panels[slo], facts), fontsize=6)
            if i == len(lines) - 1:
                axis.set_xlabel("GPUs", labelpad=1)
    style.write_foot(figure, text)
    return figure


def _slo(panel: Panel) -> str:
    return str(panel["slo"]) if panel["slo_scale"] is None else f"{panel['slo_scale']:g}x{panel['slo']}"


def _ylabel(panel: Panel, facts: Facts) -> str:
    name = panel["trace"].partition("+")[0]
    return f"{name}\n{panel['rate_rps']:.3g} req/s\n{definition(facts['definitions'][0])} SLO met (%)"


def _panel(axis: Axes, panel: Panel, frame: pd.DataFrame, looks: Mapping[str, style.Look], level: float) -> None:
    """Curves over the counts that were sampled; a dotted drop at each answer."""
    axis.axhline(level, color="#808080", linewidth=0.6, linestyle=LEVEL)
    for label, look in looks.items():
        curve = frame[frame["label"] == label].sort_values("gpus")
        ran = curve["mean"].where(~curve["infeasible"])
        axis.plot(curve["gpus"], ran, linestyle=look.line, color=look.color, linewidth=0.9)
        for row in curve.to_dict("records"):
            axis.plot([row["gpus"]] * 2, [row["low"], row["high"]], color=look.color, linewidth=0.5, alpha=0.6)
            axis.plot([row["gpus"]], [row["mean"]], **look.marks(hollow=row["infeasible"]), linestyle="none")
        for gpus in curve.loc[curve["answer"], "gpus"]:
            axis.axvline(gpus, ymax=0.5, color=look.color, linewidth=0.9, linestyle=DROP, alpha=0.8)
    least, most = min(panel["xs"]), max(panel["xs"])
    axis.set_xscale("log", base=2)
    axis.set_xlim(least / 1.08, most * 1.08)
    axis.set_ylim(*NEAR)
    axis.xaxis.set_major_locator(FixedLocator([x for x in (1, 2, 4, 6, 8, 12, 16, 24, 32, 64) if least <= x <= most]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}"))


def told(table: pa.Table, facts: Facts, note: str = "") -> str:
    """Write the full caption, which the CSV holds."""
    return caption(table, facts, "mean, least and most", *_shown(facts), note=note)


def _spread(facts: Facts) -> str:
    return f"Markers and bars: mean, least and most of {facts['seeds']} seeds."


def _shown(facts: Facts) -> Iterator[str]:
    yield f"Dotted: the fewest GPUs that reach {100 * facts['level']:g} %, by bracketing."
    yield f"Only counts with a marker were run; points below {100 * NEAR[0]:g} % are not drawn."
