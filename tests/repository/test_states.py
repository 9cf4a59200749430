"""The diagrams of servers and requests are whole."""

from __future__ import annotations

from typing import get_args

import pytest

from harness.client.log import DONE, SENT, WAITING, Book
from harness.client.states import REQUEST, STRICT, Diagram, IllegalStepError
from harness.engines.servers.states import SERVER, WEIGHTS, State
from tests.cases import cases


@cases(("diagram", "first", "ends"), [(SERVER, "planned", {"stopped", "dead"}), (REQUEST, "waiting", {"done"})])
def test_every_state_is_reached_and_only_ends_have_no_step(diagram: Diagram, first: str, ends: set[str]) -> None:
    assert {after for _, after in diagram.edges()} <= set(diagram.steps)
    seen, ahead = set[str](), [first]
    while ahead:
        if (state := ahead.pop()) not in seen:
            seen.add(state)
            ahead += diagram.steps[state]
    assert seen == set(diagram.steps)
    assert {state for state, to in diagram.steps.items() if not to} == ends


def test_every_state_of_a_server_has_a_word_for_policies() -> None:
    assert set(SERVER.steps) == set(WEIGHTS) == set(get_args(State))


def test_an_illegal_step_raises_in_tests_and_is_noted_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Book(1)
    book.step(0, SENT)
    book.step(0, DONE)
    with pytest.raises(IllegalStepError, match="request 0: no legal step from done to waiting"):
        book.step(0, WAITING)
    monkeypatch.delenv(STRICT)
    book.step(0, WAITING)
    assert book.illegal == ["request 0: no legal step from done to waiting"]
    assert book.state[0] == WAITING  # the run goes on
