"""SLO rules: what they say of each model, and what is no rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.policy.types import UserError
from tests.cases import cases
from tests.workloads.test_workloads import drawn, fixed
from workloads import slo
from workloads.build import build
from workloads.models import model_set


def test_slo_rules() -> None:
    models = model_set("light8")
    bases = {name: (0.1 * (i + 1), 0.01) for i, name in enumerate(models.names)}
    assert slo.resolve(slo.parse("5/2xP95"), models, bases)["llama-3.2-3b/1"] == pytest.approx((1.0, 0.02))
    five = slo.resolve(slo.parse("5xreleased"), models)["llama-3.1-8b/1"]
    assert five == pytest.approx((0.2143485546, 0.05731449195))
    assert slo.resolve(slo.parse("released"), models)["llama-3.1-8b/1"] == (0.04286971092, 0.01146289839)
    assert set(slo.resolve(slo.parse("absolute:ttft=500ms,tpot=0.05"), models).values()) == {(0.5, 0.05)}
    assert set(slo.resolve(slo.parse("0.3xabsolute:ttft=10,tpot=0.1"), models).values()) == {(3.0, 0.03)}
    with pytest.raises(UserError, match=r"no P95 was measured of llama-3\.2-3b/1"):
        slo.resolve(slo.parse("5xP95"), models, {"llama-3.1-8b/1": (1, 1)})
    with pytest.raises(UserError, match="set heavy8 has no released SLO base"):
        slo.resolve(slo.parse("5xreleased"), model_set("heavy8"))


def test_slo_of_the_requests_own_latency() -> None:
    jobs = build(drawn(30), fixed())
    rule = slo.parse("3/2xsolo")
    assert isinstance(rule, slo.Scaled)
    timed = slo.by_isolated(jobs, rule, 0.001 * jobs.prompt_tokens.astype(np.float64), np.full(len(jobs), 0.01))
    assert timed.ttft_slo_s == pytest.approx(0.003 * jobs.prompt_tokens)
    assert set(timed.tpot_slo_s) == {0.02}
    with pytest.raises(UserError, match="no seconds by model"):
        slo.resolve(rule, fixed())


def test_slo_classes(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        "[class.chat]\nttft_s = 0.5\ntpot_s = 0.05\n[class.batch]\nttft_s = 10\ntpot_s = 1\n"
        '[models]\n"llama-3.1-8b*" = "chat"\n"*" = "batch"\n'
    )
    seconds = slo.resolve(slo.parse(f"classes:{path}"), model_set("light8"))
    assert seconds["llama-3.1-8b/2"] == (0.5, 0.05)
    assert seconds["llama-3.2-1b/2"] == (10.0, 1.0)
    path.write_text('[class.chat]\nttft_s = 0.5\ntpot_s = 0.05\n[models]\n"x*" = "chat"\n')
    with pytest.raises(UserError, match="no SLO class for model"):
        slo.resolve(slo.parse(f"classes:{path}"), model_set("light8"))


def test_a_base_at_a_scale() -> None:
    seconds = "absolute:ttft=10,tpot=0.1"
    assert [slo.in_full(seconds, x) for x in (1, 0.5)] == [seconds, f"0.5x{seconds}"]
    assert (slo.in_full("P95", 5), slo.in_full("5/2xP95", 1)) == ("5xP95", "5/2xP95")
    assert (slo.in_full("P95@l40s", 5), slo.in_full("solo@mi300x", 2)) == ("5xP95@l40s", "2xsolo@mi300x")
    assert [slo.parse(text) for text in ("5xP95@l40s", "3/2xsolo@mi300x")] == [
        slo.Scaled("P95", 5.0, 5.0, "l40s"),
        slo.Scaled("solo", 3.0, 2.0, "mi300x"),
    ]
    assert [slo.by_request(text) for text in ("3xsolo@l40s", "3xP95@l40s", "3xreleased")] == [True, False, False]
    with pytest.raises(UserError, match='"5/2xP95" has no scale'):
        slo.in_full("5/2xP95", 2)


@cases("text", ["", "5", "xP95", "5xP99", "-1xP95", "0xP95", "5/0xP95", "absolute:ttft=1", "infxP95",
                "5xP95@", "P95@h100*2+l40s", "5xreleased@h100", "absolute:ttft=1,tpot=1@h100"])  # fmt: skip
def test_what_is_no_slo_rule(text: str) -> None:
    with pytest.raises(UserError):
        slo.parse(text)
