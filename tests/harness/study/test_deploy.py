"""Files that start an answer of `bench size`: their settings are the simulated servers', and they read back whole."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from harness.cli.size import size as command
from harness.engines.commands import Gpu, Serve
from harness.policy.types import UserError
from harness.run.setup import Setup
from harness.study import deploy
from harness.study.deploy import Plan, Seat, Way
from harness.study.size import SizeSearch
from harness.study.sized import Question, Sized
from tests.bench import bench, ok
from tests.cases import cases
from tests.harness.study.test_size_search import question, sized

yaml = pytest.importorskip("yaml")
MODELS = "llama-3.1-8b,llama-3.2-1b*2"
LOOSE: dict[str, Any] = {"rule": "absolute:ttft=60,tpot=5", "growth": ()}


def ask(system: str, gpus: int = 1, models: str = MODELS, **more: Any) -> Question:
    setting = {"trace": "sample", "models": models}
    return question([system], setting=setting, least=gpus, most=gpus, **LOOSE | more)


def answered(asked: Question, out: Path) -> tuple[Sized, Plan]:
    answer = SizeSearch(asked, out).done()
    return answer, deploy.plan(answer, out)


def option(argv: list[str] | tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def typed(text: str) -> list[tuple[dict[str, str], list[str]]]:
    """Return variables and words of each server of a shell script."""
    servers = []
    for line in text.splitlines():
        if " vllm serve " in line:
            words = shlex.split(line.removesuffix(" &"))
            at = words.index("vllm")
            servers.append((dict(word.split("=", 1) for word in words[:at]), words[at:]))
    return servers


def test_fixed_shares_of_a_card_are_what_its_models_take_and_no_more_than_the_server_has(tmp_path: Path) -> None:
    answer, plan = answered(ask("static"), tmp_path)
    work = SizeSearch(answer.asked, tmp_path)
    setup = Setup(work.spec("h100", "static", 1, work.views[0], 0))
    its, text = setup.settings, deploy.files(plan, "vllm")["vllm.sh"]
    servers = typed(text)
    assert {option(argv, "--served-model-name") for _, argv in servers} == set(setup.models.names)
    shares = [float(option(argv, "--gpu-memory-utilization")) for _, argv in servers]
    assert its.mem_fraction - 0.01 < sum(shares) <= its.mem_fraction
    card = setup.machine.of("h100").spec.mem_bytes
    for (env, argv), seat, share in zip(servers, plan.seats, shares, strict=True):
        assert env == {"CUDA_VISIBLE_DEVICES": "0"}
        assert (option(argv, "--max-num-seqs"), option(argv, "--max-num-batched-tokens")) == ("1024", "8192")
        assert (its.batch_cap, its.chunk_tokens) == (1024, 8192)
        longest = setup.served.members[0].shape.max_tokens
        assert option(argv, "--max-model-len") == str(longest)
        assert share * card > seat.weight_bytes
    assert servers[0][1][:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]
    assert len({option(argv, "--port") for _, argv in servers}) == 3
    ports = [option(argv, "--port") for _, argv in servers]
    assert [line for line in text.splitlines() if line.startswith("up ")] == [f"up {port}" for port in ports]
    assert "# server: vLLM 0.15, 8,192 tokens a step, 1,024 sequences, 0.90" in text


def test_yaml_reads_back_with_the_settings_of_the_lines(tmp_path: Path) -> None:
    _, plan = answered(ask("static"), tmp_path)
    servers = typed(deploy.files(plan, "vllm")["vllm.sh"])
    swap = yaml.safe_load(deploy.files(plan, "llama-swap")["llama-swap.yaml"])
    assert [shlex.split(model["cmd"]) for model in swap["models"].values()] == [argv for _, argv in servers]
    assert [model["env"] for model in swap["models"].values()] == [["CUDA_VISIBLE_DEVICES=0"]] * 3
    for name, model in swap["models"].items():
        argv = shlex.split(model["cmd"])
        assert option(argv, "--served-model-name") == name
        assert model["proxy"] == f"http://127.0.0.1:{option(argv, '--port')}"
        assert (model["ttl"], model["concurrencyLimit"]) == (0, 1024)
    assert swap["groups"] == {"gpu 0": {"swap": False, "exclusive": False, "members": list(swap["models"])}}
    assert swap["hooks"] == {"on_startup": {"preload": list(swap["models"])}}
    chart = yaml.safe_load(deploy.files(plan, "helm")["values.yaml"])["servingEngineSpec"]
    assert chart["runtimeClassName"] == "nvidia"
    for spec, (_, argv) in zip(chart["modelSpec"], servers, strict=True):
        its = spec["vllmConfig"]
        assert spec["modelURL"] == argv[2]
        assert str(its["maxModelLen"]) == option(argv, "--max-model-len")
        assert str(its["maxNumSeqs"]) == option(argv, "--max-num-seqs")
        assert its["gpuMemoryUtilization"] == float(option(argv, "--gpu-memory-utilization"))
        assert str(its["tensorParallelSize"]) == option(argv, "--tensor-parallel-size")
        for name in ("--served-model-name", "--max-num-batched-tokens"):
            assert option(its["extraArgs"], name) == option(argv, name)
        assert (spec["requestGPU"], spec["env"]) == (0, [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"}])
        assert spec["tag"] == "v0.15.0"
    assert len({spec["name"] for spec in chart["modelSpec"]}) == 3


def test_memory_on_demand_is_kvcacheds_and_who_takes_turns_is_llama_swaps(tmp_path: Path) -> None:
    _, plan = answered(ask("elastic"), tmp_path)
    for env, argv in typed(deploy.files(plan, "vllm")["vllm.sh"]):
        assert env["ENABLE_KVCACHED"] == "true"
        assert option(argv, "--gpu-memory-utilization") == "0.9"
    assert len({seat.on.elastic for seat in plan.seats}) == 3
    _, plan = answered(ask("swap:llama-swap", target=0.51, rule="absolute:ttft=600,tpot=50"), tmp_path)
    swap = yaml.safe_load(deploy.files(plan, "llama-swap")["llama-swap.yaml"])
    assert swap["groups"]["gpu 0"]["swap"] is True
    assert "hooks" not in swap
    assert all("--gpu-memory-utilization 0.9 " in model["cmd"] for model in swap["models"].values())
    for way in ("vllm", "helm"):
        with pytest.raises(UserError, match=r"models take turns on GPU 0.*--deploy llama-swap"):
            deploy.files(plan, way)


def test_a_model_of_several_gpus_has_them_all_and_one_alone_asks_for_whole_ones(tmp_path: Path) -> None:
    _, plan = answered(ask("static", 3, "llama-3.3-70b:dtype=fp8:tp=2,llama-3.2-1b"), tmp_path)
    of = {seat.serve.model.partition("/")[0]: seat for seat in plan.seats}
    large = of["llama-3.3-70b"]
    assert large.command.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, large.gpus))
    assert option(large.command.argv, "--tensor-parallel-size") == "2"
    assert option(large.command.argv, "--quantization") == "fp8"
    assert not any(seat.beside for seat in plan.seats)
    specs = yaml.safe_load(deploy.files(plan, "helm")["values.yaml"])["servingEngineSpec"]["modelSpec"]
    assert sorted(spec["requestGPU"] for spec in specs) == [1, 2]
    assert all(spec["env"] == [] and spec["vllmConfig"]["gpuMemoryUtilization"] == 0.9 for spec in specs)


def seat(model: str, port: int, gpu: int, node: int, copy: int = 1) -> Seat:
    return Seat(
        Serve(model, Path("o/m"), port, 99, 9, 9, drawn=False), (8 * node + gpu,), Gpu(gpu, 0.9), node, copy=copy
    )


def test_nodes_have_a_file_each_and_copies_a_name_each() -> None:
    plan = Plan((seat("a", 8001, 0, 0), seat("a", 8002, 1, 0, 2), seat("b", 8003, 0, 1)), "0.15", ("note",))
    assert list(deploy.files(plan, "vllm")) == ["vllm-node0.sh", "vllm-node1.sh"]
    first = yaml.safe_load(deploy.files(plan, "llama-swap")["llama-swap-node0.yaml"])
    assert list(first["models"]) == ["a", "a:2"]
    assert first["models"]["a:2"]["useModelName"] == "a"
    specs = yaml.safe_load(deploy.files(plan, "helm")["values.yaml"])["servingEngineSpec"]["modelSpec"]
    assert [(spec["replicaCount"], spec["requestGPU"]) for spec in specs] == [(2, 1), (1, 1)]


@cases("name", ["no", "on", "y", "true", "null", "1.0", "a: b", "- x", "# c", "{x}", 'q"q', "ä/1"])
def test_any_name_of_a_model_reads_back(name: str) -> None:
    plan = Plan((seat(name, 8001, 0, 0),), "", ())
    swap = yaml.safe_load(deploy.files(plan, "llama-swap")["llama-swap.yaml"])
    assert list(swap["models"]) == [name]
    assert swap["groups"]["gpu 0"]["members"] == [name]
    ((_, argv),) = typed(deploy.files(plan, "vllm")["vllm.sh"].replace("CUDA", "X=1 CUDA"))
    assert option(argv, "--served-model-name") == name


def test_servers_load_a_checkpoints_folder_or_a_gguf_file_by_their_whole_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("config.json", "mine.gguf"):
        (tmp_path / "mine" / name).touch()
    assert deploy.weights("mine/config.json") == tmp_path / "mine"
    assert deploy.weights("mine/mine.gguf") == tmp_path / "mine/mine.gguf"
    assert deploy.weights("llama-3.1-8b") == Path("meta-llama/Llama-3.1-8B-Instruct")


def test_what_cannot_be_deployed_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no strategy holds the target"):
        deploy.plan(sized(best=None), tmp_path)
    for words, why in (("--host sglang-0.5", "are SGLang's"), ("--set engine=vllm", "starts its servers itself")):
        told = bench("size", "--trace", "sample", "--models", MODELS, *words.split(), "--deploy", "vllm")
        assert told.exit_code == 2
        assert why in told.stderr
    assert next(p.type.choices for p in command.params if p.name == "deploy") == deploy.WAYS  # type: ignore[attr-defined]


@cases(("way", "name"), [("vllm", "vllm.sh"), ("llama-swap", "llama-swap.yaml"), ("helm", "values.yaml")])
def test_the_command_writes_the_file_beside_the_answer_and_names_it(tmp_path: Path, way: Way, name: str) -> None:
    asked = f"size --trace sample --models {MODELS} --gpus 1 --systems static --windows 1 --no-plot --deploy {way}"
    told = ok(*asked.split(), "--grow", "", "--slo", LOOSE["rule"], "-o", tmp_path)
    (path,) = tmp_path.glob(f"sample-size-*/{name}")
    assert f" · {path}" in told
