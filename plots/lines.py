"""Attainment over rates, SLO scales, GPUs or models: a line of panels a condition, a column a trace and definition.

A study's first page is what it found (overview.py); these curves are the pages behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
from matplotlib.transforms import offset_copy

from harness.policy.types import UserError
from harness.rows import crossings, setting, tidy
from harness.rows.about import About, Panel
from harness.rows.estimate import Estimate
from plots import form, overview, style
from plots.caption import CORRECTED, asked, caption, seen
from plots.caption import definition as met

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Transform

MOST = 12  # panels of a page
LINE_IN, PAGE_LINE_IN = 0.84, 1.5  # height of a line of panels with what stands below it, and on a page of its own
TITLES_IN, TITLE_IN = 0.27, 0.09  # of the columns, below the legend; each more line
NAME, CALLED = 18, 9  # letters of a model set that fit beside a line of panels, alone and behind "models: "
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MARKER = 2.9  # points
CONTROL_POINTS = 3.0  # between controls of one x
QUIET = "#9a9a9a"
CROSSES = (0, (3, 1.5))  # dashes where a level is crossed
LABEL = 21  # letters of 6 points to an inch
TICK = 4  # letters of a tick
RATE = "requests per second"
XLABEL = {"rate_scale": RATE, "rate_rps": RATE, "slo_scale": "SLO scale", "gpus": "GPUs", "models": "models"}
WORDS = {  # of what a condition says of its setting
    "process": {"model": "one process each", "own": "own processes"},
    "sharing": {"turns": "processes in turns", "fluid": "shared as under MPS", "own": "own sharing"},
    "assign": {
        "released": "streams as released",
        "shuffled": "streams shuffled",
        "square": "streams by a Latin square",
    },
    "plan": setting.PLANS,
}
USUAL = {  # of what another condition says, and this one does not
    "process": "own processes",
    "sharing": "own sharing",
    "assign": "streams as released",
    "plan": setting.PLANS["held-out"],
    "placement": "own placements",
    "pool_bytes": "processes inside 0.90",
    "scaled": "constants as measured",
}
CAPTION = {style.COLUMN_IN: 94, style.PAGE_IN: 192}  # characters of a line of the caption
NARROW = 4  # columns of panels that fit one column of a page
Line = Mapping[int, Panel]  # by column: the panels that stand side by side


class Drawn(NamedTuple):
    """Data that all panels share."""

    table: pa.Table
    facts: About
    frame: pd.DataFrame  # see `points`
    looks: Mapping[str, style.Look]


# ------------------------------------------------------------------ what is drawn


def points(table: pa.Table, facts: About) -> pd.DataFrame:
    """Return what is drawn: one row a (panel, system, x), with what the overview has of the panel's system."""
    frame, rows = curves(table, facts), overview.points(table, facts)
    return frame.merge(rows, how="left", on=["condition", "label"]) if len(rows) and len(frame) else frame


def curves(table: pa.Table, facts: About) -> pd.DataFrame:
    """One row a (panel, system, x): each definition's mean, low and high, and weights moved."""
    names = [*dict.fromkeys([*facts.definitions, "both"])]
    frame = tidy.summary(table, [*names, *tidy.WEIGHTS], by=["condition", "x", *tidy.POINT])
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
        row |= {"label": str(label), "x": x, "shown_x": first["x"] * _unit(panel)}
        row |= {name: first[name] for name in ("gpus", "rate_scale", "slo", "fidelity", "n", "infeasible")}
        row |= {f"{name}_{part}": values.loc[name, part] for name in names for part in ("mean", "low", "high")}
        for name in names:
            e = of(str(key), str(label), name).get(float(first["x"]))
            ends = {} if e is None else {"mean": e.mean, "low": e.low, "high": e.high}
            row |= {f"{name}_{part}": math.nan if end is None else end for part, end in ends.items()}
        rows.append(row | {name: values.loc[name, "mean"] for name in tidy.WEIGHTS})
    return pd.DataFrame(rows)


