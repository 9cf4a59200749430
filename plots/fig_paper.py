"""A paper's figure from its stored table alone: a line of panels a row and model set, a column a trace and definition.

python -m plots.fig_paper results/fig7/fig7-3f9c01ab plots/out/fig7
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
from matplotlib.transforms import offset_copy

from harness.policy.types import UserError
from harness.rows import tidy
from harness.rows.record import SWEEP
from plots import style

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from matplotlib.axes import Axes
    from matplotlib.transforms import Transform

LINE_IN = 0.84  # height of a line of panels, with what stands below it
TITLES_IN, TITLE_IN = 0.27, 0.09  # of the columns, below the legend; each more line
NAME, CALLED = 18, 9  # letters of a model set that fit beside a line of panels, alone and behind "models: "
Line = tuple[int, str, int | None]  # row, models, GPUs
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MARKER = 2.9  # points
CONTROL_POINTS = 3.0  # between controls of one x
QUIET = "#9a9a9a"
LABEL = 21  # letters of 6 points to an inch
TICK = 4  # letters of a tick
XLABEL = {"rate_scale": "requests per second", "slo_scale": "SLO scale", "gpus": "GPUs", "models": "models"}
WORDS = {  # of what a row says of its setting
    "process": {"model": "one process each", "own": "own processes"},
    "sharing": {"turns": "processes in turns", "fluid": "shared as under MPS", "own": "own sharing"},
    "assign": {"released": "streams as released", "shuffled": "streams shuffled"},
    "plan": tidy.PLANS,
}
USUAL = {  # of what another row says, and this one does not
    "process": "own processes",
    "sharing": "own sharing",
    "assign": "streams as released",
    "plan": tidy.PLANS["held-out"],
    "placement": "own placements",
    "pool_gib": "processes inside 0.90",
}
CAPTION = {style.COLUMN_IN: 100, style.PAGE_IN: 200}  # characters of a line of the caption
NARROW = 4  # columns of panels that fit one column of a page


def about(sweep: Path) -> dict[str, Any]:
    """Facts of a stored figure; UserError where there is none."""
    path = sweep / SWEEP
    if not path.is_file():
        raise UserError(f"{sweep}: no figure here ({SWEEP} is missing); bench reproduce makes one")
    return {key.decode(): json.loads(value) for key, value in (pq.read_metadata(path).metadata or {}).items()
            if not key.startswith((b"ARROW", b"pandas"))}  # fmt: skip


def draws(sweep: Path) -> bool:
    """Tell whether a folder holds a paper's figure, not a comparison."""
    return (sweep / SWEEP).is_file() and "figure" in about(sweep)


def points(table: pa.Table, facts: Mapping[str, Any]) -> pd.DataFrame:
    """Return what is drawn: one row a (panel, system, x), each definition's mean, low and high, and weights moved."""
    import pandas as pd

    names = [*facts["definitions"], "both"]
    frame = tidy.summary(table, [*names, *tidy.WEIGHTS], by=["panel", "x", *tidy.POINT])
    panels = {panel["panel"]: panel for panel in facts["panels"]}
    rows = []
    for (key, label, x), group in frame.groupby(["panel", "label", "x"], observed=True, sort=True):
        panel, first = panels[str(key)], group.iloc[0]
        values = group.set_index("definition")
        row: dict[str, Any] = {name: panel[name] for name in ("panel", "axis", "trace", "tier", "models")}
        row |= {"label": str(label), "x": x, "shown_x": first["x"] * _unit(panel)}
        row |= {name: first[name] for name in ("gpus", "rate_scale", "slo", "fidelity", "n", "infeasible")}
        for name in dict.fromkeys(names):
            row |= {f"{name}_{part}": values.loc[name, part] if name in values.index else np.nan
                    for part in ("mean", "low", "high")}  # fmt: skip
        row |= {name: values.loc[name, "mean"] if name in values.index else np.nan for name in tidy.WEIGHTS}
        rows.append(row)
    return pd.DataFrame(rows)


def _unit(panel: Mapping[str, Any]) -> float:
    return float(panel["unit_rps"]) if panel["axis"] == "rate_scale" else 1.0


def crossed(table: pa.Table, panel: Mapping[str, Any], label: str, definition: str, level: float) -> float | None:
    """The x at which a system crosses the level, as shown; None where it does not, or beyond the axis."""
    import pyarrow as pa
    import pyarrow.compute as pc

    own = table.filter(pc.equal(table["panel"].cast(pa.string()), panel["panel"]))
    c = tidy.crossed(own, panel["axis"], label, definition, level)
    return c.at.mean * _unit(panel) if c is not None and c.at.sign == "=" else None


