"""Aegaeon's simulation of ServerlessLLM by hand: each rule with its lines in the artifact's aegaeon/sim."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.policy.actions import Action, Admit, Drop, Evict, Load, Move, Run
from harness.policy.events import Arrived, Done, Finished, Prefilled, Woke
from harness.policy.types import GIB, Batch, Cluster, Gpu, Inst, Model, Plan, Request
from systems.serverlessllm_released import PARKED, Entry, Group, ServerlessLlmReleased
from tests.systems.test_serverlessllm import FLAT, simulated


class Scene:
    """A view whose facts a test writes down: 1 ms a prompt token, 20 ms a step (`FLAT`)."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.kv: dict[int, int] = {}  # bytes
        self.made: dict[int, int] = {}  # tokens
        self.output: dict[int, int] = {}
        self.decoding: dict[Batch, int] = {}
        self.inside: dict[int, str] = {}  # the model of each GPU

    def batch(self, batch: Batch) -> SimpleNamespace:
        return SimpleNamespace(decoding=self.decoding.get(batch, 0), ctx_tokens=0)

    def request(self, rid: int) -> SimpleNamespace:
        return SimpleNamespace(kv_bytes=self.kv.get(rid, 0), made_tokens=self.made.get(rid, 0))

    def insts(self, gpu: int) -> tuple[Inst, ...]:
        return (Inst(self.inside[gpu], (gpu,)),) if gpu in self.inside else ()

    def weights(self, inst: Inst) -> str:
        return "in"

    def oracle_tokens(self, rid: int) -> int:
        return self.output[rid]


class Stage:
    """A policy and its scene; what it answers comes true at once, but for loads."""

    def __init__(self, workers: int, models: str = "abcd", **fields: Any) -> None:
        gpus = tuple(Gpu("flat", 0, 3 * GIB, 100, ()) for _ in range(workers))
        served = {m: Model(1, 1, GIB, 1, 1, 2000, 1.0, 0.1) for m in models}
        plan = {m: Plan(1.0, 100, 50, "test") for m in models}
        self.made = ServerlessLlmReleased(Cluster(gpus, served, plan, FLAT), **fields)
        self.view = Scene()

    def tell(self, event: Any) -> list[Action]:
        answer = list(self.made.on(event, self.view))  # type: ignore[arg-type]
        for action in answer:
            match action:
                case Move(int(rid), None):
                    self.view.kv.pop(rid)
                case Load(Inst(m, (gpu, *_))):
                    self.view.inside[gpu] = m
        return answer

    def arrive(self, at_s: float, rid: int, model: str, prompt: int = 100, output: int = 50) -> list[Action]:
        self.view.now_s = at_s
        self.view.output[rid] = output
        return self.tell(Arrived(Request(rid, model, at_s, prompt, 1.0, 0.1)))

    def load(self, at_s: float, gpu: int) -> list[Action]:
        """End the load of a worker's model."""
        self.view.now_s = at_s
        return self.tell(Done(Load(Inst(self.view.inside[gpu], (gpu,)))))

    def prefill(self, at_s: float, rid: int, made: int = 1) -> None:
        """Give a request so many tokens, the first of them now."""
        self.view.now_s = at_s
        self.view.kv[rid], self.view.made[rid] = 1, made
        assert self.tell(Prefilled(rid, self.home(rid))) == []

    def end(self, at_s: float, rid: int, state: Any = "done") -> list[Action]:
        self.view.now_s = at_s
        return self.tell(Finished(rid, self.home(rid), state))

    def home(self, rid: int) -> Batch:
        e = self.made.entries[rid]
        return e.worker.batch(e.request.model)

    def queues(self) -> list[list[int]]:
        return [[e.request.id for e in x.queue] for x in self.made.workers]


def on(model: str, gpu: int = 0, tag: int = 0) -> Batch:
    return Batch(Inst(model, (gpu,)), tag)


# ------------------------------------------------------------------ ServerlessLLM