def _unit(panel: Panel) -> float:
    return float(panel["unit_rps"]) if panel["axis"] == "rate_scale" else 1.0


def crossed(rows: pa.Table, panel: Panel, label: str, definition: str, level: float) -> float | None:
    """Return the x at which a system crosses the level, as shown; None where it does not, or beyond the axis."""
    c = crossings.crossing(rows, panel, label, definition, level)
    return c.at.mean if c is not None and c.at.sign == "=" else None


def together(panel: Panel, panels: Sequence[Panel]) -> list[Panel]:
    """Return a panel, or both halves of its real trace, which are drawn in one."""
    same = ("row", "column", "trace", "axis", "models", "gpus", "slo_scale", "slo", "own")
    halves = [other for other in panels if other.get("half") and all(other[key] == panel[key] for key in same)]
    return halves if panel.get("half") else [panel]


def arranged(panels: Sequence[Panel]) -> list[Line]:
    """Panels by line; two of the same condition, models, GPUs and trace, which differ in other fields, share none.

    Of the halves of a real trace the first stands for both.
    """
    lines: dict[tuple[Any, ...], dict[int, Panel]] = {}
    for panel in (other for other in panels if together(other, panels)[0] == other):
        key = (panel["row"], panel["models"], panel["gpus"], panel["slo_scale"], panel["slo"])
        again = next(k for k in range(len(panels)) if panel["column"] not in lines.get((*key, k), {}))
        lines.setdefault((*key, again), {})[panel["column"]] = panel
    return list(lines.values())


# ------------------------------------------------------------------ the figure


def pages(table: pa.Table, facts: About, note: str = "") -> list[Figure]:
    """Draw what was found, and then the curves, `MOST` panels or fewer a page; call within `style.theme()`.

    Curves that are 100 % for everyone are left out, and named below the first of them. Raises UserError if nothing is
    there.
    """
    first = overview.draw(table, facts, note)
    kept, gone = list[tuple[str, list[Panel]]](), list[str]()
    for definition in facts.definitions:
        same = {panel["condition"] for panel in facts.panels
                if overview.alike(table, panel, definition, facts.systems)}  # fmt: skip
        gone += [f"{met(definition)} of {condition}" for condition in same]
        left = [panel for panel in facts.panels
                if not {half["condition"] for half in together(panel, facts.panels)} <= same]  # fmt: skip
        kept += [(definition, part) for part in _parted(left)]
    if not kept:
        return [draw(table, facts, note)]
    least = f"Attainment below {_floor(facts):g} % is not drawn." if _floor(facts) else ""
    whole = f"Left out, as all systems are at 100 %: {', '.join(sorted(gone))}." if gone else ""
    figures = [first] if first else []
    for k, (definition, panels) in enumerate(kept):
        rows = table.filter(pc.is_in(table["condition"].cast(pa.string()), pa.array([p["condition"] for p in panels])))
        part = replace(facts, panels=tuple(panels), definitions=(definition,))
        text = " ".join(filter(None, [told(table, facts, note), least, whole])) if k == 0 else ""
        if len(rows.filter(pc.is_null(rows["skipped"]))):
            figures.append(_drawn(rows, part, text, page=True))
    return figures or [draw(table, facts, note)]


def _parted(panels: Sequence[Panel]) -> Iterator[list[Panel]]:
    """Panels by page, lines whole."""
    page, count = list[Panel](), 0
    for line in arranged(panels):
        if page and count + len(line) > MOST:
            yield page
            page, count = [], 0
        page += [other for panel in line.values() for other in together(panel, panels)]
        count += len(line)
    if page:
        yield page


def _floor(facts: About) -> float:
    """Return the start of axes of attainment, in percent: ten times the misses that the level leaves, 90 for 99 %."""
    return max(0.0, round(100.0 - 1000.0 * (1.0 - float(facts.level)), 6))


def draw(table: pa.Table, facts: About, note: str = "") -> Figure:
    """Draw all curves on one page, a column or a page wide, under all that is told of them; within `style.theme()`.

    Raises UserError if nothing is there.
    """
    return _drawn(table, facts, told(table, facts, note)) if len(curves(table, facts)) else _nothing()