def draw(table: pa.Table, facts: Mapping[str, Any], note: str = "") -> Figure:
    """Draw the figure, a column or a page wide; call within `style.theme()`. Raises UserError if nothing is there."""
    frame = points(table, facts)
    if not len(frame):
        raise UserError("nothing to draw: every run of this figure was skipped (bench list tells why)")
    panels: list[dict[str, Any]] = facts["panels"]
    lines = list(dict.fromkeys(map(_line, panels)))
    traces = sorted({panel["column"] for panel in panels})
    columns = [(trace, definition) for trace in traces for definition in facts["definitions"]]
    series = [label for label in (*facts["systems"], *facts["controls"]) if label in set(frame["label"])]
    found = style.looks(series)
    looks = {label: found[label] for label in series}
    others = [label for label in facts["controls"] if label in looks and label not in style.SYSTEMS]
    looks |= {label: looks[label]._replace(color=QUIET) for label in others}  # as grey as the known ones
    titles = facts.get("titles") or [_title([p for p in panels if p["column"] == trace], lines) for trace in traces]
    width = style.COLUMN_IN if len(columns) <= NARROW else style.PAGE_IN
    text = textwrap.fill(_caption(table, facts, frame, note), CAPTION[width])

    figure = Figure(figsize=(width, LINE_IN))
    top = TITLES_IN + TITLE_IN * max(title.count("\n") for title in titles)
    top += _legend(figure, frame, facts, looks, 4 if width == style.COLUMN_IN else 6)
    below = 0.1 + 0.078 * (1 + text.count("\n"))
    height = len(lines) * LINE_IN + top + 0.12 + below
    figure.set_size_inches(width, height)
    grid = figure.add_gridspec(len(lines), len(columns), left=0.47 / width, right=1 - 0.05 / width, hspace=0.5,
                               top=1 - top / height, bottom=(below + 0.24) / height, wspace=0.13)  # fmt: skip
    for i, line in enumerate(lines):
        axes = []
        for j, (trace, definition) in enumerate(columns):
            axis = figure.add_subplot(grid[i, j])
            axes.append(axis)
            panel = next((p for p in panels if (_line(p), p["column"]) == (line, trace)), None)
            if panel is None:
                axis.set_axis_off()
                continue
            _panel(axis, table, panel, frame[frame["panel"] == panel["panel"]], definition, looks, facts)
            if i == 0:
                axis.set_title(definition.upper(), pad=3, fontsize=6)
            if j:
                axis.tick_params(labelleft=False)
            else:
                called = f"{_called(line[1])}\n({LETTERS[i]}) SLO met (%)"
                axis.set_ylabel(called, fontsize=6, labelpad=1.5, linespacing=1.3)
        low = min(axis.get_ylim()[0] for axis in axes)
        for axis in axes:
            axis.set_ylim(low, 100 + 0.06 * (100 - low))
        box = axes[0].get_position(), axes[-1].get_position()
        panel = next(p for p in panels if _line(p) == line)
        label = _xlabel(panel, panels[0])
        space = width * (box[1].x1 - box[0].x0)
        figure.text((box[0].x0 + box[1].x1) / 2, box[0].y0 - 0.2 / height, label, ha="center", va="center",
                    fontsize=6 * min(1.0, LABEL * space / len(label)))  # fmt: skip
    for k, title in enumerate(titles):
        first, last = (figure.axes[k * len(facts["definitions"]) + j].get_position() for j in
                       (0, len(facts["definitions"]) - 1))  # fmt: skip
        longest = max(map(len, title.split("\n")))
        figure.text((first.x0 + last.x1) / 2, first.y1 + 0.15 / height, title, ha="center",
                    fontsize=6 * min(1.0, LABEL * width / len(titles) / longest))  # fmt: skip
    figure.text(0.01, 0.004, text, fontsize=4.6, color="#404040", va="bottom", linespacing=1.25)
    return figure


def _line(panel: Mapping[str, Any]) -> Line:
    """What the panels of a line have in common."""
    return panel["row"], panel["models"], panel["gpus"]


def _title(panels: Sequence[Mapping[str, Any]], lines: Sequence[Line]) -> str:
    """The trace of a column; where lines of it have another, that one with their letters below.

    Traces stand without their parameters, which the caption has.
    """
    of: dict[str, list[str]] = {}
    for p in panels:
        name = p["trace"].partition("+")[0]
        of.setdefault(f"{name} ({p['tier']})", []).append(LETTERS[lines.index(_line(p))])
    first, *others = of
    return "\n".join([first, *(f"({', '.join(of[name])}) {name}" for name in others)])


