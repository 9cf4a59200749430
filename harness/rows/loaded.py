"""Runs as data frames (`from harness import load`): the table of runs is read immediately, requests only on demand.

A comparison has millions of requests. So requests are read run by run, or scanned in their files. They become one frame
only if that frame fits into a memory limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from harness.policy.fields import meant
from harness.policy.types import UserError
from harness.rows import parts, record, tidy
from harness.rows.record import SWEEP
from harness.rows.schema import CODES, SCHEMA

if TYPE_CHECKING:
    import pandas as pd
    from pyarrow import dataset

CELL_BYTES = 8  # bytes of a frame's cell; categories take less, copies while the frame is made take more
GB = 1e9
MOST_GB = 2.0
SCORED = ("label", "x", "seed", "attainment", "worst_model", "sweep")  # columns of `runs` from tables of comparisons


class Frames(NamedTuple):
    """The runs of a folder, and their requests; the column `run` has a run's name in both."""

    runs: pd.DataFrame
    """A row a run, once for each comparison that has it.

    label, x, seed, attainment and worst_model (shares of requests, by the comparison's definition), and `sweep`, the
    comparison's folder, are empty of runs without one. p_*: the spec; n_*: requests by state; s_*: statistics of the
    engine; fidelity, tier, fit, skipped, infeasible, end_s.
    """
    requests: Requests