def test_a_worker_is_empty_until_its_first_request_and_then_loads_from_host_memory() -> None:
    s = Stage(2)  # worker.py:70; 245-267
    assert s.tell(Woke("start")) == []
    a = on("a")
    assert s.arrive(0.0, 0, "a") == [Load(a.inst), Run(a), Admit(0, a)]
    assert s.made.way == "host"
    assert {"Load", "Load.way:disk"} & s.made.uses == {"Load"}


def test_four_requests_fill_a_worker_and_the_fifth_goes_to_one_without_a_model() -> None:
    s = Stage(3)  # scheduler.py:169, 212-220
    for rid in range(5):
        s.arrive(0.0, rid, "a")
    assert s.queues() == [[0, 1, 2, 3], [4], []]
    s.arrive(0.0, 5, "a")
    assert s.queues() == [[0, 1, 2, 3], [4, 5], []]  # 233-239: the shorter run
    for rid in (0, 1, 2):
        s.end(1.0, rid)
    s.arrive(1.0, 6, "a")
    assert s.queues() == [[3, 6], [4, 5], []]


def test_only_the_run_at_the_end_of_a_queue_counts() -> None:
    s = Stage(1)  # scheduler.py:197-205
    for rid, m in enumerate("aab"):
        s.arrive(0.0, rid, m)
    assert s.made.last_run(s.made.workers[0]) == ("b", 1)
    s.arrive(0.0, 3, "a")  # the run of a in front does not end the queue, so this is one of its own
    assert s.queues() == [[0, 1, 2, 3]]
    assert s.made.last_run(s.made.workers[0]) == ("a", 1)
    assert list(s.made.workers[0].runs) == [0, 1]  # worker.py:157-160
    s.load(0.5, 0)
    s.end(1.0, 0)
    b = on("b")
    assert s.end(1.0, 1) == [Evict(Inst("a", (0,)), drain=False), Load(b.inst), Run(b), Admit(2, b)]


def test_a_run_is_as_long_as_it_must_where_every_worker_has_the_model() -> None:
    s = Stage(2)  # scheduler.py:225, 229-241
    for rid in range(10):
        s.arrive(0.0, rid, "a")
    assert s.queues() == [[0, 1, 2, 3, 8], [4, 5, 6, 7, 9]]
    assert [list(x.runs) for x in s.made.workers] == s.queues()  # worker.py:44-48: all of it runs


def test_the_worker_whose_last_step_ended_first_takes_another_model() -> None:
    """scheduler.py:221-224 and worker.py:242: steps move a worker's clock; the end of a request alone does not."""
    s = Stage(3)
    for rid, m in enumerate("abc"):
        s.arrive(0.0, rid, m)
        s.load(2.0, rid)
    s.prefill(3.005, 0)
    s.prefill(4.0, 1)
    s.prefill(4.0, 2)
    s.end(5.0, 1)
    s.end(6.0, 2)
    s.view.decoding[on("a", 0)] = 1
    s.view.now_s = 20.0
    last = [s.made.used_s(x, s.view) for x in s.made.workers]  # type: ignore[arg-type]
    assert last == pytest.approx([3.005 + 849 * 0.02, 5.0, 6.0])  # 19.985 s: worker 0 runs, though its event is oldest
    s.arrive(20.0, 3, "d")
    assert s.queues() == [[0], [3], []]


def test_a_load_does_not_move_the_clock_so_the_loading_worker_takes_the_next_model_too() -> None:
    s = Stage(2, "abcde")  # worker.py:242, 245-267
    for rid, m in enumerate("ab"):
        s.arrive(0.0, rid, m)
        s.load(2.0, rid)
        s.prefill(3.0 + rid, rid)
        s.end(5.0 + rid, rid)
    for rid, m in enumerate("cde", 2):
        s.arrive(10.0 + rid / 10, rid, m)
    assert s.queues() == [[2, 3, 4], []]  # 5.0 < 6.0 until c has its first token
    s.load(12.0, 0)
    s.prefill(12.5, 2)
    s.arrive(13.0, 5, "a")
    assert s.queues() == [[2, 3, 4], [5]]


