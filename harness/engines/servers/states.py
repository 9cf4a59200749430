"""The state diagram of a server, and the state of its weights that policies see.

If a run makes a step that the diagram does not allow, the run's `side.json` lists the step among the faults. If the
environment variable BENCH_STRICT is set, as in the tests, the step raises an error. `harness/client/states.py` has the
diagram of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from harness.client.states import Diagram
from harness.policy.view import Weights

State = Literal[
    "planned", "starting", "ready", "draining", "stopping", "stopped", "falling asleep", "asleep", "waking", "dead"
]

# What a policy sees of each state (View.weights), and the states that may follow it. A server is dead when its process
# ended by itself, when it does not do what it is ordered to, or answers too late.
STATES: Mapping[State, tuple[Weights, tuple[State, ...]]] = {
    "planned": ("loading", ("starting",)),
    "starting": ("loading", ("ready", "starting", "dead")),  # "starting": its port was taken, and it tries another one
    "ready": ("in", ("draining", "dead")),
    "draining": ("leaving", ("stopping", "falling asleep", "dead")),  # its last request has ended
    "stopping": ("leaving", ("stopped", "dead")),
    "stopped": ("out", ()),
    "falling asleep": ("leaving", ("asleep", "dead")),  # it was loaded by way of a sleep
    "asleep": ("out", ("waking", "dead")),
    "waking": ("loading", ("ready", "dead")),
    "dead": ("out", ()),
}
SERVER = Diagram("server", {state: after for state, (_, after) in STATES.items()})
