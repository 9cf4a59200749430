"""Every system, with each of its presets, keeps every law in every case.

What passed at length, and whose file, laws, cases and engine are as they were then (`systems/checked.toml`), is tried
again in a sixth of the cases; BENCH_FULL=1 (`make ci-full`) tries all of it.
"""

from __future__ import annotations

import json
import os
import tempfile

import pytest

from harness.check.cases import cases
from harness.check.check import check, other_process, subjects
from harness.check.laws import FILE_LAWS, TRIAL_LAWS, deterministic, prints
from harness.check.trial import Subject, run
from harness.check.under import under
from harness.loop import system
from harness.rows import vetted

DENSE = "crowd"  # the case with most models a GPU, and most decisions


def unchanged(name: str) -> bool:
    """Tell whether a system passed at length, and neither it nor what it passed under has changed since."""
    return not os.environ.get("BENCH_FULL") and vetted.at_length(under()).get(name) == vetted.content(name)


def covering(name: str, least: int = 1) -> dict[str, Subject]:
    """Return a system's subjects for the fast tests: its default in every case, each variant in a sixth of them.

    Variants are its presets and other settings. Each case sees a sixth of them; all pairs are left to the slow tests.
    With `least` = 0 its default is in a sixth of the cases, too.
    """
    every = subjects(name)
    variants = list(dict.fromkeys((subject.preset, subject.fields) for subject in every.values()))
    names = list(cases())

    def tried(subject: Subject) -> bool:
        k = variants.index((subject.preset, subject.fields))
        return k < least or (k + names.index(subject.name)) % 6 == 0

    return {f"{name}/{key}": subject for key, subject in every.items() if tried(subject)}


# alpaserve searches a placement whenever it is made, which the laws do often: it is left to the slow tests
@pytest.mark.parametrize("name", [name for name in system.names() if name != "alpaserve"])
def test_laws_of_every_trial(name: str, subtests: pytest.Subtests) -> None:
    for key, subject in covering(name, least=0 if unchanged(name) else 1).items():
        with subtests.test(key):
            trial = run(subject)
            if trial.impossible is not None:
                pytest.skip(trial.impossible)
            assert {law: broken for law, holds in TRIAL_LAWS.items() if (broken := list(holds(trial)))} == {}


def test_laws_of_every_file(subtests: pytest.Subtests) -> None:
    for name in system.names():
        with subtests.test(name):
            assert {law: broken for law, holds in FILE_LAWS.items() if (broken := list(holds(name)))} == {}


@pytest.mark.slow
def test_two_processes_agree() -> None:
    names = system.names()
    with tempfile.TemporaryFile() as out:
        with other_process(names, quick=True, case=DENSE, out=out) as other:
            here = {name: {key: prints(run(s)) for key, s in subjects(name, case=DENSE).items()} for name in names}
        assert other.returncode == 0
        out.seek(0)
        there = json.load(out)
    assert {name: differing for name in names if (differing := list(deterministic(here[name], there[name])))} == {}


def test_the_subjects_cover_every_setting_and_every_case() -> None:
    for name in system.names():
        tried, every = covering(name).values(), subjects(name).values()
        assert {(s.preset, s.fields) for s in tried} == {(s.preset, s.fields) for s in every}
        assert {subject.name for subject in tried if subject.preset is None and not subject.fields} == set(cases())


@pytest.mark.slow
@pytest.mark.timeout(1200)  # alpaserve searches placements in every case; a machine may be busy
@pytest.mark.parametrize("name", system.names())
def test_all_laws_at_length(name: str) -> None:
    if unchanged(name):
        pytest.skip("passed as it is, under these laws, cases and this engine")
    assert check(name, quick=False) == [], f"after it is mended: bench check {name} --full --store"


def test_a_change_of_the_system_the_laws_or_the_engine_is_tried_in_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_FULL", raising=False)
    stored = {"static": vetted.content("static")}
    monkeypatch.setattr(vetted, "at_length", lambda of: stored if of == under() else {})
    assert unchanged("static")
    assert not unchanged("elastic")
    stored["static"] = "of another file"
    assert not unchanged("static")
    monkeypatch.setattr(vetted, "at_length", lambda of: {})
    assert not unchanged("static")
