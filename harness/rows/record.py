"""Rows on disk: one folder per run, which is complete or absent; equal rows give equal bytes.

A run is `<folder>/requests.parquet`: one row per request, and run facts as JSON in the schema's metadata. A run may
also have `side.json` with wall-clock facts, which enter neither the hash nor the comparison of bytes. Every table
stores digests of its bytes, which are checked when it is read (`sealed.py`). If an SLO is a multiple of each request's
own latency alone, `solo.parquet` stores that latency by request.

All times are whole nanoseconds from the window's start. Large studies store many runs in one file, a part (`parts.py`).
The path of such a run is the one that its folder would have.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harness import spilled
from harness.policy.fields import meant
from harness.policy.types import UserError
from harness.rows import forms, parts, schema, sealed, waits
from harness.rows.schema import CODES
from harness.rows.sealed import WAY_OUT, Damaged, Facts
from harness.rows.whole import patient, replacing, sync
from harness.store import seal

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCHEMA, STATES, WAITS = schema.SCHEMA, waits.STATES, waits.WAITS
ROWS = "requests.parquet"
SIDE = "side.json"
SOLO = "solo.parquet"
SWEEP = "attainment.parquet"
SENSITIVITY = "sensitivity.parquet"
TURNS = "turns.parquet"
SIZE = "size.parquet"
COMMAND = "command.txt"  # beside a table: the command that made it
FORMS = {
    ROWS: forms.RUN,
    SWEEP: forms.SCORED,
    SENSITIVITY: forms.LEADS,
    TURNS: forms.TURNS,
    SIZE: forms.SIZED,
}  # a file's facts have this form

VERSION = 2  # `schema` of the files that are written and read; a new nullable column does not raise it

ROW_GROUP = 65_536  # rows; fixed, so that bytes do not depend on how an engine cuts its batches
SOLO_COLUMNS = pa.schema([pa.field(name, pa.float64(), nullable=False) for name in ("ttft_s", "tpot_s")])
_DICTS = [f.name for f in SCHEMA if f.type == CODES]

# Errors of a disk that refuses; any other OSError comes from an engine's rows and is not the user's mistake.
_REFUSED = frozenset(
    {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}
    | {errno.EIO, errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.EEXIST}
)


# ------------------------------------------------------------------ seconds to nanoseconds, once


def to_ns(seconds: NDArray[np.float64]) -> pa.Array:
    """Convert `seconds`, shape (n,), to whole nanoseconds; NaN becomes null."""
    none = np.isnan(seconds)
    return pa.array(np.rint(np.where(none, 0.0, seconds) * 1e9).astype(np.int64), mask=none)


# ------------------------------------------------------------------ write


def write(
    folder: str | os.PathLike[str],
    batches: Iterable[pa.RecordBatch],
    metadata: Mapping[str, Any],
    *,
    side: Mapping[str, Any] | None = None,
    files: Mapping[str, Iterable[bytes]] | None = None,
) -> None:
    """Write a run, all of it or nothing; it replaces an earlier one.

    `batches` (of `SCHEMA`, in order of id) are streamed. `metadata` and `counts` (rows by state) go to the footer as
    JSON, `side` goes to side.json. `files` are further files by name, each a stream of bytes. A skipped run has no
    rows; `metadata["skipped"]` then has the reason. Raises UserError if the disk refuses.
    """
    folder = Path(folder)
    with _told(folder), replacing(folder) as part:
        part.mkdir()
        with _synced(part / ROWS) as out:
            counts: Counter[str] = Counter()
            _parquet(out, _groups(batches, counts), SCHEMA, lambda: {**metadata, "counts": dict(counts)})
        if side is not None:
            _bytes(part / SIDE, [(json.dumps(dict(side), indent=1, sort_keys=True) + "\n").encode()])
        for name, chunks in (files or {}).items():
            _bytes(part / name, chunks)
        sync(part)


def write_files(folder: str | os.PathLike[str], files: Mapping[str, bytes]) -> None:
    """Write the files of a run that was made elsewhere, all or none. Raises UserError if the disk refuses."""
    folder = Path(folder)
    with _told(folder), replacing(folder) as part:
        part.mkdir()
        for name, data in files.items():
            _bytes(part / name, [data])
        sync(part)


def plain(schema: pa.Schema) -> pa.Schema:
    """Return the schema with plain strings in place of dictionary-encoded ones.

    Tables with different dictionaries can be compared, joined and sorted after a cast to this schema.
    """
    return pa.schema([(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type) for f in schema])


def write_table(path: str | os.PathLike[str], table: pa.Table, metadata: Mapping[str, Any]) -> None:
    """Write one Parquet file of any schema, all of it or nothing. Raises UserError if the disk refuses."""
    path = Path(path)
    with _told(path), replacing(path) as part, _synced(part) as out:
        _parquet(out, table.to_batches(ROW_GROUP), table.schema, lambda: metadata)


def restate(folder: str | os.PathLike[str], changes: Mapping[str, Any]) -> None:
    """Store a run again with some facts changed. Raises UserError if there is no such run, or the disk refuses."""
    if (part := _part(Path(folder))) is not None:
        write_part(part, [], {Path(folder).name: changes})
        return
    write_table(Path(folder) / ROWS, read(folder), {**meta(folder), **changes})


def write_part(part: Path, runs: Iterable[Path], changes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Write runs into a part (`parts.py`), all of them or none; the other runs in the part stay.

    `runs` are folders of runs; they replace runs of the same names in the part. `changes` has facts to change, by run
    name. Raises UserError if a run is missing or damaged, or the disk refuses; a damaged part is replaced.
    """
    new = {run.name: run for run in runs}
    every = sorted(parts.names(part) | new.keys())
    about, groups = dict[str, dict[str, Any]](), dict[str, list[int]]()

    def tables() -> Iterator[pa.Table]:
        for name in every:
            table = read(new[name]) if name in new else parts.rows(part, name, SCHEMA, SCHEMA.names)
            facts = meta(new[name]) if name in new else parts.facts(part, name)
            about[name] = {**facts, **(changes or {}).get(name, {})}
            first = sum(count for _, count in groups.values())
            cut = list(_groups(table.cast(SCHEMA).to_batches(), Counter()))
            groups[name] = [first, len(cut)]
            for group in cut:
                yield group.add_column(
                    0,
                    parts.NAME,
                    pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(group), np.int32)), pa.array([name])),
                )

    known = parts.sides(part) | {name: told for name, run in new.items() if (told := side(run))}
    write_bytes(parts.beside(part), (dumps({name: known[name] for name in every if name in known}) + "\n").encode())
    with _told(part), replacing(part) as temporary, _synced(temporary) as out:
        _parquet(out, tables(), pa.schema([parts.NAME, *SCHEMA]), lambda: {"runs": about, "groups": groups})
    parts.forget()


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write one file, all of it or nothing. Raises UserError if the disk refuses."""
    path = Path(path)
    with _told(path), replacing(path) as part:
        _bytes(part, [data])


def _parquet(out: Any, parts: Iterable[Any], schema: pa.Schema, metadata: Callable[[], Mapping[str, Any]]) -> None:
    ints = {_leaf(f): "DELTA_BINARY_PACKED" for f in schema if pa.types.is_integer(_value(f))}
    writer = pq.ParquetWriter(
        out,
        schema.remove_metadata(),
        compression="zstd",
        compression_level=1,
        use_dictionary=[f.name for f in schema if pa.types.is_dictionary(f.type)],
        column_encoding=ints,
        write_statistics=False,
        data_page_version="2.0",
    )
    try:
        for part in parts:
            writer.write(part, row_group_size=ROW_GROUP)
        facts = {**metadata(), "schema": VERSION}
        writer.add_key_value_metadata({key: dumps(value) for key, value in sorted(facts.items())})
    except BaseException:
        with contextlib.suppress(Exception):  # the first failure is the one to raise
            writer.close()
        raise
    writer.close()
    seal(out)


def _value(field: pa.Field) -> pa.DataType:
    return field.type.value_type if pa.types.is_list(field.type) else field.type


def _leaf(field: pa.Field) -> str:
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else str(field.name)


def _groups(batches: Iterable[pa.RecordBatch], counts: Counter[str]) -> Iterator[pa.Table]:
    """Yield tables of exactly ROW_GROUP rows, except the last, whatever the sizes of the batches.

    Also add the number of rows in each state to `counts`.
    """
    held: list[pa.RecordBatch] = []
    room = ROW_GROUP
    for batch in batches:
        if not batch.schema.equals(SCHEMA):
            raise ValueError(f"rows are not of the schema in harness/rows/schema.py: {_differences(batch.schema)}")
        while batch.num_rows >= room:
            yield _canonical([*held, batch.slice(0, room)], counts)
            batch, held, room = batch.slice(room), [], ROW_GROUP
        if batch.num_rows:
            held.append(batch)
            room -= batch.num_rows
    if held:
        yield _canonical(held, counts)


def _differences(schema: pa.Schema) -> str:
    return "; ".join(f"{a} for {b}" for a, b in zip(schema, SCHEMA, strict=False) if a != b) or "number of columns"


def _canonical(batches: Sequence[pa.RecordBatch], counts: Counter[str]) -> pa.Table:
    """Join batches to a table whose dictionaries have only the values that occur, sorted.

    So equal rows give equal bytes.

    Also add the number of rows in each state to `counts`.
    """
    table = pa.Table.from_batches(batches)
    for name in _DICTS:
        at = SCHEMA.get_field_index(name)
        column = table.column(at).combine_chunks()
        codes = column.indices.to_numpy()
        words = column.dictionary.to_pylist()
        times = np.bincount(codes, minlength=len(words))
        used = np.flatnonzero(times)
        if name == "state":
            counts.update({words[i]: int(times[i]) for i in used})
        values = sorted({words[i] for i in used})
        rank = np.zeros(len(words), np.int32)
        rank[used] = [values.index(words[i]) for i in used]
        encoded = pa.DictionaryArray.from_arrays(pa.array(rank[codes]), pa.array(values, pa.string()))
        table = table.set_column(at, SCHEMA.field(at), encoded)
    return table


def dumps(value: Any) -> str:
    """Render canonical JSON: sorted keys, no spaces; floats round-trip."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


