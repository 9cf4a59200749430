"""Comparison of the stored tables of two trees of results by their numbers, not their bytes.

    python tests/equal_tables.py REF_DIR NEW_DIR [--only fig7,pdmux] [--rename ablate-prism=prism-ablations]

Tables of one study are taken together, wherever they lie below it. Rows are matched by what was run and measured, not
by names of panels, runs or folders. Equal are floats to 1e-9, words to the letter, undefined values to each other.
Left out are hashes, paths and seconds of computing. The exit status is 1 where something differs, lacks or is too much.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

RELATIVE = 1e-9
SHOWN = 12  # differences of a study that are printed

# Studies that are called otherwise in the new tree.
RENAMED = {"ablate-prism": "prism-ablations", "bridge-prism": "prism-bridge", "regimes-prism": "prism-regimes"}


class Kind(NamedTuple):
    """Tables of one form: the files that hold them, what a row is about, and what it says of that.

    Of columns that are not in both trees, those of `key` do not count, and those of `values` are a difference.
    """

    files: str
    key: tuple[str, ...]
    values: tuple[str, ...]
    selects: tuple[str, ...] = ()  # the new tree may have rows with other values of these


CLIPPED = {"crossing", "rate", "claim crossing"}  # what is never below 0
ESTIMATE = ("value", "low", "high", "n", "sign", "verdict")
KINDS: Mapping[str, Kind] = {
    "attainment": Kind(
        "attainment.parquet",
        ("x", "label", "system", "preset", "trace", "models", "gpu", "gpus", "machine", "engine", "host", "scaling",
         "rate_scale", "seed", "slo", "plan_origin", "definition", "over", "model"),
        ("n", "value", "tier", "fit", "fidelity", "departs", "invalid", "skipped", "infeasible"),
        ("definition", "over"),
    ),
    "ratios": Kind(
        "ratios.parquet",
        ("kind", "name", "first", "over"),
        ("paper", "mean", "low", "high", "n", "sign", "verdict", "note"),
    ),
    "sensitivity": Kind(
        "sensitivity.parquet", ("constant", "setting"), ("value", "mean", "low", "high", "n", "sign", "note")
    ),
    # claims, crossings, ratios, differences and counts, however they were computed
    "estimates": Kind(
        "*.estimates.csv",
        ("what", "condition", "kind", "axis", "own", "trace", "models", "gpus", "slo", "rate_scale", "seed", "system",
         "over", "definition", "model", "paper"),
        ESTIMATE,
    ),
    "points": Kind("*.points.csv", ("condition", "kind", "system", "seed", "definition", "x"), ("value",)),
    "weaver": Kind("weaver.csv", ("panel", "series", "x", "seed"), ("value",)),
}  # fmt: skip

Key = tuple[str, ...]
Values = tuple[Any, ...]


class Rows(NamedTuple):
    """The rows of a study, all of one kind."""

    columns: frozenset[str]  # that all of its tables have
    rows: tuple[Mapping[str, Any], ...]


class Report(NamedTuple):
    """Differences of a study's rows."""

    compared: int
    differences: tuple[str, ...]
    notes: tuple[str, ...] = ()


NONE = Report(0, ("there is none",))


# ------------------------------------------------------------------ reading


def tables(root: Path, kind: Kind, name: Callable[[Path], str]) -> dict[str, list[Path]]:
    """Return the tables of every study below a folder, by what `name` makes of their paths there."""
    by: dict[str, list[Path]] = {}
    for path in sorted(root.rglob(kind.files)):
        by.setdefault(re.sub(r"-[0-9a-f]{8}$", "", name(path.relative_to(root))), []).append(path)
    return by


def top(path: Path) -> str:
    """Return the study of a table by where it is asked for: `fig7/any-0e71a64b/attainment.parquet` is of fig7."""
    return path.parts[0].split(".")[0] if len(path.parts) == 1 else path.parts[0]


def folder(path: Path) -> str:
    """Return the study of a table by its own folder: `out/fig7-0e71a64b/attainment.parquet` is of fig7."""
    return path.parent.name or top(path)


def read(path: Path) -> Rows:
    """Return the rows of a file; numbers of a CSV as numbers, an empty cell as none."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        return Rows(frozenset(table.column_names), tuple(table.to_pylist()))
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(line for line in file if not line.startswith("#"))
        rows = tuple({key: number(text) for key, text in row.items()} for row in reader)
        return Rows(frozenset(reader.fieldnames or ()), rows)


def number(text: str) -> float | str | None:
    """Return a cell of a CSV."""
    try:
        return float(text)
    except ValueError:
        return text or None


def pooled(tables: Iterable[Rows]) -> Rows:
    """Return several tables as one."""
    every = list(tables)
    rows = tuple(clipped(row) for t in every for row in t.rows)
    return Rows(frozenset.intersection(*(t.columns for t in every)), rows)


def clipped(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with its interval cut at 0 if of a rate, an SLO scale or a count: at 62c6af9 it could go below."""
    low, of_rate = row.get("low"), row.get("what") in CLIPPED or ("first" in row and row.get("over") is None)
    return {**row, "low": 0.0} if of_rate and isinstance(low, float) and low < 0.0 else row