class Requests:
    """The requests of runs: their times in seconds from the window's start, their waits and their tokens.

    The files of requests are read only when the requests are asked for.
    """

    def __init__(self, folders: Sequence[Path], columns: Sequence[str] | None) -> None:
        self._folders = {folder.name: folder for folder in folders}
        self._columns = record.chosen(columns)

    def __len__(self) -> int:
        """Return the number of requests, from the facts of runs alone; no file of requests is read."""
        return sum(sum((record.meta(folder).get("counts") or {}).values()) for folder in self._folders.values())

    def __repr__(self) -> str:
        """Return one line: the numbers of requests and runs, and the methods that read the requests."""
        return f"<{len(self):,} requests of {len(self._folders):,} runs: .of(RUN), .frame(), .scan(), or in a loop>"

    def __iter__(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yield each run's name with its requests, one run in memory at a time."""
        for name in self._folders:
            yield name, self.of(name)

    def of(self, run: str) -> pd.DataFrame:
        """Return the requests of one run. Raises UserError if there is no run of that name."""
        if run not in self._folders:
            known = ", ".join([*self._folders][:4])
            raise UserError(f'no run "{run}" here{meant(run, self._folders)} ({known}, ... are)')
        return _seconds(record.read(self._folders[run], self._columns))

    def frame(self, most_gb: float = MOST_GB) -> pd.DataFrame:
        """Return the requests of all runs, with a column `run`.

        Raises UserError if they would take more than `most_gb`.
        """
        import pandas as pd

        count, columns = len(self), len(self._columns or SCHEMA.names)
        if (gigabytes := count * columns * CELL_BYTES / GB) > most_gb:
            raise UserError(
                f"{count:,} requests of {columns} columns take about {gigabytes:.3g} GB, and the limit is {most_gb:g} "
                f"GB: name columns (load(FOLDER, columns)), take a run at a time (requests.of(RUN)), or requests.scan()"
            )
        frames = [rows.assign(run=name) for name, rows in self if len(rows)]
        rows = pd.concat(frames, ignore_index=True) if frames else _seconds(SCHEMA.empty_table()).assign(run="")
        words = [c for c in rows.columns if c == "run" or (c in SCHEMA.names and SCHEMA.field(c).type == CODES)]
        return rows.astype(dict.fromkeys(words, "category"))

    def scan(self) -> dataset.Dataset:
        """Return all requests as a PyArrow dataset with a column `run`; nothing is read yet.

        The dataset refers to the files. `polars.scan_pyarrow_dataset` and DuckDB accept it. It has all columns of the
        files (docs/schema.md), with times in whole nanoseconds. Raises UserError for files of another schema.
        """
        from pyarrow import dataset, fs

        for folder in self._folders.values():
            record.present(folder, record.meta(folder))
        schema = SCHEMA.insert(0, pa.field("run", CODES))
        alone = {name: folder for name, folder in self._folders.items() if (folder / record.ROWS).is_file()}
        packed = {parts.find(folder) for name, folder in self._folders.items() if name not in alone}
        form = dataset.ParquetFileFormat()
        each = dataset.FileSystemDataset.from_paths(
            [str(folder / record.ROWS) for folder in alone.values()],
            schema=schema,
            format=form,
            filesystem=fs.LocalFileSystem(),
            partitions=[_is(name) for name in alone],
        )
        if not packed:
            return each
        beside = dataset.dataset([str(path) for path in packed if path], schema=schema, format=form)
        wanted = dataset.field("run").cast(pa.string()).isin([name for name in self._folders if name not in alone])
        return dataset.dataset([each, beside.filter(wanted)]) if alone else beside.filter(wanted)


def load(path: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Frames:
    """Load one run, a comparison (the runs that its folder names), or all runs under `path`.

    `columns` limits what is read of each request (names of `SCHEMA`). Raises UserError if there is no run.
    """
    import pandas as pd

    folders = record.runs(path)
    facts = []
    for folder in folders:
        about = record.meta(folder)
        facts.append(
            {"run": folder.name}
            | {key: about.get(key) for key in ("fidelity", "tier", "fit", "skipped", "infeasible", "end_s")}
            | {f"n_{key}": value for key, value in (about.get("counts") or {}).items()}
            | {f"s_{key}": value for key, value in (about.get("stats") or {}).items()}
            | {f"p_{key}": _cell(value) for key, value in _flat(about.get("spec") or {})}
        )
    runs = pd.DataFrame(facts)
    scored = [_attained(table) for table in _sweeps(Path(path), {folder.parent for folder in folders})]
    attained = pd.concat(scored, ignore_index=True) if scored else pd.DataFrame(columns=["run", *SCORED])
    merged = runs.merge(attained, "left", "run")
    return Frames(merged[["run", *SCORED, *runs.columns[1:]]], Requests(folders, columns))


def _sweeps(path: Path, beside: set[Path]) -> list[Path]:
    """Find the tables of comparisons for a path.

    If `path` is the folder of a comparison, return its table alone; if it is a run, return []. For any other folder,
    return all tables under it, and the table of each comparison whose folder lies directly in a folder of `beside`.
    """
    if (path / SWEEP).is_file():
        return [path / SWEEP]
    if record.exists(path):
        return []
    return sorted({table for folder in beside for table in folder.glob(f"*/{SWEEP}")} | {*path.rglob(SWEEP)})


def _attained(path: Path) -> pd.DataFrame:
    """Read label, x, seed and attainment of each run of a comparison, by the comparison's first definition."""
    about = record.footer(path)
    frame = tidy.stored(path).to_pandas()
    frame = frame[frame["definition"] == next(iter(about.get("definitions", ())), "both")]
    pooled = frame[frame["over"] == "pooled"].rename(columns={"value": "attainment"})
    worst = frame[frame["over"] == "worst"].set_index("run")["value"]
    pooled = pooled.assign(worst_model=pooled["run"].map(worst.groupby(level=0).first()), sweep=path.parent.name)
    names = [name for name in ("run", *SCORED) if name in pooled.columns]
    kept: pd.DataFrame = pooled[names].drop_duplicates()
    return kept.astype({"run": "str", "label": "str"})


def _is(name: str) -> Any:
    from pyarrow import dataset

    return dataset.field("run") == pa.scalar(name, pa.string()).cast(CODES)


def _seconds(table: pa.Table) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_pandas()
    stamps = [c for c in frame.columns if c.endswith("_ns")]
    for name in stamps:
        column = frame[name]
        seconds = column.map(lambda x: None if x is None else x / 1e9) if name == "token_ns" else column / 1e9
        frame[name] = seconds
    return frame.rename(columns={name: name[:-3] + "_s" for name in stamps})


def _flat(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in spec.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _cell(value: Any) -> Any:
    return record.dumps(value) if isinstance(value, list) else value
