"""Weaver's figures 4 to 7: TPOT by rate, by offloaded share and by control, and the highest rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.rows import record, tidy
from harness.rows.about import About, Panel
from plots import page, style

WEAVER, MUXSERVE = style.SYSTEMS["weaver"], style.SYSTEMS["muxserve"]
LOOKS: Mapping[str, tuple[str, style.Look]] = {  # the name in other figures, and the look, of each series
    "Weaver": ("weaver", WEAVER),
    "dedicated": ("dedicated", style.SYSTEMS["dedicated"]),
    "MuxServe": ("muxserve:weaver", MUXSERVE),
    "MuxServe-Temporal": ("muxserve:temporal", style.Look(style.tints(MUXSERVE.color)[0], "v", style.LINES[1])),
    "hot model": ("weaver, hot model", style.Look(style.tints(WEAVER.color)[2], "o", style.LINES[0])),
    "cold model": ("weaver, cold model", style.Look(style.tints(WEAVER.color)[0], "h", style.LINES[1])),
}
SERIES: Mapping[str, str] = {  # keyed by system
    "weaver": "Weaver",
    "dedicated": "dedicated",
    "muxserve": "MuxServe",
    "temporal": "MuxServe-Temporal",
}
OFFLOADED = " % offloaded"  # ending of the names of systems that offload a fixed share
COLD_RPS = 1.0
HELD = 0.98  # least share of the requests offered that each seed must finish for a point to be drawn
PAPER: Mapping[str, Mapping[str, float]] = {  # 5.1: highest rates; 5.3: 175 ms, over 4.83, and 9.5 % less
    "highest": {"dedicated": 15.0, "Weaver": 22.0},
    "control": {"CPU": 175.0, "GPU": 175.0 / 4.83, "GPU, split": 175.0 / 4.83 * (1 - 0.095)},
}
TITLES: Mapping[str, tuple[str, str, str]] = {  # panel: title, x, y
    "hot": ("hot model (fig. 4)", "requests/s of the hot model", "TPOT (ms)"),
    "cold": ("cold model (fig. 4)", "requests/s of the hot model", "TPOT (ms)"),
    "muxserve": ("hot model (fig. 5a)", "requests/s of the hot model", "TPOT (ms)"),
    "share": ("15 requests/s (fig. 5b)", "offloaded (%)", "TPOT (ms)"),
    "highest": ("highest rate (figs. 4, 6)", "requests/s finished", ""),
    "control": ("control, on L40S (fig. 7a)", "TPOT (ms)", ""),
}
CAPTION = (
    "Simulated: two llama-3.1-8b, lengths of Azure-Conv, cold model at 1 request/s, four A100-40G (the last panel: "
    "L40S), vLLM 0.6; mean of {n} seeds; lines end where requests pile up. Numbers beside bars are ours. "
    "Co-running is unmeasured: MuxServe's decodes have half of the SMs each."
)


def draw(points: pd.DataFrame) -> Figure:
    """Draw the six panels; call within `style.theme()`."""
    handles: list[Line2D | Patch] = [style.handle(name, look) for name, look in LOOKS.values()]
    handles.append(Patch(color="#404040", alpha=0.2, linewidth=0, label="least to most of the seeds"))
    handles.append(page.mark("the paper's number", ("black", "x")))
    figure, lines = page.panels(
        [(3, 1.15), (3, 1.15)],
        left_in=0.4,
        beside_in=0.8,
        right_in=0.12,
        handles=handles,
        text=CAPTION.format(n=points["seed"].nunique()),
    )
    panels = zip((axis for line in lines for axis in line), page.LETTERS, TITLES.items(), strict=False)
    for axis, letter, (panel, (title, x, y)) in panels:
        rows = points[points["panel"] == panel]
        _bars(axis, rows, PAPER[panel]) if panel in PAPER else _lines(axis, rows, 100.0 if panel == "share" else 1.0)
        page.named(axis, f"({letter}) {title}", x, y)
    return figure


def _named(series: str) -> str:
    name, comma, rest = series.partition(", ")
    return LOOKS.get(name, (name, WEAVER))[0] + comma + rest


def _lines(axis: Axes, points: pd.DataFrame, scale: float) -> None:
    """Draw the mean of each series as a line, on a band from its least to its greatest value."""
    for name, rows in points.groupby("series", sort=False):
        by = rows.groupby("x")["value"]
        page.curve(axis, scale * by.mean().index, by.mean(), LOOKS[str(name)][1], by.min(), by.max(), size=4)
    page.ruler(axis.xaxis, 0, scale * points["x"].max())
    page.ruler(axis.yaxis, 0, points["value"].max())


def _bars(axis: Axes, points: pd.DataFrame, paper: Mapping[str, float]) -> None:
    """Draw a bar with its number for each series, from the top down, and mark the paper's number."""
    means = points.groupby("series", sort=False)["value"].mean()
    names = [_named(str(name)) for name in means.index]
    page.rows(axis, ["\n".join(name.split(", ")) for name in names], points=5.5)
    colors = [LOOKS.get(str(name).split(",")[0], ("", WEAVER))[1].color for name in means.index]
    stated = [paper.get(str(name), -1.0) for name in means.index]
    numbers = [f"{x:.3g}" for x in means]
    page.bars(axis, list(zip(means, colors, numbers, stated, strict=True)), max(means.max(), *stated))
    for k, x in enumerate(stated):
        axis.plot([x], [k], "x", color="black", markersize=4)  # the paper may have no number: -1 is outside the axis


