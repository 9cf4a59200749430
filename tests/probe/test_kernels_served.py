"""The kernels that serve models on cards, interpreted on an emulated one.

This runs behind test_kernels.py: what is interpreted once cannot be compiled in the same process any more.
"""

# ruff: noqa: E402, F811 - imports stand behind importorskip; fixtures are imported

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("cuda.bindings.driver")

from harness.engines.torch import cuda, fused
from harness.engines.torch.engine import Torch
from harness.engines.torch.lanes import TimedStep
from harness.policy.actions import Run
from probe import kernels
from tests.harness.engines.torch import scenarios
from tests.harness.engines.torch.scenarios import HOME, SCENARIOS, Scenario, opened
from tests.harness.engines.torch.test_logits import (
    checkpoints,  # noqa: F401 - a fixture
    compare,
    served,
)
from tests.probe import emulated
from tests.probe.test_kernels import cpu  # noqa: F401 - a fixture


class OneByOne:
    """An interpreted kernel: the interpreter is one for all threads."""

    lock = threading.Lock()

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **more: Any) -> None:
            with self.lock:
                self.kernel[grid](*args, **more)

        return launch


@pytest.fixture
def interpreted(cpu: None, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Serve on an emulated card; return the tokens of each part of every step that was graphs of prompts."""
    emulated.card(monkeypatch, "bfloat16")
    scratch, begin, graphs = fused.scratch, fused.Prefills.begin, list[list[int]]()
    monkeypatch.setattr(fused, "scratch", lambda kv, rows, sms: scratch(kv, rows, 1))  # a context is one part
    monkeypatch.setattr(cuda, "PREPARED", dict.fromkeys(cuda.PREPARED, 0))
    for name, value in (("TOKENS", (16, 80)), ("PROMPTS", 2), ("DECODES", 2)):
        monkeypatch.setattr(fused, name, value)
    for name in ("decode", "merge", "add_norm", "rope_write", "silu_mul"):
        monkeypatch.setattr(kernels, name, OneByOne(getattr(kernels, name)))

    def noted(self: fused.Prefills, order: Any, ids: Any) -> Any:
        graphs.append([p.tokens for p in order.parts])
        return begin(self, order, ids)

    monkeypatch.setattr(fused.Prefills, "begin", noted)
    return graphs


def serve(prompts: tuple[int, ...], outputs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scenarios be of few tokens, for a program of a kernel takes the interpreter milliseconds."""
    monkeypatch.setattr(scenarios, "PROMPTS", prompts)
    monkeypatch.setattr(scenarios, "OUTPUTS", outputs)


def test_prompts_and_the_decodes_beside_them_are_one_graph(
    interpreted: list[list[int]], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve((9, 70, 12), (4, 5, 3), monkeypatch)
    budget = Scenario(opened(Run(HOME, chunk_tokens=79)))  # of a step: the third prompt comes with two decodes
    compare(served(checkpoints, "Llama", budget, monkeypatch), checkpoints / "Llama")
    assert interpreted == [[9, 70], [1, 1, 12]]


def test_slices_of_prompts_on_a_share_of_the_sms_are_a_graph_a_layer(
    interpreted: list[list[int]], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve((9, 20), (2, 2), monkeypatch)
    monkeypatch.setattr(fused, "PROMPTS", 1)
    replayed, graph = list[tuple[int, int]](), fused.Graphs.graph

    def noted(self: fused.Graphs, size: int, first: int, end: int) -> Any:
        if isinstance(self, fused.Prefills):
            replayed.append((first, end))
        return graph(self, size, first, end)

    monkeypatch.setattr(fused.Graphs, "graph", noted)
    lanes = Run(HOME, "prefill", slice_layers=2, seqs=1, sms=64), Run(HOME, "decode", sms=68)
    compare(served(checkpoints, "Llama", Scenario(opened(*lanes)), monkeypatch), checkpoints / "Llama")
    assert interpreted == [[9], [20]]
    assert replayed == [(0, 1), (1, 2), (2, 3)] * 2


def test_kernels_of_steps_are_timed_back_to_back(
    interpreted: list[list[int]], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Repeating(Torch):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.timed_steps, self.repeat = list[TimedStep](), 3

    serve((9,), (2,), monkeypatch)
    monkeypatch.setattr(scenarios, "Torch", Repeating)
    engine = served(checkpoints, "Llama", Scenario(opened(Run(HOME, chunk_tokens=79))), monkeypatch)
    compare(engine, checkpoints / "Llama")  # what is computed again changes nothing
    assert engine.timed_steps is not None
    assert [(step.parts, step.kernels_s) for step in engine.timed_steps] == [(((0, 9),), 0.004), (((9, 1),), 0.004)]
    assert interpreted == [[9]]


@pytest.mark.full
def test_later_pieces_of_prompts_are_launched_kernel_by_kernel(
    interpreted: list[list[int]], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve((9, 21), (2, 2), monkeypatch)
    budget = Scenario(opened(Run(HOME, chunk_tokens=20)))
    compare(served(checkpoints, "Llama", budget, monkeypatch), checkpoints / "Llama")
    assert interpreted == [[9, 11]]


@pytest.mark.full
@pytest.mark.usefixtures("interpreted")
def test_kernels_in_bfloat16_give_nearly_those(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve((9, 70), (4, 5), monkeypatch)
    compare(served(checkpoints, "Qwen3", SCENARIOS["attended elsewhere"], monkeypatch), checkpoints / "Qwen3")
