"""The client before servers that answer, refuse, stop and break: every request ends in exactly one state."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.client import timer
from harness.client.body import OFFSETS, Bodies, Server, Style
from harness.client.client import Client, Told
from harness.client.log import STATES, Log
from harness.client.verdict import verdict
from harness.engines.llamacpp import LlamaCpp
from harness.engines.servers import account
from harness.engines.vllm import Vllm
from harness.policy.types import Jobs, UserError
from tests.cases import cases
from tests.harness.client.scripted import (
    CLOSE,
    DONE,
    HANG,
    HEAD,
    RESET,
    Asked,
    Pieces,
    chunked,
    error,
    event,
    scripted,
    tokens,
    usage_only,
)

PLAIN = Style(spare=0)
NEVER_S = 60.0  # longer than any test waits for something that comes


def jobs(
    at_s: list[float], prompt: int = 3, output: int = 2, after: list[int] | None = None, think_s: float = 0.0
) -> Jobs:
    ones = np.ones(len(at_s), np.int32)
    never_s = np.full(len(at_s), np.inf)
    loop = (None, None) if after is None else (np.array(after, np.int32), think_s * ones)
    return Jobs(("m",), np.array(at_s, float), 0 * ones, prompt * ones, output * ones, never_s, never_s, *loop)


def client(work: Jobs, style: Style = PLAIN, timeout_s: float = NEVER_S) -> Client:
    return Client(work, seed=1, timeout_s=timeout_s, style=style)


def begin(sender: Client, url: str) -> None:
    """Begin a run whose requests all go to one server."""
    sender.route("m", Server(url, "m"))
    sender.begin(time.monotonic_ns())


def until(sender: Client, ends: int) -> list[Told]:
    """Return all that is told until so many requests have ended."""
    told: list[Told] = []
    while sum(t.kind in {"done", "failed", "dropped"} for t in told) < ends:
        some = sender.poll(NEVER_S)
        assert some, told
        told += some
    return told


def replayed(work: Jobs, url: str, style: Style = PLAIN, timeout_s: float = NEVER_S) -> tuple[list[Told], Log]:
    with client(work, style, timeout_s) as sender:
        sender.route("m", Server(url, "name"))
        sender.begin(time.monotonic_ns())
        told = until(sender, len(work))
        return told, sender.log()


def states(log: Log) -> list[str]:
    return [STATES[k] for k in log.state]


# ---------------------------------------------------------------- what is sent


def test_a_prompt_has_its_length_and_its_seed() -> None:
    with scripted(lambda asked: tokens(asked.body["max_tokens"])) as server:
        _, log = replayed(jobs([0.0] * 5, prompt=700, output=3), server.url, Vllm.style._replace(spare=0))
        _, again = replayed(jobs([0.0] * 5, prompt=700, output=3), server.url, LlamaCpp.style)
        first, second = server.asked[:5], server.asked[5:]
    prompts = sorted(tuple(asked.body["prompt"]) for asked in first)
    assert {len(prompt) for prompt in prompts} == {700}
    assert all(300 <= i < 1000 for prompt in prompts for i in prompt)
    assert len({prompt[:8] for prompt in prompts}) == 5
    assert prompts == sorted(tuple(asked.body["prompt"]) for asked in second)
    assert sorted(asked.headers["x-request-id"] for asked in first) == list("01234")
    request = first[0]
    assert request.path == "/v1/completions"
    del request.body["prompt"]
    assert request.body == {
        "model": "name",
        "max_tokens": 3,
        "min_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    other = second[0]
    assert (other.body["cache_prompt"], other.body["timings_per_token"]) == (False, True)
    assert "min_tokens" not in other.body
    assert other.headers["connection"] == "close"
    assert states(log) == states(again) == ["done"] * 5


def test_prompts_repeat_only_after_all_offsets() -> None:
    bodies, to = Bodies(jobs([0.0] * 3000, prompt=20), 1, PLAIN), Server("http://h", "m")
    assert len({bodies.request(rid, to) for rid in range(3000)}) == 3000
    assert len({rid * 0x9E375 % OFFSETS for rid in range(OFFSETS)}) == OFFSETS


def test_a_base_with_a_path_is_kept() -> None:
    bodies = Bodies(jobs([0.0]), 1, PLAIN)
    for url in ("http://h:1/api", "http://h:1/api/", "http://h:1/api/v1"):
        assert bodies.request(0, Server(url, "m")).startswith(b"POST /api/v1/completions HTTP/1.1\r\nHost: h:1\r\n")


# ---------------------------------------------------------------- open loop


def test_a_burst_leaves_at_once() -> None:
    n = 40
    with scripted(lambda _: tokens(2)) as server:
        told, log = replayed(jobs([0.0] * n), server.url, PLAIN._replace(spare=8))
    assert Counter(t.kind for t in told) == dict.fromkeys(("arrived", "first", "done"), n)
    assert log.tokens.tolist() == [2] * n
    assert log.usage_tokens.tolist() == [2] * n
    assert len(set(log.intended_ns)) == 1
    assert (log.due_ns == log.intended_ns).all()


def test_stamps_are_in_order() -> None:
    with scripted(lambda _: tokens(5)) as server:
        told, log = replayed(jobs([0.001 * k for k in range(20)], output=5), server.url)
    for rid in range(20):
        mine = [t.kind for t in told if t.rid == rid]
        assert mine == ["arrived", "first", "done"]
    assert (np.diff(log.intended_ns) == 1_000_000).all()
    for before, after in ((log.intended_ns, log.write_ns), (log.write_ns, log.byte_ns), (log.byte_ns, log.first_ns)):
        assert (before <= after).all()
    assert (log.first_ns <= log.done_ns).all()
    assert (log.done_ns == log.end_ns).all()
    for a, b in zip(log.offsets, log.offsets[1:], strict=False):
        gaps = np.diff(log.chunk_ns[a:b])
        assert (gaps >= 0).all()
        assert (log.chunk_shared[a + 1 : b] == (gaps == 0)).all()
        assert not log.chunk_shared[a]


def test_none_waits_for_another_to_end() -> None:
    """A server that answers nobody until it has all: a limit on open requests would hang it."""
    n, came = 100, []

    def answer(asked: Asked) -> Pieces:
        came.append(asked)
        return [HANG]

    with scripted(answer) as server, client(jobs([0.0] * n)) as sender:
        begin(sender, server.url)
        while len(came) < n:
            sender.poll(0.01)
        log = sender.log()
    assert states(log) == ["sent"] * n
    assert (log.write_ns > 0).all()
    assert (log.done_ns == -1).all()


def test_a_late_request_leaves_at_once_and_its_lag_is_kept() -> None:
    with scripted(lambda _: tokens(1)) as server, client(jobs([-2.0, 0.0])) as sender:
        begin(sender, server.url)
        until(sender, 2)
        log = sender.log()
    assert log.write_ns[0] - log.intended_ns[0] >= 2_000_000_000
    assert log.intended_ns[1] - log.intended_ns[0] == 2_000_000_000


def test_connections_are_used_again() -> None:
    with scripted(lambda _: [b"".join(tokens(1))]) as server:  # free at once: the end of the body comes with [DONE]
        work = jobs([0.0, *[np.inf] * 9], after=list(range(-1, 9)))
        _, log = replayed(work, server.url)
        assert (states(log), server.connections) == (["done"] * 10, 1)
        _, log = replayed(work, server.url, PLAIN._replace(keep_alive=False))
        assert (states(log), server.connections) == (["done"] * 10, 11)


@cases("kernel", [True, False])
def test_a_timer_fires_at_the_last_time_that_was_set_and_says_whose_it_is(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(timer, "kernel_timer", lambda: None)

    async def fired_ns() -> int:
        loop = asyncio.get_running_loop()
        fired: asyncio.Future[int] = loop.create_future()
        alarm = timer.Timer(loop, lambda: fired.set_result(time.monotonic_ns() - begun_ns))
        assert alarm.precise == kernel
        begun_ns = time.monotonic_ns()
        alarm.at(begun_ns + 3_600_000_000_000)
        alarm.at(begun_ns + 20_000_000)
        at_ns = await fired
        alarm.close()
        return at_ns

    assert asyncio.run(fired_ns()) >= 19_900_000


# ---------------------------------------------------------------- held, sent again, given up


def test_what_has_no_route_is_held_until_it_is_sent() -> None:
    with scripted(lambda _: tokens(1)) as server, client(jobs([0.0, 0.0, 0.0])) as sender:
        sender.begin(time.monotonic_ns())
        told: list[Told] = []
        while len(told) < 3:
            told += sender.poll(NEVER_S)
        assert [(t.kind, t.rid) for t in told] == [("arrived", 0), ("arrived", 1), ("arrived", 2)]
        asked_ns = time.monotonic_ns()
        sender.send(1, Server(server.url, "m"))
        sender.cancel(2)
        until(sender, 2)
        log = sender.log()
    assert states(log) == ["waiting", "done", "dropped"]
    assert log.due_ns[1] >= asked_ns > log.intended_ns[1]
    assert (log.due_ns[0], log.write_ns[0]) == (-1, -1)


def test_a_route_may_be_taken_back() -> None:
    with scripted(lambda _: tokens(1)) as server, client(jobs([0.0])) as sender:
        sender.route("m", Server(server.url, "m"))
        sender.route("m", None)
        sender.begin(time.monotonic_ns())
        assert [t.kind for t in sender.poll(NEVER_S)] == ["arrived"]
        assert states(sender.log()) == ["waiting"]


def test_a_cancelled_request_ends_dropped_and_its_connection_closes() -> None:
    with scripted(lambda _: [HEAD, *chunked(event("a"))[1:2], HANG]) as server, client(jobs([0.0])) as sender:
        begin(sender, server.url)
        told: list[Told] = []
        while "first" not in {t.kind for t in told}:
            told += sender.poll(NEVER_S)
        sender.cancel(0)
        sender.cancel(0)
        sender.send(0, Server(server.url, "m"))  # nothing happens
        assert [(t.kind, t.tokens) for t in until(sender, 1)] == [("dropped", 1)]
        log = sender.log()
    assert (states(log), log.tokens.tolist(), log.done_ns.tolist()) == (["dropped"], [1], [-1])


def test_a_request_that_is_given_up_before_its_time_never_leaves() -> None:
    with scripted(lambda _: tokens(2)) as server, client(jobs([0.0, 0.01])) as sender:
        sender.cancel(1)
        begin(sender, server.url)
        told = until(sender, 2)
        while sum(t.kind == "arrived" for t in told) < 2:
            told += sender.poll(NEVER_S)
        log = sender.log()
    assert (states(log), log.write_ns[1]) == (["done", "dropped"], -1)


def test_an_heir_comes_after_the_end_before_it_whatever_it_was() -> None:
    with scripted(lambda asked: error(500, "no") if asked.body["max_tokens"] == 1 else tokens(2)) as server:
        work = jobs([0.0, np.inf, np.inf], after=[-1, 0, 1], think_s=0.003)
        work.output_tokens[0] = 1
        told, log = replayed(work, server.url)
    assert states(log) == ["failed", "done", "done"]
    assert (log.intended_ns[1:] - log.end_ns[:-1]).tolist() == [3_000_000, 3_000_000]
    assert [t.rid for t in told if t.kind == "arrived"] == [0, 1, 2]


# ---------------------------------------------------------------- faults


def unused() -> str:
    """Return the URL of a port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