# ------------------------------------------------------------------ whole or absent


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn an error of the disk within the block into a UserError of one line."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno not in _REFUSED:
            raise
        reason = "a file is in the way" if error.errno == errno.EEXIST else os.strerror(error.errno)
        raise UserError(f"{path}: cannot write results: {reason} (free the disk, or choose another folder)") from error


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[Any]:
    with path.open("x+b") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


def _bytes(path: Path, chunks: Iterable[bytes]) -> None:
    with _synced(path) as out:
        for chunk in chunks:
            out.write(chunk)


# ------------------------------------------------------------------ read


def chosen(columns: Sequence[str] | None) -> list[str] | None:
    """Return the requested columns as a list: a single name becomes a list of one, None stays None.

    Raises UserError for an unknown column.
    """
    if columns is None:
        return None
    columns = [columns] if isinstance(columns, str) else list(columns)
    if unknown := next((name for name in columns if name not in SCHEMA.names), None):
        raise UserError(f'no column "{unknown}"{meant(str(unknown), SCHEMA.names)} (harness.rows.record.SCHEMA)')
    return columns


def read(folder: str | os.PathLike[str], columns: Sequence[str] | None = None) -> pa.Table:
    """Read the rows of a run, in order of id.

    Raises UserError if the run is missing, damaged or of another schema, and for an unknown column.
    """
    columns = chosen(columns)
    return _opened(Path(folder), lambda path: _rows(path, columns), lambda part, name: _of_part(part, name, columns))


