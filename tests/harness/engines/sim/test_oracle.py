"""The oracle on examples worked by hand (dyadic costs: sums are exact).

What holds of any workload is asked of the kernel, which agrees with the oracle: kernel/test_kernel.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from harness.engines.costs.coef import COST, Tables
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Finished, Preempted, Prefilled
from harness.policy.types import Batch, Host, Inst, Jobs
from tests.cases import cases
from tests.harness.engines.sim.oracle import ModelSetup, Oracle, Req, Result, Setup, noise, price
from tests.workloads.asked import asked

NEVER = -math.inf  # before the clock
A, B = Inst("a", (0,)), Inst("b", (0,))
Ways = dict[tuple[Inst, str], tuple[float, list[tuple[str, int]]]]
Timed = tuple[float, Action]
TOKEN, STEP = 1 / 64, 1 / 4  # s a token of GEMM, s of decode attention a step


def tables(**cost: float) -> Tables:
    """Return one row: gemm(m) = m/64, decode attention 1/4 a step; demands none unless given."""
    row = np.zeros(1, COST)
    row["flops"] = row["hbm"] = row["pre_x"] = row["pre_slow"] = row["dec_slow"] = 1.0
    row["pre_fill"] = row["dec_fill"] = row["passes"] = row["apart"] = row["many"] = 1.0
    row["att0"] = STEP
    for key, value in cost.items():
        row[key] = value
    grid = np.array([1, 2, 4])
    return Tables(
        cost=row,
        grid=grid,
        gemm=grid[None, :] * TOKEN,
        head=np.zeros((1, 3)),
        share=np.array([0.25, 0.5, 1.0]),
        seqs=np.array([1.0, 3.0]),
        dec_rate=np.array([[[0.5, 0.25], [0.75, 0.5], [1.0, 1.0]]]),
        pre_rate=np.array([[0.25, 0.5, 1.0]]),
        kernels=np.ones((1, 3, 1)),
    )


def setup(*, blocks: int = 1000, cost: dict[str, float] | None = None, **over: Any) -> Setup:
    """Return a GPU of 8 bytes of weights a model and `blocks` blocks of 1 byte; 4 tokens a block, no watermark."""
    defaults: dict[str, Any] = {
        "tables": tables(**(cost or {})),
        "models": {m: ModelSetup(0, footprint_bytes=8, block_bytes=1, granule_bytes=1) for m in "ab"},
        "gpu_bytes": (8 + blocks,),
        "gpu_sms": (100,),
        "block_tokens": 4,
        "watermark": 0.0,
        "chunk_tokens": 0,
    }
    return Setup(**(defaults | over))


def jobs(*rows: tuple[float, str, int, int]) -> Jobs:
    """Return jobs from rows of (arrival, model, prompt, output)."""
    arrival_s, names, prompt, output = zip(*rows, strict=True)
    models = sorted(set(names))
    return asked(models, arrival_s, [models.index(name) for name in names], prompt, output)


def resident(*insts: Inst, **order: Any) -> list[tuple[float, Action]]:
    """Return the orders that load, route and open each model before the clock starts."""
    return [(NEVER, x) for i in insts for x in (Load(i), Admit(i.model, Batch(i)), Run(Batch(i), **order))]


def waits(r: Req) -> dict[str, float]:
    return {k: v for k, v in r.waits.items() if v}


def events(result: Result, *kinds: type[Event]) -> list[tuple[float, Event]]:
    return [(t, e) for t, e in result.told if isinstance(e, kinds)]


def check(result: Result, work: Jobs) -> None:
    """Check that the parts of every request sum to its latency, and its tokens are all there."""
    for r in result.requests:
        if r.state != "unfinished":
            assert sum(r.waits.values()) == pytest.approx(r.done_s - work.arrival_s[r.id], abs=1e-9)
        if r.state == "done":
            assert r.made == len(r.token_s) == work.output_tokens[r.id]
            assert r.token_s == sorted(r.token_s)


def test_one_request() -> None:
    work = jobs((1.0, "a", 8, 3))
    out = Oracle(setup()).run(work, resident(A))
    r = out.requests[0]
    # prefill 8/64, then two decode steps of 1/64 + 1/4
    assert r.token_s == [1.125, 1.125 + 17 / 64, 1.125 + 34 / 64]
    assert (r.admit_s, r.first_s, r.done_s, r.state, r.made) == (1.0, 1.125, 1.125 + 34 / 64, "done", 3)
    assert waits(r) == {"compute": 0.125 + 34 / 64}
    assert out.told == [(1.125, Prefilled(0, Batch(A))), (r.done_s, Finished(0, Batch(A), "done"))]


def test_one_token_output_is_not_told_as_prefilled() -> None:
    out = Oracle(setup()).run(jobs((0.0, "a", 8, 1)), resident(A))
    assert out.told == [(0.125, Finished(0, Batch(A), "done"))]
    assert out.requests[0].token_s == [0.125]


def test_unrouted_arrivals_are_told_and_held() -> None:
    script: list[Timed] = [(NEVER, Load(A)), (NEVER, Run(Batch(A))), (2.0, Admit(0, Batch(A)))]
    out = Oracle(setup()).run(jobs((1.0, "a", 8, 1)), script)
    assert [t for t, _ in events(out, Arrived)] == [1.0]
    assert waits(out.requests[0]) == {"admission": 1.0, "compute": 0.125}
    assert out.requests[0].admit_s == 2.0


def test_a_prompt_waits_for_the_step_that_is_scheduled_ahead() -> None:
    prefill, step = 0.125, 17 / 64  # a prefill of 8 tokens, a decode step of one
    first = prefill + 1.5 * step  # within the second decode step
    work = jobs((0.0, "a", 8, 6), (first, "a", 8, 1))
    for ahead, steps in ((0, 2), (1, 3)):
        out = Oracle(setup(lookahead=ahead)).run(work, resident(A))
        assert out.requests[1].first_s == prefill + steps * step + prefill  # whole prompts: the decodes wait
        assert waits(out.requests[1])["queue"] == pytest.approx((steps - 1.5) * step)
    # Nothing else was there to be scheduled: it joins at once.
    for at in (0.0, 0.06):
        out = Oracle(setup(lookahead=1)).run(jobs((0.0, "a", 8, 1), (at, "a", 8, 1)), resident(A))
        assert out.requests[1].first_s == 0.25


def test_two_requests_prefill_together_and_batch() -> None:
    out = Oracle(setup()).run(jobs((0.0, "a", 4, 2), (0.0, "a", 12, 3)), resident(A))
    # one prefill of 16 tokens; a step of two: 2/64 + 1/4; a step of one
    assert out.requests[0].token_s == [0.25, 0.25 + 18 / 64]
    assert out.requests[1].token_s == [0.25, 0.25 + 18 / 64, 0.25 + 18 / 64 + 17 / 64]


def test_whole_prompts_go_before_decodes() -> None:
    out = Oracle(setup()).run(jobs((0.0, "a", 4, 3), (0.0625, "a", 8, 1)), resident(A))
    # arrives on the boundary of the first prefill: takes the very next step, the decode waits for its turn
    assert out.requests[1].token_s == [0.1875]
    assert out.requests[0].token_s == [0.0625, 0.1875 + 17 / 64, 0.1875 + 34 / 64]
    assert waits(out.requests[0]) == {"compute": 0.0625 + 34 / 64, "queue": 0.125}
    late = Oracle(setup()).run(jobs((0.0, "a", 4, 3), (0.0626, "a", 8, 1)), resident(A))
    assert late.requests[1].token_s == [0.0625 + 17 / 64 + 0.125]


def test_chunks_ride_with_decodes() -> None:
    out = Oracle(setup()).run(jobs((0.0, "a", 4, 4), (0.0625, "a", 8, 1)), resident(A, chunk_tokens=4))
    # steps of 1 decode + 3, 3, 2 tokens of the prompt: 4/64 + 1/4 twice, 3/64 + 1/4
    first = 0.0625 + 20 / 64
    assert out.requests[0].token_s == [0.0625, first, first + 20 / 64, first + 39 / 64]
    assert out.requests[1].token_s == [first + 39 / 64]
    assert waits(out.requests[1]) == {"compute": 59 / 64}


def test_prefill_attention_counts_the_cached_tokens() -> None:
    cost = {"pre0": 1.0, "pre1": 0.25, "pre2": 0.5}
    out = Oracle(setup(cost=cost)).run(jobs((0.0, "a", 8, 1)), resident(A, chunk_tokens=4))
    # 4 tokens after 0: area 8; 4 after 4: area 4 x 6 = 24
    assert out.requests[0].token_s == [2 * (4 / 64 + 1 + 1) + 0.5 * (8 + 24)]


def test_products_take_longer_in_steps_with_prompts() -> None:
    out = Oracle(setup(cost={"pre_x": 1.5})).run(jobs((0.0, "a", 4, 3), (0.5, "a", 2, 1)), resident(A, chunk_tokens=4))
    # 4 tokens of a prompt, a decode, then a decode and 2 tokens of the other prompt
    first, second = 1.5 * 4 / 64, 1.5 * 4 / 64 + 1 / 64 + STEP
    assert out.requests[0].token_s[:2] == [first, second]


def test_the_budget_of_whole_prompts() -> None:
    three = jobs((0.0, "a", 8, 1), (0.0, "a", 4, 1), (0.0, "a", 8, 1))
    out = Oracle(setup(prefill_tokens=12)).run(three, resident(A))
    assert [r.done_s for r in out.requests] == [12 / 64, 12 / 64, 20 / 64]
    out = Oracle(setup(prefill_tokens=4)).run(three, resident(A))  # the first goes whole all the same
    assert [r.done_s for r in out.requests] == [8 / 64, 12 / 64, 20 / 64]


def test_cap() -> None:
    two = jobs((0.0, "a", 4, 2), (0.0, "a", 4, 2))
    for out in (Oracle(setup(batch_cap=1)).run(two, resident(A)), Oracle(setup()).run(two, resident(A, seqs=1))):
        assert out.requests[0].token_s == [4 / 64, 21 / 64]
        assert out.requests[1].token_s == [25 / 64, 42 / 64]
        assert waits(out.requests[1]) == {"queue": 21 / 64, "compute": 21 / 64}


def test_pages_run_out_and_the_latest_recomputes() -> None:
    # 4 blocks of 4 tokens; both take 2 at admission (7 + 1 = 8 tokens), decode at l = 8, then need a third at l = 9
    work = jobs((0.0, "a", 7, 4), (0.0, "a", 7, 4))
    out = Oracle(setup(blocks=4)).run(work, resident(A))
    start, both, single = 14 / 64, 18 / 64, 17 / 64
    first, second = out.requests
    assert first.token_s == [start, start + both, start + both + single, start + both + 2 * single]
    preempted = start + both
    assert events(out, Preempted) == [(preempted, Preempted(1, Batch(A)))]
    # at 0's end, 7 + 2 tokens are recomputed, which gives the third; then one step
    again = first.done_s + 9 / 64
    assert second.token_s == [start, start + both, again, again + single]
    # its walk did not stop for memory at the instant of preemption; it did at the next boundary
    assert waits(second) == {"compute": start + both + 9 / 64 + single, "queue": single, "kv": single}
    assert (second.preemptions, second.first_s) == (1, start)
    assert len(events(out, Prefilled)) == 3
    check(out, work)


def test_alone_in_its_account_and_too_long_fails() -> None:
    out = Oracle(setup(blocks=2)).run(jobs((0.0, "a", 7, 9), (0.0, "a", 20, 1), (0.0, "a", 7, 1)), resident(A))
    # 1 is larger than the account and fails as soon as the walk reaches it; 0 cannot take a third block
    t = 7 / 64 + 17 / 64
    assert [r.state for r in out.requests] == ["failed", "failed", "done"]
    assert out.requests[0].done_s == t
    assert out.requests[0].made == 2
    assert out.requests[2].done_s == t + 7 / 64
    unlimited = Oracle(setup(blocks=2, memory="unlimited")).run(jobs((0.0, "a", 20, 1)), resident(A))
    assert unlimited.requests[0].state == "done"


def test_watermark_and_limit() -> None:
    two = jobs((0.0, "a", 7, 1), (0.0, "a", 7, 1))
    assert [r.done_s for r in Oracle(setup(blocks=4)).run(two, resident(A)).requests] == [14 / 64] * 2
    for out in (
        Oracle(setup(blocks=4, watermark=0.25)).run(two, resident(A)),  # the second would leave less than a block
        Oracle(setup()).run(two, [*resident(A), (NEVER, Limit("a", 0, 3))]),
    ):
        assert [r.done_s for r in out.requests] == [7 / 64, 14 / 64]
        assert waits(out.requests[1]) == {"kv": 7 / 64, "compute": 7 / 64}


def test_contiguous_kv_is_reserved_whole() -> None:
    two = jobs((0.0, "a", 9, 5), (0.0, "a", 9, 5))  # 8 blocks of 4 tokens
    longest = {"a": ModelSetup(0, 8, 1, 1, max_tokens=20)}
    once, later = [18 / 64] * 2, [9 / 64, 77 / 64 + 9 / 64]  # the second after four decode steps of the first
    for kv, firsts in {
        "oracle": once,  # 9 + 5 tokens: 4 blocks
        "pow2": later,  # 9 + 8: 5 blocks, a chunk of 8
        "max": later,  # 20: the same
    }.items():
        out = Oracle(setup(blocks=8, kv=kv, models=longest)).run(two, resident(A))
        assert [r.first_s for r in out.requests] == firsts
        assert waits(out.requests[1]).get("kv", 0.0) == (0.0 if firsts is once else 77 / 64)
        check(out, two)


def test_free_chunks_that_are_no_buddies_are_no_room() -> None:
    work = jobs((0.0, "a", 3, 1), (0.0, "a", 1, 3), (0.0, "a", 3, 1), (0.0, "a", 1, 3), (0.0, "a", 7, 1))
    for kv, first_s in {
        "paged": 15 / 64,  # the blocks of the first and the third are free at 8/64
        "oracle": 8 / 64 + 2 * 18 / 64 + 7 / 64,  # but apart: after two decode steps of the second and the fourth
    }.items():
        out = Oracle(setup(blocks=4, kv=kv)).run(work, resident(A))
        assert out.requests[4].first_s == first_s
        check(out, work)


def test_a_chunk_is_cut_from_the_smallest_that_has_room() -> None:
    work = jobs((0.0, "a", 15, 1), (0.0, "a", 1, 3), (17 / 64, "a", 1, 2), (17 / 64, "a", 15, 1))
    out = Oracle(setup(blocks=8, kv="oracle")).run(work, resident(A))
    # at 33/64 blocks 0 to 3 and 5 to 7 are free: the third takes 5, and the fourth, of four blocks, 0
    assert [r.first_s for r in out.requests] == [16 / 64, 16 / 64, 49 / 64, 49 / 64]
    check(out, work)


def test_granules() -> None:
    # a granule of 100 bytes has 4 blocks
    coarse = {"a": ModelSetup(0, 8, block_bytes=25, granule_bytes=100, granule_blocks=4)}
    two = jobs((0.0, "a", 11, 1), (0.0, "a", 7, 1))  # 3 blocks and 2
    for room, ends in ((200, [18 / 64] * 2), (199, [11 / 64, 18 / 64])):
        out = Oracle(setup(blocks=room, models=coarse)).run(two, resident(A))
        assert [r.done_s for r in out.requests] == ends


def test_a_page_stays_for_one_block() -> None:
    # pages of 4 blocks, two in all: three blocks of the first request and one of the second, one of the second
    coarse = {m: ModelSetup(0, 8, block_bytes=25, granule_bytes=100, granule_blocks=4) for m in "ab"}
    work = jobs((0.0, "a", 11, 1), (0.0, "a", 7, 3), (0.0, "b", 3, 1))
    out = Oracle(setup(gpu_bytes=(216,), models=coarse)).run(work, resident(A, B))
    ends = [r.done_s for r in out.requests]
    # the second's blocks, and its third from 35/64 on, lie in both pages until it ends: b has none before
    assert ends == [18 / 64, 52 / 64, 55 / 64]
    check(out, work)


def test_swap() -> None:
    work = jobs((0.0, "a", 7, 4), (0.0, "a", 7, 4))
    links = {"d2h0": 4.0, "h2d0": 8.0}  # two blocks out: 1/2 s; back: 1/4 s
    out = Oracle(setup(blocks=4, preempt="swap", links=links)).run(work, resident(A))
    start, both, single = 14 / 64, 18 / 64, 17 / 64
    first, second = out.requests
    # at 32/64 the second's blocks go out; the lane lacks a block until they are out
    assert first.token_s == [start, start + both, start + both + 0.5 + single, start + both + 0.5 + 2 * single]
    back = first.done_s + 0.25
    assert second.token_s == [start, start + both, back + single, back + 2 * single]
    assert waits(second) == {"compute": start + both + 2 * single, "transfer": 0.75, "kv": 2 * single}
    assert waits(first) == {"compute": start + both + 2 * single, "kv": 0.5}
    check(out, work)


def test_a_closed_lane_parks() -> None:
    script = [*resident(A, phase="prefill"), (1.0, Run(Batch(A), "decode")), (1.0, Run(Batch(A), "prefill", steps=0))]
    work = jobs((0.0, "a", 8, 2), (2.0, "a", 8, 2))
    out = Oracle(setup()).run(work, script, 10.0)
    assert out.requests[0].token_s == [0.125, 1 + 17 / 64]
    assert waits(out.requests[0]) == {"compute": 0.125 + 17 / 64, "queue": 0.875}
    assert (out.requests[1].state, waits(out.requests[1])) == ("unfinished", {"queue": 8.0})


def test_prefill_and_decode_lanes_run_side_by_side() -> None:
    script = [*resident(A, phase="prefill"), (NEVER, Run(Batch(A), "decode"))]
    out = Oracle(setup(sharing="none")).run(jobs((0.0, "a", 4, 3), (0.0625, "a", 8, 2)), script)
    assert out.requests[0].token_s == [4 / 64, 21 / 64, 21 / 64 + 18 / 64]
    assert out.requests[1].token_s == [12 / 64, 21 / 64 + 18 / 64]  # joins at the boundary of the decode lane
    assert waits(out.requests[1]) == {"compute": 8 / 64 + 18 / 64, "queue": 9 / 64}


def test_mixed_waits_for_the_decode_lane_that_it_replaces() -> None:
    script = [*resident(A, phase="prefill"), (NEVER, Run(Batch(A), "decode")), (0.125, Run(Batch(A)))]
    out = Oracle(setup()).run(jobs((0.0, "a", 4, 3), (0.125, "a", 4, 1)), script)
    assert out.requests[0].token_s == [4 / 64, 21 / 64, 25 / 64 + 17 / 64]
    assert out.requests[1].token_s == [25 / 64]


def test_two_co_runners_have_a_turn_each() -> None:
    """A round has both prompts' kernels, so that both end with it; whatever others add is contention."""
    work = jobs((0.0, "a", 4, 1), (0.0, "b", 8, 1))
    out = Oracle(setup()).run(work, resident(A, B))
    assert [r.done_s for r in out.requests] == [12 / 64, 12 / 64]
    assert waits(out.requests[0]) == {"compute": 4 / 64, "contention": 8 / 64}
    assert waits(out.requests[1]) == {"compute": 8 / 64, "contention": 4 / 64}
    alone = Oracle(setup(sharing="none")).run(work, resident(A, B))
    assert [r.done_s for r in alone.requests] == [4 / 64, 8 / 64]
    half = Oracle(setup(cost={"pre_fill": 0.5})).run(work, resident(A, B))  # each leaves half of the GPU to others
    assert [r.done_s for r in half.requests] == pytest.approx([6 / 64, (6 + 2) / 64])  # b goes on as if alone


