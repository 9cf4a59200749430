"""Input of strangers runs no code, takes no key and ends: stored results, URLs, answers, patterns."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.engines import attach
from harness.loop import strangers
from harness.policy.types import UserError
from tests.bench import bench, mistake, ok
from tests.cases import cases
from tests.commands.test_bad_input import COMPARE
from workloads import checkpoint

# ------------------------------------------------------------------ code


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return results of a system's file that leaves a mark wherever it is imported; its folder has `results`."""
    there = tmp_path_factory.mktemp("theirs")
    ok("new", there / "mine.py")
    with (there / "mine.py").open("a") as file:
        file.write(f"import pathlib\npathlib.Path({str(there / 'RAN')!r}).touch()\n")
    ok(*COMPARE[:2], there / "mine.py", *COMPARE[3:], "--slo", "absolute:ttft=1,tpot=1", "-o", there / "results")
    assert (there / "RAN").exists()
    return there


def ran(there: Path, *args: object) -> bool:
    """Return whether a command imported the file that stored results name."""
    (there / "RAN").unlink(missing_ok=True)
    bench(*args)
    return (there / "RAN").exists()


def test_stored_results_run_no_code_but_where_it_is_trusted(theirs: Path, tmp_path: Path) -> None:
    results = shutil.copytree(theirs / "results", tmp_path / "results")
    run, sweep = next(results.glob("mine-*")), next(results.glob("sample-*"))
    spec = tmp_path / "s.toml"
    spec.write_text('system = "static"\ntrace = "sample"\nmodels = "llama-3.2-1b*2"\nslo = "absolute:ttft=1,tpot=1"\n')
    page, figure = tmp_path / "p.html", tmp_path / "figure"
    request, timeline = ("explain", run, "--request", "3"), ("timeline", run, "-o", tmp_path / "t.json")
    for args in (
        request,
        timeline,
        ("explain", run, "--misses"),
        ("explain", sweep, "--misses"),
        ("plot", sweep, "-o", figure),
        ("report", sweep, "-o", page),
        ("run", spec, "--dry-run", "-o", results),
        ("run", spec, "-o", results),
        (*COMPARE, "--slo", "absolute:ttft=1,tpot=1", "-o", results),
    ):
        assert not ran(theirs, *args), args
    for args in (request, timeline):
        mistake(bench(*args), theirs / "mine.py", "--trust")
        assert ran(theirs, *args, "--trust")


def test_a_file_that_the_command_line_names_is_imported_by_any_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "a,b=c").mkdir()
    file, other = tmp_path / "a,b=c" / "x.py", tmp_path / "y.py"
    os.environ.pop(strangers.LIMIT, None)
    strangers.known(file)  # a library has no limit
    words = (str(file), f"static,{file}:fast+k=1", f"--systems=new={file}", f"{other},{file}")
    for word in words:
        with strangers.limited():
            with pytest.raises(UserError, match=r"x\.py is code that stored results name"):
                strangers.known(file)
            strangers.name(word)
            strangers.known(file)
    assert strangers.LIMIT not in os.environ


def test_a_spec_that_the_user_names_runs_its_system(theirs: Path, tmp_path: Path) -> None:
    spec = tmp_path / "s.toml"
    spec.write_text(
        f'system = "{theirs / "mine.py"}"\ntrace = "sample"\nmodels = "llama-3.2-1b*3"\n'
        'slo = "absolute:ttft=1,tpot=1"\n'
    )
    assert ran(theirs, "run", spec, "--dry-run", "-o", tmp_path / "out")


# ------------------------------------------------------------------ keys and lists of models