FAULTS: dict[str, tuple[Pieces, int, str]] = {  # what the server does, the HTTP status, the reason
    "429": (error(429, "slow down"), 429, "HTTP 429: slow down"),
    "500": (error(500, "out of memory"), 500, "HTTP 500: out of memory"),
    "malformed": (chunked(b"data: {\n\n"), 200, "malformed chunk: {"),
    "not http": ([b"hello\r\n", CLOSE], 0, "not HTTP"),
    "no end": (chunked(event("a")), 200, "the stream ended without [DONE]"),
    "early close": ([HEAD, CLOSE], 200, "connection closed early"),
    "no answer": ([CLOSE], 0, "connection closed early"),
    "reset": ([HEAD, RESET], 200, "connection"),
}


@cases("name", [*FAULTS])
def test_a_fault_is_a_failed_row_with_its_reason(name: str) -> None:
    pieces, status, says = FAULTS[name]
    with scripted(lambda _: pieces) as server:
        told, log = replayed(jobs([0.0, 0.001]), server.url)
    assert states(log) == ["failed"] * 2
    assert all(says in why for why in log.error)
    assert log.status.tolist() == [status] * 2
    assert (log.done_ns == -1).all()
    assert (log.end_ns > 0).all()
    assert Counter(t.kind for t in told)["failed"] == 2


