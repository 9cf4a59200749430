"""llama.cpp's server, a process a model: `Load` starts it, `Evict` stops it.

Every model of a run is stood in for by the same four layers (`folder.TINY`) with random weights of its own: server and
seconds are real, the models are not, and `measured_on` says so. A GPU of the spec is a budget of host memory for
weights and KV, `pool_bytes` or MEMORY. All share the processors: a server has its part of them in threads, one at
least, and none is pinned. A server takes its KV memory (`n_ctx`) when it starts: what a `Limit` allows, which must be
said before, else that of SLOTS longest requests, or of as many as there is room for. As many requests as longest ones
have room step together, so none runs out of memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from harness.client.body import STYLES, Server
from harness.engines import machine as machines
from harness.engines.costs import shapes
from harness.engines.machine import Config, Machine
from harness.engines.servers import commands, environments, folder
from harness.engines.servers.engine import Servers
from harness.engines.servers.fleet import Seat
from harness.engines.servers.process import Process, free_port
from harness.engines.wallclock import NoProfile
from harness.policy.types import MIB, Cluster, Gpu, Inst, Model, Option

MEMORY = 512 * MIB  # of a GPU, unless the spec says otherwise
SLOTS = 4  # llama.cpp's own default of --parallel
BLOCK_TOKENS = 256  # of which llama.cpp's contexts are multiples
ENVIRONMENT, PACKAGE = "llamacpp", "xllamacpp"


class LlamaCpp:
    """Servers of llama.cpp."""

    name = "llamacpp"
    can = frozenset({"Load", "Load.way:cold", "Evict", "Limit", "Admit", "Drop", "Run", "view.oracle_tokens"})
    ways = frozenset({"host", "cold"})  # the file is in the host's memory after its first start, so both are the same
    offers: Mapping[str, tuple[Option, ...]] = {"kv": ("paged",), "process": ("gpu", "model")}
    slots = SLOTS
    style = STYLES["llamacpp"]

    def __init__(self, config: Config, priced: Machine) -> None:
        # Threads of llama.cpp wait for each other in loops: with more of them than processors, steps take seconds.
        self.config, self.threads = config, max(1, (os.cpu_count() or 1) // len(config.models))
        token_bytes, weight_bytes = shapes.kv_token_bytes(folder.TINY, 1), shapes.weight_bytes(folder.TINY, 1)
        sizes = folder.TINY.layers, 1, weight_bytes, token_bytes, BLOCK_TOKENS * token_bytes
        longest = folder.TINY.max_tokens
        models = {
            m.name: Model(*sizes, min(longest, m.shape.max_tokens), m.ttft_slo_s, m.tpot_slo_s) for m in config.models
        }
        gpus = tuple(Gpu("cpu", 0, config.pool_bytes or MEMORY, 1, ()) for _ in range(config.gpus))
        profile = machines.profile(config, priced) if config.table else NoProfile()
        self.cluster = Cluster(gpus, models, dict(config.plan), profile, dict(config.homes))
        said = {PACKAGE: version(ENVIRONMENT, PACKAGE), "every model a": folder.TINY.name}
        self.facts: Mapping[str, str] = {**said, "threads a server": f"{self.threads}, not pinned"}
        self.weights: dict[str, Path] = {}  # by model

    def ready(self, at: Path) -> None:  # noqa: ARG002 - models are kept for later runs
        """Write the models, unless they stand in the user's cache; see Kind."""
        self.python = environments.python(ENVIRONMENT)
        named = enumerate(m.name for m in self.config.models)
        self.weights = {m: folder.weights(folder.TINY, cache(), self.python, seed) for seed, m in named}

    def seat(self, inst: Inst, kv_bytes: int, log: Path) -> Seat:
        """See Kind."""
        model, config, port = self.cluster.models[inst.model], self.config, free_port()
        context = kv_bytes // model.kv_token_bytes
        slots = max(1, min(context // model.max_tokens, config.batch_cap))
        chunk = config.chunk_tokens or config.prefill_tokens
        serve = commands.Serve(inst.model, self.weights[inst.model], port, model.max_tokens, slots, chunk)
        command = commands.llamacpp(self.python, serve, commands.Cpu(self.threads, kv_bytes), context=context)
        env = environments.variables(os.environ, command.env)
        url = f"http://{commands.HOST}:{port}"
        return Seat(Server(url, inst.model), Process(command.argv, env, log, command.ready_url))

    def roots(self) -> list[int]:
        """See Kind: all servers are ours."""
        return []

    def served(self) -> dict[str, str]:
        """See Kind: `measured_on` says it all."""
        return {}


def cache() -> Path:
    """Where models are kept from run to run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm-sharing-bench"


def version(environment: str, package: str, root: Path = environments.ROOT) -> str:
    """Which version of a package an environment holds, without starting anything."""
    paths = [str(path) for path in (root / f".venv-{environment}").glob("lib/python*/site-packages")]
    return next((one.version for one in metadata.distributions(name=package, path=paths)), "not installed")


def make(config: Config, options: Mapping[str, Option], machine: Machine) -> Servers:  # noqa: ARG001
    """The engine of this file; see harness/loop/engine.py."""
    return Servers(config, LlamaCpp(config, machine))
