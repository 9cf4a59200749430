"""Attainment by rate, SLO scale, GPUs or models: a line of panels per condition, a column per trace and definition.

The first page of a study is its overview (overview.py), or its fewest GPUs (fewest.py). These curves are on the pages
after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Transform, offset_copy

from harness.policy.types import UserError
from harness.rows import crossings, setting, summaries, tidy
from harness.rows.about import About, Panel
from harness.rows.estimate import Estimate
from plots import fewest, overview, page, style
from plots.caption import CORRECTED, caption, floats, sampling, seen
from plots.caption import definition as met

FLEET = "fleet"  # the layout of the fewest GPUs, with a column for each SLO
MOST = 12  # panels of a page
PANEL_IN, TITLE_IN = 0.55, 0.09  # height of a panel (twice that on a page of its own), and of more lines of titles
NAME, CALLED = 18, 9  # letters of a model set that fit beside a line of panels, alone and behind "models: "
MARKER = 2.9  # points
CONTROL_POINTS = 3.0  # between controls of one x
QUIET = "#9a9a9a"
RATE = "requests per second"
XLABEL = {"rate_scale": RATE, "rate_rps": RATE, "slo_scale": "SLO scale", "gpus": "GPUs", "models": "models"}
WORDS = {  # words for what a condition says about its setting, where an axis has less room than `setting.machine` takes
    "process": {"model": "one process each"},
    "sharing": {"turns": "processes in turns", "fluid": "shared as under MPS"},
    "plan": setting.PLANS,
}
USUAL = {  # words for the usual value of a field
    "process": "own processes",
    "sharing": "own sharing",
    "assign": "streams as released",
    "plan": setting.PLANS["held-out"],
    "placement": "own placements",
    "pool_bytes": "processes inside 0.90",
    "scaled": "constants as measured",
}
NARROW = 4  # columns of panels that fit one column of a page
Line = Mapping[int, Panel]  # keyed by column: the panels that stand side by side


class Drawn(NamedTuple):
    """Data that all panels share."""

    table: pa.Table
    facts: About
    frame: pd.DataFrame  # see `points`
    looks: Mapping[str, style.Look]


# ------------------------------------------------------------------ what is drawn


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return the table of the figure: a row for each (panel, system, x).

    Each row of a system repeats the numbers that the first page shows for the system.
    """
    frame = curves(table, facts)
    rows = fewest.answers(table, facts) if facts.layout == FLEET else overview.points(table, facts)
    return frame.merge(rows, how="left", on=["condition", "label"]) if len(rows) and len(frame) else frame


