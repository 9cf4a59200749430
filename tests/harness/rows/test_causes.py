"""Requests whose cause is known by hand: each definition names the cause in the part whose limit was missed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from harness.answers import explain
from harness.engines.servers.account import failures
from harness.rows import causes, record
from harness.rows.definitions import DEFINITIONS
from tests.cases import cases
from tests.harness.rows.test_metrics import rows, table
from tests.there import there

SLO = {"a": (1.0, 0.1)}  # 1 s to the first token, 0.1 s for each other

# Eleven tokens each. Waits named ttft_ are those until the first token.
LATE_FIRST = {  # first at 3 s, of which 2.5 s for KV; then a time slice of 0.4 s: TPOT is met
    "tokens": [3 + 0.06 * k for k in range(11)],
    "ttft_kv": 2.5,
    "ttft_compute": 0.5,
    "compute": 0.2,
    "time_slice": 0.4,
}
SLOW_DECODE = {  # first at 0.9 s, of which 0.8 s for weights; then 2 s, of which contention 0.6 s and 1.4 s in steps
    "tokens": [0.9 + 0.2 * k for k in range(11)],
    "ttft_load": 0.8,
    "ttft_compute": 0.1,
    "compute": 1.4,
    "contention": 0.6,
}
BATCHED = SLOW_DECODE | {"alone_prefill": 0.1, "alone_decode": 0.3}  # alone 0.3 s of steps: batching took 1.1 s
BOTH = {  # 1.2 s for admission, then 1.5 s for a step: both limits are missed, and the decode's wait is the longer
    "tokens": [1.5 + 0.2 * k for k in range(11)],
    "ttft_admission": 1.2,
    "ttft_compute": 0.3,
    "queue": 1.5,
    "compute": 0.5,
}
STALLED = {  # in time, but for one gap of 0.5 s for a transfer in the middle of its decode: TPOT 0.09 s
    "tokens": [0.1 + 0.045 * k + 0.45 * (k > 5) for k in range(11)],
    "ttft_host": 0.1,
    "transfer": 0.45,
    "compute": 0.45,
}
THINLY = {  # a hundred gaps within the limit, in each 0.05 s of contention; one is 0.45 s longer, for a transfer
    "tokens": [0.1 + 0.09 * k + 0.45 * (k > 50) for k in range(101)],
    "ttft_host": 0.1,
    "compute": 4.0,
    "contention": 5.0,
    "transfer": 0.45,
    "gap_compute": 0.04,
    "gap_contention": 0.05,
    "gap_transfer": 0.45,
    "alone_prefill": 0.0,
    "alone_decode": 4.0,
}
LONG_STEP = {  # ten steps of 0.03 s alone; one took 0.2 s, batched with a prompt, and contention 0.1 s more
    "tokens": [0.1 + 0.03 * k + 0.27 * (k > 5) for k in range(11)],
    "ttft_host": 0.1,
    "compute": 0.47,
    "contention": 0.1,
    "gap_compute": 0.2,
    "gap_contention": 0.1,
    "alone_prefill": 0.0,
    "alone_decode": 0.3,
}
NEVER_BEGAN = {"ttft_load": 9.0, "ttft_kv": 1.0}
CUT = {"tokens": [0.5, 0.6], "state": "unfinished", "ttft_load": 0.5, "compute": 0.1, "queue": 8.0}


def cause(definition: str, request: dict[str, Any]) -> str:
    requests = rows(request)
    score = there(DEFINITIONS[definition].score(requests, SLO))
    assert score[0] < 1
    shares = causes.shares(requests, SLO, definition, score)
    assert sum(shares.values()) == 1
    return max(shares, key=lambda wait: shares[wait])


KNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("both", LATE_FIRST, "kv"),
    ("both", SLOW_DECODE, "contention"),  # not the weights, which came in time
    ("both", BATCHED, "compute"),
    ("both", BOTH, "queue"),
    ("ttft", LATE_FIRST, "kv"),
    ("ttft", BOTH, "admission"),
    ("tpot", SLOW_DECODE, "contention"),
    ("tpot", BOTH, "queue"),
    ("e2e", LATE_FIRST, "kv"),
    ("e2e", SLOW_DECODE, "load"),  # of the whole life
    ("itl", STALLED, "transfer"),
    ("itl", SLOW_DECODE, "contention"),  # its gaps are not known
    ("itl", THINLY, "transfer"),
    ("itl", LONG_STEP, "compute"),  # beyond one step alone, not beyond all of them
    ("token", LATE_FIRST, "kv"),
    ("token", SLOW_DECODE, "contention"),
    ("qos", LATE_FIRST, "kv"),
    ("qos", SLOW_DECODE, "contention"),
    *((name, NEVER_BEGAN, "load") for name in ("both", "ttft", "tpot", "e2e")),
    *((name, CUT, "queue") for name in ("both", "ttft", "tpot", "itl", "token", "qos")),
]


@cases(("definition", "request_", "wait"), KNOWN)
def test_a_miss_has_its_known_cause(definition: str, request_: dict[str, Any], wait: str) -> None:
    assert cause(definition, request_) == wait


def test_its_longest_gap_is_told_of_a_request() -> None:
    text = "\n".join(explain.request(table(THINLY), 0, SLO))
    (line,) = (line for line in text.splitlines() if "its longest gap between two tokens, 0.54 s: " in line)
    assert " 0.45 s (83 %), " in line
    assert "longest gap" not in "\n".join(explain.request(table(STALLED), 0, SLO))  # not known
    assert "longest gap" not in "\n".join(explain.request(table(THINLY), 0, {"a": (1.0, 0.6)}))


def test_a_request_that_failed_missed_for_that_whatever_it_waited_for() -> None:
    """vllm-project/vllm#24005: a server that ignores ignore_eos ends after 10 of 41 tokens, all in time."""
    early = {"tokens": [0.1 + 0.01 * k for k in range(10)], "ttft_host": 0.1, "compute": 0.09, "output": 41}
    for name in ("both", "ttft", "tpot", "e2e", "token"):
        assert cause(name, early | {"state": "failed"}) == "failed"
    stuck = NEVER_BEGAN | {"state": "failed"}
    assert cause("both", stuck) == "failed"
    requests = rows(early | {"state": "failed"}, NEVER_BEGAN, LATE_FIRST)
    score = there(DEFINITIONS["both"].score(requests, SLO))
    shares = causes.shares(requests, SLO, "both", score)
    some = {name: share for name, share in shares.items() if share}
    assert some == pytest.approx(dict.fromkeys(("failed", "load", "kv"), 1 / 3))
    assert set(shares) == set(explain.CAUSES)
    lines = list(explain.misses(table(early | {"state": "failed"}), math.inf, SLO, "both", "bench explain x"))
    assert lines[1].split()[-1] == "failed"
    assert lines[2].split()[-2:] == ["100", "%"]


