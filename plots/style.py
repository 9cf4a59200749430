"""One look for every figure: a system keeps its colour and marker, equal points give equal bytes."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import matplotlib as mpl
import pandas as pd
import pyarrow as pa
import seaborn as sns
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

from harness.policy import mix
from harness.rows import setting as words
from harness.rows import summaries, vetted
from harness.rows.checked import note
from harness.rows.crossings import MARK
from harness.rows.ranking import STANDINGS, Standing, verdict_text
from harness.rows.record import write_bytes
from plots import form, hover

T = TypeVar("T")
COLUMN_IN = 3.4  # one column of a two-column page, inches
PAGE_IN = 7.0  # both


Line = Literal["-"] | tuple[float, tuple[float, ...]]


class Look(NamedTuple):
    """Look of a system, distinct by colour, and in greyscale by marker and dash."""

    color: str
    marker: str
    line: Line

    def marks(self, *, hollow: bool = False, size: float = 4.0) -> dict[str, Any]:
        """Return keywords that draw the markers, of a size in points. Markers of bounds are hollow."""
        face, edge = ("white", self.color) if hollow else (self.color, "white")
        return {
            "marker": self.marker,
            "color": self.color,
            "markerfacecolor": face,
            "markeredgecolor": edge,
            "markeredgewidth": 0.8 if hollow else 0.3,
            "markersize": size * (1.4 if self.marker == "*" else 1.0),
        }


# seaborn's "colorblind" palette (after Okabe and Ito); its pink and yellow vanish in print and are left to the last
BLUE, ORANGE, GREEN, RED, PURPLE, BROWN, PINK, GREY, YELLOW, SKY = sns.color_palette("colorblind").as_hex()
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "*", "d", "p", "o", "h")  # all filled: hollow means a bound
_SOLID: Line = "-"
_DASHED: Line = (0.0, (4.0, 1.5))
_LONG: Line = (0.0, (8.0, 1.2))
_SHORT: Line = (0.0, (1.8, 1.0))
_DOTTED: Line = (0.0, (1.0, 1.2))
_MIXED: Line = (0.0, (5.0, 1.2, 1.0, 1.2))

LINES = (_SOLID, _DASHED, _SHORT, _LONG, _MIXED, _DOTTED)

SYSTEMS: Mapping[str, Look] = {
    "prism": Look(BLUE, "o", _SOLID),
    "muxserve": Look(ORANGE, "s", _LONG),
    "qlm": Look(GREEN, "^", _SHORT),
    "static": Look(RED, "v", _DASHED),
    "elastic": Look("#8c1d5a", "h", _MIXED),
    "serverlessllm": Look(BROWN, "P", _SOLID),
    "aegaeon": Look(PURPLE, "D", _SOLID),
    "weaver": Look(SKY, "X", _SOLID),
    "pdmux": Look("#7a5195", ">", _MIXED),
    "chunked": Look("#8a8d00", "p", _MIXED),
    "disaggregated": Look("#003f5c", "<", _MIXED),
    "dedicated": Look("#707070", "d", _DASHED),  # controls are grey: they are no contestants
    "unshared": Look("#202020", "*", _DOTTED),
}
_SPARE = ("#2f4b7c", "#a05195", "#d45087", "#f95d6a", "#5b3a1d", "#3f7f93", "#7f8c1f")


def tints(color: str) -> list[str]:
    """Return three colours of the hue of `color` that differ from it and from each other by lightness.

    Colour-blind readers can therefore distinguish them, also in greyscale. All are dark enough to be seen on white.
    """
    red, green, blue = to_rgb(color)
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    mixed = ((0.36, 0), (0.3, 1), (0.66, 0))  # share of black 0, white 1
    if light < 0.21:
        mixed = ((0.2, 1), (0.38, 1), (0.57, 1))
    elif light > 0.55:
        mixed = ((0.39, 0), (0.2, 0), (0.66, 0))
    return [to_hex((red + w * (end - red), green + w * (end - green), blue + w * (end - blue))) for w, end in mixed]


def _tinted(system: str, tint: int, marker: str, line: Line) -> Look:
    return Look(tints(SYSTEMS[system].color)[tint], marker, line)


PRESETS: Mapping[str, Look] = {  # variants that studies show beside a system, with one look in every figure
    "prism:osdi26": _tinted("prism", 0, "X", _DASHED),
    "prism_released": _tinted("prism", 1, "p", _DOTTED),
    "muxserve:plusplus": _tinted("muxserve", 0, "s", _SOLID),
    "muxserve:plusplus+quotas=none": _tinted("muxserve", 1, "d", _SHORT),
    "muxserve+quotas=none": _tinted("muxserve", 1, "d", _SHORT),
    "static:equal": _tinted("static", 1, "P", _LONG),
    "static:rate": _tinted("static", 2, "D", _SHORT),
    "static:replicas": _tinted("static", 0, "s", _DASHED),
    "elastic:replicas": _tinted("elastic", 1, "p", _LONG),
    "alpaserve": Look("#006d5b", "^", _SOLID),
    "aegaeon:prefill-first": _tinted("aegaeon", 2, "v", _SHORT),
    "aegaeon:decode-first": _tinted("aegaeon", 1, "^", _MIXED),
    "serverlessllm_released": _tinted("serverlessllm", 0, "P", _DASHED),
    "serverlessllm_released:plus": _tinted("serverlessllm", 2, "X", _SHORT),
    "pdmux:windserve": _tinted("pdmux", 2, "^", _DOTTED),
    "pdmux:sglang": _tinted("pdmux", 1, "v", _LONG),
    "pdmux:sglang-h200": _tinted("pdmux", 0, "D", _DASHED),
}


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """Return the look of each label; no two looks are alike.

    A label in `PRESETS` or `SYSTEMS` has its look there. Other labels (`prism:v1`, `prism+placement=fixed`, `prism
    (A/A)`) are variants of a system. The first variant has the system's look if no other label has taken that look. The
    others have tints of the system's colour, then spare colours, with markers and dashes of their own. A hash of the
    label decides which.
    """
    known = {**PRESETS, **SYSTEMS}
    by_label: dict[str, Look] = {}
    kin: dict[str, list[Look]] = {}  # keyed by system

    def order(label: str) -> tuple[bool, bool, bool, str]:
        return label not in known, system_of(label) not in SYSTEMS, label.endswith(" (A/A)"), label

    for label in sorted(set(labels), key=order):
        system, start = system_of(label), zlib.crc32(label.encode())
        colors = [look.color for look in by_label.values()]
        marker = _rest(MARKERS, (look.marker for look in by_label.values()), start)[0]
        if label in known and known[label].color not in colors:
            look = known[label]
        elif system not in kin:
            look = SYSTEMS.get(system) or Look(_rest(_SPARE, colors, start)[0], marker, _SOLID)
        else:
            base = SYSTEMS.get(system, kin[system][0])
            tinted = [*_rest(tints(base.color), (), start), *_rest(_SPARE, (), start)]
            look = Look(_rest(tinted, colors, 0)[0], marker, _rest(LINES, (x.line for x in kin[system]), 0)[0])
        by_label[label] = look
        kin.setdefault(system, []).append(look)
    return by_label


def called(label: str) -> str:
    """Return the name of a system in figures: `muxserve:plusplus+quotas=none` is "muxserve++ without quotas".

    A name that --rename gives replaces it. `MARK` is appended if the system meets no SLO of some model.
    """
    mark = MARK * (label.partition(" (")[0] in form.ASKED.get().unserved)
    if (asked := form.called(label)) is not None:
        return asked + mark
    name = label.replace(":plusplus", "++").replace("+quotas=none", " without quotas")
    return re.sub(r"\+(?=\w+=)", " ", name) + mark


def system_of(label: str) -> str:
    """Return the system of a label: the label without preset, fields and the part in brackets."""
    return re.split(r"[:+]| \(", label)[0]


def _rest(pool: Sequence[T], used: Iterable[T], start: int) -> list[T]:
    """Return the pool rotated to begin at `start`, with its members in `used` moved to the end."""
    at = start % len(pool)
    taken = set(used)
    return sorted([*pool[at:], *pool[:at]], key=lambda x: x in taken)


@contextlib.contextmanager
def theme() -> Iterator[None]:
    """Apply the style of the figures within the block, whatever matplotlib's other settings are.

    Type is small, for one column, and fonts are embedded.
    """
    ours: dict[str, Any] = {
        "font.family": "DejaVu Sans",  # shipped with matplotlib, so the same everywhere
        "font.size": 7,
        "axes.labelsize": 7,
        "axes.titlesize": 7.5,
        "legend.fontsize": 6,
        "legend.frameon": False,
        "legend.columnspacing": 1.2,
        "legend.labelspacing": 0.3,
        "axes.linewidth": 0.6,
        "lines.linewidth": 1.1,
        "lines.markersize": 4.0,
        "axes.grid": True,
        "grid.linewidth": 0.4,
        "grid.color": "#e4e4e4",
        "pdf.fonttype": 42,  # TrueType, as conferences ask; type 3 is refused
        "savefig.dpi": 300,
        "axes.unicode_minus": False,
        "text.parse_math": False,  # a name may hold dollar signs
    }
    ticks = {"labelsize": 6.5, "major.width": 0.6, "major.size": 2.5, "major.pad": 2}
    ours |= {f"{axis}tick.{key}": value for axis in "xy" for key, value in ticks.items()}
    rc: Any = dict(sns.plotting_context("paper")) | dict(sns.axes_style("ticks")) | ours
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(rc)
        if (file := form.ASKED.get().style) is not None:
            theirs: Any = form.style_of(file)
            mpl.rcParams.update(theirs)
        yield


TAILS = "Simulated tails are optimistic: steps vary by their noise alone, without a server's rare stalls."


def unchecked(runs: pd.DataFrame) -> str:
    """Return a sentence on a simulated GPU and host that no measured run checks; "" if there is none."""
    simulated = runs[runs["fidelity"] == "simulated"] if "host" in runs else runs[:0]
    pairs = zip(simulated["gpu"], simulated["host"], strict=True)
    return next((sentence for gpu, host in pairs if (sentence := note(gpu, host))), "")


class Fill(NamedTuple):
    """Fill of a cell, distinct by colour, and in greyscale by lightness and hatch."""

    color: str
    hatch: str


FILLS: Mapping[str, Fill] = {
    "ahead": Fill("#9ecae9", ""),
    "ahead, by less than 25 %": Fill("#bfdcee", ""),
    "equal within 25 %": Fill("#f2f2f2", ""),
    "behind, by less than 25 %": Fill("#fae0cc", "//"),
    "behind": Fill("#f4b183", "////"),
    "turns": Fill("#e3d4ec", "xx"),
    "not decided": Fill("#ffffff", ".."),
    "one case": Fill("#ffffff", ""),
    "no room": Fill("#e3e3e3", ""),
}


def verdict(standing: Standing) -> str:
    """Return the text of a verdict.

    Differences in points are in brackets, so that their signs are not mistaken for the sign of the verdict.
    """
    sign, blank, rest = verdict_text(standing, between=", ").partition(" ")
    return f"{sign}  ({rest})" if rest.endswith("points") else sign + blank + rest


def fills(shown: Collection[str], first: str) -> list[Patch]:
    """Return the legend's entries for the verdicts in `shown`, worded for the system `first`.

    A verdict without a sign has no entry.
    """
    return [
        Patch(facecolor=fill.color, edgecolor="#c4c4c4", linewidth=0.4, label=signed(says, first))
        for says, fill in FILLS.items()
        if says in shown and STANDINGS[says][0]
    ]


def signed(says: str, first: str) -> str:
    """Return the sign of a verdict and what it means for the system `first`."""
    sign, text = STANDINGS[says]
    return f"{sign}  {first} {text}" if text.startswith(("ahead", "behind")) else f"{sign}  {text}".strip()


def legend(figure: Figure, handles: Sequence[Line2D | Patch], columns: int) -> float:
    """Put the legend on top of a figure, in as many columns as fit; returns its height in inches."""
    for handle in handles:  # a letter takes about 0.05 inches
        handle.set_label(textwrap.fill(str(handle.get_label()), int(figure.get_figwidth() / 0.054) - 6))
    for count in range(min(columns, len(handles)), 0, -1):
        made = figure.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.0), ncols=count, borderaxespad=0.1
        )
        figure.draw_without_rendering()
        box = made.get_window_extent()
        if box.width <= figure.bbox.width or count == 1:
            return float(box.height) / figure.dpi
        made.remove()
    return 0.0


def listed(runs: pd.DataFrame, column: str) -> str:
    """List the values of a column of runs; "" where no run has one."""
    return " and ".join(sorted(map(str, runs[column].dropna().unique()))) if column in runs else ""


def setting(runs: pd.DataFrame, spread: str, **others: str) -> str:
    """Describe the setting of runs: trace and tier, models, GPUs, machine, fidelity, SLO, seeds, planners' knowledge.

    `spread` says how the results of several seeds are drawn. `others` replace the runs' facts of the same names.
    """
    fit = listed(runs, "fit")
    facts = {
        "trace": f"{listed(runs, 'trace')} ({listed(runs, 'tier')}{f', fit {fit}' if fit else ''})",
        "models": f"models: {listed(runs, 'models')}",
        "gpus": mix.all_told(runs["gpus"].mode()[:1], sorted(runs["gpu"].dropna().unique()), " and "),
        "machine": listed(runs, "machine"),
        "fidelity": words.fidelities(sorted(runs["fidelity"].dropna().unique())),
        "unchecked": unchecked(runs),
        "slo": f"SLO {listed(runs, 'slo')}",
        "spread": spread,
        "plans": words.plans(runs["plan_origin"].dropna().unique()),
    }
    return " · ".join(filter(None, (facts | others).values())) + "."


def span(values: Iterable[float]) -> str:
    """Format the least and the most of the values."""
    every = sorted(values)
    return f"{every[0]:g}" if every[0] == every[-1] else f"{every[0]:g} to {every[-1]:g}"


def caption(runs: pd.DataFrame, seeds: Iterable[int], note: str = "", *, pooled: bool = False) -> str:
    """Write the setting of the runs, and the sentences on what could mislead a reader.

    `runs` has the columns of tidy.RUN_SCHEMA for all that is drawn. `seeds` has the number of runs at each point.
    Points are means with intervals; with `pooled` they are the values of all runs together.
    """
    count = span(seeds := list(seeds))
    spread = f"mean and 95 % interval of {count} seeds" if max(seeds) > 1 else "one run, no interval"
    if pooled:
        spread = f"{count} seeds together" if max(seeds) > 1 else "one run"
    sentences = [setting(runs, spread), invalid(runs), unserved(), unvetted(runs), note]
    sentences += [TAILS] if "simulated" in set(runs["fidelity"]) else []
    return " ".join(part for part in sentences if part)


def departs(runs: pd.DataFrame) -> str:
    """Name the systems that do not run as published, each with the difference."""
    pairs = runs.reindex(columns=["label", "departs"]).dropna().drop_duplicates().sort_values(["label", "departs"])
    return "".join(f"Not as published: {x.label} ({x.departs}). " for x in pairs.itertuples()).strip()


def degrees(runs: pd.DataFrame) -> str:
    """Name the systems that chose their own degrees of parallelism."""
    if "degrees" not in runs:
        return ""
    degrees = words.degrees(zip(runs["label"], runs["degrees"], strict=True))
    return f"{degrees[0].upper()}{degrees[1:]}." if degrees else ""


def unserved() -> str:
    """Return the sentence that explains `MARK` and names the systems that have it; "" if there are none."""
    labels = [f"{label} ({words})" for label, words in form.ASKED.get().unserved.items()]
    return f"{MARK} {', '.join(labels)}." if labels else ""


def invalid(runs: pd.DataFrame) -> str:
    """Name the systems with invalid runs on real servers, and why the first run is invalid."""
    pairs = runs.reindex(columns=["label", "invalid"]).dropna().drop_duplicates("label").sort_values("label")
    return " ".join(f"INVALID: {x.label} ({x.invalid})." for x in pairs.itertuples())


def unvetted(runs: pd.DataFrame) -> str:
    """Name the systems whose present file has not passed `bench check`, or was covered by it only in part."""
    return unvetted_of(dict(zip(runs["label"], runs["system"], strict=True))) if "system" in runs else ""


def unvetted_of(systems: Mapping[str, str]) -> str:
    """Name the labels of systems whose present file has not passed `bench check`, or was covered by it only in part."""
    says = {
        vetted.UNCHECKED: "Unchecked, as bench check has not passed on the file",
        vetted.IN_PART: "Checked in part, as no case of bench check reached all of the file",
    }
    by = {mark: sorted(label for label, name in systems.items() if vetted.mark(name) == mark) for mark in says}
    return " ".join(f"{says[mark]}: {', '.join(labels)}." for mark, labels in by.items() if labels)


def handle(label: str, look: Look, *, line: bool = True) -> Line2D:
    """Return a system's entry in a legend."""
    return Line2D([], [], linestyle=look.line if line else "", label=called(label), **look.marks())


