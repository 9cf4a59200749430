"""Logits of the engine on the processor beside those of `transformers`, whatever happens to a request on its way.

The checkpoints are small and drawn here. Each scenario is a policy in a few lines, and the engine's own processes serve
it: what is compared is what a worker computed from the pages that it had mapped.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from harness.engines.machine import Config, Served  # noqa: E402
from harness.engines.torch import nets  # noqa: E402
from harness.engines.torch.engine import Torch  # noqa: E402
from harness.engines.torch.nets import prompt_ids  # noqa: E402
from harness.loop.replay import missing, replay  # noqa: E402
from harness.policy.actions import Action, Admit, Evict, Limit, Load, Move, Run  # noqa: E402
from harness.policy.events import Arrived, Done, Event, Prefilled, Woke  # noqa: E402
from harness.policy.types import MIB, Batch, Host, Inst, Jobs, Option  # noqa: E402
from harness.policy.view import View  # noqa: E402
from workloads.models import shape  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 160, "max_position_embeddings": 512}  # fmt: skip
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
HOME, AWAY = Batch(Inst("m", (0,))), Batch(Inst("m", (1,)))
PROMPTS, OUTPUTS = (50, 5, 70, 18, 1), (30, 28, 24, 20, 26)

NEAR = 0.05  # of the logits together: bfloat16 has 8 bits, and errors of three layers add up

Script = Callable[[Event, View], Iterable[Action]]


class Scenario(NamedTuple):
    """A script of what happens to requests, and the counter of the run that shows it."""

    script: Script
    options: Mapping[str, Option] = {}
    gpus: int = 1
    happened: str = ""  # a counter that must not be 0


class Policy:
    """A script as a system that may do anything."""

    def __init__(self, script: Script, engine: Torch, options: Mapping[str, Option]) -> None:
        self.on, self.hears, self.uses, self.options = script, engine.tells, engine.can, options


def opened(*orders: Run, batch: Batch = HOME) -> Script:
    """Load at the start, open lanes, and admit whoever comes."""

    def script(event: Event, _: View) -> Iterator[Action]:
        if event == Woke("start"):
            yield Load(batch.inst)
            yield from orders or (Run(batch),)
        if isinstance(event, Arrived):
            yield Admit(event.request.id, batch)

    return script


def then(first: Script, more: Callable[[Event], Iterable[Action]]) -> Script:
    """Do what a script does, and more."""

    def script(event: Event, view: View) -> Iterator[Action]:
        yield from first(event, view)
        yield from more(event)

    return script


def squeezed(event: Event) -> Iterator[Action]:
    """Leave room for a part of the requests' KV: 12 blocks of 16 tokens and 12 KiB, or 4 of 64 and a page of a card."""
    if event == Woke("start"):
        yield Limit("m", 0, 12 * 12288 if os.environ.get("DEVICE", "cpu") == "cpu" else 4 * 2 * MIB)


def replaced(event: Event) -> Iterator[Action]:
    """Evict and load again in mid-run."""
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
    """Prefill here, decode there."""
    if event == Woke("start"):
        yield from (Load(AWAY.inst), Run(AWAY, "decode"))
    if isinstance(event, Prefilled):
        yield from (Admit(event.rid, AWAY), Move(event.rid, (1,)))


def lent(event: Event) -> Iterator[Action]:
    """Attend to the KV of some on another device."""
    if isinstance(event, Prefilled) and event.rid % 2 == 0:
        yield Move(event.rid, (1,), attend=True)


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
    "swapped out": Scenario(then(opened(), squeezed), {"preempt": "swap"}, happened="moves"),
    "evicted and loaded": Scenario(then(opened(), replaced), happened="evicts"),
    "to the host and back": Scenario(then(opened(), to_host), happened="moves"),
    "to another device": Scenario(then(opened(PD[0]), to_other), gpus=2, happened="moves"),
    "attended elsewhere": Scenario(then(opened(), lent), gpus=2, happened="moves"),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw a checkpoint of each kind, none of whose tensors is trivial."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe"):
        torch.manual_seed(0)
        more: dict[str, Any] = MIXTURE if name == "Qwen3Moe" else {}
        config = getattr(transformers, f"{name}Config")(**SIZES, **more, tie_word_embeddings=name == "Qwen3")
        made = getattr(transformers, f"{name}ForCausalLM")(config)
        with torch.no_grad():
            for weight in made.parameters():
                weight.normal_(0.0, 0.2) if weight.dim() > 1 else weight.uniform_(0.5, 1.5)
        made.save_pretrained(folder / name)
    return folder


