"""State diagrams: states, the legal steps between them, and the diagram of a request."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

STRICT = "BENCH_STRICT"  # environment variable; where it is set, as in tests, an illegal step raises


class IllegalStepError(AssertionError):
    """A step that a diagram does not have."""


class Diagram(NamedTuple):
    """A state diagram: for each state, the states that may follow it, each with the cause of the step."""

    of: str  # the thing
    steps: Mapping[str, Mapping[str, str]]

    def illegal(self, before: str, after: str, name: object) -> str:
        """Say what is wrong with a step; "" where it is legal.

        Raises IllegalStepError for an illegal one where the environment variable BENCH_STRICT is set.
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


ANEW = "the policy sends it again"

REQUEST = Diagram(
    "request",
    {
        "waiting": {
            "connecting": "it leaves, and no open connection is idle",
            "sent": "it leaves on an idle connection",
            "dropped": "the policy drops it",
        },
        "connecting": {
            "sent": "its connection is open",
            "failed": "no connection comes about",
            "dropped": "the policy drops it",
            "waiting": ANEW,
        },
        "sent": {
            "streaming": "its first token comes",
            "connecting": "its idle connection was closed before the server read it",
            "done": "its response ends without a token",
            "failed": "an HTTP error, a closed connection, or silence",
            "dropped": "the policy drops it",
            "waiting": ANEW,
        },
        "streaming": {
            "done": "its response ends",
            "failed": "an error in the stream, a closed connection, or silence",
            "dropped": "the policy drops it",
            "waiting": ANEW,
        },
        "done": {},
        "failed": {"waiting": ANEW},
        "dropped": {"waiting": ANEW},
    },
)