def caps(table: pa.Table) -> str:
    """Name the engine limits that were reached in more than 1 % of a system's steps.

    The sentences also state the largest share of steps for each system.
    """
    bound = summaries.bound(table)
    sentences = []
    for cap in dict.fromkeys(b.cap for b in bound):
        most = ", ".join(f"{b.label} up to {100 * b.most:.3g} %" for b in bound if b.cap == cap)
        sentences.append(f"The engine's {cap} was reached in more than {100 * summaries.BINDS:g} % of steps: {most}.")
    return " ".join(sentences)


def save(
    pages: Figure | Sequence[Figure], stem: Path, points: pd.DataFrame, command: str, told: str = ""
) -> list[Path]:
    """Write `stem`.pdf, .png and .csv, and return their paths; equal points give equal bytes.

    `form.on` may choose other formats than .pdf and .png, but the .csv is always written. The .pdf has all pages; other
    formats have the first page. The .csv has the command that made it, the points, and `told`, the text that a reader
    of the points needs. Lines of the command and of the text begin with "#". Call within `theme()`. Raises UserError if
    the files cannot be written.
    """
    pages = pages if isinstance(pages, Sequence) else [pages]
    lines = "".join(f"# {line}\n" for line in textwrap.wrap(told, 160))
    csv = f"# {command}\n{points.to_csv(index=False, lineterminator=chr(10))}{lines}"
    files = {kind: DRAWN[kind](pages) for kind in form.ASKED.get().formats} | {"csv": csv.encode()}
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in files]
    for path, data in zip(paths, files.values(), strict=True):
        write_bytes(path, data)
    return paths


def _pdf(pages: Sequence[Figure]) -> bytes:
    out = io.BytesIO()
    with PdfPages(out, metadata={"Creator": None, "Producer": None, "CreationDate": None}) as file:
        for page in pages:
            file.savefig(page)
    return out.getvalue()


def _png(pages: Sequence[Figure]) -> bytes:
    drawn, out = io.BytesIO(), io.BytesIO()
    pages[0].savefig(drawn, format="png", metadata={"Software": None})
    with Image.open(drawn) as image:  # a palette takes a third of the bytes
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, "png", dpi=image.info["dpi"])
    return out.getvalue()


def _pgf(pages: Sequence[Figure]) -> bytes:
    out = io.BytesIO()
    with mpl.rc_context({"pgf.texsystem": form.latex() or form.LATEX[0], "pgf.rcfonts": False}):
        pages[0].savefig(out, format="pgf")
    return out.getvalue()


DRAWN: Mapping[str, Callable[[Sequence[Figure]], bytes]] = {
    "pdf": _pdf,
    "png": _png,
    "svg": lambda pages: hover.svg(pages[0]),
    "pgf": _pgf,
}