class Pieces:
    """The rows of a long run, left on disk: each iteration reads them from the file, one row group at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[pa.Table]:
        return self.columns(SCHEMA.names)

    def columns(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the named columns, a table for each row group. Raises Damaged."""
        form, about = pa.schema([SCHEMA.field(name) for name in names]), footer(self._path)
        with sealed.reading(self._path), pq.ParquetFile(self._path) as file:
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group, columns=list(names))
                yield _checked(self._path, {}, sealed.filled(self._path, rows, form))
            if file.metadata.num_rows != sum(about["counts"].values()):
                raise Damaged(f"{self._path}: {file.metadata.num_rows} rows, and its facts say otherwise; {WAY_OUT}")


def read_by_pieces(folder: str | os.PathLike[str]) -> pa.Table | Pieces:
    """Read the rows of a run as `read` does; for a long run, return `Pieces`, which read the rows later.

    Even a long run is read whole if it has token times or is stored in a part.
    """
    about, path = meta(folder), Path(folder) / ROWS
    if sum((about.get("counts") or {}).values()) <= spilled.MOST_HELD:
        return read(folder)
    if (about.get("spec") or {}).get("token_times") or not path.is_file():
        return read(folder)
    with sealed.reading(path):
        sealed.intact(path, rows=True)
    return Pieces(path)


def meta(folder: str | os.PathLike[str]) -> Facts:
    """Read the facts of a run (`forms.RUN`) from its file's footer alone. Raises UserError if there is no run."""
    about: Facts = _opened(Path(folder), footer, parts.facts)
    return about


def footer(path: str | os.PathLike[str]) -> Facts:
    """Read the facts of a table written by `write_table`, from its footer alone. Raises Damaged, FileNotFoundError."""
    path = Path(path)
    with sealed.reading(path):
        at = path.stat()
    return Facts(str(path), _facts(path, at.st_ino, at.st_size, at.st_mtime_ns))


@lru_cache(maxsize=4096)
def _facts(path: Path, *_stamp: int) -> Facts:
    """Read the facts in a file's footer, once per process unless the file changes."""
    return sealed.facts(path, FORMS.get(path.name, {}))


