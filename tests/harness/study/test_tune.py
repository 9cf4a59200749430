"""Fair tuning: as many draws for each system, on seeds apart, and defaults that follow from what is recorded."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli import tune as command
from harness.loop import system
from harness.policy.fields import choice, domains, number
from harness.policy.types import UserError
from harness.rows.estimate import Estimate
from harness.run.spec import Spec
from harness.study import tune
from harness.study.bases import TUNING_SEEDS
from harness.study.study import AA_SEED
from tests.bench import ok
from tests.cases import cases

RECORD = tomllib.loads(command.TUNED.read_text("utf-8"))
TUNED: dict[str, dict[str, Any]] = {name: entry for name, entry in RECORD.items() if isinstance(entry, dict)}


# ------------------------------------------------------------------ draws


@dataclass
class Mine:
    """Fields of every kind; those of a paper, and a part's switch, are not drawn."""

    cluster: object
    stated: float = number(45.0, 1, 600)
    order: str = choice("edf", "fcfs", "lifo", tuned=True, undrawn=("none",))
    z: float = number(2.0, 0, 5, tuned=True)
    heads: int = number(64, 1, 1024, tuned=True)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "find", lambda _: Mine)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune in one world, at one rate, with two seeds."""
    monkeypatch.setattr(tune, "SEEDS", (1000, 1001))
    monkeypatch.setattr(tune, "RATE_SCALES", (1.0,))
    monkeypatch.setattr(tune, "WORLDS", (("sample", "shuffled"),))
    monkeypatch.setattr(tune, "BASE", Spec("", models="llama-3.2-1b*2", gpus=1))


@given(draws=st.integers(2, 40))
def test_draws_are_stratified_and_the_first_is_the_defaults(draws: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "find", lambda _: Mine)
        drawn = tune.drawn("mine", draws)
        assert drawn == tune.drawn("mine", draws)
    first, *rest = drawn
    assert first == {"order": "edf", "z": 2.0, "heads": 64}
    assert len(rest) == (n := draws - 1)
    orders = [draw["order"] for draw in rest]
    assert all(abs(orders.count(value) - n / 3) < 2 for value in ("edf", "fcfs", "lifo"))
    assert "none" not in orders
    z = sorted(float(draw["z"]) for draw in rest)
    assert all(5 * k / n - 0.01 <= x <= 5 * (k + 1) / n + 0.01 for k, x in enumerate(z))  # one in each nth
    heads = sorted(math.log2(int(draw["heads"])) for draw in rest)  # beyond a decade: in logarithm, 10 octaves
    assert all(10 * k / n - 1 <= x <= 10 * (k + 1) / n + 1 for k, x in enumerate(heads))
    assert all(type(draw["heads"]) is int and 1 <= draw["heads"] <= 1024 for draw in rest)


def test_two_systems_do_not_share_their_draws(mine: None) -> None:
    assert tune.drawn("mine", 12) != tune.drawn("yours", 12)


@pytest.mark.usefixtures("small")
def test_a_system_that_fits_with_no_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"weaver fits with no draw on 1 GPU\(s\): --gpus N gives it more"):
        tune.tune(["weaver"], tmp_path, draws=2, workers=1)
    (kept,) = tune.tune(["weaver"], tmp_path, draws=2, gpus=2, workers=1)
    assert [draw.fields for draw in kept.draws] == tune.drawn("weaver", 2)


def test_a_system_without_tuned_fields_cannot_be_tuned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="chunked has no tuned field"):
        tune.tune(["chunked"], tmp_path)
    with pytest.raises(UserError, match="not at least 2"):
        tune.tune(["static"], tmp_path, draws=1)


def of(held: float, score: float) -> tune.Draw:
    return tune.Draw({}, held, score, Estimate(held - 0.5, None, None, 8))


def test_the_draw_that_holds_most_is_chosen_and_regret_is_of_the_defaults() -> None:
    assert tune.choose([of(0.5, 0.9), of(0.7, 0.8), of(0.6, 0.95)]) == 1
    assert tune.choose([of(0.5, 0.9), of(0.7, 0.8), of(0.7, 0.85)]) == 2  # of equals the better score
    assert tune.choose([of(0.7, 0.8), of(0.7, 0.8)]) == 0  # of equals the first
    assert tune.Tuned("prism", (of(0.5, 0.9), of(0.75, 0.8), of(0.6, 0.95)), 1).regret == 0.25
    assert tune.Tuned("prism", (of(0.5, 0.9), of(0.25, 0.99)), 0).regret == 0.0


def test_what_no_draw_holds_is_not_called_tuned() -> None:
    assert not tune.Tuned("qlm", (of(0.0, 0.3), of(0.0, 0.5)), 1).tuned
    assert tune.Tuned("qlm", (of(0.0, 0.5), of(0.03, 0.3)), 1).tuned
    for entry in TUNED.values():
        assert entry["tuned"] == any(draw["held"] > 0 for draw in entry["draw"])


@pytest.mark.usefixtures("small")
def test_tuning_is_resumed_and_recorded(tmp_path: Path) -> None:
    runs, kept_in = tmp_path / "runs", tmp_path / "tuned.toml"
    args = (*"tune --systems static,elastic --draws 3 --workers 1 -o".split(), runs, "--to", kept_in)
    told = ok(*args)
    stamps = {path: path.stat().st_mtime_ns for path in runs.glob("*/requests.parquet")}
    assert {path.parent.name.rpartition("-")[0] for path in stamps} == {"dedicated", "static", "elastic"}
    assert ok(*args) == told
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    kept = tomllib.loads(kept_in.read_text("utf-8"))
    assert kept["command"] == "bench tune --systems static,elastic --draws 3"
    assert kept["worlds"] == ["sample shuffled"]
    assert told.count("regret of the defaults") == 2
    for name in ("static", "elastic"):
        assert [draw["fields"] for draw in kept[name]["draw"]] == tune.drawn(name, 3)
        assert all(0 <= draw[key] <= 1 for draw in kept[name]["draw"] for key in ("held", "score"))
        assert kept[name]["chosen"] in range(3)
        assert kept[name]["regret"] == max(draw["gain"][0] for draw in kept[name]["draw"])


# ------------------------------------------------------------------ what is committed


def test_every_system_had_as_many_draws_on_seeds_of_no_evaluation() -> None:
    assert set(TUNED) == {*command.SYSTEMS.split(","), "weaver"}  # which does not fit on the others' two GPUs
    assert set(TUNED) == {name for name in system.names() if any(d.tuned for d in domains(system.find(name)).values())}
    assert TUNED["weaver"]["gpus"] > RECORD["gpus"]
    assert len({len(entry["draw"]) for entry in TUNED.values()}) == 1
    assert min(RECORD["seeds"]) >= min(TUNING_SEEDS) > AA_SEED
    assert RECORD["worlds"] == [" ".join(world) for world in tune.WORLDS]


@cases("name", [*TUNED])
def test_the_choice_follows_from_the_draws(name: str) -> None:
    draws = TUNED[name]["draw"]
    n = len(RECORD["seeds"]) * len(RECORD["worlds"])
    gains = [Estimate(mean, low, high, n) for mean, low, high in (draw["gain"] for draw in draws)]
    candidates = [tune.Draw(d["fields"], d["held"], d["score"], gain) for d, gain in zip(draws, gains, strict=True)]
    assert TUNED[name]["chosen"] == tune.choose(candidates)
    for draw in draws:
        assert draw["gain"][0] == pytest.approx(draw["held"] - draws[0]["held"], abs=2e-4)


@cases("name", [*TUNED])
def test_the_defaults_are_what_was_chosen(name: str) -> None:
    chosen = TUNED[name]["draw"][TUNED[name]["chosen"]]["fields"]
    assert {field: domain.default for field, domain in tune.open_fields(name).items()} == chosen


@cases(
    "named",
    (
        "prism:osdi26 prism:v1 muxserve:plusplus muxserve:turns muxserve:original static:rate "
        "static:equal static:oracle elastic:kvcached elastic:sleep qlm:sleep qlm:edf"
    ).split(),
)
def test_presets_of_a_paper_say_every_tuned_field(named: str) -> None:
    name, _, preset = named.partition(":")
    assert set(tune.open_fields(name)) <= set(system.find(name).presets[preset])
