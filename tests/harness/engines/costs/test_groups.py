"""Data-parallel attention and expert parallelism within an instance: bytes and seconds against hand-worked numbers."""

from __future__ import annotations

import numpy as np
import pytest

from harness.engines.costs import coefficients, experts, kernels, profile, shapes
from harness.engines.costs.quantities import gpu, quantities
from harness.policy.parameters import parameters
from harness.policy.types import Experts, Latent, Shape, UserError
from workloads import models
from workloads.models import model_set, shape

# 4 layers of hidden 1024: 16 heads and 4 KV heads of 64; 8 experts of width 512, 2 a token; 16 bits.
SMALL = Shape("small", 4, 1024, 16, 4, 64, 2048, 32000, True, False, 4096, experts=Experts(4, 8, 2, 512))


def test_each_group_has_whole_attention_and_its_own_sequences_kv() -> None:
    q, kv = 1024 * 16 * 64, 1024 * 4 * 64
    of = parameters(SMALL._replace(dp=4, ep=4), 4)
    assert of.attention == 4 * (2 * q + 2 * kv)  # layers x (Q, output, K, V), none of them cut
    assert of.experts == 4 * 2 * 3 * 1024 * 512  # layers x two whole experts x three matrices
    assert parameters(SMALL, 4).attention == of.attention // 4
    assert parameters(SMALL, 4).experts == of.experts
    # A token is in one group of four, whose one GPU has all of its KV: K and V x layers x heads x 64 x 2 bytes.
    assert shapes.kv_token_bytes(SMALL._replace(dp=4), 4) == 2 * 4 * 4 * 64 * 2 // 4
    assert shapes.kv_token_bytes(SMALL._replace(dp=2), 4) == 2 * 4 * 2 * 64 * 2 // 2
    # One GPU stands for the whole model.
    assert parameters(SMALL._replace(dp=4, ep=4)) == parameters(SMALL)


def test_latent_kv_is_copied_by_tensor_parallelism_and_divided_by_groups() -> None:
    mla = SMALL._replace(latent=Latent(512, 512, 128, 64, 128))
    assert shapes.kv_token_bytes(mla, 4) == 4 * (512 + 64) * 2
    assert shapes.kv_token_bytes(mla._replace(dp=4), 4) == 4 * (512 + 64) * 2 // 4


def test_a_steps_collectives_are_the_tables() -> None:
    q = quantities("h200")
    knot = 2048 * 1024  # elements of 2,048 tokens, a knot of the table
    assert knot in q["all_gather"]["elements"]
    k = q["all_gather"]["elements"].index(knot)
    after, last = kernels.exchanges_s(q, SMALL._replace(dp=4), 4, 2048)
    assert float(after) == pytest.approx(3.594e-5)
    assert float(last) == pytest.approx(q["reduce_scatter"]["tp4_s"][k])
    # Two groups of two: an all-reduce of a group's 1,024 tokens, and an exchange over two.
    within = float(kernels.all_reduce_s(q["all_reduce"], 2, 1024 * 1024))
    after, last = kernels.exchanges_s(q, SMALL._replace(dp=2), 4, 2048)
    assert float(after) == pytest.approx(within + q["all_gather"]["tp2_s"][k])
    assert float(last) == pytest.approx(within + q["reduce_scatter"]["tp2_s"][k])
    # Without groups an all-reduce each, also where experts are dealt.
    for ep in (1, 4):
        both = [float(x) for x in kernels.exchanges_s(q, SMALL._replace(ep=ep), 4, 2048)]
        assert both == [float(kernels.all_reduce_s(q["all_reduce"], 4, knot))] * 2


def test_the_fullest_group_decides_attention() -> None:
    q, spec, cut = quantities("h200"), gpu("h200"), SMALL._replace(dp=4)
    assert kernels.in_group(cut, np.array([1, 4, 5, 64])).tolist() == [1, 1, 2, 16]
    ours = kernels.decode_attention_s(q, spec, cut, 4, 64, 1024)
    assert float(ours) == float(kernels.decode_attention_s(q, spec, SMALL, 1, 16, 1024))


def test_dealt_experts_wait_for_the_fullest_part() -> None:
    q, spec = quantities("h200")["experts_bf16"], gpu("h200")

    def each_s(ep: int, spread: str) -> float:
        return float(experts.experts_s(q, spec, 512, 1024, 512, 2, 8, 2.0, spread, ep=ep))

    rows = experts.loads(512, 2, 8, "power_law_1.2")
    assert rows[3::4].sum() > rows.sum() / 4
    assert each_s(4, "balanced") < each_s(4, "power_law_1.2") < each_s(1, "power_law_1.2")


def test_groups_trade_short_steps_for_more_kv() -> None:
    rows = [(shape(f"deepseek-v3{cut}"), 8) for cut in ("", ":dp=8:ep=8")]
    table = coefficients.tables(rows, "h200", "vllm-0.15")
    whole, groups = (profile.row(table, i) for i in (0, 1))
    assert groups.cost["kbytes"] == whole.cost["kbytes"] / 8 == 61 * 576 * 2 / 8
    assert profile.step_s(groups, B=1, C=1024) > profile.step_s(whole, B=1, C=1024)  # an exchange for one token
    long = 256 * 4096  # tokens of KV that each GPU reads with tensor parallelism alone
    assert profile.step_s(groups, B=256, C=long) < profile.step_s(whole, B=256, C=long)


def test_slower_links_bound_collectives_and_own_no_measured_error() -> None:
    n, tp = 8192 * 4096, 4
    for kind, wire in (("h800", 160e9), ("a10", 24.8e9)):
        q = quantities(kind)
        once = (tp - 1) / tp * 2 * n / wire  # bytes of bf16 that pass a link of the ring
        for op in ("all_gather", "reduce_scatter"):
            assert float(kernels.collective_s(q, op, tp, n)) == pytest.approx(once)
            assert "held" not in q[op]
        assert float(kernels.all_reduce_s(q["all_reduce"], tp, n)) == pytest.approx(2 * once)
    fast = float(kernels.collective_s(quantities("h100"), "all_gather", tp, n))
    assert fast < (tp - 1) / tp * 2 * n / 160e9


def test_what_does_not_divide_is_refused_in_a_line() -> None:
    assert model_set("deepseek-v3:tp=8:dp=8:ep=8").members[0].shape[-2:] == (8, 8)
    assert models.as_asked("deepseek-v3:tp=8:dp=2") == ("deepseek-v3:dp=2",)
    assert shapes.degrees(shape("deepseek-v3:dp=4")) == (4, 8)
    for text, why in (
        ("deepseek-v3:dp=2", r"dp=2 does not divide its 1 GPU \(tp=1\)"),
        ("deepseek-v3:tp=8:ep=3", "256 experts do not divide by ep=3"),
        ("llama-3.1-8b:tp=2:ep=2", "ep=2 divides experts among GPUs, and llama-3.1-8b has none"),
        ("deepseek-v3:tp=8:dp=0", 'dp is "0", not a count of GPUs'),
    ):
        with pytest.raises(UserError, match=why):
            model_set(text)
    assert shapes.beyond_dense(SMALL._replace(dp=2)) == "data-parallel attention (dp=2)"
    assert shapes.beyond_dense(SMALL._replace(ep=2)) == "expert parallelism (ep=2)"
    with pytest.raises(UserError, match="dp=4 does not split over tp 2"):
        shapes.weight_bytes(SMALL._replace(dp=4), 2)