def points(table: pd.DataFrame, about: About) -> pd.DataFrame:
    """Return the table of the figures: panel, series, x, seed and value.

    A line ends at the load at which the model's requests pile up, because latencies beyond it depend on the run's
    length.
    """

    def of(panel: Panel, system: str, measure: str, model: str) -> pd.DataFrame:
        rows: pd.DataFrame = table[
            (table["condition"] == panel["condition"])
            & (table["label"] == system)
            & (table["definition"] == measure)
            & (table["model"] == model)
        ]
        return rows[["seed", "value"]].sort_values("seed")

    parts = []
    for panel in about.panels:
        for name, series, system, x, measure, model in _shown(panel, about):
            if name in {"hot", "cold", "muxserve"} and of(panel, system, "ended", "hot")["value"].min() < HELD:
                continue  # beyond the knee, latencies depend on the run's length
            parts.append(of(panel, system, measure, model).assign(panel=name, series=series, x=x))
    every: pd.DataFrame = pd.concat(parts)[["panel", "series", "x", "seed", "value"]]
    return every


Shown = tuple[str, str, str, float, str, str]  # panel, series, system, x, measure and model


def _shown(panel: Panel, about: About) -> Iterator[Shown]:
    """Yield the values that the figures show for a condition: (panel, series, system, x, measure, model) of each."""
    rps = panel["unit_rps"] - COLD_RPS
    match panel["name"]:
        case "figures 4 and 5a":
            for name in ("weaver", "dedicated"):
                yield from ((model, SERIES[name], name, rps, "tpot_ms", model) for model in ("hot", "cold"))
            shared = ("weaver", "muxserve", "temporal")
            yield from (("muxserve", SERIES[name], name, rps, "tpot_ms", "hot") for name in shared)
        case "15 req/s":
            for name in (name for name in about.systems if name.endswith(OFFLOADED)):
                share = float(name.removesuffix(OFFLOADED)) / 100.0
                yield from (("share", f"{model} model", name, share, "tpot_ms", model) for model in ("hot", "cold"))
        case "30 req/s":
            systems = ("dedicated", "weaver", "muxserve", "temporal")
            yield from (("highest", SERIES[name], name, 0.0, "done_rps", "hot") for name in systems)
        case "long outputs":
            for name in ("weaver", "muxserve"):
                yield "highest", f"{SERIES[name]}, long outputs", name, 0.0, "done_rps", "hot"
        case "L40S, 2 req/s":
            for series, name in (("CPU", "CPU control"), ("GPU", "unsplit"), ("GPU, split", "weaver")):
                yield "control", series, name, 0.0, "tpot_ms", "hot"


def draws(folder: Path) -> bool:
    """Tell whether a folder holds Weaver's study, run with --full, which has all that the figures show."""
    if not (folder / record.SWEEP).is_file() or record.footer(folder / record.SWEEP).get("study") != "weaver":
        return False
    about = About.read(folder / record.SWEEP)
    shown = {name for panel in about.panels for name, *_ in _shown(panel, about)}
    return shown == set(TITLES) and {"weaver", "dedicated", "muxserve", "temporal"} <= set(about.systems)


def render(folder: Path, stem: Path, command: str, note: str = "") -> list[Path]:  # noqa: ARG001 - its caption is its own
    """Draw the study in a folder to `stem`.pdf, .png and .csv; return their paths. Raises UserError."""
    path = folder / record.SWEEP
    shown = points(tidy.stored(path).to_pandas(), About.read(path))
    with style.theme():
        return style.save(draw(shown), stem, shown, command)