def curves(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return a row for each (panel, system, x): mean, low and high of each definition, and weights that were moved."""
    names = [*dict.fromkeys([*facts.definitions, "both"])]
    frame = summaries.summary(table, [*names, *tidy.WEIGHTS], by=["condition", "x", *summaries.POINT])
    panels = {panel["condition"]: panel for panel in facts.panels}
    parts = {key: crossings.of_panel(table, panel) for key, panel in panels.items()}

    @cache
    def of(key: str, label: str, definition: str) -> dict[float, Estimate]:
        return crossings.attained(parts[key], panels[key]["axis"], label, definition)

    rows = []
    for (key, label, x), group in frame.groupby(["condition", "label", "x"], observed=True, sort=True):
        panel, first = panels[str(key)], group.iloc[0]
        values = group.set_index("definition").reindex([*names, *tidy.WEIGHTS])
        row: dict[str, Any] = {name: panel[name] for name in ("condition", "axis", "trace", "tier", "models")}
        unit = panel["unit_rps"] if panel["axis"] == "rate_scale" else 1.0
        row |= {"label": str(label), "x": x, "shown_x": first["x"] * unit}
        row |= {name: first[name] for name in ("gpus", "rate_scale", "slo", "fidelity", "n", "infeasible")}
        row |= {f"{name}_{part}": values.loc[name, part] for name in names for part in ("mean", "low", "high")}
        for name in names:
            if (e := of(str(key), str(label), name).get(float(first["x"]))) is not None:
                row |= {f"{name}_{part}": end for part, end in floats(e).items()}
        rows.append(row | {name: values.loc[name, "mean"] for name in tidy.WEIGHTS})
    return pd.DataFrame(rows)


def together(panel: Panel, panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels that are drawn in one place: `panel` alone, or both halves of its real trace."""
    same = ("row", "column", "trace", "axis", "models", "gpus", "slo_scale", "slo", "own")
    halves = [other for other in panels if other.get("half") and all(other[key] == panel[key] for key in same)]
    return halves if panel.get("half") else [panel]


def arranged(panels: Sequence[Panel]) -> list[Line]:
    """Arrange panels in lines, with at most one panel for each column.

    The panels of a line have the same condition, models, GPUs and SLO. If two such panels have the same column, the
    second one is in another line. The two halves of a real trace are drawn as one panel, and only the first half is
    listed.
    """
    lines: dict[tuple[Any, ...], dict[int, Panel]] = {}
    for panel in (other for other in panels if together(other, panels)[0] == other):
        key = (panel["row"], panel["models"], panel["gpus"], panel["slo_scale"], panel["slo"])
        again = next(k for k in range(len(panels)) if panel["column"] not in lines.get((*key, k), {}))
        lines.setdefault((*key, again), {})[panel["column"]] = panel
    return list(lines.values())


# ------------------------------------------------------------------ the figure


def pages(table: pa.Table, facts: About, note: str = "") -> list[Figure]:
    """Draw the overview, then pages of curves with at most `MOST` panels each; call within `style.theme()`.

    Panels on which all systems are at 100 % are left out; the first page of curves names them. If the study is of the
    fewest GPUs, the first page shows the GPU counts instead of the overview. The second page then has the curves of all
    panels. Raises UserError if there is nothing to draw.
    """
    if facts.layout == FLEET:
        curved = draw(table, facts, note)  # raises where there is nothing
        return [fewest.draw(table, facts, note), curved]
    first = overview.draw(table, facts, note)
    drawn, gone = list[tuple[str, list[Panel]]](), list[str]()
    for definition in facts.definitions:
        same = {panel["condition"] for panel in facts.panels if overview.alike(table, panel, definition, facts.systems)}
        gone += [f"{met(definition)} of {condition}" for condition in same]
        telling = [
            panel for panel in facts.panels if not {half["condition"] for half in together(panel, facts.panels)} <= same
        ]
        drawn += [(definition, part) for part in _parted(telling)]
    if not drawn:
        return [draw(table, facts, note)]
    least = f"Attainment below {_floor(facts):g} % is not drawn." if _floor(facts) else ""
    whole = f"Left out, as all systems are at 100 %: {', '.join(sorted(gone))}." if gone else ""
    figures = [first] if first else []
    for k, (definition, panels) in enumerate(drawn):
        rows = table.filter(pc.is_in(table["condition"].cast(pa.string()), pa.array([p["condition"] for p in panels])))
        part = replace(facts, panels=tuple(panels), definitions=(definition,))
        text = " ".join(filter(None, [full_caption(table, facts, note), least, whole])) if k == 0 else ""
        if len(rows.filter(pc.is_null(rows["skipped"]))):
            figures.append(_drawn(rows, part, text, tall=True))
    return figures or [draw(table, facts, note)]


def _parted(panels: Sequence[Panel]) -> Iterator[list[Panel]]:
    """Yield the panels of each page of curves; all panels of a line are on the same page."""
    full, count = list[Panel](), 0
    for line in arranged(panels):
        if full and count + len(line) > MOST:
            yield full
            full, count = [], 0
        full += [other for panel in line.values() for other in together(panel, panels)]
        count += len(line)
    if full:
        yield full


def _floor(facts: About) -> float:
    """Return the lower end of the axes of attainment, in percent.

    It leaves room for ten times the misses that the level allows: the axis begins at 90 for a level of 99 %.
    """
    return max(0.0, round(100.0 - 1000.0 * (1.0 - float(facts.level)), 6))


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw all curves in one figure, above the full caption; call within `style.theme()`.

    The figure is as wide as a column or as a page. Raises UserError if there is nothing to draw.
    """
    if not len(curves(table, facts)):
        raise UserError("nothing to draw: every run of this study was skipped (why: bench list --matrix)")
    fleet = facts.layout == FLEET
    return _drawn(table, fewest.by_slo(facts) if fleet else facts, full_caption(table, facts, note), tall=fleet)


def _drawn(table: pa.Table, facts: About, text: str, *, tall: bool = False) -> Figure:
    frame = curves(table, facts)
    drawn = Drawn(table, facts, frame, _looks(frame, facts))
    lines, definitions = arranged(facts.panels), facts.definitions
    traces = sorted({panel["column"] for panel in facts.panels})
    columns = [(trace, definition) for trace in traces for definition in definitions]
    titles = [facts.titles[trace] if facts.titles else _title(trace, lines) for trace in traces]
    narrow = len(columns) <= NARROW and not tall
    figure, axes = page.panels(
        [(len(columns), PANEL_IN * (1 + tall))] * len(lines),
        wide_in=style.COLUMN_IN if narrow else style.PAGE_IN,
        left_in=0.5,
        right_in=0.05,
        head_in=0.2 + TITLE_IN * max(title.count("\n") for title in titles),
        above_in=0.1,
        text=text,
        handles=_handles(drawn),
        columns=4 if narrow else 6,
    )
    for i, line in enumerate(lines):
        for j, (trace, definition) in enumerate(columns):
            if trace in line:
                _panel(axes[i][j], line[trace], definition, drawn)
            else:
                axes[i][j].set_axis_off()
            if i == 0:
                axes[i][j].set_title(met(definition), pad=3, fontsize=6)
        _label(axes[i], line, page.LETTERS[i % len(page.LETTERS)], facts.panels[0])
    for k, title in enumerate(titles):
        page.shared(axes[0][k * len(definitions) : (k + 1) * len(definitions)], title, 6, above=True)
    return figure


def _looks(frame: pd.DataFrame, facts: About) -> dict[str, style.Look]:
    """Return the looks of systems and controls, in the order of the legend.

    A control that has no look of its own in `style.SYSTEMS` is drawn in grey.
    """
    series = [label for label in (*facts.systems, *facts.controls) if label in set(frame["label"])]
    looks = style.looks(series)
    others = {label for label in facts.controls if label not in style.SYSTEMS}
    return {label: looks[label]._replace(color=QUIET) if label in others else looks[label] for label in series}


def _title(column: int, lines: Sequence[Line]) -> str:
    """Return the title of a column: the trace of its first panel and, below it, each other trace in the column.

    Each of the other traces is preceded by the letters of its lines of panels. Parameters of traces are left out; the
    caption states them.
    """
    of: dict[str, list[str]] = {}
    for letter, line in zip(page.LETTERS, lines, strict=False):
        if column in line:
            name = line[column]["trace"].partition("+")[0]
            of.setdefault(f"{name} ({line[column]['tier']})", []).append(letter)
    first, *others = of
    return "\n".join([first, *(f"({', '.join(of[name])}) {name}" for name in others)])


def _label(axes: Sequence[Axes], line: Line, letter: str, usual: Panel) -> None:
    """Label a line of panels: its letter and models on the left, and the name of its x axis below."""
    panel, drawn = next(iter(line.values())), [axis for axis in axes if axis.axison]
    for axis in drawn[1:]:
        axis.tick_params(labelleft=False)
    drawn[0].set_ylabel(f"{_called(panel['models'])}\n({letter}) SLO met (%)", fontsize=6, labelpad=1.5)
    page.shared(drawn, _xlabel(panel, usual), 6)


def _called(models: str) -> str:
    """Return the short name of a model set, a label for the set's line of panels."""
    name = models.partition("+models=")[0]
    short = name if len(name) <= NAME else name[: NAME - 1] + "…"
    return f"models: {short}" if len(short) <= CALLED else short


def _xlabel(panel: Panel, usual: Panel) -> str:
    """Return the label of a panel's x axis.

    The label has the axis's quantity, the fields that the condition fixes, and the settings that differ from those of
    `usual`, the first panel.
    """
    facts = [f"{panel['count']} model{'s' * (panel['count'] > 1)}"] if panel["count"] else []
    facts += [f"{panel['rate_rps']:.3g} req/s each"] if panel["axis"] == "models" else []
    facts += [f"{panel['trace'].partition('+')[0]}, {panel['rate_rps']:.3g} req/s"] if panel["axis"] == "gpus" else []
    facts += [f"{panel['gpus']} GPU{'s' * (panel['gpus'] > 1)}"] if panel["gpus"] else []
    facts += [f"SLO scale {panel['slo_scale']:g}"] if panel["slo_scale"] else []
    facts += [f"SLO {panel['slo']}"] if panel["slo"] != usual["slo"] else []
    settings, others = panel["own"], usual["own"]
    facts += [_setting(key, settings.get(key)) for key in USUAL if settings.get(key) != others.get(key)]
    return f"{XLABEL[panel['axis']]} ({', '.join(facts)})"


def _setting(key: str, value: Any) -> str:
    """Describe in words the value that a condition sets for a field; None is the field's usual value."""
    words = WORDS[key].get(value) if key in WORDS else setting.machine({key: value})
    return words or USUAL[key]


def _handles(drawn: Drawn) -> list[Line2D]:
    """Return the entries of the legend; the name of a system that sets its own GPU count includes the count."""
    facts, frame = drawn.facts, drawn.frame
    took: dict[str, set[int]] = {}
    apart: set[str] = set()
    for panel in facts.panels:
        here = frame[frame["condition"] == panel["condition"]].groupby("label")["gpus"].unique()
        for label, counts in here.items():
            took.setdefault(str(label), set()).update(map(int, counts))
        apart |= summaries.own_gpus({str(label): set(counts) for label, counts in here.items()}, panel["gpus"])
    handles = []
    for label, look in drawn.looks.items():
        name = style.called(label)
        name = summaries.with_gpus(name, took[label]) if label in apart else name
        handles.append(style.handle(name, look, line=label not in facts.controls))
    return [*handles, page.dashed(f"crosses {100 * facts.level:g} %")]


# ------------------------------------------------------------------ a panel


def _panel(axis: Axes, panel: Panel, definition: str, drawn: Drawn) -> None:
    """Draw a panel: curves with their intervals and crossings; controls are markers without a line."""
    facts, shown = drawn.facts, together(panel, drawn.facts.panels)
    frame = drawn.frame[drawn.frame["condition"].isin([part["condition"] for part in shown])]
    axis.axhline(100 * facts.level, color="#808080", linewidth=0.5, zorder=1.5)
    places, floor = _places(frame, panel["axis"]), _floor(facts)
    axis.tick_params(labelsize=5.5, length=2, pad=1.5)
    page.ruler(axis.yaxis, floor, 100, share=0.06)
    axis.set_ylim(bottom=floor)
    xs, counts = [x for x, place in places.items() if x == place], panel["axis"] in {"gpus", "models"}
    page.ruler(axis.xaxis, xs[0], xs[-1], log=not counts or xs[-1] >= 8 * xs[0], whole=counts)
    _break(axis, {x: place for x, place in places.items() if x != place})
    for part in shown:
        _curves(axis, part, definition, drawn, places, thin=len(shown) > 1)


def _curves(
    axis: Axes, panel: Panel, definition: str, drawn: Drawn, places: Mapping[float, float], *, thin: bool
) -> None:
    """Draw a line for each system, with its interval and its crossing.

    With `thin`, the lines are thin; they then show one half of a real trace.
    """
    facts, frame = drawn.facts, drawn.frame[drawn.frame["condition"] == panel["condition"]]
    rows, shares = crossings.of_panel(drawn.table, panel), panel["axis"] in {"rate_scale", "rate_rps"}
    wide, size = (0.5, 0.6 * MARKER) if thin else (0.9, MARKER)
    usual: dict[str, Any] = {"shares": shares, "width": wide, "size": size, "least": _floor(facts)}
    for depth, (label, look) in enumerate(reversed(list(drawn.looks.items()))):
        curve, z = frame[(frame["label"] == label) & ~frame["infeasible"]].sort_values("x"), 3 + 0.1 * depth
        x = [places[at] for at in curve["shown_x"]]
        y, low, high = (100 * curve[f"{definition}_{part}"] for part in ("mean", "low", "high"))
        control = label in facts.controls
        band = (None, None) if control else (low, high)
        aside = _aside(axis, label, facts.controls, frame)
        page.curve(axis, x, y, look, *band, line=not control, z=z, transform=aside, **usual)
        c = crossings.crossing(rows, panel, label, definition, facts.level) if len(curve) and not control else None
        if c is not None and c.at.sign == "=":  # not beyond the axis
            at = c.at.mean
            axis.axvline(at, color=look.color, linewidth=0.8 * wide, linestyle=page.LEVEL, zorder=2)
            axis.plot(at, 0, transform=axis.get_xaxis_transform(), clip_on=False, zorder=z, **look.marks(size=MARKER))


def _aside(axis: Axes, label: str, controls: Sequence[str], frame: pd.DataFrame) -> Transform:
    """Return the transform for the marks of a series.

    It moves a control to the left or right of its x if another series has the same x, which could hide the control.
    """
    mine = frame["label"] == label
    if label not in controls or not frame.loc[mine, "shown_x"].isin(frame.loc[~mine, "shown_x"]).any():
        return axis.transData
    shift = CONTROL_POINTS * (controls.index(label) - (len(controls) - 1) / 2 or 1.0)
    return offset_copy(axis.transData, axis.get_figure(root=True), x=shift, units="points")


def _places(frame: pd.DataFrame, kind: str) -> dict[float, float]:
    """Return the place on the axis at which each x is drawn.

    The place is x itself, except on an axis of GPUs with a break. Some systems run on one GPU count only. If this count
    is above all counts of the other systems, it is drawn after the break.
    """
    several = frame.groupby("label")["shown_x"].transform("nunique") > 1
    last = float((frame[several] if several.any() else frame)["shown_x"].max())
    step = max(1.0, (last - float(frame["shown_x"].min())) / 4)
    xs = sorted(map(float, frame["shown_x"].unique()))
    beyond = [x for x in xs if x > last] if kind == "gpus" else []
    return {x: last + step * (1 + beyond.index(x)) if x in beyond else x for x in xs}


def _break(axis: Axes, beyond: Mapping[float, float]) -> None:
    """Draw a break near the end of an axis, and label the values that are drawn after it."""
    if not beyond:
        return
    end, (low, _) = max(axis.get_xticks()), axis.get_xlim()
    axis.set_xlim(low, max(beyond.values()) + (end - low) / 12)
    ticks = {x: f"{x:g}" for x in axis.get_xticks()} | {place: f"{x:g}" for x, place in beyond.items()}
    axis.set_xticks(list(ticks), list(ticks.values()))
    at, below = (end + min(beyond.values())) / 2, axis.get_xaxis_transform()
    white: dict[str, Any] = {"backgroundcolor": "white", "bbox": {"color": "white", "pad": 0.2}}
    axis.text(at, 0, "//", transform=below, ha="center", va="center", fontsize=5, zorder=4, **white)


# ------------------------------------------------------------------ the caption


def full_caption(table: pa.Table, facts: About, note: str = "") -> str:
    """Write the full caption for the CSV; it also says how rates were chosen."""
    halves = any(panel.get("half") for panel in facts.panels)
    sentences = [*seen(facts.panels), *sampling(table, facts), *_rates(facts.panels), *_bounds(facts)]
    sentences += ["Two thin lines: the halves of a real trace, case studies without interval."] * halves
    return caption(table, facts, "mean and 95 % interval", *sentences, CORRECTED, note=note)


def _rates(panels: Sequence[Panel]) -> Iterator[str]:
    """Yield a sentence for each axis other than the rate, with the fixed rates of the axis's panels."""
    given = [p for p in panels if p["rate_rps"] is not None and p["axis"] != "models"]
    for axis in dict.fromkeys(panel["axis"] for panel in given):
        rates = dict.fromkeys(f"{p['rate_rps']:.3g} ({p['models']}, {p['trace']})" for p in given if p["axis"] == axis)
        yield f"Over {XLABEL[axis]}: at {', '.join(rates)} req/s."


def _bounds(facts: About) -> Iterator[str]:
    """Yield a sentence on the controls: they are bounds, drawn as markers without a line."""
    names = facts.controls
    if names:
        varied = any(panel["rates_rps"] for panel in facts.panels)
        at = f"at the highest rate that {facts.systems[0]} holds and at the end" if varied else "at the ends"
        copy = " and the A/A copy" * any(name.endswith(" (A/A)") for name in names)
        knows = "; static:oracle is static:rate whose plan knows the window" * ("static:oracle" in names)
        yield f"Markers without a line: bounds{copy}, {at}{knows}."