def _legend(figure: Figure, frame: pd.DataFrame, facts: Mapping[str, Any], looks: Mapping[str, style.Look],
            columns: int) -> float:  # fmt: skip
    """Put the legend on top; returns its height in inches."""
    took: dict[str, set[int]] = {}
    own: set[str] = set()
    for panel in facts["panels"]:
        here = frame[frame["panel"] == panel["panel"]].groupby("label")["gpus"].unique()
        for label, counts in here.items():
            took.setdefault(str(label), set()).update(map(int, counts))
        own |= tidy.own_gpus({str(label): set(counts) for label, counts in here.items()}, panel["gpus"])
    names = {label: tidy.with_gpus(_name(label), took[label]) if label in own else _name(label) for label in looks}
    handles = [Line2D([], [], linestyle="" if label in facts["controls"] else look.line, label=names[label],
                      **_marks(look)) for label, look in looks.items()]  # fmt: skip
    handles.append(Line2D([], [], color="#404040", linewidth=0.7, linestyle=(0, (3, 1.5)),
                          label=f"crosses {100 * facts['level']:g} %"))  # fmt: skip
    return style.legend(figure, handles, columns, fontsize=6, handlelength=2.0, columnspacing=0.9, labelspacing=0.25,
                        handletextpad=0.4)  # fmt: skip


def _name(label: str) -> str:
    return re.sub(r"\+(?=\w+=)", " ", label).replace(":plusplus", "++")


def _called(models: str) -> str:
    """How a line of panels is called: by its model set."""
    name = models.partition("+models=")[0]
    short = name if len(name) <= NAME else name[: NAME - 1] + "…"
    return f"models: {short}" if len(short) <= CALLED else short


def _marks(look: style.Look, *, hollow: bool = False) -> dict[str, Any]:
    marks = look.marks(hollow=hollow)
    return marks | {
        "markersize": MARKER * (1.4 if look.marker == "*" else 1.0),
        "markeredgewidth": 0.7 if hollow else 0.3,
    }


def _panel(axis: Axes, table: pa.Table, panel: Mapping[str, Any], frame: pd.DataFrame, definition: str,
           looks: Mapping[str, style.Look], facts: Mapping[str, Any]) -> None:  # fmt: skip
    level = facts["level"]
    axis.axhline(100 * level, color="#808080", linewidth=0.5, zorder=1.5)
    places = _places(frame, panel["axis"])
    for depth, (label, look) in enumerate(reversed(list(looks.items()))):
        own, z = frame[frame["label"] == label].sort_values("x"), 3 + 0.1 * depth
        x = np.array([places[one] for one in own["shown_x"]], np.float64)
        y, low, high = (100 * own[f"{definition}_{part}"].to_numpy(np.float64) for part in ("mean", "low", "high"))
        hollow = own["infeasible"].to_numpy(bool)
        if label not in facts["controls"]:
            sure = np.isfinite(low)
            axis.fill_between(x, low, high, where=sure, color=look.color, alpha=0.15, linewidth=0)
            axis.plot(x, y, color=look.color, linestyle=look.line, linewidth=0.9, zorder=z)
            at = crossed(table, panel, label, definition, level)
            if at is not None:
                axis.axvline(at, color=look.color, linewidth=0.7, linestyle=(0, (3, 1.5)), zorder=2)
                axis.plot(at, 0, transform=axis.get_xaxis_transform(), clip_on=False, zorder=z, **_marks(look))
        for which in (False, True):
            some = hollow == which
            axis.plot(x[some], y[some], linestyle="", zorder=z, clip_on=False, **_marks(look, hollow=which),
                      transform=_beside(axis, label, facts, frame))  # fmt: skip
    lowest = float(np.nanmin(frame[f"{definition}_mean"].to_numpy(np.float64), initial=1.0)) * 100
    axis.set_ylim(50.0 if lowest >= 55 else 0.0, 100)
    axis.spines[["top", "right"]].set_visible(False)
    axis.yaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 100]))
    axis.tick_params(labelsize=5.5, length=2, pad=1.5)
    _ticks(axis, [x for x, place in places.items() if x == place], panel["axis"])
    _break(axis, {x: place for x, place in places.items() if x != place})


