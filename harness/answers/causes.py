"""Causes of waiting in words: a phrase for a line about many systems, and half a sentence about one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Cause(NamedTuple):
    """A cause of waiting (record.WAITS) in words."""

    phrase: str
    what: str
    excess: str = ""  # of a miss, where that is something else

    @property
    def missed(self) -> str:
        """The part of a miss that it explains: the time beyond what the request takes alone."""
        return self.excess or self.what


CAUSES: Mapping[str, Cause] = {
    "admission": Cause("waiting for admission", "not admitted by the policy, in no batch, while its weights were in"),
    "host": Cause("host", "in the engine's API, before the queue and after the last token"),
    "load": Cause("waiting for weights", "its model's weights were out, or on their way in"),
    "kv": Cause("KV wait", "no KV memory for its prompt"),
    "transfer": Cause("KV transfer", "its KV was on the way"),
    "queue": Cause("queueing for a step", "its lane was closed, full, or in another step"),
    "compute": Cause(
        "running",
        "running, as long as its steps take on GPUs of their own",
        "running longer than alone: batched with others, computed again, or too slow by itself",
    ),
    "time_slice": Cause("others' time slices", "in a step, while other processes had its GPU"),
    "contention": Cause("contention", "running, slowed by work that runs on its GPU at the same time"),
}
