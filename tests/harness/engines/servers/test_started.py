"""Starts of llama.cpp, vLLM and SGLang: command lines, memory, what they say of themselves; no server."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness.engines import llamacpp, sglang, sglang_pdmux, vllm
from harness.engines.costs import shapes
from harness.engines.machine import Config, Served, machine
from harness.engines.servers import environments, folder, host, kvcached
from harness.engines.servers.engine import Servers
from harness.engines.servers.host import Card
from harness.loop import engine as engines
from harness.policy.types import MIB, Inst, Unsupported, UserError
from tests.cases import cases
from workloads.models import shape

CONFIG = Config(tuple(Served(m, shape("llama-3.2-1b")._replace(max_tokens=2048)) for m in ("a", "b")), pool_bytes=None)
PRICED = machine(CONFIG)
AT = Inst("a", (0,))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Return environments and models that a test can have."""
    monkeypatch.setattr(environments, "python", lambda name: Path(f"/env/{name}/python"))
    monkeypatch.setattr(environments, "lacking", lambda name: "")
    monkeypatch.setattr(folder, "weights", lambda shape, at, python, seed: at / f"{shape.name}-{seed}.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")


def launched(kind: Any, kv_bytes: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options and variables with which a server starts."""
    kind.ready(Path("/nowhere"))
    process = kind.seat(AT, kv_bytes, Path("/nowhere/log")).process
    argv = process.command
    options = {name: value for name, value in zip(argv, (*argv[1:], ""), strict=True) if name.startswith("--")}
    assert "sk-secret" not in " ".join((*argv, *process.env.values()))
    assert options["--port"] in process.ready_url
    return options, process.env


def test_llama_cpp_has_the_context_of_its_memory_and_a_slot_a_longest_request() -> None:
    kind = llamacpp.LlamaCpp(CONFIG, PRICED)
    model = kind.cluster.models["a"]
    assert model.kv_token_bytes == 4 * 2 * 4 * 64 * 2  # layers, K and V, heads, their size, bytes
    assert model.page_bytes == 256 * model.kv_token_bytes
    assert model.weight_bytes == shapes.weight_bytes(folder.TINY)
    options, _ = launched(kind, 3 * 2048 * model.kv_token_bytes + model.page_bytes)
    assert (options["--context"], options["--slots"], options["--alias"]) == (str(3 * 2048 + 256), "3", "a")
    assert options["--model"].endswith("llama-tiny-0.gguf")
    assert launched(kind, model.page_bytes)[0]["--slots"] == "1"
    assert kind.cluster.gpus[0].mem_bytes == 512 * MIB
    assert kind.facts["llama-tiny instead of"] == "llama-3.2-1b"


def test_a_host_serves_a_small_model_as_it_is() -> None:
    small = shape("llama-small")
    kind = llamacpp.LlamaCpp(replace(CONFIG, models=(Served("a", small),)), PRICED)
    assert kind.cluster.models["a"].weight_bytes == shapes.weight_bytes(small) < folder.SMALL_BYTES
    options, _ = launched(kind, kind.cluster.models["a"].page_bytes)
    assert options["--model"].endswith("llama-small-0.gguf")
    assert not any("instead" in what for what in kind.facts)


def test_vllm_sleeps_on_a_card_and_has_a_share_of_it() -> None:
    card = vllm.Vllm(CONFIG, PRICED, Card())
    model = card.cluster.models["a"]
    assert "Load.way:sleep" in card.can
    assert model.kv_token_bytes == shapes.kv_token_bytes(shape("llama-3.2-1b"))
    options, env = launched(card, 10**10)
    share = (model.weight_bytes + 10**10) / PRICED.spec.mem_bytes
    assert float(options["--gpu-memory-utilization"]) == pytest.approx(share, rel=1e-5)
    assert "--enable-sleep-mode" in options
    assert env["CUDA_VISIBLE_DEVICES"] == "0"


def test_vllm_on_a_host_has_its_kv_memory_in_bytes_and_cannot_sleep() -> None:
    kind = vllm.Vllm(CONFIG, PRICED)
    assert not any("sleep" in use for use in kind.can)
    assert kind.sleeps == {}
    assert kind.cluster.models["a"].kv_token_bytes == 2 * shapes.kv_token_bytes(folder.TINY)  # float32
    options, _ = launched(kind, 10**8)
    assert options["--kv-cache-memory-bytes"] == str(10**8)
    assert "--enable-sleep-mode" not in options


def test_sglang_needs_a_card() -> None:
    with pytest.raises(UserError, match="sglang needs a GPU"):
        sglang.Sglang(CONFIG, PRICED).ready(Path("/nowhere"))
    options, _ = launched(sglang.Sglang(CONFIG, PRICED, Card()), 10**10)
    assert "--enable-memory-saver" in options
    assert 0 < float(options["--mem-fraction-static"]) < 1


def test_sglangs_own_multiplexing_is_an_engine_that_says_so(tmp_path: Path) -> None:
    kind = sglang_pdmux.SglangPdMux(CONFIG, PRICED, Card())
    kind.ready(tmp_path)
    process = kind.seat(AT, 10**10, tmp_path / "log").process
    assert process is not None
    argv = process.command
    assert "--enable-pdmux" in argv
    file = Path(argv[argv.index("--pdmux-config-path") + 1])
    assert json.loads(file.read_text())["sm_group_num"] == int(argv[argv.index("--sm-group-num") + 1])
    assert all("SGLang's own PD-multiplexing" in how for how in kind.served().values())


# ------------------------------------------------------------------ what this host can do


ON_CARDS = ("vllm", "sglang", "sglang_pdmux")


@cases("name", ON_CARDS)
def test_without_a_card_nothing_of_a_card_is_offered(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "DEVICES", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    engine: Any = engines.find(name)(CONFIG, {"kv": "elastic", "sharing": "fluid"}, PRICED)
    assert engine.offers == {"kv": ("paged",), "process": ("gpu", "model")}
    assert not {use for use in engine.can if use.startswith(("Load.way:sleep", "Run."))}
    assert not engine.kind.elastic


@cases(("name", "mps", "kvcached"), product(ON_CARDS, (False, True), (False, True)))
def test_on_a_card_there_is_what_the_host_has_programs_for(
    name: str, mps: bool, kvcached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for device in ("nvidia0", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / device).touch()
    monkeypatch.setattr(host, "DEVICES", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if mps else None)
    monkeypatch.setattr(host, "version", lambda environment, package: "0.1.6" if kvcached else None)
    engine: Any = engines.find(name)(CONFIG, {}, PRICED)
    assert engine.kind.card == Card(2, "/usr/bin/nvidia-cuda-mps-control" if mps else None, kvcached)
    assert engine.offers["kv"] == (("paged", "elastic") if kvcached else ("paged",))
    assert engine.offers["sharing"] == (("turns", "fluid") if mps else ("turns",))
    assert ("Run.sms" in engine.can) == mps
    assert "Load.way:sleep" in engine.can
    assert "Run.chunk_tokens" not in engine.can


def test_a_package_of_an_environment_is_found_without_starting_it(tmp_path: Path) -> None:
    about = tmp_path / ".venv-vllm" / "lib" / "python3.12" / "site-packages" / "kvcached-0.1.6.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcached\nVersion: 0.1.6\n")
    assert host.version("vllm", "kvcached", tmp_path) == "0.1.6"
    assert host.version("sglang", "kvcached", tmp_path) is None


def test_level_2_is_there_only_with_weights_that_can_be_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert set(vllm.Vllm(CONFIG, PRICED, Card()).sleeps) == {"sleep"}
    files = tmp_path / "llama-3.2-1b"
    files.mkdir()
    (files / "config.json").touch()
    monkeypatch.setenv("MODELS_DIR", str(tmp_path))
    assert set(vllm.Vllm(CONFIG, PRICED, Card()).sleeps) == {"sleep"}  # a configuration alone is no weights
    (files / "model.safetensors").touch()
    card = vllm.Vllm(CONFIG, PRICED, Card())
    assert set(card.sleeps) == {"sleep", "sleep2"}
    assert "Load.way:sleep2" in card.can
    options, _ = launched(card, 10**10)
    assert options["--model"] == str(files)
    assert "--load-format" not in options
    assert card.facts["weights"] == "read"


@cases("of", [vllm.Vllm, sglang.Sglang])
def test_elastic_memory_is_taken_on_demand_below_a_limit_of_its_own(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = of(CONFIG, PRICED, Card(kvcached=True), {"kv": "elastic"})
    options, env = launched(kind, 10**10)
    share = options.get("--gpu-memory-utilization") or options["--mem-fraction-static"]
    assert float(share) == CONFIG.mem_fraction
    assert (env["ENABLE_KVCACHED"], env["KVCACHED_AUTOPATCH"]) == ("true", "1")
    layers = shape("llama-3.2-1b").layers
    assert kind.cluster.models["a"].page_bytes == layers * 2 * 2 * MIB  # a page id in every layer, for K and for V
    other = Inst("b", (0,))
    assert kind.account(AT) != kind.account(other)
    limits = list[tuple[str, int]]()
    monkeypatch.setattr(kvcached, "limit", lambda account, kv_bytes: limits.append((account, kv_bytes)))
    kind.resize(AT, 3 << 30)
    of(CONFIG, PRICED, Card(kvcached=True), {"kv": "paged"}).resize(AT, 3 << 30)
    assert limits == [(env["KVCACHED_IPC_NAME"], 3 << 30)]


def test_servers_that_are_compared_have_one_runner_where_kvcached_is() -> None:
    envs = [
        launched(vllm.Vllm(CONFIG, PRICED, Card(kvcached=True), {"kv": kv}), 10**9)[1] for kv in ("paged", "elastic")
    ]
    assert [env["VLLM_USE_V2_MODEL_RUNNER"] for env in envs] == ["0", "0"]
    assert "model runner" in vllm.Vllm(CONFIG, PRICED, Card(kvcached=True)).facts
    plain = vllm.Vllm(CONFIG, PRICED, Card())
    assert "VLLM_USE_V2_MODEL_RUNNER" not in launched(plain, 10**9)[1]
    assert "model runner" not in plain.facts


def test_the_pool_of_a_server_is_what_was_planned_beside_its_process() -> None:
    card = vllm.Vllm(CONFIG, PRICED, Card())
    assert launched(card, 10**10)[0]["--kv-cache-memory-bytes"] == str(10**10)
    assert card.cluster.models["a"].weight_bytes > shapes.weight_bytes(shape("llama-3.2-1b")) + 10**9  # activations
    elastic = vllm.Vllm(CONFIG, PRICED, Card(kvcached=True), {"kv": "elastic"})
    assert "--kv-cache-memory-bytes" not in launched(elastic, 10**10)[0]


def test_a_run_for_more_cards_than_there_are_is_skipped() -> None:
    with pytest.raises(Unsupported, match="2 GPUs, this host has 1"):
        vllm.Vllm(replace(CONFIG, gpus=2), PRICED, Card()).ready(Path())


# ------------------------------------------------------------------ MPS

DAEMON = """#!/bin/sh
# As nvidia-cuda-mps-control(1): -f is the daemon, which answers while it runs; else a command comes on standard input.
if [ "$1" = -f ]; then
    test ! -e "$CUDA_MPS_PIPE_DIRECTORY/broken" || { echo "no MPS on this card"; exit 1; }
    test -d "$CUDA_MPS_LOG_DIRECTORY" && test -z "$CUDA_VISIBLE_DEVICES" || exit 2
    echo $$ >"$CUDA_MPS_PIPE_DIRECTORY/pid"; exec sleep 600
fi
kill -0 "$(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")" 2>/dev/null && echo 100.0 || exit 1
"""


@pytest.fixture
def mps(tmp_path: Path) -> str:
    """Return the program of a daemon."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(DAEMON)
    program.chmod(0o755)
    return str(program)


