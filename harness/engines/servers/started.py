"""Servers that we start: the part that is common to all their kinds.

On a host without cards, weights are drawn at random, and a network of four layers (`folder.TINY`) replaces a model that
is too large. Servers and seconds are then real, but models are not, as `measured_on` states. A GPU of the spec is then
a budget of host memory for weights and KV: `pool_bytes`, or MEMORY. The servers share the processors: each has an equal
number of threads, at least one, and no thread is pinned.

On cards (`host.Card`) models have their real shapes and the memory of the card. Their weights are drawn at random,
unless the environment variable MODELS_DIR names a folder that has the checkpoint of every model's shape.

The options of a system ask for ways of sharing cards. They are offered as far as the host supports them:

    kv=paged         KV memory is a fixed part of the card, from the server's start on
    kv=elastic       kvcached: KV memory is taken on demand, up to a Limit, which may change while the server runs
    sharing=fluid    with MPS: servers run at the same time; `Run.sms` restricts a server to a part of the SMs, which
                     is the same from the server's start to its end
    sharing=turns    without MPS: the driver gives the card to one server after the other

A server's chunk size is fixed for its life: it is that of the spec (`chunk_tokens`), never of a `Run`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from harness.client.body import Server, Style
from harness.engines import commands
from harness.engines import machine as machines
from harness.engines.costs import shapes
from harness.engines.machine import Config, Machine
from harness.engines.servers import environments, folder, host, kvcached
from harness.engines.servers.fleet import Kind, Seat, Sleep
from harness.engines.servers.host import Card
from harness.engines.servers.mps import Mps
from harness.engines.servers.process import Process, free_port
from harness.engines.wallclock import NoProfile
from harness.policy.types import MIB, Cluster, Gpu, Inst, Model, Option, Shape, Unsupported, UserError

MEMORY = 512 * MIB  # bytes of a GPU that is part of a host, unless the spec sets it
MODELS = "MODELS_DIR"


class Started(Kind):
    """Servers of one program, in the Python environment that has the program's name."""

    name: str
    package: str  # `measured_on` holds its version
    style: Style
    can = frozenset({"Load", "Load.way:cold", "Evict", "Limit", "Admit", "Drop", "Run", "view.oracle_tokens"})
    ways = frozenset({"host", "cold"})  # alike, as what a start reads is in the host's memory after the first
    card_only = ""  # what it needs, if it does not serve on a host without a card
    offers: Mapping[str, tuple[Option, ...]] = {"kv": ("paged",), "process": ("gpu", "model")}
    naps: Mapping[str, Sleep] = {}  # `sleeps` of a card, by way
    slots = 4  # llama.cpp's own default of --parallel
    block_tokens = 16  # tokens in a block of KV memory
    element_bytes = 2  # bytes of a weight or a number of KV

    def __init__(
        self, config: Config, priced: Machine, card: Card | None = None, options: Mapping[str, Option] | None = None
    ) -> None:
        self.config, self.priced, self.card = config, priced, card
        self.lacks = (card is None and self.card_only) or environments.lacking(self.name)
        # Threads of a step wait for each other in loops: with more of them than processors, it takes seconds.
        self.threads = max(1, (os.cpu_count() or 1) // len(config.models))
        self.weights: dict[str, Path] = {}  # keyed by model
        self.files = real(config) if card is not None else {}
        self.at_once = False
        self.apart = card is not None
        self.mps: Mps | None = None
        if card is None:
            self.cluster = self._host()
        else:
            self._have(card, options or {})
            self.cluster = machines.cluster(config, self.elastic, priced)
        self.facts: Mapping[str, str] = {
            self.package: host.version(self.name, self.package) or "not installed",
            **self._model_facts(),
        }

    def _have(self, card: Card, options: Mapping[str, Option]) -> None:
        """Set the ways of sharing that the card offers, and choose those for which the system asks."""
        self.sleeps = {way: nap for way, nap in self.naps.items() if self.files or not nap.rereads}
        self.can = self.can | {f"Load.way:{way}" for way in self.sleeps} | ({"Run.sms"} if card.mps else set())
        self.ways = self.ways | set(self.sleeps)
        self.offers = {
            "kv": ("paged", "elastic") if card.kvcached else ("paged",),
            "process": ("gpu", "model", "kept"),
            "sharing": ("turns", "fluid") if card.mps else ("turns",),
        }
        self.slots = self.config.batch_cap  # for all that may be in a batch, as far as there is room
        preferred = options.get("sharing", "fluid" if card.mps else "turns")
        asked = preferred if self.config.sharing == "own" else self.config.sharing
        self.at_once, self.elastic = asked == "fluid", card.kvcached and options.get("kv") == "elastic"

    def _host(self) -> Cluster:
        """Return the devices and models that policies see on a host without cards.

        A network of four layers stands in for a model that is too large.
        """
        config, wide = self.config, self.element_bytes / shapes.BF16
        models = dict[str, Model]()
        for m in config.models:
            shape = folder.on_host(m.shape)
            token_bytes = round(wide * shapes.kv_token_bytes(shape))
            weight_bytes, page_bytes = round(wide * shapes.weight_bytes(shape)), self.block_tokens * token_bytes
            longest = min(shape.max_tokens, m.shape.max_tokens)
            models[m.name] = Model(
                shape.layers, 1, weight_bytes, token_bytes, page_bytes, longest, m.ttft_slo_s, m.tpot_slo_s
            )
        gpus = tuple(Gpu("cpu", 0, config.pool_bytes or MEMORY, 1, ()) for _ in range(config.gpus))
        profile = machines.profile(config, self.priced) if config.table else NoProfile()
        return Cluster(gpus, models, dict(config.plan), profile, dict(config.homes))

    def _model_facts(self) -> dict[str, str]:
        if self.card is not None:
            return {"weights": "read" if self.files else "drawn"}
        large = sorted({m.shape.name for m in self.config.models if folder.on_host(m.shape) is not m.shape})
        instead = {f"{folder.TINY.name} instead of": ", ".join(large)} if large else {}
        return {"weights": "drawn", **instead, "threads a server": f"{self.threads}, not pinned"}

    def ready(self, at: Path) -> None:
        """Write the models that the user's cache lacks, and start MPS if servers share a GPU through it; see Kind."""
        if self.lacks:
            raise UserError(f"{self.name} needs {self.lacks}")
        self.python = environments.python(self.name)
        if self.card is not None and self.config.gpus > self.card.gpus:
            raise Unsupported(f"{self.config.gpus} GPUs, this host has {self.card.gpus}")
        for seed, m in enumerate(self.config.models):
            if self.card is not None and m.tp > 1:
                raise UserError(f"{m.name} takes {m.tp} GPUs: servers of {self.name} have one each here")
            shape = m.shape if self.card is not None else folder.on_host(m.shape)
            self.weights[m.name] = self.files.get(m.name) or self.checkpoint(shape, cache(), seed)
        if self.card is not None and self.at_once:
            if self.card.mps is None:
                raise UserError(f"sharing=fluid needs MPS, and there is no {host.MPS} here")
            self.mps = Mps(self.card.mps, at)
            self.mps.start()

    def close(self) -> None:
        """End MPS, after the servers have ended; see Kind."""
        mps, self.mps = self.mps, None
        if mps is not None:
            mps.stop()

    def checkpoint(self, shape: Shape, at: Path, seed: int) -> Path:  # noqa: ARG002 - servers draw weights alike
        """Return the folder or file of a model's checkpoint; the first call writes it."""
        return folder.dummy(shape, at)

    def seat(self, inst: Inst, kv_bytes: int, log: Path, sms: int | None = None) -> Seat:
        """Return the address of an instance's server, and the server's process, which is not started yet; see Kind."""
        model, port = self.cluster.models[inst.model], free_port()
        chunk = self.config.chunk_tokens or self.config.prefill_tokens
        serve = commands.Serve(
            inst.model,
            self.weights[inst.model],
            port,
            model.max_tokens,
            self.batch_cap(inst, kv_bytes),
            chunk,
            drawn=not self.files,
        )
        if self.mps is not None and not self.mps.answers():
            raise UserError("MPS has ended: a server would run without it")
        command = self.command(serve, inst, kv_bytes, sms)
        shared = self.mps.env if self.mps is not None else {}
        env = environments.variables(os.environ, {**command.env, **shared})
        url = f"http://{commands.HOST}:{port}"
        return Seat(Server(url, inst.model), Process(command.argv, env, log, command.ready_url))

    def command(self, serve: commands.Serve, inst: Inst, kv_bytes: int, sms: int | None) -> commands.Command:
        """Return the command that starts a server."""
        raise NotImplementedError

    def batch_cap(self, inst: Inst, kv_bytes: int) -> int:  # noqa: ARG002 - most preempt where memory runs out
        """Return the largest number of requests that a server batches in one step."""
        return self.config.batch_cap

    def part(self, inst: Inst, kv_bytes: int, sms: int | None) -> commands.Gpu:
        """Return a server's part of its GPU: shares of the memory and of the SMs, and the KV bytes.

        With elastic memory, each server's share is all memory of the card that engines may use.
        """
        assert isinstance(inst.place, tuple)
        (index,) = inst.place
        taken = self.cluster.models[inst.model].weight_bytes + kv_bytes
        fraction = self.config.mem_fraction if self.elastic else taken / self.priced.spec.mem_bytes
        # The driver rounds a percentage down to whole SMs, or to whole groups of them.
        percent = None if sms is None else -(-100 * sms // self.cluster.gpus[index].sms)
        account, pool = (self.account(inst), None) if self.elastic else (None, kv_bytes)
        return commands.Gpu(index, fraction, percent, account, pool, self.card is not None and self.card.kvcached)

    def account(self, inst: Inst) -> str:
        """Return the name of a server's account in kvcached, which is unique on this host."""
        assert isinstance(inst.place, tuple)
        k = next(k for k, m in enumerate(self.config.models) if m.name == inst.model)
        return f"bench-{os.getpid()}-{k}-{'-'.join(map(str, inst.place))}"

    def resize(self, inst: Inst, kv_bytes: int) -> None:
        """Limit the KV memory of an instance's server if KV memory is elastic; see Kind."""
        if self.elastic:
            kvcached.limit(self.account(inst), kv_bytes)

    def served(self) -> dict[str, str]:
        """Return, for each model, a text that says how its server shares the card; see Kind.

        The mapping is empty on a host without cards, for which `measured_on` has these facts.
        """
        if self.card is None:
            return {}
        how = f"{'KV on demand (kvcached)' if self.elastic else 'a fixed part of the memory'}"
        how += f", {'beside others (MPS)' if self.at_once else 'turn by turn with others'}"
        return {m.name: how for m in self.config.models}


def real(config: Config) -> dict[str, Path]:
    """Return the checkpoint of each model if MODELS_DIR has them all; else an empty mapping.

    The folder of a checkpoint in MODELS_DIR has the name of the model's shape.
    """
    root = os.environ.get(MODELS)
    checkpoints = {m.name: Path(root, m.shape.name) for m in config.models} if root else {}
    whole = all((path / "config.json").is_file() and any(path.glob("*.safetensors")) for path in checkpoints.values())
    return checkpoints if whole else {}


def cache() -> Path:
    """Return the folder that stores models from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm-sharing-bench"
