"""An engine whose servers are processes of stub.py, one a model and place: for `--engine ./stubbed.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.client.body import Server, Style
from harness.engines import commands
from harness.engines.machine import Config, Machine
from harness.engines.servers.engine import Servers
from harness.engines.servers.fleet import Kind, Seat, Sleep
from harness.engines.servers.process import Process, free_port
from harness.engines.wallclock import NoProfile
from harness.loop.system import ROOT
from harness.policy.types import Cluster, Gpu, Inst, Model, Option

WEIGHT_BYTES, TOKEN_BYTES, PAGE_BYTES, TOKENS = 1 << 20, 1 << 10, 1 << 18, 2048
SLEEPS = {"sleep": Sleep((commands.vllm_sleep(1),), commands.vllm_wake(1))}
NO_WAKE = {"sleep": Sleep((commands.vllm_sleep(1),), commands.vllm_wake(2))}  # the stub refuses its tags


class Plain(Kind):
    """The part that kinds of servers of tests share: they lack nothing, and start nothing beside their servers."""

    lacks = ""
    style = Style()
    facts: Mapping[str, str] = {"servers": "tests.harness.engines.servers.stub"}
    offers: Mapping[str, tuple[Option, ...]] = {"kv": ("paged",), "process": ("gpu", "model", "kept")}

    def ready(self, folder: Path) -> None:
        """See Kind."""
        assert folder.is_dir()


@dataclass
class Stubbed(Plain):
    """Servers that take the memory that they say, and compute nothing."""

    name = "stubbed"
    can = frozenset(
        {"Load", "Load.way:cold", "Load.way:sleep", "Evict", "Limit", "Admit", "Drop", "Run", "view.oracle_tokens"}
    )
    ways = frozenset({"host", "cold", "sleep"})
    slots = 4
    config: Config
    options: tuple[str, ...] = ("--ttft-ms", "4", "--itl-ms", "1")
    sleeps: Mapping[str, Sleep] = field(default_factory=lambda: SLEEPS)
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Have room for every model with all of its slots."""
        model = Model(4, 1, WEIGHT_BYTES, TOKEN_BYTES, PAGE_BYTES, TOKENS, float("inf"), float("inf"))
        room = self.config.pool_bytes or len(self.config.models) * (WEIGHT_BYTES + 10 * TOKENS * TOKEN_BYTES)
        gpus = tuple(Gpu("mock", 0, room, 1, ()) for _ in range(self.config.gpus))
        models = {m.name: model for m in self.config.models}
        self.cluster = Cluster(gpus, models, dict(self.config.plan), NoProfile())

    def seat(self, inst: Inst, kv_bytes: int, log: Path, sms: int | None = None) -> Seat:
        """See Kind."""
        port, tokens = free_port(), kv_bytes // TOKEN_BYTES
        command = (sys.executable, "-m", "tests.harness.engines.servers.stub", "--models", inst.model, *self.options)
        command += ("--port", str(port), "--max-model-len", str(max(2, tokens)), "--with-parent")
        env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        url = f"http://127.0.0.1:{port}"
        process = Process(command, env, log, f"{url}/health")
        self.processes.append(process)
        return Seat(Server(url, inst.model), process)


def make(config: Config, options: Mapping[str, Option], machine: Machine) -> Servers:
    """Return the engine of this file."""
    return Servers(config, Stubbed(config))
