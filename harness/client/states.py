"""State diagrams: states, the legal steps between them, and the diagram of a request."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

STRICT = "BENCH_STRICT"  # environment variable; where it is set, as in tests, an illegal step raises


class IllegalStepError(AssertionError):
    """The error of a step that a state diagram does not allow."""


class Diagram(NamedTuple):
    """A state diagram: for each state, the states that may follow it."""

    of: str  # the thing
    steps: Mapping[str, Sequence[str]]

    def illegal(self, before: str, after: str, name: object) -> str:
        """Return a text that says why a step is illegal; "" if it is legal.

        Raises IllegalStepError for an illegal step if the environment variable BENCH_STRICT is set.
        """
        if after in self.steps[before]:
            return ""
        wrong = f"{self.of} {name}: no legal step from {before} to {after}"
        if os.environ.get(STRICT):
            raise IllegalStepError(wrong)
        return wrong

    def edges(self) -> Iterator[tuple[str, str]]:
        """Yield the legal steps, as pairs of states."""
        return ((before, after) for before, to in self.steps.items() for after in to)


# The policy may drop a request until it has ended.
REQUEST = Diagram(
    "request",
    {
        "waiting": ("connecting", "sent", "dropped"),  # it leaves: "sent" at once where a connection is idle
        "connecting": ("sent", "failed", "dropped"),
        # "connecting": its idle connection was closed before the server read it; "done": without a token
        "sent": ("streaming", "connecting", "done", "failed", "dropped"),
        "streaming": ("done", "failed", "dropped"),  # since its first token
        "done": (),
        "failed": (),  # no connection, an HTTP error, an error in the stream, a closed connection, or silence
        "dropped": (),
    },
)