def test_two_layers_of_a_decode_step_pass_for_each_of_a_prompt() -> None:
    """b decodes a token in 17/64 s, a's prompt takes 16/64: a round has two layers of the one, one of the other."""
    work = jobs((0.0, "b", 1, 2), (1.5 / 64, "a", 16, 1))
    once, twice = (Oracle(setup(cost={"passes": by})).run(work, resident(A, B)).requests for by in (1.0, 2.0))
    for requests, by in ((once, 1), (twice, 2)):
        decoded = 1.5 + 16.5 * (1 + 16 / (17 * by))
        assert requests[0].done_s == pytest.approx(decoded / 64)
        assert requests[1].done_s == pytest.approx((1.5 + 16.5 + 16) / 64)  # no work is won or lost


def test_mixtures_read_the_experts_that_their_tokens_touch() -> None:
    """A decode step of one token reads half of the experts, one of two tokens three quarters."""
    t = tables(xbytes=0.25, xmiss=0.5)
    single, double = (price(t, 0, (n, 1.0), {}, 0, 0, 0.0, n, None, 0.0, None) for n in (1, 2))
    assert (single.demand[1], double.demand[1]) == (0.125 / (17 / 64), 0.1875 / (18 / 64))


@cases(("quantum", "turns"), [(0, (4, 8)), (6, (6, 8)), (10, (10, 10))])
def test_two_processes_take_turns(quantum: int, turns: tuple[int, int]) -> None:
    s = setup(sharing="turns", quantum_s=quantum / 64)
    out = Oracle(s).run(jobs((0.0, "a", 4, 1), (0.0, "b", 8, 2)), resident(A, B))
    first = sum(turns) / 64  # a step of each, in a round of both turns
    assert [r.first_s for r in out.requests] == pytest.approx([first, first])
    assert out.requests[1].done_s == pytest.approx(first + 17 / 64)  # alone, for as long as its step takes
    assert waits(out.requests[0]) == pytest.approx({"compute": 4 / 64, "time_slice": first - 4 / 64})


