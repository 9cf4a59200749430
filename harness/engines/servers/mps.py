"""NVIDIA's MPS daemon, which lets servers on a card run at the same time, each within its part of the SMs.

The daemon is started for a run, with a separate pipe and log directory, and ends with the run as servers do. A program
that does not find the daemon runs without it and gives no message (nvidia-cuda-mps-control(1)). So each server starts
only after the daemon has answered.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from harness.engines.servers import environments
from harness.engines.servers.process import Process
from harness.policy.types import UserError

ASK = "get_default_active_thread_percentage\n"  # any question that changes nothing
ASK_S, READY_S = 0.1, 10.0


class Mps:
    """An MPS daemon that a run starts and ends."""

    def __init__(self, program: str, folder: Path) -> None:
        pipe, logs = folder / "mps", folder / "mps-log"
        self.env: Mapping[str, str] = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        self.program, self.folders = program, (pipe, logs)
        # Without CUDA_VISIBLE_DEVICES the daemon has all cards, and its clients name them by the usual numbers.
        ours = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self._variables = environments.variables(ours, self.env)
        self.process = Process((program, "-f"), self._variables, folder / "mps.log", "")

    def start(self, timeout_s: float = READY_S) -> None:
        """Start the daemon, and return once it answers. Raises UserError if the daemon does not answer."""
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)
        self.process.start()
        end_s = time.monotonic() + timeout_s
        while not self.answers():
            if not self.process.alive() or time.monotonic() > end_s:
                self.process.stop()
                raise UserError(f"MPS does not start (sharing=turns does without): {self.process.last_lines()}")
            time.sleep(ASK_S)

    def answers(self) -> bool:
        """Tell whether the daemon runs, so that servers that start now will find it."""
        if not self.process.alive():
            return False
        asked = subprocess.run(
            [self.program], input=ASK, env=self._variables, capture_output=True, text=True, check=False, timeout=READY_S
        )
        return asked.returncode == 0 and asked.stdout.strip().replace(".", "", 1).isdecimal()

    def stop(self) -> None:
        """End the daemon; call this after its servers have ended."""
        self.process.stop()
