"""Prices of offers: what they rest on, and what wrong input says."""

from __future__ import annotations

import pytest

from harness.engines.costs import quantities
from harness.engines.costs.prices import listed, prices
from harness.policy.types import UserError
from harness.study import offers
from workloads.models import model_set, sets


def test_quant3_prints_three_prices(capsys: pytest.CaptureFixture[str]) -> None:
    assert offers.main([]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 8
    assert out[0].startswith("qwen-3-32b")
    assert [line.split()[1:4] for line in out[2:5]] == [["2", "x", "h100"], ["1", "x", "h100"], ["1", "x", "l40s"]]
    assert all(float(line.split()[-3]) > 0 for line in out[2:5])
    assert out[5:7] == [f"{kind} {listed()[kind].told}" for kind in ("h100", "l40s")]


def test_a_price_is_hours_over_tokens() -> None:
    cost = offers.cost(offers.offer("qwen-3-32b:dtype=fp8_block@h100"), prices({"h100": "3.6"}))
    assert cost.usd_million == pytest.approx(3.6 / 3600 / cost.tokens_s * 1e6)
    assert cost.tpot_s <= offers.TPOT_S
    assert cost.tokens_s == pytest.approx(cost.seqs / cost.tpot_s)
    twice = offers.cost(offers.offer("qwen-3-32b:dtype=fp8_block@h100"), prices({"h100": "7.2"}))
    assert cost.usd_million is not None
    assert twice.usd_million == pytest.approx(2 * cost.usd_million)
    assert offers.cost(offers.offer("llama-3.1-8b@mi300x"), {}).usd_million is None


def test_prices_are_of_kinds_that_exist_and_dated() -> None:
    assert all(price.date.count("-") == 2 and price.source for price in listed().values())
    assert set(listed()) <= set(quantities.gpu_kinds())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["qwen-3-32b"], 'error: "qwen-3-32b" is not MODEL@KIND'),
        (["qwen-3-32b@0xh100"], 'error: "qwen-3-32b@0xh100" is not MODEL@KIND'),
        (["qwen-3-32b@h10"], 'error: unknown GPU kind "h10"'.replace('"', "'")),
        (["qwen-3-32b@l4"], "error: qwen-3-32b and one request do not fit on 1 x l4"),
        (["--price", "h100=much"], 'error: --price h100="much" is not a number above 0'),
    ],
)
def test_wrong_input_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert offers.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["today12", "agents8", "quant3"])
def test_sets_of_today_name_their_traffic(name: str) -> None:
    assert name in sets()
    models = model_set(name)
    assert models.trace
    assert len(models.names) == int(name[-2:] if name[-2:].isdigit() else name[-1])


def test_today12_is_what_is_hosted() -> None:
    shapes = [member.shape for member in model_set("today12").members]
    assert sum(shape.experts is not None for shape in shapes) == 2
    formats = [shape.formats and shape.formats.experts.name for shape in shapes]
    assert "mxfp4" in formats
    assert sum(bool(shape.formats) for shape in shapes) >= 6


def test_an_offer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="no model"):
        offers.cost(offers.offer("qwen-3-33b@h100"), {})