def test_requests_are_dropped_only_at_arrivals_and_only_after_fifteen_seconds() -> None:
    s = Stage(1)  # scheduler.py:43-45, 77-81
    s.arrive(0.0, 0, "a")
    s.load(2.0, 0)
    s.prefill(2.1, 0)
    s.arrive(3.0, 1, "b")
    assert not any(isinstance(x, Drop) for x in s.arrive(18.0, 2, "c"))  # 15.0 s after request 1: not more
    assert [x for x in s.arrive(18.001, 3, "c") if isinstance(x, Drop)] == [Drop(1)]  # request 0 has a token
    assert s.end(18.002, 1, "dropped") == []
    assert s.queues() == [[0, 2, 3]]


def test_a_dropped_request_counts_as_queued_at_the_arrival_that_drops_it() -> None:
    s = Stage(2)  # the purge of a queue is its worker's: worker.py:184-191
    for rid in range(4):
        s.arrive(0.0, rid, "a")
    assert [x for x in s.arrive(16.0, 4, "a") if isinstance(x, Drop)] == [Drop(rid) for rid in range(4)]
    assert s.queues() == [[0, 1, 2, 3], [4]]
    for rid in range(4):
        s.end(16.0, rid, "dropped")
    s.arrive(16.0, 5, "a")
    assert s.queues() == [[5], [4]]


# ------------------------------------------------------------------ ServerlessLLM+


def plus(workers: int, models: str = "abcd") -> Stage:
    return Stage(workers, models, **ServerlessLlmReleased.presets["plus"])


def test_plus_fills_batches_of_four_and_opens_new_ones_where_there_are_fewest() -> None:
    s = plus(2)  # scheduler.py:291-306
    assert "view.oracle_tokens" in s.made.uses
    for rid, m in enumerate("abaaaca"):
        s.arrive(0.0, rid, m, prompt=100 * (rid + 1))
    # a: 0 2 3 4 are full; c goes to worker 0, for both have one batch; a's second batch to worker 1, which has fewer
    assert [sorted(queue) for queue in s.queues()] == [[0, 2, 3, 4, 5], [1, 6]]


def test_plus_sorts_by_the_prompts_to_compute_or_by_what_the_first_has_left_to_decode() -> None:
    s = plus(1)  # scheduler.py:316-323
    s.arrive(0.0, 0, "a", prompt=100, output=50)
    s.load(2.0, 0)
    s.prefill(2.1, 0, made=25)  # 25 steps of 20 ms left: 0.5 s
    assert s.arrive(3.0, 1, "b", prompt=501) == []
    s.arrive(3.0, 2, "c", prompt=550)
    assert s.queues() == [[0, 1, 2]]
    s.arrive(3.0, 3, "b", prompt=100)  # b: 0.601 s now
    assert s.queues() == [[0, 2, 1, 3]]


def test_plus_interrupts_what_runs_and_its_kv_is_computed_again() -> None:
    """scheduler.py:309-325, worker.py:245-267: the longest left waits, and has lost its KV."""
    s = plus(1)
    a, b, c = on("a"), on("b"), on("c")
    s.arrive(0.0, 0, "a", prompt=100, output=50)
    s.load(2.0, 0)
    s.prefill(2.1, 0, made=10)  # 40 steps left: 0.8 s
    assert s.arrive(3.0, 1, "b", prompt=300) == [
        *(Admit(0, on("a", tag=PARKED)), Move(0, None)),
        *(Evict(a.inst, drain=False), Load(b.inst), Run(b), Admit(1, b)),
    ]
    # without KV a's key is its prompt, 0.1 s: it comes first again. The load of b is not cut short.
    assert s.arrive(3.5, 2, "c", prompt=500) == [Admit(1, on("b", tag=PARKED))]
    assert s.queues() == [[0, 1, 2]]
    assert s.load(5.0, 0) == [Evict(b.inst, drain=False), Load(a.inst), Run(a), Admit(0, a)]
    s.load(7.0, 0)
    assert s.end(9.0, 0) == [Evict(a.inst, drain=False), Load(b.inst), Run(b), Admit(1, b)]
    s.load(11.0, 0)
    assert s.end(13.0, 1) == [Evict(b.inst, drain=False), Load(c.inst), Run(c), Admit(2, c)]