@contextmanager
def server(answer: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """Serve each connection by one call, on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    try:
                        answer(connection, connection.recv(65536))
                    except OSError:
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


OK = b"HTTP/1.1 200 OK\r\n\r\n"


def listing(*ids: object) -> bytes:
    return OK + json.dumps({"data": [{"id": name} for name in ids]}).encode()


def test_a_redirect_takes_no_key_to_another_address() -> None:
    heard: list[bytes] = []
    with server(lambda _, asked: heard.append(asked)) as other:
        redirect = f"HTTP/1.1 307 No\r\nLocation: {other}/v1/models\r\nContent-Length: 0\r\n\r\n".encode()
        with server(lambda line, _: line.sendall(redirect)) as url, pytest.raises(UserError, match="a redirect"):
            attach.models(url, "sk-secret")
    assert heard == []


def test_a_key_is_sent_to_the_address_that_was_named() -> None:
    heard: list[bytes] = []

    def answer(line: socket.socket, asked: bytes) -> None:
        heard.append(asked)
        line.sendall(listing("m"))

    with server(answer) as url:
        assert [to.model for to, _ in attach.models(f"{url}/v1/", "sk-secret")] == ["m"]
    assert heard[0].startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert b"Authorization: Bearer sk-secret\r\n" in heard[0]


@cases("url", ["http://me:hush@127.0.0.1:1", "http://me:hu,sh@h", "me:hush@x", "http://hush@h:99999"])
def test_a_user_or_password_in_a_url_is_refused_and_never_shown(url: str, tmp_path: Path) -> None:
    done = bench("compare", "--systems", "dedicated", "--engine", f"attach+urls={url}", "-o", tmp_path / "out")
    mistake(done, "a user or a password", "key_env")
    assert "hush" not in done.output


def endless(line: socket.socket, piece: bytes, gap: threading.Event) -> None:
    while not gap.wait(0.05):
        line.sendall(piece)


@cases(("head", "says"), [(OK, "no whole answer within"), (b"HTTP/1.1 200 OK\r\nX: ", "no whole answer within")])
def test_an_answer_a_byte_at_a_time_ends(head: bytes, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "ANSWER_S", 0.5)
    over = threading.Event()

    def answer(line: socket.socket, _: bytes) -> None:
        line.sendall(head)
        endless(line, b" ", over)

    with server(answer) as url:
        with pytest.raises(UserError, match=says):
            attach.models(url)
        over.set()


def test_an_answer_without_an_end_is_cut() -> None:
    def answer(line: socket.socket, _: bytes) -> None:
        line.sendall(OK)
        while True:
            line.sendall(b" " * 65536)

    with server(answer) as url, pytest.raises(UserError, match="more than 4 MB"):
        attach.models(url)


@cases("body", [b"[]", b"{}", b'{"data": [1]}', b'{"data": [{"id": 1}]}', b'{"data": [{"id": ""}]}', b"[" * 100_000])
def test_a_list_that_is_none_is_one_line(body: bytes) -> None:
    answer = OK + body
    with server(lambda line, _: line.sendall(answer)) as url, pytest.raises(UserError, match="is no list of models"):
        attach.models(url)


def test_names_of_models_are_printed_escaped_and_cut() -> None:
    with server(lambda line, _: line.sendall(listing("\x1b[31m" + "x" * 1000))) as url:
        engine = attach.Attached.__new__(attach.Attached)
        engine.matched = attach.match(["a"], [to for to, _ in attach.models(url)])
    text = engine.served()["a"]
    assert text.isprintable()
    assert text.startswith("served as \\x1b[31mxxx")
    assert len(text) < 200


# ------------------------------------------------------------------ patterns

CONFIG = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}
CONFIG |= {"vocab_size": 100, "max_position_embeddings": 64}


@cases(
    ("quantised", "says"),
    [
        ({"quant_method": "fp8", "ignored_layers": [r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]}, ""),
        ({"quant_method": "fp8", "ignored_layers": [r"re:(\w+\.?)+!"]}, "repeats might match for long"),
        ({"quant_method": "fp8", "ignored_layers": ["re:" + "a?" * 30 + "a" * 30]}, "repeats might match for long"),
        ({"quant_method": "gptq", "dynamic": {"-:.*.*.*!": {}}}, "repeats might match for long"),
        ({"quant_method": "fp8", "ignored_layers": ["re:("]}, "no regular expression"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "not a list of names"),
        ({"quant_method": "fp8", "ignored_layers": [1]}, "not a list of names"),
    ],
)
def test_a_pattern_of_a_checkpoint_ends(quantised: dict[str, object], says: str, tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantised}))
    if not says:
        assert checkpoint.read(str(path)).formats is not None
        return
    with pytest.raises(UserError, match=says):
        checkpoint.read(str(path))
