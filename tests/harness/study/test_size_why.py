"""Reasons why fewer GPUs do not hold: which count is explained, which resource binds, which change is advised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.answers import size as words
from harness.policy.types import UserError
from harness.study import size_why
from harness.study.binds import Hour
from harness.study.size import SizeSearch
from harness.study.size_kept import Kept, Words
from harness.study.size_why import Change, Why, scaled
from harness.study.sized import Best, Outcome, Tried
from tests.bench import bench, ok
from tests.cases import cases
from tests.harness.study.test_size_search import question, verdict


def tried(label: str, gpus: int, worst: float | None, *, answer: bool = False, unfit: str = "") -> Tried:
    return Tried("h100", label, gpus, 72.0 * gpus, worst, None, None, worst, "m" if worst else None, unfit, answer, ())


def kept(*rows: Tried, best: tuple[str, str, int] | None = ("h100", "prism", 3)) -> Kept:
    return Kept(question(), best and Best(*best), Words("three", "", [], []), {}, rows)


ROWS = (
    tried("prism", 1, None, unfit="no room"),
    tried("prism", 2, 0.8),
    tried("prism", 3, 1.0, answer=True),
    tried("static", 2, 0.9),
    tried("static", 4, 0.995, answer=True),
)


def test_the_largest_count_below_the_answer_is_explained() -> None:
    assert size_why._failing(kept(*ROWS), None) == ROWS[1]
    assert size_why._failing(kept(*ROWS), "static") == ROWS[3]
    assert size_why._failing(kept(*ROWS[:2], ROWS[3], best=None), None) == ROWS[3]  # the nearest, where none holds
    with pytest.raises(UserError, match="nothing to explain: prism holds on the fewest GPUs"):
        size_why._failing(kept(ROWS[2]), None)
    with pytest.raises(UserError, match=r'no system "qlm" in this answer \(it has: prism, static\)'):
        size_why._failing(kept(*ROWS), "qlm")


@cases(
    ("rule", "times", "longer"),
    [
        ("5xP95", 2.0, "10xP95"),
        ("absolute:ttft=1,tpot=0.05", 1.5, "1.5xabsolute:ttft=1,tpot=0.05"),
        ("5/2xP95", 2.0, "10/4xP95"),
        ("2xabsolute:ttft=1,tpot=1", 3.0, "6xabsolute:ttft=1,tpot=1"),
    ],
)
def test_a_rule_with_longer_seconds(rule: str, times: float, longer: str) -> None:
    assert scaled(rule, times) == longer


def failed(*changes: tuple[str, bool, Outcome], models: Mapping[str, Mapping[int, Hour]] | None = None) -> Why:
    of = kept(*ROWS)
    made = tuple(
        Change(name, of.asked, name, looser=looser, verdict=each, seconds=1.5) for name, looser, each in changes
    )
    return Why(of, ROWS[1], models or {}, 3 << 30, 2 << 30, made)


HOURS = {"a": {0: Hour(100, 0, {}), 1: Hour(100, 30, {"load": 20, "KV": 10})}, "b": {0: Hour(50, 0, {})}}


def test_what_a_run_confirms_is_advised_and_the_same_slo_comes_first() -> None:
    both = failed(("SLO x 2", True, verdict(2, 1.0, 1.0)), ("elastic", False, verdict(2, 1.0, 0.995)), models=HOURS)
    assert both.cheapest is not None
    assert both.cheapest.what == "elastic"
    first, second, *rest = words.why(both)
    fails = "prism on 2 h100 fails: m meets 80.0 % of its SLOs"
    fails += "; load binds in 67 % of misses, KV binds in 33 % of misses"
    assert first == f"{fails}; 3.0 GiB of weights and processes on 2.0 GiB"
    cheapest = "the cheapest change that a run confirms: elastic, on the same 2 h100 (m least, 99.5 %)"
    assert second == f"{cheapest}; else 1 GPU more (3 h100, $72 more a day)"
    row = "a 85.0 200 load 67 % 1 of 2 hour 1: 70.0 %, load 67 %"
    assert any(line.split() == row.split() for line in rest)
    assert any("2 changes were run in 3.0 s" in line for line in rest)
    looser = failed(("elastic", False, verdict(2, 0.9, 0.5)), ("SLO x 2", True, verdict(2, 1.0, 1.0)))
    assert looser.cheapest is not None
    assert "a longer promise" in [*words.why(looser)][1]
    none = failed(("elastic", False, verdict(2, 0.9, 0.5)))
    told = (
        "the one change that was run does not hold 99 % on 2 h100; the cheapest that runs confirm is 1 GPU more "
        "(3 h100, $72 more a day)"
    )
    assert [*words.why(none)][1] == told
    other = replace(none, tried=ROWS[3])  # not the answer, and holds on more GPUs too
    assert [*words.why(other)][1].endswith("is 2 GPUs more (4 h100, $144 more a day)")


def test_an_explanation_has_the_numbers_of_its_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model meets 98 of 100 in the busiest hour and 999 of 1,000 in the log: 98.0 % stands in both, not 99.7."""
    views = {"log": {"a": {0: Hour(1000, 1, {"KV": 1})}}, "hour": {"a": {0: Hour(100, 2, {"KV": 2})}}}
    monkeypatch.setattr(SizeSearch, "misses", lambda *_: views)
    monkeypatch.setattr(size_why, "_changes", lambda *_: [])
    of = kept(*ROWS)
    reason = size_why.why(of, tmp_path)
    assert reason.met == {"a": pytest.approx(0.98)}
    assert reason.models == {"a": {0: Hour(1100, 3, {"KV": 3})}}
    (row,) = (line.split() for line in words.why(reason) if line.startswith("a "))
    assert row[1:3] == ["98.0", "1,100"]


def test_without_room_weights_bind_where_they_are_more_than_the_memory() -> None:
    unfit = replace(failed(), tried=tried("prism", 2, None, unfit="no placement"))
    assert unfit.first == "weights"
    assert replace(unfit, weights_bytes=1 << 30).first == "KV"
    assert next(words.why(unfit)).startswith(
        "prism on 2 h100 has no room: weights binds (3.0 GiB of weights and processes on 2.0"
    )


@pytest.mark.slow
def test_an_answer_is_explained_by_runs(tmp_path: Path) -> None:
    asked = "size --trace sample --models llama-3.1-8b*8 --systems prism --gpus 1-2 --windows 1 --no-plot --grow 1 -q"
    asked += " --set chunk_tokens=2048 --set batch_cap=256"
    slo = "absolute:ttft=1,tpot=0.05"
    answer = ok(*asked.split(), "--slo", slo, "-o", tmp_path)
    folder = next(tmp_path.glob("*/size.parquet")).parent
    assert f"next: bench explain {folder}" in answer
    lines = ok("explain", folder).splitlines()
    assert lines[0].startswith("prism on 1 h100 fails: llama-3.1-8b/")
    assert "130.2 GiB of weights and processes on" in lines[0]
    assert sum(int(word) for word in lines[-2].split()[:1]) <= size_why.MOST
    assert lines[-1] == f"next: bench report {folder}"
    refused = bench("explain", folder, "--request", "3")
    assert refused.exit_code == 2
    assert "--system alone" in refused.output
