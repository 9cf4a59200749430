"""`bench mock` by real sockets: every endpoint, every fault, counts, and the command."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from httptools import HttpRequestParser

from harness.cli.app import main
from harness.mock.exchange import Exchange
from harness.mock.faults import Faults, Shares
from harness.mock.http import Connection
from harness.mock.model import Served
from harness.mock.pacing import Fixed, ns
from harness.mock.sequence import Sequence
from harness.mock.server import Mock, listening
from harness.mock.settings import Settings
from harness.policy.types import UserError
from tests.cases import cases
from tests.mocks import ASK, Server, events, raw, send, serving

ROOT = Path(__file__).resolve().parent.parent


def test_health_models_and_ports(server: Server) -> None:
    assert server.ask("/health") == (200, b"")
    status, body = server.ask("/v1/models")
    answer = json.loads(body)
    assert (status, answer["object"]) == (200, "list")
    assert [(model["id"], model["object"], model["max_model_len"]) for model in answer["data"]] == [
        ("a", "model", 1000),
        ("b", "model", 1000),
    ]
    with serving("a", "b", "c", ports=True) as several:
        assert list(several.urls.values()) == ["a", "b", "c"]
        assert len(set(several.urls)) == 3
        assert [model["id"] for model in json.loads(several.ask("/v1/models")[1])["data"]] == ["a"]
        assert several.ask("/v1/completions", {**ASK, "model": "b"})[0] == 404
        assert several.ask("/v1/completions", {"prompt": "x"})[0] == 200  # the only model there is


def test_a_completion(server: Server) -> None:
    status, body = server.ask("/v1/completions", ASK)
    answer = json.loads(body)
    assert (status, answer["object"], answer["model"]) == (200, "text_completion", "a")
    choice = {"index": 0, "text": " 1 2 3 4", "logprobs": None, "finish_reason": "length"}
    assert answer["choices"] == [choice]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_a_streamed_completion_is_a_chunk_a_token(server: Server) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with server.sent("/v1/completions", {**ASK, **options}) as answer:
        assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        chunks = events(answer.read())
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == [" 1", " 2", " 3", " 4"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "length"]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 4)
    assert len({chunk["id"] for chunk in chunks}) == 1
    plain = events(server.ask("/v1/completions", {**ASK, "stream": True})[1])
    assert [chunk["choices"][0]["text"] for chunk in plain] == [" 1", " 2", " 3", " 4"]
    options["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    counted = events(server.ask("/v1/completions", {**ASK, **options})[1])
    assert [chunk["usage"]["completion_tokens"] for chunk in counted] == [1, 2, 3, 4, 4]


def test_a_chat(server: Server) -> None:
    parts = [{"type": "text", "text": "abcd"}, {"type": "text", "text": "e"}]
    body: dict[str, Any] = {
        "model": "b",
        "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": parts}],
    }
    body["max_completion_tokens"] = 2
    answer = json.loads(server.ask("/v1/chat/completions", body)[1])
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": " 1 2"}
    assert answer["usage"]["prompt_tokens"] == 1 + 2
    chunks = events(server.ask("/v1/chat/completions", {**body, "stream": True})[1])
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": " 1"},
        {"content": " 2"},
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_the_end_of_a_stream_as_llama_cpp_has_it() -> None:
    with serving("a", settings=Settings(flavour="llama.cpp")) as server:
        assert server.ask("/health") == (200, b'{"status":"ok"}')
        *tokens, last = events(server.ask("/v1/completions", {**ASK, "stream": True})[1])
        assert [chunk["choices"][0]["finish_reason"] for chunk in tokens] == [None] * 4
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


@cases(
    ("prompt", "tokens"),
    [("abcdefgh", [2]), ([5] * 7, [7]), (["abcdefgh", "x"], [2, 1]), ([[1, 2], [3]], [2, 1])],
)
def test_prompts_are_texts_token_ids_or_lists_of_them(server: Server, prompt: object, tokens: list[int]) -> None:
    answer = json.loads(server.ask("/v1/completions", {**ASK, "prompt": prompt})[1])
    assert answer["usage"]["prompt_tokens"] == sum(tokens)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(tokens)))
    chunks = events(server.ask("/v1/completions", {**ASK, "prompt": prompt, "n": 2, "stream": True})[1])
    for k in range(2 * len(tokens)):
        mine = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["index"] == k]
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
            answer = json.loads(server.ask("/v1/completions", {"prompt": [1], **extra})[1])
            assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (made, why)
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


@cases(("status", "param", "body"), BAD)
def test_what_is_wrong_is_said_in_openais_form(server: Server, status: int, param: str | None, body: object) -> None:
    server.ask("/mock/reset")
    got, reply = server.ask("/v1/completions", body)
    error = json.loads(reply)["error"]
    assert (got, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert error["message"]
    assert server.stats()["ends"] == {str(status): 1}


@cases(
    "messages",
    [None, [], "x", [1], [{"content": "x"}], [{"role": "user", "content": 1}], [{"role": "u", "content": [1]}]],
)
def test_what_is_wrong_with_messages(server: Server, messages: object) -> None:
    status, reply = server.ask("/v1/chat/completions", {"model": "a", "messages": messages})
    assert (status, json.loads(reply)["error"]["param"]) == (400, "messages")


def test_paths_and_methods(server: Server) -> None:
    assert server.ask("/v1/embeddings", {})[0] == 404
    with server.sent("/v1/completions") as answer:
        assert (answer.status, answer.getheader("allow")) == (405, "POST")
    assert server.ask("/sleep?level=3")[0] == 400
    assert server.ask("/sleep?mode=now")[0] == 400
    assert server.ask("/sleep?model=c")[0] == 404
    assert server.ask("/wake_up?tags=weights")[0] == 400


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
    assert server.stats(lambda counts: counts["in_flight"] == 1)["requests"] == 1
    assert server.ask("/v1/completions", ASK)[0] == 200
    assert hung.sock is not None
    hung.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        hung.sock.recv(1)
    hung.close()
    counts = server.stats(lambda counts: counts["in_flight"] == 0)
    assert counts["ends"] == {"200": 1, "hang": 1}


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
        server.stats(lambda counts: counts["in_flight"] == 1)
        connection.close()
        counts = server.stats(lambda counts: counts["in_flight"] == 0)
        assert (counts["ends"], counts["tokens"]) == ({"cancelled": 1}, 0)


def test_sleeping_models_hold_requests_until_they_wake(server: Server) -> None:
    assert server.ask("/sleep?level=2&model=a") == (200, b"")
    assert json.loads(server.ask("/is_sleeping?model=a")[1]) == {"is_sleeping": True}
    assert json.loads(server.ask("/is_sleeping?model=b")[1]) == {"is_sleeping": False}
    assert json.loads(server.ask("/is_sleeping")[1]) == {"is_sleeping": False}  # not all of them
    held = server.connect()
    send(held, "/v1/completions", ASK)
    server.stats(lambda counts: counts["in_flight"] == 1)
    assert server.ask("/v1/completions", {**ASK, "model": "b"})[0] == 200
    assert server.ask("/wake_up?model=a") == (200, b"")
    assert json.loads(held.getresponse().read())["usage"]["completion_tokens"] == 4
    held.close()
    assert server.ask("/sleep?level=1") == (200, b"")
    assert json.loads(server.ask("/is_sleeping")[1]) == {"is_sleeping": True}
    aborted = server.connect()
    send(aborted, "/v1/completions", ASK)
    server.stats(lambda counts: counts["in_flight"] == 1)
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
    counts = server.stats()
    assert (counts["ends"], counts["tokens"]) == ({"200": 1}, 1)
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
        server.stats(lambda counts: counts["in_flight"] == 2)
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
        chunks = [item["mock"] for item in events(server.ask("/v1/completions", body, x_request_id="r1", **stamped)[1])]
        sent = [chunk["sent_ns"] for chunk in chunks]
        assert [list(chunk) for chunk in chunks] == [["sent_ns", "read_ns"], *[["sent_ns"]] * 3]
        assert before_ns < chunks[0]["read_ns"] <= sent[0]
        assert sent == sorted(sent)
        assert sent[-1] < time.monotonic_ns()
    assert "mock" not in events(server.ask("/v1/completions", {**ASK, "stream": True})[1])[0]
    counts = server.stats()
    assert {k: v for k, v in counts.items() if k != "rows"} == {
        "requests": 3,
        "in_flight": 0,
        "in_flight_max": 1,
        "tokens": 12,
        "models": {"a": 3},
        "ends": {"200": 3},
    }
    rows = counts["rows"]
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
        texts = [chunk["choices"][0]["text"] for chunk in events(connection.getresponse().read())]
        assert texts == [f" {i + 1}" for i in range(1 + k)]
        connection.close()
    assert server.stats()["tokens"] == sum(range(1, 101))


def test_nothing_is_left_for_the_collector() -> None:
    def left() -> Counter[str]:
        kinds = (Connection, Exchange, Sequence, HttpRequestParser)
        return Counter(type(x).__name__ for x in gc.get_objects() if type(x) in kinds)  # asks no object itself

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
            server.stats(lambda counts: counts["in_flight"] == 0)
        assert not left() - before  # what an earlier test has left may go meanwhile
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
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert connection.recv(65536)
        parent.kill()
        parent.communicate()
        assert connection.recv(1) == b""  # the mock is gone


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
            *(
                ((option, "nan"), "nan is not a finite number")
                for option in ("--ttft-ms", "--itl-ms", "--sleep-idle-s", "--sleep-ms", "--fail", "--cut")
            ),
            (("--sleep-idle-s", "inf"), "inf is not in the range"),
            (("--ttft-ms", "0", "--models", "a,b", "--ports", "--port", "65535"), "--port is at most 65534"),
            (("--fail", "0.6", "--cut", "0.6"), "1.2 of all requests"),
        ):
            result = CliRunner().invoke(main, ["mock", *args])
            assert result.exit_code == 2
            assert says in result.stderr.splitlines()[-1]  # click says before how the command is used


def test_more_ports_than_there_are_is_an_error() -> None:
    mock = Mock([Served("a", 9), Served("b", 9)], lambda agenda, _: Fixed(agenda, 0, 0), Settings(), 0)

    async def serve() -> None:
        async with listening(mock, "127.0.0.1", 65536):
            pass

    with pytest.raises(UserError, match="port 65536"):
        asyncio.run(serve())
