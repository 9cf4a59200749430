"""The engine's CUDA device on an emulated card: what a request goes through, and the logits that come out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("cuda.bindings.driver")

from harness.engines.torch import cuda, worker  # noqa: E402
from tests.harness.engines.torch.scenarios import SCENARIOS  # noqa: E402
from tests.harness.engines.torch.test_logits import (  # noqa: E402
    checkpoints,  # noqa: F401 - a fixture
    compare,
    served,
)
from tests.probe import emulated  # noqa: E402


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[emulated.Memory]:
    """Serve on an emulated card; every page that was mapped was open."""
    memory = emulated.card(monkeypatch, "float32")
    yield memory
    assert not memory.shut


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.usefixtures("card")
def test_logits_are_those_of_transformers(name: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    compare(served(checkpoints, "Llama", SCENARIOS[name], monkeypatch), checkpoints / "Llama")


@pytest.mark.usefixtures("card")
def test_a_device_answers_others_while_its_own_kernels_run(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    inside, answer, meanwhile = list[bool](), worker.Worker.answer, worker.Worker._meanwhile
    waits = threading.local()

    def waiting(this: worker.Worker) -> None:
        waits.now = True
        meanwhile(this)
        waits.now = False

    def answered(this: worker.Worker) -> None:
        inside.append(getattr(waits, "now", False))
        answer(this)

    monkeypatch.setattr(worker.Worker, "_meanwhile", waiting)
    monkeypatch.setattr(worker.Worker, "answer", answered)
    served(checkpoints, "Llama", SCENARIOS["attended where others decode"], monkeypatch)
    assert any(inside)


@pytest.mark.usefixtures("card")
def test_cards_of_two_dtypes_live_side_by_side() -> None:
    both = [cuda.Cards(dtype) for dtype in (torch.bfloat16, torch.float32)]
    for cards in both:
        assert cards.open([2 * emulated.PAGE], emulated.PAGE, emulated.SMS) == ""
    spaces = [cuda.Space(cards.heaps[0], emulated.PAGE, cards.dtype) for cards in both]
    assert [space.tensor().numel() for space in spaces] == [emulated.PAGE // 2, emulated.PAGE // 4]
    handle = both[0].export("a step's KV")
    with pytest.raises(KeyError):
        both[1].take(handle)
    assert both[0].take(handle) == "a step's KV"
