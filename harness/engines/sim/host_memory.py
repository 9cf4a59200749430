"""The weights in the host memory of a node, where a spec says how much of it they may take (`host_bytes`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from harness.policy.view import Weights


class HostMemory:
    """Models whose weights a node's memory holds: those read last, up to `room_bytes`. Others lie on the node's disk.

    Room is taken when a load is ordered, and models read longest ago make it. A model larger than all of the room never
    enters, and puts no other out.
    """

    def __init__(self, room_bytes: int, sizes: Mapping[str, int], order: Iterable[str], coming: Callable[[int], bool]):
        """Read models in `order`, by their bytes; `coming` tells whether an instance's load is under way, by row."""
        self._room_bytes, self._sizes, self._coming = room_bytes, sizes, coming
        self._readers: dict[str, int | None] = {}  # by model, that read last at the end: who brings it in from disk
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
        """Tell whether the weights that an instance loads are here, and keep them from now on.

        They are not while another load still brings them in. Without a reader they are here at once.
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
        """Forget weights that were to come with a load that never began."""
        if self._readers.get(model) == reader:
            del self._readers[model]
