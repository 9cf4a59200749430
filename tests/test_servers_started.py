"""What llama.cpp, vLLM and SGLang are started with: command lines, memory, what they say of themselves; no server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.engines import llamacpp, sglang, vllm
from harness.engines.costs import shapes
from harness.engines.machine import Config, Served, machine
from harness.engines.servers import environments, folder, started
from harness.engines.servers.engine import Servers
from harness.policy.types import MIB, Inst, UserError
from workloads.models import shape

CONFIG = Config(tuple(Served(m, shape("llama-3.2-1b")._replace(max_tokens=2048)) for m in ("a", "b")), pool_bytes=None)
PRICED = machine(CONFIG)
AT = Inst("a", (0,))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Environments and models that a test can have."""
    monkeypatch.setattr(environments, "python", lambda name: Path(f"/env/{name}/python"))
    monkeypatch.setattr(folder, "weights", lambda shape, at, python, seed: at / f"{shape.name}-{seed}.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")


def said(kind: Any, kv_bytes: int) -> tuple[dict[str, str], dict[str, str]]:
    """The options and variables with which a server starts."""
    kind.ready(Path("/nowhere"))
    process = kind.seat(AT, kv_bytes, Path("/nowhere/log")).process
    argv = process.command
    options = {name: value for name, value in zip(argv, (*argv[1:], ""), strict=True) if name.startswith("--")}
    assert "sk-secret" not in " ".join((*argv, *process.env.values()))
    assert options["--port"] in process.ready_url
    return options, process.env


def test_llama_cpp_has_the_context_of_its_memory_and_a_slot_a_longest_request() -> None:
    kind = llamacpp.LlamaCpp(CONFIG, PRICED, on_gpu=False)
    model = kind.cluster.models["a"]
    assert model.kv_token_bytes == 4 * 2 * 4 * 64 * 2  # layers, K and V, heads, their size, bytes
    assert model.page_bytes == 256 * model.kv_token_bytes
    assert model.weight_bytes == shapes.weight_bytes(folder.TINY)
    options, _ = said(kind, 3 * 2048 * model.kv_token_bytes + model.page_bytes)
    assert (options["--context"], options["--slots"], options["--alias"]) == (str(3 * 2048 + 256), "3", "a")
    assert options["--model"].endswith("llama-tiny-0.gguf")
    assert said(kind, model.page_bytes)[0]["--slots"] == "1"
    assert kind.cluster.gpus[0].mem_bytes == 512 * MIB
    assert kind.facts["every model a"] == "llama-tiny"


def test_vllm_sleeps_on_a_card_and_has_a_share_of_it() -> None:
    card = vllm.Vllm(CONFIG, PRICED, on_gpu=True)
    model = card.cluster.models["a"]
    assert "Load.way:sleep" in card.can
    assert model.kv_token_bytes == shapes.kv_token_bytes(shape("llama-3.2-1b"))
    options, env = said(card, 10**10)
    share = (model.weight_bytes + 10**10) / PRICED.spec.mem_bytes
    assert float(options["--gpu-memory-utilization"]) == pytest.approx(share, rel=1e-5)
    assert "--enable-sleep-mode" in options
    assert env["CUDA_VISIBLE_DEVICES"] == "0"


def test_vllm_on_a_host_has_its_kv_memory_in_bytes_and_cannot_sleep() -> None:
    host = vllm.Vllm(CONFIG, PRICED, on_gpu=False)
    assert not any("sleep" in use for use in host.can)
    assert host.sleeps == {}
    assert host.cluster.models["a"].kv_token_bytes == 2 * shapes.kv_token_bytes(folder.TINY)  # float32
    options, _ = said(host, 10**8)
    assert options["--kv-cache-memory-bytes"] == str(10**8)
    assert "--enable-sleep-mode" not in options


def test_sglang_needs_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = sglang.Sglang(CONFIG, PRICED)
    monkeypatch.setattr(started, "DRIVER", Path("/no/driver"))
    with pytest.raises(UserError, match="sglang needs a GPU"):
        kind.ready(Path("/nowhere"))
    monkeypatch.setattr(started, "DRIVER", Path("/dev/null"))
    options, _ = said(kind, 10**10)
    assert "--enable-memory-saver" in options
    assert 0 < float(options["--mem-fraction-static"]) < 1


def test_engines_in_front_of_servers_are_made_without_any() -> None:
    for module in (llamacpp, vllm, sglang):
        engine = module.make(CONFIG, {}, PRICED)
        assert isinstance(engine, Servers)
        assert set(engine.cluster.models) == {"a", "b"}
        assert engine.measured_on["cpu"]
        engine.close()
