"""SGLang's server with its own PD-multiplexing: one server runs prefill and decode at once, each on a part of the SMs.

SGLang itself divides the SMs of each server as the server's batch grows, whatever a system orders. A server is started
with `--enable-pdmux` and a file that leaves the groups of SMs to SGLang. It computes each prompt whole: the spec's
chunk size is not used. Our policy `pdmux` is different: it orders turns and SMs, and no real server obeys such orders.
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
        """Prepare as for any server, and write the settings of PD-multiplexing into the folder `at`; see Kind."""
        super().ready(at)
        self.split = at / "pdmux.yaml"
        self.split.write_text(json.dumps(commands.PDMUX), "utf-8")  # JSON is a part of YAML

    def served(self) -> dict[str, str]:
        """Return, for each model, a text that says how its server shares the card; see Kind."""
        return {model: f"{how}, SGLang's own PD-multiplexing" for model, how in super().served().items()}


def make(config: Config, options: Mapping[str, Option], machine: Machine, fields: Fields) -> Servers:
    """Configure the engine of this file; see harness/loop/engine.py."""
    kind = SglangPdMux(config, machine, host.card(SglangPdMux.name), options)
    kind.fields = fields
    return Servers(config, kind)
