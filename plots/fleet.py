"""The fewest GPUs by workload, system and SLO; behind them attainment over the numbers of GPUs that were tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.policy.types import UserError
from harness.rows import crossings
from harness.rows.about import About, Panel
from harness.rows.estimate import Estimate
from plots import form, overview, style
from plots.caption import brief, caption, definition, slos

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL_IN, GAP_IN = 1.0, 0.42  # height of a panel, and of what stands below it
LEVEL, DROP = (0, (4, 2)), (0, (1, 1))  # dashes of the level, and at each answer
NEAR = (0.955, 1.003)  # the attainment that is shown: where systems are told apart
MOST, ACROSS = 6, 3  # panels of the picture, and in a line of it
ROW_IN, HEAD_IN, FOOT_IN = 0.2, 0.3, 0.36  # heights of a system's row, and above and below a panel
NAMES_IN, WORDS_IN = 1.3, 0.62  # widths of systems' names, and of the counts beside a panel
MARKS = ("o", "s", "^", "D", "v", "P")  # by SLO
TICKS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return what is drawn: one row a (condition, system, GPUs), the mean, least and most over seeds.

    `answer` marks the fewest GPUs that reach the level.
    """
    definition = facts.definitions[0]
    rows: list[dict[str, Any]] = []
    for panel in facts.panels:
        here = crossings.of_panel(table, panel)
        frame = here.select(["definition", "over", "value", "label", "gpus", "infeasible"]).to_pandas()
        frame = frame[(frame["definition"] == definition) & (frame["over"] == "pooled") & frame["value"].notna()]
        place = {key: panel[key] for key in ("condition", "trace", "rate_rps", "slo")}
        for (label, gpus), group in frame.groupby(["label", "gpus"], observed=True, sort=True):
            at = crossings.fewest(here, str(label), "", definition, facts.level)
            value = group["value"]
            rows.append({**place, "label": str(label), "gpus": int(gpus), "mean": value.mean(), "low": value.min(),
                         "high": value.max(), "n": len(group), "infeasible": bool(group["infeasible"].notna().any()),
                         "answer": at is not None and at.sign != ">" and at.mean == gpus})  # fmt: skip
    return pd.DataFrame(rows)


def pages(table: pa.Table, facts: About, note: str = "") -> list[Figure]:
    """Draw the fewest GPUs, and the curves on a page behind; call within `style.theme()`."""
    curves = draw(table, facts, note)  # raises where there is nothing
    return [_fewest(table, facts, note), curves]


def _fewest(table: pa.Table, facts: About, note: str) -> Figure:
    """Draw the fewest GPUs that hold the level: a panel a workload, a row a system, a mark an SLO."""
    by_load = list(_by_load(facts).values())[:MOST]
    rules = list(dict.fromkeys(map(_slo, facts.panels)))
    present = set(table["label"].unique().to_pylist())
    names = [label for label in facts.systems if label in present]
    page_in = form.width(style.PAGE_IN)
    figure = Figure(figsize=(page_in, 1))
    grey: dict[str, Any] = {"color": "#606060", "linestyle": "none", "markersize": 4}
    handles = [Line2D([], [], marker=mark, label=f"SLO {slos([rule])}", **grey)
               for rule, mark in zip(rules, MARKS, strict=False)]  # fmt: skip
    if any(_papers(label, panel, table, facts) for panel in facts.panels for label in names):
        handles.append(Line2D([], [], **{**grey, **overview.PAPER_MARK}, label="where the paper's number puts it"))
    top = style.legend(figure, handles, 4, fontsize=6, columnspacing=1.4)
    text, below = style.foot(brief(table, facts, note, _answers(facts), *_apart(table), slo=False), 178)
    across = min(ACROSS, len(by_load))
    lines = [by_load[k : k + across] for k in range(0, len(by_load), across)]
    height = top + len(lines) * (HEAD_IN + ROW_IN * len(names) + FOOT_IN) + below + 0.05
    figure.set_size_inches(page_in, height)
    looks, wide, at = style.looks(names), (page_in - NAMES_IN) / across, height - top
    for i, line in enumerate(lines):
        at -= HEAD_IN + ROW_IN * len(names)
        for j, panels in enumerate(line):
            axis = figure.add_axes(((NAMES_IN + j * wide) / page_in, at / height,
                                    (wide - WORDS_IN) / page_in, ROW_IN * len(names) / height))  # fmt: skip
            style.name_rows(axis, [style.called(name) for name in names], fontsize=6)
            axis.tick_params(labelleft=not j, labelsize=6)
            _answered(axis, [panels.get(rule) for rule in rules], names, looks, table, facts)
            first = next(iter(panels.values()))
            name = (
                f"({chr(ord('a') + i * across + j)}) {first['trace'].partition('+')[0]}, {first['rate_rps']:.3g} req/s"
            )
            axis.set_title(name, loc="left", pad=8, fontsize=6.5)
            axis.set_xlabel("GPUs (lower is better)", fontsize=6, labelpad=1)
        at -= FOOT_IN
    style.write_foot(figure, text)
    return figure


