"""Weights and KV bytes of every shape, against public parameter counts and Prism's released model_info.json."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.engines.costs.shapes import kv_token_bytes, params, weight_bytes
from harness.policy.types import UserError
from tests.cases import cases
from workloads.models import as_asked, checkpoints, model_set, repos, shape, shapes, with_files


class Checkpoint(NamedTuple):
    """A checkpoint as public files have it."""

    repo: str  # on Hugging Face; empty where there is none
    params: int  # as its model card counts them
    kv_token_bytes: int  # bf16, all layers
    longest: int  # max_position_embeddings of its config.json: prompt + output that it can take


CHECKPOINTS = {
    "llama-3.1-8b": Checkpoint("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, 131072, 131072),
    "llama-3-8b": Checkpoint("meta-llama/Meta-Llama-3-8B", 8_030_261_248, 131072, 8192),
    "llama-3.2-3b": Checkpoint("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824, 114688, 131072),
    "llama-3.2-1b": Checkpoint("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400, 32768, 131072),
    "llama-3.3-70b": Checkpoint("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496, 327680, 131072),
    "llama-2-7b": Checkpoint("meta-llama/Llama-2-7b-hf", 6_738_415_616, 524288, 4096),
    "llama-2-13b": Checkpoint("meta-llama/Llama-2-13b-hf", 13_015_864_320, 819200, 4096),
    "mistral-7b": Checkpoint("mistralai/Mistral-7B-Instruct-v0.2", 7_241_732_096, 131072, 32768),
    "nemo-12b": Checkpoint("mistralai/Mistral-Nemo-Instruct-2407", 12_247_782_400, 163840, 131072),
    "phi-3-mini": Checkpoint("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, 393216, 4096),
    "phi-2": Checkpoint("microsoft/phi-2", 2_779_683_840, 327680, 2048),
    "phi-1.5": Checkpoint("microsoft/phi-1_5", 1_418_270_720, 196608, 2048),
    "powerlm-3b": Checkpoint("ibm-research/PowerLM-3b", 3_510_000_000, 368640, 4096),  # rounded
    "olmo-1b": Checkpoint("allenai/OLMo-1B-hf", 1_176_764_416, 131072, 2048),
    "starcoder2-3b": Checkpoint("bigcode/starcoder2-3b", 3_030_371_328, 30720, 16384),
    "gemma-2b": Checkpoint("google/gemma-2b", 2_506_172_416, 18432, 8192),
    "gemma-2-2b": Checkpoint("google/gemma-2-2b", 2_614_341_888, 106496, 8192),
    "qwen-2.5-7b": Checkpoint("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512, 57344, 32768),
    "qwen-2.5-14b": Checkpoint("Qwen/Qwen2.5-14B-Instruct", 14_770_033_664, 196608, 32768),
    "qwen-2.5-32b": Checkpoint("Qwen/Qwen2.5-32B-Instruct", 32_763_876_352, 262144, 32768),
    "yi-1.5-9b": Checkpoint("01-ai/Yi-1.5-9B-Chat", 8_829_407_232, 98304, 4096),
    "qwen-3-32b": Checkpoint("Qwen/Qwen3-32B", 32_762_123_264, 262144, 40960),
    "yi-34b": Checkpoint("01-ai/Yi-34B-Chat", 34_388_917_248, 245760, 4096),
    "codellama-34b": Checkpoint("codellama/CodeLlama-34b-hf", 33_743_970_304, 196608, 16384),
    "opt-13b": Checkpoint("facebook/opt-13b", 12_853_473_280, 819200, 2048),
    "opt-66b": Checkpoint("facebook/opt-66b", 65_719_701_504, 2359296, 2048),
    "opt-175b": Checkpoint("", 174_604_468_224, 4718592, 2048),  # weights on request
    "llama-7b": Checkpoint("huggyllama/llama-7b", 6_738_415_616, 524288, 2048),
    "llama-13b": Checkpoint("huggyllama/llama-13b", 13_015_864_320, 819200, 2048),
    "llama-30b": Checkpoint("huggyllama/llama-30b", 32_528_943_616, 1597440, 2048),
    "llama-65b": Checkpoint("huggyllama/llama-65b", 65_285_660_672, 2621440, 2048),
    # these two are no checkpoints
    "llama-tiny": Checkpoint("", 4 * (4 * 256 * 256 + 3 * 256 * 1024 + 2 * 256) + 2 * 1000 * 256 + 256, 4096, 4096),
    "llama-small": Checkpoint("", 4 * (4 * 512 * 512 + 3 * 512 * 1536 + 2 * 512) + 2 * 1000 * 512 + 512, 8192, 4096),
}
# Neither biases are counted nor extra or missing norms.
BIASED = "phi-2 phi-1.5 starcoder2-3b qwen-2.5-7b qwen-2.5-14b qwen-2.5-32b opt-13b opt-66b opt-175b".split()
EXACT = CHECKPOINTS.keys() - BIASED - {"powerlm-3b", "olmo-1b", "gemma-2-2b", "qwen-3-32b"}


def test_every_shape_is_listed_here_or_among_the_checkpoints() -> None:
    assert set(shapes()) - set(checkpoints()) == set(CHECKPOINTS)


@cases("name", sorted(CHECKPOINTS))
def test_parameters_and_kv_bytes(name: str) -> None:
    shape, known = shapes()[name], CHECKPOINTS[name]
    assert params(shape) == pytest.approx(known.params, rel=0 if name in EXACT else 0.001)
    assert weight_bytes(shape) == 2 * params(shape)
    assert kv_token_bytes(shape) == known.kv_token_bytes


@cases(("name", "tp"), product(sorted(CHECKPOINTS), (1, 2, 4, 8)))
def test_tensor_parallel_parts_hold_the_whole(name: str, tp: int) -> None:
    shape = shapes()[name]
    splits = shape.q_heads % tp == 0 and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
    if not splits:
        with pytest.raises(UserError, match=f"tp {tp}"):
            weight_bytes(shape, tp)
        return
    assert weight_bytes(shape) <= tp * weight_bytes(shape, tp) <= 1.1 * weight_bytes(shape)
    copies = max(1, tp // shape.kv_heads)
    assert tp * kv_token_bytes(shape, tp) == copies * kv_token_bytes(shape)


def test_a_model_serves_at_most_what_its_checkpoint_can() -> None:
    dense = {name: spec for name, spec in shapes().items() if name not in checkpoints()}
    ids = {name: repo for repo, name in repos().items()}
    known = {name: (of.repo, of.longest) for name, of in CHECKPOINTS.items()}
    assert {name: (ids.get(name, ""), spec.max_tokens) for name, spec in dense.items()} == known


@cases(
    ("asked", "name"),
    [("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("Qwen/Qwen3-14B:tp=2:dtype=fp8", "qwen-3-14b")],
)
def test_an_id_on_huggingface_is_a_name_of_its_shape(asked: str, name: str) -> None:
    by_name = asked.replace(asked.partition(":")[0], name)
    assert shape(asked) == shape(by_name)
    assert model_set(asked).members == model_set(by_name).members
    assert as_asked(asked) == as_asked(by_name)
    assert with_files(f"{asked}*2", lambda _: "") == f"{by_name}*2"  # a run by either has one identity


def test_a_folder_of_an_id_s_name_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shape("Qwen/Qwen3-14B").layers == 40
    (tmp_path / "Qwen/Qwen3-14B").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no config\.json in this folder"):
        shape("Qwen/Qwen3-14B")


def test_an_id_that_is_nearly_one_is_told_the_right_one() -> None:
    with pytest.raises(UserError, match=r"did you mean meta-llama/Llama-3\.1-8B-Instruct"):
        shape("meta-llama/Llama-3.1-8B")
