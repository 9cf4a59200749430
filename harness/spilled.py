"""Arrays that lie in a file without a name: of a week of traffic, memory holds the part that is looked at.

They are NumPy arrays like any others. What lies behind the clock is given back by `release`, and read again where it is
looked at all the same. The files lie in the folder for temporary files (TMPDIR) and go with the last array.
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

MOST_HELD = 400_000  # elements of an array in memory; what has more requests is spilled
PIECE = 65_536  # requests that are taken at a time: a multiple of a page, whatever an element's bytes


def spilled(length: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of zeros that lies in a file. UserError where the folder for temporary files has no room for it.

    The room is taken at once: a disk that is full later would end the process in the middle of a write.
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
    """Return an array of zeros: in memory up to `MOST_HELD` elements, else in a file."""
    return np.zeros(length, dtype) if length <= MOST_HELD else spilled(length, dtype)


def release(*arrays: NDArray[Any] | None) -> None:
    """Give back the memory of arrays in files; nothing is lost, and other arrays stay as they are."""
    for array in arrays:
        if (file := _file(array)) is not None:
            file.madvise(mmap.MADV_DONTNEED)


def pieces(length: int, *arrays: NDArray[Any] | None) -> Iterator[slice]:
    """Yield the pieces of so many elements in order; what was looked at in `arrays` is released behind each."""
    for begin in range(0, length, PIECE):
        yield slice(begin, min(begin + PIECE, length))
        release(*arrays)


def _file(array: Any) -> mmap.mmap | None:
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return array if isinstance(array, mmap.mmap) else None