def _answered(
    axis: Axes, panels: Sequence[Panel | None], names: Sequence[str], looks: Mapping[str, style.Look],
    table: pa.Table, facts: About,
) -> None:  # fmt: skip
    """Draw a workload's panels, one an SLO: marks of each system from the top of its row down, and their numbers."""
    xs = [x for panel in panels if panel for x in panel["xs"]]
    _counts(axis, min(xs), max(xs))
    for k, name in enumerate(names):
        if k % 2 == 0:
            axis.axhspan(k - 0.5, k + 0.5, color="#f6f6f6", linewidth=0, zorder=0)
        counts = []
        for j, (panel, mark) in enumerate(zip(panels, MARKS, strict=False)):
            at = None if panel is None else _answer(table, panel, name, facts)
            counts.append("-" if at is None else f"{'>' * (at.sign == '>')}{at.mean:g}")
            y = k + 0.6 * ((j + 0.5) / len(panels) - 0.5)
            if at is not None:
                hollow = at.sign != "="
                axis.plot([at.mean], [y], linestyle="none", clip_on=False, zorder=3,
                          **looks[name].marks(hollow=hollow) | {"marker": mark, "markersize": 3.4})  # fmt: skip
            for x in _papers(name, panel, table, facts) if panel else ():
                axis.plot([x], [y], zorder=2.5, **overview.PAPER_MARK)
        axis.text(1.05, k, " / ".join(counts), transform=axis.get_yaxis_transform(), fontsize=5.5, va="center")


def _papers(label: str, panel: Panel, table: pa.Table, facts: About) -> list[float]:
    """Return where the paper's numbers put a system: on our count of another, divided by the paper's ratio of them."""
    marks = []
    for claim in overview.claims_of(panel, facts):
        systems, others = (overview.AND_OR.split(claim[key]) for key in ("system", "over"))
        answers = (_answer(table, panel, name, facts) for name in systems)
        theirs = next((at.mean for at in answers if at is not None and at.sign == "="), None)
        if claim["what"] == "fewest" and label in others and theirs is not None:
            marks.append(theirs / float(claim["paper"]))
    return marks


def _answer(table: pa.Table, panel: Panel, label: str, facts: About) -> Estimate | None:
    """Return the fewest GPUs on which a system holds the level, if it was run."""
    return crossings.fewest(crossings.of_panel(table, panel), label, "", facts.definitions[0], facts.level)


def _by_load(facts: About) -> dict[tuple[Any, ...], dict[str, Panel]]:
    """Return the panels by workload, and then by SLO."""
    by_load: dict[tuple[Any, ...], dict[str, Panel]] = {}
    for panel in facts.panels:
        by_load.setdefault((panel["row"], panel["column"], panel["models"]), {})[_slo(panel)] = panel
    return by_load


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw the curves, a page wide; call within `style.theme()`. Raises UserError if nothing is there."""
    frame = points(table, facts)
    if not len(frame):
        raise UserError("nothing to draw: no run of this study has a value")
    series = [label for label in facts.systems if label in set(frame["label"])]
    looks = style.looks(series)
    lines = _by_load(facts)
    rules = list(dict.fromkeys(map(_slo, facts.panels)))
    figure = Figure(figsize=(form.width(style.PAGE_IN), 1))
    handles = [style.handle(label, looks[label]) for label in series]
    handles.append(Line2D([], [], color="#808080", linewidth=0.6, linestyle=LEVEL,
                          label=f"{100 * facts.level:g} %"))  # fmt: skip
    handles.append(Line2D([], [], color="#404040", linewidth=0.9, linestyle=DROP,
                          label=f"fewest GPUs for {100 * facts.level:g} %"))  # fmt: skip
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
            _panel(axis, panels[slo], frame[frame["condition"] == panels[slo]["condition"]], looks, facts.level)
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


def _ylabel(panel: Panel, facts: About) -> str:
    name = panel["trace"].partition("+")[0]
    return f"{name}\n{panel['rate_rps']:.3g} req/s\n{definition(facts.definitions[0])} SLO met (%)"


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
    _counts(axis, least, most)
    axis.set_ylim(*NEAR)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}"))


def _counts(axis: Axes, least: float, most: float) -> None:
    """Make the axis one of numbers of GPUs."""
    axis.set_xscale("log", base=2)
    axis.set_xlim(least / 1.08, most * 1.08)
    axis.xaxis.set_major_locator(FixedLocator([x for x in TICKS if least <= x <= most]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def told(table: pa.Table, facts: About, note: str = "") -> str:
    """Write the full caption, which the CSV holds."""
    return caption(table, facts, "mean, least and most", *_shown(facts), note=note)


def _level(facts: About) -> str:
    return f"{100 * facts.level:g} % of {definition(facts.definitions[0])} SLOs"


def _answers(facts: About) -> str:
    over = f"the mean of {facts.seeds} seeds" if facts.seeds > 1 else "one seed"
    return f"Fewest GPUs on which {over} meets {_level(facts)}, by bracketing; numbers in the order of SLOs."


def _apart(table: pa.Table) -> Iterator[str]:
    """Say how many GPUs a GPU for each model takes, if that was run."""
    rows = table.filter(pc.equal(table["label"].cast(pa.string()), "dedicated"))
    if len(rows):
        yield f"A GPU a model (dedicated) takes {pc.max(rows['gpus']).as_py()}."


def _spread(facts: About) -> str:
    return f"Markers and bars: mean, least and most of {facts.seeds} seeds."


def _shown(facts: About) -> Iterator[str]:
    yield f"Dotted: the fewest GPUs that reach {100 * facts.level:g} %, by bracketing."
    yield f"Only counts with a marker were run; points below {100 * NEAR[0]:g} % are not drawn."
