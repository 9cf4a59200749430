"""Scenarios of requests on the torch engine, and the logits that must come out of them.

Each scenario is a policy in a few lines; the engine's own processes serve a small checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.engines.costs.servers import Admission
from harness.engines.machine import Config, Served
from harness.engines.torch import nets
from harness.engines.torch.engine import Torch
from harness.engines.torch.nets import Net, prompt_ids
from harness.loop.replay import missing, replay
from harness.policy.actions import Action, Admit, Evict, Limit, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Prefilled, Woke
from harness.policy.types import MIB, Batch, Host, Inst, Jobs, Option, Shape
from harness.policy.view import View

F4 = NDArray[np.float32]
F8 = NDArray[np.float64]
SHAPE = Shape("checkpoint", 3, 64, 4, 2, 16, 96, 160, gated=True, tied=False, max_tokens=512)
HOME, AWAY = Batch(Inst("m", (0,))), Batch(Inst("m", (1,)))
PROMPTS, OUTPUTS = (50, 5, 70, 18, 1), (30, 28, 24, 20, 26)
OFF = 1e-4  # a logit may be off by this in float32
NEAR = 0.05  # relative error of all logits: bfloat16 has 8 bits, and errors of three layers add up

Script = Callable[[Event, View], Iterable[Action]]


class Scenario(NamedTuple):
    """A script that makes something happen to requests, and the engine's counter that proves that it happened."""

    script: Script
    options: Mapping[str, Option] = {}
    gpus: int = 1
    happened: str = ""  # a counter that must not be 0
    admission: Admission = "prompt"


class Policy:
    """A script as a system that hears every event and may use every action of the engine."""

    def __init__(self, script: Script, engine: Torch, options: Mapping[str, Option]) -> None:
        self.on, self.hears, self.uses, self.options = script, engine.tells, engine.can, options


def opened(*orders: Run, batch: Batch = HOME) -> Script:
    """Return a script that loads the model, opens its lanes, and admits each request as it arrives."""

    def script(event: Event, _: View) -> Iterator[Action]:
        if event == Woke("start"):
            yield Load(batch.inst)
            yield from orders or (Run(batch),)
        if isinstance(event, Arrived):
            yield Admit(event.request.id, batch)

    return script


def then(first: Script, more: Callable[[Event], Iterable[Action]]) -> Script:
    """Return a script that yields the actions of `first`, then those of `more`."""

    def script(event: Event, view: View) -> Iterator[Action]:
        yield from first(event, view)
        yield from more(event)

    return script


def squeezed(event: Event) -> Iterator[Action]:
    """Limit KV to less than the requests need.

    On a CPU the limit is 12 blocks of 12 KiB (16 tokens each). On a card it is 4 blocks, each a page of 2 MiB (64
    tokens).
    """
    if event == Woke("start"):
        yield Limit("m", 0, 12 * 12288 if os.environ.get("DEVICE", "cpu") == "cpu" else 4 * 2 * MIB)


def replaced(event: Event) -> Iterator[Action]:
    """Evict the model in mid-run, and load it again."""
    if event == Prefilled(0, HOME):
        yield Evict(HOME.inst, drain=False)
    if isinstance(event, Done) and isinstance(event.action, Evict):
        yield Load(HOME.inst, "naive")


def to_host(event: Event) -> Iterator[Action]:
    """Send KV to the host and back."""
    if isinstance(event, Prefilled):
        yield Move(event.rid, Host(0))
    if isinstance(event, Done) and isinstance(event.action, Move) and event.action.to == Host(0):
        yield Move(event.action.who, (0,))


def to_other(event: Event) -> Iterator[Action]:
    """Prefill on one device and decode on another."""
    if event == Woke("start"):
        yield from (Load(AWAY.inst), Run(AWAY, "decode"))
    if isinstance(event, Prefilled):
        yield from (Admit(event.rid, AWAY), Move(event.rid, (1,)))


def lent(event: Event) -> Iterator[Action]:
    """Move the KV of every second request to another device, where it is attended."""
    if isinstance(event, Prefilled) and event.rid % 2 == 0:
        yield Move(event.rid, (1,), attend=True)


def shared_out(event: Event) -> Iterator[Action]:
    """Decode every second request on another device, where the rest of the requests attend to their KV."""
    yield from to_other(event) if not isinstance(event, Prefilled) or event.rid % 2 else lent(event)


