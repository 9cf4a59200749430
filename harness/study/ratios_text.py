"""Ratios in words: a table of conditions, rows of Markdown, and one sentence that closes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.report.text_table import aligned
from harness.rows import ratios
from harness.study.conditions import START
from harness.study.ratios import Measured

KINDS: Mapping[str, str] = {"base": "", "cumulative": "+ ", "alone": "only "}


def lines(found: Measured) -> Iterator[str]:
    """What is printed: a row a condition, the rates and the ratios beside each other, and a sentence a ratio."""
    about = found.about
    what = f"{100 * about['level']:g} % {about['definition'].upper()} attainment at {about['slo']}"
    yield f"rates (req/s) that hold {what}, and their ratios: mean and 95 % interval of {about['seeds']} seeds"
    yield from aligned(cells(found))
    for change in about["changes"]:
        origin, slo = (f"{change[key]}, " if change[key] else "" for key in ("origin", "slo"))
        if change["source"]:
            yield f"{change['name']}: {origin}{slo}{change['source']}"
    yield from sentences(found)
    yield f"{about['runs']} runs; {legend()}"


def legend() -> str:
    """What the signs of the table mean."""
    return ", ".join(f"{ratios.SIGNS[key]} {words}" for key, words in ratios.MEANS.items())


def markdown(found: Measured) -> Iterator[str]:
    """The same table as rows of Markdown, and the sentences."""
    head, *rows = cells(found)
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""
    yield from sentences(found)


def cells(found: Measured) -> list[tuple[str, ...]]:
    """A head, then a row a condition: its name, where it comes from, the rates, the ratios."""
    about, bridge = found.about, found.about["study"] == "bridge"
    head = (
        "condition",
        *(("origin",) if bridge else ()),
        *(f"{name} req/s" for name in about["systems"]),
        *about["ratios"],
    )
    table = [head]
    for own in grouped(found).values():
        first = own[0]
        name = f"{KINDS.get(first['kind'], '')}{first['name']}"
        rates = [ratios.text(row, spread=False) for row in own if row["over"] is None]
        shown = [f"{ratios.SIGNS[row['verdict']]} {ratios.text(row)}" for row in own if row["over"] is not None]
        table.append((name, *((first["origin"],) if bridge else ()), *rates, *shown))
    return table


def grouped(found: Measured) -> dict[int, list[dict[str, Any]]]:
    """The rows of each condition."""
    by: dict[int, list[dict[str, Any]]] = {}
    for row in found.table.to_pylist():
        by.setdefault(row["condition"], []).append(row)
    return by


def sentences(found: Measured) -> Iterator[str]:
    """Where a claim of the paper holds; of regimes where the first system is ahead."""
    rows = [row for row in found.table.to_pylist() if row["over"] is not None]
    for label in found.about["ratios"]:
        own = [row for row in rows if f"{row['first']} / {row['over']}" == label]
        paper = next((row["paper"] for row in own if row["paper"] is not None), None)
        yield _ahead(label, own) if paper is None else _claimed(label, paper, own)


def _claimed(label: str, paper: float, own: Sequence[Mapping[str, Any]]) -> str:
    """Under which conditions a ratio is the paper's: beyond its interval, by its mean, or not excluded by it."""
    kinds: dict[str, list[str]] = {"beyond the interval": [], "by the mean": [], "not excluded by the interval": []}
    beyond, mean, covers = kinds.values()
    for row in (row for row in own if row["mean"] is not None and row["verdict"] != "open"):
        if row["low"] is not None and row["low"] >= paper:
            beyond.append(_name(row))
        elif row["mean"] >= paper:
            mean.append(_name(row))
        elif row["high"] is None or row["high"] >= paper:
            covers.append(_name(row))
    said = "; ".join(f"{words}: {', '.join(names)}" for words, names in kinds.items() if names)
    return f"{label}, {paper:g} in the paper, of {len(own)} conditions: " + (said or "under none") + "."


def _ahead(label: str, own: Sequence[Mapping[str, Any]]) -> str:
    """Where the first system is ahead, behind, or neither."""
    by = {word: [row["name"] for row in own if row["verdict"] == word] for word in ratios.MEANS}
    words = {"ahead": "ahead", "behind": "behind", "even": "no difference", "open": "undecided"}
    return f"{label}: " + "; ".join(f"{words[key]} under {_list(by[key])}" for key in words if by[key]) + "."


def _name(row: Mapping[str, Any]) -> str:
    return START if row["kind"] == "base" else f"{KINDS.get(row['kind'], '')}{row['name']}"


def _list(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
