"""`bench mock`: the law of its clock, with a clock of our own, and its contract, by real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop
from click.testing import CliRunner
from httptools import HttpRequestParser

from harness.cli.app import main
from harness.engines import machine
from harness.mock import http
from harness.mock.agenda import Agenda
from harness.mock.ask import text_tokens
from harness.mock.exchange import Exchange
from harness.mock.faults import FAULTS, Faults, Order, Shares, ordered
from harness.mock.http import Connection
from harness.mock.model import Mode, Model, Served
from harness.mock.pacing import Fixed, Gpu, Pacing, ns
from harness.mock.sequence import Sequence
from harness.mock.server import Mock, listening
from harness.mock.settings import Settings
from harness.mock.table import Table
from harness.policy.types import Inst, UserError
from workloads.models import shape

ROOT = Path(__file__).resolve().parent.parent
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
        return [at for one, at in self.told if one == index]

    def _told(self, sequence: Sequence, at_ns: int) -> None:
        self.told.append((sequence.index, at_ns))


def prefill_s(tokens: int) -> float:
    return tokens * 1e-9


def step_s(seqs: int, context: int) -> float:
    return (1000 * seqs + context) * 1e-9


def stepping(batch_cap: int = 256, models: int = 1, **served: Any) -> World:
    """Models on one GPU: a prompt takes a nanosecond a token; a step 1000 a sequence, and one a context token."""
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
    eight, one = (
        Table([(name, shape(name), 1)], "h100", "vllm-0.15", None).served()[0]
        for name in ("llama-3.1-8b", "llama-3.2-1b")
    )
    for level in (1, 2):
        assert eight.wake_ns[level] > one.wake_ns[level] > 0
    assert eight.sleep_ns[1] > one.sleep_ns[1] > eight.sleep_ns[2] == 0
    assert (eight.wake_ns[0], eight.sleep_ns[0], eight.max_tokens) == (0, 0, 131072)


def test_a_slow_request_joins_later() -> None:
    world = fixed()
    world.ask(0, prompt=1, output=1, after_ns=1000)
    world.ask(0, prompt=1, output=1)
    world.agenda.advance(10**9)
    assert world.told == [(1, 50), (0, 1050)]


# ---------------------------------------------------------------------- sleep

TIMES: dict[str, Any] = {"sleep_ns": {0: 0, 1: 300, 2: 5}, "wake_ns": {0: 0, 1: 700, 2: 9000}}


@pytest.mark.parametrize(("level", "slept", "woken"), [(0, 100, 1000), (1, 400, 1700), (2, 105, 10000)])
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
    one, two = (world.ask(0, prompt=100, output=9) for _ in range(2))
    world.sleep(150)
    world.wake(10_000)
    world.agenda.advance(10**9)
    assert (one.finish, one.made, two.finish, two.made) == ("abort", 1, "abort", 0)
    assert world.told == [(0, 100), (0, 150), (1, 150)]
    assert world.models[0].waiting == 0


@pytest.mark.parametrize("make", [fixed, stepping])
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


@pytest.mark.parametrize(
    ("make", "at_ns", "made"), [(fixed, 40, 0), (fixed, 55, 1), (stepping, 50, 0), (stepping, 101, 1)]
)
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


# ---------------------------------------------------------------------- sockets


class Server:
    """A mock that serves in a thread of this process."""

    def __init__(self, mock: Mock, ports: bool) -> None:
        self.urls: dict[str, str] = {}
        ready, self._mock, self._ports = threading.Event(), mock, ports
        self._thread = threading.Thread(target=self._run, args=(ready,))
        self._thread.start()
        ready.wait()

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            async with listening(self._mock, "127.0.0.1", 0, ports=self._ports) as self.urls:
                ready.set()
                await self._stop.wait()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(next(iter(self.urls)))
        return str(parts.hostname), int(parts.port or 0)

    def connect(self) -> HTTPConnection:
        return HTTPConnection(*self.address)

    def ask(self, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
        """One request on a connection of its own."""
        with self.sent(path, body, **headers) as answer:
            return answer.status, answer.read()

    @contextmanager
    def sent(self, path: str, body: object = None, **headers: str) -> Iterator[HTTPResponse]:
        connection = self.connect()
        send(connection, path, body, **headers)
        try:
            yield connection.getresponse()
        finally:
            connection.close()

    def stats(self, until: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
        """Its counts, asked again until they are as they must become; the test's timeout is the limit."""
        connection = self.connect()
        while True:
            send(connection, "/mock/stats")
            found: dict[str, Any] = json.loads(connection.getresponse().read())
            if until(found):
                connection.close()
                return found