def _nothing() -> Figure:
    raise UserError("nothing to draw: every run of this study was skipped (why: bench list systems --all)")


def _drawn(table: pa.Table, facts: About, text: str, *, page: bool = False) -> Figure:
    frame = curves(table, facts)
    drawn = Drawn(table, facts, frame, _looks(frame, facts))
    lines, definitions = arranged(facts.panels), facts.definitions
    traces = sorted({panel["column"] for panel in facts.panels})
    columns = [(trace, definition) for trace in traces for definition in definitions]
    titles = [facts.titles[trace] if facts.titles else _title(trace, lines) for trace in traces]
    made_for = style.COLUMN_IN if len(columns) <= NARROW and not page else style.PAGE_IN
    width = form.width(made_for)
    tall = PAGE_LINE_IN if page else LINE_IN
    text, below = style.foot(text, CAPTION[made_for], 4.6)

    figure = Figure(figsize=(width, tall))
    top = TITLES_IN + TITLE_IN * max(title.count("\n") for title in titles)
    top += _legend(figure, drawn, 4 if made_for == style.COLUMN_IN else 6)
    below += 0.1
    height = len(lines) * tall + top + 0.12 + below
    figure.set_size_inches(width, height)
    grid = figure.add_gridspec(len(lines), len(columns), left=0.47 / width, right=1 - 0.05 / width, wspace=0.13,
                               top=1 - top / height, bottom=(below + 0.24) / height,
                               hspace=0.5 * LINE_IN / tall)  # fmt: skip
    for i, line in enumerate(lines):
        axes = [figure.add_subplot(grid[i, j]) for j in range(len(columns))]
        for j, (trace, definition) in enumerate(columns):
            if trace in line:
                _panel(axes[j], line[trace], definition, drawn)
            else:
                axes[j].set_axis_off()
            if i == 0:
                axes[j].set_title(met(definition), pad=3, fontsize=6)
            axes[j].tick_params(labelleft=not j)
        _label(axes, line, LETTERS[i % len(LETTERS)], facts.panels[0])
    for k, title in enumerate(titles):
        _write_title(figure, title, figure.axes[k * len(definitions) : (k + 1) * len(definitions)], len(titles))
    style.write_foot(figure, text, 4.6)
    return figure


def _looks(frame: pd.DataFrame, facts: About) -> dict[str, style.Look]:
    """Return the looks of systems and controls, in the order of the legend.

    Controls without a look of their own are as grey as the known ones.
    """
    series = [label for label in (*facts.systems, *facts.controls) if label in set(frame["label"])]
    looks = style.looks(series)
    others = {label for label in facts.controls if label not in style.SYSTEMS}
    return {label: looks[label]._replace(color=QUIET) if label in others else looks[label] for label in series}


def _title(column: int, lines: Sequence[Line]) -> str:
    """Return the title of a column: its trace, and below it each other trace with the letters of its lines.

    Traces stand without their parameters, which the caption has.
    """
    of: dict[str, list[str]] = {}
    for letter, line in zip(LETTERS, lines, strict=False):
        if column in line:
            name = line[column]["trace"].partition("+")[0]
            of.setdefault(f"{name} ({line[column]['tier']})", []).append(letter)
    first, *others = of
    return "\n".join([first, *(f"({', '.join(of[name])}) {name}" for name in others)])


def _write_title(figure: Figure, title: str, axes: Sequence[Axes], titles: int) -> None:
    """Write the title of a trace above its columns, smaller where it is long."""
    width, height = figure.get_size_inches()
    first, last = axes[0].get_position(), axes[-1].get_position()
    longest = max(map(len, title.split("\n")))
    figure.text((first.x0 + last.x1) / 2, first.y1 + 0.15 / height, title, ha="center",
                fontsize=6 * min(1.0, LABEL * width / titles / longest))  # fmt: skip


