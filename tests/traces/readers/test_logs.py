"""Logs of gateways: each format on a sample, its trap, what is dropped, and that nothing private is written."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.policy.types import UserError
from tests.cases import cases
from tests.there import there
from traces import readers, schema
from traces.load import of_table

T0 = 1_777_312_800  # 2026-04-27T18:00:00Z


def spend(at: str, group: str, prompt: Any, output: Any, **more: Any) -> dict[str, Any]:
    """A row of LiteLLM_SpendLogs, with the private columns that it has."""
    return {
        "request_id": f"id-{at}",
        "call_type": "acompletion",
        "api_key": "sk-SECRETKEY",
        "startTime": at,
        "endTime": at,
        "model": f"openai/{group}",
        "model_group": group,
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "status": "success",
        "cache_hit": "False",
        "session_id": "alice-session",
        "user": "ALICE@EXAMPLE.ORG",
        "end_user": "BOB",
        "messages": '{"role": "user", "content": "MY SECRET PROMPT"}',
        "response": "MY SECRET ANSWER",
        "requester_ip_address": "10.1.2.3",
        **more,
    }


SPENT = [
    spend("2026-04-27 18:00:01.500", "llama", 100, 10),
    spend("2026-04-27 18:00:00.250", "qwen", "63.0", 20),  # stored as it ended: not in order
    spend("2026-04-27 18:00:03", "", 30, 5),  # no group: the backend's name
    spend("2026-04-27 18:00:04", "llama", 40, 0, status="failure"),
    spend("2026-04-27 18:00:05", "llama", 40, 7, cache_hit="True"),
    spend("2026-04-27 18:00:05", "embedder", 40, 0, call_type="aembedding"),
]
LEFT = {"failed": 1, "answered by the gateway's cache": 1, "of another call than text generation": 1}


def as_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"data": rows, "total": len(rows)}))
    return path


def as_jsonl_gz(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.table({name: [str(row[name]) for row in rows] for name in rows[0]}), path)
    return path


Write = Callable[[Path, list[dict[str, Any]]], Path]
FORMS: Mapping[str, tuple[str, Write]] = {
    "CSV": ("spend.csv", as_csv),
    "JSON of an API": ("spend.json", as_json),
    "JSON lines, packed": ("spend.jsonl.gz", as_jsonl_gz),
    "Parquet": ("spend.parquet", as_parquet),
}


@cases(("name", "write"), FORMS)
def test_litellm_in_every_form_gives_the_same_requests(tmp_path: Path, name: str, write: Write) -> None:
    path = write(tmp_path / name, SPENT)
    rows = readers.read("litellm", path)
    loaded = of_table(rows, name)
    assert [loaded.models[k] for k in loaded.model] == ["qwen", "llama", "openai/"]
    assert loaded.arrival_s.tolist() == pytest.approx([0.0, 1.25, 2.75], abs=1e-6)
    assert loaded.prompt_tokens.tolist() == [63, 100, 30]
    assert schema.metadata(rows)["dropped"] == LEFT
    assert readers.known(path) == "litellm"


@cases(("name", "write"), FORMS)
def test_nothing_private_of_a_log_is_written(tmp_path: Path, name: str, write: Write) -> None:
    path, out = write(tmp_path / name, SPENT), tmp_path / "out.parquet"
    schema.write(readers.read("litellm", path), out)
    table = pq.read_table(out)
    text = out.read_bytes() + repr(table.to_pylist()).encode() + repr(table.schema.metadata).encode()
    for secret in ("SECRET", "sk-", "ALICE", "alice", "BOB", "10.1.2.3", "id-2026"):
        assert secret.encode() not in text
    public = "request_id arrival_s model prompt_tokens output_tokens session_id prefix_hashes src_row"
    assert set(table.column_names) <= set(public.split())


def test_the_key_of_sessions_is_the_log_itself(tmp_path: Path) -> None:
    first, same = as_csv(tmp_path / "a.csv", SPENT), as_csv(tmp_path / "b.csv", SPENT)
    other = as_csv(tmp_path / "c.csv", [*SPENT, spend("2026-04-27 18:00:09", "llama", 1, 1)])
    ids = [readers.read("litellm", path)["session_id"].to_pylist()[0] for path in (first, same, other)]
    assert ids[0] == ids[1] != ids[2]  # who has no log cannot try names


BLOCKS = [14879255164371896291, 274632075616497421]
DYNAMO: list[dict[str, Any]] = [
    {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": T0 * 1000 + 1000,
     "agent_context": {"session_id": "research-run-42"},
     "request": {"model": "my-model", "input_tokens": 128, "output_tokens": 16, "request_received_ms": T0 * 1000,
                 "total_time_ms": 1000,
                 "replay": {"trace_block_size": 64, "input_length": 128, "input_sequence_hashes": BLOCKS}}},
    {"event_type": "tool_end", "event_time_unix_ms": T0 * 1000 + 1500, "tool": {"status": "succeeded"}},
    {"event": {"event_type": "request_end", "request": {
        "model": "my-model", "input_tokens": 200, "output_tokens": 8, "request_received_ms": T0 * 1000 + 2500,
        "replay": {"trace_block_size": 64, "input_sequence_hashes": [*BLOCKS, 5]}}}},
]  # fmt: skip


def test_dynamo_reads_requests_in_and_out_of_envelopes_with_their_blocks(tmp_path: Path) -> None:
    path = as_jsonl_gz(tmp_path / "dynamo-request-trace.000001.jsonl.gz", DYNAMO)
    loaded = of_table(readers.read("dynamo", path), "x")
    assert loaded.arrival_s.tolist() == [0.0, 2.5]
    assert loaded.output_tokens.tolist() == [16, 8]
    assert (there(loaded.prefix).block_tokens, shape(there(loaded.prefix).ids)) == (64, [0, 1, 0, 1, 2])
    DYNAMO[2]["event"]["request"]["replay"]["trace_block_size"] = 16
    with pytest.raises(UserError, match="trace_block_size is 16, 64, not one size"):
        readers.read("dynamo", as_jsonl_gz(tmp_path / "two.jsonl.gz", DYNAMO))
    DYNAMO[2]["event"]["request"]["replay"]["trace_block_size"] = 64


def shape(ids: Any) -> list[int]:
    """Number ids by their first places."""
    return [list(dict.fromkeys(ids.tolist())).index(k) for k in ids.tolist()]


def otlp(*spans: tuple[str, float, Mapping[str, Any]], code: int = 0) -> dict[str, Any]:
    def value(x: Any) -> dict[str, Any]:
        return {"intValue": str(x)} if isinstance(x, int) else {"stringValue": x}

    return {"resourceSpans": [{"scopeSpans": [{"spans": [
        {"name": name, "traceId": "5b8efff798038103d269b633813fc60c", "startTimeUnixNano": str(round(at * 1e9)),
         "endTimeUnixNano": str(round(at * 1e9) + 10), "status": {"code": code},
         "attributes": [{"key": k, "value": value(v)} for k, v in told.items()]}
        for name, at, told in spans]}]}]}  # fmt: skip


VLLM = {"gen_ai.response.model": "Qwen3-8B", "gen_ai.usage.prompt_tokens": 70, "gen_ai.usage.completion_tokens": 9}
CHAT = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "gpt-x",
    "gen_ai.usage.input_tokens": 12,
    "gen_ai.usage.output_tokens": 3,
    "gen_ai.input.messages": "MY SECRET PROMPT",
}


def test_spans_of_vllm_and_of_clients_are_told_apart(tmp_path: Path) -> None:
    lines = [otlp(("llm_request", T0, VLLM), ("loading", T0, {})), otlp(("llm_request", T0 + 1.5, VLLM))]
    path = tmp_path / "spans.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    loaded = of_table(readers.read("vllm-otlp", path), "x")
    assert (loaded.models, loaded.prompt_tokens.tolist()) == (("Qwen3-8B",), [70, 70])
    assert loaded.arrival_s.tolist() == pytest.approx([0.0, 1.5], abs=1e-6)
    assert readers.known(path) == "vllm-otlp"
    bare = otlp(("llm_request", T0, {key: value for key, value in VLLM.items() if "model" not in key}))
    for service in (None, "unknown_service"):  # without OTEL_SERVICE_NAME
        attributes = [{"key": "service.name", "value": {"stringValue": service}}] if service else []
        bare["resourceSpans"][0]["resource"] = {"attributes": attributes}
        path.write_text(json.dumps(bare))
        with pytest.raises(UserError, match=r'spans.jsonl:1: column "gen_ai.response.model" is empty \(--model NAME'):
            readers.read("vllm-otlp", path)
        assert of_table(readers.read("vllm-otlp", path, model="m"), "x").models == ("m",)

    failed = otlp(("chat gpt-x", T0 + 3, CHAT), code=2)
    agent = otlp(("invoke_agent a", T0, {"gen_ai.operation.name": "invoke_agent"}))
    path.write_text("\n".join(map(json.dumps, [agent, otlp(("chat gpt-x", T0, CHAT)), failed])))
    rows = readers.read("otel-genai", path)
    assert rows["prompt_tokens"].to_pylist() == [12]
    assert schema.metadata(rows)["dropped"] == {"failed": 1}
    assert readers.known(path) == "otel-genai"


def test_spans_of_two_servers_of_vllm_are_of_two_models() -> None:
    path = Path(__file__).with_name("vllm_spans.jsonl")  # of a run of vLLM 0.32.0; of attributes ids and counts alone
    assert readers.known(path) == "vllm-otlp"
    loaded = of_table(readers.read("vllm-otlp", path), "x")
    sent = [("a", 17, 4), ("b", 31, 25), ("a", 42, 21), ("a", 84, 23), ("b", 60, 27), ("b", 75, 13), ("a", 74, 10)]
    columns = (loaded.model, loaded.prompt_tokens, loaded.output_tokens)
    read = zip(*(column.tolist() for column in columns), strict=True)
    assert [(loaded.models[k].removeprefix("tiny-"), p, o) for k, p, o in read] == sent
    assert loaded.arrival_s[0] == 0.0
    assert (np.diff(loaded.arrival_s) > 0.1).all()  # the client waited 0.1 to 0.8 s between two


def test_the_console_of_the_sdk_is_read_too(tmp_path: Path) -> None:
    span = {
        "name": "chat gpt-x",
        "context": {"trace_id": "0x1"},
        "start_time": "2026-04-27T18:00:00.5Z",
        "status": {"status_code": "UNSET"},
        "attributes": CHAT,
    }
    path = tmp_path / "console.txt"
    path.write_text("\n".join(json.dumps(s, indent=4) for s in (span, span | {"start_time": "2026-04-27T18:00:02Z"})))
    assert readers.known(path) == "otel-genai"
    assert of_table(readers.read("otel-genai", path), "x").arrival_s.tolist() == [0.0, 1.5]


def test_llama_swap_begins_before_it_is_stored_and_adds_what_its_cache_had(tmp_path: Path) -> None:
    def row(at: str, ms: int, cached: int, status: int = 200) -> dict[str, Any]:
        return {
            "id": 1,
            "timestamp": at,
            "model": "qwen",
            "req_path": "/v1/chat/completions",
            "resp_status_code": status,
            "duration_ms": ms,
            "tokens": {"input_tokens": 10, "output_tokens": 5, "cache_tokens": cached},
        }

    page = [
        row("2026-04-27T20:00:10.123456789+02:00", 10_000, 90),
        row("2026-04-27T18:00:09Z", 500, -1),
        row("2026-04-27T18:00:11Z", 10, 0, 502),
    ]
    rows = readers.read("llama-swap", as_json(tmp_path / "activity.json", page))
    assert rows["prompt_tokens"].to_pylist() == [100, 10]
    assert np.diff(rows["arrival_s"].to_numpy()) == pytest.approx([8.376544], abs=1e-5)
    assert schema.metadata(rows)["dropped"] == {"failed": 1}


def test_langfuse_adds_disjoint_counts_of_generations_alone(tmp_path: Path) -> None:
    rows = [
        {"type": "GENERATION", "startTime": "2026-04-27T18:00:00.000Z", "model": "m", "level": "DEFAULT",
         "usageDetails": json.dumps({"input": 10, "input_cached_tokens": 90, "output": 4, "output_reasoning": 6,
                                     "total": 110}), "traceId": "t", "input": "MY SECRET PROMPT"},
        {"type": "SPAN", "startTime": "2026-04-27T18:00:01.000Z", "model": "", "level": "DEFAULT",
         "usageDetails": "{}", "traceId": "t", "input": ""},
        {"type": "GENERATION", "startTime": "2026-04-27T18:00:02.000Z", "model": "m", "level": "ERROR",
         "usageDetails": "{}", "traceId": "t", "input": ""},
    ]  # fmt: skip
    table = readers.read("langfuse", as_csv(tmp_path / "observations.csv", rows))
    assert (table["prompt_tokens"].to_pylist(), table["output_tokens"].to_pylist()) == ([100], [10])
    assert schema.metadata(table)["dropped"] == {"failed": 1}
    assert readers.known(tmp_path / "observations.csv") == "langfuse"


def test_bailian_turns_are_one_session(tmp_path: Path) -> None:
    rows = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 33, "output_length": 3, "type": "text",
         "turn": 1, "hash_ids": [7, 8, 9]},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 9.25, "input_length": 40, "output_length": 3, "type": "text",
         "turn": 2, "hash_ids": [7, 8, 10]},
        {"chat_id": 3, "parent_chat_id": -1, "timestamp": 9.5, "input_length": 16, "output_length": 3, "type": "text",
         "turn": 1, "hash_ids": [99]},
    ]  # fmt: skip
    path = tmp_path / "qwen_traceA_blksz_16.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert readers.known(path) == "bailian"
    table = readers.read("bailian", path)
    sessions = table["session_id"].to_pylist()
    assert sessions[0] == sessions[1] != sessions[2]
    loaded = of_table(table, "x")
    assert (loaded.models, loaded.arrival_s.tolist()) == (("qwen_traceA",), [0.5, 9.25, 9.5])
    assert shape(there(loaded.prefix).ids) == [0, 1, 0, 1, 2]


def test_chutes_has_users_by_round_and_elapsed_time(tmp_path: Path) -> None:
    path = tmp_path / "cut.parquet"
    names = ("chute_id", "user_id", "rehash_round", "started_at", "it", "ot", "ct")
    rows = [("a", "u", 0, 0.0, 5, 1, 4), ("b", "u", 0, 1.5, 6, 0, 0), ("a", "u", 1, 2.0, 7, 3, 0)]
    pq.write_table(pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows]), path)
    assert readers.known(path) == "chutes"
    with pytest.raises(UserError, match=r'cut\.parquet:2: column "ot" is 0, no tokens at all'):
        readers.read("chutes", path)
    table = readers.read("chutes", path, drop_bad=True)
    assert table["prompt_tokens"].to_pylist() == [5, 7]
    assert len(set(table["session_id"].to_pylist())) == 2
    assert schema.metadata(table)["dropped"] == {"without output tokens": 1}


def test_weka_sessions_come_one_after_the_other(tmp_path: Path) -> None:
    calls = [
        {"t": 0.0, "in": 64, "out": 2, "hash_ids": [1]},
        {"t": 3.0, "type": "subagent", "requests": [{"t": 0.5, "in": 10, "out": 1, "hash_ids": []}]},
        {"t": 5.0, "in": 130, "out": 2, "hash_ids": [1, 2]},
    ]
    session = {"id": "s", "models": ["claude"], "hash_id_scope": "local", "requests": calls}
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(json.dumps(session | {"id": key}) for key in ("s", "t")))
    assert readers.known(path) == "weka"
    loaded = of_table(readers.read("weka", path), "x")
    assert loaded.arrival_s.tolist() == [0.0, 3.5, 5.0, 5.0, 8.5, 10.0]
    assert len(set(there(loaded.prefix).ids.tolist())) == 4  # of one session apart from the other's


SCRAPE = """# HELP vllm:request_success_total done
vllm:request_success_total{{finished_reason="stop",model_name="m"}} {done}
vllm:request_prompt_tokens_bucket{{le="10.0",model_name="m"}} {short}
vllm:request_prompt_tokens_bucket{{le="100.0",model_name="m"}} {done}
vllm:request_prompt_tokens_bucket{{le="+Inf",model_name="m"}} {done}
vllm:request_generation_tokens_bucket{{le="5.0",model_name="m"}} {done}
vllm:request_generation_tokens_bucket{{le="+Inf",model_name="m"}} {done}
"""


def test_counters_give_the_requests_and_lengths_of_each_interval(tmp_path: Path) -> None:
    counts = {0: (100, 40), 60: (130, 60), 120: (130, 60), 180: (5, 5)}  # a restart in the last
    for at, (done, short) in counts.items():
        (tmp_path / f"metrics-{T0 + at}.prom").write_text(SCRAPE.format(done=done, short=short))
    table = readers.read("prometheus", tmp_path)
    when = table["arrival_s"].to_numpy()
    assert [int(((when >= a) & (when < a + 60)).sum()) for a in (0, 60, 120)] == [30, 0, 5]
    prompts = table["prompt_tokens"].to_numpy()
    assert [int((prompts[when < 60] <= 10).sum()), int((prompts[when > 60] <= 10).sum())] == [20, 5]
    assert int(prompts.max()) <= 100
    assert 1 <= table["output_tokens"].to_numpy().min() <= table["output_tokens"].to_numpy().max() <= 5
    assert (of_table(table, "x").tier, schema.metadata(table)["span_s"]) == ("synthetic", 180.0)

    def series(name: str, values: list[tuple[int, float]], **labels: str) -> dict[str, Any]:
        return {"metric": {"__name__": name, "model_name": "m", **labels}, "values": [[t, str(v)] for t, v in values]}

    points = [(T0 + at, float(done)) for at, (done, _) in list(counts.items())[:2]]
    result = [
        series("vllm:request_success_total", points, finished_reason="stop"),
        series("vllm:request_prompt_tokens_bucket", points, le="100.0"),
        series("vllm:request_generation_tokens_bucket", points, le="5.0"),
    ]
    path = tmp_path / "range.json"
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))
    assert readers.read("prometheus", path).num_rows == 30
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": []}}))
    with pytest.raises(UserError, match="ask for the counters, not for rate"):
        readers.read("prometheus", path)


def test_aborted_requests_of_counters_are_left_out_and_counted_over_a_restart(tmp_path: Path) -> None:
    """60, 30 and 60 requests a minute, of 400 tokens and 80; the server restarts in the second. No bucket has the 10
    that were aborted: the case of vllm-project/vllm#55634."""
    counts = {0: (500, 5), 60: (560, 9), 120: (30, 2), 180: (90, 6)}
    for at, (done, aborted) in counts.items():
        lines = [
            f'vllm:request_success_total{{finished_reason="{why}",model_name="m"}} {n}'
            for why, n in (("stop", done - done // 5), ("length", done // 5), ("abort", aborted))
        ]
        for kind, tokens in (("prompt", 400), ("generation", 80)):
            name = f"vllm:request_{kind}_tokens"
            lines += [f'{name}_bucket{{le="{le}",model_name="m"}} {done * (tokens <= le)}' for le in (50, 100, 500)]
            lines += [
                f'{name}_bucket{{le="+Inf",model_name="m"}} {done}',
                f'{name}_sum{{model_name="m"}} {done * tokens}',
            ]
        (tmp_path / f"{T0 + at}.prom").write_text("\n".join(lines) + "\n")
    rows = readers.read("prometheus", tmp_path)
    minutes = np.bincount((rows["arrival_s"].to_numpy() // 60).astype(int)).tolist()
    assert minutes == [60, 30, 60]
    for column, tokens in (("prompt_tokens", 400), ("output_tokens", 80)):
        assert rows[column].to_numpy().mean() == pytest.approx(tokens, rel=0.005)
    assert schema.metadata(rows)["dropped"] == {"aborted": 10}
    assert readers.summary(schema.metadata(rows)) == "; left out: 10 aborted"


TWICE: Mapping[str, tuple[str, Any]] = {
    "litellm": ("spend.json", [spend("2026-04-27 18:00:01", "m", 10, 5), spend("2026-04-27 18:00:02", "m", 10, 5)]),
    "langfuse": ("observations.json", [
        {"id": f"o{k}", "type": "GENERATION", "startTime": f"2026-04-27T18:00:0{k}Z", "model": "m", "level": "DEFAULT",
         "usageDetails": {"input": 10, "output": 5}, "traceId": "t"} for k in (1, 2)]),
    "dynamo": ("request-trace.jsonl", [
        {"event_type": "request_end", "request": {
            "request_id": f"r{k}", "model": "m", "input_tokens": 10, "output_tokens": 5,
            "request_received_ms": 1000 * k}} for k in (1, 2)]),
    "a table": ("log.json", [
        {"request_id": f"r{k}", "time": float(k) + 0.5, "model": "m", "prompt_tokens": 10, "completion_tokens": 5}
        for k in (1, 2)]),
}  # fmt: skip


@cases(("name", "rows"), TWICE)
def test_a_request_that_a_log_has_twice_counts_once(tmp_path: Path, name: str, rows: list[Any]) -> None:
    (path := tmp_path / name).write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    table, report = readers.converted(path)
    assert table.num_rows == 2
    assert report.endswith("left out: 1 with the id of an earlier row")


def test_a_status_that_only_later_records_have_is_read(tmp_path: Path) -> None:
    rows = [
        {"time": k + 0.5, "model": "m", "prompt_tokens": 9, "completion_tokens": 5} | ({"status": 499} if k else {})
        for k in range(2)
    ]
    (path := tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert schema.metadata(readers.converted(path)[0])["dropped"] == {"with status 499": 1}


@cases("blocks", ["7,8", [7, "x"], [7, None], {"7": 8}, 7, [7.5, 8]])
def test_blocks_that_are_no_list_of_ids_are_refused_when_a_log_is_converted(tmp_path: Path, blocks: Any) -> None:
    keys = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")
    lines = [(1, -1, 0.5, 32, 3, [7, 8]), (2, -1, 2.5, 32, 3, blocks)]
    path = tmp_path / "qwen_a_blksz_16.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(keys, line, strict=True))) for line in lines))
    says = r"jsonl:2: its blocks are .*, no list of ids \(--drop-bad leaves such rows out"
    with pytest.raises(UserError, match=says):
        readers.read("bailian", path)
    rows = readers.read("bailian", path, drop_bad=True)
    assert schema.metadata(rows)["dropped"] == {"whose blocks cannot be read": 1}


@cases("tokens", [200, 380, 660, 900])
def test_lengths_of_counters_add_up_to_their_sum(tmp_path: Path, tokens: int) -> None:
    for at, (done, short, total) in {0: (100, 40, 5000), 60: (130, 60, 5000 + tokens)}.items():
        sums = f'vllm:request_prompt_tokens_sum{{model_name="m"}} {total}\n'
        (tmp_path / f"metrics-{T0 + at}.prom").write_text(SCRAPE.format(done=done, short=short) + sums)
    prompts = readers.read("prometheus", tmp_path)["prompt_tokens"].to_numpy()
    assert 0 <= tokens - prompts.sum() <= 2
    assert int((prompts <= 10).sum()) == 20


def test_servegen_draws_its_clients_at_the_rate_that_is_asked(tmp_path: Path) -> None:
    folder = tmp_path / "m-small"
    folder.mkdir()
    windows = [f"{600 * k},{2.0 if k else 0.0},1.5,Gamma,0.444,1.1" for k in range(7)]
    (folder / "chunk-0-trace.csv").write_text("\n".join(windows))
    (folder / "chunk-1-trace.csv").write_text("0,5,1,Gamma,1,1")  # without lengths
    shares = {
        "0": {"input_tokens": "{}", "output_tokens": "{}"},
        "600": {"input_tokens": "{7: 0.5, 9: 0.5}", "output_tokens": "{3: 1.0}"},
    }
    (folder / "chunk-0-dataset.json").write_text(json.dumps(shares))
    table = readers.read("servegen", tmp_path, rate_rps=1.0)
    assert table.num_rows == pytest.approx(3600, rel=0.15)
    assert set(table["prompt_tokens"].to_pylist()) == {7, 9}
    assert schema.metadata(table)["note"].endswith("1 clients without lengths left out")
    assert table.equals(readers.read("servegen", tmp_path, rate_rps=1.0))