def send(connection: HTTPConnection, path: str, body: object = None, **headers: str) -> None:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    posts = body is not None or path.split("?", maxsplit=1)[0] in {"/sleep", "/wake_up", "/mock/reset"}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST" if posts else "GET", path, data, names)


@contextmanager
def serving(*names: str, ports: bool = False, settings: Settings | None = None, **served: Any) -> Iterator[Server]:
    mock = Mock(
        [Served(name, 1000, **served) for name in names or ("a", "b")],
        lambda agenda, _: Fixed(agenda, 0, 0),
        settings or Settings(),
        time.monotonic_ns(),
    )
    server = Server(mock, ports)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.ask("/mock/reset")
    return shared


def events(body: bytes) -> list[Any]:
    """The events of a stream, each as JSON, without the [DONE] that must end it."""
    parts = body.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


ASK = {"model": "a", "prompt": [1, 2, 3], "max_tokens": 4}


def test_health_models_and_ports(server: Server) -> None:
    assert server.ask("/health") == (200, b"")
    status, body = server.ask("/v1/models")
    found = json.loads(body)
    assert (status, found["object"]) == (200, "list")
    assert [(one["id"], one["object"], one["max_model_len"]) for one in found["data"]] == [
        ("a", "model", 1000),
        ("b", "model", 1000),
    ]
    with serving("a", "b", "c", ports=True) as several:
        assert list(several.urls.values()) == ["a", "b", "c"]
        assert len(set(several.urls)) == 3
        assert [one["id"] for one in json.loads(several.ask("/v1/models")[1])["data"]] == ["a"]
        assert several.ask("/v1/completions", {**ASK, "model": "b"})[0] == 404
        assert several.ask("/v1/completions", {"prompt": "x"})[0] == 200  # the only model there is