def table(path: Path, form: pa.Schema, absent: frozenset[str] = frozenset()) -> pa.Table:
    """Read a stored table with the columns of `form`; those in `absent` may be missing.

    Raises Damaged, FileNotFoundError.
    """
    with sealed.reading(path):
        sealed.intact(path, rows=True)
        rows = pq.read_table(path, memory_map=True)
    sealed.columns(path, rows, form, absent)
    return rows


def whole(folder: str | os.PathLike[str]) -> Facts:
    """Read the facts of a run, and check its rows against their digest. Raises the errors of `meta`."""

    def held(path: Path) -> Facts:
        with sealed.reading(path):
            sealed.intact(path, rows=True)
        return footer(path)

    about: Facts = _opened(Path(folder), held, parts.whole)
    return about


def _of_part(part: Path, name: str, columns: Sequence[str] | None) -> pa.Table:
    return _checked(part, parts.facts(part, name), parts.rows(part, name, SCHEMA, columns or SCHEMA.names))


def _rows(path: Path, columns: Sequence[str] | None) -> pa.Table:
    about, form = footer(path), SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    present(path, about)
    with sealed.reading(path):
        sealed.intact(path, rows=True)
        with pq.ParquetFile(path, memory_map=True) as file:
            rows = file.read(form.names)
    return _checked(path, about, sealed.filled(path, rows, form))


def _checked(path: Path, about: Mapping[str, Any], rows: pa.Table) -> pa.Table:
    """Check the rows of a run against its facts, and return the rows. Raises Damaged."""
    if "state" in rows.column_names and (other := set(pc.unique(rows["state"]).to_pylist()) - set(STATES)):
        raise Damaged(f'{path}: state "{other.pop()}" is not one of {", ".join(STATES)}; {WAY_OUT}')
    if "counts" in about and len(rows) != (counted := sum(about["counts"].values())):
        raise Damaged(f"{path}: {len(rows)} rows, and its facts say {counted}; {WAY_OUT}")
    return rows


def present(path: Path, about: Mapping[str, Any]) -> None:
    """Raise UserError if a file's footer (`about`) names another schema version than this release reads."""
    version = about.get("schema", 1)
    if version > VERSION:
        raise UserError(f"{path} is of schema {version}, and this release reads {VERSION}: update it")
    if version < VERSION:
        raise UserError(f"{path} is of schema {version}: release 0.2.0 reads it, and rewrites it by bench upgrade")


def exists(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a complete run of this path is stored: in its own folder, or in a part."""
    return (Path(folder) / ROWS).is_file() or parts.find(Path(folder)) is not None


def file(folder: str | os.PathLike[str]) -> Path:
    """Return the file that stores the rows of a run: the one in its own folder, or else the part."""
    return _part(Path(folder)) or Path(folder) / ROWS


def side(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the wall-clock facts of a run; empty if there are none."""
    folder = Path(folder)
    if (part := _part(folder)) is not None:
        about = parts.sides(part).get(folder.name)
    else:
        about = None
        with contextlib.suppress(OSError, ValueError):
            about = json.loads((folder / SIDE).read_text("utf-8"))
    return about if isinstance(about, dict) else {}


def _part(folder: Path) -> Path | None:
    """Return the part that stores a run without a folder of its own."""
    return None if (folder / ROWS).exists() else parts.find(folder)


def _opened(folder: Path, use: Any, of_part: Any) -> Any:
    if (part := _part(folder)) is not None:
        with contextlib.suppress(FileNotFoundError):
            return of_part(part, folder.name)
    try:
        return patient(folder / ROWS, use)
    except FileNotFoundError:
        raise UserError(f"{folder}: no run here ({ROWS} is missing); name a folder that bench wrote") from None


def runs(path: str | os.PathLike[str]) -> list[Path]:
    """Return the sorted paths of runs: `path` itself if it is a run, else all runs under it.

    If there are none, but `path` has the table of a sweep, return the runs that the table names; these are in the
    parent folder of `path`. Raises UserError if no run is found.
    """
    path = Path(path)
    if exists(path):
        return [path]
    folders = {
        p.parent
        for p in path.rglob(ROWS)
        if not any(part.startswith((".", parts.STAGED)) for part in p.relative_to(path).parts)
    } | set(parts.under(path))
    if not folders and (path / SWEEP).is_file():
        names = table(path / SWEEP, pa.schema([("run", pa.string())])).column("run").unique().to_pylist()
        folders = {path.parent / name for name in names if exists(path.parent / name)}
    if not folders:
        raise UserError(f"{path}: no runs here; name a folder that bench wrote (bench compare makes one)")
    return sorted(folders)
