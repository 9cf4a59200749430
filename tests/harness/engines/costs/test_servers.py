"""Settings of servers: by release and card as the releases' own files have them, and what runs take of them."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engines.costs import quantities, servers
from harness.engines.costs.servers import Admission, Settings
from harness.engines.sim.engine import Sim
from harness.loop.replay import replay
from harness.loop.system import find
from harness.policy.types import GIB, Infeasible, UserError
from harness.run.resolve import resolve
from harness.run.server_line import server_line
from harness.run.setup import Setup
from harness.run.spec import Spec
from harness.study.bases import base_specs
from harness.study.compare import filled
from harness.study.study import STUDIES
from tests.bench import bench, mistake
from tests.cases import cases

NAMED = {"chunk_tokens": 2048, "batch_cap": 256, "mem_fraction": 0.9, "admission": "prompt"}

# Tokens and sequences of a step, share of the card: read a second time from the releases' wheels, apart from the file.
# vLLM: vllm/engine/arg_utils.py (get_batch_defaults, before 0.12 _set_default_args), OPENAI_API_SERVER, and
# vllm/config/cache.py (before 0.10 vllm/config.py), gpu_memory_utilization. 0.6: vllm/config.py, SchedulerConfig.
GOLDEN = {
    "vllm-0.6": {"h100": (0, 256, 0.9), "a100-80g": (0, 256, 0.9), "l40s": (0, 256, 0.9), "b200": (0, 256, 0.9)},
    "vllm-0.8": {"h100": (8192, 1024, 0.9), "a100-80g": (8192, 1024, 0.9), "l40s": (2048, 256, 0.9)},
    "vllm-0.9": {"h100": (8192, 1024, 0.9), "a100-80g": (2048, 256, 0.9), "l40s": (2048, 256, 0.9)},
    "vllm-0.11": {"h100": (8192, 1024, 0.9), "a100-40g": (2048, 256, 0.9), "a10": (2048, 256, 0.9)},
    "vllm-0.12": {"h100": (8192, 1024, 0.9), "a100-80g": (2048, 256, 0.9), "h20": (8192, 1024, 0.9)},
    "vllm-0.14": {"h100": (8192, 1024, 0.9), "mi300x": (8192, 1024, 0.9), "l4": (2048, 256, 0.9)},
    "vllm-0.15": {
        **dict.fromkeys(("h100", "h200", "h800", "b200", "mi300x", "rtx-pro-6000"), (8192, 1024, 0.9)),
        **dict.fromkeys(("a100-80g", "a100-40g", "l40s", "l4", "a10"), (2048, 256, 0.9)),
    },
    "vllm-0.19": {"h100": (8192, 1024, 0.9), "b200": (8192, 1024, 0.9), "l40s": (2048, 256, 0.9)},
    "vllm-0.20": {"h100": (8192, 1024, 0.92), "b200": (8192, 1024, 0.92), "l40s": (2048, 256, 0.92)},
    "vllm-0.27": {"h200": (8192, 1024, 0.92), "b200": (8192, 1024, 0.92), "a100-80g": (2048, 256, 0.92)},
    "vllm-0.28": {"h200": (8192, 1024, 0.92), "b200": (16384, 1024, 0.92), "mi300x": (16384, 1024, 0.92)},
    "vllm-0.32": {"h100": (8192, 1024, 0.92), "b200": (16384, 1024, 0.92), "a100-80g": (2048, 256, 0.92)},
    # whole prompts before decodes; the share of an H100 is that of two GPUs: (81,559 - 10.5 x 1,024) / 81,559
    "sglang-0.5": {"h100": (0, 2048, 0.868)},
}


def of(host: str, kind: str, tp: int = 1, longest: int = 8192) -> Settings:
    """Return a server's settings on a kind of GPU."""
    return servers.settings(host, quantities.gpu(kind), tp, lambda: longest)


@pytest.mark.parametrize("host", GOLDEN)
def test_settings_are_those_of_the_release_on_the_card(host: str) -> None:
    tp = 2 if host.startswith("sglang") else 1
    assert {kind: of(host, kind, tp)[:3] for kind in GOLDEN[host]} == GOLDEN[host]


# vllm/v1/core/sched/scheduler.py: `scheduler_reserve_full_isl`, which is on, is in no wheel before 0.19.
@pytest.mark.parametrize(
    ("host", "admission"),
    [
        *((f"vllm-0.{version}", "chunk") for version in (8, 12, 15, 18)),
        *((f"vllm-0.{version}", "prompt") for version in (6, 19, 24, 32)),
        ("sglang-0.5", "prompt"),
        ("vllm-graph", "prompt"),
    ],
)
def test_a_prompt_is_let_in_as_the_release_does(host: str, admission: str) -> None:
    assert of(host, "l40s").admission == admission


