"""Weaver: W by hand and by quadrature, Algorithm 1, who is offloaded, and the laws of its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from harness.engines.machine import Config, Served, machine
from harness.engines.sim.engine import Sim
from harness.loop.replay import replay
from harness.policy.actions import Action
from harness.policy.chance import draw
from harness.policy.events import Event
from harness.policy.types import Infeasible, Inst, Jobs, Plan
from harness.policy.view import View
from systems.weaver import Weaver, grain, wait_s
from tests.cases import cases
from tests.systems.by_hand import ran
from tests.workloads.asked import asked
from workloads.models import shape

SHAPE = shape("llama-3.1-8b")._replace(max_tokens=2048)


def config(gpus: int = 4, models: int = 2, **over: Any) -> Config:
    """Return a hot model and cold ones, each an 8B, on A100s of 40 GB under the paper's engine."""
    served = tuple(Served(f"m{k}", SHAPE) for k in range(models))
    rates = {m.name: Plan(8.0 if m.name == "m1" else 1.0, 700, 200, "test") for m in served}
    return Config(served, gpu="a100-40g", gpus=gpus, host="vllm-eager", plan=rates, **over)


def jobs(hot_rps: float, cold_rps: float = 1.0, span_s: float = 40.0) -> Jobs:
    """Return Poisson arrivals of model m1, which is hot, and of m0."""
    rng = np.random.default_rng(3)
    times = [np.sort(rng.uniform(0, span_s, int(rate * span_s))) for rate in (cold_rps, hot_rps)]
    arrival_s, model = np.concatenate(times), np.repeat([0, 1], [len(t) for t in times])
    order, n = np.argsort(arrival_s, kind="stable"), len(arrival_s)
    prompt, output = rng.integers(400, 1100, n), rng.integers(100, 300, n)
    return asked(("m0", "m1"), arrival_s[order], model[order], prompt, output)


def tpot_ms(rows: pa.Table, load: Jobs) -> tuple[float, float]:
    """Return mean seconds between tokens, of the cold model and of the hot one."""
    done, first = (np.array(rows[name].to_pylist(), float) for name in ("done_ns", "first_ns"))
    each = (done - first) / 1e6 / (load.output_tokens - 1)
    return float(each[load.model == 0].mean()), float(each[load.model == 1].mean())


# ------------------------------------------------------------------ section 4.2


def test_w_by_hand() -> None:
    """One kernel of 4, two of 1: of 6 s the first takes 4, in which 2 are left in the mean."""
    assert wait_s({4.0: 1, 1.0: 2}, 0.0) == (16 + 1 + 1) / 12
    assert wait_s({4.0: 1, 1.0: 2}, 1.0) == 9 / 12
    assert wait_s({4.0: 1, 1.0: 2}, 4.0) == 0.0


@cases("slack", [0.0, 0.3, 1.0, 2.5])
def test_w_by_quadrature(slack: float) -> None:
    """W is the mean over the time of a step of how much longer than K - N the running kernel goes on."""
    T = [0.2, 1.7, 0.9, 3.1, 0.05]
    at = (np.arange(600_000) + 0.5) / 600_000 * sum(T)
    ends = np.cumsum(T)
    left = ends[np.searchsorted(ends, at)] - at
    assert wait_s(dict.fromkeys(T, 1), slack) == pytest.approx(np.maximum(left - slack, 0).mean(), abs=1e-6)


def test_algorithm_1_halves_the_longest_until_w_is_low_or_none_exceeds_the_slack() -> None:
    T = [8.0, 2.0, 2.0]  # W is 3, then (4 x 4 + 4 x 4 + 8) / 24 = 5 / 3, then 1 of six kernels of 2
    assert [grain(T, 0.0, most) for most in (3.0, 2.0, 5 / 3, 1.6, 1.0)] == [8.0, 4.0, 4.0, 2.0, 2.0]
    assert grain(T, 3.0, 0.0) == 2.0  # 4 exceeds a slack of 3, 2 does not
    assert grain(T, 8.0, 0.0) == 8.0
    assert grain(T, -1.0, 1.0) == grain(T, 0.0, 1.0)  # what keeps the sender waiting anyway cannot be split away
    assert grain([0.0, *T], 0.0, 1.0) == 2.0


def test_the_kernels_of_a_step_are_those_of_its_time() -> None:
    """T_i come from the same table as the step."""
    conf = config()
    profile = Sim(conf).cluster.profile
    T = profile.kernels_s(Inst("m0", (1,)), 8, 8 * 600)
    assert max(T) == T[-1] < 961e-6  # section 3.1: the LM head takes at most 961 us on an A100
    host = machine(conf).host
    assert sum(T) + host.host0 + 8 * host.host1 == pytest.approx(profile.step_s(Inst("m0", (1,)), 8, 8 * 600), rel=0.02)


