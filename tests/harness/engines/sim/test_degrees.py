"""Models at several tensor-parallel degrees: the place of an instance decides, in bytes, in steps and on links."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from harness.answers.caveats import own_degrees
from harness.engines.costs import process, shapes
from harness.engines.machine import Config, Served, cluster, machine
from harness.engines.sim.engine import Sim
from harness.loop.replay import replay
from harness.policy.actions import Action, Admit, Evict, Load, Move, Run
from harness.policy.events import Arrived, Done, Event, Prefilled, Woke
from harness.policy.types import Batch, Host, Inst, Jobs, Option
from harness.policy.view import View
from harness.rows import record, scoring
from harness.rows.record import SCHEMA
from harness.run import score
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.spec import Spec
from harness.study.bases import slo_target
from plots import style
from tests.cases import cases
from tests.workloads.asked import asked
from workloads.models import shape

LLAMA = shape("llama-3.1-8b")  # 32 layers of 4,096; 32 heads and 8 KV heads of 128; FFN 14,336; 128,256 words
# embedding and head, 32 layers of (q, o and k, v; three FFN matrices; two norms), the last norm; 2 bytes each
WEIGHTS = {
    1: 2 * (2 * 128_256 * 4096 + 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14_336 + 2 * 4096) + 4096),
    2: 2 * (2 * 64_128 * 4096 + 32 * (4096 * 128 * (2 * 16 + 2 * 4) + 3 * 4096 * 7168 + 2 * 4096) + 4096),
}
TOKEN = {1: 2 * 2 * 32 * 8 * 128, 2: 2 * 2 * 32 * 4 * 128}  # bytes of KV: K and V of 32 layers, 8 or 4 heads
ONE, TWO = Batch(Inst("m", (0,))), Batch(Inst("m", (1, 2)))
PROMPT, OUTPUT = 100, 40


def config() -> Config:
    """Return one 8B model on three H100, of degree 1 unless a place says otherwise."""
    return Config((Served("m", LLAMA, degrees=(1, 2)),), gpus=3, process_bytes=0, token_times=True)


def jobs(*arrivals_s: float) -> Jobs:
    return asked("m", arrivals_s, 0, PROMPT, OUTPUT)


class Both:
    """The model on GPU 0 and on GPUs 1 and 2 at a time; requests go to them by turns."""

    hears = frozenset({Woke, Arrived})
    uses = frozenset({"Load", "Run", "Admit"})

    def __init__(self) -> None:
        self.options: Mapping[str, Option] = {}
        self.free: list[tuple[int, ...]] = []  # bytes of each GPU, at every event

    def on(self, event: Event, view: View) -> Iterable[Action]:
        self.free.append(tuple(view.free_bytes(g) for g in range(3)))
        if isinstance(event, Arrived):
            yield Admit(event.request.id, (ONE, TWO)[event.request.id % 2])
        else:
            for batch in (ONE, TWO):
                yield from (Load(batch.inst), Run(batch))


def test_bytes_by_degree() -> None:
    assert {tp: shapes.weight_bytes(LLAMA, tp) for tp in WEIGHTS} == WEIGHTS
    model = cluster(config()).models["m"]
    assert (model.tp, model.degrees, model.at(1)) == (1, (1, 2), model)
    for tp in (1, 2):
        at = model.at(tp)
        sizes = at.tp, at.weight_bytes, at.kv_token_bytes, at.page_bytes
        assert sizes == (tp, WEIGHTS[tp], TOKEN[tp], 16 * TOKEN[tp])
        assert at.at(1) == model
        assert at[5:] == model[5:]  # what no degree changes
    with pytest.raises(ValueError, match=r"degree 4 is not one of \(1, 2\)"):
        model.at(4)


def test_heads_a_node_and_the_run_bound_the_degrees() -> None:
    assert shapes.degrees(LLAMA) == (1, 2, 4, 8)
    assert shapes.degrees(shape("qwen-2.5-7b")) == (1, 2, 4)  # 28 heads
    wide = (Served("m", LLAMA, 2, degrees=(1, 2, 4, 8)),)
    for gpus, node_gpus, degrees in ((16, 8, (1, 2, 4, 8)), (16, 4, (1, 2, 4)), (3, 8, (1, 2)), (1, 8, (1, 2))):
        assert cluster(Config(wide, gpus=gpus, node_gpus=node_gpus)).models["m"].degrees == degrees
    assert cluster(Config((Served("m", LLAMA, 2),), gpus=4)).models["m"].degrees == (2,)


def test_a_process_at_another_degree_than_the_sets() -> None:
    usual, wide = process.Parts(10, 100), process.Parts(7, 130)
    for layout, want in (("model", 7 + 30), ("pair", 2 * (7 + 30)), ("kept", 7 + 30), ("gpu", 0)):
        assert process.process_bytes(wide, usual, [usual, process.Parts(9, 140)], layout) == want  # type: ignore[arg-type]
        back = process.process_bytes(usual, wide, [wide], layout)  # type: ignore[arg-type]
        assert back == {"model": 10, "pair": 20, "kept": 10, "gpu": 3}[layout]  # less outside gives nothing back
    held = process.memory(1000, 0.5, [(usual, 1), (wide, 2)], 2)
    assert held.process_bytes == (10, 7)


def test_two_degrees_of_one_model_at_once() -> None:
    sim, both = Sim(config()), Both()
    replay(both, sim, jobs(0.0, 0.0, 1.0, 1.0))
    free, profile = sim.cluster.gpus[0].mem_bytes, sim.cluster.profile
    loaded = (free - WEIGHTS[1], free - WEIGHTS[2], free - WEIGHTS[2])
    assert both.free[1] == loaded
    assert tuple(sim.view().free_bytes(g) for g in range(3)) == loaded
    rows = pa.Table.from_batches(list(sim.rows()), SCHEMA).to_pylist()
    assert [row["gpus"] for row in rows] == ["0", "1+2"] * 2
    for row, batch in zip(rows, (ONE, TWO) * 2, strict=True):
        host = sim._host
        solo = [profile.prefill_s(batch.inst, PROMPT)]
        solo += [profile.step_s(batch.inst, 1, PROMPT + k) for k in range(1, OUTPUT)]
        times_s = host.api_in_s + np.cumsum(solo) + host.api_out_s
        np.testing.assert_allclose(np.array(row["token_ns"]) / 1e9, times_s, atol=2e-9)
    assert rows[1]["done_ns"] - rows[1]["first_ns"] < rows[0]["done_ns"] - rows[0]["first_ns"]


def test_a_load_brings_each_gpu_its_part() -> None:
    sim = Sim(config())
    sim.take(jobs(100.0))
    sim.begin(frozenset({Woke, Load, Evict}), oracle=False)
    for batch in (ONE, TWO):
        sim.do(Load(batch.inst))
    told = until(sim, 50.0)
    want = {batch.inst: sim.cluster.profile.load_s(batch.inst, "host") for batch in (ONE, TWO)}
    ends = {e.action.inst: t for t, e in told if isinstance(e, Done) and isinstance(e.action, Load)}
    assert ends == pytest.approx(want)
    h2d = sim._machine.spec.h2d
    assert want[ONE.inst] - want[TWO.inst] == pytest.approx((WEIGHTS[1] - WEIGHTS[2]) / h2d)


def test_kv_is_cut_anew_between_degrees() -> None:
    sim = Sim(config())
    start(sim, jobs(0.0), phase="prefill")  # no decode lane: the KV of 101 tokens rests in 7 blocks
    until(sim, 1.0)
    kv, spec = 7 * 16 * TOKEN[1], sim._machine.spec
    begun = 1.0
    for to, seconds, used in (
        ((1, 2), kv / spec.nvlink, (0, kv // 2, kv // 2)),  # GPU 0 sends all of it
        ((0,), kv / 2 / spec.nvlink, (kv, 0, 0)),  # the two send a half each, side by side
        (Host(), kv / spec.d2h, (0, 0, 0)),
        ((1, 2), kv / 2 / spec.h2d, (0, kv // 2, kv // 2)),
    ):
        sim.do(Move(0, to))
        (t, event), *_ = [x for x in until(sim, begun + 1.0) if isinstance(x[1], Done)]
        assert event == Done(Move(0, to))
        assert t - begun == pytest.approx(seconds)
        assert tuple(sim.view().kv("m", g).used_bytes for g in range(3)) == used
        begun += 1.0
    for action in (Admit(0, TWO), Run(TWO)):
        sim.do(action)
    until(sim, math.inf)
    assert sim.idle()
    assert [sim.view().kv("m", g).used_bytes for g in range(3)] == [0, 0, 0]


def test_without_peer_links_kv_is_cut_anew_through_the_host() -> None:
    sim = Sim(replace(config(), nvlink_gbps=0.0, pcie_gbps=8.0))
    start(sim, jobs(0.0), phase="prefill")
    until(sim, 1.0)
    for begun, to in ((1.0, (1, 2)), (2.0, (0,))):
        sim.do(Move(0, to))
        (t, _), *_ = [x for x in until(sim, begun + 1.0) if isinstance(x[1], Done)]
        assert t - begun == pytest.approx(7 * 16 * TOKEN[1] / 8e9)  # of GPU 0, whose link has all of it
    busy_s = sim.S.links["busy_s"].reshape(-1, 4)[:3, :2]
    whole_s = 7 * 16 * TOKEN[1] / 8e9  # in and out, of each GPU
    np.testing.assert_allclose(busy_s, [[whole_s, whole_s], [whole_s / 2] * 2, [whole_s / 2] * 2])


def test_a_degree_that_is_not_offered_is_refused() -> None:
    sim = Sim(config())
    sim.take(jobs(0.0))
    sim.begin(frozenset({Woke}), oracle=False)
    for place in ((0, 1, 2), (1, 1)):
        sim.do(Load(Inst("m", place)))
        event = sim.poll(0.0)
        assert isinstance(event, Done)
        assert event.failed


def test_other_degrees_change_no_row_of_the_own_one() -> None:
    rows = []
    for degrees in ((), (1, 2, 4)):
        served = (Served("m", LLAMA, degrees=degrees), Served("n", shape("llama-3.2-1b"), degrees=degrees))
        rows.append(machine(Config(served)).tables)
    for few, many in zip(*rows, strict=True):
        whole = many if many.shape == few.shape else many[:2]
        assert whole.tobytes() == few.tobytes()
    assert len(rows[1].cost) == 6


def start(sim: Sim, work: Jobs, phase: str = "mixed") -> None:
    """Load both instances, open a lane of each and admit requests by turns."""
    for batch in (ONE, TWO):
        sim.do(Load(batch.inst))
        sim.do(Run(batch, phase))  # type: ignore[arg-type]
    sim.take(work)
    sim.begin(frozenset({Woke, Arrived, Prefilled, Move}), oracle=False)


def until(sim: Sim, end_s: float) -> list[tuple[float, Event]]:
    """Return what is told by then; admit arrivals by turns."""
    told = []
    while (event := sim.poll(end_s)) is not None:
        told.append((sim.view().now_s, event))
        if isinstance(event, Arrived):
            sim.do(Admit(event.request.id, (ONE, TWO)[event.request.id % 2]))
    return told


@cases(
    ("system", "preset", "chosen"),
    [("alpaserve", None, True), ("muxserve", "original", True), ("muxserve", "plusplus", False)],
)
def test_a_caption_says_who_chose_degrees(system: str, preset: str | None, chosen: bool, tmp_path: Path) -> None:
    spec = Spec(system, preset, models="light8", trace="sample", window_s=5.0, warmup_s=0.0, drain_s=5.0)
    folder = execute(resolve(spec), tmp_path, "code")
    assert record.meta(folder).get("degrees") == ("own" if chosen else None)
    rows = scoring.scores([score.scorable("one", folder, slo_target(spec, "absolute:ttft=1,tpot=1", tmp_path))])
    words = "own degrees of parallelism: one; all others have the model set's"
    assert own_degrees(rows) == [words] * chosen
    assert style.degrees(rows.to_pandas()) == (f"O{words[1:]}." if chosen else "")
