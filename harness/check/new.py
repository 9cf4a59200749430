"""The files that `bench new` writes: the smallest system that passes `bench check`, and one TOML file of each form."""

from __future__ import annotations

from pathlib import Path

from harness.policy.types import UserError
from harness.rows.record import write_bytes

TEMPLATE = '''\
"""NAME: one line that says what it does. Then the paper, its version, and its symbols."""

from dataclasses import dataclass

from harness.policy.actions import Admit, Load, Run  # docs/vocabulary.md lists all actions, events and queries
from harness.policy.events import Woke
from harness.policy.types import Batch, Cluster, Infeasible, Inst

DECISION_S = 0.0  # seconds of virtual time that a decision takes; say when and where it was measured


@dataclass(frozen=True)
class TITLE:
    """Model k runs on GPUs k, k + 1, ... of the cluster and takes the KV memory that it finds free."""

    cluster: Cluster  # GPUs, models, forecast, cost profile: all that is known before the start
    # a field that +tau=4 sets, from harness.policy.fields: tau: float = number(3.0, 0, 10)  # its source
    # state that on() keeps and no user sets, from dataclasses: waiting: dict = field(init=False, default_factory=dict)
    hears = frozenset({Woke})  # event types it wants; Arrived and Finished, to decide for each request
    uses = frozenset({"Load", "Run", "Admit"})  # each action, and each field off its default: "Run.seqs"
    options, presets = {"kv": "elastic"}, {}  # needs of the engine; named sets of fields: {"paper": {"tau": 2.0}}
    # leaves_idle = "Section 4: ...": quote the rule by which requests wait while GPUs are empty, or the check fails

    def on(self, event, view):
        """Answer one event with actions; `view` reads the state, and neither knows an output length."""
        if event == Woke("start"):  # before the window: placing models costs nothing yet
            free = [gpu.mem_bytes for gpu in self.cluster.gpus]
            for k, (name, model) in enumerate(self.cluster.models.items()):
                place = tuple((k * model.tp + j) % len(free) for j in range(model.tp))
                for gpu in place:
                    free[gpu] -= model.weight_bytes + model.max_tokens * model.kv_token_bytes + model.page_bytes
                    if free[gpu] < 0:
                        raise Infeasible(f"{name} does not fit on GPU {gpu}")
                batch = Batch(Inst(name, place))
                yield Load(batch.inst)  # bring the weights in
                yield Run(batch)  # a standing order: continuous batching until told otherwise
                yield Admit(name, batch)  # a standing route: all requests of this model join the batch
'''

TEMPLATES = Path(__file__).with_name("templates")
FILES = ("classes.toml", "set.toml", "study.toml")  # templates by the end of a file's name; they say FILE for the whole


def write(path: Path) -> None:
    """Write to `path` the template that fits its name. Raises UserError if the path exists, or no template fits."""
    if path.suffix == ".toml":
        form = next((name for name in FILES if path.name.endswith(name)), None)
        if form is None:
            raise UserError(f"{path}: name it as one of {', '.join(FILES)}, with other words before it if you like")
        text = (TEMPLATES / form).read_text("utf-8").replace("FILE", path.name)
    else:
        if path.suffix != ".py" or not path.stem.isidentifier():
            raise UserError(f"{path}: name it like a Python module, as in mine.py, or {', '.join(FILES)}")
        title = "".join(part.capitalize() for part in path.stem.split("_") if part) or "Mine"
        text = TEMPLATE.replace("NAME", path.stem).replace("TITLE", title)
    if path.exists():
        raise UserError(f"{path} exists; bench new overwrites nothing")
    write_bytes(path, text.encode())
