"""Tables fitted to outside measurements: rows that a known table makes give that table back."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from harness import toml
from harness.calibrate import steps
from harness.calibrate.rows import Measurement, read
from harness.engines.costs import profile, whole
from harness.engines.costs.quantities import GpuSpec
from harness.policy.types import UserError
from tests import ROOT
from tests.cases import cases
from tests.harness.engines.costs import whole_table
from workloads.models import shape

API_S = 0.0007
MODELS = {"llama-tiny": 1.0, "llama-3.2-1b": 7.0}  # each a known table, so many times as slow
MOST, SLOTS = 1000, 4
SEQ_S, CTX_S, AREA_S = 2e-4, 1.5e-6, 3e-8


@dataclass(frozen=True)
class Known:
    """A table of lines that bend at some of the fit's knots."""

    times: float

    def seconds(self, m: int) -> float:
        """Return the seconds of a step of m tokens without context."""
        return self.times * (2e-3 + 5e-4 * min(m, 8) + 2e-4 * max(0, min(m, 128) - 8) + 1e-4 * max(0, m - 128))

    def step_s(self, seqs: int, ctx: float, prompt: int = 0) -> float:
        """Return the seconds of any step."""
        line = SEQ_S * (seqs + (prompt > 0)) + CTX_S * ctx + AREA_S * prompt**2 / 2
        return self.seconds(seqs + prompt) + self.times * line


def prefill(model: str, seconds: float, tokens: int, *, held: bool = False) -> Measurement:
    return Measurement("prefill", {"shape": model, "tokens": tokens, "held": held}, seconds)


def decode(model: str, seconds: float, seqs: int, ctx: float, *, held: bool = False) -> Measurement:
    return Measurement("decode", {"shape": model, "seqs": seqs, "held": held}, seconds, facts={"ctx_tokens": ctx})


def side_by_side(servers: int, seqs: int, seconds: float, alone_s: float) -> Measurement:
    return Measurement("beside", {"servers": servers, "seqs": seqs}, seconds, facts={"alone_s": alone_s})


def rows(noise: Callable[[], float] = lambda: 1.0) -> Iterator[Measurement]:
    for name, times in MODELS.items():
        known = Known(times)
        for p in (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 384, 512, 768, MOST):
            yield prefill(name, noise() * (API_S + known.step_s(0, 0, p)), p, held=p in {3, 64, 384})
        for seqs in (1, 2, 3, SLOTS):
            for ctx in (20, 300, 800):
                C = seqs * (ctx + 12.0)
                yield decode(name, noise() * known.step_s(seqs, C), seqs, C, held=seqs == 3)


def table_of(fitted: steps.Fitted) -> whole.Machine:
    co_run = whole_table.beside(1.0, 1.0)
    return toml.convert(whole_table.file(host=fitted.host, steps=fitted.steps, co_run=co_run), whole.Machine)


def predicted(machine: whole.Machine, name: str) -> profile.Row:
    return profile.row(whole.tables([(shape(name), 1)], machine), 0)


def test_rows_of_a_known_table_give_it_back() -> None:
    fitted = steps.fit(list(rows()), "by hand")
    assert fitted.host["api_in_s"] == pytest.approx(API_S, rel=1e-4)
    assert fitted.host["sigma"] < 1e-6
    for name, times in MODELS.items():
        q, known = fitted.steps[name], Known(times)
        assert q["tokens"] == [1, 2, 4, 8, 32, 128, 512, MOST]
        assert q["seconds"] == pytest.approx([known.seconds(m) for m in q["tokens"]], rel=1e-4)
        assert (q["seq_s"], q["ctx_s"], q["area_s"]) == pytest.approx(
            (times * SEQ_S, times * CTX_S, times * AREA_S), rel=1e-3
        )
        assert q["fit"]["p95"] == q["held"]["p95"] == 0.0
        assert (q["fit"]["n"], q["held"]["n"]) == (21, 6)
        row = predicted(table_of(fitted), name)
        for p in (5, 77, MOST):
            assert profile.step_s(row, p=p, n=1, area=p * p / 2) == pytest.approx(known.step_s(0, 0, p), rel=1e-3)
        assert profile.step_s(row, B=3, C=900) == pytest.approx(known.step_s(3, 900), rel=1e-3)


def test_noise_stays_within_its_own_bounds_on_what_was_held_out() -> None:
    rng = np.random.default_rng(3)
    fitted = steps.fit(list(rows(lambda: float(np.exp(rng.normal(0, 0.03))))), "by hand")
    for name, times in MODELS.items():
        row, known = predicted(table_of(fitted), name), Known(times)
        for p in (24, 200, 600):
            assert profile.step_s(row, p=p, n=1, area=p * p / 2) == pytest.approx(known.step_s(0, 0, p), rel=0.06)
        for seqs in (1, 2, 3, 4):
            assert profile.step_s(row, B=seqs, C=300 * seqs) == pytest.approx(known.step_s(seqs, 300 * seqs), rel=0.06)
        assert 0.0 < fitted.steps[name]["held"]["median"] < 0.06
    assert 0.01 < fitted.host["sigma"] < 0.05


