"""Prices of offers: what they rest on, and what wrong input says."""

from __future__ import annotations

import pytest

from harness.engines.costs.prices import listed, prices
from harness.policy.types import UserError
from harness.study import offers
from tests.bench import bench, mistake
from tests.cases import cases
from tests.there import there

CHAT = offers.Load(1024, 256, 0.05)


def test_quant3_prints_three_prices() -> None:
    out = bench("price").stdout.splitlines()
    assert len(out) == 11
    assert out[10].startswith("a request: 1024 tokens in and 256 out")
    assert out[0].startswith("qwen-3-32b")
    assert [line.split()[1:4] for line in out[2:5]] == [["2", "x", "h100"], ["1", "x", "h100"], ["1", "x", "l40s"]]
    assert all(float(line.split()[-3]) > 0 for line in out[2:5])
    assert out[5] == (
        "qwen-3-32b on 2 x h100: server: vLLM 0.15, 8,192 tokens a step, 1,024 sequences, 0.90: 35.0 GiB of KV a GPU, "
        "287k tokens"
    )
    assert "1 x l40s: server: vLLM 0.15, 2,048 tokens a step, 256 sequences, 0.90: " in out[7]
    assert out[8:10] == [f"{kind} {listed()[kind].told}" for kind in ("h100", "l40s")]


def test_a_price_is_hours_over_tokens() -> None:
    cost = offers.cost(offers.offer("qwen-3-32b:dtype=fp8_block@h100"), prices({"h100": "3.6"}), CHAT)
    assert cost.usd_million == pytest.approx(3.6 / 3600 / cost.tokens_s * 1e6)
    assert cost.tpot_s <= CHAT.tpot_s
    assert cost.tokens_s == pytest.approx(cost.seqs / cost.tpot_s)
    twice = offers.cost(offers.offer("qwen-3-32b:dtype=fp8_block@h100"), prices({"h100": "7.2"}), CHAT)
    assert twice.usd_million == pytest.approx(2 * there(cost.usd_million))
    assert offers.cost(offers.offer("llama-3.1-8b@mi300x"), {}, CHAT).usd_million is None


@cases(
    ("words", "line"),
    [
        (["qwen-3-32b"], '"qwen-3-32b" is not MODEL@KIND'),
        (["qwen-3-32b@0xh100"], '"qwen-3-32b@0xh100" is not MODEL@KIND'),
        (["qwen-3-32b@h10"], "unknown GPU kind 'h10'"),
        (["qwen-3-32b@l4"], "qwen-3-32b and one request do not fit on 1 x l4"),
        (["gpt-oss-120b@h100", "--set", "gpus=3"], "--set gpus: it changes no price"),
        (["--price", "h100=much"], '--price h100="much" is not a number above 0'),
        (["llama-3.1-8b@h100", "--tpot", "0.1"], "llama-3.1-8b on 1 x h100: a step takes more than 0.1 ms"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], line: str) -> None:
    mistake(bench("price", *words), line)


def test_one_offer_is_priced_by_the_tokens_asked_for() -> None:
    short, long = (bench("price", "llama-3.1-8b@h100", "--prompt", tokens).stdout for tokens in ("100", "4000"))
    usd = [float(out.splitlines()[0].split("costs ")[1].split()[0]) for out in (short, long)]
    assert usd[0] < usd[1]
    assert "a request: 4000 tokens in and 256 out" in long


def test_a_kind_whose_name_ends_in_x_may_be_several() -> None:
    assert offers.offer("llama-3.1-8b@2xmi300x") == ("llama-3.1-8b", "mi300x", 2)
    assert offers.offer("llama-3.1-8b@mi300x") == ("llama-3.1-8b", "mi300x", 1)


def test_an_offer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="no model"):
        offers.cost(offers.offer("qwen-3-33b@h100"), {}, CHAT)
