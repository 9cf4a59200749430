"""Steps of several models on one GPU: kernels take turns. Golden numbers, laws, and pairs that were measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from harness.engines.costs import quantities
from harness.engines.sim.engine import Sim
from harness.engines.sim.kernel.rates import take_turns
from harness.policy.actions import Load, Run
from harness.policy.types import Batch, Inst
from tests.cases import cases
from tests.harness.engines.sim import oracle
from tests.harness.engines.sim.kernel.test_laws import prefill_queue

TURNS = quantities.quantities("h200")["co_run"]
Alike = pytest.approx


class Lane(NamedTuple):
    """A step on a GPU: GPU ms a layer alone on its SMs, whether of prompts, duty, partition, bandwidth asked for."""

    g: float
    prompts: bool = False
    u: float = 1.0
    part: str = ""
    h: float = 0.0

    @property
    def fill(self) -> float:
        return float(TURNS["prompt_fill" if self.prompts else "decode_fill"])

    @property
    def turn_s(self) -> float:
        return 1e-3 * self.g * (1.0 if self.prompts else TURNS["passes"])


def in_kernel(
    lanes: Sequence[Lane], sharing: str = "fluid", quantum_s: float = 0.0, switching: float = 0.0
) -> list[float]:
    """Return how many times as long each lane's step takes in the simulator's kernel."""
    w = prefill_queue(0.25, 1.0, 1, models=len(lanes))
    w.machine.tables.cost["apart"], w.machine.tables.cost["crowd"] = TURNS["apart"], TURNS["crowd"]
    sim = Sim(w.config, {"sharing": sharing}, w.machine._replace(quantum_s=quantum_s, switching=switching))
    for k in range(len(lanes)):
        batch = Batch(Inst(f"m{k}", (0,)))
        sim.do(Load(batch.inst))
        sim.do(Run(batch))
    S, names = sim.S, sorted({lane.part for lane in lanes})
    for k, lane in enumerate(lanes):
        n = S.lanes[2 * k]
        n["turn_s"], n["duty"], n["fills"], n["max_rate"], n["slow"] = lane.turn_s, lane.u, lane.fill, 1.0, 1.0
        n["slice_s"], n["next"] = 1e-3 * lane.g / lane.u, 2 * k - 2 if k else -1
        n["partition"] = 1 + names.index(lane.part) if lane.part else 0
        S.demands["hbm"][n["demand"]] = lane.h
    S.gpus["head"][0], S.gpus["lanes"][0], S.gpus["active"][0] = 2 * len(lanes) - 2, len(lanes), len(lanes)
    take_turns(S.at, 0)
    return [1 / S.lanes["given"].item(2 * k) for k in range(len(lanes))]


def in_oracle(lanes: Sequence[Lane]) -> list[float]:
    """Return the same in the oracle."""
    limits = TURNS["apart"], TURNS["crowd"]
    steps: list[Any] = [
        SimpleNamespace(
            place=(0,),
            top=1.0,
            demand=(0.0, x.h),
            duty=x.u,
            fill=x.fill,
            kernels_s=x.turn_s,
            part=x.part or None,
            limits=limits,
        )
        for x in lanes
    ]
    return [1 / rate for rate in oracle.beside(steps)]


D1, D64 = Lane(4.793 / 32), Lane(7.228 / 32)  # decode steps of 1 and 64 sequences of an 8B on an H200
P, CHUNK = Lane(13.61 / 8, prompts=True), Lane(14.3 / 32, prompts=True)  # 2,048 and 512 tokens of a prompt
ONE = Lane(0.0661)  # a decode step of a 1B
B1, B3, B8 = Lane(0.59 * 1.620 / 16, u=0.59), Lane(0.66 * 3.489 / 28, u=0.66), Lane(0.80 * 5.568 / 32, u=0.80)
HALF = D1._replace(part="a", h=0.705)
REST = P._replace(part="b", h=0.086)
GOLDEN: list[tuple[list[Lane], list[float]]] = [  # by the reference function, written apart from both
    ([D1, D1], [1.60, 1.60]),
    ([D1, D64], [2.006, 1.331]),
    ([D64, D64], [1.60, 1.60]),
    ([D1, P], [6.250, 1.101]),
    ([D64, P], [4.414, 1.172]),
    ([P, P], [1.92, 1.92]),
    ([D1, CHUNK], [2.232, 1.496]),
    ([D1, D1, P], [7.050, 7.050, 1.242]),
    ([P, P, D1], [2.061, 2.061, 11.70]),
    ([ONE, P], [13.15, 1.022]),
    ([ONE, D1], [2.613, 1.153]),
    ([B1, B1], [1.191, 1.191]),
    ([B1] * 4, [2.002] * 4),
    ([B3] * 4, [2.204] * 4),
    ([B8, B8], [1.388, 1.388]),
    ([B1, B1, B3, B8], [2.800, 2.800, 2.302, 1.630]),
    ([HALF, HALF._replace(part="b")], [1.65, 1.65]),
    ([D64._replace(part="a", h=0.617), D64._replace(part="b", h=0.617)], [1.444, 1.444]),
    ([HALF, REST], [1.37, 1.37]),
    ([HALF, REST._replace(g=2.804), D1], [1.60, 1.37, 10.59]),
]


@cases(("lanes", "times"), GOLDEN)
def test_golden_numbers_of_the_law(lanes: list[Lane], times: list[float]) -> None:
    assert in_kernel(lanes) == Alike(times, rel=1.5e-3)
    assert in_oracle(lanes) == Alike(times, rel=1.5e-3)
    assert in_kernel(lanes) == Alike(in_oracle(lanes), rel=1e-12)


# Times as long as alone, by row, beside the unit of the column: an H200, results/h200/corun.md.
SEEN = [[1.60, 2.08, 5.97], [1.42, 1.73, 4.83], [1.12, 1.21, 1.90]]  # both on all SMs
APART = [[1.59, 1.51, 1.26], [1.59, 1.49, 1.35], [1.48, 1.37, 1.41]]  # on 64 and 68 SMs


def test_the_pairs_that_were_measured_are_met_within_six_percent() -> None:
    """At the seconds that the probe has of each alone; two constants for partitions, three for all SMs."""
    busy = [D1._replace(h=0.705), D64._replace(h=0.617), P._replace(h=0.086)]
    for seen, units, (mine, other) in ((SEEN, [D1, D64, P], ("", "")), (APART, busy, ("a", "b"))):
        ours = [[in_kernel([a._replace(part=mine), b._replace(part=other)])[0] for b in units] for a in units]
        off = np.log(np.divide(ours, seen))
        assert np.sqrt(np.mean(off**2)) < 0.06
        assert np.abs(off).max() < 0.10


LANES = [D1, D64._replace(u=0.7), P, CHUNK._replace(u=0.4), HALF, REST, B3]


def test_a_lane_alone_takes_as_long_as_alone() -> None:
    assert [in_kernel([lane]) for lane in LANES] == [[1.0]] * len(LANES)


@cases("chosen", [(0, 1, 2), (1, 3, 6), (0, 2, 4, 5), (0, 1, 2, 3, 6)])
def test_the_order_of_lanes_does_not_matter_and_one_more_speeds_none_up(chosen: tuple[int, ...]) -> None:
    for order in itertools.permutations(chosen):
        times = dict(zip(order, in_kernel([LANES[k] for k in order]), strict=True))
        assert [times[k] for k in chosen] == Alike(in_kernel([LANES[k] for k in chosen]), rel=1e-12)
        fewer = in_kernel([LANES[k] for k in order[:-1]])
        assert all(times[k] >= before - 1e-12 for k, before in zip(order, fewer, strict=False))


@cases("unit", [D1, P, B1])
def test_equal_lanes_slow_each_other_equally(unit: Lane) -> None:
    for k in range(2, 9):
        times = in_kernel([unit] * k)
        assert times == Alike([times[0]] * k, rel=1e-12)
        assert sum(1 / x for x in times) <= 1 / (unit.fill * unit.u) + 1e-9  # no more is done than the GPU can
        if unit.u == 1.0:
            assert times[0] == Alike(max(1.0, k * unit.fill))


def test_who_is_hardly_on_the_gpu_leaves_others_as_alone() -> None:
    assert in_kernel([P, D1._replace(u=1e-9)]) == Alike([1.0, 1.0], rel=1e-6)
    assert in_kernel([P._replace(u=1e-9), D1]) == Alike([1.0, 1.0], rel=1e-6)


def test_lanes_of_one_partition_take_turns_as_if_it_were_the_gpu() -> None:
    same = [HALF, HALF._replace(h=0.0), REST]
    assert in_kernel(same)[:2] == Alike([1.60, 1.60])
    assert in_oracle(same) == Alike(in_kernel(same), rel=1e-12)


@cases(("processes", "most"), [(2, 0.97), (3, 0.97)])
def test_processes_bound_by_the_gpu_gain_nothing_by_turns_and_those_bound_by_the_host_do(
    processes: int, most: float
) -> None:
    """The work of k without MPS beside that of one: .96 and .97 measured (GB10); 1.24 to 1.73 where hosts are busy."""
    bound = in_kernel([D1] * processes, "turns", switching=0.035)
    assert processes / bound[0] == Alike(1 / 1.035)
    assert 0.96 <= processes / bound[0] <= most
    light = in_kernel([D1._replace(u=0.6)] * processes, "turns", switching=0.035)
    assert 1.24 <= processes / light[0] <= 1.73


def test_a_slice_lasts_a_quantum_at_least_and_is_never_the_hosts() -> None:
    short, long = Lane(2.0, u=1.0), Lane(10.0, u=1.0)
    assert in_kernel([short, long], "turns", quantum_s=0.005) == Alike([(5 + 10) / 2, (5 + 10) / 10])
    gap = Lane(2.0, u=0.5)  # 2 ms on the GPU, 2 ms on the host: it is there for a part of the time
    assert in_kernel([gap, gap], "turns")[0] < 2.0
