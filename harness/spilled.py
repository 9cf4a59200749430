"""Arrays in a file without a name, so that memory holds only the part of a long trace that is in use.

They are ordinary NumPy arrays over a mapped file. When the run's clock has passed some requests, `release` frees the
memory of their arrays; a later access reads the file again. The files lie in the folder for temporary files (TMPDIR).
Each file is deleted with the last array that uses it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from harness.policy.types import GIB, UserError

MOST_HELD = 400_000  # elements; an array with more lies in a file
PIECE = 65_536  # elements of a piece: whole memory pages, whatever an element's bytes


def spilled(length: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of zeros that lies in a file.

    Raises UserError if the folder for temporary files has no room. The room is allocated at once: a disk that fills up
    later would kill the process in the middle of a write.
    """
    kind = np.dtype(dtype)
    if not length:
        return np.zeros(0, kind)
    with tempfile.TemporaryFile() as file:
        try:
            getattr(os, "posix_fallocate", _sparse)(file.fileno(), 0, length * kind.itemsize)
        except OSError as error:
            raise UserError(
                f"{tempfile.gettempdir()}: {error.strerror}: {length:,} requests take "
                f"{length * kind.itemsize / GIB:.1f} GiB there for a while (TMPDIR names another folder)"
            ) from None
        return np.frombuffer(mmap.mmap(file.fileno(), length * kind.itemsize), kind)


def _sparse(file: int, start: int, length: int) -> None:
    os.truncate(file, start + length)


def like(length: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of zeros: in memory if it has at most `MOST_HELD` elements, else in a file."""
    return np.zeros(length, dtype) if length <= MOST_HELD else spilled(length, dtype)


def release(*arrays: NDArray[Any] | None) -> None:
    """Free the memory of arrays that lie in files. Their values stay in the files; other arrays are not affected."""
    for array in arrays:
        if (file := _file(array)) is not None:
            file.madvise(mmap.MADV_DONTNEED)


def pieces(length: int, *arrays: NDArray[Any] | None) -> Iterator[slice]:
    """Yield slices of `PIECE` elements that cover `length` in order; after each, free the memory of `arrays`."""
    for begin in range(0, length, PIECE):
        yield slice(begin, min(begin + PIECE, length))
        release(*arrays)


def _file(array: Any) -> mmap.mmap | None:
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return array if isinstance(array, mmap.mmap) else None