def test_a_token_of_llama_3_8b_sends_640_kib() -> None:
    k = machine(config()).tables.cost[0]
    assert (k["query_bytes"], k["result_bytes"]) == (32 * 12 * 1024, 32 * 8 * 1024)


# ------------------------------------------------------------------ section 4.3


def test_a_share_is_drawn_by_request_and_stays() -> None:
    n = 20_000
    drawn = np.array([draw(0, rid) for rid in range(n)])
    for ratio in (0.05, 0.45, 0.9):
        assert abs((drawn < ratio).mean() - ratio) < 4 * math.sqrt(ratio * (1 - ratio) / n)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 4 / math.sqrt(n)
    assert (drawn != [draw(1, rid) for rid in range(n)]).all()
    assert drawn.min() >= 0
    assert drawn.max() < 1


class Watched(Weaver):
    """A Weaver that notes the KV of the hot model on each GPU at the first tokens that it hears of."""

    seen: ClassVar[list[list[int]]] = []

    def on(self, event: Event, view: View) -> Iterable[Action]:
        self.seen.append([view.kv("m1", g).used_bytes for g in range(4)])
        return super().on(event, view)


@cases("ratio", [0.0, 0.45, 1.0])
def test_kv_lies_where_it_was_drawn_to(ratio: float) -> None:
    conf = config()
    Watched.seen = []
    engine = Sim(conf)
    replay(Watched(engine.cluster, ratio=ratio), engine, jobs(6.0, span_s=30.0))
    prefill, hot, cold = (sum(seen[g] for seen in Watched.seen) for g in (2, 0, 1))
    assert prefill > 0  # GPU 2 prefills for GPU 0, where the hot model decodes; the cold one decodes on GPU 1
    assert cold / (hot + cold) == pytest.approx(ratio, abs=0.1)


# ------------------------------------------------------------------ laws


def test_nothing_offloaded_is_dedicated_serving() -> None:
    conf, load = config(2), jobs(5.0)
    ours, theirs = (
        ran(name, conf, load, **fields)[0]
        for name, fields in (("weaver", {"prefill": "beside", "ratio": 0.0}), ("dedicated", {}))
    )
    same = [name for name in ours.column_names if name != "gpu_path"]
    assert len(same) > 15
    for name in same:
        if "gpu" not in name:  # the hot model comes first on the GPUs here
            assert ours[name].equals(theirs[name]), name


def test_each_part_takes_from_what_the_hot_model_waits() -> None:
    """Section 5.3: CPU control is far slower, splitting a little faster; the cold model pays for polls and kernels."""
    load = jobs(8.0)
    cpu, unsplit, both, off = (
        tpot_ms(ran(Weaver, config(), load, **fields)[0], load)
        for fields in ({"control": "cpu", "split": False}, {"split": False}, {}, {"ratio": 0.0})
    )
    assert cpu[1] > 2 * unsplit[1] > 2 * both[1]
    assert off[0] < unsplit[0] < both[0]


def test_offloading_serves_more_where_memory_is_short() -> None:
    """The KV of 30 requests a second does not fit one GPU; a share of it elsewhere lets more decode at a time."""
    load = jobs(30.0, span_s=60.0)
    last = [max(x for x in ran(Weaver, config(), load, ratio=ratio)[0]["done_ns"].to_pylist()) for ratio in (0.0, 0.45)]
    assert last[1] < 0.9 * last[0]


def test_the_model_of_the_greatest_demand_is_hot() -> None:
    policy = Weaver(Sim(config(models=3, gpus=6)).cluster)
    actions = [repr(action) for action in policy.start()]
    assert policy.hot == "m1"
    assert policy.at["m1"].inst.place == (0,)
    assert {policy.at[m].inst.place for m in ("m0", "m2")} == {(1,), (2,)}
    assert policy.receivers == [(1,), (2,)]
    assert sum("prefill" in action for action in actions) == 3
    with pytest.raises(Infeasible, match="leaves none"):
        list(Weaver(Sim(config(gpus=1)).cluster).start())


@cases(
    ("fields", "lacks"),
    [
        ({"ratio": 0.0}, {"Move.attend", "Run.op_s", "Wake"}),
        ({"control": "cpu", "split": False}, {"Run.op_s", "Wake"}),
        ({"split": False}, {"Wake"}),
        (
            {"ratio": 0.0, "prefill": "beside"},
            {"Move", "Move.to:gpu", "Move.attend", "Run.op_s", "Run.phase:prefill", "Wake"},
        ),
    ],
)
def test_each_preset_uses_what_it_says(fields: dict[str, Any], lacks: set[str]) -> None:
    cluster = Sim(config()).cluster
    assert Weaver(cluster).uses - Weaver(cluster, **fields).uses == lacks
