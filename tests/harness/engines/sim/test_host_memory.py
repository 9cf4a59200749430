"""Weights in host memory, where a spec limits it: which are held, what a load from disk takes, what policies see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from harness.engines.costs import quantities
from harness.engines.costs.quantities import Way
from harness.engines.costs.shapes import weight_bytes
from harness.engines.machine import Config, Machine, Served, machine
from harness.engines.sim.engine import Sim
from harness.engines.sim.host_memory import HostMemory
from harness.loop import system
from harness.loop.replay import replay
from harness.policy.actions import Evict, Load
from harness.policy.events import Done
from harness.policy.types import GIB, Host, Inst, Plan, UserError
from harness.rows.setting import machine as named
from harness.run.resolve import resolve
from harness.run.spec import Spec, as_dict, from_dict
from tests.bench import bench, mistake
from tests.cases import cases
from tests.workloads.asked import asked
from workloads.models import shape

SHAPE = shape("llama-3.1-8b")._replace(max_tokens=2048)
SIZE = weight_bytes(SHAPE)
RATES = {"a": 1.0, "b": 3.0, "c": 2.0}


# ------------------------------------------------------------------ which are held


def held(room: int, order: str = "", coming: frozenset[int] = frozenset()) -> HostMemory:
    """Return a memory of models a, b, c of 2, 1 and 1 bytes, and d of 9."""
    return HostMemory(room, {"a": 2, "b": 1, "c": 1, "d": 9}, order, lambda row: row in coming)


def test_models_read_longest_ago_make_room() -> None:
    memory = held(3, "bac")
    assert memory.models == ("a", "c")
    assert memory.read("a")
    assert memory.models == ("c", "a")
    assert not memory.read("b", reader=7)
    assert memory.models == ("a", "b")  # of 3 bytes


def test_a_model_larger_than_the_memory_puts_no_other_out() -> None:
    memory = held(3, "ac")
    assert not memory.read("d", reader=1)
    assert memory.models == ("a", "c")
    assert memory.weights("d") == "out"
    assert held(0, "abc").models == ()


def test_weights_on_their_way_from_disk_are_not_there_yet() -> None:
    coming = {5}
    memory = HostMemory(2, {"a": 2}, "", coming.__contains__)
    assert not memory.read("a", reader=5)
    assert memory.weights("a") == "loading"
    assert not memory.read("a", reader=6)  # on another GPU: from disk as well
    assert memory.weights("a") == "loading"
    coming.clear()
    assert memory.weights("a") == "in"
    assert memory.read("a", reader=6)


def test_a_load_that_never_began_leaves_nothing() -> None:
    memory = held(2, coming=frozenset({5}))
    memory.read("a", reader=5)
    for row, left in ((4, "a"), (5, "")):
        memory.withdrawn("a", row)
        assert memory.models == tuple(left)


# ------------------------------------------------------------------ what a load takes


def config(host_bytes: int | None, gpus: int = 2, **fields: Any) -> Config:
    models = tuple(Served(m, SHAPE) for m in RATES)
    plan = {m: Plan(rate, 300, 200, "test") for m, rate in RATES.items()}
    return Config(models, gpus=gpus, host="none", process_bytes=0, plan=plan, host_bytes=host_bytes, **fields)


def begun(c: Config, *actions: Load, priced: Machine | None = None) -> Sim:
    """Return an engine after these actions, one request due in an hour."""
    engine = Sim(c, priced=priced)
    engine.take(asked(RATES, [3600.0], 0, 1, 1, 1.0, 1.0))
    for action in actions:
        engine.do(action)
    engine.begin(frozenset({Load, Evict}), oracle=False, end_s=3000.0)
    return engine


def seconds(engine: Sim, *actions: Load | Evict) -> list[float]:
    """Return how long after these actions each of their ends is told, in order."""
    began_s, ends = engine.view().now_s, list[float]()
    for action in actions:
        engine.do(action)
    while len(ends) < len(actions):
        event = engine.poll(2000.0)
        assert isinstance(event, Done)
        assert event.failed is None
        ends.append(engine.view().now_s - began_s)
    return ends


def models_of(engine: Sim, node: int = 0) -> str:
    view = engine.view()
    return "".join(inst.model for inst in view.insts(Host(node)) if view.weights(inst) == "in")


def test_hosts_hold_the_models_of_the_highest_planned_rates_until_others_are_loaded() -> None:
    engine = begun(config(2 * SIZE))
    assert models_of(engine) == "cb"
    assert engine.view().weights(Inst("a", Host())) == "out"
    profile, (a, b) = engine.cluster.profile, (Inst(m, (0,)) for m in "ab")
    from_host, from_disk = profile.load_s(a, "host"), profile.load_s(a, "host", from_disk=True)
    assert from_disk == pytest.approx(0.01 + SIZE / quantities.gpu("h100").disk)
    assert seconds(engine, Load(a)) == pytest.approx([from_disk])
    assert models_of(engine) == "ba"
    assert seconds(engine, Load(b)) == pytest.approx([from_host])
    seconds(engine, Evict(a, drain=False))
    assert seconds(engine, Load(a)) == pytest.approx([from_host])  # leaving a GPU leaves the host as it is


def test_a_slow_loader_hides_behind_a_slower_disk() -> None:
    priced = machine(config(0))
    spec = priced.spec
    for bytes_s in (spec.disk / 2, 2 * spec.disk):
        engine = begun(config(0), priced=priced._replace(ladder={"host": Way(0.5, "pcie", bytes_s)}))
        taken = 0.5 + SIZE / min(bytes_s, spec.disk)
        assert engine.cluster.profile.load_s(Inst("a", (0,)), "host", from_disk=True) == pytest.approx(taken)
        assert seconds(engine, Load(Inst("a", (0,)))) == pytest.approx([taken])


def test_rungs_from_disk_take_the_same_whatever_hosts_hold() -> None:
    ends = [seconds(begun(config(room)), Load(Inst("b", (0,)), "disk")) for room in (None, 0, 3 * SIZE)]
    assert ends[0] == ends[1] == ends[2]


# ------------------------------------------------------------------ every system

LOADING: list[tuple[str, dict[str, Any]]] = [
    ("serverlessllm", {}),
    ("serverlessllm_released", {}),
    ("qlm", {}),
    ("swap", {"way": "host"}),
    ("aegaeon", {}),
    ("prism", {}),
    ("slinfer", {}),
    ("elastic", {"idle_s": 3.0, "check_s": 1.0}),
]
ROOM = {"elastic": 6 * GIB}  # of a GPU, for two models; of others for one


def ran(name: str, host_bytes: int | None, fields: dict[str, Any]) -> tuple[pa.Table, Sim]:
    """Return the rows of four 1B models on two GPUs, a request every two seconds, and the engine."""
    small = shape("llama-3.2-1b")._replace(max_tokens=2048)
    models = tuple(Served(f"m{k}", small, 1, 5.0, 0.5) for k in range(4))
    plan = {m.name: Plan(0.1, 200, 30, "test") for m in models}
    pool_bytes = ROOM.get(name, 4 * GIB)
    c = Config(models, gpus=2, host="none", process_bytes=0, plan=plan, host_bytes=host_bytes, pool_bytes=pool_bytes)
    make = system.find(name)
    jobs = asked((m.name for m in models), np.arange(1.0, 20.0, 2.0), np.arange(10) * 3 % 4, 200, 30, 5.0, 0.5)
    engine = Sim(c, make(Sim(c).cluster, **fields).options)
    replay(make(engine.cluster, **fields), engine, jobs, end_s=500.0)
    return pa.Table.from_batches(engine.rows()), engine


@cases(("name", "fields"), LOADING)
def test_systems_load_what_hosts_do_not_hold_from_disk(name: str, fields: dict[str, Any]) -> None:
    usual, engine = ran(name, None, fields)
    assert engine.stats()["loads"] > 0
    assert ran(name, 100 * GIB, fields)[0].equals(usual)  # room for all
    tight, _ = ran(name, 0, fields)
    assert set(tight["state"].to_pylist()) <= {"done", "dropped"}
    assert sum(tight["load_ns"].to_pylist()) > sum(usual["load_ns"].to_pylist())


# ------------------------------------------------------------------ a spec's field


def test_a_spec_without_it_is_what_it_was() -> None:
    assert "host_bytes" not in as_dict(Spec("static"))
    asked = Spec("static", host_bytes=8 * GIB)
    assert from_dict(as_dict(asked)) == asked
    assert len({spec.hash8 for spec in (Spec("static"), asked, replace(asked, host_bytes=0))}) == 3
    assert named(as_dict(asked)) == "8 GiB a node for weights"
    assert resolve(Spec("static", trace="sample", models="llama-3.2-1b*2", host_bytes=0)).host_bytes == 0


@cases(
    ("text", "says"),
    [
        ("host_bytes = -1", "host_bytes is -1, not at least 0"),
        ('host_bytes = "8 GiB"', 'host_bytes is "8 GiB"'),
        ("host_bytes = 9_000_000_000_000_000", "host_bytes is 9000000000000000: a node of h100 has 2"),
        ('host_bytes = 0\nengine = "torch"', "host_bytes: "),
    ],
)
def test_a_wrong_size_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f"system = 'static'\ntrace = 'sample'\nmodels = 'llama-3.2-1b*2'\n{text}\n")
    mistake(bench("run", path, "-o", tmp_path / "out"), says)


def test_engines_in_real_time_refuse_it_by_name() -> None:
    for engine in ("torch", "vllm", "sglang", "llamacpp"):
        with pytest.raises(UserError, match=f"^host_bytes: .*{engine}"):
            resolve(Spec("static", engine=engine, trace="sample", models="llama-3.2-1b*2", host_bytes=0))
