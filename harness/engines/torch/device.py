"""A device as a worker uses it: an interface that cpu.py and cuda.py implement.

Workers access the memory of a device through spaces. A space is a range of addresses, in which granules of the memory
are mapped where they are used. A granule passes from one model to another without a copy: it is mapped at another
address. An unmapped address cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.engines.torch.model import Attention, Computed, Remote, Slots, Weights
from harness.engines.torch.wire import Given, Order


class Space(Protocol):
    """A range of addresses, parts of which are mapped to the device's memory."""

    def map(self, at: int, offset: int, size: int) -> None:
        """Map `size` bytes of the device's memory, from `offset` on, at position `at` of the range."""

    def unmap(self, at: int, size: int) -> None:
        """Unmap `size` bytes of the range, from position `at` on."""

    def leave(self, size: int) -> None:
        """Release the first `size` bytes of the range; they may stay mapped until other memory is mapped there."""

    def tensor(self) -> Tensor:
        """Return the whole range, mapped or not, as one flat tensor."""


class UnderWay(Protocol):
    """A step that has begun and may stop after any layer: a model.Pass, or graphs of a device."""

    def run(self, until: int, after_kernel: Callable[[], None], remote: Remote) -> None:
        """Compute the layers before `until` that are not computed yet; see model.Pass."""

    def computed(self, wait: Callable[[], None]) -> Computed:
        """Return the result after the last layer; the function `wait` returns once all launched kernels are done."""

    def kernels_s(self, times: int) -> float | None:
        """Return the mean seconds of the step's kernels over `times` repetitions, back to back.

        Return None if the step does not run as graphs.
        """


class Device(Attention, Protocol):
    """A device as one worker uses it: the operations that differ between a core and a card."""

    place: torch.device
    meanwhile: Callable[[], None] | None  # called again and again while kernels run; None: the worker sleeps

    def space(self, size: int) -> Space:
        """Reserve a range of `size` bytes of addresses."""

    def prepare(self, given: Mapping[str, Given], weights: Mapping[str, Weights], kv: Mapping[str, Tensor]) -> None:
        """Do one-time work before a run starts, so that the first steps do not wait for it."""

    def lane(self, share: float | None, phase: str) -> AbstractContextManager[None]:
        """Return a context in which kernels run on a share of the device.

        At its end, the context waits for these kernels.
        """

    def wait(self) -> None:
        """Wait until all launched kernels are done; until then, call the function `meanwhile` repeatedly."""

    def graphs(self, order: Order, ids: Sequence[int], weights: Weights, kv: Tensor) -> UnderWay | None:
        """Begin a step as graphs, and return it; return None if its kernels must be launched one by one."""

    def export(self, *tensors: Tensor) -> Any:
        """Return a handle with which another worker of the engine imports these tensors."""

    def imported(self, handle: Any) -> list[Tensor]:
        """Return the tensors that another worker exported under a handle."""

    def export_attention(self, kv: Tensor, slots: Slots, contexts: Any) -> Any:
        """Return a handle to a callable that computes attention over this KV, for one step.

        Another worker imports the callable by this handle.
        """

    def imported_attention(self, handle: Any) -> Callable[[int, Tensor, Tensor, Tensor], Tensor] | None:
        """Return the callable that another worker exported under a handle.

        It takes layer, query, key and value, and returns the attention. Return None if there is no such callable. The
        worker of the other device must then be asked at each layer.
        """