def test_a_completion(server: Server) -> None:
    status, body = server.ask("/v1/completions", ASK)
    found = json.loads(body)
    assert (status, found["object"], found["model"]) == (200, "text_completion", "a")
    choice = {"index": 0, "text": " 1 2 3 4", "logprobs": None, "finish_reason": "length"}
    assert found["choices"] == [choice]
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_a_streamed_completion_is_a_chunk_a_token(server: Server) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with server.sent("/v1/completions", {**ASK, **options}) as answer:
        assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        found = events(answer.read())
    assert [one["choices"][0]["text"] for one in found[:-1]] == [" 1", " 2", " 3", " 4"]
    assert [one["choices"][0]["finish_reason"] for one in found[:-1]] == [None, None, None, "length"]
    assert (found[-1]["choices"], found[-1]["usage"]["completion_tokens"]) == ([], 4)
    assert len({one["id"] for one in found}) == 1
    plain = events(server.ask("/v1/completions", {**ASK, "stream": True})[1])
    assert [one["choices"][0]["text"] for one in plain] == [" 1", " 2", " 3", " 4"]
    options["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    counted = events(server.ask("/v1/completions", {**ASK, **options})[1])
    assert [one["usage"]["completion_tokens"] for one in counted] == [1, 2, 3, 4, 4]


def test_a_chat(server: Server) -> None:
    parts = [{"type": "text", "text": "abcd"}, {"type": "text", "text": "e"}]
    body: dict[str, Any] = {
        "model": "b",
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": parts}],
    }
    body["max_completion_tokens"] = 2
    found = json.loads(server.ask("/v1/chat/completions", body)[1])
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["message"] == {"role": "assistant", "content": " 1 2"}
    assert found["usage"]["prompt_tokens"] == 1 + 2
    chunks = events(server.ask("/v1/chat/completions", {**body, "stream": True})[1])
    assert [one["choices"][0]["delta"] for one in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": " 1"},
        {"content": " 2"},
    ]
    assert {one["object"] for one in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_the_end_of_a_stream_as_llama_cpp_has_it() -> None:
    with serving("a", settings=Settings(flavour="llama.cpp")) as server:
        assert server.ask("/health") == (200, b'{"status":"ok"}')
        *tokens, last = events(server.ask("/v1/completions", {**ASK, "stream": True})[1])
        assert [one["choices"][0]["finish_reason"] for one in tokens] == [None] * 4
        assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "length")
        assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert (last["timings"]["prompt_n"], last["timings"]["predicted_n"]) == (3, 4)
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
        first, *_, end, usage = events(
            server.ask("/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}})[1]
        )
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
        assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "length")
        assert (usage["choices"], usage["usage"]["total_tokens"], usage["timings"]["predicted_n"]) == ([], 2, 1)
        assert "timings" in events(server.ask("/v1/chat/completions", chat)[1])[-1]
        assert "timings" in json.loads(server.ask("/v1/completions", ASK)[1])


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("abcdefgh", [2]), ([5] * 7, [7]), (["abcdefgh", "x"], [2, 1]), ([[1, 2], [3]], [2, 1])],
)
def test_prompts_are_texts_token_ids_or_lists_of_them(server: Server, prompt: object, tokens: list[int]) -> None:
    found = json.loads(server.ask("/v1/completions", {**ASK, "prompt": prompt})[1])
    assert found["usage"]["prompt_tokens"] == sum(tokens)
    assert [choice["index"] for choice in found["choices"]] == list(range(len(tokens)))
    chunks = events(server.ask("/v1/completions", {**ASK, "prompt": prompt, "n": 2, "stream": True})[1])
    for k in range(2 * len(tokens)):
        mine = [one["choices"][0]["text"] for one in chunks if one["choices"][0]["index"] == k]
        assert mine == [" 1", " 2", " 3", " 4"]


def test_how_long_an_answer_is() -> None:
    with serving("a", settings=Settings(output_tokens=20)) as server:
        for extra, made, why in (
            ({}, 16, "length"),  # the default of a completion
            ({"max_tokens": 30}, 20, "stop"),
            ({"max_tokens": 20}, 20, "length"),
            ({"max_tokens": 30, "min_tokens": 25}, 25, "stop"),
            ({"max_tokens": 30, "ignore_eos": True}, 30, "length"),
            ({"max_tokens": 999, "ignore_eos": True}, 999, "length"),
        ):
            found = json.loads(server.ask("/v1/completions", {"prompt": [1], **extra})[1])
            assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (made, why)
        chat = {"messages": [{"role": "user", "content": "x" * 40}], "ignore_eos": True}
        assert json.loads(server.ask("/v1/chat/completions", chat)[1])["usage"]["completion_tokens"] == 990


BAD: list[tuple[int, str | None, object]] = [
    (400, None, b"{"),
    (400, None, b"[1]"),
    (400, None, b"[" * 100_000),
    (400, None, b"\xff"),
    (400, "model", {"prompt": "x"}),
    (400, "model", {"prompt": "x", "model": 3}),
    (404, "model", {"prompt": "x", "model": "c"}),
    (400, "prompt", {"model": "a"}),
    (400, "prompt", {"model": "a", "prompt": []}),
    (400, "prompt", {"model": "a", "prompt": {"a": 1}}),
    (400, "prompt", {"model": "a", "prompt": [1, "x"]}),
    (400, "prompt", {"model": "a", "prompt": [True]}),
    (400, "prompt", {"model": "a", "prompt": [-1]}),
    (400, "prompt", {"model": "a", "prompt": [1.5]}),
    (400, "prompt", {"model": "a", "prompt": [[]]}),
    (400, "prompt", {"model": "a", "prompt": [1] * 1000}),
    (400, "max_tokens", {**ASK, "max_tokens": 998}),
    (400, "max_tokens", {**ASK, "max_tokens": 0}),
    (400, "max_tokens", {**ASK, "max_tokens": "4"}),
    (400, "max_tokens", {**ASK, "max_tokens": True}),
    (400, "temperature", {**ASK, "temperature": "hot"}),
    (400, "stop", {**ASK, "stop": [1]}),
    (400, "stream", {**ASK, "stream": "yes"}),
    (400, "stream_options", {**ASK, "stream_options": {}}),
    (400, "stream_options", {**ASK, "stream": True, "stream_options": []}),
    (400, "stream_options", {**ASK, "stream": True, "stream_options": {"include_usage": 1}}),
    (400, "n", {**ASK, "n": 0}),
    (400, "n", {**ASK, "n": 128, "prompt": ["a", "b"]}),
]


