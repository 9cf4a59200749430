"""Parts: files that each store many runs, for a study with too many runs to give each a folder.

    <results>/runs/study=fig7/shard=1-1/3f9.parquet   the runs whose hash begins with 3f9, with a column of their names
    <results>/runs/study=fig7/shard=1-1/_3f9.json     their wall-clock facts
    <results>/runs/study=fig7/shard=1-1/_staged/      folders of runs whose part is not written yet

Readers use one form of path for all runs, `<results>/<system>-<hash8>`: the path that a run's own folder would have. If
several parts store the run, the part whose path sorts first is read. Any reader of Parquet can open the folder `runs`
as one dataset.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from harness.policy.types import UserError
from harness.rows import forms, sealed
from harness.rows import whole as left
from harness.rows.sealed import Facts

DATASET, STAGED = "runs", "_staged"
MANY = 10_000  # runs of a study, above which they lie in parts
PER_PART = 256  # runs of a part, at most on average
MOST_DIGITS = 4
FEW_PARTS = 8  # the most parts that a sample is taken from
FORM: Mapping[str, Any] = {"schema": int, "runs": {str: forms.RUN}, "groups": {str: [int, int]}}
NAME = pa.field("run", pa.dictionary(pa.int32(), pa.string()), nullable=False)


class Partition(NamedTuple):
    """The location of one shard of a study below the results: its folder, and the parts in it."""

    study: str
    shard: str  # I-N
    runs: int  # planned runs of all shards together

    @property
    def digits(self) -> int:
        """The number of leading hex digits of a run's hash that name its part."""
        each = self.runs / int(self.shard.partition("-")[2])
        return next((k for k in range(1, MOST_DIGITS) if each / 16**k <= PER_PART), MOST_DIGITS)

    def folder(self, results: Path) -> Path:
        """Return the folder of this shard below the results."""
        return results / DATASET / f"study={self.study}" / f"shard={self.shard}"

    def staged(self, results: Path) -> Path:
        """Return the folder in which each run of this shard has a folder of its own until its part is written."""
        return self.folder(results) / STAGED

    def part(self, results: Path, name: str) -> Path:
        """Return the part that stores this run or, if none does, the part of this partition that will store it."""
        mine = self.folder(results) / f"{name.rpartition('-')[2][: self.digits]}.parquet"
        return find(results / name) or mine


def clean(into: Partition, results: Path) -> None:
    """Remove temporary folders of dead writers from the folders of a partition."""
    for folder in (into.folder(results), into.staged(results)):
        left.clean(folder)


# ------------------------------------------------------------------ find


def find(run: Path) -> Path | None:
    """Return the part that stores the run of this path; None if no readable part does."""
    digest = run.name.rpartition("-")[2]
    for folder in _folders(run.parent / DATASET):
        names = _listed(folder, _changed(folder))
        for k in range(1, MOST_DIGITS + 1):
            if digest[:k] in names:
                path = folder / f"{digest[:k]}.parquet"
                with suppress(UserError, FileNotFoundError):
                    if run.name in _names(path, *_stamp(path)):
                        return path
    return None


def under(path: Path) -> list[Path]:
    """List the paths of the runs in all parts under a folder, which may be the results, a study or a shard."""
    runs = set()
    for part in path.rglob("shard=*/*.parquet") if "=" not in path.name else path.rglob("*.parquet"):
        at = part.relative_to(path).parts
        if part.parent.name.startswith("shard=") and STAGED not in at and not any(x.startswith(".") for x in at):
            runs |= {part.parents[3] / name for name in names(part)}
    return sorted(runs)


