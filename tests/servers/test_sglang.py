"""SGLang, which cannot serve on a CPU: its own parser, loader and schemas read what we would send it."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.engines.commands import PDMUX, SGLANG_RELEASE, SGLANG_RESUME, Command, Gpu, Serve
from harness.engines.commands import sglang as command
from harness.engines.servers.environments import variables
from tests.servers.ask import body

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]
# Runs in SGLang's environment: reads command lines, files and requests; writes what SGLang made of them.
READ = """
import argparse, json, sys, warnings
warnings.simplefilter("ignore")
asked = json.load(sys.stdin)
from sglang.srt.server_args import ServerArgs
from sglang.srt.multiplex.pdmux_context import load_pdmux_config
from sglang.srt.entrypoints.openai import protocol
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
parsed = [vars(parser.parse_args(argv)) for argv in asked["argv"]]
split = vars(load_pdmux_config(asked["split"]))
request = protocol.CompletionRequest.model_validate(asked["body"])
choice = protocol.CompletionResponseStreamChoice(index=0, text=" w300")
last = protocol.CompletionResponseStreamChoice(index=0, text="", finish_reason="length")
usage = protocol.UsageInfo(prompt_tokens=3, completion_tokens=2, total_tokens=5)
chunks = [
    protocol.CompletionStreamResponse(id="0", model="a", choices=choices, usage=used)
    for choices, used in (([choice], None), ([last], None), ([], usage))
]
print("read:" + json.dumps({
    "parsed": [{k: v for k, v in one.items() if isinstance(v, (str, int, float, type(None)))} for one in parsed],
    "split": split, "request": request.model_dump(mode="json"), "unknown": request.model_extra,
    "chunks": [chunk.model_dump(mode="json") for chunk in chunks],
}))
"""


def commands(folder: Path) -> list[tuple[Command, dict[str, Any]]]:
    """Return every command line that we can write for it, with what it shall mean."""
    serve = Serve("a", Path("/models/a"), 12_345, 2048, 64, 512)
    cases = []
    for split, saver, elastic in itertools.product((None, folder / "pdmux.yaml"), (False, True), (None, "a")):
        on = Gpu(index=1, fraction=0.45, elastic=elastic)
        meant = {
            "model_path": "/models/a",
            "served_model_name": "a",
            "load_format": "dummy",
            "host": "127.0.0.1",
            "port": 12_345,
            "context_length": 2048,
            "max_running_requests": 64,
            "mem_fraction_static": 0.45,
            "disable_radix_cache": True,
            "enable_memory_saver": saver,
            "chunked_prefill_size": -1 if split else 512,
            "enable_pdmux": bool(split),
            "disable_overlap_schedule": bool(split),
            "pdmux_config_path": str(split) if split else None,
            "sm_group_num": 8,
        }
        cases.append((command(Path("python"), serve, on, saver=saver, pdmux=split), meant))
    return cases


@pytest.fixture(scope="module")
def read(sglang: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the values that SGLang read, and beside them those that were meant."""
    folder = tmp_path_factory.mktemp("splits")
    cases = commands(folder)
    split = folder / "pdmux.yaml"
    split.write_text(json.dumps(PDMUX))
    asked = {
        "argv": [launch.argv[3:] for launch, _ in cases],
        "split": str(split),
        "body": body("a", [300, 301, 302], 2),
    }
    run = subprocess.run(
        [str(sglang), "-c", READ],
        input=json.dumps(asked),
        env=variables({"PATH": "/usr/bin:/bin", "HOME": str(folder)}, {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("read:"))
    parsed: dict[str, Any] = json.loads(line.removeprefix("read:"))
    return parsed | {"meant": [meant for _, meant in cases]}


def test_its_parser_reads_every_command_line_as_meant(read: dict[str, Any]) -> None:
    assert len(read["parsed"]) == 8
    for parsed, meant in zip(read["parsed"], read["meant"], strict=True):
        assert {name: parsed[name] for name in meant} == meant


def test_its_loader_reads_the_split_as_meant(read: dict[str, Any]) -> None:
    assert read["split"] == {**PDMUX, "manual_divisions": []}


def test_its_schema_knows_every_field_of_a_request(read: dict[str, Any]) -> None:
    asked = body("a", [300, 301, 302], 2)
    assert not read["unknown"]
    assert {name: read["request"][name] for name in asked if name != "stream_options"} == {
        name: value for name, value in asked.items() if name != "stream_options"
    }
    assert read["request"]["stream_options"]["include_usage"] is True


def test_its_chunks_are_tokens_then_an_end_then_usage_alone(read: dict[str, Any]) -> None:
    token, last, usage = read["chunks"]
    assert [choice["text"] for choice in token["choices"]] == [" w300"]
    assert [(choice["text"], choice["finish_reason"]) for choice in last["choices"]] == [("", "length")]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2


def test_its_memory_saver_has_our_orders(sglang: Path) -> None:
    """Read in its sources, which do not import without torchvision: the routes, and fields that all have defaults."""
    find = "import importlib.util; print(importlib.util.find_spec('sglang').submodule_search_locations[0])"
    run = subprocess.run([str(sglang), "-c", find], capture_output=True, text=True, check=True)
    root = Path(run.stdout.strip()) / "srt"
    server = ast.parse((root / "entrypoints" / "http_server.py").read_text())
    routes = {
        ast.literal_eval(decorator.args[0]): (handler, ast.literal_eval(decorator.keywords[0].value))
        for handler in ast.walk(server)
        if isinstance(handler, ast.AsyncFunctionDef)
        for decorator in handler.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "app.api_route"
    }
    structs = {
        node.name: node
        for node in ast.walk(ast.parse((root / "managers" / "io_struct.py").read_text()))
        if isinstance(node, ast.ClassDef)
    }
    for order in (SGLANG_RELEASE, SGLANG_RESUME):
        handler, methods = routes[order.path]
        assert "POST" in methods
        assert handler.args.args[0].annotation is not None
        (struct,) = (name for name in structs if name in ast.unparse(handler.args.args[0].annotation))
        fields = [line for line in structs[struct].body if isinstance(line, ast.AnnAssign)]
        assert [ast.unparse(line.target) for line in fields] == ["tags"]
        assert [ast.unparse(line.value) for line in fields if line.value] == ["None"]  # all of its memory
        assert json.loads(order.body) == {}
