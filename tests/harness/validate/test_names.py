"""Names of GPUs and models, as sources write them."""

from __future__ import annotations

import pytest

from harness.validate import names
from tests.cases import cases
from workloads.models import repos


@cases(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Nvidia H100 GPU", "h100"),
        ("h100_sxm", "h100"),
        ("H100 SXM5 80GB", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("A100 80 GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("L40S", "l40s"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_gpus_are_known_by_the_names_of_nvidia_smi_and_of_papers(name: str, kind: str) -> None:
    assert names.gpu(name) == kind


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100 80GB PCIe", "L40", "H1000"])
def test_other_cards_of_a_name_are_no_card_of_ours(name: str) -> None:
    with pytest.raises(names.UnknownName, match="nearest: "):
        names.gpu(name)


def test_a_name_of_two_cards_is_refused_with_both() -> None:
    for name in ("Nvidia A100 GPU", "A100", "NVIDIA A100-SXM4"):
        with pytest.raises(names.UnknownName, match=r"is a100-40g or a100-80g: the name has to say which"):
            names.gpu(name)


@cases(
    ("name", "shape"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("qwen/qwen3-32b", "qwen-3-32b"),
        ("Qwen/Qwen2.5-7B", "qwen-2.5-7b"),
        ("google/gemma-2b-it", "gemma-2b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
    ],
)
def test_models_are_known_by_their_ids(name: str, shape: str) -> None:
    assert names.model(name) == shape


def test_no_two_ids_differ_by_tuning_alone() -> None:
    ids = [names.untuned(repo) for repo in repos()]
    assert len(set(ids)) == len(ids)
