"""Model weights in a node's host memory, if a spec limits the bytes that they may take there (`host_bytes`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from harness.policy.view import Weights


class HostMemory:
    """An LRU cache of models' weights in the host memory of a node; the weights may take up to `room_bytes`.

    All other weights are on the node's disk. A load takes its host memory when it is ordered, and then evicts the
    models that were read longest ago. A model larger than `room_bytes` never enters and evicts no other model.
    """

    def __init__(self, room_bytes: int, sizes: Mapping[str, int], order: Iterable[str], coming: Callable[[int], bool]):
        """Fill the memory by reading the models of `order` one by one; if they do not all fit, the last ones stay.

        `sizes` has the bytes of each model's weights. `coming(row)` tells whether the load of the instance in that row
        is under way.
        """
        self._room_bytes, self._sizes, self._coming = room_bytes, sizes, coming
        self._readers: dict[str, int | None] = {}  # a model, last read last, maps to the row that loads it, or None
        for model in order:
            self.read(model)

    @property
    def models(self) -> tuple[str, ...]:
        """The models whose weights are in this memory or being read into it, the least recently read first."""
        return tuple(self._readers)

    def weights(self, model: str) -> Weights:
        """Return the state of a model's weights in this memory: out, loading or in."""
        if model not in self._readers:
            return "out"
        reader = self._readers[model]
        return "in" if reader is None or not self._coming(reader) else "loading"

    def read(self, model: str, reader: int | None = None) -> bool:
        """Mark a model's weights as the most recently read; return whether they were in this memory already.

        If they were not, they enter it, and the models that were read longest ago are evicted. `reader` is the row of
        the instance that loads the weights; they count as in once this load has ended. If an earlier load is still
        reading them from disk, they count as in once that load ends. Without a reader, weights that were out are in at
        once. A model that is larger than the memory does not enter.
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
        """Remove a model from this memory, since the load that was to read it from disk was cancelled before it began.

        `reader` is the row of the instance of that load. Do nothing if the model does not depend on that load.
        """
        if self._readers.get(model) == reader:
            del self._readers[model]