def served(folder: Path, name: str, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> Torch:
    """Run a scenario on a checkpoint, and return the engine with the logits that it kept."""
    monkeypatch.setenv("MODELS_DIR", str(folder))
    n, none = len(PROMPTS), np.full(len(PROMPTS), math.inf)
    config = Config(
        (Served("m", shape("llama-tiny")._replace(name=name)),), gpus=scenario.gpus, watermark=0.0, pool_bytes=512 * MIB
    )
    jobs = Jobs(("m",), np.zeros(n), np.zeros(n, np.int32), np.array(PROMPTS, np.int32), np.array(OUTPUTS, np.int32),
                none, none)  # fmt: skip
    options = {"process": "gpu", **scenario.options}
    engine = Torch(config, options)
    engine.logits = {}
    policy: Any = Policy(scenario.script, engine, options)
    assert missing(policy, engine) == []
    try:
        outcome = replay(policy, engine, jobs, end_s=60.0)
        states = [row["state"] for part in engine.rows() for row in part.to_pylist()]
        counters = engine.stats()
    finally:
        engine.close()
    assert states == ["done"] * n
    assert outcome.refused == 0
    assert counters.get(scenario.happened, 1) > 0
    return engine


def compare(engine: Torch, folder: Path) -> None:
    """Compare every token's logits with those of the whole context; in bfloat16, which cards serve, all together."""
    narrow = engine.kind.float_bytes == 2
    kept = torch.bfloat16 if narrow else torch.float32
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=kept).float()
    assert engine.logits is not None
    for rid, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        mine = np.stack(engine.logits[rid])
        assert len(mine) == output
        made = mine.argmax(-1)
        ids = [*prompt_ids(rid, 0, prompt, SIZES["vocab_size"]).tolist(), *made.tolist()]
        with torch.inference_mode():
            whole = reference(torch.tensor([ids])).logits[0, prompt - 1 : -1].numpy()
        if narrow:
            assert np.linalg.norm(mine - whole) < NEAR * np.linalg.norm(whole)
            continue
        assert np.abs(mine - whole).max() < 1e-4
        assert made.tolist() == whole.argmax(-1).tolist()


@pytest.mark.parametrize("name", SCENARIOS)
def test_logits_are_those_of_transformers(name: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(served(checkpoints, "Llama", SCENARIOS[name], monkeypatch), checkpoints / "Llama")


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Qwen3Moe"])
def test_biases_norms_of_heads_and_experts_are_those_of_transformers(
    kind: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(served(checkpoints, kind, SCENARIOS["chunked"], monkeypatch), checkpoints / kind)


def test_an_fp8_checkpoint_is_served_by_its_numbers(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of layers in FP8 with a scale for each block of 16 x 32, beside a checkpoint that torch dequantised."""
    folder, plain = tmp_path / "Fp8", tmp_path / "plain"
    for copy in (folder, plain):
        shutil.copytree(checkpoints / "Llama", copy)
    weights = dict(safetensors.load_file(folder / "model.safetensors"))
    numbers = dict(weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].unfold(0, 16, 16).unfold(1, 32, 32).abs().amax((2, 3)) / 448.0  # E4M3's largest number
        each = scale.repeat_interleave(16, 0).repeat_interleave(32, 1)
        stored = (weights[name] / each).to(torch.float8_e4m3fn)
        weights |= {name: stored, f"{name}_scale_inv": scale}
        numbers[name] = stored.float() * each
        assert not torch.equal(numbers[name], safetensors.load_file(checkpoints / "Llama" / "model.safetensors")[name])
    safetensors.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    safetensors.save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    keys = json.loads((folder / "config.json").read_text("utf-8"))
    keys["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    (folder / "config.json").write_text(json.dumps(keys), "utf-8")
    compare(served(tmp_path, "Fp8", SCENARIOS["chunked"], monkeypatch), plain)


def test_bits_of_fp8_are_those_of_torch() -> None:
    mine = torch.from_numpy(nets.E4M3)
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(mine.nan_to_num(1e9), theirs.nan_to_num(1e9))