@pytest.mark.parametrize(("status", "param", "body"), BAD)
def test_what_is_wrong_is_said_in_openais_form(server: Server, status: int, param: str | None, body: object) -> None:
    got, said = server.ask("/v1/completions", body)
    error = json.loads(said)["error"]
    assert (got, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert error["message"]
    assert server.stats()["ends"] == {str(status): 1}


@pytest.mark.parametrize(
    "messages",
    [None, [], "x", [1], [{"content": "x"}], [{"role": "user", "content": 1}], [{"role": "u", "content": [1]}]],
)
def test_what_is_wrong_with_messages(server: Server, messages: object) -> None:
    status, said = server.ask("/v1/chat/completions", {"model": "a", "messages": messages})
    assert (status, json.loads(said)["error"]["param"]) == (400, "messages")


def test_paths_and_methods(server: Server) -> None:
    assert server.ask("/v1/embeddings", {})[0] == 404
    with server.sent("/v1/completions") as answer:
        assert (answer.status, answer.getheader("allow")) == (405, "POST")
    assert server.ask("/sleep?level=3")[0] == 400
    assert server.ask("/sleep?mode=now")[0] == 400
    assert server.ask("/sleep?model=c")[0] == 404
    assert server.ask("/wake_up?tags=weights")[0] == 400


# ---------------------------------------------------------------------- HTTP


def raw(server: Server, data: bytes) -> bytes:
    """All that the server says to these bytes, until it closes."""
    with socket.create_connection(server.address) as one:
        one.sendall(data)
        one.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: one.recv(65536), b""))


def answered(server: Server, data: bytes, count: int = 1) -> list[bytes]:
    """What the server answers to these bytes on a connection that stays open: so many bodies, or until it closes."""
    with socket.create_connection(server.address) as one:
        one.sendall(data)
        bodies, kept = [], Kept(one)
        for _ in range(count):
            answer = HTTPResponse(kept)  # type: ignore[arg-type]  # all that it asks of a socket
            answer.begin()
            bodies.append(answer.read())
        kept.file.end()
        return bodies


class Kept:
    """A socket whose bytes one answer after the other reads from the same buffer."""

    class File(io.BufferedReader):
        """Stays open when an answer has been read."""

        def close(self) -> None:
            pass

        def end(self) -> None:
            super().close()

    def __init__(self, one: socket.socket) -> None:
        self.file = self.File(socket.SocketIO(one, "r"))

    def makefile(self, _mode: str) -> io.BufferedReader:
        return self.file


def post(body: bytes, path: str = "/v1/completions", head: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"\x00\x01\x02" * 100, 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
        (b"GET /health HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nlong: " + b"x" * http.MOST_HEAD_BYTES + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * http.MOST_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % k for k in range(20_000)), 431),
        (f"POST /v1/completions HTTP/1.1\r\ncontent-length: {http.MOST_BODY_BYTES + 1}\r\n\r\n".encode(), 413),
        (b"GET http://[/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    ],
)
def test_what_is_no_request_is_refused(server: Server, data: bytes, status: int) -> None:
    with socket.create_connection(server.address) as one:
        one.sendall(data)
        answer = HTTPResponse(one)
        answer.begin()
        error = json.loads(answer.read())["error"]
        assert (answer.status, answer.getheader("connection"), bool(error["message"])) == (status, "close", True)
        assert one.recv(1) == b""  # it says no more
    assert server.ask("/health")[0] == 200


