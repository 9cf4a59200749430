"""Costs of quantised models and mixtures: laws of bytes and arithmetic, worked numbers, errors as committed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.answers.notes import roofline
from harness.calibrate import formats
from harness.engines.costs import coefficients, experts, kernels, profile, quantities, shapes
from harness.policy.types import Format, Sliding
from harness.run.spec import Spec
from tests.there import there
from workloads import quantised
from workloads.models import shape

KINDS = ("a100-80g", "h100", "h200", "l40s", "b200", "rtx-pro-6000", "a10", "l4", "mi300x")
HOST = "none"
MOE = ("gpt-oss-120b", "qwen-3-30b-a3b", "qwen-3-235b-a22b:dtype=fp8_block", "deepseek-v3", "llama-4-scout")


def step_s(name: str, kind: str, B: int, ctx: int, tp: int = 1) -> float:
    """Return the seconds of a decode step without a host."""
    t = coefficients.tables([(shape(name), tp)], kind, HOST)
    return profile.step_s(profile.row(t, 0), B=B, C=B * ctx)


# ------------------------------------------------------------------ experts touched


@given(st.integers(1, 512), st.integers(1, 8), st.integers(8, 512), st.sampled_from(experts.SPREADS))
def test_experts_touched_rise_with_tokens_to_all(tokens: int, top: int, routed: int, spread: str) -> None:
    top = min(top, routed)
    few, many = experts.touched([tokens, 2 * tokens], top, routed, spread)
    assert 0 < few <= 1.05 * many + 1  # rounding moves a few rows
    assert many <= min(routed, 2 * tokens * top) + 1e-9
    rows = experts.loads(tokens, top, routed, spread)
    assert rows.sum() == pytest.approx(tokens * top)
    assert rows.max() <= tokens + 1e-9


def test_a_power_law_is_drawn_as_the_measured_calls_drew_it() -> None:
    """AIConfigurator, collector/helper.py, `_generate_power_law_distribution`: on [0.01, 2] up to a row an expert."""
    few, many = (experts.loads(tokens, 4, 128, "power_law_1.01") for tokens in (32, 33))
    u = (np.arange(128) + 0.5) / 128
    part = (0.01**-0.01 + u * (2**-0.01 - 0.01**-0.01)) ** (1 / -0.01)
    assert few.tolist() == sorted(few.tolist())
    rounded = np.round(128 * part / part.sum())
    assert (few - np.sort(rounded)).sum() == 128 - rounded.sum() == 9  # what rounding lacks goes to the fewest
    assert (few > 0).sum() == (rounded > 0).sum() + 9
    assert experts.touched([8, 16, 32, 33], 4, 128, "power_law_1.01").tolist() == [32, 48, 66, 86]
    assert (many >= 0).all()
    assert experts.loads([1, 4], 8, 384, "power_law_1.2").sum(axis=-1).tolist() == [8, 32]


def test_balanced_experts_are_touched_as_counted() -> None:
    assert experts.touched([1, 4, 16, 32, 64], 4, 128, "balanced").tolist() == [4, 16, 64, 128, 128]


def test_a_steps_weights_are_those_of_the_experts_it_touches() -> None:
    oss = shape("gpt-oss-120b")
    c = coefficients.tables([(oss, 1)], "h200", HOST).cost[0]
    each = 36 * 128 * 3 * 2880 * 2880 * 0.53125
    assert c["xbytes"] == pytest.approx(each)
    assert c["xmiss"] == 1 - 4 / 128
    attention = 36 * 2880 * 64 * (2 * 64 + 2 * 8) * 2
    assert c["wbytes"] == pytest.approx(attention + 201088 * 2880 * 2 + 36 * 2880 * 128 * 2)
    # Of 128 experts a token's 4 and 1 - (31/32)^64 of all for 64 tokens.
    assert each * (1 - c["xmiss"]) == pytest.approx(each * 4 / 128)
    assert 1 - c["xmiss"] ** 64 == pytest.approx(0.8689, abs=1e-4)


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("kind", KINDS)
def test_every_checkpoint_has_a_price_on_every_kind(name: str, kind: str) -> None:
    steps = [step_s(name, kind, B, 1024) for B in (1, 8, 64, 256)]
    assert all(0 < a <= b for a, b in pairwise(steps))
    spec, c = quantities.gpu(kind), coefficients.tables([(shape(name), 1)], kind, HOST).cost[0]
    assert steps[0] >= c["wbytes"] / spec.hbm  # what every step reads


def test_weight_only_formats_multiply_as_16_bits_do() -> None:
    """On an A100 an FP8 checkpoint loads half the bytes and gains nothing in a long prompt."""
    t = coefficients.tables([(shape(n), 1) for n in ("qwen-3-14b", "qwen-3-14b:dtype=fp8")], "a100-80g", HOST)
    prompt = [profile.step_s(profile.row(t, i), p=8192, n=1, area=8192**2 / 2) for i in range(2)]
    assert prompt[1] == pytest.approx(prompt[0], rel=0.25)


def test_an_fp8_cache_halves_what_long_contexts_read() -> None:
    def slope(name: str) -> float:
        return float(coefficients.tables([(shape(name), 1)], "h200", HOST).cost[0]["dec2"])

    assert 0.4 < slope("llama-3.1-8b:kv_dtype=fp8") / slope("llama-3.1-8b") < 0.75


def test_sliding_layers_stop_at_their_window() -> None:
    oss = shape("gpt-oss-120b")
    q, spec = quantities.quantities("h200"), quantities.gpu("h200")
    both = [float(kernels.decode_attention_s(q, spec, oss, 1, 32, ctx)) for ctx in (8192, 16384)]
    full = [float(kernels.decode_attention_s(q, spec, oss._replace(sliding=None), 1, 32, ctx)) for ctx in (8192, 16384)]
    assert both[1] - both[0] == pytest.approx((full[1] - full[0]) / 2)  # 18 of 36 layers


def test_layers_of_unlike_heads_cost_what_their_parts_do() -> None:
    """Half of the layers as they are, half with other heads: the mean of both shapes, in bytes and in seconds."""
    near, q, spec = shape("llama-3.1-8b"), quantities.quantities("h200"), quantities.gpu("h200")
    far = near._replace(kv_heads=4, head_dim=256)
    both = far._replace(sliding=Sliding(16, 1 << 20, near.kv_heads, near.head_dim))
    B, each = np.array([32.0]), (near, far, both)
    decode = [float(kernels.decode_kernels_s(q, spec, s, 1, B, 4096.0)[0]) for s in each]
    prefill = [float(kernels.prefill_kernels_s(q, spec, s, 1, B, np.array([4096.0]))[0]) for s in each]
    assert decode[2] == pytest.approx(sum(decode[:2]) / 2)
    assert prefill[2] == pytest.approx(sum(prefill[:2]) / 2)
    table = coefficients.tables([(s, 1) for s in (near, far, both)], "h200", HOST).cost
    for column in ("kbytes", "wbytes", "fl_tok", "fl_area", "query_bytes", "result_bytes"):
        assert table[column][2] == pytest.approx(table[column][:2].mean()), column


def test_latent_attention_reads_one_vector_for_all_heads() -> None:
    v3, q, spec = shape("deepseek-v3"), quantities.quantities("h200"), quantities.gpu("h200")
    grown = np.diff([float(kernels.decode_attention_s(q, spec, v3, 8, 1, ctx)) for ctx in (100_000, 200_000)])[0]
    read = 61 * 100_000 * 576 * 2 / (0.8 * spec.hbm)
    arithmetic = 61 * 2 * 100_000 * 128 / 8 * (576 + 512) / (0.6 * spec.flops)
    assert grown == pytest.approx(max(read, arithmetic))


def test_layers_without_experts_are_dense() -> None:
    v3 = shape("deepseek-v3")
    dense = v3._replace(experts=there(v3.experts)._replace(layers=1))
    t = coefficients.tables([(v3, 8), (dense, 8)], "h200", HOST)
    assert t.gemm[0, -1] != t.gemm[1, -1]


# ------------------------------------------------------------------ what is a roofline says so


def test_the_share_of_a_step_that_is_a_roofline() -> None:
    def share(name: str, kind: str) -> float:
        return kernels.roofline_share(quantities.quantities(kind), quantities.gpu(kind), shape(name), 1)

    assert share("gpt-oss-120b", "h200") == 0
    assert share("qwen-3-30b-a3b", "a100-80g") == 0
    assert 0.5 < share("qwen-3-32b:dtype=int4", "h100") < 1  # all products but the head
    assert share("qwen-3-32b:dtype=int4", "a100-80g") == 0  # measured there
    assert 0 < share("deepseek-v3", "h200") < 0.5  # its attention
    assert share("qwen-3-32b:dtype=fp8", "l4") > 0.9  # nothing was measured on the card


def test_what_no_server_runs_is_priced_as_its_neighbour() -> None:
    for (kind, name), instead in formats.PRICED_AS.items():
        q = quantities.quantities(kind)
        of, its = q[instead.of], q[name]
        assert its["source"].startswith(f"roofline: as {instead.of}. ")
        assert its["source"].endswith(instead.why)
        assert "fit" not in its
        same = its.keys() - {"source", "formula", "tiles", "weight_bytes"}
        assert {key: its[key] for key in same} == {key: of[key] for key in same}
        for mine, other in zip(its.get("tiles", ()), of.get("tiles", ()), strict=True):
            assert mine[2] == pytest.approx(other[2] / instead.slower, rel=1e-3)


def test_captions_name_roofline() -> None:
    spec = Spec("static", models="qwen-3-32b:dtype=int4,llama-3.1-8b", gpu="h100")
    (line,) = roofline(spec)
    assert line.startswith("roofline, error unknown, of a decode step of 32 x 1,024 tokens: qwen-3-32b ")
    assert list(roofline(Spec("static", models="heavy8"))) == []
    assert list(roofline(Spec("static", models="gpt-oss-120b", gpu="h200"))) == []


def test_formats_without_a_quantity_keep_their_bytes() -> None:
    q, spec = quantities.quantities("h100"), quantities.gpu("h100")
    for form in (Format("gguf", 0.6), quantised.FORMATS["int4"], quantised.FORMATS["mxfp4"]):
        s = float(kernels.product_s(q, spec, form, 1, 8192, 8192))
        assert s >= form.weight_bytes * 8192**2 / spec.hbm
        assert s < float(kernels.gemm_s(q["gemm"], spec, 1, 8192, 8192))
    assert shapes.format_of(shape("llama-3.1-8b"), "head") == shapes.PLAIN


# ------------------------------------------------------------------ errors as committed