def test_lanes_of_a_process_share_its_turn() -> None:
    script = [*resident(A, B, phase="prefill"), (NEVER, Run(Batch(A), "decode"))]
    work = jobs((0.0, "a", 4, 3), (0.0, "b", 22, 1), (4 / 64, "a", 8, 1))
    # a's prompt of 4 beside b's of 22: rounds of 26/64. At 26/64 b's is done; a's next steps take turns by kernels, and
    # each fills half of the GPU: its prompt of 8 has half of a turn of 17/64 to wait for
    cost = {"pre_fill": 0.5, "dec_fill": 0.5}
    requests = Oracle(setup(sharing="turns", cost=cost)).run(work, script).requests
    assert [r.first_s for r in requests] == pytest.approx([26 / 64, 26 / 64, (26 + (8 + 17) / 2) / 64])
    two = Oracle(setup(sharing="turns", cost=cost, pairs=True)).run(work, script).requests
    assert two[2].first_s == pytest.approx((26 + 8 + 17) / 64)  # its prompt of 8 and a step of 17 go round


def test_sm_shares() -> None:
    out = Oracle(setup()).run(jobs((0.0, "a", 4, 2), (0.0, "a", 4, 2)), resident(A, sms=50))
    # prefill at 1/2; a decode of two at share 1/2: between 0.75 (one) and 0.5 (three)
    assert out.requests[0].token_s == [0.25, 0.25 + 18 / 64 / 0.625]