def test_half_a_request_leaves_nothing(server: Server) -> None:
    whole = post(json.dumps(ASK).encode())
    for size in (1, 10, whole.index(b"\r\n\r\n") + 2, len(whole) - 1):
        assert raw(server, whole[:size]) == b""
    assert (server.stats()["requests"], server.stats()["in_flight"]) == (0, 0)


def test_a_request_may_come_byte_by_byte_or_in_chunks(server: Server) -> None:
    body = json.dumps(ASK).encode()
    with socket.create_connection(server.address) as one:
        for byte in post(body):
            one.send(bytes([byte]))
        answer = HTTPResponse(one)
        answer.begin()
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 4
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert json.loads(answered(server, head + chunks)[0])["usage"]["completion_tokens"] == 4


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    asks = [{**ASK, "max_tokens": k + 1, "stream": bool(k % 2)} for k in range(9)]
    bodies = answered(server, b"".join(post(json.dumps(ask).encode()) for ask in asks), 9)
    for k, body in enumerate(bodies):
        made = len(events(body)) if k % 2 else json.loads(body)["usage"]["completion_tokens"]
        assert made == k + 1
    first, second = answered(server, post(json.dumps(ASK).encode()) + b"nonsense\r\n\r\n", 2)
    assert json.loads(first)["usage"]["total_tokens"] == 7
    assert "error" in json.loads(second)


def test_an_offer_to_upgrade_is_ignored(server: Server) -> None:
    body = json.dumps(ASK).encode()
    offer = "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    asked = f"GET /v1/models HTTP/1.1\r\nhost: x\r\n{offer}\r\n".encode()
    models, completion = answered(server, asked + post(body), 2)
    assert json.loads(models)["object"] == "list"
    assert json.loads(completion)["usage"]["completion_tokens"] == 4
    completion, refused = answered(server, post(body) + post(body, head=offer), 2)
    assert json.loads(completion)["usage"]["completion_tokens"] == 4
    assert "cannot have a body" in json.loads(refused)["error"]["message"]


def test_connections_are_kept_unless_one_asks_to_close(server: Server) -> None:
    connection = server.connect()
    for _ in range(3):
        send(connection, "/v1/completions", ASK)
        kept = connection.sock
        assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 4
        assert connection.sock is kept is not None
    connection.close()
    for stream in (False, True):
        asked = post(json.dumps({**ASK, "stream": stream}).encode(), head="connection: close\r\n")
        with socket.create_connection(server.address) as one:
            one.sendall(asked)
            assert b"connection: close\r\n" in b"".join(iter(lambda: one.recv(65536), b""))


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(server: Server) -> None:
    asked = post(json.dumps({**ASK, "stream": True}).encode()).replace(b"HTTP/1.1", b"HTTP/1.0")
    with socket.create_connection(server.address) as one:
        one.sendall(asked)
        head, _, body = b"".join(iter(lambda: one.recv(65536), b"")).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert len(events(body)) == 4


def test_a_client_that_waits_for_100_gets_it(server: Server) -> None:
    body = json.dumps(ASK).encode()
    whole = post(body, head="expect: 100-continue\r\n")
    with socket.create_connection(server.address) as one:
        one.sendall(whole[: -len(body)])
        assert one.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        one.sendall(body)
        answer = HTTPResponse(one)
        answer.begin()
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 4


# ---------------------------------------------------------------------- faults, sleep and counts on the wire


