"""A recorded run is the run: the same rows, every second of a request in order, what lanes, links and memory did."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from harness.engines.sim.engine import Sim
from harness.engines.sim.recorder import Traced
from harness.engines.sim.trace import SECONDS, Trace
from tests.cases import cases
from tests.harness.engines.sim.world import World, drive
from tests.harness.engines.sim.worlds import CUT, SHARED, SLICED, TURNED, WILD, looped, world

CAUSES = ("admission", "load", "kv", "transfer", "queue", "compute", "time_slice", "contention")
END_S = 60.0


class TracedWorld(World):
    """A world on the simulator with a recorder."""

    def sim(self) -> Sim:
        return Traced.of(super().sim())


def both(w: World) -> tuple[Sim, Sim, Trace]:
    """Run the world without and with a recorder; return both simulators, and what was recorded."""
    w = replace(w, end_s=min(w.end_s, END_S))
    recorded, told = drive(TracedWorld(**{f.name: getattr(w, f.name) for f in fields(w)}))
    plain, heard = drive(w)
    assert told == heard
    assert isinstance(recorded, Traced)
    return plain, recorded, recorded.recorder.trace()


def spent(trace: Trace, n: int) -> dict[str, np.ndarray]:
    """Return seconds of each request by cause, over its stretches."""
    totals = {name: np.zeros(n) for name in SECONDS}
    for stretch in trace.stretches:
        for name, seconds in stretch.seconds.items():
            totals[name][stretch.request] += seconds
    totals["queue"] += totals.pop("closed")
    return totals


@cases("first", [0, TURNED, WILD, CUT, SLICED, SHARED, -1])
def test_a_recorded_world_is_the_same_and_accounts_for_every_second(first: int) -> None:
    for seed in range(first, first + 12) if first >= 0 else range(12):
        plain, recorded, trace = both(world(seed) if first >= 0 else looped(seed))
        R = plain.S.requests
        for name in R.dtype.names or ():
            np.testing.assert_array_equal(R[name], recorded.S.requests[name], f"{name} of world {seed}")
        totals = spent(trace, len(R))
        for cause in CAUSES:
            np.testing.assert_allclose(totals[cause], R[cause], atol=1e-7, err_msg=f"{cause} of world {seed}")
        laws(trace, recorded, seed)


def test_loads_that_follow_each_other_within_an_instant_are_told_apart() -> None:
    _, recorded, trace = both(world(TURNED + 135))  # evicts at the end of each load, and loads again
    loads = [transfer for transfer in trace.transfers if transfer.kind == "load" and transfer.done]
    assert len(loads) == recorded.S.s["loads"] > 30
    later = [(a, b) for a, b in pairwise(loads) if a.end_s == b.asked_s]
    assert len(later) > 20


def laws(trace: Trace, sim: Sim, seed: int) -> None:
    """Check what holds of any trace."""
    w, where = sim.S.s, f"world {seed}"
    ends: dict[int, float] = {}
    for span in trace.stretches:
        assert span.start_s == pytest.approx(ends.get(span.request, trace.arrival_s[span.request]), abs=3e-9), where
        assert sum(span.seconds.values()) == pytest.approx(span.end_s - span.start_s, abs=1e-7), where
        assert min(span.seconds.values()) >= 0, where
        ends[span.request] = span.end_s
    loads = [x for x in trace.transfers if x.kind == "load" and x.done and not math.isnan(x.end_s)]
    assert len(loads) == w["loads"], where
    moved = [x for x in trace.transfers if x.kind != "load" and x.done and not math.isnan(x.end_s)]
    assert len(moved) <= w["moves"], where  # KV of no bytes arrives at the instant at which it is asked for
    assert all(x.size_bytes > 0 for x in loads), where
    for transfer in trace.transfers:
        times = (transfer.asked_s, transfer.granted_s, transfer.moved_s, transfer.end_s)
        stamps = [x for x in times if not math.isnan(x)]
        assert stamps == sorted(stamps), where
    lanes: dict[tuple[object, bool], float] = defaultdict(lambda: -math.inf)
    for step in sorted(trace.steps, key=lambda x: x.start_s):
        key = step.batch, step.decode_lane
        assert step.start_s >= lanes[key] - 1e-9, where
        assert step.end_s > step.start_s, where
        lanes[key] = step.end_s
    links: dict[int, float] = defaultdict(lambda: -math.inf)
    for carried in sorted(trace.carried, key=lambda x: x.start_s):
        assert carried.start_s >= links[carried.link] - 1e-9, where
        links[carried.link] = carried.end_s
    whole = float(sim.S.links["busy_s"].sum())
    assert sum(x.end_s - x.start_s for x in trace.carried) >= whole - 1e-6, where
    assert trace.start_s <= min((x.start_s for x in trace.steps), default=0.0), where
    if not w["unlimited"]:
        for sample in trace.memory:
            assert 0 <= sample.weights_bytes + sample.kv_bytes <= trace.gpu_bytes[sample.gpu], where
            assert sample.weights_bytes >= 0 <= sample.kv_bytes, where