def test_a_server_that_is_not_there_fails_the_request() -> None:
    _, log = replayed(jobs([0.0]), unused(), PLAIN._replace(spare=4))
    assert (log.error, log.status.tolist(), log.write_ns.tolist()) == (["connection refused"], [0], [-1])


@cases("sent", [[], [HEAD], chunked(event("a"))[:2]])
def test_silence_fails_the_request(sent: list[bytes]) -> None:
    with scripted(lambda _: [*sent, HANG]) as server:
        _, log = replayed(jobs([0.0]), server.url, timeout_s=0.05)
    assert (states(log), log.error) == (["failed"], ["no bytes for 0.05 s"])
    assert log.end_ns[0] - max(log.write_ns[0], log.byte_ns[0]) >= 50_000_000


def test_a_connection_that_the_server_closed_is_no_failure() -> None:
    """It answers once a connection, then closes without a word: a request that it never read is sent again."""
    with scripted(lambda _: [*tokens(1), CLOSE]) as server:
        _, log = replayed(jobs([0.0, *[np.inf] * 30], after=list(range(-1, 30))), server.url)
    assert states(log) == ["done"] * 31


def test_states_add_up_under_all_faults_at_once() -> None:
    kinds: list[Pieces] = [tokens(1), *(pieces for pieces, _, _ in FAULTS.values()), [HANG]]
    n = 30 * len(kinds)
    work = jobs([0.0005 * k for k in range(n)])
    work.output_tokens[:] = np.arange(n) % len(kinds) + 1
    with scripted(lambda asked: kinds[asked.body["max_tokens"] - 1]) as server, client(work) as sender:
        begin(sender, server.url)
        told = until(sender, n - 30)
        for rid in range(len(kinds) - 1, n, len(kinds)):
            sender.cancel(rid)
        told += until(sender, 30)
        log = sender.log()
    assert Counter(states(log)) == {"done": 30, "failed": n - 60, "dropped": 30}
    ends = {t.rid: t.kind for t in told if t.kind in {"done", "failed", "dropped"}}
    assert ends == dict(enumerate(states(log)))
    assert Counter(t.kind for t in told)["arrived"] == n
    assert all(bool(why) == (state == "failed") for why, state in zip(log.error, states(log), strict=True))


