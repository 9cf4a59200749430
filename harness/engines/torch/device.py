"""A device as its workers see it: address ranges of fixed length, mapped granule by granule to the device's memory.

On a CPU the device's memory is a file without a name (memfd) of its budget's size. A range is reserved without memory;
a granule of the file is mapped into it where it is used, and what is not mapped cannot be read. A granule goes from one
model to another by another mapping, and nothing is copied.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from torch import Tensor, float32, frombuffer

from harness.engines.torch.pages import GRANULE
from harness.policy.types import MIB

MAP_FIXED, MAP_NORESERVE, MAP_POPULATE = 0x10, 0x4000, 0x8000  # of Linux; the module mmap names few
NONE, BOTH = 0, mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _mmap(address: int | None, size: int, access: int, flags: int, file: int, offset: int) -> int:
    mapped = _libc.mmap(address, size, access, flags, file, offset)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {size / MIB:.1f} MiB: {os.strerror(error)}")
    return int(mapped)


class Space:
    """An address range, and what of it is mapped."""

    def __init__(self, memory: int, size: int) -> None:
        self._memory, self.size = memory, -(-size // GRANULE) * GRANULE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._base = _mmap(None, self.size, NONE, flags, -1, 0)

    def map(self, at: int, offset: int, size: int) -> None:
        """Show `size` bytes of the device's memory from `offset` at `at` of the range."""
        _mmap(self._base + at, size, BOTH, mmap.MAP_SHARED | MAP_FIXED | MAP_POPULATE, self._memory, offset)

    def unmap(self, at: int, size: int) -> None:
        """Hide a part of the range."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        _mmap(self._base + at, size, NONE, flags, -1, 0)

    def tensor(self) -> Tensor:
        """Return the range as one tensor of float32, whatever of it is mapped."""
        return frombuffer((ctypes.c_char * self.size).from_address(self._base), dtype=float32)

    def close(self) -> None:
        """Give the range back; its tensors are of no use then."""
        _libc.munmap(self._base, self.size)