def _label(axes: Sequence[Axes], line: Line, letter: str, usual: Panel) -> None:
    """Give a line of panels one range of y, its letter and models at the left, and its axis' words below."""
    panel, figure = next(iter(line.values())), axes[0].get_figure(root=True)
    assert figure is not None
    low = min(axis.get_ylim()[0] for axis in axes if axis.axison)
    for axis in axes:
        axis.set_ylim(low, 100 + 0.06 * (100 - low))
    axes[0].set_ylabel(f"{_called(panel['models'])}\n({letter}) SLO met (%)", fontsize=6, labelpad=1.5, linespacing=1.3)
    width, height = figure.get_size_inches()
    first, last, label = axes[0].get_position(), axes[-1].get_position(), _xlabel(panel, usual)
    space = width * (last.x1 - first.x0)
    figure.text((first.x0 + last.x1) / 2, first.y0 - 0.2 / height, label, ha="center", va="center",
                fontsize=6 * min(1.0, LABEL * space / len(label)))  # fmt: skip


def _called(models: str) -> str:
    """Return the name of a line of panels: its model set."""
    name = models.partition("+models=")[0]
    short = name if len(name) <= NAME else name[: NAME - 1] + "…"
    return f"models: {short}" if len(short) <= CALLED else short


def _xlabel(panel: Panel, usual: Panel) -> str:
    """Name the axis, the fixed fields, and the differences from the setting of the first panel."""
    facts = [f"{panel['count']} model{'s' * (panel['count'] > 1)}"] if panel["count"] else []
    facts += [f"{panel['rate_rps']:.3g} req/s each"] if panel["axis"] == "models" else []
    facts += [f"{panel['gpus']} GPU{'s' * (panel['gpus'] > 1)}"] if panel["gpus"] else []
    facts += [f"SLO scale {panel['slo_scale']:g}"] if panel["slo_scale"] else []
    facts += [f"SLO {panel['slo']}"] if panel["slo"] != usual["slo"] else []
    settings, others = panel["own"], usual["own"]
    facts += [_setting(key, settings.get(key)) for key in USUAL if settings.get(key) != others.get(key)]
    return f"{XLABEL[panel['axis']]} ({', '.join(facts)})"


def _setting(key: str, value: Any) -> str:
    """Say in words what a condition sets for a field; None stands for the usual setting."""
    if value is None:
        return USUAL[key]
    if key == "pool_bytes":
        return f"{value / 2**30:.4g} GiB a GPU for weights and KV"
    if key == "scaled":
        return setting.scaled(value)
    return WORDS[key][value] if key in WORDS else f"placed as {Path(value).stem}"


def _legend(figure: Figure, drawn: Drawn, columns: int) -> float:
    """Put the legend on top; returns its height in inches."""
    facts, frame = drawn.facts, drawn.frame
    took: dict[str, set[int]] = {}
    apart: set[str] = set()
    for panel in facts.panels:
        here = frame[frame["condition"] == panel["condition"]].groupby("label")["gpus"].unique()
        for label, counts in here.items():
            took.setdefault(str(label), set()).update(map(int, counts))
        apart |= tidy.own_gpus({str(label): set(counts) for label, counts in here.items()}, panel["gpus"])
    handles = []
    for label, look in drawn.looks.items():
        name = style.called(label)
        name = tidy.with_gpus(name, took[label]) if label in apart else name
        handles.append(style.handle(name, look, line=label not in facts.controls, **_marks(look)))
    handles.append(Line2D([], [], color="#404040", linewidth=0.7, linestyle=CROSSES,
                          label=f"crosses {100 * facts.level:g} %"))  # fmt: skip
    return style.legend(figure, handles, columns, fontsize=6, handlelength=2.0, columnspacing=0.9, labelspacing=0.25,
                        handletextpad=0.4)  # fmt: skip


# ------------------------------------------------------------------ a panel


def _marks(look: style.Look, *, hollow: bool = False, thin: bool = False) -> dict[str, Any]:
    size = MARKER * (0.6 if thin else 1.0) * (1.4 if look.marker == "*" else 1.0)
    return look.marks(hollow=hollow) | {"markersize": size, "markeredgewidth": 0.7 if hollow else 0.3}


