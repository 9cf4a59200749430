"""An engine for tests: the simulator with the manners of a wall clock, writing down what happens to it.

DIARY names the file, a line for each "made", "ready", "begin" and "closed" with the process. DIARY_HOST is the machine
that it was measured on. DIARY_END ends the run when it begins: error, interrupt (Ctrl-C) or terminate (SIGTERM).
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from harness.engines.machine import Config, Machine
from harness.engines.sim.engine import Sim
from harness.policy.events import Event
from harness.policy.types import Fidelity, Option

SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}


def note(what: str) -> None:
    with Path(os.environ["DIARY"]).open("a") as out:
        out.write(f"{what} {os.getpid()}\n")


class Diary(Sim):
    fidelity: Fidelity = "emulated"
    wall_clock = exclusive = True

    def ready(self) -> None:
        note("ready")

    def begin(self, hears: frozenset[type], oracle: bool, end_s: float = math.inf) -> None:
        note("begin")
        super().begin(hears, oracle, end_s)

    def poll(self, until_s: float) -> Event | None:
        end = os.environ.get("DIARY_END")
        if end:
            if end == "error":
                raise ValueError("the engine broke")
            os.kill(os.getpid(), SIGNALS[end])
        return super().poll(until_s)

    def close(self) -> None:
        note("closed")


def make(config: Config, options: Mapping[str, Option], machine: Machine) -> Diary:
    note("made")
    engine = Diary(config, options, machine)
    engine.can -= {"Limit"}
    engine.measured_on = {"host": os.environ.get("DIARY_HOST", "here"), "cpu": "of a test"}
    return engine
