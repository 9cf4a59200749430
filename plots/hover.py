"""A figure as SVG in which each mark has a text for pointers and screen readers: its system and its numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

SVG = "http://www.w3.org/2000/svg"
POINTS = 72.0  # an inch
FONTS = "'DejaVu Sans', Verdana, sans-serif"  # Verdana has the same widths
MOST = 4000  # marks that get words; the words of more would be most of the file


def svg(figure: Figure) -> bytes:
    """Return a figure as SVG whose marks show a text on hover; equal figures give equal bytes."""
    marked = dict(_marked(figure))
    out = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ET.fromstring(out.getvalue())
    height = float(figure.get_size_inches()[1]) * POINTS
    room = MOST
    for group in list(root.iter(f"{{{SVG}}}g")):
        known = marked.get(group.get("id", ""))
        if known is None:
            continue
        axes, artist, name = known
        for mark in list(group.iter(f"{{{SVG}}}use")) if isinstance(artist, Line2D) else [group]:
            if room and (words := _words(axes, artist, name, mark, height)):
                title = ET.Element(f"{{{SVG}}}title")
                title.text = words
                mark.insert(0, title)
                room -= 1
    for text in root.iter(f"{{{SVG}}}text"):
        text.set("style", re.sub(r"'DejaVu Sans'(, [^;]*)?", FONTS, text.get("style", "")))
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=False))


def _marked(figure: Figure) -> Iterator[tuple[str, tuple[Axes, Line2D | Rectangle, str]]]:
    """Give an id to each artist that draws data; yield (id, (axes, artist, name of the system))."""
    names = _names(figure)
    for i, axes in enumerate(figure.axes):
        rows = [text.get_text() for text in axes.get_yticklabels()]
        for j, artist in enumerate((*axes.lines, *axes.patches)):
            if isinstance(artist, Line2D):
                if artist.get_marker() in {"None", "none", "", " "} or artist.get_transform() != axes.transData:
                    continue
                name = names.get((to_hex(artist.get_color()), str(artist.get_marker())), "")
            elif isinstance(artist, Rectangle):
                at = round(artist.get_y() + artist.get_height() / 2)
                name = rows[at] if 0 <= at < len(rows) else ""
            else:
                continue
            artist.set_gid(f"mark-{i}-{j}")
            yield f"mark-{i}-{j}", (axes, artist, name)


def _names(figure: Figure) -> dict[tuple[str, str], str]:
    """Return the names in a figure's legends, keyed by colour and marker."""
    return {
        (to_hex(handle.get_color()), str(handle.get_marker())): text.get_text()
        for legend in figure.findobj(Legend)
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True)
        if isinstance(handle, Line2D)
    }


def _words(axes: Axes, artist: Line2D | Rectangle, name: str, mark: ET.Element, height: float) -> str:
    """Return the hover text of a mark: the system, and the mark's values on both axes."""
    title = axes.get_title(loc="left") or axes.get_title() or axes.get_ylabel()
    title = re.sub(r"^\([a-z]\) ", "", title)
    if isinstance(artist, Rectangle):
        return f"{name}: {title} {artist.get_width():.4g}" if name else ""
    scale = axes.get_figure(root=True).dpi / POINTS  # type: ignore[union-attr]
    place = np.array([float(mark.get("x", "nan")), height - float(mark.get("y", "nan"))]) * scale
    x, y = axes.transData.inverted().transform(place)
    across = axes.xaxis.get_major_formatter()(float(x)) or f"{x:.4g}"
    along = axes.get_xlabel() or "at"
    return f"{name or title}: {title + ' ' if name else ''}{y:.4g}, {along} {across}"
