"""Logs of gateways: sound records of each format with a value that cannot be right, cut or damaged; and spreads."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from tests.fuzz.case import Case

T0 = 1_777_312_800
SPANS = [
    {"key": "gen_ai.request.model", "value": {"stringValue": "m"}},
    {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
    {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "5"}},
    {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "5"}},
]
SOUND: Mapping[str, dict[str, Any]] = {  # a record by format
    "litellm": {"startTime": "2026-04-27 18:00:00", "model_group": "m", "prompt_tokens": 5, "completion_tokens": 5},
    "dynamo": {"event_type": "request_end", "request": {
        "model": "m", "input_tokens": 32, "output_tokens": 5, "request_received_ms": T0 * 1000,
        "replay": {"trace_block_size": 16, "input_sequence_hashes": [1, 2]}}},
    "otel-genai": {"resourceSpans": [{"scopeSpans": [{"spans": [
        {"name": "chat", "startTimeUnixNano": str(T0 * 10**9), "attributes": SPANS}]}]}]},
    "vllm-otlp": {"resourceSpans": [{"scopeSpans": [{"spans": [
        {"name": "llm_request", "startTimeUnixNano": str(T0 * 10**9), "attributes": SPANS}]}]}]},
    "llama-swap": {"timestamp": "2026-04-27T18:00:00Z", "model": "m", "duration_ms": 5,
                   "tokens": {"input_tokens": 5, "output_tokens": 5, "cache_tokens": -1}},
    "langfuse": {"start_time": "2026-04-27T18:00:00Z", "provided_model_name": "m",
                 "usage_details": {"input": 5, "output": 5}},
    "bailian": {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 32, "output_length": 5,
                "hash_ids": [1, 2]},
    "chutes": {"started_at": 1.5, "chute_id": "m", "it": 5, "ot": 5},
    "weka": {"id": "s", "models": ["m"], "requests": [{"t": 0.0, "in": 64, "out": 5, "hash_ids": [1]}]},
}  # fmt: skip
ODD: tuple[Any, ...] = (None, "", "x", -1, 0, 1.5, 10**30, True, [], {"a": [1]}, "9" * 400)
PROMETHEUS: dict[str, Any] = {
    "status": "success",
    "data": {
        "resultType": "matrix",
        "result": [
            {
                "metric": {"__name__": f"vllm:request_{name}", "model_name": "m", **labels},
                "values": [[T0, "1"], [T0 + 60, "9"]],
            }
            for name, labels in (
                ("success_total", {}),
                ("prompt_tokens_bucket", {"le": "10"}),
                ("generation_tokens_bucket", {"le": "10"}),
            )
        ],
    },
}


def cases(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield one odd value a case at each place of each format; then whole files that are damaged, and dumps."""
    for name, record in SOUND.items():
        for number, (where, value) in enumerate(odd(record)):
            path = here / f"{name}-{number}.jsonl"
            path.write_text("\n".join(json.dumps(each) for each in (record, value, record)))
            yield _convert(f"{name} {where}", path, name, *(("--drop-bad",) if number % 3 == 0 else ()))
        data = json.dumps([record] * 3).encode()
        for k in range(6):
            (path := here / f"{name}-cut{k}.json").write_bytes(data[: len(data) * k // 6])
            yield _convert(f"{name} cut {k}", path, name, accept=False)
        for k in range(8):
            damaged = bytearray(data)
            damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            (path := here / f"{name}-bit{k}.json").write_bytes(bytes(damaged))
            yield _convert(f"{name} bit {k}", path, name)
        (path := here / f"{name}.json.gz").write_bytes(gzip.compress(data)[:-5])
        yield _convert(f"{name} gzip cut", path, name, accept=False)
    for number, (where, value) in enumerate(odd(PROMETHEUS)):
        (path := here / f"prometheus-{number}.json").write_text(json.dumps(value))
        yield _convert(f"prometheus {where}", path, "prometheus")
    yield from _dumps(here)
    yield from _files(here)
    for what in (
        "",
        "x",
        "0",
        "-1",
        "2:",
        "2:zipf=x",
        "2:idle=x",
        "2:zipf=1,zipf=2",
        "2:nope=1",
        "9" * 20,
        "1e9",
        "2;3",
    ):
        (path := here / "log.csv").write_text("time,model,prompt_tokens,output_tokens\n1,a,1,1\n2,b,1,1\n")
        yield Case(
            f"logs/spread {what!r}",
            ("trace", "convert", str(path), "-o", "out.parquet", "--spread", what),
            "spread" if what else "",
            accept=what in {"", "2:"},
        )


def _convert(what: str, path: Path, reader: str, *more: str, accept: bool = True) -> Case:
    argv = ("trace", "convert", str(path), "-o", "out.parquet", "--from", reader, *more)
    return Case(f"logs/{what}", argv, path.name, accept=accept)


def odd(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies with one place changed to each odd value."""
    for place in _places(value):
        for other in ODD:
            copy = deepcopy(value)
            inner = copy
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = other
            yield f"{'.'.join(map(str, place))} {str(other)[:12]!r}", copy


def _places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*before, key)
        yield from _places(inner, (*before, key))


def _dumps(here: Path) -> Iterator[Case]:
    head = "-- PostgreSQL database dump\n"
    texts = {
        "copy": f'{head}COPY "LiteLLM_SpendLogs" ("startTime", model_group) FROM stdin;\n1\tm\n\\.\n',
        "insert": f'{head}INSERT INTO "LiteLLM_SpendLogs" VALUES (now(), 5);\n',
        "custom": "PGDMP\x01",
        "vllm text": "INFO 04-27 [logger.py:43] Received request cmpl-1: prompt: 'x', params: y\n",
    }
    for what, text in texts.items():
        (path := here / f"{what}.sql").write_text(text)
        yield Case(f"logs/dump {what}", ("trace", "convert", str(path), "-o", "out.parquet"), path.name, accept=False)


def _files(here: Path) -> Iterator[Case]:
    """Yield what stands where a log is meant: packed and cut, a bomb, pipes, devices, empty and odd JSON."""
    record = json.dumps(SOUND["litellm"]).encode()
    packed = gzip.compress(b"\n".join([record] * 2000))
    files = {
        **{f"cut-{k}.jsonl.gz": packed[: len(packed) * k // 8] for k in range(1, 8)},
        **{f"damaged-{k}.jsonl.gz": packed[: 20 + k] + b"\xff" * 9 + packed[29 + k :] for k in range(0, 200, 25)},
        "tail.jsonl.gz": packed[:-4],
        "twice.jsonl.gz": packed + b"x" * 20,
        "gzip.csv": packed,
        "list.json": b"[]",
        "lists.json": b"[[]]",
        "table.json": b"{}",
        "null.json": b"null",
        "header.csv": b"time,model,prompt_tokens\n",
        "deep.json": b"[" * 9000,
        "deep.jsonl": record + b"\n" + b'{"a":' * 9000,
        "digits.json": b"[" + b"9" * 9000 + b"]",
        "bomb.json.gz": gzip.compress(bytes(1 << 28), 1),
        "toml.toml": b'system = "x"\n',
        "zeros.csv": bytes(100_000),
    }
    for name, data in files.items():
        (path := here / name).write_bytes(data)
        for reader in ((), ("--from", "litellm"), ("--from", "prometheus")):
            argv = ("trace", "convert", str(path), "-o", "out.parquet", *reader)
            limit = ("--unpack-gb", "0.1") if name.startswith("bomb") else ()
            yield Case(
                f"logs/{name} {''.join(reader[1:])}",
                (*argv, *limit),
                name,
                accept=name in {"twice.jsonl.gz", "gzip.csv"},
            )
    os.mkfifo(pipe := here / "pipe.csv")
    for path in (pipe, Path("/dev/zero"), Path("/dev/null"), here):
        for argv in (("trace", "convert", str(path), "-o", "out.parquet"), ("trace", "stats", str(path))):
            yield Case(f"logs/{argv[1]} {path.name}", argv, path.name, accept=False)
