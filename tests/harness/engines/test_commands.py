"""Command lines and checkpoints of servers: what is said, and that nothing says what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.engines import commands
from harness.engines.commands import Command, Cpu, Gpu, Serve
from harness.engines.servers import kvcached
from harness.engines.servers.folder import TINY, dummy
from harness.policy.types import Experts, UserError
from tests.cases import cases

SERVE = Serve("a", Path("/models/a"), 12_345, 2048, 64, 512)
PYTHON = Path("/venv/bin/python")
EVERY = [
    commands.vllm(PYTHON, SERVE, Gpu()),
    commands.vllm(PYTHON, SERVE, Cpu(1, 1 << 26), sleep=True),
    commands.sglang(PYTHON, SERVE, Gpu()),
    commands.llamacpp(PYTHON, SERVE, Cpu(1, 0), context=2048),
]


@cases("command", EVERY)
def test_a_server_is_asked_where_it_was_told_to_listen(command: Command) -> None:
    assert command.ready_url == "http://127.0.0.1:12345/health"
    assert command.argv[0] == str(PYTHON)
    assert command.argv[command.argv.index("--port") + 1] == "12345"
    assert "0.0.0.0" not in command.argv


def test_a_gpu_is_shared_by_memory_then_sms_then_pages() -> None:
    def env(on: Gpu) -> dict[str, str]:
        envs = [dict(of(PYTHON, SERVE, on).env) for of in (commands.vllm, commands.sglang)]
        names = [name for name in envs[0] if name.startswith(("CUDA", "KVCACHED", "ENABLE"))]
        assert [envs[1].get(name) for name in names] == [envs[0][name] for name in names]
        return {name: envs[0][name] for name in names}

    assert env(Gpu(2, 0.4)) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert env(Gpu(0, 0.4, sm_percent=30)) == {"CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}
    assert env(Gpu(0, 0.4, elastic="bench-a")) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "ENABLE_KVCACHED": "true",
        "KVCACHED_AUTOPATCH": "1",
        "KVCACHED_IPC_NAME": "bench-a",
    }


def account(limit: int, used: int) -> bytes:
    """Return an account as kvcached 0.1.6 lays it out: limit, bytes in use, bytes kept ready."""
    return np.array([limit, used, 5], np.int64).tobytes()


def test_a_limit_is_written_into_a_servers_account_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvcached, "FOLDER", tmp_path)
    (tmp_path / "bench-a").write_bytes(account(9 << 30, 7))
    kvcached.limit("bench-a", 3 << 30)
    assert (tmp_path / "bench-a").read_bytes() == account(3 << 30, 7)
    with pytest.raises(UserError, match=r"no account .*bench-b: the server runs without kvcached, or has ended"):
        kvcached.limit("bench-b", 1)
    assert not (tmp_path / "bench-b").exists()
    (tmp_path / "bench-c").write_bytes(bytes(16))
    with pytest.raises(UserError, match=r"bench-c has 16 bytes, an account of kvcached 0.1.6 has 24"):
        kvcached.limit("bench-c", 1)


def test_what_a_vllm_on_a_card_is_told() -> None:
    """Golden: every option and variable of a static and of an elastic server beside each other."""
    common = (
        "/venv/bin/python -m vllm.entrypoints.openai.api_server --model /models/a --served-model-name a --load-format"
        " dummy --host 127.0.0.1 --port 12345 --disable-uvicorn-access-log --max-model-len 2048 --max-num-seqs 64"
        " --max-num-batched-tokens 512 --no-enable-prefix-caching --generation-config vllm --gpu-memory-utilization "
    )
    static = commands.vllm(PYTHON, SERVE, Gpu(0, 0.25, kv_bytes=2 << 30, v1_runner=True), sleep=True)
    assert " ".join(static.argv) == common + "0.25 --kv-cache-memory-bytes 2147483648 --enable-sleep-mode"
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": "0"}
    v1 = {**quiet, "VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert static.env == {**v1, "VLLM_SERVER_DEV_MODE": "1"}
    elastic = commands.vllm(PYTHON, SERVE, Gpu(0, 0.9, elastic="bench-a", v1_runner=True))
    assert " ".join(elastic.argv) == common + "0.9"
    kvcached_own = {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1", "KVCACHED_IPC_NAME": "bench-a"}
    assert elastic.env == {**v1, **kvcached_own}
    assert commands.vllm(PYTHON, SERVE, Gpu()).env == quiet  # without kvcached the runner is vLLM's choice


def test_what_an_operator_types_states_the_sizes_that_the_bench_starts_a_server_with() -> None:
    on = Gpu(2, 0.25, elastic="bench-a", v1_runner=True, others=(3,))
    typed, ours = commands.vllm_serve(SERVE, on), commands.vllm(PYTHON, SERVE, on)
    assert " ".join(typed.argv) == (
        "vllm serve /models/a --served-model-name a --port 12345 --max-model-len 2048 --max-num-seqs 64"
        " --max-num-batched-tokens 512 --gpu-memory-utilization 0.25 --tensor-parallel-size 2"
    )
    assert typed.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert typed.env.items() <= ours.env.items()
    sizes = typed.argv[typed.argv.index("--max-model-len") : typed.argv.index("--tensor-parallel-size")]
    assert set(sizes) <= set(ours.argv)


def test_sglangs_backends_are_its_own_choice_unless_named() -> None:
    assert not {"--attention-backend", "--sampling-backend"} & set(commands.sglang(PYTHON, SERVE, Gpu()).argv)
    argv = commands.sglang(PYTHON, SERVE, Gpu(), attention="triton", sampling="pytorch").argv
    assert argv[-6:-2] == ("--attention-backend", "triton", "--sampling-backend", "pytorch")


def test_sleep_waits_for_running_requests() -> None:
    assert commands.vllm_sleep(1).path == "/sleep?level=1&mode=wait"
    assert commands.vllm_sleep(2).path == "/sleep?level=2&mode=wait"


def test_weights_that_were_thrown_away_are_read_before_kv_is_taken() -> None:
    assert [order.path for order in commands.vllm_wake(1)] == ["/wake_up"]
    paths = [order.path for order in commands.vllm_wake(2)]
    assert paths == ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]


@cases("of", [commands.vllm, commands.sglang])
def test_weights_are_drawn_unless_the_folder_has_them(of: Callable[[Path, Serve, Gpu], Command]) -> None:
    argv = of(PYTHON, SERVE, Gpu()).argv
    assert argv[argv.index("--load-format") + 1] == "dummy"
    assert "--load-format" not in of(PYTHON, replace(SERVE, drawn=False), Gpu()).argv


@cases("name", ["", "a b", "a/b", "x" * 65])
def test_an_account_keeps_its_name(name: str) -> None:
    with pytest.raises(ValueError, match="would rename the account"):
        Gpu(elastic=name)


def test_vllms_development_routes_are_open_only_for_sleep() -> None:
    assert "VLLM_SERVER_DEV_MODE" not in commands.vllm(PYTHON, SERVE, Gpu()).env
    assert commands.vllm(PYTHON, SERVE, Gpu(), sleep=True).env["VLLM_SERVER_DEV_MODE"] == "1"


def test_a_dummy_folder_is_made_once_for_each_shape(tmp_path: Path) -> None:
    first = dummy(TINY, tmp_path)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert dummy(TINY._replace(name="another name"), tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert dummy(TINY._replace(layers=2), tmp_path) != first
    assert len(list(tmp_path.iterdir())) == 2
    config = json.loads((first / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (4, 256, 1000)
    vocab = json.loads((first / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(TINY.vocab))
    with pytest.raises(UserError, match="no gate"):
        dummy(TINY._replace(gated=False), tmp_path)
    with pytest.raises(UserError, match="has a mixture of experts: a dense Llama in bf16"):
        dummy(TINY._replace(experts=Experts(layers=4, routed=8, top=2, ffn=64)), tmp_path)
    with pytest.raises(UserError, match="has a KV cache in fp8"):
        dummy(TINY._replace(kv_format="fp8"), tmp_path)