# ---------------------------------------------------------------- the key


def test_a_key_is_sent_and_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_TEST_KEY", "sk-secret-1")
    style = PLAIN._replace(key_env="BENCH_TEST_KEY")
    with scripted(lambda asked: error(401, f"bad key {asked.headers['authorization']}")) as server:
        told, log = replayed(jobs([0.0]), server.url, style)
        assert server.asked[0].headers["authorization"] == "Bearer sk-secret-1"
    assert log.error == ["HTTP 401: bad key Bearer ***"]
    assert "sk-secret" not in repr((told, log, style))
    monkeypatch.delenv("BENCH_TEST_KEY")
    sender = Client(jobs([0.0]), seed=1, timeout_s=1.0, style=style)
    with pytest.raises(UserError, match="BENCH_TEST_KEY holds no key"):
        sender.start()
    sender.close()


# ---------------------------------------------------------------- the process


def test_an_arrival_tells_whether_it_left_by_a_route_and_a_route_that_it_is_in_force() -> None:
    with scripted(lambda _: tokens(1)) as server, client(jobs([0.0])) as sender:
        sender.begin(time.monotonic_ns())
        assert [(t.kind, t.rid, t.tokens) for t in sender.poll(NEVER_S)] == [("arrived", 0, 0)]
        sender.route("m", Server(server.url, "m"))
        assert [(t.kind, t.rid) for t in sender.poll(NEVER_S)] == [("routed", -1)]
    with scripted(lambda _: tokens(1)) as server:
        told, _ = replayed(jobs([0.0, 0.0]), server.url)
    assert [t.tokens for t in told if t.kind == "arrived"] == [1, 1]


