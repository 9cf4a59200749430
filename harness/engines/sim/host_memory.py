"""Model weights in a node's host memory, for specs that limit the bytes of these weights (`host_bytes`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from harness.policy.view import Weights


class HostMemory:
    """An LRU cache of model weights in one node's host memory, with at most `room_bytes` bytes.

    Weights outside the cache are on the node's disk. A load reserves its host memory when the load is ordered. If
    memory runs short, the least recently read models are evicted. A model larger than `room_bytes` never enters the
    cache and evicts no other model.
    """

    def __init__(self, room_bytes: int, sizes: Mapping[str, int], order: Iterable[str], coming: Callable[[int], bool]):
        """Fill the cache by reading the models of `order` one by one; if they do not all fit, the last ones stay.

        `sizes` gives the bytes of each model's weights. `coming(row)` tells whether the load of the instance in that
        row is queued or under way.
        """
        self._room_bytes, self._sizes, self._coming = room_bytes, sizes, coming
        self._readers: dict[str, int | None] = {}  # a model, last read last, maps to the row that loads it, or None
        for model in order:
            self.read(model)

    @property
    def models(self) -> tuple[str, ...]:
        """The models whose weights are in this memory or are being read into it, least recently read first."""
        return tuple(self._readers)

    def weights(self, model: str) -> Weights:
        """Return the state of a model's weights in this memory: "out", "loading" or "in"."""
        if model not in self._readers:
            return "out"
        reader = self._readers[model]
        return "in" if reader is None or not self._coming(reader) else "loading"

    def read(self, model: str, reader: int | None = None) -> bool:
        """Mark a model's weights as the most recently read; return whether they were in this memory already.

        Missing weights enter the memory and, if it is full, evict the least recently read models. `reader` is the row
        of the instance that loads the weights. Missing weights are "loading" until that instance's load ends, or "in"
        at once if `reader` is None. Weights that an earlier load is still reading from disk are "loading" until the
        earlier load ends. A model larger than the memory does not enter.
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
        """Remove a model from this memory, because its load from disk was cancelled before the load began.

        `reader` is the row of the instance that was to load the model. Do nothing if another load brings the model in.
        """
        if self._readers.get(model) == reader:
            del self._readers[model]
