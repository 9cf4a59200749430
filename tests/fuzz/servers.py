"""Servers that answer what none should: lists of models and streams of a run, odd at each place or without an end."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tests.fuzz.case import Case
from tests.fuzz.logs import odd

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
OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
LIST = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]}
CHUNK = {"choices": [{"index": 0, "text": "a"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


def _event(chunk: object) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


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


def cases(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield runs on such servers."""
    sound = OK + json.dumps(LIST).encode()
    lists: dict[str, tuple[bytes, ...]] = {
        **{f"list {where}": (OK + json.dumps(value).encode(),) for where, value in odd(LIST)},
        "redirect": (b"HTTP/1.1 302 No\r\nLocation: http://127.0.0.1:9/\r\n\r\n",),
        "redirect to itself": (b"HTTP/1.1 307 No\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",),
        "no HTTP": (b"SSH-2.0\x1b[31m\r\n",),
        "nothing": (),
        "no end": (OK, *[b" " * 100_000] * 500),
        "deep": (OK + b"[" * 1_000_000,),
        "not UTF-8": (OK + b"\xff\xfe{}",),
        "NaN": (OK + b'{"data": NaN}',),
        "a long line": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000,),
        "headers": (b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 500,),
        "short": (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{}",),
        "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",),
        "status": (b"HTTP/1.1 999 No\r\n\r\n",),
        "a long name": (OK + json.dumps({"data": [{"id": "x" * 1_000_000}]}).encode(),),
        "colours": (OK + json.dumps({"data": [{"id": "\x1b[31m\u202e"}]}).encode(),),
    }
    done = b"data: [DONE]\n\n"
    streams: dict[str, tuple[bytes, ...]] = {
        **{f"chunk {where}": (OK, _event(value) * 2, done) for where, value in odd(CHUNK)},
        "no end": (OK, *[_event({"choices": [{"text": "a"}]}) * 1000] * 100),
        "deep": (OK, b"data: " + b"[" * 500_000 + b"\n\n"),
        "a long line": (OK, *[b"data: " + b"x" * 100_000] * 30),
        "binary": (OK, bytes(range(256)) * 10, done),
        "nothing": (),
        "cut": (OK, _event(CHUNK)[:20]),
        "only done": (OK, done),
        "error": (OK, _event({"error": "\x1b[31m"})),
        "count falls": (OK, _event({**CHUNK, "usage": {"completion_tokens": 9}}), _event(CHUNK), done),
        "2^31": (OK, _event({**CHUNK, "usage": {"completion_tokens": 1 << 31}}), done),
    }
    every: list[tuple[str, tuple[bytes, ...], tuple[bytes, ...]]] = [
        (f"list/{name}", pieces, ()) for name, pieces in lists.items()
    ]
    every += [(f"stream/{name}", (sound,), pieces) for name, pieces in streams.items()]
    for number, (name, models, stream) in enumerate(draw.sample(every, len(every))):
        (path := here / f"s{number}.toml").write_text(SPEC.format(url=served(models, stream)))
        yield Case(f"servers/{name}", ("run", str(path), "-o", "out", "-q"))
