"""HTTP as `bench mock` speaks it: what is no request, halves, pipelines, connections."""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse

from harness.mock import http
from tests.cases import cases
from tests.mocks import ASK, Server, answered, events, post, raw, send

# ---------------------------------------------------------------------- HTTP


@cases(
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
    with socket.create_connection(server.address) as connection:
        connection.sendall(data)
        answer = HTTPResponse(connection)
        answer.begin()
        error = json.loads(answer.read())["error"]
        assert (answer.status, answer.getheader("connection"), bool(error["message"])) == (status, "close", True)
        assert connection.recv(1) == b""  # it says no more
    assert server.ask("/health")[0] == 200


def test_half_a_request_leaves_nothing(server: Server) -> None:
    whole = post(json.dumps(ASK).encode())
    for size in (1, 10, whole.index(b"\r\n\r\n") + 2, len(whole) - 1):
        assert raw(server, whole[:size]) == b""
    assert (server.stats()["requests"], server.stats()["in_flight"]) == (0, 0)


def test_a_request_may_come_byte_by_byte_or_in_chunks(server: Server) -> None:
    body = json.dumps(ASK).encode()
    with socket.create_connection(server.address) as connection:
        for byte in post(body):
            connection.send(bytes([byte]))
        answer = HTTPResponse(connection)
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
        with socket.create_connection(server.address) as sock:
            sock.sendall(asked)
            assert b"connection: close\r\n" in b"".join(iter(lambda: sock.recv(65536), b""))


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(server: Server) -> None:
    asked = post(json.dumps({**ASK, "stream": True}).encode()).replace(b"HTTP/1.1", b"HTTP/1.0")
    with socket.create_connection(server.address) as connection:
        connection.sendall(asked)
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert len(events(body)) == 4


def test_a_client_that_waits_for_100_gets_it(server: Server) -> None:
    body = json.dumps(ASK).encode()
    whole = post(body, head="expect: 100-continue\r\n")
    with socket.create_connection(server.address) as connection:
        connection.sendall(whole[: -len(body)])
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        answer = HTTPResponse(connection)
        answer.begin()
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 4