def _panel(axis: Axes, panel: Panel, definition: str, drawn: Drawn) -> None:
    """Curves with their intervals and crossings; controls are markers alone."""
    facts, shown = drawn.facts, together(panel, drawn.facts.panels)
    frame = drawn.frame[drawn.frame["condition"].isin([part["condition"] for part in shown])]
    axis.axhline(100 * facts.level, color="#808080", linewidth=0.5, zorder=1.5)
    places, floor = _places(frame, panel["axis"]), _floor(facts)
    for part in shown:
        _curves(axis, part, definition, drawn, places, thin=len(shown) > 1)
    axis.set_ylim(floor, 100)
    axis.spines[["top", "right"]].set_visible(False)
    axis.yaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 100] if floor < 50 else [90, 95, 100]))
    axis.tick_params(labelsize=5.5, length=2, pad=1.5)
    _ticks(axis, [x for x, place in places.items() if x == place], panel["axis"])
    _break(axis, {x: place for x, place in places.items() if x != place})


def _curves(
    axis: Axes, panel: Panel, definition: str, drawn: Drawn, places: Mapping[float, float], *, thin: bool
) -> None:
    """Draw a line for each system with its interval and its crossing; thin for one half of a real trace."""
    facts, frame = drawn.facts, drawn.frame[drawn.frame["condition"] == panel["condition"]]
    rows, wide = crossings.of_panel(drawn.table, panel), 0.5 if thin else 0.9
    for depth, (label, look) in enumerate(reversed(list(drawn.looks.items()))):
        curve, z = frame[frame["label"] == label].sort_values("x"), 3 + 0.1 * depth
        x = np.array([places[at] for at in curve["shown_x"]], np.float64)
        y, low, high = (100 * curve[f"{definition}_{part}"].to_numpy(np.float64) for part in ("mean", "low", "high"))
        hollow = curve["infeasible"].to_numpy(bool)
        if label not in facts.controls:
            sure = np.isfinite(low) & ~hollow
            axis.fill_between(x, low, high, where=sure, color=look.color, alpha=0.15, linewidth=0)
            axis.plot(x, np.where(hollow, np.nan, y), color=look.color, linestyle=look.line, linewidth=wide, zorder=z)
            at = crossed(rows, panel, label, definition, facts.level)
            if at is not None and not hollow.all():
                axis.axvline(at, color=look.color, linewidth=0.8 * wide, linestyle=CROSSES, zorder=2)
                axis.plot(at, 0, transform=axis.get_xaxis_transform(), clip_on=False, zorder=z, **_marks(look))
        y = np.where(hollow, _floor(facts), y)
        for which in (False, True):
            some = (hollow == which) & (y >= _floor(facts))
            axis.plot(x[some], y[some], linestyle="", zorder=z, clip_on=False, **_marks(look, hollow=which, thin=thin),
                      transform=_beside(axis, label, facts.controls, frame))  # fmt: skip


def _beside(axis: Axes, label: str, controls: Sequence[str], frame: pd.DataFrame) -> Transform:
    """Return the transform that moves a control aside where another series would hide it.

    Controls stand left and right of an x that they share with others.
    """
    mine = frame["label"] == label
    if label not in controls or not frame.loc[mine, "shown_x"].isin(frame.loc[~mine, "shown_x"]).any():
        return axis.transData
    shift = CONTROL_POINTS * (controls.index(label) - (len(controls) - 1) / 2 or 1.0)
    return offset_copy(axis.transData, axis.get_figure(root=True), x=shift, units="points")


def _places(frame: pd.DataFrame, kind: str) -> dict[float, float]:
    """Return the position of each x on its axis: x itself, but GPUs beyond those asked for stand after a break."""
    several = frame.groupby("label")["shown_x"].transform("nunique") > 1
    last = float((frame[several] if several.any() else frame)["shown_x"].max())
    step = max(1.0, (last - float(frame["shown_x"].min())) / 4)
    xs = sorted(map(float, frame["shown_x"].unique()))
    beyond = [x for x in xs if x > last] if kind == "gpus" else []
    return {x: last + step * (1 + beyond.index(x)) if x in beyond else x for x in xs}