def test_faults_by_header(server: Server) -> None:
    stream = {**ASK, "stream": True}
    for fault, kind in (("500", "server_error"), ("429", "rate_limit_error")):
        with server.sent("/v1/completions", stream, x_mock=fault) as answer:
            assert (answer.status, json.loads(answer.read())["error"]["type"]) == (int(fault), kind)
            assert answer.getheader("retry-after") == ("1" if fault == "429" else None)
    with pytest.raises(IncompleteRead) as caught:
        server.ask("/v1/completions", stream, x_mock="cut")
    assert caught.value.partial.count(b'"text":" ') == 2  # half of four tokens
    with pytest.raises(IncompleteRead):
        server.ask("/v1/completions", ASK, x_mock="cut")
    status, body = server.ask("/v1/completions", stream, x_mock="malformed")
    assert status == 200
    texts = []
    for part in body.decode().split("\n\n")[:-2]:
        try:
            texts.append(json.loads(part.removeprefix("data: "))["choices"][0]["text"])
        except ValueError:
            texts.append("broken")
    assert texts == [" 1", "broken", " 3", " 4"]
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(server.ask("/v1/completions", ASK, x_mock="malformed")[1])
    assert server.ask("/v1/completions", ASK, x_mock="slow=0.001")[0] == 200
    assert server.ask("/v1/completions", ASK, x_mock="fast")[0] == 400
    ends = {"500": 1, "429": 1, "cut": 2, "malformed": 2, "200": 1, "400": 1}
    assert server.stats()["ends"] == ends


def test_a_hang_says_nothing_while_others_are_served(server: Server) -> None:
    hung = server.connect()
    send(hung, "/v1/completions", ASK, x_mock="hang")
    assert server.stats(lambda found: found["in_flight"] == 1)["requests"] == 1
    assert server.ask("/v1/completions", ASK)[0] == 200
    assert hung.sock is not None
    hung.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        hung.sock.recv(1)
    hung.close()
    found = server.stats(lambda found: found["in_flight"] == 0)
    assert found["ends"] == {"200": 1, "hang": 1}


def test_shares_of_faults_are_drawn_by_the_number_of_the_request() -> None:
    settings = Settings(shares=Shares(fail=0.3, reject=0.2), seed=11)
    faults = Faults(settings.shares, settings.seed)
    expected = [int(faults.draw().fault or 200) for _ in range(40)]
    assert {200, 429, 500} == set(expected)
    with serving("a", settings=settings) as server:
        for _ in range(2):
            assert [server.ask("/v1/completions", ASK)[0] for _ in range(40)] == expected
            server.ask("/mock/reset")


def test_a_client_that_leaves_is_cancelled() -> None:
    with serving("a") as server:
        server.ask("/sleep")
        connection = server.connect()
        send(connection, "/v1/completions", {**ASK, "stream": True})
        server.stats(lambda found: found["in_flight"] == 1)
        connection.close()
        found = server.stats(lambda found: found["in_flight"] == 0)
        assert (found["ends"], found["tokens"]) == ({"cancelled": 1}, 0)


def test_sleeping_models_hold_requests_until_they_wake(server: Server) -> None:
    assert server.ask("/sleep?level=2&model=a") == (200, b"")
    assert json.loads(server.ask("/is_sleeping?model=a")[1]) == {"is_sleeping": True}
    assert json.loads(server.ask("/is_sleeping?model=b")[1]) == {"is_sleeping": False}
    assert json.loads(server.ask("/is_sleeping")[1]) == {"is_sleeping": False}  # not all of them
    held = server.connect()
    send(held, "/v1/completions", ASK)
    server.stats(lambda found: found["in_flight"] == 1)
    assert server.ask("/v1/completions", {**ASK, "model": "b"})[0] == 200
    assert server.ask("/wake_up?model=a") == (200, b"")
    assert json.loads(held.getresponse().read())["usage"]["completion_tokens"] == 4
    held.close()
    assert server.ask("/sleep?level=1") == (200, b"")
    assert json.loads(server.ask("/is_sleeping")[1]) == {"is_sleeping": True}
    aborted = server.connect()
    send(aborted, "/v1/completions", ASK)
    server.stats(lambda found: found["in_flight"] == 1)
    aborted.close()
    assert server.ask("/wake_up") == (200, b"")


