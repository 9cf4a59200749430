"""SGLang's server with its own PD-multiplexing: prefill and decode of one server on parts of the SMs at once.

Whatever a system orders, SGLang divides the SMs of each server by itself, as its batch grows. It is started with
`--enable-pdmux` and the file `commands.PDMUX`, with SGLang's own groups. Its prefills are whole: the spec's
chunk is not used.
This is not our policy `pdmux`, which orders turns and SMs: no server takes such orders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from harness.engines import commands
from harness.engines.machine import Config, Machine
from harness.engines.servers import host
from harness.engines.servers.engine import Servers
from harness.engines.sglang import Fields, Sglang
from harness.policy.types import Option


class SglangPdMux(Sglang):
    """Servers of SGLang with PD-multiplexing: prefill and decode run at the same time on parts of the SMs."""

    def ready(self, at: Path) -> None:
        """See Kind."""
        super().ready(at)
        self.split = at / "pdmux.yaml"
        self.split.write_text(json.dumps(commands.PDMUX), "utf-8")  # it is read as YAML, of which JSON is a part

    def served(self) -> dict[str, str]:
        """See Kind."""
        return {model: f"{how}, SGLang's own PD-multiplexing" for model, how in super().served().items()}


def make(config: Config, options: Mapping[str, Option], machine: Machine, fields: Fields) -> Servers:
    """Configure the engine of this file; see harness/loop/engine.py."""
    kind = SglangPdMux(config, machine, host.card(SglangPdMux.name), options)
    kind.fields = fields
    return Servers(config, kind)