def _break(axis: Axes, beyond: Mapping[float, float]) -> None:
    """Label what stands beyond the end of an axis, and break the axis before it."""
    if not beyond:
        return
    end, (low, _) = max(axis.get_xticks()), axis.get_xlim()
    axis.set_xlim(low, max(beyond.values()) + (end - low) / 12)
    ticks = {x: f"{x:g}" for x in axis.get_xticks()} | {place: f"{x:g}" for x, place in beyond.items()}
    axis.set_xticks(list(ticks), list(ticks.values()))
    axis.text((end + min(beyond.values())) / 2, 0, "//", transform=axis.get_xaxis_transform(), ha="center", va="center",
              fontsize=5, backgroundcolor="white", bbox={"color": "white", "pad": 0.2}, zorder=4)  # fmt: skip


def _ticks(axis: Axes, xs: Sequence[float], kind: str) -> None:
    """Four labels or so: GPUs in steps of 2; rates at powers of 2, scales at their own, on a logarithm."""
    axis.xaxis.set_minor_locator(NullLocator())
    if kind in {"gpus", "models"}:
        space = (xs[-1] - xs[0]) / 20 or 1.0
        axis.set_xlim(xs[0] - space, xs[-1] + space)
        shown = [x for x in xs if (x - xs[0]) % 2 == 0] if kind == "gpus" else xs
        axis.xaxis.set_major_locator(FixedLocator(shown))
        return
    axis.set_xscale("log", base=2)
    axis.set_xlim(xs[0] / 1.2, xs[-1] * 1.2)
    octaves = [2.0**k for k in range(-12, 20) if xs[0] / 1.1 <= 2.0**k <= xs[-1] * 1.1]
    step = max(1, -(-len(octaves) // 4))
    begin = next((k for k, x in enumerate(octaves) if len(f"{x:g}") <= TICK), 0)  # longer labels meet their neighbours
    shown = octaves[begin::step] if kind in crossings.RATED else [xs[0], xs[len(xs) // 2], xs[-1]]
    axis.xaxis.set_major_locator(FixedLocator(shown))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


# ------------------------------------------------------------------ the caption


def told(table: pa.Table, facts: About, note: str = "") -> str:
    """Write the full caption, with the choice of rates, which the CSV holds."""
    halves = any(panel.get("half") for panel in facts.panels)
    sentences = [*seen(facts.panels), *asked(table, facts), *_rates(facts.panels), *_bounds(facts)]
    sentences += ["Two thin lines: the halves of a real trace, case studies without interval."] * halves
    return caption(table, facts, "mean and 95 % interval", *sentences, CORRECTED, note=note)


def _rates(panels: Sequence[Panel]) -> Iterator[str]:
    """Yield the fixed rates of the panels that vary something else."""
    given = [p for p in panels if p["rate_rps"] is not None and p["axis"] != "models"]
    for axis in dict.fromkeys(panel["axis"] for panel in given):
        rates = (f"{p['rate_rps']:.3g} ({p['models']}, {p['trace']})" for p in given if p["axis"] == axis)
        yield f"Over {XLABEL[axis]}: at {', '.join(rates)} req/s."


def _bounds(facts: About) -> Iterator[str]:
    """Say which bounds the markers without a line show."""
    names = facts.controls
    if names:
        varied = any(panel["rates_rps"] for panel in facts.panels)
        at = f"at the highest rate that {facts.systems[0]} holds and at the end" if varied else "at the ends"
        copy = " and the A/A copy" * any(name.endswith(" (A/A)") for name in names)
        knows = "; static:oracle is static:rate whose plan knows the window" * ("static:oracle" in names)
        yield f"Markers without a line: bounds{copy}, {at}{knows}."
