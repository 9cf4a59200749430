"""The state diagram of a server, and what a policy sees of each state.

A run that makes another step records it among the faults in its `side.json`; where the environment variable
BENCH_STRICT is set, as in the tests, it raises. `harness/client/states.py` has the diagram of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from harness.client.states import Diagram
from harness.policy.view import Weights

State = Literal[
    "planned", "starting", "ready", "draining", "stopping", "stopped", "falling asleep", "asleep", "waking", "dead"
]

# A server is dead when its process ended by itself, when it does not do what it is ordered to, or answers too late.
SERVER = Diagram(
    "server",
    {
        "planned": ("starting",),
        "starting": ("ready", "starting", "dead"),  # "starting": its port was taken, and it tries another one
        "ready": ("draining", "dead"),
        "draining": ("stopping", "falling asleep", "dead"),  # its last request has ended
        "stopping": ("stopped", "dead"),
        "stopped": (),
        "falling asleep": ("asleep", "dead"),  # it was loaded by way of a sleep
        "asleep": ("waking", "dead"),
        "waking": ("ready", "dead"),
        "dead": (),
    },
)
# What a policy sees of each state (View.weights).
WEIGHTS: Mapping[State, Weights] = {
    "planned": "loading",
    "starting": "loading",
    "waking": "loading",
    "ready": "in",
    "draining": "leaving",
    "stopping": "leaving",
    "falling asleep": "leaving",
    "stopped": "out",
    "asleep": "out",
    "dead": "out",
}
