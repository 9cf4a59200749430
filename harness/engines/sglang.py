"""SGLang's server, one process for each model on each set of GPUs (servers/started.py); it needs GPUs.

A server has a fixed share of the card (`--mem-fraction-static`) for its weights, its process and its KV memory. If a
`Limit` was set before the start, KV memory is what the limit allows. Servers that start with the run and have no limit
share the remaining memory equally. With kvcached, KV memory is taken on demand. A server that was loaded by the way
`sleep` frees its GPU memory when it is evicted (SGLang's memory saver). It takes the memory again at its next load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.client.body import Style
from harness.engines import commands
from harness.engines.machine import Config, Machine
from harness.engines.servers import host
from harness.engines.servers.engine import Servers
from harness.engines.servers.fleet import Sleep
from harness.engines.servers.started import Started
from harness.policy.types import Inst, Option


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields that `--engine sglang+attention=triton+sampling=pytorch` sets; "" leaves the choice to SGLang."""

    attention: str = ""
    sampling: str = ""


class Sglang(Started):
    """Servers of SGLang."""

    split: Path | None = None  # the settings of its PD-multiplexing

    name = package = "sglang"
    card_only = "a GPU: its package has no kernels for processors"
    style = Style(min_tokens=True, counts=True)
    naps: Mapping[str, Sleep] = {"sleep": Sleep((commands.SGLANG_RELEASE,), (commands.SGLANG_RESUME,))}

    fields = Fields()

    def command(self, serve: commands.Serve, inst: Inst, kv_bytes: int, sms: int | None) -> commands.Command:
        """Return the command line of an instance's server; see Started."""
        on, given = self.part(inst, kv_bytes, sms), self.fields
        return commands.sglang(
            self.python, serve, on, pdmux=self.split, attention=given.attention, sampling=given.sampling
        )


def make(config: Config, options: Mapping[str, Option], machine: Machine, fields: Fields) -> Servers:
    """Configure the engine of this file; see harness/loop/engine.py."""
    kind = Sglang(config, machine, host.card(Sglang.name), options)
    kind.fields = fields
    return Servers(config, kind)