def test_load_then_run() -> None:
    ways: Ways = {(A, "host"): (0.25, [("h2d0", 8), ("p2p0", 4)]), (B, "host"): (0.25, [("h2d0", 8)])}
    links = {"h2d0": 8.0, "p2p0": 1.0}
    script: list[Timed] = [(NEVER, Admit("a", Batch(A))), (NEVER, Run(Batch(A))), (1.0, Load(A)), (1.0, Load(B))]
    out = Oracle(setup(links=links, ways=ways)).run(jobs((0.0, "a", 8, 1)), script)
    # a: the slower link takes 4 s, then 1/4 s fixed; b: behind a's first part on h2d0
    assert events(out, Done) == [(3.25, Done(Load(B))), (5.25, Done(Load(A)))]
    assert out.requests[0].done_s == 5.375
    assert waits(out.requests[0]) == {"load": 5.25, "compute": 0.125}


def test_grants_wait_for_memory_and_evict_frees_it() -> None:
    ways: Ways = {(B, "host"): (1.0, [])}
    work = jobs((0.0, "a", 8, 3))
    script = [*resident(A), (0.1, Load(B)), (0.125, Evict(A))]
    out = Oracle(setup(blocks=4, ways=ways)).run(work, script)
    end = 0.125 + 34 / 64  # drained when its request is done; Done is told before Finished
    assert [(t, type(e).__name__) for t, e in out.told[1:]] == [(end, "Done"), (end, "Finished"), (end + 1, "Done")]
    now = [*resident(A), (0.1, Load(B)), (0.126, Evict(A, drain=False)), (1.5, Evict(B)), (2.0, Load(A, "again"))]
    ways[A, "again"] = (1.0, [])
    out = Oracle(setup(blocks=8, ways=ways)).run(work, now)
    step = 0.125 + 17 / 64  # the step in flight is not cut; the KV stays, and no block is lost
    assert out.requests[0].token_s == [0.125, step, 3.0 + 17 / 64]
    assert [t for t, _ in events(out, Done)] == [step, step + 1, 1.5, 3.0]
    check(out, work)


