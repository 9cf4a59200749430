"""Swapping by hand: in which order a queue is served, whose server stops, and when one without requests does."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.engines.costs import quantities
from harness.engines.machine import Config, Served
from harness.engines.wallclock import NoProfile
from harness.policy.actions import Action, Admit, Evict, Limit, Load, Wake
from harness.policy.events import Arrived, Done, Event, Finished, Woke
from harness.policy.fields import domains
from harness.policy.types import Cluster, Gpu, Gpus, Infeasible, Inst, Model, Plan, Request, UserError
from systems.swap import Swap, place_of
from tests.cases import cases
from tests.systems.by_hand import ran
from tests.workloads.asked import asked
from workloads.models import shape

WEIGHTS, LONGEST = 100, 10 + 1  # a model holds 10 tokens, one byte each, and a granule beside


class Clock:
    """A view that knows the time and nothing else."""

    def __init__(self) -> None:
        self.now_s = 0.0


class Router:
    """A policy, driven by hand: what it says to each event, and which requests are where."""

    stops_at_once = True  # a server that is to stop is gone in the same instant

    def __init__(self, preset: str | None, models: str = "abc", gpus: int = 1, holds: float = 1.0, **fields: Any):
        held = WEIGHTS + 4 * LONGEST
        cards = tuple(Gpu("flat", 0, int(holds * held), 100, ()) for _ in range(gpus))
        served = {m: Model(1, 1, WEIGHTS, 1, 1, 10, 1.0, 0.1) for m in models}
        plan = {m: Plan(10.0 - k, 5, 5, "test") for k, m in enumerate(models)}
        given = {**(Swap.presets[preset] if preset else {}), **fields}
        self.policy = Swap(Cluster(cards, served, plan, NoProfile()), **given)
        self.view, self.sent, self.rid = Clock(), dict[int, str](), 0
        self.first = self.tell(Woke("start"))

    def tell(self, event: Event, at_s: float | None = None) -> list[Action]:
        if at_s is not None:
            self.view.now_s = at_s
        actions = list(self.policy.on(event, self.view))  # type: ignore[arg-type]
        for action in actions:
            if isinstance(action, Admit):
                assert isinstance(action.who, int)
                assert action.who not in self.sent
                self.sent[action.who] = action.batch.inst.model
        if self.stops_at_once:
            actions += [more for a in actions if isinstance(a, Evict) for more in self.tell(Done(a))]
        return actions

    def ask(self, models: str, at_s: float | None = None) -> str:
        """Ask for models one after the other; return what is said of loads, evictions and requests."""
        actions = []
        for m in models:
            actions += self.tell(Arrived(Request(self.rid, m, self.view.now_s, 5, 1.0, 0.1)), at_s)
            self.rid += 1
        return brief(actions)

    def up(self, m: str, at_s: float | None = None, gpu: int = 0) -> str:
        """Tell that a server came up."""
        return brief(self.tell(Done(Load(Inst(m, (gpu,)), self.policy.way)), at_s))

    def end(self, rid: int, at_s: float | None = None) -> str:
        """Tell that a request ended."""
        return brief(self.tell(Finished(rid, None, "done"), at_s))

    def wakes(self, actions: list[Action]) -> dict[str, float]:
        return {a.key: a.at_s for a in actions if isinstance(a, Wake)}


def brief(actions: list[Action]) -> str:
    """Write `+m` for a start, `-m` for a stop, a number for a request that is sent."""
    words = []
    for a in actions:
        match a:
            case Load(Inst(m)):
                words.append(f"+{m}")
            case Evict(Inst(m), drain):
                assert drain
                words.append(f"-{m}")
            case Admit(rid):
                words.append(str(rid))
    return " ".join(words)


def test_what_is_asked_for_most_is_up_at_the_start() -> None:
    assert brief(Router(None).first) == "+a"
    assert brief(Router("router", "abcdef", holds=6).first) == "+a +b +c +d"  # four, whatever fits
    assert brief(Router("router", "abcdef", holds=2.5).first) == "+a +b"  # as many as fit
    assert brief(Router("ollama", "abcdefgh", gpus=2, holds=6).first) == "+a +b +c +d +e +f"  # three a GPU


def test_a_queue_in_order_swaps_back_and_forth() -> None:
    # a b c a b c: five swaps
    x, log = Router("llama-swap-fifo"), []
    assert x.ask("abcabc") == "0"  # the fourth waits, though its server is up
    for rid, m in enumerate("abcab"):
        log.append(x.end(rid))
        x.up("bcabc"[rid])
        assert x.sent[rid] == m
    assert log == ["-a +b 1", "-b +c 2", "-c +a 3", "-a +b 4", "-b +c 5"]


def test_a_collated_queue_swaps_twice() -> None:
    # a b c a b c: the requests of a server that is up pass
    x = Router("llama-swap")
    assert x.ask("abcabc") == "0 3"
    assert x.end(0) == ""  # still serves 3
    assert x.end(3) == "-a +b 1 4"
    assert x.up("b") == ""
    assert x.end(4) == ""
    assert x.end(1) == "-b +c 2 5"


def test_who_is_starting_is_not_stopped() -> None:
    x = Router("llama-swap")
    assert x.ask("bc") == "-a +b 0"
    assert x.end(0) == ""  # given up before its server was up
    assert x.up("b") == "-b +c 1"


def test_a_server_starts_again_when_its_last_one_is_gone() -> None:
    x = Router("llama-swap", "ab")
    x.stops_at_once = False
    assert x.ask("b") == "-a +b 0"
    x.up("b")
    assert x.end(0) == ""
    assert x.ask("a") == ""  # a's server is still stopping
    assert brief(x.tell(Done(Evict(Inst("a", (0,)))))) == "-b +a 1"


def test_the_router_stops_the_server_whose_last_request_came_first() -> None:
    x = Router("router", "abcdef", holds=4)
    for at_s, m in enumerate("bacd", 1):
        x.ask(m, float(at_s))
    assert x.ask("e", 5.0) == ""  # all four are busy
    assert x.ask("f", 6.0) == ""
    assert x.end(2, 7.0) == "-c +e 4"  # the first to become idle, not the least recently used
    assert x.ask("b", 8.0) == "6"
    for rid in (1, 3, 6):  # a, d, b
        x.end(rid, 9.0)
    assert x.sent[5] == "f"  # a had stopped for it
    assert sorted(x.policy.home["a"].servers) == ["b", "d", "e", "f"]
    x.end(0, 10.0)
    assert x.ask("a", 11.0) == "-d +a 7"  # d: asked at 4; b at 8; e and f serve


def test_each_router_has_its_own_models() -> None:
    x = Router("llama-swap", "abcd", gpus=2)
    homes = {m: x.policy.home[m].places[m] for m in "abcd"}
    assert homes == {"a": [(0,)], "d": [(0,)], "b": [(1,)], "c": [(1,)]}  # 10 + 7 and 9 + 8 requests a second
    assert x.ask("acd") == "0 -b +c 1"  # d waits for a


def homes(tp: str, gpus: int, preset: str, node_gpus: int = 8) -> dict[str, Gpus]:
    """Return homes of models of these tensor-parallel degrees; the first are asked for most."""
    cards = tuple(Gpu("flat", g // node_gpus, WEIGHTS + 4 * LONGEST, 100, ()) for g in range(gpus))
    models = {chr(97 + k): Model(1, int(n), WEIGHTS, 1, 1, 10, 1.0, 0.1) for k, n in enumerate(tp)}
    plan = {m: Plan(20.0 - k, 5, 5, "test") for k, m in enumerate(models)}
    made = Swap(Cluster(cards, models, plan, NoProfile()), **Swap.presets[preset])  # type: ignore[arg-type]
    return {m: place for m in models for (place,) in [made.home[m].places[m]]}


@cases("preset", ["llama-swap", "llama-swap-fifo", "router", "sleep", "sleep-2"])
def test_each_model_has_gpus_of_its_own_while_there_are_enough(preset: str) -> None:
    tp = "111111244211"  # eight on one GPU each, two on two, two that are asked for little on four: 20
    for gpus in (20, 24):
        taken = [g for place in homes(tp, gpus, preset).values() for g in place]
        assert len(taken) == len(set(taken)) == 20
    short = homes(tp, 19, preset)
    assert short["h"] == short["i"] == (0, 1, 2, 3)  # three GPUs are left, which hold neither
    assert len({place for m, place in short.items() if m not in "hi"}) == 10


def test_models_that_nobody_is_known_to_ask_for_have_gpus_of_their_own_too() -> None:
    x = Router("llama-swap", "abc", gpus=3)
    made = Swap(replace(x.policy.cluster, plan={}), **Swap.presets["llama-swap"])  # type: ignore[arg-type]
    assert sorted(place for m in "abc" for place in made.home[m].places[m]) == [(0,), (1,), (2,)]


def test_ollama_stops_the_first_by_name_of_those_without_requests() -> None:
    x = Router("ollama", "abcd", holds=3)
    for at_s, m in enumerate("cba", 1):
        x.ask(m, float(at_s))
    x.end(1, 4.0)  # b
    x.end(0, 5.0)  # c: used before b
    assert x.ask("d", 6.0) == "-b +d 3"


def test_ollama_awaits_the_first_by_name_where_all_have_requests_and_sends_it_no_more() -> None:
    x = Router("ollama", "abcd", holds=3)
    assert x.ask("cbadac") == "0 1 2 5"  # d waits for a, the second a behind it; c's server still takes requests
    assert x.end(1) == ""  # b is idle now, but a is awaited
    assert x.end(2) == "-a +d 3 -b +a 4"  # then the second a is the first that waits, and b serves nobody


def test_ollama_takes_the_place_with_most_free_memory() -> None:
    x = Router("ollama", "abc", gpus=2, holds=2)
    places = [a.inst.place for a in x.first if isinstance(a, Load)]
    assert places == [(0,), (1,), (0,)]
    need = WEIGHTS + 4 * LONGEST
    assert set(x.policy.need.values()) == {need}
    assert {a.kv_bytes for a in x.first if isinstance(a, Limit)} == {4 * LONGEST}
    router = Router("ollama", "ab", holds=(need - 1) / need)  # not four requests: one
    assert set(router.policy.need.values()) == {WEIGHTS + LONGEST}


def test_a_server_without_requests_stops_when_its_keep_alive_ends() -> None:
    x = Router("ollama", "ab", holds=2)
    assert x.wakes(x.first) == {"idle a": 300.0, "idle b": 300.0}
    assert x.wakes(x.tell(Arrived(Request(0, "a", 9.0, 5, 1.0, 0.1)), 9.0)) == {"idle a": math.inf}
    assert x.wakes(x.tell(Arrived(Request(1, "a", 9.0, 5, 1.0, 0.1)), 9.5)) == {}
    assert x.tell(Finished(0, None, "done"), 10.0) == []  # it serves another
    assert x.wakes(x.tell(Finished(1, None, "done"), 20.0)) == {"idle a": 320.0}
    assert brief(x.tell(Woke("idle b"), 300.0)) == "-b"
    assert brief(x.tell(Woke("idle a"), 320.0)) == "-a"
    x.rid = 2
    assert x.ask("b", 400.0) == "+b 2"


def test_a_keep_alive_is_a_models_own_where_it_is_given() -> None:
    x = Router("ollama", "abc", holds=3, keep="a=60 b=0")  # ttl of llama-swap, keep_alive of Ollama
    assert x.wakes(x.first) == {"idle a": 60.0, "idle c": 300.0}  # b's never ends
    assert x.policy.keeps_s == {"a": 60.0, "b": 0.0, "c": 300.0}
    assert Router("ollama", "abc", holds=3, keep="*=60 b=0").policy.keeps_s == {"a": 60.0, "b": 0.0, "c": 60.0}


@cases(
    ("text", "says"),
    [
        ("x=1", 'no model "x"'),
        ("a", 'no model ""'),
        ("a=soon", "not MODEL=NUMBER"),
        ("*=-1", "not in"),
        ("a=nan", "is not in"),
    ],
)
def test_a_field_by_model_names_models_and_numbers(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Router("ollama", "ab", holds=2, keep=text)


def test_requests_of_higher_priority_wait_before_others() -> None:
    # fifo.go 0811ad0, enqueue: before the first of strictly lower priority; equals as they came
    x = Router("llama-swap", "abcd", priority="b=-1 c=10 d=10")
    assert x.ask("abdc") == "0"
    assert [r.model for r in x.policy.home["a"].queue.values()] == ["d", "c", "b"]
    assert x.end(0) == "-a +d 2"
    x.up("d")
    assert x.end(2) == "-d +c 3"
    assert x.ask("d") == ""
    x.up("c")
    assert x.end(3) == "-c +d 4"  # b waits behind a later request


def test_an_exclusive_group_stops_the_servers_of_all_others() -> None:
    # config.go 032d741, GroupConfig: exclusive unless said otherwise; group_test.go 141b395, CrossGroupExclusive
    x = Router("llama-swap-exclusive", "abc", gpus=3)  # a GPU and a group each
    assert brief(x.first) == "+a"
    assert x.ask("ab") == "0"  # b's start would stop a, which serves
    assert x.ask("ac") == "2"  # a's requests pass
    assert x.end(0) == ""
    assert x.end(2) == "-a +b 1"
    assert x.ask("b") == "4"  # one that starts takes more
    x.up("b", gpu=1)
    assert x.end(1) == ""
    assert x.end(4) == "-b +c 3"
    # `swap` alone, CrossGroupNonExclusiveParallel: groups do not touch each other
    assert brief(Router("llama-swap", "abc", gpus=3).first) == "+a +b +c"


def test_a_persistent_group_is_not_stopped_by_others() -> None:
    # group_test.go 141b395, PersistentNotEvicted: `persistent` and not `exclusive`, beside an exclusive one
    x = Router("llama-swap-exclusive", "abc", gpus=3, exclusive="*=1 a=0", persistent="a=1")
    assert brief(x.first) == "+a +b"
    assert x.ask("a") == "0"
    assert x.ask("c") == "-b +c 1"  # while a serves
    # a group of two: the other stops all the same (SwapStopsPrevious), so that it would change nothing
    with pytest.raises(UserError, match=r"field persistent: a shares its GPUs with all that could stop it.*pinned=a=1"):
        Router("llama-swap-exclusive", "ab", gpus=1, persistent="a=1")


def test_pinned_models_stay_beside_a_group_that_swaps() -> None:
    # config.example.yaml cd46f56: a group with `swap: false`, `persistent: true`, beside one that swaps on the same GPU
    x = Router("llama-swap-exclusive", "abcd", holds=3.0, pinned="a=1 c=1", slots=4)
    assert brief(x.first).split()[-3:] == ["+a", "+c", "+b"]  # pinned ones first; then as the rates say, beside them
    assert x.ask("a") == "0"
    assert x.ask("c") == "1"
    assert x.ask("d") == "-b +d 2"  # members of the other group stop each other, whoever serves beside
    with pytest.raises(Infeasible, match="b has no room beside the pinned a, c"):
        Router("llama-swap-exclusive", "abcd", holds=2.0, pinned="a=1 c=1", slots=4)


@cases(
    ("preset", "fields", "says"),
    [
        ("llama-swap", {"persistent": "a=1"}, "victim=group alone"),
        ("llama-swap", {"pinned": "a=1", "slots": 4}, "victim=group"),
        ("llama-swap-exclusive", {"costs": "a=2"}, "victim=cost alone"),
        ("llama-swap-exclusive", {"pinned": "a=1"}, "slots=N"),
    ],
)
def test_a_setting_of_some_models_without_effect_is_refused(preset: str, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Router(preset, "abc", **fields)


def test_a_group_that_is_not_exclusive_comes_beside_one_that_is() -> None:
    # group_test.go 141b395, NonExclusiveDoesNotUnloadExclusive; then fifo.go 8eb1d58, OnRequest 3, 5 and 6: what an
    # exclusive model's server would stop is asked about also once it is up
    x = Router("llama-swap-exclusive", "ab", gpus=2, exclusive="a=1")
    assert brief(x.first) == "+a +b"
    assert x.ask("b") == "0"
    assert x.ask("a") == ""  # a is up, and waits for b
    assert x.ask("b") == "2"
    assert x.end(0) == ""
    assert x.end(2) == "-b 1"
    assert x.ask("b") == "+b 3"  # while a serves
    assert x.ask("a") == ""
    assert x.end(1) == ""
    x.up("b", gpu=1)
    assert x.end(3) == "-b 4"


@cases("gpus", [1, 2, 4])
def test_groups_that_are_not_exclusive_swap_as_routers_of_their_own(gpus: int) -> None:
    each, joint = Router("llama-swap", "abcde", gpus), Router("llama-swap", "abcde", gpus, victim="group")
    assert brief(each.first) == brief(joint.first)
    rng, open_, waited = np.random.default_rng(7), list[int](), 0
    for _ in range(400):
        if not open_ or rng.random() < 0.5:
            m = "abcde"[int(rng.integers(5))]
            here, there = (x.ask(m) for x in (each, joint))
        else:
            rid = open_.pop(int(rng.integers(len(open_))))
            here, there = (x.end(rid) for x in (each, joint))
        assert here == there
        open_ += [int(word) for word in here.split() if word.isdigit()]
        for m in [word[1:] for word in here.split() if word[0] == "+"]:
            (gpu,) = place_of(each.policy.home[m].servers[m])
            assert each.up(m, gpu=gpu) == joint.up(m, gpu=gpu) == ""
        waited += len(each.sent) < each.rid
    assert waited > 20


def test_a_matrix_stops_those_outside_of_the_cheapest_set() -> None:
    # matrix_solver.go 9433523, Solve: the sum of costs over running models outside of a set
    x = Router("llama-swap-matrix", "abcde", holds=3)
    assert brief(x.first) == "+a +b +c"
    assert x.ask("d") == "-c +d 0"  # all cost 1: the set that keeps those asked for most stands first
    y = Router("llama-swap-matrix", "abcde", holds=3, costs="c=50 a=0.5")
    assert y.ask("d") == "-a +d 0"
    assert y.ask("e") == ""  # b and d cost the same, d is asked for less, and it serves
    y.up("d")
    assert y.end(0) == "-d +e 1"


def test_a_matrix_awaits_those_that_stop_and_holds_up_no_other() -> None:
    # fifo.go 8eb1d58, conflictsWithInFlight and drainQueue
    x = Router("llama-swap-matrix", "abcdef", holds=3, costs="a=9 b=9 f=0.5")
    assert x.ask("c") == "0"
    assert x.ask("d") == ""  # c alone is outside of the cheapest set, and serves
    assert x.ask("a") == "2"
    assert x.end(2) == ""  # a and b serve nobody, and stay
    assert x.end(0) == "-c +d 1"


def test_kubeai_stops_a_server_at_the_63rd_count_of_zero() -> None:
    """60 counts in 10 minutes, and three that agree (30 s / 10 s) before the one that acts."""
    x, seen = Router("kubeai", "ab", gpus=2), []
    assert brief(x.first) == "+a +b"
    assert x.wakes(x.first) == {"look": 10.0}  # no timer of a server's own
    assert x.ask("a", 14.0) == "0"
    for k in range(1, 70):
        if k == 3:
            x.end(0, 29.0)  # counted at 20 s; from 30 s on the counts are zero
        seen.append(brief(x.tell(Woke("look"), 10.0 * k)))
    stops = {says: 10.0 * k for k, says in enumerate(seen, 1) if says}
    assert stops == {"-b": 630.0, "-a": 20.0 + 63 * 10.0}
    x.rid = 1
    assert x.ask("b", 700.0) == "+b 1"  # ScaleAtLeastOneReplica


def test_kubeai_stops_no_server_for_another() -> None:
    x = Router("kubeai", "abc", gpus=2, holds=5.0)  # room for more on a GPU, but a server has it whole
    assert brief(x.first) == "+a +b"
    assert x.ask("cab") == "1 2"
    x.end(1, 5.0)
    assert brief(x.tell(Woke("look"), 10.0)) == ""  # nobody makes way for c
    assert 0 not in x.sent
    for k in range(2, 64):
        x.tell(Woke("look"), 10.0 * k)
    assert x.sent[0] == "c"  # b serves still; a's GPU is free
    assert sorted(x.policy.home["a"].servers) == ["b", "c"]


def test_llmux_lets_requests_pass_for_five_seconds() -> None:
    x = Router("sleep")
    assert x.ask("b", 20.0) == "-a +b 0"
    assert x.ask("cb", 20.5) == "2"  # b is on its way
    x.up("b", 22.0)
    x.end(0, 22.5)
    assert x.end(2, 23.0) == ""  # c waits for 27: b is to be awake for 5 s
    assert x.ask("b", 26.9) == "3"
    assert x.ask("b", 27.0) == ""  # no more
    assert x.end(3, 28.0) == "-b +c 1"
    assert x.ask("b", 28.5) == ""
    assert x.policy.queue == "fifo"


def test_llmux_switches_when_the_five_seconds_are_over() -> None:
    x = Router("sleep")
    x.ask("b", 20.0)
    x.up("b", 22.0)
    x.end(0, 23.0)
    actions = x.tell(Arrived(Request(1, "c", 24.0, 5, 1.0, 0.1)), 24.0)
    assert x.wakes(actions) == {"stay c": 27.0}
    assert brief(x.tell(Woke("stay c"), 27.0)) == "-b +c 1"


@cases(("preset", "way"), [("sleep", "sleep"), ("sleep-2", "sleep2"), ("llama-swap", "cold")])
def test_a_request_waits_for_a_stop_and_a_start(preset: str, way: str) -> None:
    # on the simulator: b comes while a decodes, and starts when a's request and the load are done
    small = shape("llama-3.2-1b")._replace(max_tokens=2048)
    config = Config(
        tuple(Served(m, small, 1, 1.0, 0.1) for m in "ab"),
        plan={m: Plan(2.0 - k, 100, 100, "test") for k, m in enumerate("ab")},
    )
    jobs = asked("ab", [10.0, 10.01], [0, 1], 100, [200, 5], 1.0, 0.1)
    table, engine, _ = ran(Swap, config, jobs, **Swap.presets[preset])
    rows = table.to_pylist()
    assert {row["state"] for row in rows} == {"done"}
    load_s = engine.cluster.profile.load_s(Inst("b", (0,)), way)
    assert load_s > quantities.ladder("h100")[way].fixed_s
    assert rows[1]["load_ns"] / 1e9 == pytest.approx(rows[0]["done_ns"] / 1e9 - 10.01 + load_s, abs=0.01)
    assert (engine.stats()["loads"], engine.stats()["evicts"]) == (1, 1)


def test_level_two_reloads_the_files() -> None:
    """A line through 1.80 s for 0.6B and 6.53 s for 8B: vllm PR 48337, comment of 2026-07-15, Qwen3 on A100."""
    way = quantities.ladder("a100-80g")["sleep2"]
    for params, wake_s in ((596_049_920, 1.80), (8_190_735_360, 6.53)):
        assert way.fixed_s + 2 * params / way.bytes_s == pytest.approx(wake_s, abs=0.01)


def test_constants_of_the_releases() -> None:
    """Their files stand in the docstring of systems/swap.py."""
    default = {name: domain.default for name, domain in domains(Swap).items()}
    assert (default["queue"], default["most"], default["keep_s"], default["stay_s"]) == ("collated", 1, 0.0, 0.0)
    presets = {name: {**default, **fields} for name, fields in Swap.presets.items()}
    assert presets["llama-swap"] == default  # GroupConfig: swap; globalTTL: none
    assert presets["llama-swap-fifo"] == {**default, "queue": "fifo"}
    assert presets["router"]["most"] == 4  # models_max
    assert presets["ollama"]["most"] == 3  # defaultModelsPerGPU
    assert presets["ollama"]["slots"] == 4  # defaultParallel
    assert presets["ollama"]["keep_s"] == 5 * 60  # KeepAlive
    assert presets["sleep"]["stay_s"] == 5  # default_min_active_secs
    assert presets["kubeai"]["look_s"] == 10  # Interval
    assert presets["kubeai"]["keep_s"] == (600 / 10 + 30 / 10) * 10  # TimeWindow, ScaleDownDelaySeconds; by Interval
    assert presets["llama-swap-matrix"]["costs"] == ""  # evictCost: 1
    assert all("spread" in fields for fields in Swap.presets.values())  # tuning the defaults moves no preset
    assert "f2dc72b" in (inspect.getdoc(inspect.getmodule(Swap)) or "")


def test_a_given_placement_is_kept() -> None:
    homes: dict[str, Gpus] = {"a": (1,), "b": (0,), "c": (1,)}
    for preset in ("llama-swap", "ollama"):
        x = Router(preset, gpus=2, holds=1)
        made = Swap(replace(x.policy.cluster, homes=homes), **Swap.presets[preset])  # type: ignore[arg-type]
        assert {m: list(made.home[m].places[m]) for m in homes} == {m: [at] for m, at in homes.items()}