def test_plus_sorts_every_worker_at_every_arrival() -> None:
    s = plus(2)  # scheduler.py:309: for all workers
    s.arrive(0.0, 0, "a", prompt=100, output=50)
    s.arrive(0.0, 1, "b", prompt=100, output=50)
    s.arrive(0.0, 2, "c", prompt=200, output=50)
    assert s.queues() == [[0, 2], [1]]
    s.load(2.0, 0)
    s.prefill(2.1, 0, made=1)  # from 0.1 s of prompt to 0.98 s of decode
    assert s.queues() == [[0, 2], [1]]  # nothing is sorted between arrivals
    answer = s.arrive(3.0, 3, "d", prompt=400)
    assert s.queues() == [[2, 0], [1, 3]]
    assert Move(0, None) in answer
    assert Load(Inst("c", (0,))) in answer


def test_plus_evicts_requests_of_the_same_model_that_another_batch_cuts_off() -> None:
    s = plus(1)  # worker.py:193-204
    for rid in range(4):
        s.arrive(0.0, rid, "a", prompt=100, output=50)
    s.load(2.0, 0)
    for rid in range(4):
        s.prefill(2.4, rid, made=10)  # the first has 0.8 s left
    assert s.arrive(3.0, 4, "a", prompt=100) == [Admit(4, on("a"))]  # 0.1 s: in front, and a's batches run together
    assert s.queues() == [[4, 0, 1, 2, 3]]
    answer = s.arrive(3.0, 5, "b", prompt=300)  # 0.3 s; each queue is cut anew, so 3 is now alone
    assert s.queues() == [[4, 0, 1, 2, 5, 3]]
    assert answer == [Admit(3, on("a", tag=PARKED)), Move(3, None)]
    assert list(s.made.workers[0].runs) == [0, 1, 2, 4]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), max_size=12), st.integers(1, 4))
def test_plus_cuts_a_queue_that_is_given_in_batches_as_one_given_request_by_request(
    sizes: list[tuple[str, int]], most: int
) -> None:
    s = Stage(1, most=most, order="srtf")  # scheduler.py:272-284
    worker, of = s.made.workers[0], [m for m, n in sizes for _ in range(min(n, most))]
    entries = [Entry(Request(rid, m, 0.0, 1, 1.0, 0.1), worker, Group(m)) for rid, m in enumerate(of)]
    left = iter(entries)
    given = [Group(m, list(islice(left, min(n, most)))) for m, n in sizes]
    alone = [Group(e.request.model, [e]) for e in entries]

    def cut(groups: list[Group]) -> list[list[int]]:
        return [[e.request.id for e in batch.entries] for batch in s.made.batches(groups)]

    want: list[list[int]] = []
    for rid, m in enumerate(of):
        room = next((batch for batch in want if of[batch[0]] == m and len(batch) < most), None)
        if room is None:
            want.append(room := [])
        room.append(rid)
    assert cut(given) == want
    assert cut(alone) == want


# ------------------------------------------------------------------ in the simulator


def test_an_interrupted_request_computes_its_prompt_and_its_tokens_again() -> None:
    rows = [(1.0, 0, 200, 1500), (1.8, 1, 200, 50)]
    R, _, engine = simulated(rows, 2, 1, make=ServerlessLlmReleased, order="srtf")
    p, load_s = engine.cluster.profile, engine.cluster.profile.load_s(Inst("m0", (0,)), "host")
    inst = Inst("m0", (0,))
    at = first = 1.0 + load_s + p.prefill_s(inst, 200)
    tokens = 1
    while at < 1.8:  # steps up to the boundary at which it loses its KV
        at += p.step_s(inst, 1, 200 + tokens)
        tokens += 1
    assert 1 < tokens < 1500
    other = 1.8 + load_s + p.prefill_s(inst, 200)
    done = other + sum(p.step_s(inst, 1, 201 + k) for k in range(49))
    again = done + load_s + p.prefill_s(inst, 200 + tokens)
    last = again + sum(p.step_s(inst, 1, 200 + k) for k in range(tokens + 1, 1500))
    assert R["first"] == pytest.approx([first, other], rel=1e-9)
    assert R["done"] == pytest.approx([last, done], rel=1e-9)
