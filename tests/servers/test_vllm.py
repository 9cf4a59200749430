"""vLLM on the processor, for real: two tiny models side by side, each with the length that was asked for, then gone."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

import psutil
import pytest

from harness.engines.commands import Command, Cpu, Serve
from harness.engines.commands import vllm as command
from harness.engines.servers.folder import TINY, dummy
from tests.servers.ask import complete
from tests.servers.conftest import Start

pytestmark = pytest.mark.servers
PROMPT = list(range(300, 340))
# Runs in vLLM's environment: reads command lines with its own parser, and looks for its routes.
READ = """
import json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.dev.rpc.api_router import router as rpc
from vllm.entrypoints.serve.dev.sleep.api_router import router as sleep
parser = make_arg_parser(FlexibleArgumentParser())
parsed = [vars(parser.parse_args(argv)) for argv in json.load(sys.stdin)]
plain = (str, int, float, list, type(None))
routes = [[route.path, sorted(route.methods)] for router in (rpc, sleep) for route in router.routes]
print("read:" + json.dumps([[{k: v for k, v in one.items() if isinstance(v, plain)} for one in parsed], routes]))
"""


def described(python: Path, cache: Path, model: str, port: int) -> Command:
    """Return a server of the tiny model."""
    serve = Serve(model, dummy(TINY, cache), port, 512, 4, 256)
    return command(python, serve, Cpu(threads=1, kv_bytes=64 << 20))


@pytest.mark.timeout(1800)
def test_two_servers_answer_and_end_with_all_their_processes(vllm: Path, cache: Path, start: Start) -> None:
    servers = {model: start(model, partial(described, vllm, cache, model)) for model in "ab"}
    for model, server in servers.items():
        answer = complete(server.ready_url, model, PROMPT, 9)
        assert answer.usage["prompt_tokens"] == len(PROMPT)
        assert answer.usage["completion_tokens"] == 9
        assert answer.reasons == ["length"]
        assert answer.done
        assert len("".join(answer.texts).split()) == 9  # a word a token; a busy server may send two in one chunk
    for model, server in servers.items():
        members = server.members()
        assert len(members) > 1  # its engine is a process of its own
        heard = {c.laddr.ip for m in members for c in m.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        assert heard == {"127.0.0.1"}, model
        server.stop(60.0)
        assert [member for member in members if member.is_running()] == []


@pytest.mark.timeout(900)
def test_its_parser_reads_every_command_line_as_meant(vllm: Path, tmp_path: Path) -> None:
    from harness.engines.commands import Gpu, vllm_sleep, vllm_wake

    serve = Serve("a", tmp_path / "a", 12_345, 2048, 64, 512)
    common: dict[str, object] = {
        "model": str(tmp_path / "a"),
        "served_model_name": ["a"],
        "load_format": "dummy",
        "host": "127.0.0.1",
        "port": 12_345,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "disable_uvicorn_access_log": True,
        "generation_config": "vllm",
    }
    cases: list[tuple[Command, dict[str, object]]] = [
        (command(Path("python"), serve, Gpu(0, 0.45)), {"gpu_memory_utilization": 0.45, "enable_sleep_mode": True}),
        (command(Path("python"), serve, Gpu(0, 0.9, elastic="a")), {"enable_sleep_mode": True, "enforce_eager": False}),
        (
            command(Path("python"), serve, Cpu(1, 1 << 26)),
            {"kv_cache_memory_bytes": 1 << 26, "dtype": "float32", "enforce_eager": True, "enable_sleep_mode": False},
        ),
    ]
    argvs = json.dumps([launch.argv[3:] for launch, _ in cases])
    run = subprocess.run([str(vllm), "-c", READ], input=argvs, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("read:"))
    parsed, routes = json.loads(line.removeprefix("read:"))
    for values, (_, meant) in zip(parsed, cases, strict=True):
        assert {name: values[name] for name in common | meant} == common | meant
    orders = [vllm_sleep(1), vllm_sleep(2), *vllm_wake(1), *vllm_wake(2)]
    assert all([order.path.split("?")[0], ["POST"]] in routes for order in orders)