def _beside(axis: Axes, label: str, facts: Mapping[str, Any], frame: pd.DataFrame) -> Transform:
    """Controls stand left and right of an x that they share with others, or one would hide the other."""
    controls = facts["controls"]
    mine = frame["label"] == label
    if label not in controls or not frame.loc[mine, "shown_x"].isin(frame.loc[~mine, "shown_x"]).any():
        return axis.transData
    shift = CONTROL_POINTS * (controls.index(label) - (len(controls) - 1) / 2 or 1.0)
    return offset_copy(axis.transData, axis.get_figure(root=True), x=shift, units="points")


def _places(frame: pd.DataFrame, kind: str) -> dict[float, float]:
    """Where each x stands on its axis: at itself, but GPUs that a system takes beyond those asked for after a break."""
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
    if kind in {"gpus", "models"}:
        space = (xs[-1] - xs[0]) / 20 or 1.0
        axis.set_xlim(xs[0] - space, xs[-1] + space)
        shown = [x for x in xs if (x - xs[0]) % 2 == 0] if kind == "gpus" else xs
        axis.xaxis.set_major_locator(FixedLocator(shown))
        axis.xaxis.set_minor_locator(NullLocator())
        return
    axis.set_xscale("log", base=2)
    axis.set_xlim(xs[0] / 1.2, xs[-1] * 1.2)
    octaves = [2.0**k for k in range(-12, 20) if xs[0] / 1.1 <= 2.0**k <= xs[-1] * 1.1]
    step = max(1, -(-len(octaves) // 4))
    begin = next((k for k, x in enumerate(octaves) if len(f"{x:g}") <= TICK), 0)  # longer labels meet their neighbours
    shown = octaves[begin::step] if kind == "rate_scale" else [xs[0], xs[len(xs) // 2], xs[-1]]
    axis.xaxis.set_major_locator(FixedLocator(shown))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _xlabel(panel: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Name the axis, what stands still, and in what the setting is not that of the figure's first panel."""
    facts = [f"{panel['count']} model{'s' * (panel['count'] > 1)}"] if panel["count"] else []
    facts += [f"{panel['rate_rps']:.3g} req/s each"] if panel["axis"] == "models" else []
    facts += [f"{panel['gpus']} GPU{'s' * (panel['gpus'] > 1)}"] if panel["gpus"] else []
    facts += [f"SLO scale {panel['slo_scale']:g}"] if panel["slo_scale"] else []
    own, others = panel.get("own", {}), usual.get("own", {})
    facts += [_setting(key, own.get(key)) for key in USUAL if own.get(key) != others.get(key)]
    return f"{XLABEL[panel['axis']]} ({', '.join(facts)})"


def _setting(key: str, said: Any) -> str:
    """What a row says of its setting, in words; None: it leaves it as usual."""
    if said is None:
        return USUAL[key]
    if key == "pool_gib":
        return f"{said:g} GiB a GPU for weights and KV"
    return WORDS[key][said] if key in WORDS else f"placed as {Path(said).stem}"


def _caption(table: pa.Table, facts: Mapping[str, Any], frame: pd.DataFrame, note: str) -> str:
    """The paper, the facts of all figures, what stands still in each row, and what a reader could be misled by."""
    runs = table.filter(table.column("skipped").is_null()).to_pandas()
    own = runs[~runs["label"].isin(facts["controls"])]
    first = facts["panels"][0].get("own", {})
    apart = {p["panel"] for p in facts["panels"] if p.get("own", {}) != first}  # their x label says so
    usual = own[~own["panel"].isin(apart)]
    fits = {key: " and ".join(sorted(x["fit"].dropna().unique())) for key, x in own.groupby("panel", observed=True)
            } if "fit" in own else {}  # fmt: skip

    def traced(panel: Mapping[str, Any]) -> str:
        fit = fits.get(panel["panel"])
        return f"{panel['trace']} ({panel['tier']}{f', fit {fit}' if fit else ''})"

    def each(values: Iterable[object]) -> str:
        return ", ".join(str(x) for x in dict.fromkeys(values))

    def span(values: Iterable[float]) -> str:
        every = sorted(values)
        low, high = every[0], every[-1]
        return f"{low:g}" if low == high else f"{low:g} to {high:g}"

    rules = [scale_base(str(slo)) for slo in own["slo"].unique()]
    seeds = int(frame["n"].max())
    told = [
        f"After {facts['paper']}.",
        " · ".join([
            each(map(traced, facts["panels"])),
            "models: " + each(panel["models"] for panel in facts["panels"]),
            f"{span(own['gpus'].unique())} x {each(own['gpu'].unique())}",
            *(usual["machine"].dropna().unique() if "machine" in own else ()),
            *filter(None, (each(own["fidelity"].unique()), style.unchecked(own))),
            f"SLO {span(scale for scale, _ in rules)} x {each(base for _, base in rules)}",
            f"mean and 95 % interval of {seeds} seeds" if seeds > 1 else "one run, no interval",
            *filter(None, (f"preliminary (--full: {facts['fuller']})" if facts.get("fuller") else "",)),
            tidy.plans(own["plan_origin"].unique()),
        ]) + ".",
        *seen(facts["panels"]),
        *_asked(facts, runs),
        *_rates(facts["panels"]),
        *_bounds(facts),
        "Hollow: the models do not fit, with some seed or all." if frame["infeasible"].any() else "",
        style.caps(table),
        style.departs(own),
        style.invalid(own),
        *facts["notes"],
        note,
        style.TAILS if "simulated" in set(own["fidelity"]) else "",
    ]  # fmt: skip
    return " ".join(part for part in told if part)


def scale_base(rule: str) -> tuple[float, str]:
    """An SLO rule's scale and base: seconds stand alone at scale 1."""
    scale, x, base = rule.partition("x")
    return (float(scale), base) if x and scale.replace(".", "").isdigit() else (1.0, rule)


def seen(panels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How much planners saw of each model, where it was not what is replayed."""
    found: dict[str, dict[str, None]] = {}
    for p in panels:
        if p.get("plan") == "held-out" and p["axis"] != "models":
            counts = " or ".join(" ".join(map(str, fold)) for fold in p["seen"])
            found.setdefault(f"{p['trace']}: {counts}", {})[p["models"]] = None
    if found:
        listed = "; ".join(f"{', '.join(sets)} on {counts}" for counts, sets in found.items())
        none = any(not all(fold) for p in panels for fold in p.get("seen", ()))
        prior = " Where planners saw 0 requests, a prior of one decides." * none
        yield (
            "A seed replays one half of a replayed trace, planners see the other; synthetic traces are planned from "
            f"another seed's draw. Requests that planners saw of each model, by popularity: {listed}.{prior}"
        )


def _asked(facts: Mapping[str, Any], runs: pd.DataFrame) -> Iterator[str]:
    """Where rates were given and others followed by bisection, and how many requests a point has at least."""
    for p in facts["panels"]:
        if p.get("rates_rps"):
            fixed = ", ".join(f"{rps:g}" for rps in p["rates_rps"])
            yield f"Rates: {fixed} req/s, then by bisection of each system's crossing."
            break
    counted = runs[(runs["over"] == "pooled") & (runs["definition"] == facts["definitions"][0])]
    points = counted.groupby(["panel", "label", "x"], observed=True)
    whole = points["n"].sum()[points["infeasible"].count() == 0]  # all seeds ran
    if len(whole):
        least = int(whole.min())
        yield f"At least {least:,} requests a point, over its seeds."


def _bounds(facts: Mapping[str, Any]) -> Iterator[str]:
    """What the markers without a line are."""
    names = [label for label in facts["controls"] if not label.endswith(" (A/A)")]
    knows = "; static:oracle is static:rate whose plan knows the window" * ("static:oracle" in names)
    found = any(p.get("rates_rps") for p in facts["panels"])
    at = f"at the highest rate that {facts['systems'][0]} holds and at the end" if found else "at the ends"
    yield f"Markers without a line: bounds and the A/A copy, {at}{knows}."


def _rates(panels: Sequence[Mapping[str, Any]]) -> list[str]:
    """At which rate the panels stand that do not vary it."""
    given = [p for p in panels if p["rate_rps"] is not None and p["axis"] != "models"]
    return [
        f"Over {XLABEL[axis]}: at "
        + ", ".join(f"{p['rate_rps']:.3g} ({p['models']}, {p['trace']})" for p in given if p["axis"] == axis)
        + " req/s."
        for axis in dict.fromkeys(p["axis"] for p in given)
    ]


def render(sweep: Path, stem: Path, command: str, note: str = "") -> list[Path]:
    """Draw the figure stored in folder `sweep` to `stem`.pdf, .png and .csv; returns their paths.

    Raises UserError where there is none or the disk refuses.
    """
    facts = about(sweep)
    table = pq.read_table(sweep / SWEEP)
    with style.theme():
        return style.save(draw(table, facts, note), stem, points(table, facts), command)


if __name__ == "__main__":
    render(Path(sys.argv[1]), Path(sys.argv[2]), "python -m plots.fig_paper " + " ".join(sys.argv[1:]))