PD = Run(HOME, "prefill"), Run(HOME, "decode")
SCENARIOS = {
    "batched": Scenario(opened()),
    "one by one": Scenario(opened(Run(HOME, seqs=1))),
    "whole prompts": Scenario(opened(Run(HOME, chunk_tokens=0))),
    "chunked": Scenario(opened(Run(HOME, chunk_tokens=7))),
    "sliced": Scenario(opened(Run(HOME, "prefill", slice_layers=2), Run(HOME, "decode"))),
    "partitioned": Scenario(opened(Run(HOME, "prefill", sms=60), Run(HOME, "decode", sms=40))),
    "elastic": Scenario(opened(), {"kv": "elastic", "process": "model"}),
    "recomputed": Scenario(then(opened(), squeezed), happened="preemptions"),
    "let in by pieces": Scenario(
        then(opened(Run(HOME, chunk_tokens=7)), squeezed), happened="preemptions", admission="chunk"
    ),
    "reserved to the end": Scenario(opened(), admission="output"),
    "swapped out": Scenario(then(opened(), squeezed), {"preempt": "swap"}, happened="moves"),
    "evicted and loaded": Scenario(then(opened(), replaced), happened="evicts"),
    "to the host and back": Scenario(then(opened(), to_host), happened="moves"),
    "to another device": Scenario(then(opened(PD[0]), to_other), gpus=2, happened="moves"),
    "attended elsewhere": Scenario(then(opened(), lent), gpus=2, happened="moves"),
    "attended where others decode": Scenario(then(opened(), shared_out), gpus=2, happened="moves"),
}


def served(name: str, scenario: Scenario, end_s: float = 60.0) -> Torch:
    """Run a scenario on the checkpoint `name` in MODELS_DIR; return the engine with the logits that it kept.

    Raises AssertionError if a request did not end, an action was refused, or the scenario's counter stayed 0.
    """
    n, none = len(PROMPTS), np.full(len(PROMPTS), math.inf)
    shape = SHAPE._replace(name=name)
    config = Config(
        (Served("m", shape),), gpus=scenario.gpus, watermark=0.0, pool_bytes=512 * MIB, admission=scenario.admission
    )
    jobs = Jobs(
        ("m",), np.zeros(n), np.zeros(n, np.int32), np.array(PROMPTS, np.int32), np.array(OUTPUTS, np.int32), none, none
    )
    options = {"process": "gpu", **scenario.options}
    engine = Torch(config, options)
    engine.logits = {}
    policy: Any = Policy(scenario.script, engine, options)
    if lacks := missing(policy, engine):
        raise AssertionError(f"the engine lacks {lacks}")
    try:
        outcome = replay(policy, engine, jobs, end_s=end_s)
        ends, counters = engine.noted().ends.tolist(), engine.stats()
    finally:
        engine.close()
    if ends != [1] * n or outcome.refused or not counters.get(scenario.happened, 1):
        raise AssertionError(f"ends {ends}, {outcome.refused} refused {outcome.first_refused}, {counters}")
    return engine


def draw(folder: Path, seed: int = 0) -> Net:
    """Write a checkpoint of SHAPE, all of its tensors random, below a folder; return its network."""
    s, draws = SHAPE, np.random.default_rng(seed)
    about = {
        "model_type": "llama",
        "num_hidden_layers": s.layers,
        "hidden_size": s.hidden,
        "num_attention_heads": s.q_heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.ffn,
        "vocab_size": s.vocab,
        "tie_word_embeddings": s.tied,
        "max_position_embeddings": s.max_tokens,
        "rms_norm_eps": 1e-5,
    }
    to = folder / s.name
    to.mkdir(parents=True)
    (to / "config.json").write_text(json.dumps(about), "utf-8")
    header, raw = dict[str, Any](), b""
    for name, size in nets.tensors(Net(s)):
        drawn = draws.normal(0.0, 0.2, size) if len(size) > 1 else draws.uniform(0.5, 1.5, size)
        data = drawn.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": size, "data_offsets": [len(raw), len(raw) + len(data)]}
        raw += data
    lead = json.dumps(header).encode()
    (to / "model.safetensors").write_bytes(len(lead).to_bytes(8, "little") + lead + raw)
    return nets.described(to)


def off(logits: Mapping[int, list[F4]], whole: Callable[[list[int]], F8], narrow: bool) -> Iterator[tuple[float, str]]:
    """Yield for each request the distance of its logits from the true ones, and an error text or "".

    The true logits are those that `whole` gives for the request's whole context. In float32 the distance is the largest
    difference, and tokens must agree. In bfloat16 (`narrow`) it is the relative error in norm.
    """
    for rid, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        mine = np.stack(logits[rid])
        made = mine.argmax(-1)
        ids = [*prompt_ids(rid, 0, prompt, SHAPE.vocab).tolist(), *made.tolist()]
        truth = whole(ids)[prompt - 1 : -1]
        if len(mine) != output:
            yield math.inf, f"request {rid} has {len(mine)} tokens, not {output}"
        elif narrow:
            far = float(np.linalg.norm(mine - truth) / np.linalg.norm(truth))
            yield far, "" if far < NEAR else f"request {rid} is off by {far:.3g} of its logits' norm"
        else:
            far = float(np.abs(mine - truth).max())
            same = made.tolist() == truth.argmax(-1).tolist()
            also = "" if same else ", other tokens"
            yield far, "" if far < OFF and same else f"request {rid} is off by {far:.3g}{also}"