def test_a_waiting_grant_counts_against_kv() -> None:
    ways: Ways = {(B, "host"): (1.0, [])}
    script = [*resident(A), (0.0, Load(B)), (2.0, Evict(B))]
    out = Oracle(setup(blocks=9, ways=ways)).run(jobs((0.0, "a", 8, 9)), script)
    assert waits(out.requests[0]) == {"kv": 2.0, "compute": 0.125 + 8 * 17 / 64}  # B is in: 1 byte is left of 3
    out = Oracle(setup(blocks=7)).run(jobs((0.5, "a", 8, 1)), [*resident(A), (0.0, Load(B)), (2.0, Evict(B))])
    assert waits(out.requests[0]) == {"kv": 1.5, "compute": 0.125}
    assert [(e.failed, e.why) for _, e in events(out, Done) if isinstance(e, Done)] == [("gone", "evicted"), (None, "")]
    out = Oracle(setup(blocks=7)).run(jobs((0.5, "a", 8, 1)), [*resident(A), (0.0, Load(B))])
    assert waits(out.requests[0]) == {"compute": 0.125}  # nothing would ever free memory: the Load fails at once


def test_refusals() -> None:
    work = jobs((0.0, "a", 8, 1), (0.0, "b", 8, 1))
    big = Inst("a", (0,))
    refused: dict[Action, str] = {
        Evict(A): "gone",
        Admit(0, Batch(B)): "never",
        Admit("a", Batch(B)): "never",
        Move(0, (0,)): "gone",
        Load(big): "never",
        Load(Inst("a", Host())): "never",
    }
    out = Oracle(setup(gpu_bytes=(7,))).run(work, [(0.0, x) for x in refused])
    assert [(e.action, e.failed) for _, e in out.told if isinstance(e, Done) and e.failed] == [*refused.items()]


