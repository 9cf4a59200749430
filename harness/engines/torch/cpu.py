"""A CPU core as a device; see device.py.

The device's memory is a file without a name (memfd), whose size is the device's budget. A range of addresses is first
reserved without memory. Granules of the file are then mapped into the range where they are used. A worker that has a
share of the core sleeps between kernels for the rest.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, float32, frombuffer

from harness.engines.torch import model
from harness.engines.torch.kind import CPU
from harness.engines.torch.model import Pass, Slots, Weights
from harness.engines.torch.wire import Given, Order, Part
from harness.policy.types import MIB

MAP_FIXED, MAP_NORESERVE, MAP_POPULATE = 0x10, 0x4000, 0x8000  # Linux has these; the module mmap names few
RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
NONE, BOTH = 0, mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _mmap(address: int | None, size: int, access: int, flags: int, file: int, offset: int) -> int:
    mapped = _libc.mmap(address, size, access, flags, file, offset)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {size / MIB:.1f} MiB: {os.strerror(error)}")
    return int(mapped)


class Space:
    """A range of addresses, parts of which are mapped to the device's memory."""

    def __init__(self, memory: int, size: int) -> None:
        self._memory, self.size = memory, -(-size // CPU.granule) * CPU.granule
        self._base = _mmap(None, self.size, NONE, RESERVED, -1, 0)

    def map(self, at: int, offset: int, size: int) -> None:
        """Map `size` bytes of the device's memory, from `offset` on, at position `at` of the range."""
        _mmap(self._base + at, size, BOTH, mmap.MAP_SHARED | MAP_FIXED | MAP_POPULATE, self._memory, offset)

    def unmap(self, at: int, size: int) -> None:
        """Unmap `size` bytes of the range, from position `at` on."""
        _mmap(self._base + at, size, NONE, RESERVED | MAP_FIXED, -1, 0)

    def leave(self, size: int) -> None:
        """Unmap the first `size` bytes of the range at once; see device.Space."""
        self.unmap(0, size)

    def tensor(self) -> Tensor:
        """Return the whole range, mapped or not, as one tensor of float32."""
        return frombuffer((ctypes.c_char * self.size).from_address(self._base), dtype=float32)

    def close(self) -> None:
        """Unmap the whole range. Its tensors must not be used afterwards."""
        _libc.munmap(self._base, self.size)


class Core:
    """A CPU core as a device; see Device."""

    place = torch.device("cpu")

    def __init__(self, memory: int) -> None:
        self.memory = memory  # its file descriptor
        self.meanwhile: Callable[[], None] | None = None  # never called: a kernel is over when its call returns

    def space(self, size: int) -> Space:
        """Reserve a range of `size` bytes of addresses; see Device."""
        return Space(self.memory, size)

    def prepare(self, given: Mapping[str, Given], weights: Mapping[str, Weights], kv: Mapping[str, Tensor]) -> None:
        """Do nothing, because the nursery sets torch up before it forks workers; see Device."""

    def lane(self, share: float | None, phase: str) -> AbstractContextManager[None]:  # noqa: ARG002 - the worker sleeps
        """Return a context that does nothing, because a worker with a share of the core sleeps instead; see Device."""
        return nullcontext()

    def wait(self) -> None:
        """Do nothing, because a kernel on a core is done when its call returns; see Device."""

    def contexts(self, parts: Sequence[Part], kv: Tensor) -> Any:
        """Return the block table of a step's decodes, and a mask of the token positions in use; see Attention."""
        return model.block_table(parts, kv)

    def decode_attention(self, kv: Tensor, layer: int, contexts: Any, q: Tensor) -> Tensor:
        """Return decode attention, one query for each context; see Attention."""
        return model.decode_attention(kv, layer, contexts, q)

    def prompt(self, part: Part, kv: Tensor) -> Any:
        """Return a prompt piece and the blocks of its context; see Attention."""
        return part, model.block_ids(part, kv)

    def prompt_attention(self, kv: Tensor, layer: int, prompt: Any, q: Tensor) -> Tensor:
        """Return the causal attention of one prompt piece; see Attention."""
        part, blocks = prompt
        return model.prompt_attention(kv, layer, part, blocks, q)

    def rope_write(self, step: Pass, layer: int, qkv: Tensor) -> None:
        """Return None, because a fused kernel would save nothing on a core; see Device."""

    def graphs(self, order: Order, ids: Sequence[int], weights: Weights, kv: Tensor) -> None:
        """Return None, because kernel launches cost almost nothing on a core, so graphs would not help; see Device."""

    def export(self, *tensors: Tensor) -> Any:
        """Return the tensors as NumPy arrays, which can be sent to another process; see Device."""
        return [tensor.numpy() for tensor in tensors]

    def imported(self, handle: Any) -> list[Tensor]:
        """Return the tensors that another process sent as NumPy arrays; see Device."""
        return [torch.from_numpy(array) for array in handle]

    def export_attention(self, kv: Tensor, slots: Slots, contexts: Any) -> None:
        """Return None, because another process cannot read the KV of this device; see Device."""

    def imported_attention(self, handle: Any) -> None:
        """Return None, so that at each layer the worker of the other device is asked instead; see Device."""
