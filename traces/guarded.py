"""One-line errors for readers, and checks of a file's kind and of its unpacked size."""

from __future__ import annotations

import csv
import gzip
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import pyarrow as pa

from harness.policy.types import UserError

UNPACKED = 8.0  # GB of an archive, unless an option allows more
MOST_GB: ContextVar[float] = ContextVar("most_gb", default=UNPACKED)
DEFLATE = 1032  # bytes, at most, that a byte of gzip unpacks to
BLOCK = 1 << 20
SAID = 80  # characters of an error of a library
WRONG = (OSError, EOFError, zlib.error, csv.Error, struct.error, pa.ArrowException, TypeError, ValueError, LookupError,
         ArithmeticError, AttributeError, RecursionError, MemoryError, StopIteration)  # fmt: skip


@contextmanager
def reading(path: Path, line: int | None = None) -> Iterator[None]:
    """Turn a file reader's error in the `with` block into a UserError with the file and, if given, the line."""
    where = str(path) if line is None else f"{path}:{line}"
    try:
        yield
    except UserError:
        raise
    except MemoryError:
        raise UserError(f"{where}: more than the memory holds") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None
    except WRONG as error:
        text = next(iter(str(error).splitlines()), "")[:SAID] or type(error).__name__
        raise UserError(f"{where}: not readable: {text}") from None


def regular(path: Path) -> None:
    """Raise UserError for a path that is neither file nor folder, and for a gzip file above `MOST_GB` when unpacked."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if not (path.is_file() or path.is_dir()):
        kind = "a pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"
        raise UserError(f"{path}: {kind}, not a file: write it to one first, as it is read twice")
    if path.is_file():
        with reading(path):
            _unpacks(path, MOST_GB.get())


def _unpacks(path: Path, most_gb: float) -> None:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if not packed or path.stat().st_size * DEFLATE <= most_gb * 1e9:
        return
    size = 0
    with gzip.open(path) as file:
        while block := file.read(BLOCK):
            size += len(block)
            if size > most_gb * 1e9:
                raise UserError(
                    f"{path}: unpacks to more than {most_gb:g} GB (bench trace convert --unpack-gb allows it)"
                )