def test_move_to_another_gpu() -> None:
    far = Inst("a", (1,))
    links = {"p2p0": 2.0, "d2h0": 1.0, "h2d1": 4.0}
    both: list[Timed] = [(NEVER, Load(far)), *resident(A, phase="prefill"), (NEVER, Run(Batch(far), "decode"))]
    two = setup(gpu_bytes=(100, 100), gpu_sms=(100, 100), links=links)
    work = jobs((0.0, "a", 7, 2))
    out = Oracle(two).run(work, [*both, (0.5, Admit(0, Batch(far))), (0.5, Move(0, (1,)))])
    # two blocks at 2 bytes/s
    assert out.requests[0].token_s == [7 / 64, 1.5 + 17 / 64]
    assert waits(out.requests[0]) == {"compute": 24 / 64, "queue": 0.5 - 7 / 64, "transfer": 1.0}
    assert events(out, Done) == [(1.5, Done(Move(0, (1,))))]
    host: list[Timed] = [(0.5, Move(0, Host())), (0.5, Admit(0, Batch(far))), (3.0, Move(0, (1,)))]
    out = Oracle(two).run(work, both + host)
    assert out.requests[0].token_s == [7 / 64, 3.5 + 17 / 64]
    assert waits(out.requests[0]) == {"compute": 24 / 64, "queue": 0.5 - 7 / 64, "transfer": 3.0}
    away = Oracle(two).run(work, [*both, (0.0625, Move(0, None)), (1.0, Drop(0))])
    # discarded at the step's end, and computed again: the second token
    assert away.requests[0].token_s == [7 / 64, 15 / 64]
    assert away.requests[0].state == "done"


