"""Store things that were made of some inputs, and use them again as long as these inputs stay the same.

A stored thing is a file at a path, whole or absent. Its inputs are among its facts, or their digest is in its name. A
thing that is absent, cut, damaged or made of other inputs is made again. `harness/rows/stored.py` lists the kinds of
files that the bench stores, besides its rows.

Parquet files are sealed. `seal` writes between the last page and the footer, where readers of Parquet never look. It
writes a mark, the SHA-256 of all bytes before the mark, and the SHA-256 of the footer. So a flipped bit is detected
anywhere. Page checksums would not cover the headers of pages and the footer, which holds the facts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

MARK = b"benchSHA"
DIGEST = sha256().digest_size
SEAL = len(MARK) + 2 * DIGEST
BLOCK = 1 << 20  # bytes that are read at a time: a mapped file would count as this process's memory
TAIL = 8  # the length of the footer in 4 bytes, and PAR1

T = TypeVar("T")
Facts = Mapping[str, Any]


def digest(*inputs: object) -> str:
    """Return the SHA-256 of the inputs' texts, which goes into the name of a stored thing."""
    return sha256(" ".join(map(str, inputs)).encode()).hexdigest()


def named(path: Path) -> Facts:
    """Return empty facts, for a kind of file whose name alone identifies its inputs.

    Raises OSError if the file does not exist.
    """
    path.stat()
    return {}


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of stored thing, with functions to read and write it.

    `write(path, thing, inputs)` stores the whole thing at `path`, with its inputs among its facts. `read` and `facts`
    raise one of the errors in `lost` if the thing is missing, cut or damaged.
    """

    read: Callable[[Path], T]
    write: Callable[[Path, T, Facts], object]
    facts: Callable[[Path], Facts] = named
    lost: tuple[type[Exception], ...] = (OSError,)

    def current(self, path: Path, inputs: Facts, lost: Callable[[], object] = lambda: None) -> Facts | None:
        """Return the facts of the thing at `path` if it was made of these inputs, else None; inputs are JSON values.

        If the thing cannot be read, `lost` is called.
        """
        try:
            facts = self.facts(path)
            return facts if _text({key: facts[key] for key in inputs if key in facts}) == _text(inputs) else None
        except self.lost:
            lost()
            return None

    def kept(self, path: Path, inputs: Facts, make: Callable[[], T]) -> T:
        """Return the thing at `path` if it was made of these inputs; else make it, and write it there."""
        if self.current(path, inputs) is not None:
            with suppress(*self.lost):
                return self.read(path)
        thing = make()
        self.write(path, thing, inputs)
        return thing


def _text(facts: Facts) -> str:
    return json.dumps(dict(facts), sort_keys=True)


def seal(file: IO[bytes]) -> None:
    """Write the seal into a Parquet file that was just written. The file must also be open for reading."""
    file.seek(-TAIL, os.SEEK_END)
    start = file.seek(-TAIL - int.from_bytes(file.read(4), "little"), os.SEEK_END)
    footer = file.read()
    file.flush()
    body = _digest(file, start)
    file.seek(start)
    file.write(MARK + body + sha256(footer).digest() + footer)


def whole(path: Path, *, rows: bool) -> bool:
    """Tell whether a Parquet file is unchanged since it was sealed; True for a file without a seal.

    The footer is checked; with `rows`, all bytes before it are checked as well. Raises OSError if the file cannot be
    read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < TAIL + SEAL:
            return True
        file.seek(-TAIL, os.SEEK_END)
        start = size - TAIL - SEAL - int.from_bytes(file.read(4), "little")
        if start < 0:
            return True
        file.seek(start)
        digests, footer = file.read(SEAL), file.read()
        if not digests.startswith(MARK):
            return True
        body, tail = digests[len(MARK) : -DIGEST], digests[-DIGEST:]
        return sha256(footer).digest() == tail and (not rows or _digest(file, start) == body)


def _digest(file: IO[bytes], size: int) -> bytes:
    """Return the SHA-256 digest of the first `size` bytes of a file."""
    digest = sha256()
    file.seek(0)
    while size > 0:
        block = file.read(min(size, BLOCK))
        if not block:
            break
        digest.update(block)
        size -= len(block)
    return digest.digest()