def served(spec: Spec, *admissions: Admission) -> dict[str, np.ndarray]:
    """Return the requests of a run by each way to let prompts in."""
    rows = {}
    for admission in admissions:
        setup = Setup(resolve(replace(spec, admission=admission)))
        engine = Sim(setup.config)
        replay(find("dedicated")(engine.cluster), engine, setup.jobs())
        rows[str(admission)] = engine.S.requests.copy()
    return rows


def test_a_prompt_let_in_by_its_first_piece_starts_over_and_slows_who_decodes() -> None:
    """Two prompts of 120,000 tokens on an L40S with room for 190,000: vLLM pull request 21793."""
    of_two = "closed+clients=2+prompt=120000+output=400+requests=4+max_tokens=131072"
    spec = Spec("dedicated", models="llama-3.1-8b", trace=of_two, gpu="l40s", host="vllm-0.15", slo="")
    rows = served(replace(spec, chunk_tokens=2048), "prompt", "chunk", "output")
    first = {name: of[0]["done"] - of[0]["first"] for name, of in rows.items()}
    assert not rows["prompt"]["preemptions"].any()
    assert not rows["output"]["preemptions"].any()
    assert rows["chunk"]["preemptions"][1] > 3
    assert first["chunk"] > 4 * first["prompt"] == 4 * first["output"]


def test_reserving_to_the_end_preempts_nobody_where_growth_does() -> None:
    """NVIDIA/TensorRT-LLM issue 16827: the same load by MAX_UTILIZATION and by GUARANTEED_NO_EVICT."""
    load = "closed+clients=200+prompt=512+output=2048+requests=400"
    spec = Spec("dedicated", models="llama-3.1-8b", trace=load, gpu="a10", host="vllm-0.15", slo="")
    preempted = {admission: rows["preemptions"].sum() for admission, rows in served(spec, "prompt", "output").items()}
    assert preempted["output"] == 0 < preempted["prompt"]


def test_a_step_of_whole_prompts_takes_what_its_server_says() -> None:
    """vLLM 0.6: as many tokens as the longest request, or 2,048; chunks of 512 above 32,768. SGLang: by the card."""
    assert [of("vllm-0.6", "h100", longest=n)[3] for n in (1024, 4096, 32768)] == [2048, 4096, 32768]
    assert [of("vllm-0.6", "h100", longest=n).chunk_tokens for n in (32768, 32769)] == [0, 512]
    assert of("vllm-0.7", "h100", longest=32769).chunk_tokens == 2048
    whole = {"a10": 2048, "l40s": 8192, "h200": 8192, "b200": 16384}
    assert {kind: of("sglang-0.5", kind).prefill_tokens for kind in whole} == whole
    assert [of("sglang-0.5", "h100", tp).mem_fraction for tp in (1, 2, 4)] == [0.874, 0.868, 0.856]


def test_every_host_profile_has_settings_and_others_are_refused() -> None:
    for host in quantities.hosts():
        assert of(host, "h100").batch_cap > 0, host
    with pytest.raises(UserError, match=r"no settings of server 'vllm-0\.4': servers\.toml has vllm from 0\.5 on"):
        of("vllm-0.4", "h100")
    with pytest.raises(UserError, match=r"no settings of server 'trt-1\.0'"):
        of("trt-1.0", "h100")


@cases("path", sorted(STUDIES.glob("*.toml")))
def test_every_study_names_its_settings(path: Path) -> None:
    """So no study changes with a server's defaults."""
    spec = tomllib.loads(path.read_text("utf-8"))["spec"]
    # two papers' engines take prompts whole
    whole = {"chunk_tokens": 0} if not spec["chunk_tokens"] and "prefill_tokens" in spec else {}
    assert {key: spec.get(key) for key in NAMED} == NAMED | whole


# Hashes that these specs had when a spec's defaults were 2,048 tokens, 256 sequences and 0.9 on every card, with the
# noise and the seconds of a call that a refit of the hosts moves.
BEFORE: dict[str, tuple[dict[str, Any], str]] = {
    "prism": ({"trace": "hyperbolic-like"}, "da32e6d9"),
    "static:equal": ({"trace": "hyperbolic-like+span_s=60", "gpus": 2}, "f37a2430"),
    "elastic": ({"trace": "sample", "models": "heavy8", "gpus": 2, "gpu": "a100-80g"}, "1488b636"),
}
HOST = {"noise": 0.05, "control_s": 0.005}


