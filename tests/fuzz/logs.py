"""Logs of gateways: sound records of each format with a value that cannot be right, cut or damaged; and spreads."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.judge import Case
from tests.fuzz.odd import bits, cuts, parts, words, written

T0 = 1_777_312_800
SPANS = [
    {"key": "gen_ai.request.model", "value": {"stringValue": "m"}},
    {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
    {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "5"}},
    {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "5"}},
]
REPLAY = {"trace_block_size": 16, "input_sequence_hashes": [1, 2]}
DYNAMO = {"model": "m", "input_tokens": 32, "output_tokens": 5, "request_received_ms": T0 * 1000, "replay": REPLAY}
USED = {"input_tokens": 5, "output_tokens": 5, "cache_tokens": -1}
AT, HASHES = "2026-04-27T18:00:00Z", {"hash_ids": [1, 2]}


def _spans(name: str) -> dict[str, Any]:
    span = {"name": name, "startTimeUnixNano": str(T0 * 10**9), "attributes": SPANS}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


def _counts(name: str, **labels: str) -> dict[str, Any]:
    metric = {"__name__": f"vllm:request_{name}", "model_name": "m", **labels}
    return {"metric": metric, "values": [[T0, "1"], [T0 + 60, "9"]]}


SOUND: Mapping[str, dict[str, Any]] = {  # a record by format
    "litellm": {"startTime": "2026-04-27 18:00:00", "model_group": "m", "prompt_tokens": 5, "completion_tokens": 5},
    "dynamo": {"event_type": "request_end", "request": DYNAMO},
    "otel-genai": _spans("chat"),
    "vllm-otlp": _spans("llm_request"),
    "llama-swap": {"timestamp": AT, "model": "m", "duration_ms": 5, "tokens": USED},
    "langfuse": {"start_time": AT, "provided_model_name": "m", "usage_details": {"input": 5, "output": 5}},
    "bailian": {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 32, "output_length": 5, **HASHES},
    "chutes": {"started_at": 1.5, "chute_id": "m", "it": 5, "ot": 5},
    "weka": {"id": "s", "models": ["m"], "requests": [{"t": 0.0, "in": 64, "out": 5, "hash_ids": [1]}]},
}
COUNTS = [_counts("success_total"), *(_counts(f"{name}_tokens_bucket", le="10") for name in ("prompt", "generation"))]
PROMETHEUS = {"status": "success", "data": {"resultType": "matrix", "result": COUNTS}}
ODD: list[Any] = [None, "", "x", -1, 0, 1.5, 10**30, True, [], {"a": [1]}, "9" * 400]
HEAD = "-- PostgreSQL database dump\n"
RECORD = json.dumps(SOUND["litellm"]).encode()
PACKED = gzip.compress(b"\n".join([RECORD] * 2000))
FILES: Mapping[str, bytes] = {  # what stands where a log is meant
    "tail.jsonl.gz": PACKED[:-4],
    "twice.jsonl.gz": PACKED + b"x" * 20,
    "gzip.csv": PACKED,
    "list.json": b"[]",
    "lists.json": b"[[]]",
    "table.json": b"{}",
    "null.json": b"null",
    "header.csv": b"time,model,prompt_tokens\n",
    "deep.json": b"[" * 9000,
    "deep.jsonl": RECORD + b"\n" + b'{"a":' * 9000,
    "digits.json": b"[" + b"9" * 9000 + b"]",
    "bomb.json.gz": gzip.compress(bytes(1 << 28), 1),
    "toml.toml": b'system = "x"\n',
    "zeros.csv": bytes(100_000),
    "copy.sql": f'{HEAD}COPY "LiteLLM_SpendLogs" ("startTime", model_group) FROM stdin;\n1\tm\n\\.\n'.encode(),
    "insert.sql": f'{HEAD}INSERT INTO "LiteLLM_SpendLogs" VALUES (now(), 5);\n'.encode(),
    "custom.sql": b"PGDMP\x01",
    "vllm.sql": b"INFO 04-27 [logger.py:43] Received request cmpl-1: prompt: 'x', params: y\n",
}
LOG = "time,model,prompt_tokens,output_tokens\n1,a,1,1\n2,b,1,1\n"
SPREADS = "'' x 0 -1 2: 2:zipf=x 2:idle=x 2:zipf=1,zipf=2 2:nope=1 9^20 1e9 '2;3'"
CONVERT = ("trace", "convert")


def _convert(what: str, name: str, data: str | bytes, *more: str, accept: bool = True) -> Case:
    argv = (*CONVERT, f"{{here}}/{name}", "-o", "out.parquet", *more)
    return Case(f"logs/{what}", argv, name, accept, written(name, data))


def _records(reader: str) -> st.SearchStrategy[Case]:
    """Draw an odd value at one place of a format, or a whole file that is damaged."""
    record, from_ = SOUND[reader], ("--from", reader)
    data = json.dumps([record] * 3).encode()
    drops = st.sampled_from([(), (), ("--drop-bad",)])

    def odd(part: tuple[Any, Any, tuple[str, Any]], more: tuple[str, ...]) -> Case:
        text = "\n".join(json.dumps(each) for each in (record, part[2][1], record))
        return _convert(f"{reader} {part[2][0]} {more}", "log.jsonl", text, *from_, *more)

    cut = cuts(data).map(lambda of: _convert(f"{reader} {of[0]}", "log.json", of[1], *from_, accept=False))
    bit = bits(data).map(lambda of: _convert(f"{reader} {of[0]}", "log.json", of[1], *from_))
    packed = _convert(f"{reader} gzip", "log.json.gz", gzip.compress(data)[:-5], *from_, accept=False)
    places = st.builds(odd, parts(record, ODD), drops)
    return st.one_of(places, places, places, cut, bit, st.just(packed))


def _files(here: Path) -> st.SearchStrategy[Case]:
    """Draw what stands where a log is meant: packed and cut, a bomb, pipes, devices, empty and odd JSON."""
    sane, every = {"twice.jsonl.gz", "gzip.csv"}, list[Case]()
    for name, data in FILES.items():
        limit = ("--unpack-gb", "0.1") if name.startswith("bomb") else ()
        for reader in ((),) if name.endswith(".sql") else ((), ("--from", "litellm"), ("--from", "prometheus")):
            every.append(_convert(f"{name} {reader}", name, data, *reader, *limit, accept=name in sane))
    for path in ("{here}/pipe.csv", "/dev/zero", "/dev/null", "{here}"):
        for argv in ((*CONVERT, path, "-o", "out.parquet"), ("trace", "stats", path)):
            culprit = "" if path == "{here}" else Path(path).name
            every.append(Case(f"logs/{argv[1]} {path}", argv, culprit, accept=False, put=_pipe))
    for text in words(SPREADS):
        fine, culprit = text in {"", "2:"}, "spread" if text else ""
        every.append(
            _convert(f"spread {text!r}", "log.csv", LOG, "--spread", text, accept=fine)._replace(culprit=culprit)
        )
    return st.sampled_from(every)


def _pipe(here: Path) -> None:
    os.mkfifo(here / "pipe.csv")


def cases(here: Path) -> st.SearchStrategy[Case]:
    """Draw one odd value at one place of a format, whole files that are damaged, and dumps."""
    prometheus = parts(PROMETHEUS, ODD).map(
        lambda part: _convert(f"prometheus {part[2][0]}", "log.json", json.dumps(part[2][1]), "--from", "prometheus")
    )
    unpacked = cuts(PACKED).map(lambda of: _convert(f"gz {of[0]}", "log.jsonl.gz", of[1], accept=False))
    return st.one_of(*map(_records, SOUND), prometheus, prometheus, unpacked, *[_files(here)] * 3)
