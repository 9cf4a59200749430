"""Servers that answer what none should: lists of models and streams of a run, odd at each place or without an end."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.judge import Case
from tests.fuzz.logs import ODD
from tests.fuzz.odd import parts

SPEC = """
system = "dedicated"
models = "llama-3.2-1b"
trace = "sample"
window_s = 0.2
warmup_s = 0
drain_s = 2
slo = "absolute:ttft=9,tpot=9"
engine = "attach+urls={url}"
"""
HTTP = b"HTTP/1.1 "
OK = HTTP + b"200 OK\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"
LIST = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]}
CHUNK = {"choices": [{"index": 0, "text": "a"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


def _event(chunk: object) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


LISTS: Mapping[str, tuple[bytes, ...]] = {
    "redirect": (HTTP + b"302 No\r\nLocation: http://127.0.0.1:9/\r\n\r\n",),
    "redirect to itself": (HTTP + b"307 No\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",),
    "no HTTP": (b"SSH-2.0\x1b[31m\r\n",),
    "nothing": (),
    "no end": (OK, *[b" " * 100_000] * 500),
    "deep": (OK + b"[" * 1_000_000,),
    "not UTF-8": (OK + b"\xff\xfe{}",),
    "NaN": (OK + b'{"data": NaN}',),
    "a long line": (HTTP + b"200 OK\r\nX: " + b"x" * 200_000,),
    "headers": (HTTP + b"200 OK\r\n" + b"X: 1\r\n" * 500,),
    "short": (HTTP + b"200 OK\r\nContent-Length: 9999\r\n\r\n{}",),
    "chunks": (HTTP + b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",),
    "status": (HTTP + b"999 No\r\n\r\n",),
    "a long name": (OK + json.dumps({"data": [{"id": "x" * 1_000_000}]}).encode(),),
    "colours": (OK + json.dumps({"data": [{"id": "\x1b[31m\u202e"}]}).encode(),),
}
STREAMS: Mapping[str, tuple[bytes, ...]] = {
    "no end": (OK, *[_event({"choices": [{"text": "a"}]}) * 1000] * 100),
    "deep": (OK, b"data: " + b"[" * 500_000 + b"\n\n"),
    "a long line": (OK, *[b"data: " + b"x" * 100_000] * 30),
    "binary": (OK, bytes(range(256)) * 10, DONE),
    "nothing": (),
    "cut": (OK, _event(CHUNK)[:20]),
    "only done": (OK, DONE),
    "error": (OK, _event({"error": "\x1b[31m"})),
    "count falls": (OK, _event({**CHUNK, "usage": {"completion_tokens": 9}}), _event(CHUNK), DONE),
    "2^31": (OK, _event({**CHUNK, "usage": {"completion_tokens": 1 << 31}}), DONE),
}


def served(models: Sequence[bytes], stream: Sequence[bytes]) -> str:
    """Answer in threads of this process, a GET by the first pieces and all else by the second; return the URL."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=100)

    def answer(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(30)
            for piece in models if connection.recv(1 << 20).startswith(b"GET") else stream:
                connection.sendall(piece)

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def _case(what: str, models: Sequence[bytes], stream: Sequence[bytes]) -> Case:
    def put(here: Path) -> None:
        (here / "spec.toml").write_text(SPEC.format(url=served(models, stream)))

    return Case(f"servers/{what}", ("run", "{here}/spec.toml", "-o", "out", "-q"), put=put)


def cases(here: Path) -> st.SearchStrategy[Case]:
    """Draw runs on such servers."""
    sound = (OK + json.dumps(LIST).encode(),)
    listed = parts(LIST, ODD).map(lambda part: (part[2][0], (OK + json.dumps(part[2][1]).encode(),)))
    streamed = parts(CHUNK, ODD).map(lambda part: (part[2][0], (OK, _event(part[2][1]) * 2, DONE)))
    return st.one_of(
        st.one_of(listed, st.sampled_from([*LISTS.items()])).map(lambda of: _case(f"list {of[0]}", of[1], ())),
        st.one_of(streamed, st.sampled_from([*STREAMS.items()])).map(lambda of: _case(f"chunk {of[0]}", sound, of[1])),
    )