@pytest.mark.parametrize("system", BEFORE)
def test_a_spec_that_names_its_settings_is_the_run_that_it_was(system: str) -> None:
    """The hash is over every field of a resolved spec, so equal hashes are equal rows."""
    name, _, preset = system.partition(":")
    setting, before = BEFORE[system]
    given = filled({**setting, **NAMED, **HOST})
    spec = resolve(Spec(name, preset or None, **given))
    assert spec.hash8 == before
    assert {key: getattr(spec, key) for key in NAMED} == NAMED


def test_a_spec_takes_its_servers_settings_and_keeps_what_it_names() -> None:
    spec = Spec("dedicated", models="llama-3.1-8b", trace="sample")
    assert Setup(spec).settings[:3] == (8192, 1024, 0.9)
    resolved = resolve(spec)
    assert (resolved.chunk_tokens, resolved.batch_cap, resolved.mem_fraction) == (8192, 1024, 0.9)
    assert Setup(resolved).config.batch_cap == 1024
    some = Spec("dedicated", models="llama-3.1-8b", trace="sample", gpu="l40s", batch_cap=64)
    assert Setup(some).settings[:3] == (2048, 64, 0.9)
    mixed = Spec("alpaserve", models="llama-3.1-8b", trace="sample", gpu="h100*1+l40s*1", gpus=2)
    assert Setup(mixed).settings[:3] == (2048, 256, 0.9)  # the least of the kinds


def test_servers_that_the_bench_starts_are_told_its_own_settings() -> None:
    assert Setup(Spec("dedicated", models="llama-3.1-8b", trace="sample", engine="vllm")).settings == servers.bench()


def test_a_stated_share_goes_with_the_parts_of_a_process() -> None:
    spec = Spec("dedicated", models="llama-3.1-8b", trace="sample", host="sglang-0.5")
    plain, stated = Setup(spec).settings, Setup(replace(spec, mem_fraction=0.8)).settings
    assert plain.process_bytes is not None
    assert (stated.mem_fraction, stated.process_bytes) == (0.8, None)


def test_a_size_takes_settings_but_no_rate() -> None:
    asked = ("size", "--trace", "sample", "--models", "llama-3.1-8b", "--set")
    mistake(bench(*asked, "rate_scale=2"), "--set rate_scale: traffic is replayed as it is")
    mistake(bench(*asked, "gpus=2"), "--set gpus: the option --gpus sets it")
    mistake(bench(*asked, "chunk_token=2"), 'unknown key "chunk_token"')


def test_what_is_served_beyond_the_pool_is_infeasible_with_the_longest_that_fits() -> None:
    """An 8B on an A10: vLLM would not start with 35,000 tokens. The bound has no memory to run out of."""
    spec = Spec("dedicated", models="llama-3.1-8b", trace="sample", gpu="a10", served=35_000)
    with pytest.raises(Infeasible, match=r"serves 35,000 tokens, and KV memory has room for 28,784 \(--served 28784\)"):
        _ = Setup(resolve(spec)).engine
    assert Setup(resolve(replace(spec, served=28_784))).engine
    assert Setup(resolve(replace(spec, system="unshared"))).engine
    assert Setup(resolve(replace(spec, served=None))).engine


def test_the_line_of_a_server_has_its_settings_and_memory() -> None:
    alone = Spec("dedicated", models="gpt-oss-120b", trace="sample", served=2048)
    assert server_line(Setup(alone)) == (
        "server: vLLM 0.15, 8,192 tokens a step, 1,024 sequences, 0.90: 3.1 GiB of KV, 45k tokens"
    )
    two = replace(alone, models="llama-3.2-1b,llama-3.1-8b", host="vllm-eager", pool_bytes=64 * GIB)
    assert server_line(Setup(two)) == (
        "server: vllm-eager (no release), 2,048 tokens a step, 256 sequences, 64.0 GiB a GPU: 49.0 GiB of KV, "
        "402k tokens for llama-3.1-8b/1 alone, the fewest"
    )
    assert server_line(Setup(replace(alone, host="sglang-0.5"))).startswith(
        "server: SGLang 0.5, whole prompts up to 8,192 tokens a step, 2,048 sequences, 0.874: "
    )
    assert server_line(Setup(replace(alone, models="llama-3.3-70b"))).endswith(": no KV for llama-3.3-70b/1")


def test_the_base_of_an_slo_has_the_benchs_settings_whatever_the_run_has() -> None:
    for given in ({}, {"chunk_tokens": 512}, {"gpu": "l40s"}, {"host": "sglang-0.5"}):
        spec = Spec("dedicated", models="llama-3.1-8b", trace="sample", **given)
        (base, *_) = base_specs(spec)
        assert {key: getattr(base, key) for key in NAMED} == NAMED
        assert base_specs(resolve(spec))[0].process_bytes == base.process_bytes
