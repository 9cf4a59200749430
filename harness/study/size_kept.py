"""The answer of `bench size` on disk: a table of the numbers of GPUs that were tried, with the question as metadata.

The metadata also has the answer. The folder of the table is next to the runs (`record.SIZE`); its name has the trace
and a hash of the question. A figure, a page and `bench explain` are made from the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from harness import toml
from harness.policy.types import UserError
from harness.rows import forms, record
from harness.rows.definitions import DEFINITIONS
from harness.rows.sealed import WAY_OUT, Damaged
from harness.rows.stored import SIZES
from harness.run.spec import digest
from harness.study.sized import Best, Question, Sized, Tried


class Words(NamedTuple):
    """An answer in words, as it is printed and stored: a sentence, the setting, the table and further facts."""

    sentence: str
    setting: str
    cells: Sequence[Sequence[str]]  # the printed table, its head first
    facts: Sequence[Sequence[str]]  # what else is printed, in pairs


class Kept(NamedTuple):
    """A stored answer."""

    asked: Question
    best: Best | None
    words: Words
    views: dict[str, str]  # keyed by trace: the name of the view
    tried: tuple[Tried, ...]


def keep(sized: Sized, words: Words, out: Path) -> Path:
    """Write an answer below `out`; return its folder. Raises UserError if it cannot be written to disk."""
    asked = {**asdict(sized.asked), "prices": {kind: price._asdict() for kind, price in sized.asked.prices.items()}}
    views = [[view.trace, view.name] for view in sized.views]
    about = {"asked": asked, "best": sized.best and sized.best._asdict(), **words._asdict(), "views": views}
    stem = Path(str(sized.asked.setting["trace"])).stem.partition("+")[0]
    folder = out / f"{stem}-size-{digest(record.dumps(asked))[:8]}"
    rows = [{**row._asdict(), "runs": [path.name for path in row.runs]} for row in sized.tried]
    table = pa.Table.from_pylist(rows, schema=forms.SIZE_COLUMNS)
    # An equal answer stays as it is.
    SIZES.kept(folder / record.SIZE, {**about, "schema": record.VERSION, "rows": table.to_pylist()}, lambda: table)
    return folder


def read(folder: Path) -> Kept:
    """Read an answer. Raises UserError if there is none, and Damaged if it is incomplete."""
    path = folder / record.SIZE
    try:
        about, table = record.footer(path), record.table(path, forms.SIZE_COLUMNS)
    except FileNotFoundError:
        raise UserError(f"{folder}: no answer of bench size here ({record.SIZE} is missing)") from None
    try:
        asked, best = toml.convert(about["asked"], Question), about["best"] and toml.convert(about["best"], Best)
        views, words = dict(about["views"]), Words(*(about[key] for key in Words._fields))
        _ = DEFINITIONS[asked.definition]
    except (KeyError, TypeError, ValueError, UserError) as error:
        raise Damaged(f"{path}: its facts are not those of an answer ({error}); {WAY_OUT}") from None
    if lost := [name for name in ("gpu", "label", "gpus") if table[name].null_count]:
        raise Damaged(f"{path}: a row without {lost[0]}; {WAY_OUT}")
    tried = []
    for row in table.to_pylist():
        runs = tuple(folder.parent / name for name in row["runs"] or ())
        tried.append(Tried(**row)._replace(runs=runs, unfit=row["unfit"] or "", answer=bool(row["answer"])))
    return Kept(asked, best, words, views, tuple(tried))
