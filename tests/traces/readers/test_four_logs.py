"""Traffic of a gateway in four formats: 14 models, one renamed, failures, rows twice; answered at once."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from harness.run.setup import load_models
from tests.bench import bench, ok
from tests.cases import cases
from traces.load import trace

NAMES = (*(f"m{k:02d}" for k in range(12)), "chat", "code")
BEGIN, SPAN_S, BUCKETS = datetime(2026, 4, 27, 8, tzinfo=UTC), 600.0, (50, 100, 500, 1000, 2000)
ABSOLUTE = ("--slo", "absolute:ttft=1s,tpot=50ms")


class Row(NamedTuple):
    """A request as all logs have it."""

    key: str
    at_s: float
    model: str
    prompt: int
    output: int
    served: bool


def drawn() -> list[Row]:
    draw = np.random.default_rng(7)
    at = np.sort(draw.uniform(1.0, SPAN_S, 1400))
    names = [NAMES[k] for k in draw.integers(0, 14, len(at))]
    return [
        Row(
            f"r{k}",
            float(t),
            "chat-v2" if name == "chat" and t > 0.6 * SPAN_S else name,
            int(draw.integers(20, 1500)),
            int(draw.integers(5, 300)),
            bool(draw.random() > 0.015),
        )
        for k, (t, name) in enumerate(zip(at, names, strict=True))
    ]


ROWS = drawn()
TWICE = ROWS[::100]
SERVED = [row for row in ROWS if row.served]


def litellm(folder: Path) -> Path:
    path = folder / "spend.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        out = csv.writer(file)
        names = "request_id call_type startTime model_group prompt_tokens completion_tokens status cache_hit"
        out.writerow(names.split())
        for row in (*ROWS, *TWICE):
            at = (BEGIN + timedelta(seconds=row.at_s)).strftime("%Y-%m-%d %H:%M:%S.%f")
            state = "success" if row.served else "failure"
            out.writerow([row.key, "acompletion", at, row.model, row.prompt, row.output, state, "False"])
    return path


def gateway(folder: Path) -> Path:
    here = timezone(timedelta(hours=1))
    rows = [
        {
            "request_id": row.key,
            "timestamp": (BEGIN + timedelta(seconds=row.at_s)).astimezone(here).isoformat(),
            "model": row.model,
            "prompt_tokens": row.prompt,
            "completion_tokens": row.output,
            "status": 200 if row.served else 499,
        }
        for row in sorted((*ROWS, *TWICE), key=lambda row: row.at_s)
    ]
    (path := folder / "gateway.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def otlp(folder: Path) -> Path:
    def span(row: Row) -> dict[str, object]:
        usage = {"gen_ai.usage.prompt_tokens": row.prompt, "gen_ai.usage.completion_tokens": row.output}
        told = {
            "name": "llm_request",
            "spanId": row.key,
            "status": {} if row.served else {"code": 2},
            "startTimeUnixNano": str(round((BEGIN.timestamp() + row.at_s) * 1e9)),
            "attributes": [{"key": key, "value": {"intValue": str(n)}} for key, n in usage.items()],
        }
        service = [{"key": "service.name", "value": {"stringValue": row.model}}]
        return {"resourceSpans": [{"resource": {"attributes": service}, "scopeSpans": [{"spans": [told]}]}]}

    path = folder / "otlp.json.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(span(row)) for row in (*ROWS, *TWICE)).encode()))
    return path


def prometheus(folder: Path) -> Path:
    (scrapes := folder / "scrapes").mkdir()
    for at in range(0, int(SPAN_S) + 1, 60):
        lines = []
        for name in (*NAMES, "chat-v2"):
            mine = [row for row in ROWS if row.model == name and row.at_s <= at]
            done = [row for row in mine if row.served]
            of = f'model_name="{name}"'
            lines += [
                f'vllm:request_success_total{{finished_reason="{why}",{of}}} {n}'
                for why, n in (("stop", len(done)), ("abort", len(mine) - len(done)))
            ]
            for kind, each in (("prompt", [row.prompt for row in done]), ("generation", [row.output for row in done])):
                key = f"vllm:request_{kind}_tokens"
                lines += [f'{key}_bucket{{le="{le}",{of}}} {sum(n <= le for n in each)}' for le in BUCKETS]
                lines += [f'{key}_bucket{{le="+Inf",{of}}} {len(each)}', f"{key}_sum{{{of}}} {sum(each)}"]
        (scrapes / f"{int(BEGIN.timestamp()) + at}.prom").write_text("\n".join(lines) + "\n")
    path = folder / "counters.parquet"
    ok("trace", "convert", "--from", "prometheus", scrapes, "-o", path)
    return path


@cases("write", [litellm, gateway, otlp, prometheus])
def test_four_logs_of_one_traffic_are_one_traffic(tmp_path: Path, write: type) -> None:
    log, models = write(tmp_path), tmp_path / "14.toml"
    models.write_text("".join(f'[[model]]\nname = "{name}"\nshape = "llama-3.2-1b"\n' for name in NAMES))
    load_models.cache_clear()
    size = ("size", "--trace", log, "--models", models, "--systems", "elastic", "--gpus", "1-4", "--dry-run", *ABSOLUTE)
    refused = bench(*size)
    late = sum(row.model == "chat-v2" for row in SERVED)
    assert refused.exit_code == 2
    says = f"{late:,} of {len(SERVED):,} requests are of streams for which set 14 has no model: chat-v2"
    assert says in refused.stderr
    lines = ok(*size, "--rename", "chat-v2=chat").splitlines()
    counts = Counter("chat" if row.model == "chat-v2" else row.model for row in SERVED)
    assert all(f"{name} ({count:,} requests)" in lines[0] for name, count in counts.items())
    if write is prometheus:
        return
    made = trace(str(log))
    assert len(made) == len(SERVED)
    assert np.diff(made.arrival_s) == pytest.approx(np.diff([row.at_s for row in SERVED]), abs=2e-6)
    assert made.prompt_tokens.tolist() == [row.prompt for row in SERVED]
    assert made.output_tokens.tolist() == [row.output for row in SERVED]
