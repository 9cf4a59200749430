"""Every system, with each of its presets, keeps every law in every case."""

from __future__ import annotations

import pytest

from harness.check.check import check, subjects
from harness.check.laws import FILE_LAWS, TRIAL_LAWS
from harness.check.trial import Subject, run
from harness.loop import system

SUBJECTS = {f"{name}/{key}": one for name in system.names() for key, one in subjects(name).items()}


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_laws_of_a_trial(subject: Subject) -> None:
    trial = run(subject)
    if trial.impossible is not None:
        pytest.skip(trial.impossible)
    assert {law: found for law, broken in TRIAL_LAWS.items() if (found := list(broken(trial)))} == {}


@pytest.mark.parametrize("name", system.names())
def test_laws_of_a_file(name: str) -> None:
    assert {law: found for law, broken in FILE_LAWS.items() if (found := list(broken(name)))} == {}


@pytest.mark.parametrize("name", system.names())
def test_two_processes_agree(name: str) -> None:
    assert check(name, only="deterministic") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", system.names())
def test_all_laws_at_length(name: str) -> None:
    assert check(name, quick=False) == []