def test_servers_have_their_part_of_the_sms_by_a_daemon_of_ours(
    mps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    kind = vllm.Vllm(CONFIG, PRICED, Card(1, mps), {"sharing": "fluid"})
    sms = kind.cluster.gpus[0].sms
    kind.ready(tmp_path)
    try:
        assert kind.mps is not None
        daemon = kind.mps.process
        seats = [kind.seat(AT, 10**10, tmp_path / "log", part).process for part in (None, 1, sms // 2, sms)]
        percentages = [seat.env.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") for seat in seats if seat is not None]
        assert percentages == [None, "1", "50", "100"]
        pipes = {seat.env["CUDA_MPS_PIPE_DIRECTORY"] for seat in seats if seat is not None}
        assert pipes == {str(tmp_path / "mps")}
        assert daemon.alive()
        daemon.stop()
        with pytest.raises(UserError, match="MPS has ended"):
            kind.seat(AT, 10**10, tmp_path / "log")
    finally:
        kind.close()
    assert not daemon.alive()
    kind.close()


def test_without_the_daemon_that_was_asked_for_nothing_is_served(mps: str, tmp_path: Path) -> None:
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "broken").touch()
    with pytest.raises(UserError, match=r"MPS does not start .*no MPS on this card"):
        vllm.Vllm(CONFIG, PRICED, Card(1, mps), {"sharing": "fluid"}).ready(tmp_path)
    turns = vllm.Vllm(CONFIG, PRICED, Card(1, mps), {"sharing": "turns"})
    turns.ready(tmp_path)
    assert turns.mps is None
    with pytest.raises(UserError, match="sharing=fluid needs MPS"):
        vllm.Vllm(replace(CONFIG, sharing="fluid"), PRICED, Card()).ready(tmp_path)


def test_engines_in_front_of_servers_are_made_without_any() -> None:
    for name in ("llamacpp", "vllm", "sglang", "sglang_pdmux"):
        engine = engines.find(name)(CONFIG, {}, PRICED)
        assert isinstance(engine, Servers)
        assert set(engine.cluster.models) == {"a", "b"}
        assert engine.measured_on["cpu"]
        engine.close()
