"""Turns of batches, slices of prefills and priorities on links, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.engines.costs.quantities import Way
from harness.engines.costs.shapes import kv_token_bytes, weight_bytes
from harness.engines.sim.engine import Sim
from harness.policy.actions import Action, Admit, Drop, Limit, Load, Move, Run
from harness.policy.events import Done, Preempted, Prefilled, TurnEnded
from harness.policy.types import Batch, Host, Inst
from tests.cases import cases
from tests.harness.engines.sim.kernel.agree import M0, M1, apart, clock
from tests.harness.engines.sim.oracle import Oracle, Result
from tests.harness.engines.sim.world import NEVER, SHAPE, World, drive


def turns(w: World, rota: Sequence[Sequence[Action]], end_s: float) -> list[tuple[float, TurnEnded]]:
    """Return the turns that end, each followed at once by the next of a list; the first starts at 0."""
    w = replace(w, script=[*w.script, *((NEVER, a) for a in rota[0])], rota=rota)
    sim, told = drive(w, end_s)
    want = Oracle(w.setup()).run(w.jobs, w.script, end_s, w.answer())
    ours = [(t, e) for t, e in told if isinstance(e, TurnEnded)]
    assert ours == [(t, e) for t, e in want.told if isinstance(e, TurnEnded)]
    assert sim.S.gpus["busy_s"][0] <= end_s
    return ours


def test_two_batches_take_turns_of_whole_steps_without_a_gap() -> None:
    both: list[list[Action]] = [[Run(b, "prefill", steps=1)] for b in (M0, M1)]
    decodes: list[list[Action]] = [[Run(M0, "decode", for_s=0.6)], [Run(M1, "decode", for_s=0.5)]]
    rota = [*both, *decodes * 3]
    w = clock()
    ends = turns(w, rota, 2.9)
    # a turn of 0.6 s takes three steps of 1/4 s: the first boundary at or after it; one of 0.5 s takes two
    assert [(t, e.batch, e.why, e.steps, e.ran_s) for t, e in ends] == [
        (0.125, M0, "steps", 1, 0.125),
        (0.25, M1, "steps", 1, 0.125),
        (1.0, M0, "time", 3, 0.75),
        (1.5, M1, "time", 2, 0.5),
        (2.25, M0, "time", 3, 0.75),
        (2.75, M1, "time", 2, 0.5),
    ]
    sim, _ = drive(replace(w, script=[*w.script, *((NEVER, a) for a in rota[0])], rota=rota), 2.75)
    assert sim.S.requests["compute"].tolist() == [0.125 + 1.5, 0.125 + 1.0]
    assert sim.S.requests["queue"].tolist() == [0.125 + 1.0, 0.125 + 0.75 * 2 + 0.0]
    assert sim.S.gpus["busy_s"][0] == 2.75


def prefill(*script: tuple[float, Action], n: int = 1, **order: Any) -> tuple[Sim, Result]:
    """Return a lane for prompts, whose steps of 1/8 s a prompt have two layers at half the speed on 50 of 100 SMs."""
    w = clock(1, prompt=4, output=1, n=n)
    tables = w.machine.tables._replace(pre_rate=np.array([[0.5, 1.0]]))
    first = (NEVER, Run(M0, "prefill", **order))
    w = replace(w, machine=w.machine._replace(tables=tables), script=[*w.script, first, *script], end_s=9.0)
    assert apart(w) == []
    return drive(w)[0], Oracle(w.setup()).run(w.jobs, w.script, w.end_s)


def test_a_long_prefill_gives_its_sms_back_between_slices() -> None:
    wider = (0.01, Run(M0, "prefill", slice_layers=1))
    sim, _ = prefill(wider, sms=50, slice_layers=1)
    assert sim.S.requests["first"].tolist() == [0.125 + 0.0625]  # a layer on half of the SMs, one on all
    assert sim.S.requests["compute"][0] == 0.125
    assert sim.S.requests["contention"][0] == 0.0625
    sim, _ = prefill(wider, sms=50)
    assert sim.S.requests["first"].tolist() == [0.25]  # whole: the order waits for the end of the step
    assert sim.S.batches["steps"].tolist() == [1]


@cases(("layers", "done_s"), [(1, 3.75), (2, 4.75)])
def test_partitions_that_change_together_wait_for_a_slice_not_for_the_prefill(layers: int, done_s: float) -> None:
    w = clock(2, prompt=4, output=9, n=8)
    half = np.array([[0.5, 1.0]] * 2)
    tables = w.machine.tables._replace(pre_rate=half, dec_rate=half[:, :, None])
    split = [Run(M0, "decode", sms=50), Run(M1, "prefill", sms=50, slice_layers=layers)]
    whole = [Run(M0, "decode"), Run(M1, "prefill", slice_layers=layers)]
    script = [*w.script, (NEVER, Run(M0, "prefill")), *((1.0, a) for a in split), *((1.2, a) for a in whole)]
    w = replace(w, machine=w.machine._replace(tables=tables), script=script, end_s=9.0)
    assert apart(w) == []
    sim, _ = drive(w)
    # M0's first step takes 1/2 s from 1.0 on, and then waits for M1: a layer of it ends at 2.0, both at 3.0
    assert sim.S.requests["done"][:8].tolist() == [done_s] * 8
    assert sim.S.requests["first"][8:].tolist() == [2.5 if layers == 1 else 3.0] * 8


def test_a_request_is_dropped_between_slices() -> None:
    for layers, end_s in ((1, 0.0625), (2, 0.125)):
        sim, _ = prefill((0.01, Drop(0)), slice_layers=layers)
        assert sim.S.requests["done"].tolist() == [end_s]
    sim, _ = prefill((0.01, Drop(0)), n=2, slice_layers=1)
    assert sim.S.requests["done"].tolist() == [0.125, 0.125 + 0.0625]  # the other's second slice is for it alone


def test_a_step_between_two_slices_goes_on_when_its_lane_opens_again() -> None:
    sim, _ = prefill((0.01, Run(M0, "prefill", steps=0)), (1.0, Run(M0, "prefill")), slice_layers=1)
    assert sim.S.requests["first"].tolist() == [1.0 + 0.0625]
    assert sim.S.requests["queue"].tolist() == [1.0 - 0.0625]
    sim, _ = prefill((0.01, Run(M0)), slice_layers=1)  # an order for both phases ends the step first
    assert sim.S.requests["first"].tolist() == [0.125]


def test_a_turn_of_time_ends_between_slices_one_of_steps_does_not() -> None:
    for order, want in (({"for_s": 0.05}, (0.0625, "time", 0)), ({"steps": 1}, (0.125, "steps", 1))):
        _, told = prefill(slice_layers=1, **order)[1][:2]
        (at, turn), *_ = [(t, e) for t, e in told if isinstance(e, TurnEnded)]
        assert (at, turn.why, turn.steps) == want


def test_who_leaves_its_step_between_slices_is_computed_anew() -> None:
    sim, _ = prefill((0.01, Admit(0, M0)), slice_layers=1)  # a new place in the order: what was done is lost
    assert sim.S.requests["first"].tolist() == [0.0625 + 0.125]


def test_a_request_between_two_slices_may_lose_its_kv() -> None:
    w = clock(1, prompt=16, output=40, n=2)
    arrival_s = np.array([0.0, 1.0])  # the later one is halted behind its first layer
    orders = [
        (NEVER, Run(M0, "prefill", slice_layers=1)),
        (NEVER, Run(M0, "decode")),
        (1.01, Run(M0, "prefill", steps=0)),
    ]
    limit = (NEVER, Limit("m0", 0, 4 * 16 * kv_token_bytes(SHAPE)))
    script = [*w.script, *orders, limit, (9.0, Run(M0, "prefill"))]
    w = replace(w, jobs=replace(w.jobs, arrival_s=arrival_s), script=script, end_s=30.0)
    assert apart(w) == []
    _, told = drive(w)
    # 17 tokens are there at 0.125; sixteen steps later a third block is wanted, and both have two of the four
    assert [(t, e.rid) for t, e in told if isinstance(e, Preempted)] == [(0.125 + 16 * 0.25, 1)]
    done_s = 0.125 + 39 * 0.25  # of the first, whose blocks the other needs
    assert [t for t, e in told if isinstance(e, Prefilled)] == [0.125, done_s + 0.125]


@cases("order", [Run(M0, slice_layers=1), Run(M0, "decode", slice_layers=1)])
def test_only_a_prefill_runs_in_slices(order: Run) -> None:
    _, told = drive(replace(clock(1), script=[*clock(1).script, (1.0, order)]), 2.0)
    assert [(e.action, e.failed) for _, e in told if isinstance(e, Done)] == [(order, "never")]


def test_weights_that_come_late_cost_no_quota() -> None:
    w = clock(1)
    assert turns(w, [[Run(M0, for_s=0.3)]], 9.0)[0] == (0.375, TurnEnded(M0, "mixed", "time", 2, 0.375))
    out: list[tuple[float, Action]] = [x for x in w.script if not isinstance(x[1], Load)]
    _, told = drive(replace(w, script=[*out, (0.5, Run(M0, for_s=0.3)), (0.5, Load(M0.inst))]), 9.0)
    assert [x for x in told if isinstance(x[1], TurnEnded)] == [(1.875, TurnEnded(M0, "mixed", "time", 2, 0.375))]


def test_a_turn_ends_empty_or_stuck_when_nothing_can_step() -> None:
    w = clock(output=2)
    ends = turns(w, [[Run(M0, for_s=9.0)], [Run(M0, "decode", for_s=9.0)]], 5.0)
    # one prefill, one decode step, and then nobody is left; a turn for nobody ends at once
    assert ends[0] == (0.375, TurnEnded(M0, "mixed", "empty", 2, 0.375))
    assert ends[1] == (0.375, TurnEnded(M0, "decode", "empty", 0, 0.0))
    out = replace(w, script=[x for x in w.script if not isinstance(x[1], Load)])
    assert turns(out, [[Run(M0, for_s=9.0)]], 5.0)[0] == (0.0, TurnEnded(M0, "mixed", "stuck", 0, 0.0))
    away = [*w.script, (NEVER, Run(M0, "prefill")), (1.0, Move(0, Host())), (2.0, Run(M0, "decode", steps=3))]
    _, told = drive(replace(w, script=[*away, (2.0, Move(0, (0,)))]), 5.0)
    assert [e.why for _, e in told if isinstance(e, TurnEnded)] == ["empty"]  # waits for its KV, and finishes
    _, told = drive(replace(w, script=away), 5.0)
    assert [e.why for _, e in told if isinstance(e, TurnEnded)] == ["stuck"]


def test_orders_that_end_a_turn() -> None:
    w = clock(1)
    start: list[tuple[float, Action]] = [*w.script, (NEVER, Run(M0, steps=100))]
    _, told = drive(replace(w, script=[*start, (0.5, Run(M0, for_s=0.1))]), 5.0)
    # replaced: silent; the step in flight until 0.625 is nobody's, the new turn starts behind it
    assert told[2:] == [(0.875, TurnEnded(M0, "mixed", "time", 1, 0.25))]
    _, told = drive(replace(w, script=[*start, (0.5, Run(M0, steps=0))]), 5.0)
    assert told[2:] == [(0.625, TurnEnded(M0, "mixed", "steps", 3, 0.625))]
    _, told = drive(replace(w, script=[*start, (0.5, Run(M0, "prefill", steps=0))]), 5.0)
    assert told[2:] == []  # there is no such lane
    sim, _ = drive(replace(w, script=[*start, (0.5, Run(M0, "decode")), (0.5, Run(M0, "decode", steps=0))]), 5.0)
    assert sim.view().lane(M0, "mixed") is None
    assert sim.view().lane(M0, "decode") is None


def test_the_order_in_force_is_none_after_the_turn() -> None:
    w = clock(1)
    order = Run(M0, for_s=0.1)
    sim = replace(w, script=[*w.script, (NEVER, order)]).begun(frozenset({TurnEnded}))
    assert sim.view().lane(M0, "mixed") == order
    assert sim.poll(9.0) == TurnEnded(M0, "mixed", "time", 1, 0.125)
    assert sim.view().lane(M0, "mixed") is None
    for bad in (Run(M0, for_s=-1.0), Run(M0, for_s=math.nan), Run(M0, steps=-1)):
        sim.do(bad)
        event = sim.poll(9.0)
        assert isinstance(event, Done)
        assert event.failed is not None


# ---------------------------------------------------------------- links, by hand


def link(script: list[tuple[float, Action]], pieces: int = 8) -> list[tuple[float, Action]]:
    """Load three models of 1 s on one link, in 8 pieces; return when each load or move is done, in both simulators."""
    w = clock(3)
    size = weight_bytes(SHAPE)
    spec = w.machine.spec._replace(h2d=float(size), d2h=float(size))
    machine = w.machine._replace(spec=spec, ladder={"host": Way(0.0, "pcie")})
    free = [x for x in w.script if not isinstance(x[1], Load) or x[1].inst == M0.inst]
    w = replace(w, machine=machine, config=replace(w.config, piece_bytes=size // pieces), script=[*free, *script])
    want, done = (
        [(t, e.action) for t, e in events if isinstance(e, Done) and e.failed is None and t > NEVER]
        for events in (Oracle(w.setup()).run(w.jobs, w.script, 9.0).told, drive(w, 9.0)[1])
    )
    assert [a for _, a in done] == [a for _, a in want]
    assert [t for t, _ in done] == pytest.approx([t for t, _ in want], abs=1e-12)
    return done


M2 = Batch(Inst("m2", (0,)))


def test_weights_that_somebody_waits_for_overtake_a_prefetch() -> None:
    two: list[tuple[float, Action]] = [(0.0, Load(M1.inst)), (0.0, Load(M2.inst))]
    assert link(two) == [(1.0, Load(M1.inst)), (2.0, Load(M2.inst))]
    # asked for at 0.3: the piece on the wire, the third, is not cut
    assert link([*two, (0.3, Run(M2))]) == [(1.375, Load(M2.inst)), (2.0, Load(M1.inst))]
    # closed again at 0.6, when its second piece is on the wire
    assert link([*two, (0.3, Run(M2)), (0.6, Run(M2, steps=0))]) == [(1.25, Load(M1.inst)), (2.0, Load(M2.inst))]
    # both awaited at 0.45: in order of issue again
    assert link([*two, (0.3, Run(M2)), (0.45, Run(M1))]) == [(1.125, Load(M1.inst)), (2.0, Load(M2.inst))]
    assert link([*two, (0.3, Run(M2))], pieces=1) == [(1.0, Load(M1.inst)), (2.0, Load(M2.inst))]


def test_kv_overtakes_weights() -> None:
    kv_s = 16 * kv_token_bytes(SHAPE) / weight_bytes(SHAPE)  # a block
    out: list[tuple[float, Action]] = [(NEVER, Run(M0, "prefill")), (0.5, Move(0, Host())), (1.0, Load(M1.inst))]
    done = link([*out, (1.3, Move(0, (0,)))])
    assert [a for _, a in done] == [Move(0, Host()), Move(0, (0,)), Load(M1.inst)]
    assert [t for t, _ in done] == pytest.approx([0.5 + kv_s, 1.375 + kv_s, 2.0 + kv_s], abs=1e-12)