def sample(results: Path, most: int) -> list[Path]:
    """List the paths of about `most` runs in parts, from a few parts that are evenly spread."""
    every = sorted(path for folder in _folders(results / DATASET) for path in folder.glob("*.parquet"))
    few = every[:: max(1, -(-len(every) // FEW_PARTS))]
    each = [sorted(names(part))[: max(1, most // len(few))] for part in few]
    return [results / name for of in each for name in of]


def names(part: Path) -> frozenset[str]:
    """Return the names of the runs in a part; none if the part is missing or damaged."""
    with suppress(UserError, FileNotFoundError):
        return _names(part, *_stamp(part))
    return frozenset()


def _folders(dataset: Path) -> Sequence[Path]:
    return _shards(dataset, _changed(dataset), tuple(map(_changed, _studies(dataset, _changed(dataset)))))


@lru_cache(256)
def _studies(dataset: Path, changed: int) -> tuple[Path, ...]:
    return tuple(sorted(dataset.glob("study=*"))) if changed else ()


@lru_cache(256)
def _shards(dataset: Path, changed: int, _studies_changed: tuple[int, ...]) -> tuple[Path, ...]:
    return tuple(folder for study in _studies(dataset, changed) for folder in sorted(study.glob("shard=*")))


@lru_cache(4096)
def _listed(folder: Path, changed: int) -> frozenset[str]:
    """Return the stems of the parts in a folder."""
    return frozenset(path.stem for path in folder.glob("*.parquet")) if changed else frozenset()


def _changed(folder: Path) -> int:
    """Return the time of a folder's last change in ns; 0 if there is no folder."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _stamp(path: Path) -> tuple[int, int, int]:
    at = path.stat()
    return at.st_ino, at.st_size, at.st_mtime_ns


# ------------------------------------------------------------------ read


def facts(part: Path, name: str) -> Facts:
    """Read the facts of a run. Raises Damaged, and FileNotFoundError."""
    about: Facts = _about(part, *_stamp(part))["runs"][name]
    return Facts(str(part), about)


def whole(part: Path, name: str) -> Facts:
    """Read the facts of a run, and check all rows of its part against their digest. Raises as `facts` does."""
    _intact(part, *_stamp(part))
    return facts(part, name)


def rows(part: Path, name: str, schema: pa.Schema, columns: Iterable[str]) -> pa.Table:
    """Read these columns of a run's rows, with the types of `schema`. Raises Damaged, and FileNotFoundError."""
    stamp = _stamp(part)
    first, count = _about(part, *stamp)["groups"][name]
    wanted = pa.schema([schema.field(column) for column in columns])
    _intact(part, *stamp)
    if not count:
        return wanted.empty_table()
    with sealed.reading(part), pq.ParquetFile(part, metadata=_metadata(part, *stamp), memory_map=True) as file:
        table = file.read_row_groups(list(range(first, first + count)), columns=wanted.names)
    return sealed.filled(part, table, wanted)


def sides(part: Path) -> dict[str, Any]:
    """Read the wall-clock facts of a part's runs, by name; empty where there are none."""
    with suppress(OSError, ValueError):
        every = json.loads(beside(part).read_text("utf-8"))
        return every if isinstance(every, dict) else {}
    return {}


def beside(part: Path) -> Path:
    """Return the file of the wall-clock facts of a part's runs."""
    return part.with_name(f"_{part.stem}.json")


@lru_cache(64)
def _about(part: Path, *_stamp: int) -> Facts:
    return sealed.facts(part, FORM)


@lru_cache(1024)
def _names(part: Path, *stamp: int) -> frozenset[str]:
    return frozenset(_about(part, *stamp)["groups"])


@lru_cache(64)
def _metadata(part: Path, *_stamp: int) -> pq.FileMetaData:
    return pq.read_metadata(part)


@lru_cache(4096)
def _intact(part: Path, *_stamp: int) -> None:
    with sealed.reading(part):
        sealed.intact(part, rows=True)


def forget() -> None:
    """Clear the cached lists of parts after a part was written.

    The time of a folder's last change is too coarse to show a new part at once.
    """
    for known in (_studies, _shards, _listed):
        known.cache_clear()


def dismissed(folder: Path) -> None:
    """Remove a folder of staged runs if nothing is in it."""
    with suppress(OSError):
        os.rmdir(folder)  # noqa: PTH106 - a folder that others write to stays
