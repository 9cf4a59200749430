"""Servers that we start: what their kinds have in common, whatever the program.

On a host every model of a run is stood in for by the same four layers (`folder.TINY`) with drawn weights: server and
seconds are real, the models are not, and `measured_on` says so. A GPU of the spec is then a budget of host memory for
weights and KV, `pool_bytes` or MEMORY. All share the processors: a server has its part of them in threads, one at
least, and none is pinned. On GPUs models have their own shapes, with drawn weights, and the memory of the card.
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
from harness.engines.servers.fleet import Keep, Seat, Sleep
from harness.engines.servers.process import Process, free_port
from harness.engines.wallclock import NoProfile
from harness.policy.types import MIB, Cluster, Gpu, Inst, Model, Option, Shape, UserError

MEMORY = 512 * MIB  # of a GPU that is a part of a host, unless the spec says otherwise
DRIVER = Path("/dev/nvidiactl")  # is there where a card is


class Started:
    """Servers of one program, in the environment of its name."""

    name: str
    package: str  # that environment's, whose version `measured_on` holds
    can = frozenset({"Load", "Load.way:cold", "Evict", "Limit", "Admit", "Drop", "Run", "view.oracle_tokens"})
    ways = frozenset({"host", "cold"})  # what a start reads is in the host's memory after the first, so they are alike
    sleeps: Mapping[str, Sleep] = {}
    keep: Keep | None = None
    offers: Mapping[str, tuple[Option, ...]] = {"kv": ("paged",), "process": ("gpu", "model")}
    slots = 4  # llama.cpp's own default of --parallel
    block_tokens = 16  # in whole numbers of which KV memory is taken
    element_bytes = 2  # of weights and KV

    def __init__(self, config: Config, priced: Machine, *, on_gpu: bool) -> None:
        self.config, self.priced, self.on_gpu = config, priced, on_gpu
        self.style = STYLES[self.name]
        # Threads of a step wait for each other in loops: with more of them than processors, it takes seconds.
        self.threads = max(1, (os.cpu_count() or 1) // len(config.models))
        self.weights: dict[str, Path] = {}  # by model
        self.cluster = machines.cluster(config, priced=priced) if on_gpu else self._host()
        self.facts: Mapping[str, str] = {self.package: version(self.name, self.package), **self._said()}

    def _host(self) -> Cluster:
        """What policies may know of a host with stand-ins."""
        config, tiny, wide = self.config, folder.TINY, self.element_bytes / shapes.BF16
        token_bytes = round(wide * shapes.kv_token_bytes(tiny))
        sizes = tiny.layers, 1, round(wide * shapes.weight_bytes(tiny)), token_bytes, self.block_tokens * token_bytes
        models = {
            m.name: Model(*sizes, min(tiny.max_tokens, m.shape.max_tokens), m.ttft_slo_s, m.tpot_slo_s)
            for m in config.models
        }
        gpus = tuple(Gpu("cpu", 0, config.pool_bytes or MEMORY, 1, ()) for _ in range(config.gpus))
        profile = machines.profile(config, self.priced) if config.table else NoProfile()
        return Cluster(gpus, models, dict(config.plan), profile, dict(config.homes))

    def _said(self) -> dict[str, str]:
        if self.on_gpu:
            return {"weights": "drawn"}
        return {"every model a": folder.TINY.name, "threads a server": f"{self.threads}, not pinned"}

    def ready(self, at: Path) -> None:  # noqa: ARG002 - models are kept for later runs
        """Write the models, unless they stand in the user's cache; see Kind."""
        self.python = environments.python(self.name)
        for seed, m in enumerate(self.config.models):
            if self.on_gpu and m.tp > 1:
                raise UserError(f"{m.name} takes {m.tp} GPUs: servers of {self.name} have one each here")
            self.weights[m.name] = self.checkpoint(m.shape if self.on_gpu else folder.TINY, cache(), seed)

    def checkpoint(self, shape: Shape, at: Path, seed: int) -> Path:  # noqa: ARG002 - servers draw weights alike
        """The files of a model."""
        return folder.dummy(shape, at)

    def seat(self, inst: Inst, kv_bytes: int, log: Path) -> Seat:
        """See Kind."""
        model, port = self.cluster.models[inst.model], free_port()
        chunk = self.config.chunk_tokens or self.config.prefill_tokens
        serve = commands.Serve(
            inst.model, self.weights[inst.model], port, model.max_tokens, self.batch_cap(inst, kv_bytes), chunk
        )
        command = self.command(serve, inst, kv_bytes)
        env = environments.variables(os.environ, command.env)
        url = f"http://{commands.HOST}:{port}"
        return Seat(Server(url, inst.model), Process(command.argv, env, log, command.ready_url))

    def command(self, serve: commands.Serve, inst: Inst, kv_bytes: int) -> commands.Command:
        """What starts a server."""
        raise NotImplementedError

    def batch_cap(self, inst: Inst, kv_bytes: int) -> int:  # noqa: ARG002 - most preempt where memory runs out
        """Requests that a server steps together at most."""
        return self.config.batch_cap

    def part(self, inst: Inst, kv_bytes: int) -> commands.Gpu:
        """A server's part of its GPU: weights, what its process holds beside them, and KV."""
        assert isinstance(inst.place, tuple)
        taken = self.cluster.models[inst.model].weight_bytes + kv_bytes
        return commands.Gpu(inst.place[0], taken / self.priced.spec.mem_bytes)

    def roots(self) -> list[int]:
        """See Kind: all servers are ours."""
        return []

    def served(self) -> dict[str, str]:
        """See Kind: `measured_on` says it all."""
        return {}


def has_gpu() -> bool:
    """Whether this machine has a card; none is touched."""
    return DRIVER.exists()


def cache() -> Path:
    """Where models are kept from run to run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm-sharing-bench"


def version(environment: str, package: str, root: Path = environments.ROOT) -> str:
    """Which version of a package an environment holds, without starting anything."""
    paths = [str(path) for path in (root / f".venv-{environment}").glob("lib/python*/site-packages")]
    return next((one.version for one in metadata.distributions(name=package, path=paths)), "not installed")