def test_sleep_ends_answers_with_abort() -> None:
    mock = Mock([Served("a", 1000)], lambda agenda, _: Fixed(agenda, 0, ns(3600)), Settings(), time.monotonic_ns())
    server = Server(mock, ports=False)  # the second token would come in an hour
    with server.sent("/v1/completions", {**ASK, "stream": True}) as answer:
        assert b'" 1"' in answer.readline()
        assert server.ask("/sleep")[0] == 200
        (last,) = events(answer.read().lstrip())
        assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "abort")
    found = server.stats()
    assert (found["ends"], found["tokens"]) == ({"200": 1}, 1)
    server.close()


def test_a_request_wakes_a_sleeping_model_of_llama_cpp() -> None:
    with serving("a", settings=Settings(flavour="llama.cpp"), wakes=True) as server:
        server.ask("/sleep")
        assert json.loads(server.ask("/is_sleeping")[1]) == {"is_sleeping": True}
        assert server.ask("/v1/completions", ASK)[0] == 200
        assert json.loads(server.ask("/is_sleeping")[1]) == {"is_sleeping": False}


def test_beyond_the_queue_requests_are_refused() -> None:
    with serving("a", "b", settings=Settings(queue=2)) as server:
        server.ask("/sleep")
        held = [server.connect() for _ in range(2)]
        for connection in held:
            send(connection, "/v1/completions", ASK)
        server.stats(lambda found: found["in_flight"] == 2)
        assert server.ask("/v1/completions", ASK)[0] == 429
        assert server.ask("/v1/completions", {**ASK, "model": "b", "n": 3})[0] == 429  # three at once
        server.ask("/wake_up")
        for connection in held:
            assert json.loads(connection.getresponse().read())["usage"]["total_tokens"] == 7
            connection.close()
        assert server.ask("/v1/completions", ASK)[0] == 200


def test_stamps_and_counts(server: Server) -> None:
    before_ns = time.monotonic_ns()
    for stamped in ({"x_mock_stamps": "1"}, {}):
        body = {**ASK, "stream": True, **({} if stamped else {"mock_stamps": True})}
        chunks = [one["mock"] for one in events(server.ask("/v1/completions", body, x_request_id="r1", **stamped)[1])]
        sent = [one["sent_ns"] for one in chunks]
        assert [list(one) for one in chunks] == [["sent_ns", "read_ns"], *[["sent_ns"]] * 3]
        assert before_ns < chunks[0]["read_ns"] <= sent[0]
        assert sent == sorted(sent)
        assert sent[-1] < time.monotonic_ns()
    assert "mock" not in events(server.ask("/v1/completions", {**ASK, "stream": True})[1])[0]
    found = server.stats()
    assert {k: v for k, v in found.items() if k != "rows"} == {
        "requests": 3,
        "in_flight": 0,
        "in_flight_max": 1,
        "tokens": 12,
        "models": {"a": 3},
        "ends": {"200": 3},
    }
    rows = found["rows"]
    assert (rows["number"], rows["id"], rows["tokens"]) == ([0, 1, 2], ["r1", "r1", ""], [4, 4, 4])
    assert rows["first_ns"][1] == sent[0]
    for read, first, end in zip(rows["read_ns"], rows["first_ns"], rows["end_ns"], strict=True):
        assert before_ns < read <= first <= end
    server.ask("/mock/reset")
    assert (server.stats()["requests"], server.stats()["rows"]["number"]) == (0, [])


def test_many_clients_get_every_token(server: Server) -> None:
    connections = [server.connect() for _ in range(100)]
    for k, connection in enumerate(connections):
        send(connection, "/v1/completions", {**ASK, "max_tokens": 1 + k, "stream": True})
    for k, connection in enumerate(connections):
        texts = [one["choices"][0]["text"] for one in events(connection.getresponse().read())]
        assert texts == [f" {i + 1}" for i in range(1 + k)]
        connection.close()
    assert server.stats()["tokens"] == sum(range(1, 101))


def test_nothing_is_left_for_the_collector() -> None:
    def left() -> Counter[str]:
        kinds = (Connection, Exchange, Sequence, HttpRequestParser)
        return Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds))

    gc.collect()
    before = left()
    gc.disable()
    try:
        with serving("a") as server:
            for fault in ("", "cut", "malformed", "500", "hang", "slow=0"):
                for stream in (False, True):
                    connection = server.connect()
                    send(connection, "/v1/completions", {**ASK, "n": 3, "stream": stream}, x_mock=fault or "slow=0")
                    with contextlib.suppress(IncompleteRead):
                        fault == "hang" or connection.getresponse().read()
                    connection.close()
            raw(server, b"nonsense")
            server.stats(lambda found: found["in_flight"] == 0)
        assert left() == before
    finally:
        gc.enable()


