"""The answer of `bench size` on disk: a table of what was tried, with the question and the answer in its facts.

It lies in a folder of its own beside the runs (`record.SIZE`), named by the trace and a hash of the question. A figure,
a page and `bench explain` are made from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from harness.engines.costs.prices import Price
from harness.policy.types import UserError
from harness.rows import forms, record
from harness.rows.definitions import DEFINITIONS
from harness.rows.held import DAY_H
from harness.rows.sealed import WAY_OUT, Damaged
from harness.rows.stored import SIZES
from harness.run.spec import digest
from harness.study.size import Asked, Sized


class Words(NamedTuple):
    """The words of an answer, which are stored with it."""

    sentence: str
    setting: str
    cells: Sequence[Sequence[str]]  # the printed table, its head first
    facts: Sequence[tuple[str, str]]  # what else is printed, in pairs


class Tried(NamedTuple):
    """A strategy on a number of GPUs, as stored."""

    gpu: str
    label: str
    gpus: int
    usd_day: float | None
    pooled: float | None  # the least attainment of all requests in a view
    low: float | None
    high: float | None
    worst: float | None  # the least attainment of a model in a view
    worst_model: str | None
    unfit: str  # why it could not run; "": it did
    answer: bool  # the fewest on which every model holds the target
    runs: tuple[Path, ...]


class Kept(NamedTuple):
    """A stored answer."""

    asked: Asked
    best: tuple[str, str, int] | None  # kind, system, GPUs
    sentence: str
    setting: str
    cells: list[list[str]]  # the printed table, its head first
    facts: list[list[str]]  # what else was printed, in pairs
    views: dict[str, str]  # by trace: the name of the view
    tried: tuple[Tried, ...]


def keep(sized: Sized, words: Words, out: Path) -> Path:
    """Write an answer below `out`; returns its folder. Raises UserError where the disk refuses."""
    asked = {**asdict(sized.asked), "prices": {kind: price._asdict() for kind, price in sized.asked.prices.items()}}
    asked["growth"] = [float(x) for x in sized.asked.growth]
    best = None if sized.best is None else dict(zip(("gpu", "system", "gpus"), sized.best, strict=True))
    about = {
        "asked": asked, "best": best, **words._asdict(),
        "views": [[view.trace, view.name] for view in sized.views],
    }  # fmt: skip
    stem = Path(str(sized.asked.setting["trace"])).stem.partition("+")[0]
    folder = out / f"{stem}-size-{digest(record.dumps(asked))[:8]}"
    table = pa.Table.from_pylist(list(_rows(sized)), schema=forms.SIZE_COLUMNS)
    # An equal answer stays as it is.
    SIZES.kept(folder / record.SIZE, {**about, "schema": record.VERSION, "rows": table.to_pylist()}, lambda: table)
    return folder


def _rows(sized: Sized) -> list[dict[str, Any]]:
    rows = []
    for curve in sized.curves.values():
        fewest = curve.fewest(sized.asked.target, "each")
        for n, verdict in sorted(curve.tried.items()):
            view, share = min(verdict.share.items(), key=lambda pair: pair[1], default=("", None))
            ends = verdict.interval.get(view) or (None, None)
            usd = sized.asked.usd_hour(curve.kind, n)
            name, worst = verdict.worst
            rows.append({
                "gpu": curve.kind, "label": curve.system, "gpus": n, "usd_day": usd and usd * DAY_H,
                "pooled": share, "low": ends[0], "high": ends[1], "worst": None if verdict.unfit else worst,
                "worst_model": None if verdict.unfit else name, "unfit": verdict.unfit, "answer": n == fewest,
                "runs": [path.name for path in verdict.runs],
            })  # fmt: skip
    return rows


def read(folder: Path) -> Kept:
    """Read an answer. Raises UserError where there is none, Damaged where it is not whole."""
    path = folder / record.SIZE
    try:
        about, table = record.footer(path), record.table(path, forms.SIZE_COLUMNS)
    except FileNotFoundError:
        raise UserError(f"{folder}: no answer of bench size here ({record.SIZE} is missing)") from None
    try:
        given = dict(about["asked"])
        prices = {kind: Price(**price) for kind, price in given.pop("prices").items()}
        lists = {key: tuple(given[key]) for key in ("kinds", "systems", "growth")}
        asked = Asked(**{**given, **lists, "setting": dict(given["setting"]), "prices": prices})
        best = None if about["best"] is None else tuple(about["best"][key] for key in ("gpu", "system", "gpus"))
        views, facts = dict(about["views"]), about["facts"]
        _ = DEFINITIONS[asked.definition]
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{path}: its facts are not those of an answer ({error}); {WAY_OUT}") from None
    tried = tuple(
        Tried(**{**row, "runs": tuple(folder.parent / name for name in row["runs"] or ()),
                 "unfit": row["unfit"] or "", "answer": bool(row["answer"])})
        for row in table.to_pylist()
    )  # fmt: skip
    return Kept(asked, best, about["sentence"], about["setting"], about["cells"], facts, views, tried)
