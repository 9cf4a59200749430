"""Conversion of a user's log for use as a trace: its streams are changed and split, and the Parquet is kept."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from harness.policy.types import UserError
from harness.store import Kind, digest, seal, whole
from traces import chosen, deal, readers, schema
from traces.guarded import reading, regular
from traces.load import log

if TYPE_CHECKING:
    import pyarrow as pa


def meant(
    text: str, folder: Path, how: deal.Asked | None = None, streams: chosen.Chosen | None = None
) -> tuple[str, str]:
    """Return the name or path of the trace to load, and a line that says how a log was converted.

    If `text` is the path of a file, the log is converted below `folder`; `streams` changes its streams, `how` splits
    them. Otherwise `text` is a trace's name, `how` is added to it, and the line is "". Raises UserError for a trace
    that cannot be split, or whose streams cannot be changed. A missing file is reported later, when the trace is
    loaded.
    """
    if (path := Path(text)).is_file():
        trace, report = canonical(path, folder, how, streams)
        return str(trace), report
    if streams is not None:
        raise UserError(f'--rename and --drop-streams choose streams of a file, not of "{text}" (bench list traces)')
    if how is None or path.suffix:
        return text, ""
    if not log(text.partition("+")[0]) or "+models" in text:
        raise UserError(f'--spread splits logs of one stream and files, not "{text}" (bench list traces)')
    return text + str(how), ""


def canonical(
    path: Path, folder: Path, how: deal.Asked | None = None, streams: chosen.Chosen | None = None
) -> tuple[Path, str]:
    """Convert a log to a canonical Parquet below `folder`; return its path and a line that says how it was made.

    The new file's name has a hash of the log's bytes, of `streams` and of `how`. So a log is converted only once for
    the same changes. A canonical Parquet is returned as it is if no change is asked for.
    """
    already = path.suffix == ".parquet" and not schema.foreign(path)
    asked = [way for way in (streams, how) if way is not None]
    if already and not asked:
        return path, ""
    regular(path)
    with reading(path):
        name = digest(schema.file_sha256(path), "".join(map(str, asked)), VERSION)[:8]

    def make() -> pa.Table:
        made = (schema.read(path), path.name) if already else readers.converted(path)
        rows, report = changed(*made, how, streams)
        return schema.noted(rows, "", said=report)

    out = folder / f"{path.name.partition('.')[0]}-{name}.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    return out, str(schema.metadata(LOGS.kept(out, {}, make)).get("said", ""))


def changed(rows: pa.Table, report: str, how: deal.Asked | None, streams: chosen.Chosen | None) -> tuple[pa.Table, str]:
    """Change a table's streams and split them as asked; return the table, and `report` with the changes appended."""
    if streams is not None:
        rows, note = chosen.of(rows, streams)
        report += f"; {note}" if note else ""
    if how is not None:
        rows, note = deal.dealt(rows, how)
        rows, report = schema.noted(rows, note), f"{report}; {note}"
    return rows, report


VERSION = 2  # a change of it makes logs be converted again


def _read(path: Path) -> pa.Table:
    if not whole(path, rows=True):
        raise UserError(f"{path}: damaged")
    return schema.read(path)


def _write(path: Path, rows: pa.Table, _: object) -> None:
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    schema.write(rows, part)
    with part.open("r+b") as file:
        seal(file)
    part.replace(path)


LOGS = Kind(_read, _write, lost=(OSError, UserError))
