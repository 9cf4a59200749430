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

SERVER = Diagram(
    "server",
    {
        "planned": {"starting": "the run begins; during a run, at once"},
        "starting": {
            "ready": "it answers",
            "starting": "its port was taken: another port, up to three tries",
            "dead": "its process ended, or it did not answer in time",
        },
        "ready": {"draining": "`Evict`", "dead": "its process ended, or it refused a memory limit"},
        "draining": {
            "stopping": "its last request has ended",
            "falling asleep": "its last request has ended, and it was loaded by way of a sleep",
            "dead": "its process ended, or it refused a memory limit",
        },
        "stopping": {"stopped": "its process has ended", "dead": "it survives SIGKILL, or it refused a memory limit"},
        "stopped": {},
        "falling asleep": {"asleep": "it says so", "dead": "it does not answer"},
        "asleep": {"waking": "`Load`", "dead": "its process ended"},
        "waking": {"ready": "it says so", "dead": "it does not answer"},
        "dead": {},
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