# ---------------------------------------------------------------- several tokens in an event


def test_the_usage_counts_events_of_several_tokens() -> None:
    """A gateway sends 41 tokens in ten events: the request is done, and its tokens are spread over the events."""
    answer = chunked(*(event("several words") for _ in range(10)), usage_only(41), DONE)
    with scripted(lambda _: answer) as server:
        told, log = replayed(jobs([0.0], output=41), server.url)
    assert [(t.kind, t.tokens) for t in told][-1] == ("done", 41)
    assert (log.by_event.tolist(), log.tokens.tolist()) == ([True], [10])
    spread = account.chunks(log, 0, float("inf")).tokens
    assert spread.tolist() == [4, 4, 4, 4, 5, 4, 4, 4, 4, 4]
    judged = verdict(log, 0.0)
    assert judged.by_event == 1
    assert "tokens by event in 1 requests" in judged.text


@given(st.integers(1, 40), st.integers(1, 200))
def test_tokens_of_the_usage_are_spread_evenly_and_none_is_lost(events: int, usage: int) -> None:
    first = np.ones(1, np.int64)
    log = Log(
        first, first, first, first, first, first, np.full(1, 200, np.int16), np.full(1, 4, np.int8), [""],
        first * usage, -first, -first, np.array([0, events]), np.arange(events) + 1, np.ones(events, np.int32),
        np.zeros(events, bool), True, 0.0, 1.0, 0,
    )  # fmt: skip
    spread = account.chunks(log, 0, float("inf")).tokens
    assert spread.sum() == usage
    assert spread[0] >= 1
    assert spread.max() - spread[spread > 0].min() <= 1 or usage < events


# ---------------------------------------------------------------- a warm cache


def warm(usage: object) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


def test_prompts_differ_by_the_salt_of_a_run() -> None:
    work, to = jobs([0.0], prompt=50), Server("http://h:1", "m")
    bodies = [Bodies(work, 0, PLAIN._replace(salt=salt)).request(0, to) for salt in (0, 0, 1, 2)]
    assert bodies[0] == bodies[1]
    assert len({*bodies}) == 3
    assert len({len(body) for body in bodies}) == 1


@cases(
    ("details", "hits"),
    [({"cached_tokens": 48}, 20), ({"cached_tokens": 0}, 0), (None, 0), ({"cached_tokens": "x"}, 0), ({}, 0)],
)
def test_a_prompt_that_a_cache_had_is_seen_and_the_run_is_invalid(details: object, hits: int) -> None:
    usage = {"completion_tokens": 2, "prompt_tokens_details": details}
    with scripted(lambda _: chunked(event("a"), event("b"), warm(usage), DONE)) as server:
        _, log = replayed(jobs([0.001 * k for k in range(20)]), server.url)
    judged = verdict(log, 0.0)
    assert judged.cached == hits
    assert ("a cache had prompt tokens of 20 of 20 requests" in judged.text) is bool(hits)
    assert not (hits and judged.valid)
