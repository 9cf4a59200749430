"""SGLang's server, a process a model and GPU (servers/started.py); on a host without a card it does not serve.

A server has a fixed share of the card (`--mem-fraction-static`) for its weights, its process and its KV memory. KV gets
what a `Limit` set before the start allows, else an equal part of what is left with the other servers of the start;
with kvcached it is taken on demand. A server that is loaded by way of `sleep` gives its memory back when it is evicted,
and takes it again when it is loaded (its memory saver).
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
    """Fields that `--engine sglang+attention=triton+sampling=pytorch` sets; "" leaves it to SGLang."""

    attention: str = ""
    sampling: str = ""


class Sglang(Started):
    """Servers of SGLang."""

    split: Path | None = None  # the file of PD-multiplexing

    name = package = "sglang"
    card_only = "a GPU: its package has no kernels for processors"
    style = Style(min_tokens=True, counts=True)
    naps: Mapping[str, Sleep] = {"sleep": Sleep((commands.SGLANG_RELEASE,), (commands.SGLANG_RESUME,))}

    fields = Fields()

    def command(self, serve: commands.Serve, inst: Inst, kv_bytes: int, sms: int | None) -> commands.Command:
        """See Started."""
        on, given = self.part(inst, kv_bytes, sms), self.fields
        return commands.sglang(
            self.python, serve, on, saver=True, pdmux=self.split, attention=given.attention, sampling=given.sampling
        )


def make(config: Config, options: Mapping[str, Option], machine: Machine, fields: Fields) -> Servers:
    """Configure the engine of this file; see harness/loop/engine.py."""
    kind = Sglang(config, machine, host.card(Sglang.name), options)
    kind.fields = fields
    return Servers(config, kind)