def test_numbers_are_not_negative_and_seconds_never_fall() -> None:
    falling = [
        row._replace(at={**row.at, "shape": "llama-tiny", "held": False}, seconds=0.01 / steps.work(row).tokens ** 0.1)
        for row in rows()
    ]
    q = steps.fit(falling, "by hand").steps["llama-tiny"]
    assert min(q["seq_s"], q["ctx_s"], q["area_s"]) >= 0.0
    assert q["seconds"] == sorted(q["seconds"])
    assert q["seconds"][0] > 0.0


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(UserError, match=r"2 measured steps do not tell \d+ numbers apart"):
        steps.fit([prefill("m", 0.1, 10), prefill("m", 0.2, 20)], "by hand")
    with pytest.raises(UserError, match="m was measured with one token a step alone"):
        steps.fit([decode("m", 0.1, 1, 10.0)], "by hand")
    with pytest.raises(UserError, match="no prefill was measured side by side"):
        steps.co_run([], "by hand")
    with pytest.raises(UserError, match="no decode was measured side by side"):
        steps.co_run([side_by_side(2, 0, 1.8, 1.0)], "by hand")


@cases(("share", "factor"), [(0.5, 1.0), (0.62, 1.0), (1.0, 1.0), (1.0, 2.5), (0.25, 1.0)])
def test_servers_side_by_side_tell_their_share(share: float, factor: float) -> None:
    """Two of half a machine each do not slow each other down, four of them take twice as long."""
    pairs = [(k, alone_s) for k in (2, 4) for alone_s in (0.1, 2.0)]
    measured = [side_by_side(k, 1, alone_s * (1 + factor * (max(1, k * share) - 1)), alone_s) for k, alone_s in pairs]
    apart = [side_by_side(k, 0, alone_s * max(1, k * 0.65), alone_s) for k, alone_s in pairs]
    fitted = steps.co_run([*measured, *apart], "by hand")
    for phase, numbers in (("decode", (share, factor)), ("prefill", (0.65, 1.0))):
        assert (fitted[phase]["share"], fitted[phase]["factor"]) == pytest.approx(numbers, rel=0.01)
        assert fitted[phase]["fit"]["p95"] < 0.01


def test_rows_become_a_table() -> None:
    spans = {"start": (0.6, 0.8), "stop": (0.1,), "sleep": (0.2,), "wake": (0.3,)}
    way = {what: {"way": "sleep"} if what in {"sleep", "wake"} else {} for what in spans}
    lines = [
        *rows(),
        side_by_side(2, 0, 0.13, 0.1),
        side_by_side(2, 4, 0.2, 0.1),
        *(Measurement(what, {"shape": "x", **way[what]}, s) for what, every in spans.items() for s in every),
    ]
    spec = dict.fromkeys(GpuSpec._fields[2:], (10e9, "a copy")) | {"sms": (2.0, "cores")}
    about = steps.About("desk", "a desk", "by hand", {"batch_cap": 4}, spec, ["cold", "host"], {"x": 10**9})
    file, fitted = steps.table(lines, about)
    assert fitted.steps == steps.fit(list(rows()), "by hand").steps
    shares = {phase: (its["share"], its["factor"]) for phase, its in file["co_run"].items()}
    assert shares == {"prefill": (0.65, 1.0), "decode": (1.0, 1.0)}
    assert {way: rung["fixed_s"] for way, rung in file["ladder"].items()} == {
        "cold": pytest.approx(0.6), "host": pytest.approx(0.6), "sleep": pytest.approx(0.2),
    }  # fmt: skip  # a run adds the copy of the weights, 0.1 s
    assert file["spec"]["sms"] == {"value": 2.0, "source": "cores"}
    assert toml.convert(file, whole.Machine).spec.sms.value == 2.0


CPU = ROOT / "results" / "cpu"


@cases("path", [CPU / "llamacpp-cpu.toml", CPU / "vllm" / "vllm-cpu.toml"])
def test_a_committed_table_is_what_its_journal_gives(path: Path) -> None:
    """Within 2 %: the last digits of a fit depend on the processor."""
    there = tomllib.loads(path.read_text("utf-8"))
    rows = read(path.parent / "raw.jsonl")
    by_model = steps.fit(rows, "by hand").steps
    assert by_model.keys() == there["steps"].keys()
    for model, fitted in by_model.items():
        assert fitted["seconds"] == pytest.approx(there["steps"][model]["seconds"], rel=0.02)
    for phase, its in steps.co_run(rows, "by hand").items():
        assert {key: its[key] for key in ("share", "factor")} == pytest.approx(
            {key: there["co_run"][phase][key] for key in ("share", "factor")}, rel=0.02
        )
