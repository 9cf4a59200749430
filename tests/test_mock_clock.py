"""The law of `bench mock`, with a clock of our own: latency, sleep, faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.engines import machine
from harness.mock.agenda import Agenda
from harness.mock.ask import text_tokens
from harness.mock.faults import FAULTS, Faults, Order, Shares, ordered
from harness.mock.model import Mode, Model, Served
from harness.mock.pacing import Fixed, Gpu, Pacing, ns
from harness.mock.sequence import Sequence
from harness.mock.table import Table
from harness.policy.types import Inst
from tests import whole_table
from tests.cases import cases
from workloads.models import shape

Stamps = list[tuple[int, int]]  # (index of the sequence, time of a token)


# ---------------------------------------------------------------------- the clock


class World:
    """Models on a clock of our own."""

    def __init__(self, *pacings: Callable[[Agenda], Pacing], **served: Any) -> None:
        self.agenda = Agenda()
        self.models = [
            Model(Served(f"m{k}", 1000, **served), make(self.agenda), self.agenda) for k, make in enumerate(pacings)
        ]
        for model in self.models:
            model.begin(0)
        self.told: Stamps = []
        self.sequences: list[Sequence] = []
        self.orders: list[tuple[str, int]] = []

    def ask(self, at_ns: int, prompt: int, output: int, model: int = 0, after_ns: int = 0) -> Sequence:
        self.agenda.advance(at_ns)
        sequence = Sequence(prompt, output, self._told, index=len(self.sequences))
        self.sequences.append(sequence)
        self.models[model].submit(sequence, at_ns, after_ns)
        return sequence

    def sleep(self, at_ns: int, level: int = 1, mode: Mode = "abort") -> None:
        self.agenda.advance(at_ns)
        self.models[0].sleep(level, mode, at_ns, lambda t: self.orders.append(("slept", t)))

    def wake(self, at_ns: int) -> None:
        self.agenda.advance(at_ns)
        self.models[0].wake(at_ns, lambda t: self.orders.append(("woken", t)))

    def of(self, index: int) -> list[int]:
        return [at for request, at in self.told if request == index]

    def _told(self, sequence: Sequence, at_ns: int) -> None:
        self.told.append((sequence.index, at_ns))


def prefill_s(tokens: int) -> float:
    return tokens * 1e-9


def step_s(seqs: int, context: int) -> float:
    return (1000 * seqs + context) * 1e-9


def stepping(batch_cap: int = 256, models: int = 1, **served: Any) -> World:
    """Return models on one GPU: a prompt takes 1 ns a token; a step 1000 ns a sequence, and 1 ns a context token."""
    gpus: list[Gpu] = []

    def lane(agenda: Agenda) -> Pacing:
        if not gpus:
            gpus.append(Gpu(agenda, batch_cap))
        return gpus[0].lane(prefill_s, step_s)

    return World(*[lane] * models, **served)


def fixed(**served: Any) -> World:
    return World(lambda agenda: Fixed(agenda, 50, 10), **served)


def test_fixed_latency_counts_from_the_request_and_never_adds_up_lateness() -> None:
    world = fixed()
    world.ask(100, prompt=5, output=3)
    world.ask(107, prompt=500, output=2)
    world.agenda.advance(100_000)  # one late look
    assert world.told == [(0, 150), (1, 157), (0, 160), (1, 167), (0, 170)]


def test_prompts_go_first_in_order_then_all_step_together() -> None:
    world = stepping()
    world.ask(0, prompt=100, output=3)
    world.ask(10, prompt=200, output=2)
    world.agenda.advance(10**9)
    # Prompts end at 100 and 300. The step of both has 2 x 1000 + (100 + 1) + (200 + 1), that of the first alone
    # 1000 + (100 + 2).
    assert world.told == [(0, 100), (1, 300), (0, 300 + 2302), (1, 300 + 2302), (0, 2602 + 1102)]


def test_a_prompt_that_comes_during_a_step_waits_for_its_end() -> None:
    world = stepping()
    world.ask(0, prompt=100, output=3)
    world.ask(101, prompt=50, output=1)
    world.agenda.advance(10**9)
    assert world.told == [(0, 100), (0, 1201), (1, 1251), (0, 1251 + 1102)]


def test_the_batch_cap_keeps_prompts_out() -> None:
    world = stepping(batch_cap=1)
    world.ask(0, prompt=100, output=2)
    world.ask(0, prompt=100, output=1)
    world.agenda.advance(10**9)
    assert world.told == [(0, 100), (0, 1201), (1, 1301)]


def test_models_of_one_gpu_take_turns_a_step_each() -> None:
    world = stepping(models=2)
    world.ask(0, prompt=100, output=3, model=0)
    world.ask(0, prompt=100, output=2, model=1)
    world.agenda.advance(10**9)
    assert world.told == [(0, 100), (1, 200), (0, 1301), (1, 2402), (0, 3504)]


def test_models_on_two_gpus_do_not_meet() -> None:
    each = [lambda agenda: Gpu(agenda).lane(prefill_s, step_s)] * 2
    world = World(*each)
    world.ask(0, prompt=100, output=2, model=0)
    world.ask(0, prompt=100, output=2, model=1)
    world.agenda.advance(10**9)
    assert world.told == [(0, 100), (1, 100), (0, 1201), (1, 1201)]


def test_who_leaves_takes_no_part_in_the_next_step() -> None:
    world = stepping()
    world.ask(0, prompt=100, output=3)
    gone = world.ask(0, prompt=100, output=3)
    waits = world.ask(0, prompt=100, output=3)
    world.agenda.advance(200)
    world.models[0].cancel(waits, 200)  # its prompt is under way: it takes its time
    world.agenda.advance(310)
    world.models[0].cancel(gone, 310)  # the step of two is under way
    world.models[0].cancel(gone, 311)
    world.agenda.advance(10**9)
    assert world.told == [(0, 100), (1, 200), (0, 300 + 2202), (0, 2502 + 1102)]
    assert (world.models[0].waiting, world.models[0].live) == (0, {})


def test_stamps_follow_the_cost_table() -> None:
    table = Table([("llama-3.1-8b", shape("llama-3.1-8b"), 1)], "h100", "vllm-0.15", None)
    agenda = Agenda()
    model = Model(table.served()[0], table.pacing(1, 256)(agenda, 0), agenda)
    told: Stamps = []
    for k, (prompt, output) in enumerate([(1000, 3), (2000, 2)]):
        model.submit(Sequence(prompt, output, lambda s, at: told.append((s.index, at)), index=k), 0)
    agenda.advance(10**10)
    config = machine.Config(models=(machine.Served("llama-3.1-8b", shape("llama-3.1-8b")),))
    profile, inst = machine.profile(config, machine.machine(config)), Inst("llama-3.1-8b", (0,))
    first = ns(profile.prefill_s(inst, 1000))
    second = first + ns(profile.prefill_s(inst, 2000))
    both = second + ns(profile.step_s(inst, 2, 1001 + 2001))
    last = both + ns(profile.step_s(inst, 1, 1002))
    assert told == [(0, first), (1, second), (0, both), (1, both), (0, last)]
    assert 0 < first < second < both < last


def test_the_cost_table_prices_sleep_and_wake() -> None:
    eight, small = (
        Table([(name, shape(name), 1)], "h100", "vllm-0.15", None).served()[0]
        for name in ("llama-3.1-8b", "llama-3.2-1b")
    )
    for level in (1, 2):
        assert eight.wake_ns[level] > small.wake_ns[level] > 0
    assert eight.sleep_ns[1] > small.sleep_ns[1] > eight.sleep_ns[2] == 0
    assert (eight.wake_ns[0], eight.sleep_ns[0], eight.max_tokens) == (0, 0, 131072)


def test_the_table_of_servers_that_were_measured_prices_a_mock(tmp_path: Path) -> None:
    """It has starts alone, by which weights come back from any sleep."""
    table = Table([("m", shape("llama-tiny"), 1)], "h100", "vllm-0.15", whole_table.write(tmp_path))
    served, agenda = table.served()[0], Agenda()
    model = Model(served, table.pacing(1, 4)(agenda, 0), agenda)
    told: Stamps = []
    model.submit(Sequence(8, 2, lambda s, at: told.append((s.index, at)), index=0), 0)
    agenda.advance(10**10)
    first_s = 0.010 + 0.00025 + 8**2 / 2 * 2**-10 * 1e-3
    assert [at for _, at in told] == [ns(first_s), ns(first_s) + ns(0.003 + 0.00025 + 9 * 2**-6 * 1e-3)]
    assert served.wake_ns[1] == served.wake_ns[2] == ns(0.5 + 9_417_216 / 1e8)


def test_a_slow_request_joins_later() -> None:
    world = fixed()
    world.ask(0, prompt=1, output=1, after_ns=1000)
    world.ask(0, prompt=1, output=1)
    world.agenda.advance(10**9)
    assert world.told == [(1, 50), (0, 1050)]


# ---------------------------------------------------------------------- sleep

TIMES: dict[str, Any] = {"sleep_ns": {0: 0, 1: 300, 2: 5}, "wake_ns": {0: 0, 1: 700, 2: 9000}}


@cases(("level", "slept", "woken"), [(0, 100, 1000), (1, 400, 1700), (2, 105, 10000)])
def test_sleep_and_wake_take_the_time_of_their_level(level: int, slept: int, woken: int) -> None:
    world = fixed(**TIMES)
    world.sleep(100, level)
    assert world.models[0].sleeping
    world.ask(500, prompt=1, output=1)  # is held
    world.wake(1000)
    world.agenda.advance(10**9)
    assert world.orders == [("slept", slept), ("woken", woken)]
    assert world.told == [(0, woken + 50)]
    assert not world.models[0].sleeping


def test_abort_ends_what_runs_at_once() -> None:
    world = stepping(**TIMES)
    first, second = (world.ask(0, prompt=100, output=9) for _ in range(2))
    world.sleep(150)
    world.wake(10_000)
    world.agenda.advance(10**9)
    assert (first.finish, first.made, second.finish, second.made) == ("abort", 1, "abort", 0)
    assert world.told == [(0, 100), (0, 150), (1, 150)]
    assert world.models[0].waiting == 0


@cases("make", [fixed, stepping])
def test_wait_falls_asleep_after_the_last_token(make: Callable[..., World]) -> None:
    world = make(**TIMES)
    world.ask(0, prompt=100, output=3)
    world.sleep(1, mode="wait")
    world.ask(2, prompt=100, output=1)  # is held
    world.agenda.advance(10**6)
    ended = world.of(0)[-1]
    assert len(world.of(0)) == 3
    assert world.of(1) == []
    assert world.orders == [("slept", ended + 300)]


@cases(("make", "at_ns", "made"), [(fixed, 40, 0), (fixed, 55, 1), (stepping, 50, 0), (stepping, 101, 1)])
def test_keep_goes_on_where_it_stood(make: Callable[..., World], at_ns: int, made: int) -> None:
    world = make(**TIMES)
    kept = world.ask(0, prompt=100, output=3)
    world.sleep(at_ns, mode="keep")
    world.agenda.advance(10**6)
    assert (kept.made, kept.finish) == (made, None)
    world.wake(10**6)
    world.agenda.advance(10**9)
    assert (kept.made, kept.finish) == (3, "length")
    assert world.of(0)[made] > 10**6 + 700
    assert len(world.of(0)) == 3


def test_orders_follow_each_other() -> None:
    world = fixed(**TIMES)
    world.sleep(0)
    world.wake(1)  # while it falls asleep
    world.sleep(2, level=2)  # is about to sleep already
    world.agenda.advance(10**9)
    assert world.orders == [("slept", 300), ("slept", 300), ("woken", 1000)]
    world.sleep(10**9)
    world.wake(10**9 + 400)
    world.sleep(10**9 + 500)  # while it wakes
    world.agenda.advance(2 * 10**9)
    assert world.orders[3:] == [("slept", 10**9 + 300), ("woken", 10**9 + 1100), ("slept", 10**9 + 1400)]
    world.sleep(2 * 10**9)
    world.wake(2 * 10**9)
    world.wake(3 * 10**9)
    assert world.orders[6:] == [("slept", 2 * 10**9), ("woken", 2 * 10**9 + 700), ("woken", 3 * 10**9)]


def test_a_request_wakes_where_requests_wake() -> None:
    world = fixed(**TIMES, wakes=True)
    world.sleep(0)
    world.ask(10, prompt=1, output=1)  # before it is asleep: it falls asleep first
    world.agenda.advance(10**6)
    assert world.told == [(0, 300 + 700 + 50)]
    world.sleep(10**6)
    world.ask(2 * 10**6, prompt=1, output=1)
    world.agenda.advance(10**9)
    assert world.told[1:] == [(1, 2 * 10**6 + 750)]


def test_idle_models_fall_asleep() -> None:
    world = fixed(**TIMES, wakes=True, idle_ns=1000)
    world.ask(900, prompt=1, output=1)  # until 950
    world.agenda.advance(1949)
    assert world.models[0].state == "awake"
    world.agenda.advance(1950)
    assert (world.models[0].state, world.models[0].level) == ("falling asleep", 1)
    world.ask(5000, prompt=1, output=1)
    world.agenda.advance(10**4)
    assert world.of(1) == [5750]


# ---------------------------------------------------------------------- faults


def test_equal_seeds_draw_equal_faults() -> None:
    shares = Shares(fail=0.1, reject=0.05, hang=0.02, cut=0.2, malformed=0.3)
    faults = Faults(shares, 7)
    drawn = [faults.draw().fault for _ in range(2000)]
    faults.restart()
    assert [faults.draw().fault for _ in range(2000)] == drawn
    assert [Faults(shares, 8).draw().fault for _ in range(2000)] != drawn
    for name, fault in FAULTS.items():
        assert abs(drawn.count(fault) / 2000 - getattr(shares, name)) < 0.04
    assert {Faults(Shares(), 7).draw() for _ in range(9)} == {Order()}
    assert {Faults(Shares(hang=1), 7).draw() for _ in range(9)} == {Order("hang")}


def test_the_header_orders_a_fault() -> None:
    assert ordered("hang") == Order("hang")
    assert ordered(" slow=1.5 , cut") == Order("cut", 1.5)
    for text in ("", "cut,hang", "slow", "slow=x", "slow=-1", "slow=nan", "501"):
        with pytest.raises(ValueError, match=r".+"):
            ordered(text)


def test_text_has_a_token_for_each_four_bytes() -> None:
    assert [text_tokens(text) for text in ("", "a", "abcd", "abcde", "ä" * 3, "\ud800")] == [1, 1, 1, 2, 2, 1]
