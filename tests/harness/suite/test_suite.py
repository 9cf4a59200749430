"""The version of the suite: what it holds never changes, and its seeds follow from a public value."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from harness.policy.types import UserError
from harness.run.setup import load_models
from harness.study import grid
from harness.suite import suite as suites
from harness.suite.suite import FROZEN, HERE, Suite, first_seed, frozen, load, study
from tests.tools.freeze_suite import reference_run

MOST_REQUESTS = 400_000  # offered in a run, at eight times the rate at which a search begins


@pytest.fixture(scope="module")
def current() -> Suite:
    return load()


def test_a_changed_byte_refuses_the_version_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HERE.glob("suite-1*"):
        data = name.read_bytes()
        (tmp_path / name.name).write_bytes(data)
    changed = (HERE / "suite-1.toml").read_bytes().replace(b"at_rps = 6.0", b"at_rps = 6.1", 1)
    (tmp_path / "suite-1.toml").write_bytes(changed)
    monkeypatch.setattr(suites, "HERE", tmp_path)
    with pytest.raises(UserError, match=r"suite-1\.toml is not that of suite-1, which never changes"):
        load()


def test_every_input_is_as_the_version_froze_it(current: Suite) -> None:
    assert sha256((HERE / "suite-1.toml").read_bytes()).hexdigest() == FROZEN["suite-1"]
    sets = {str(s.spec["models"]).partition("+")[0] for s in current.scenario}
    assert {f"workloads/sets/{name}.toml" for name in sets} <= current.inputs.keys()
    with pytest.raises(UserError, match="suite-1"):
        frozen("suite-1", HERE / "suite.py", "0" * 64)


def test_seeds_follow_from_beacon_version_and_scenario(current: Suite) -> None:
    first, second = current.scenario[:2]
    assert first_seed(current, first, "") == 0
    digest = sha256(f"{'ab' * 16}|suite-1|{first.name}".encode()).digest()
    assert first_seed(current, first, "AB" * 16) == int.from_bytes(digest[:4], "big")
    assert first_seed(current, first, "ab" * 16) != first_seed(current, second, "ab" * 16)
    assert study(current, first, "static", "ab" * 16).spec == {}
    assert study(current, first, "static", "ab" * 16).condition[0].spec["seed"] == int.from_bytes(digest[:4], "big")


def test_scenarios_are_about_twelve_small_and_whole(current: Suite) -> None:
    assert 10 <= len(current.scenario) <= 14
    assert len({s.name for s in current.scenario}) == len(current.scenario)
    for scenario in current.scenario:
        assert 8 * scenario.at_rps * scenario.window_s <= MOST_REQUESTS
        assert scenario.best_rps
        assert scenario.best
        (panel,) = grid.panels(study(current, scenario, "static"), full=False)
        assert panel.size == len(load_models(str(scenario.spec["models"])).members)
        assert len(panel.seeds) == current.seeds


def test_parts_of_a_suite_are_named(current: Suite) -> None:
    assert [s.name for s in current.only(["drift", "light"]).scenario] == ["light", "drift"]
    with pytest.raises(UserError, match='no scenario "ligth"'):
        current.only(["ligth"])
    with pytest.raises(UserError, match='no suite "suite-9"'):
        load("suite-9")
    assert current.quick().seeds < current.seeds


def test_what_was_found_is_no_part_of_what_runs(current: Suite) -> None:
    first, *rest = current.scenario
    assert replace(current, scenario=(replace(first, best_rps=1.0, best="x"), *rest)).asked == current.asked
    assert replace(current, scenario=(replace(first, at_rps=1.0), *rest)).asked != current.asked


def test_a_reference_run_has_the_rows_that_were_frozen(current: Suite, tmp_path: Path) -> None:
    drift = current.only(["drift"]).scenario[0]
    rows, code = reference_run(current, drift, tmp_path)
    if rows != drift.reference and code != current.reference_code:
        pytest.skip("the simulator or the arithmetic is another than when suite-1 was frozen, and so are its rows")
    assert rows == drift.reference