# ------------------------------------------------------------------ comparing


def compare(kind: Kind, ref: Rows, new: Rows) -> Report:
    """Compare the rows of a study; the report's words tell reference from new."""
    both = ref.columns & new.columns
    keys, values = [c for c in kind.key if c in both], [c for c in kind.values if c in both]
    alone = [c for c in kind.key if c in ref.columns ^ new.columns]
    notes = [f"not compared by {', '.join(alone)}, of one tree only"] if alone else []
    lost = [f"column {name} is gone" for name in kind.values if name in ref.columns - new.columns]
    ours, theirs = grouped(ref.rows, keys, values), grouped(new.rows, keys, values)
    selects = [c for c in kind.selects if c in both]
    asked = {tuple(word(row[c]) for c in selects) for row in ref.rows}
    places = [keys.index(c) for c in selects]
    beyond = {key for key in theirs if tuple(key[i] for i in places) not in asked} if selects else set[Key]()
    if beyond:
        more = sorted({" ".join(key[i] for i in places) for key in beyond})
        notes.append(f"{len(beyond)} rows of measures that the reference has not: {', '.join(more)}")
    return Report(
        len(ours),
        (
            *lost,
            *(f"lacks {named(keys, key)}" for key in ours if key not in theirs),
            *(f"too much: {named(keys, key)}" for key in theirs if key not in ours and key not in beyond),
            *(
                f"{named(keys, key)}: {text}"
                for key, rows in ours.items()
                if key in theirs
                for text in differences(values, rows, theirs[key])
            ),
        ),
        tuple(notes),
    )


def grouped(rows: Iterable[Mapping[str, Any]], keys: Sequence[str], values: Sequence[str]) -> dict[Key, list[Values]]:
    """Group the distinct values of rows by their keys: a run in several panels has the same values in all."""
    by: dict[Key, list[Values]] = {}
    for row in rows:
        have = by.setdefault(tuple(word(row[c]) for c in keys), [])
        says = tuple(row[c] for c in values)
        if not any(all(map(equal, says, other)) for other in have):
            have.append(says)
    return by


def differences(names: Sequence[str], ref: Sequence[Values], new: Sequence[Values]) -> Iterator[str]:
    """List the differences of two lists of values under one key; their order does not count."""
    ours = [row for row in ref if not any(all(map(equal, row, other)) for other in new)]
    theirs = [row for row in new if not any(all(map(equal, row, other)) for other in ref)]
    if len(ours) == len(theirs) == 1:
        pairs = zip(names, ours[0], theirs[0], strict=True)
        yield ", ".join(f"{name} {a!r} is {b!r}" for name, a, b in pairs if not equal(a, b))
        return
    yield from (f"{dict(zip(names, row, strict=True))} is gone" for row in ours)
    yield from (f"{dict(zip(names, row, strict=True))} is new" for row in theirs)


def equal(a: Any, b: Any) -> bool:
    """Return whether two cells are equal."""
    if isinstance(a, float | int) and isinstance(b, float | int):
        return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=RELATIVE, abs_tol=1e-15)
    return bool(a == b)


def word(cell: Any) -> str:
    """Return a cell of a key; numbers by ten digits, whatever their type."""
    if isinstance(cell, bool) or not isinstance(cell, float | int):
        return "" if cell is None else str(cell)
    return f"{cell:.10g}"


def named(keys: Sequence[str], key: Key) -> str:
    """Return a row by what it is about."""
    return " ".join(f"{name}={cell}" for name, cell in zip(keys, key, strict=True) if cell)


def reports(
    ref: Path, new: Path, only: Sequence[str] = (), renamed: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Report]]:
    """Compare every study of the reference with that of the other tree, kind by kind."""
    names = {**RENAMED, **(renamed or {})}
    for title, kind in KINDS.items():
        theirs = tables(new, kind, top) | tables(new, kind, folder)
        for name, paths in tables(ref, kind, top).items():
            if only and name not in only:
                continue
            others = theirs.get(names.get(name, name)) or theirs.get(name)
            report = compare(kind, pooled(map(read, paths)), pooled(map(read, others))) if others else NONE
            yield f"{title} of {name}", report


def main(args: Sequence[str]) -> int:
    """Print what differs; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", default="", help="studies of the reference, by comma")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="a study's name in both trees")
    asked = parser.parse_args(args)
    only = [name for name in asked.only.split(",") if name]
    every = list(reports(asked.ref, asked.new, only, dict(pair.split("=", 1) for pair in asked.rename)))
    for title, report in every:
        state = f"{len(report.differences)} DIFFERENCES" if report.differences else "equal"
        print(f"{title}: {report.compared} rows, {state}")
        for line in (*report.notes, *report.differences[:SHOWN]):
            print(f"  {line}")
        if len(report.differences) > SHOWN:
            print(f"  ... and {len(report.differences) - SHOWN} more")
    if not every:
        print(f"{asked.ref}: no tables")
    return int(not every or any(report.differences for _, report in every))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
