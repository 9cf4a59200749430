"""llama.cpp's server, one process for each model on this host: `Load` starts it, `Evict` stops it (servers/started.py).

A server takes its KV memory (`n_ctx`) when it starts. If a `Limit` was set before, the KV memory is what the limit
allows. Otherwise it fits four requests of the greatest length, or fewer if memory is short. The server batches only as
many requests as would fit if all had the greatest length, so that no request runs out of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.client.body import Style
from harness.engines import commands
from harness.engines.machine import Config, Machine
from harness.engines.servers import folder
from harness.engines.servers.engine import Servers
from harness.engines.servers.started import Started
from harness.policy.types import Inst, Option, Shape


class LlamaCpp(Started):
    """Servers of llama.cpp."""

    name, package = "llamacpp", "xllamacpp"
    block_tokens = 256  # a context is a multiple of this
    # A connection keeps a thread of the server until it is closed, so idle ones could keep requests waiting. The server
    # holds a token's bytes back until they are a character: of 720 tokens of random weights 29 had no chunk of their
    # own.
    style = Style(counts=True, extra=(("cache_prompt", False), ("timings_per_token", True)), keep_alive=False, spare=0)

    def checkpoint(self, shape: Shape, at: Path, seed: int) -> Path:
        """Return the path of a GGUF of random weights, which is written at its first use."""
        return folder.weights(shape, at, self.python, seed)

    def command(self, serve: commands.Serve, inst: Inst, kv_bytes: int, sms: int | None) -> commands.Command:  # noqa: ARG002
        """Return the command line of an instance's server; see Started."""
        context = kv_bytes // self.cluster.models[inst.model].kv_token_bytes
        return commands.llamacpp(self.python, serve, commands.Cpu(self.threads, kv_bytes), context=context)

    def batch_cap(self, inst: Inst, kv_bytes: int) -> int:
        """Return the number of requests of the longest size that fit the KV memory, from 1 to the run's `batch_cap`."""
        model = self.cluster.models[inst.model]
        return max(1, min(kv_bytes // (model.max_tokens * model.kv_token_bytes), self.config.batch_cap))


def make(config: Config, options: Mapping[str, Option], machine: Machine) -> Servers:  # noqa: ARG001
    """Configure the engine of this file; see harness/loop/engine.py."""
    return Servers(config, LlamaCpp(config, machine))
