"""A log given where a trace is meant: converted once, dealt where that is asked, and kept as a canonical Parquet."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from harness.policy.types import UserError
from traces import deal, readers, schema
from traces.load import log
from traces.records import readable


def meant(text: str, folder: Path, how: deal.Asked | None = None) -> tuple[str, str]:
    """Return the trace that a name or a path means, dealt where that is asked, and a line that says how a log was read.

    A log is converted below `folder`. UserError for what cannot be dealt; a file that is not there is told of later.
    """
    if (path := Path(text)).is_file():
        trace, report = kept(path, folder, how)
        return str(trace), report
    if how is None or path.suffix:
        return text, ""
    if not log(text.partition("+")[0]) or "+models" in text:
        raise UserError(f'--spread splits logs of one stream and files, not "{text}" (bench list traces)')
    return text + str(how), ""


def kept(path: Path, folder: Path, how: deal.Asked | None = None) -> tuple[Path, str]:
    """Return the canonical Parquet of a log below `folder`, and a line that says how it was made.

    Its name has the hash of the log's bytes and of how it is dealt, so that the same log is converted once. A canonical
    Parquet that is not dealt is its own.
    """
    canonical = path.suffix == ".parquet" and not schema.foreign(path)
    if canonical and how is None:
        return path, ""
    told = "" if how is None else str(how)
    with readable(path):
        digest = sha256(f"{schema.file_sha256(path)} {told} {VERSION}".encode()).hexdigest()[:8]
    out = folder / f"{path.name.partition('.')[0]}-{digest}.parquet"
    if not out.is_file():
        rows, report = (schema.read(path), path.name) if canonical else readers.converted(path)
        note = ""
        if how is not None:
            rows, note = deal.dealt(rows, how)
            report = f"{report}; {note}"
        rows = schema.noted(rows, note, said=report)
        folder.mkdir(parents=True, exist_ok=True)
        schema.write(rows, out)
    return out, str(schema.metadata(schema.read(out)).get("said", ""))


VERSION = 1  # of what conversions give: another one converts anew