# ---------------------------------------------------------------------- the command


@contextmanager
def command(*args: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "harness", "mock", "--port", "0", *args]
    done = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield done
    finally:
        done.kill()
        done.communicate()


def port_of(line: str) -> int:
    assert line.startswith("listening on http://127.0.0.1:")
    return int(line.split()[2].rpartition(":")[2])


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_command_serves_until_a_signal_and_says_no_more(sent: signal.Signals, code: int) -> None:
    with command("--models", "a,b", "--ttft-ms", "0") as running:
        assert running.stdout is not None
        connection = HTTPConnection("127.0.0.1", port_of(running.stdout.readline()))
        send(connection, "/v1/completions", ASK)
        assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 4
        send(connection, "/v1/completions", ASK, x_mock="hang")
        running.send_signal(sent)
        out, err = running.communicate()
        assert (running.returncode, out, err) == (code, "", "")
        assert connection.sock is not None
        connection.close()


def test_ports_and_log() -> None:
    with command("--models", "llama-3.2-1b*2,qwen-2.5-7b", "--ports", "--log") as running:
        assert running.stdout is not None
        lines = [running.stdout.readline() for _ in range(3)]
        assert [line.split()[3] for line in lines] == ["llama-3.2-1b/1", "llama-3.2-1b/2", "qwen-2.5-7b"]
        connection = HTTPConnection("127.0.0.1", port_of(lines[2]))
        send(connection, "/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert json.loads(connection.getresponse().read())["model"] == "qwen-2.5-7b"
        connection.close()
        running.terminate()
        _, err = running.communicate()
        assert err == "0 qwen-2.5-7b 200 2 tokens\n"


def test_it_ends_with_its_parent() -> None:
    code = (
        "import subprocess, sys\n"
        "words = [sys.executable, '-m', 'harness', 'mock', '--port', '0', '--models', 'a', '--ttft-ms', '0']\n"
        "child = subprocess.Popen([*words, '--with-parent'], stdout=subprocess.PIPE, text=True)\n"
        "print(child.stdout.readline(), flush=True, end='')\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    port = port_of(parent.stdout.readline())
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert one.recv(65536)
        parent.kill()
        parent.communicate()
        assert one.recv(1) == b""  # the mock is gone


def test_fixed_latency_starts_without_numpy() -> None:
    code = (
        "import sys\nfrom harness.mock import server, pacing\nfrom workloads.models import model_set\n"
        "print({'numba', 'numpy', 'pyarrow', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_wrong_words_are_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for args, says in (
            (("--ttft-ms", "0", "--models", "a", "--port", port), f"cannot listen on 127.0.0.1 port {port}: "),
            (("--ttft-ms", "0", "--models", "a,a"), '"a" is there twice'),
            (("--ttft-ms", "0", "--models", "a,"), "an empty name"),
            (("--itl-ms", "1"), "--itl-ms needs --ttft-ms"),
            (("--models", "lama-3.1-8b"), "llama-3.1-8b"),
            (("--gpu", "h1000"), "h1000"),
            (("--fail", "0.6", "--cut", "0.6"), "1.2 of all requests"),
        ):
            result = CliRunner().invoke(main, ["mock", *args])
            assert result.exit_code == 2
            assert says in result.stderr
            assert result.stderr.count("\n") == 1


def test_more_ports_than_there_are_is_an_error() -> None:
    mock = Mock([Served("a", 9), Served("b", 9)], lambda agenda, _: Fixed(agenda, 0, 0), Settings(), 0)

    async def serve() -> None:
        async with listening(mock, "127.0.0.1", 65536):
            pass

    with pytest.raises(UserError, match="port 65536"):
        asyncio.run(serve())
