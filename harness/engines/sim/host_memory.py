"""The weights in the host memory of a node, where a spec says how much of it they may take (`host_bytes`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from harness.policy.view import Weights


class HostMemory:
    """Models whose weights a node's memory holds: those read last, up to `room_bytes`. Others lie on the node's disk.

    Room is taken when a load is ordered, and models read longest ago make it. A model larger than all of the room never
    enters, and evicts no other.
    """

    def __init__(self, room_bytes: int, sizes: Mapping[str, int], order: Iterable[str], coming: Callable[[int], bool]):
        """Read the models of `order` one by one, so that the last ones stay if room is short.

        `sizes` has the bytes of each model; `coming` tells whether the load of an instance, given by its row, is under
        way.
        """
        self._room_bytes, self._sizes, self._coming = room_bytes, sizes, coming
        self._readers: dict[str, int | None] = {}  # a model, last read last, maps to the row that loads it, or None
        for model in order:
            self.read(model)

    @property
    def models(self) -> tuple[str, ...]:
        """The models that are in or on their way in, in the order in which they were read last."""
        return tuple(self._readers)

    def weights(self, model: str) -> Weights:
        """Tell how far a model's weights are on their way into this memory."""
        if model not in self._readers:
            return "out"
        reader = self._readers[model]
        return "in" if reader is None or not self._coming(reader) else "loading"

    def read(self, model: str, reader: int | None = None) -> bool:
        """Tell whether a model's weights are in this memory, and keep them in it from now on.

        `reader` is the row of the instance that loads them: they are not in while its load, or an earlier one, still
        brings them from disk. Without a reader they are in at once.
        """
        now = self.weights(model)
        if self._sizes[model] > self._room_bytes:
            return False
        before = self._readers.pop(model, None)
        self._readers[model] = reader if now == "out" else before if now == "loading" else None
        taken = sum(self._sizes[m] for m in self._readers)
        for oldest in self.models:
            if taken <= self._room_bytes:
                break
            taken -= self._sizes[oldest]
            del self._readers[oldest]
        return now == "in"

    def withdrawn(self, model: str, reader: int) -> None:
        """Forget a model that `reader` was to bring in by a load that never began."""
        if self._readers.get(model) == reader:
            del self._readers[model]