def test_failures_are_said_with_their_reasons() -> None:
    short = "ended after 10 of 41 tokens: the server ignores ignore_eos"
    refused = [f"HTTP 503: busy, {k} wait" for k in range(3)]
    counted = failures([short, short, "", *refused])
    assert counted == {short: 2, f"as {refused[0]}": 3}
    runs = [{"counts": {"done": 35, "failed": 5}, "failures": counted}, {"counts": {"done": 40}}]
    assert explain.failed(runs) == f"5 of 80 requests failed: 3 as {refused[0]}; 2 {short}"
    assert explain.failed(runs[1:]) == ""
    many = [{"counts": {"failed": 4}, "failures": dict.fromkeys("abcd", 1)}]
    assert explain.failed(many) == "4 of 4 requests failed: 1 a; 1 b; 1 c; and 1 reason more"


def test_a_miss_without_excess_is_slow_alone() -> None:
    alone = {"tokens": [2.0], "ttft_compute": 2.0, "alone_prefill": 2.0, "alone_decode": 0.0}
    assert cause("ttft", alone) == "compute"


def test_excess_is_what_it_takes_beyond_alone() -> None:
    excess_s = causes.excess_s(rows(BATCHED | {"ttft_host": 0.01}))
    named = {(part, wait): excess_s[0, part, k] for part in (0, 1) for k, wait in enumerate(record.WAITS)}
    above = {key: round(x, 9) for key, x in named.items() if x > 1e-12}
    assert above == {(0, "load"): 0.8, (1, "compute"): 1.1, (1, "contention"): 0.6}


def test_no_miss_has_no_cause() -> None:
    assert causes.shares(rows(LATE_FIRST), SLO, "both", np.ones(1)) == {}
