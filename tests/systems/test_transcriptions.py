"""Numbers copied from releases and papers, literally: each list with its file, commit and key, in the file's order.

A changed number or order here is a transcription error, unless the release changed. Prism is prism-research 595ec1f
(Multi-LLM), Aegaeon 25SOSP-Aegaeon 1c3b110 (MachineLearningSystem), MuxServe 2231480 (hao-ai-lab).
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from harness.engines.costs.shapes import weight_bytes
from harness.engines.machine import Config
from harness.policy.types import GIB, KEPT_PAGES, MIB
from harness.study.load import study
from systems import aegaeon, muxserve, prism_released
from systems.aegaeon import Aegaeon
from systems.muxserve import MuxServe
from systems.prism import Prism
from systems.prism_released import PrismReleased
from systems.serverlessllm_released import ServerlessLlmReleased
from tests.cases import cases
from traces import quantiles, synthetic
from traces.load import trace
from workloads.models import model_set, shapes

Model = tuple[str, int, float]  # shape, adapter rank of its stream, seconds by which that is shifted

# Prism, benchmark/multi-model/trace.py, generate_e2e_benchmark_reqs: selected_ranks, and the models that the comments
# of model_ttft_slo_baseline_p95 name.
LIGHT8: list[Model] = [
    ("llama-3.1-8b", 2, 0.0),
    ("llama-3.2-3b", 14, 0.0),
    ("llama-3.2-1b", 3, 0.0),
    ("llama-3.1-8b", 10, 0.0),
    ("llama-3.1-8b", 5, 0.0),
    ("llama-3.2-1b", 19, 0.0),
    ("llama-3.2-1b", 23, 0.0),
    ("llama-3.2-1b", 24, 0.0),
]
# Prism, experiments/experiments_1/model_configs/swap_8_2gpus.json, model_path of model_1 .. model_8. The first cell of
# benchmark/multi-model/vtc_trace_vis.ipynb, generate_e2e_benchmark_reqs, has these model_paths beside selected_ranks.
HEAVY8: list[Model] = [
    ("nemo-12b", 2, 0.0),  # mistralai/Mistral-Nemo-Instruct-2407
    ("nemo-12b", 14, 0.0),
    ("llama-3.1-8b", 3, 0.0),  # meta-llama/Meta-Llama-3.1-8B
    ("nemo-12b", 10, 0.0),
    ("mistral-7b", 5, 0.0),  # mistralai/Mistral-7B-Instruct-v0.2
    ("mistral-7b", 19, 0.0),
    ("llama-3.2-3b", 23, 0.0),  # meta-llama/Llama-3.2-3B
    ("llama-3.2-3b", 24, 0.0),
]
# Prism, benchmark/multi-model/trace.py, generate_e2e_benchmark_reqs_18m: selected_ranks; each reuse is 10 s earlier for
# forward_ranks {14, 19}, later for backward_ranks {2, 10}. Models: benchmark/multi-model/model_lst_18.yml after its
# first two, Llama-2-13b-chat-hf and Llama-2-13b-hf. That the k-th of them is model_k is inferred.
PRISM18: list[Model] = [
    ("phi-3-mini", 5, 0.0),  # microsoft/Phi-3-mini-4k-instruct
    ("phi-3-mini", 10, 0.0),  # microsoft/Phi-3-mini-128k-instruct
    ("phi-3-mini", 4, 0.0),  # microsoft/Phi-3.5-mini-instruct
    ("phi-2", 17, 0.0),  # microsoft/phi-2
    ("powerlm-3b", 2, 0.0),  # ibm/PowerLM-3b
    ("phi-1.5", 10, 10.0),  # microsoft/phi-1_5
    ("olmo-1b", 23, 0.0),  # allenai/OLMo-1B-hf
    ("starcoder2-3b", 2, 10.0),  # bigcode/starcoder2-3b
    ("llama-3.2-1b", 10, 20.0),  # meta-llama/Llama-3.2-1B
    ("llama-3.2-1b", 14, 0.0),  # meta-llama/Llama-3.2-1B, again
    ("llama-3.2-1b", 19, 0.0),  # meta-llama/Llama-3.2-1B-Instruct
    ("llama-3.2-3b", 14, -10.0),  # meta-llama/Llama-3.2-3B
    ("llama-3.2-3b", 18, 0.0),  # meta-llama/Llama-3.2-3B-Instruct
    ("gemma-2b", 14, -20.0),  # google/gemma-2b
    ("gemma-2b", 21, 0.0),  # google/gemma-2b-it
    ("gemma-2-2b", 2, 20.0),  # google/gemma-2-2b-it
    ("mistral-7b", 6, 0.0),  # mistralai/Mistral-7B-Instruct-v0.2
    ("llama-3.1-8b", 19, -10.0),  # meta-llama/Meta-Llama-3.1-8B
]
# Prism, benchmark/multi-model/trace.py, generate_tp_reqs: selected_ranks, and the models named in the comments of
# model_ttft_slo_baseline_p95; benchmark/multi-model/model_configs/4_gpu_2_model.json: tp_size 4 of model_1 and model_4.
TP4: list[Model] = [
    ("qwen-2.5-32b", 4, 0.0),
    ("llama-3.3-70b", 14, 0.0),
    ("qwen-2.5-32b", 3, 0.0),
    ("llama-3.3-70b", 10, 0.0),
]
# Prism, benchmark/multi-model/trace.py, generate_e2e_benchmark_reqs: model_ttft_slo_baseline_p95 (s) and
# model_tpot_slo_baseline_p95 (ms) of model_1 .. model_8.
LIGHT8_TTFT_S = [
    *(0.04286971092, 0.04077239752, 0.02226704121, 0.04649914742),
    *(0.04855853081, 0.03988536596, 0.03698700905, 0.02187654972),
]
LIGHT8_TPOT_MS = [
    *(11.46289839, 9.607242716, 6.097079518, 11.23110303),
    *(11.08433425, 8.795845509, 6.114510298, 5.484097324),
]


@cases(
    ("name", "models", "tp"), [("light8", LIGHT8, 1), ("heavy8", HEAVY8, 1), ("prism18", PRISM18, 1), ("tp4", TP4, 4)]
)
def test_sets_of_prism(name: str, models: list[Model], tp: int) -> None:
    members = model_set(name).members
    expected = [(shape, f"dummy-lora-7b-rank-8-{rank}", shift_s, tp) for shape, rank, shift_s in models]
    assert [(member.shape.name, member.stream, member.shift_s, member.tp) for member in members] == expected
    assert synthetic.released(len(models)) == tuple((stream, shift_s) for _, stream, shift_s, _ in expected)


def test_the_hot_streams_of_heavy8_are_those_of_two_12b_models() -> None:
    members = model_set("heavy8").members
    requests = [synthetic.ARENA_COUNTS[int((member.stream or "").rpartition("-")[2])] for member in members]
    assert requests == [296, 22, 22, 262, 120, 19, 11, 2]
    assert [member.name for member, n in zip(members, requests, strict=True) if n > 200] == ["nemo-12b/1", "nemo-12b/3"]


def test_slo_bases_of_prism() -> None:
    released = [member.released_s for member in model_set("light8").members]
    assert [pair[0] for pair in released if pair] == LIGHT8_TTFT_S
    assert [pair[1] for pair in released if pair] == pytest.approx([ms / 1000 for ms in LIGHT8_TPOT_MS], rel=1e-12)
    for name in ("heavy8", "prism18", "tp4"):
        assert {member.released_s for member in model_set(name).members} == {None}


def test_the_mix_of_aegaeon() -> None:
    """Aegaeon, aegaeon/aegaeon/models.py, ModelType.alias: qwen2_5_7b, yi1_5_9b_chat, llama2_13b_chat by last digit."""
    names = [member.shape.name for member in model_set("aegaeon").members]
    assert names == ["qwen-2.5-7b"] * 6 + ["yi-1.5-9b"] * 2 + ["llama-2-13b"] * 2


# Prism, python/sglang/multi_model/utils/model_info.json: model_size, the GiB of each checkpoint's weights.
MODEL_GIB = {
    "llama-3.2-1b": 2.28,
    "llama-3.2-3b": 6.0,
    "llama-2-13b": 24.38,
    "phi-3-mini": 7.12109375,
    "phi-2": 5.212890625,
    "powerlm-3b": 6.73046875,
    "phi-1.5": 2.650390625,
    "olmo-1b": 2.1875,
    "starcoder2-3b": 5.65234375,
    "gemma-2b": 4.6640625,
    "mistral-7b": 13.490234375,
    "llama-3.1-8b": 15.005859375,
    "nemo-12b": 22.849609375,
    "llama-2-7b": 12.55,
}


@cases("name", sorted(MODEL_GIB))
def test_weights_are_those_of_model_info(name: str) -> None:
    assert weight_bytes(shapes()[name]) / GIB == pytest.approx(MODEL_GIB[name], rel=0.03)


# ---------------------------------------------------------------- traces


def test_arena_counts_and_quantiles(traces_dir: Path) -> None:
    """VTC-artifact 192c2e2, fair_bench/real_trace.pkl; Prism ships the same file."""
    arena = trace("arena-chat")
    rank = np.array([int(name.rpartition("-")[2]) for name in arena.models])[arena.model]
    assert np.bincount(rank).tolist() == list(synthetic.ARENA_COUNTS)
    each = [arena.arrival_s[rank == k] for k in range(len(synthetic.ARENA_COUNTS))]
    assert [(int(s[0] // 10), int(-(-s[-1] // 10))) for s in each] == list(synthetic.ARENA_USE)
    early = [int((s < 5 * sum(use)).sum()) for s, use in zip(each, synthetic.ARENA_USE, strict=True)]
    assert early == list(synthetic.ARENA_EARLY)
    for law, tokens in ((quantiles.ARENA_PROMPT, arena.prompt_tokens), (quantiles.ARENA_OUTPUT, arena.output_tokens)):
        assert np.quantile(tokens, law.at) == pytest.approx(law.tokens, abs=1e-9)
    both = spearmanr(arena.prompt_tokens, arena.output_tokens).statistic
    assert round(float(both), 3) == quantiles.RANK_CORRELATION["arena"]


def test_sharegpt_quantiles(traces_dir: Path) -> None:
    """Aegaeon, aegaeon/sim/simdata/synth-*-1.0-1.0.csv: Input Length and Output Length of 76 files."""
    rows: list[tuple[int, int]] = []
    for path in sorted((traces_dir / "aegaeon_synth").glob("synth-*-1.0-1.0.csv.gz")):
        with gzip.open(path, "rt") as file:
            rows += [(int(row["Input Length"]), int(row["Output Length"])) for row in csv.DictReader(file)]
    assert len(rows) == 63_195
    prompt, output = np.array(rows).T
    for law, tokens in ((quantiles.SHAREGPT_PROMPT, prompt), (quantiles.SHAREGPT_OUTPUT, output)):
        assert np.quantile(tokens, law.at) == pytest.approx(law.tokens, abs=1e-9)
    assert round(float(spearmanr(prompt, output).statistic), 3) == quantiles.RANK_CORRELATION["sharegpt"]


# ---------------------------------------------------------------- systems


def default(system: type, name: str) -> object:
    return next(field.default for field in fields(system) if field.name == name)


def test_constants_of_the_released_prism() -> None:
    """Prism, python/sglang/multi_model/scheduling: the files and keys stand beside each number.

    SCHEDULE_INTERVAL is in controller_global.py.
    """
    assert prism_released.BACKEND_MOST == 10  # gpu/request_queue.py, MAX_QUEUE_LEN
    assert prism_released.PREFILL_TOKENS == 1024 / 0.5  # gpu/request_queue.py, RequestWrapper: 0.5 s for 1,024 tokens
    assert prism_released.PREFILL_S == (0.2, 2)  # gpu/request_queue.py, RequestWrapper: clamp
    assert prism_released.UNSTABLE == 15  # policy/simple_global.py, MEMORY_PER_REQUEST_RATIO_THRESHOLD
    assert default(PrismReleased, "idle_s") == 50  # policy/simple_global.py, MODEL_IDLE_THRESHOLD
    assert default(PrismReleased, "interval_s") == default(Prism, "interval_s") == 5  # SCHEDULE_INTERVAL
    assert default(PrismReleased, "workers") == 4  # README.md, --workers-per-gpu
    assert prism_released.SMOOTHED == 30 / 5  # policy/simple_global.py, window_size_seconds: six intervals


def test_constants_of_the_prism_of_2026() -> None:
    """Prism, OSDI 2026, appendix A.4: evict what was idle for 45 s, watch rates over 60 s."""
    assert (default(Prism, "idle_s"), default(Prism, "window_s")) == (45, 60)


def test_constants_of_muxserve() -> None:
    """MuxServe, muxserve/muxsched/{scheduler,placement}.py and muxserve/config.py."""
    assert (muxserve.NEEDY, muxserve.SPARE, muxserve.GROWTH) == (0.9, 0.95, 0.1)  # scheduler.py, adapt_max_num_seqs
    assert default(MuxServe, "adapt_s") == 8  # scheduler.py, adapt_interval
    assert muxserve.MOST_SEQS == 256  # placement.py, YamlBuilder: max_num_seqs
    assert muxserve.STEP_TOKENS == 2048  # config.py, max_num_batched_tokens
    assert (muxserve.L_P, muxserve.L_O) == (161, 337)  # placement.py, avg_prompt_len, avg_output_len
    assert muxserve.DECODE_SHARES == (30, 40, 50, 60, 70, 80, 90)  # placement.py, estimate_mps: what is profiled to 90
    assert muxserve.MOST_SHARES == 100 + 20  # placement.py, MeshGroup: remaining_mps and overload_threshold
    # placement.py, prefill_mps_dict: llama-7b 80, llama-13b 90, llama-30b and llama-65b 100
    for name, percent in (("llama-2-7b", 80), ("llama-2-13b", 90), ("llama-3.3-70b", 100)):
        size = weight_bytes(shapes()[name])
        assert next((share for top, share in muxserve.PREFILL_SHARES if size < top), 100) == percent
    assert muxserve.meets(0.91, 1.0)  # placement.py, estimate_throughput: tpt + min(0.5, tpt * 0.1) beside the rate
    assert not muxserve.meets(0.90, 1.0)
    assert not muxserve.meets(9.4, 10.0)


def test_constants_of_aegaeon() -> None:
    """Aegaeon, aegaeon/aegaeon and aegaeon/benchmark."""
    assert aegaeon.ALPHA == 0.5  # decode_scheduler.py, _assign_quota
    assert default(Aegaeon, "qmax_s") == 4  # decode_scheduler.py, max_batch_quota
    assert aegaeon.LOOKAHEAD == 4 * 16  # decode_scheduler.py, batch_lookahead: four blocks
    assert default(Aegaeon, "group") == 8  # prefill_scheduler.py, max_group_size
    assert aegaeon.PCIE == {"h800": 64 * GIB}  # utils.py, pcie_bandwidth_in_bytes
    assert aegaeon.TBT_S == 0.1  # utils.py, TPOT_SLO
    assert default(Aegaeon, "prefill") == 3 / (3 + 5)  # benchmark_e2e.py, num_prefill_engines, num_decode_engines


def test_constants_of_serverlessllm_in_aegaeons_artifact() -> None:
    """Aegaeon, aegaeon/sim/scheduler.py: QS of V02Policy, and 15,000 ms without a token in Scheduler.schedule."""
    assert default(ServerlessLlmReleased, "most") == 4
    assert default(ServerlessLlmReleased, "drop_s") == 15


def test_constants_of_kvcached() -> None:
    """kvcached 0.1.6, kvcached/utils.py: MIN_RESERVED_PAGES, and the default of PAGE_SIZE."""
    assert KEPT_PAGES == 5
    assert Config(()).buffer_bytes == 2 * MIB


# ---------------------------------------------------------------- figures


def test_the_paper_of_figure_7() -> None:
    """Prism, arXiv 2505.04021, section 7.2: the numbers of its text, in the order of Hyperbolic and Arena-Chat."""
    claims = study("fig7").claim
    ratios = [(claim.system, claim.over, claim.paper) for claim in claims if claim.over]
    ours = "prism:osdi26 or prism_released"
    both = "muxserve:plusplus or muxserve:plusplus+quotas=bytes or muxserve:plusplus+quotas=none"
    assert [ratio for ratio in ratios if isinstance(ratio[2], float)] == [(ours, both, 2.3), (ours, "best static", 3.5)]
    fewest = [claim for claim in claims if claim.what == "fewest" and claim.paper != "never"]
    counts = [(claim.on["trace"], claim.paper) for claim in fewest]
    assert counts == [("hyperbolic-like", 4), ("arena", 5)]


def test_the_grids_of_aegaeons_figures() -> None:
    """Aegaeon, aegaeon/plots/plot_e2e.py: plot_by_models, plot_by_rates, and the SLO scales of --spec."""
    paper = study("aegaeon")
    assert paper.slo == "absolute:ttft=10,tpot=0.1"
    assert paper.level == 0.9
    slow, fast, rates, _, *strict, _, processes = paper.condition[:8]
    for condition, models in ((slow, range(16, 81, 4)), (fast, range(16, 55, 2))):
        sizes = [int(name.rpartition("=")[2]) for name in paper.sets(condition)]
        assert set(sizes) <= set(models)
        assert {models[0], models[-1]} <= set(sizes)
    assert [x for x in paper.along_x(rates, full=True) if x <= 14] == list(range(1, 15))  # means 0.05 requests/s
    assert {condition.spec["slo_scale"] for condition in (slow, *strict)} == {0.3, 0.5, 1.0}
    assert processes.at == slow.at  # ours: the first condition under another assumption
