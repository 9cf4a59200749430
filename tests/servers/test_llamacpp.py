"""llama.cpp's server, for real: starts, answers in exact lengths, stops, and again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import psutil
import pytest

from harness.engines.commands import Command, Cpu, Serve
from harness.engines.commands import llamacpp as command
from harness.engines.servers.folder import TINY, weights
from harness.policy.types import UserError
from tests.servers.ask import complete
from tests.servers.conftest import Start

pytestmark = pytest.mark.servers
PROMPT = list(range(300, 340))


def described(python: Path, cache: Path, model: str, port: int) -> Command:
    """Return a server of the tiny model."""
    serve = Serve(model, weights(TINY, cache, python), port, 512, 4, 256)
    return command(python, serve, Cpu(threads=1, kv_bytes=0), context=2048)


def test_a_completion_has_the_length_that_was_asked_for(llamacpp: Path, cache: Path, start: Start) -> None:
    server = start("a", partial(described, llamacpp, cache, "a"))
    assert [member.pid for member in server.members()] == [server.pid]
    for tokens in (1, 2, 33):
        answer = complete(server.ready_url, "a", PROMPT, tokens)
        assert answer.usage["prompt_tokens"] == len(PROMPT)
        assert answer.usage["completion_tokens"] == tokens
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer.reasons == ["length"]
        assert answer.done
        assert len(answer.texts) == tokens  # a chunk a token: no byte is held back
        assert all(text.strip().startswith("w") for text in answer.texts)


def test_it_listens_to_this_machine_alone(llamacpp: Path, cache: Path, start: Start) -> None:
    server = start("a", partial(described, llamacpp, cache, "a"))
    (process,) = server.members()
    heard = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert heard == ["127.0.0.1"]


def test_ten_swaps_of_two_models(llamacpp: Path, cache: Path, start: Start) -> None:
    answers = []
    for k in range(10):
        model = "ab"[k % 2]
        server = start(model, partial(described, llamacpp, cache, model))
        answers.append(complete(server.ready_url, model, PROMPT, 5).texts)
        server.stop()
        assert not psutil.pid_exists(server.pid)
    assert all(texts == answers[0] for texts in answers)
    assert len(answers[0]) == 5


def test_a_broken_file_is_a_message(llamacpp: Path, tmp_path: Path, start: Start) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF of nothing")
    with pytest.raises(UserError, match=r"server a ended before it was ready \(exit code 1\)"):
        start("a", lambda port: command(llamacpp, Serve("a", broken, port, 512, 4, 256), Cpu(1, 0), context=512))


def test_weights_are_written_once_and_whole(llamacpp: Path, tmp_path: Path) -> None:
    first = weights(TINY, tmp_path, llamacpp)
    stamp = first.stat().st_mtime_ns
    assert weights(TINY, tmp_path, llamacpp) == first
    assert first.stat().st_mtime_ns == stamp
    other = weights(TINY._replace(layers=2), tmp_path, llamacpp)
    assert weights(TINY, tmp_path, llamacpp, seed=1).read_bytes() != first.read_bytes()
    assert other.stat().st_size < first.stat().st_size
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gguf"] * 3
    with pytest.raises(UserError, match="more than 259 tokens"):
        weights(TINY._replace(vocab=259), tmp_path, llamacpp)
