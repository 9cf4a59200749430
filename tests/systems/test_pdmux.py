"""PD-multiplexing: SGLang's divisions and slices, the predictor, the dispatcher's rule, and what the split does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from harness.engines.costs import quantities
from harness.engines.machine import Config, Machine, Served, cluster, machine
from harness.engines.sim.engine import Sim
from harness.engines.wallclock import NoProfile
from harness.loop.replay import replay
from harness.policy.actions import Action, Admit, Run
from harness.policy.events import Arrived, Finished, Prefilled, Woke
from harness.policy.types import Batch, Cluster, Gpu, Infeasible, Inst, Jobs, Model, Request
from harness.policy.view import BatchState
from systems.chunked import Chunked
from systems.pdmux import H200, PDMux, decode_counts, divisions, forward_count, worst
from tests.cases import cases
from tests.harness.loop.scripted import Recorder
from tests.systems.by_hand import EMPTY, Seen, told
from tests.there import there
from tests.workloads.asked import asked
from workloads.models import shape

H100 = Gpu("h100", 0, 80 << 30, 132, tuple(range(8, 132, 8)))
A100 = Gpu("a100-80g", 0, 80 << 30, 108, tuple(range(2, 108, 2)))


class Linear(NoProfile):
    """A decode step of 2 ms, 0.1 ms a sequence and 1 us a token of context on all SMs; a prefill of 20 us a token."""

    def step_s(self, inst: Inst, seqs: int, ctx_tokens: int, sms: int | None = None) -> float:
        return (2e-3 + 1e-4 * seqs + 1e-6 * ctx_tokens) * 132 / (sms or 132)

    def prefill_s(self, inst: Inst, tokens: int, sms: int | None = None) -> float:
        return 2e-5 * tokens * 132 / (sms or 132)


def made(models: int = 1, gpu: Gpu = H100, itl_s: float = 0.05, **fields: Any) -> PDMux:
    """Return the system on one GPU; models of 32 layers."""
    model = Model(32, 1, 1 << 30, 1 << 17, 1 << 21, 4096, 1.0, itl_s)
    return PDMux(Cluster((gpu,), {f"m{k}": model for k in range(models)}, {}, Linear()), **fields)


def begun(models: int = 1, **fields: Any) -> PDMux:
    """Return the same system after its start."""
    policy = made(models, **fields)
    told(policy, Woke("start"))
    return policy


def state(waiting: int = 0, decoding: int = 0, prefill_tokens: int = 0, ctx_tokens: int = 0) -> BatchState:
    return EMPTY._replace(waiting=waiting, decoding=decoding, prefill_tokens=prefill_tokens, ctx_tokens=ctx_tokens)


def arrive(policy: PDMux, view: Seen, rid: int = 0, model: str = "m0", prompt: int = 2048) -> Mapping[Any, Run]:
    """Return the orders that an arrival brings, by lane."""
    event = Arrived(Request(rid, model, 0.0, prompt, 1.0, 0.05))
    return by_lane(told(policy, event, view))


def by_lane(actions: Any) -> Mapping[Any, Run]:
    return {(a.batch.inst.model, a.phase): a for a in actions if isinstance(a, Run)}


# ---------------------------------------------------------------- SGLang's numbers


def test_divisions_of_132_sms() -> None:
    assert divisions(H100) == [(112, 20), (104, 28), (96, 36), (88, 44), (80, 52), (72, 60)]


def test_divisions_of_an_a100_are_every_third_of_twenty() -> None:
    assert divisions(A100) == [(84, 24), (78, 30), (72, 36), (66, 42), (60, 48), (54, 54)]


def test_the_table_for_an_h200() -> None:
    assert H200 == ((112, 20, 1), (104, 28, 5), (96, 36, 10), (80, 52, 15), (64, 68, 20), (56, 76, 25))
    assert all(s_p + s_d == 132 for s_p, s_d, _ in H200)


def test_the_division_that_a_decode_batch_chooses() -> None:
    table, h200 = made(rule="table"), made(rule="h200")
    divisions = {b: table.division(b, H100) for b in (1, 11, 12, 17, 18, 24, 30, 35, 36, 1000)}
    assert [s_d for _, s_d in divisions.values()] == [20, 20, 28, 28, 36, 44, 52, 52, 60, 60]  # clamp(6 b // 36, 1, 6)
    divisions = {b: h200.division(b, H100) for b in (1, 4, 5, 9, 10, 14, 15, 19, 20, 24, 25, 300)}
    assert [s_d for _, s_d in divisions.values()] == [20, 20, 28, 28, 36, 36, 52, 52, 68, 68, 76, 76]


def test_layers_of_a_slice() -> None:
    layers = {1: 65536, 1024: 64, 2048: 32, 5000: 13, 16384: 4, 65536: 1, 65537: 1, 10**6: 1}
    assert {n: forward_count(n) for n in layers} == layers


def test_sglang_keeps_a_division_until_the_prefill_ends_or_decode_runs_dry() -> None:
    policy, view = begun(rule="table"), Seen()
    view.batches["m0"] = state(waiting=1, decoding=12, prefill_tokens=4096, ctx_tokens=9000)
    orders = arrive(policy, view, prompt=4096)
    assert (orders["m0", "decode"].sms, orders["m0", "prefill"].sms) == (28, 104)
    assert orders["m0", "prefill"].slice_layers == 16
    view.batches["m0"] = state(decoding=3, prefill_tokens=4096, ctx_tokens=9000)  # begun; decodes have ended
    assert not by_lane(told(policy, Finished(7, Batch(Inst("m0", (0,))), "done"), view))
    view.batches["m0"] = state(prefill_tokens=4096)
    dry = by_lane(told(policy, Finished(8, Batch(Inst("m0", (0,))), "done"), view))
    assert dry["m0", "prefill"].sms is None
    view.batches["m0"] = state(decoding=1, ctx_tokens=4097)
    ended = by_lane(told(policy, Prefilled(0, Batch(Inst("m0", (0,)))), view))
    assert ended["m0", "decode"].sms is None


@cases("rule", ["predict", "table"])
def test_a_prefill_that_found_no_room_begins_when_an_end_makes_some(rule: str) -> None:
    policy, view = begun(rule=rule), Seen(room=1 << 20)
    view.batches["m0"] = state(waiting=1, decoding=4, prefill_tokens=2048, ctx_tokens=4000)
    assert not arrive(policy, view)
    view.batches["m0"], view.room = state(waiting=1, decoding=3, prefill_tokens=2048, ctx_tokens=3000), 1 << 40
    orders = by_lane(told(policy, Finished(9, Batch(Inst("m0", (0,))), "done"), view))
    assert sum(run.sms or 0 for run in orders.values()) == 132


def test_an_sglang_server_has_its_gpus_to_itself() -> None:
    with pytest.raises(Infeasible, match="m0, m1 cannot share"):
        made(2, rule="table")
    with pytest.raises(Infeasible, match="divides no 24 SMs"):
        made(gpu=A100._replace(sms=24, sm_choices=(8, 16)), rule="table")
    with pytest.raises(Infeasible, match="132 SMs"):
        made(gpu=A100, rule="h200")


# ---------------------------------------------------------------- MuxWise


def test_the_predictor_finds_the_coefficients_of_what_has_its_form() -> None:
    predict = there(made().tenants["m0"].predict)
    profile, inst = Linear(), Inst("m0", (0,))
    for s in decode_counts(H100):
        for b, c in ((1, 1), (3, 999), (200, 150_000), (256, 400_000)):
            assert predict.decode_s(b, c, s) == pytest.approx(profile.step_s(inst, b, c, s), rel=1e-6)
    assert predict.prefill_s(7000, 64) == pytest.approx(profile.prefill_s(inst, 7000, 64), rel=1e-6)
    assert predict.prefill_s(9, 64) == predict.prefill_s(512, 64)  # n is 512 at least


@cases(("gpu", "name"), [("h100", "llama-3.1-8b"), ("h200", "codellama-34b"), ("a100-80g", "llama-3.1-8b")])
def test_the_predictor_is_within_what_the_paper_says_of_its_own(gpu: str, name: str) -> None:
    node = cluster(Config((Served("m", shape(name)),), gpu=gpu, gpus=1))
    predict, inst = there(PDMux(node).tenants["m"].predict), Inst("m", (0,))
    decode = [
        predict.decode_s(b, b * c, s) / node.profile.step_s(inst, b, b * c, s) - 1
        for s in decode_counts(node.gpus[0])
        for b in (2, 20, 100, 200)
        for c in (300, 1000, 3000)
    ]
    prefill = [
        predict.prefill_s(n, s) / node.profile.prefill_s(inst, n, s) - 1
        for s in predict.prefill
        for n in (700, 1500, 3000, 6000, 12000, 30000)
    ]
    assert np.mean(np.abs(decode)) < 0.09
    assert np.mean(np.abs(prefill)) < 0.09


def test_decode_gets_the_least_sms_that_meet_the_slo_and_prefill_the_rest() -> None:
    policy, view = begun(guard=1.0, ahead=64), Seen()
    view.batches["m0"] = state(waiting=1, decoding=10, prefill_tokens=8192, ctx_tokens=3360)
    orders = arrive(policy, view, prompt=8192)
    # 1.3 x (2 + 10 x 0.1 + (3360 + 640) x 0.001) ms = 9.1 ms on 132 SMs: 50 ms on 24.02, of 20, 36, 52, ...
    assert orders["m0", "decode"] == Run(Batch(Inst("m0", (0,))), "decode", sms=36)
    step_s, prefill_s = 7e-3 * 132 / 36, 2e-5 * 8192 * 132 / 96
    assert -(-step_s * 32 // prefill_s) == 4
    assert orders["m0", "prefill"] == Run(MAIN, "prefill", chunk_tokens=0, slice_layers=4, sms=96)


def test_partitions_are_those_of_the_paper() -> None:
    """Section 3.3.2: 16 SMs apart, six of an A100 and seven of an H100; the axes of figure 11 begin at 12 and at 20."""
    assert decode_counts(A100) == [12, 28, 44, 60, 76, 92]
    assert decode_counts(H100) == [20, 36, 52, 68, 84, 100, 116]


def test_the_guard_is_the_most_that_was_measured_on_the_gpu() -> None:
    """A100: 20 %, H200: 37, else 30; 1.2 x 8.4 ms x 132 / 28 = 47.5 ms meet 50 on 28 SMs, 1.3 times do not."""
    measured = {"a100-40g": 0.2, "a100-80g": 0.2, "h100": 0.3, "h200": 0.37, "l40s": 0.3}
    assert {kind: worst(A100._replace(kind=kind)) for kind in measured} == measured
    for kind in ("a100-80g", "h100", "h200"):  # as much as the machine charges a decode for a prefill on other SMs
        assert 1 + worst(A100._replace(kind=kind)) == quantities.quantities(kind)["co_run"]["apart"]
    for kind, sms in (("a100-80g", 28), ("h100", 44)):
        policy, view = made(gpu=A100._replace(kind=kind), ahead=0), Seen()
        told(policy, Woke("start"), view)
        view.batches["m0"] = state(waiting=1, decoding=10, prefill_tokens=8192, ctx_tokens=5400)
        assert arrive(policy, view, prompt=8192)["m0", "decode"].sms == sms


def test_without_a_partition_both_phases_go_side_by_side() -> None:
    policy, view = begun(rule="none"), Seen()
    view.batches["m0"] = state(waiting=1, decoding=10, prefill_tokens=8192, ctx_tokens=3360)
    assert arrive(policy, view, prompt=8192)["m0", "prefill"] == Run(Batch(Inst("m0", (0,))), "prefill", chunk_tokens=0)
    assert not policy.uses & {"Request.slo"}


# ---------------------------------------------------------------- preemption, section 3.4.2

MAIN, FAST = Batch(Inst("m0", (0,))), Batch(Inst("m0", (0,)), 1)


def flying(prompt: int = 100_000, ttft_slo_s: float = 10.0, **fields: Any) -> tuple[PDMux, Seen]:
    """Return one prompt in flight since 0, beside nobody: 20 us a token, on 128 of 132 SMs as predicted."""
    policy, view = begun(preempt=True, itl_s=0.05, **fields), Seen()
    view.batches["m0"] = state(waiting=1, prefill_tokens=prompt)
    told(policy, Arrived(Request(0, "m0", 0.0, prompt, ttft_slo_s, 0.05)), view)
    view.batches["m0"] = state(waiting=1, prefill_tokens=prompt + 1000)
    return policy, view


def come(policy: PDMux, view: Seen, now_s: float, ttft_slo_s: float, rid: int = 1) -> list[Action]:
    """Return the orders that a prompt of 1,000 tokens brings."""
    view.now_s = now_s
    event = Arrived(Request(rid, "m0", now_s, 1000, ttft_slo_s, 0.05))
    return told(policy, event, view)


def test_a_prompt_that_would_be_late_goes_before_a_long_one_that_is_not() -> None:
    """100,000 tokens take 2.06 s on 128 SMs, 1,000 take 21 ms: at 0.5 s 1.56 are left."""
    policy, view = flying()
    whole_s = policy.tenants["m0"].predict.prefill_s(100_000, 128)  # type: ignore[union-attr]
    assert whole_s == pytest.approx(2e-5 * 100_000 * 132 / 128)
    assert not come(policy, view, 0.5, ttft_slo_s=1.6)  # comes behind it in time
    policy, view = flying()
    instead = [Run(MAIN, "prefill", steps=0), Admit(1, FAST), Run(FAST, "prefill", chunk_tokens=0)]
    assert come(policy, view, 0.5, ttft_slo_s=1.5) == instead
    view.batches["m0"] = state(waiting=1, prefill_tokens=101_000)
    assert not come(policy, view, 0.51, ttft_slo_s=0.1, rid=2)  # who goes first is not preempted
    view.now_s, view.batches["m0"] = 0.52, state(waiting=1, decoding=1, prefill_tokens=101_000, ctx_tokens=1001)
    after = told(policy, Prefilled(1, FAST), view)
    assert after[:2] == [Run(FAST, "prefill", steps=0), Admit(1, MAIN)]
    assert [(a.batch, a.phase) for a in after[2:] if isinstance(a, Run)] == [(MAIN, "decode"), (MAIN, "prefill")]
    assert policy.tenants["m0"].begun_s == pytest.approx(0.02)  # it stood for 20 ms


def test_nobody_goes_before_a_prefill_that_would_be_late_for_it() -> None:
    """At 0.5 s the long one has 1.56 s left, 21 ms more make 2.08 s."""
    assert come(*flying(ttft_slo_s=2.09), 0.5, ttft_slo_s=0.5)
    assert not come(*flying(ttft_slo_s=2.07), 0.5, ttft_slo_s=0.5)
    policy, view = flying()
    view.room = 1 << 20
    assert not come(policy, view, 0.5, ttft_slo_s=0.5)  # its KV has no room


def test_who_works_alone_has_all_sms() -> None:
    policy, view = begun(), Seen()
    view.batches["m0"] = state(waiting=1, prefill_tokens=100)
    assert arrive(policy, view)["m0", "prefill"].sms is None
    view.batches["m0"] = state(decoding=1, ctx_tokens=2049)
    ended = by_lane(told(policy, Prefilled(0, Batch(Inst("m0", (0,)))), view))
    assert ended == {("m0", "prefill"): Run(Batch(Inst("m0", (0,))), "prefill", steps=0)}  # closed; decode has all SMs
    view.batches["m0"] = state(waiting=1, decoding=4, prefill_tokens=2048, ctx_tokens=400)
    view.room = 1 << 20
    assert not arrive(policy, view, 1)  # its KV has no room: decodes keep all SMs
    view.room = 1 << 40
    ended = by_lane(told(policy, Finished(9, Batch(Inst("m0", (0,))), "done"), view))
    assert ended["m0", "decode"].sms is not None


def test_models_on_a_gpu_share_it_without_overlap() -> None:
    policy, view = begun(3), Seen()
    view.batches["m0"] = state(decoding=10, ctx_tokens=4000)
    view.batches["m1"] = state(decoding=2, ctx_tokens=500)
    view.batches["m2"] = state(waiting=1, prefill_tokens=4096)
    orders = arrive(policy, view, model="m2")
    assert set(orders) == {("m0", "decode"), ("m1", "decode"), ("m2", "prefill")}
    assert sum(run.sms or 0 for run in orders.values()) == 132
    view.batches["m1"] = state(waiting=1, decoding=2, ctx_tokens=500, prefill_tokens=4096)
    orders = {**orders, **arrive(policy, view, 1, "m1")}
    assert orders["m1", "prefill"].sms == orders["m2", "prefill"].sms
    assert sum(run.sms or 0 for run in orders.values()) <= 132


# ---------------------------------------------------------------- in the simulator


@cache
def priced(gpu: str, name: str) -> tuple[tuple[Served, ...], Machine]:
    served = (Served("m", shape(name)._replace(max_tokens=8192), 1, 10.0, 0.06),)
    return served, machine(Config(served, gpu=gpu))


def stream(n: int, rate_rps: float, prompt: tuple[int, int], output: tuple[int, int], *, alone: bool = False) -> Jobs:
    """Return Poisson arrivals of lengths from a range; `alone`: each comes when the one before it has ended."""
    draw = np.random.default_rng(5)
    arrival_s = np.cumsum(draw.exponential(1 / rate_rps, n))
    jobs = asked("m", arrival_s, 0, draw.integers(*prompt, n), draw.integers(*output, n), 10.0, 0.06)
    if not alone:
        return jobs
    times_s = np.where(np.arange(n) == 0, 0.0, np.inf)
    return replace(jobs, arrival_s=times_s, after=np.arange(n, dtype=np.int32) - 1, think_s=np.zeros(n))


def served(
    make: Any, jobs: Jobs, gpu: str = "h200", name: str = "codellama-34b", **fields: Any
) -> tuple[Sim, Recorder]:
    """Serve a stream by a system; keep its decisions."""
    models, machine_ = priced(gpu, name)
    engine = Sim(Config(models, gpu=gpu, token_times=True), {}, machine_)
    log = Recorder()
    replay(make(engine.cluster, **fields), engine, jobs, log=log)
    return engine, log


def gaps_s(engine: Sim) -> Any:
    """Return times between tokens of all requests, in ascending order."""
    rows = [row for part in engine.rows() for row in part.to_pylist()]
    return np.sort(np.concatenate([np.diff(row["token_ns"]) / 1e9 for row in rows if row["made_tokens"] > 1]))


def test_phases_that_never_meet_are_alternation() -> None:
    """One client at a time: prefill has all SMs, then decode, as on a lane that does the one after the other."""
    jobs = stream(20, 1.0, (100, 3000), (1, 60), alone=True)
    split, whole = served(PDMux, jobs)[0].S.requests, served(Chunked, jobs, tau=8192)[0].S.requests
    for stamp in ("first", "done"):
        np.testing.assert_allclose(split[stamp], whole[stamp], rtol=0, atol=1e-9)


def test_decode_meets_its_slo_beside_long_prefills_where_large_chunks_do_not() -> None:
    jobs = stream(150, 1.2, (2000, 6000), (100, 300))
    engine, log = served(PDMux, jobs)
    split, small, large = gaps_s(engine), *(gaps_s(served(Chunked, jobs, tau=tau)[0]) for tau in (512, 2048))
    p99 = [x[int(0.99 * len(x))] for x in (split, small, large)]
    assert p99[0] <= 1.3 * 0.06 < p99[2]  # no policy's profile has what an H100's busy partitions do to each other
    assert p99[1] <= 0.06
    sms: dict[Any, int] = {}
    for decision in log.decisions:
        for action in decision.actions:
            if isinstance(action, Run):
                sms[action.phase] = action.sms or 0
        if sms.get("decode", 0) > 0:
            assert sms["decode"] + sms["prefill"] == 132


def test_a_step_that_saturates_eight_a100_takes_what_figure_6_says() -> None:
    """Section 2.3.2: 32 decodes behind 1,000 tokens beside 4,064 of a prompt, 70B over eight A100: 505 ms."""
    model = Served("m", shape("llama-3.3-70b")._replace(max_tokens=8192), 8, 10.0, 0.1)
    engine = Sim(Config((model,), gpu="a100-80g", gpus=8, host="sglang-0.5", token_times=True))
    jobs = asked("m", [0.0] * 32 + [9.0], 0, [730] * 32 + [4064], [400] * 32 + [2])
    make: Any = Chunked
    replay(make(engine.cluster, tau=4096), engine, jobs)
    rows = [row for part in engine.rows() for row in part.to_pylist()]
    late = [np.array(row["token_ns"])[np.array(row["token_ns"]) > 9e9] for row in rows[:32]]
    context = 730 + np.mean([row["made_tokens"] - len(tokens) for row, tokens in zip(rows, late, strict=False)])
    assert context == pytest.approx(1000, rel=0.1)
    assert max(np.diff(tokens).max() for tokens in late) / 1e9 == pytest.approx(0.505, rel=0.05)


def test_preemption_brings_short_prompts_their_first_tokens_sooner() -> None:
    """Section 4.4.3's mix: half of the prompts are short, half long. Everybody ends, and the work is the same."""
    draw, n = np.random.default_rng(2), 200
    short = draw.random(n) < 0.5
    prompts = np.where(short, draw.integers(50, 400, n), draw.integers(4000, 7500, n)).astype(np.int32)
    jobs = replace(stream(n, 0.8, (1, 2), (20, 200)), prompt_tokens=prompts, ttft_slo_s=np.where(short, 0.5, 10.0))
    tables = [served(PDMux, jobs, preempt=on)[0].S.requests for on in (False, True)]
    late = [np.mean((rows["first"] - rows["arrival"])[short] > 0.5) for rows in tables]
    assert late[1] < 0.75 * late[0]
    assert (tables[1]["state"] == tables[0]["state"]).all()
    assert tables[1]["made"].sum() == tables[0]["made"].sum()


@cases("rule", ["predict", "table", "h200"])
def test_every_request_ends_under_every_rule(rule: str) -> None:
    engine, log = served(PDMux, stream(80, 3.0, (50, 6000), (1, 200)), rule=rule)
    assert (engine.S.requests["state"] == engine.S.requests["state"][0]).all()
    ordered: set[Action] = {a for d in log.decisions for a in d.actions}
    slices = {a.slice_layers for a in ordered if isinstance(a, Run) and a.phase == "prefill" and a.sms}
    assert len(slices) > 3
    assert {a.sms for a in ordered if isinstance(a, Run) and a.phase == "decode"} > {None}
