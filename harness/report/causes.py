"""What a request waits for, in words: a phrase for a line of many systems, and a sentence's half for one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Cause(NamedTuple):
    """A cause of waiting (record.WAITS) in words."""

    phrase: str
    what: str


CAUSES: Mapping[str, Cause] = {
    "held": Cause("held back by the policy", "held back by the policy, in no batch, while its model's weights were in"),
    "host": Cause("host", "in the engine's API, before the queue and after the last token"),
    "load": Cause("waiting for weights", "its model's weights were out, or on their way in"),
    "kv": Cause("KV wait", "no KV memory for its prompt"),
    "move": Cause("KV move", "its KV was on the way"),
    "turn": Cause("waiting for a step", "its lane was closed, full, or in another step"),
    "solo": Cause("running", "running, as long as it would have alone"),
    "slow": Cause("interference", "running, slowed by others on its GPU"),
}