def test_drop() -> None:
    work = jobs((0.0, "a", 8, 4), (0.0, "b", 8, 4))
    out = Oracle(setup()).run(work, [*resident(A), (0.0, Drop(1)), (0.2, Drop(0)), (9.0, Drop(0))])
    assert [r.state for r in out.requests] == ["dropped", "dropped"]
    assert [r.done_s for r in out.requests] == [0.125 + 17 / 64, 0.0]
    assert out.requests[0].made == 2
    assert isinstance(out.told[-1][1], Done)
    assert out.told[-1][1].failed


def test_noise() -> None:
    draws = np.array([noise(0.1, 7, m, 0, 0, 1, i) for m in range(4) for i in range(500)])
    assert abs(draws.mean() - 1) < 0.01
    assert abs(draws.std() - 0.1) < 0.01
    assert noise(0.0, 1, 2, 3, 0, 1, 5) == 1.0
    out = Oracle(setup(sigma=0.1, seed=7)).run(jobs((0.0, "a", 8, 3)), resident(A))
    step = 17 / 64 * noise(0.1, 7, 0, 0, 0, 0, 0)
    first = 0.125 * noise(0.1, 7, 0, 0, 0, 1, 0)
    assert out.requests[0].token_s == pytest.approx([first, first + step, first + 2 * step])


def test_turns_of_decodes_are_those_of_a_power_of_two() -> None:
    """A step takes C / 4 s, and its turn what the power of two below C would: a's 2 s, b's 4 s, whatever is added."""
    cost = {"att0": 0.0, "dec2": 0.25, "pre1": TOKEN}
    flat = tables(**cost)._replace(gemm=np.zeros((1, 3)))
    out = Oracle(setup(tables=flat)).run(jobs((0.0, "a", 8, 3), (0.0, "b", 16, 3)), resident(A, B))
    assert out.requests[1].token_s == [0.375, 0.375 + 1.5 * 17 / 4, 0.375 + 1.5 * (17 + 18) / 4]
    assert out.requests[0].token_s == [0.375, 0.375 + 3 * 9 / 4, 13.5 + (2.5 - (13.5 - 7.125) / 3)]  # then alone
