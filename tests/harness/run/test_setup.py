"""Setup: a run's needs are looked up in one place, and its engine and policy are made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engines.sim.engine import Sim
from harness.loop import engine, system
from harness.rows import record, setting
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.spec import Spec
from traces import schema

TINY = Spec("static", gpus=1, models="llama-3.2-1b", trace="sample", slo="")


# ------------------------------------------------------------------ once


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the makings in order: policies, and engines by the options that they were made with."""
    made = list[str]()
    build, find = system.build, engine.find

    def policy(*args: Any) -> Any:
        made.append("policy")
        return build(*args)

    def simulator(name: str) -> Any:
        def make(config: Any, options: Mapping[str, Any], machine: Any) -> Any:
            made.append("engine" + "".join(f" {key}={value}" for key, value in options.items()))
            return find(name)(config, options, machine)

        return make

    monkeypatch.setattr(system, "build", policy)
    monkeypatch.setattr(engine, "find", simulator)
    return made


def test_engine_and_policy_of_a_run_are_made_once(made: list[str], tmp_path: Path) -> None:
    spec = resolve(replace(TINY, slo="5xsolo"))
    made.clear()
    folder = execute(spec, tmp_path, "")
    assert record.meta(folder)["counts"]["done"] > 0
    # one engine is asked, by all, what policies may know; the other has what the policy asks for, and runs
    assert made == ["engine", "policy", "engine kv=paged"]


def test_a_policy_is_made_again_where_its_options_decide_what_it_may_know(made: list[str], tmp_path: Path) -> None:
    spec = resolve(replace(TINY, system="prism"))
    made.clear()
    execute(spec, tmp_path, "")
    assert made == ["engine", "policy", "engine kv=elastic", "policy"]  # the size of its pages


def test_a_setup_gives_the_same_things_again() -> None:
    setup = Setup(resolve(TINY))
    assert isinstance(setup.engine, Sim)
    for name in ("trace", "models", "served", "machine", "config", "policy", "engine", "keywords"):
        assert getattr(setup, name) is getattr(setup, name)
    assert setup.machine is Setup(replace(setup.spec, seed=1)).machine  # computed once for all runs of a process
    assert Setup(setup.spec).engine is not setup.engine


# ------------------------------------------------------------------ sampling


def test_greedy_sampling_sorts_nothing_and_captions_say_so() -> None:
    sorts, greedy = (Setup(replace(TINY, sampling=how)).machine.tables for how in ("checkpoint", "greedy"))
    assert sorts.head[0, -1] > greedy.head[0, -1]
    assert (sorts.gemm == greedy.gemm).all()
    assert setting.machine({"sampling": "greedy"}) == "greedy sampling"
    assert setting.machine({}) is None


def test_a_trace_whose_every_row_is_greedy_makes_the_run_greedy(tmp_path: Path) -> None:
    tokens = {"prompt_tokens": [8, 8], "output_tokens": [4, 4]}
    rows = {"request_id": [1, 2], "arrival_s": [0.0, 5.0], "model": ["a", "a"], **tokens}
    for words, how in ((["greedy", "greedy"], "greedy"), (["greedy", "checkpoint"], "checkpoint")):
        schema.write(schema.table(rows | {"sampling": words}, {"span_s": 10.0}), path := tmp_path / f"{how}.parquet")
        assert resolve(replace(TINY, trace=str(path), plan="window")).sampling == how
