"""GPU memory that an engine's process takes in addition to weights and KV, as the sum of its parts.

vLLM may use a share of the card (`gpu_memory_utilization`, `mem_fraction` here). Before it sizes its KV pool, it runs
one step of the largest size, and subtracts the memory that this step added. On each GPU of a tensor-parallel group of
`tp`:

    inside  = LIBRARIES + tokens x 2 B x hidden + max(layer, sampler)
    layer   = tokens x 2 B x (hidden + max((3 or 2) x ffn, 2 x query + 2 x KV widths) / tp)  activations of one layer
    sampler = min(seqs, tokens) x vocab x SAMPLER_BYTES                                      on every rank, not split
    outside = CONTEXT + COLLECTIVES (tp > 1) + layers x GRAPH_BYTES (engines that replay CUDA graphs)

    KV pool = mem_fraction x card - weights - inside

`tokens` is the budget of a step, and `seqs` is the batch cap. Memory `outside` is allocated before that step, or after
the KV pool. It lies in the share of the card that the engine leaves alone, and costs KV memory only if the processes
together exceed that share. Room for `outside` is left for each model at the tensor-parallel degree that the model set
states. At another degree, the part of `outside` that exceeds this room counts as inside.

The form is vLLM's: vllm/v1/worker/gpu_worker.py, `init_device` (communicators come before the first snapshot of memory)
and `determine_available_memory`; `profile_run` and `_dummy_sampler_run` in gpu_model_runner.py. Nothing is fitted. With
256 sequences, the formula gives the three KV pools that vLLM 0.15.1 logged on H100 within 0.3 %. The logs do not state
the number of sequences: at 128 or 512, two of the pools are off by more than 1 %. With budgets of 8,192 tokens and
1,024 sequences, four public starts of vLLM 0.11 on H100 are off by 0.09, 0.08, -0.21 and 0.73 GiB
(tests/harness/validate/test_starts.py). Only H100 was checked.

The last two starts are of gpt-oss-120b and gpt-oss-20b, and contradict each other. Marlin pads MXFP4 experts (2,880 x
2,880 to 3,072 x 2,944). With padding, the 20b would be off by -0.15 GiB. But then the 120b loads 65.97 GiB and has -2.1
GiB of KV, as vLLM issue 23278 logs, while the start here has 3.33. Weights count unpadded until a start with a complete
log decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from harness.engines.costs.shapes import BF16
from harness.policy.parameters import alike, attention_gpus
from harness.policy.types import GIB, MIB, Shape

# What a step loads outside of the allocator (cuBLAS, kernels): "non-torch forward increase" of 0.14 GiB on H100
# (llm-d-incubation/llm-d-fast-model-actuation issue 746); 0.15 to 0.16 in vLLM PR 12126 and issue 17117.
LIBRARIES = round(0.14 * GIB)
# Per sequence and word, at the peak of the sampler, the torch.sort of vLLM's top-p: logits in bf16 (2) and
# float32 (4), sorted values (4) and indices (8), indices to sort (8), CUB's second buffers of values and indices (12).
# vLLM v1/sample/sampler.py and ops/topk_topp_sampler.py; PyTorch ATen/native/cuda/SortStable.cu, segmented_sort_pairs.
SAMPLER_BYTES = 2 + 4 + (4 + 8) + 8 + (4 + 8)
# A CUDA context with torch's modules: of 79.18 GiB 78.66 were free at the first snapshot (issue 746, above).
CONTEXT = round(0.52 * GIB)
# NCCL and peer buffers: non-torch memory 3.58 GiB at TP 2 against 1.79 at TP 1 (Llama-3-8B, H100, vLLM PR 10511).
COLLECTIVES = round(1.79 * GIB)
# Graphs of all captured batch sizes: 0.64 GiB for a 3B, here taken as 40 layers (generative-computing/granite-switch
# issue 128). Context, libraries and graphs of a Qwen3-4B (36 layers) are then 1.22 GiB, what it holds asleep; vLLM
# issue 28714 logs 1.19, and another model in issue 746 left 1.27.
GRAPH_BYTES = 16 * MIB

Layout = Literal["model", "pair", "gpu", "kept"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


class Parts(NamedTuple):
    """Bytes of one process on each GPU of its group."""

    inside: int  # taken from the share of the card that the engine may use
    outside: int  # taken beside that share


class Memory(NamedTuple):
    """The bytes of each GPU that engines may use, and the bytes that each model's process takes besides its weights."""

    gpu_bytes: int
    process_bytes: tuple[int, ...]


def parts(shape: Shape, tp: int, tokens: int, seqs: int, graphs: bool) -> Parts:
    """Return the memory of a model's process, by the formula of this module."""
    cut = attention_gpus(shape, tp)
    attention = max(2 * s.head_dim * (s.q_heads // cut + max(1, s.kv_heads // cut)) for s in alike(shape))
    ffn = (3 if shape.gated else 2) * -(-shape.ffn // tp)
    layer = tokens * BF16 * (shape.hidden + max(ffn, attention))
    sampler = min(seqs, tokens) * shape.vocab * SAMPLER_BYTES
    inside = LIBRARIES + tokens * BF16 * shape.hidden + max(layer, sampler)
    return Parts(inside, CONTEXT + COLLECTIVES * (tp > 1) + shape.layers * GRAPH_BYTES * graphs)


def memory(
    card_bytes: int, fraction: float, processes: Sequence[tuple[Parts, int]], gpus: int, layout: Layout = "model"
) -> Memory:
    """Return the bytes of a card that engines may use, and the bytes that each model's process takes while loaded.

    `processes` are (parts, tensor-parallel degree) by model. Layouts:

        model  one process per model, where its weights are; each GPU leaves room for an even share of all `outside`
        pair   two processes per model, one for prefill and one for decode
        gpu    one process per GPU, which serves one model after another; it always has the size for the largest model
        kept   one process per model on every GPU; it keeps its context and graphs while the model is out (asleep)
    """
    inside = [taken.inside for taken, _ in processes]
    outside = [taken.outside for taken, _ in processes]
    spread = -(-sum(taken.outside * tp for taken, tp in processes) // gpus)
    beside = {"model": spread, "pair": 2 * spread, "gpu": max(outside, default=0), "kept": sum(outside)}[layout]
    left = max(0, min(int(card_bytes * fraction), card_bytes - beside))
    if layout == "gpu":
        left = max(0, left - max(inside, default=0))
    every = [taken for taken, _ in processes]
    return Memory(left, tuple(process_bytes(taken, taken, every, layout) for taken in every))


def process_bytes(at: Parts, configured: Parts, every: Sequence[Parts], layout: Layout) -> int:
    """Return the bytes that a model's process takes of the memory that engines may use.

    `at` are the parts of the process at the tensor-parallel degree asked for. `configured` are its parts at the degree
    that the model set gives the model. `every` has the parts of all models' processes.
    """
    if layout == "gpu":  # the one process of a GPU is there all the time, as large as any model makes it
        most = Parts(max(taken.inside for taken in every), max(taken.outside for taken in every))
        return sum(max(0, part - whole) for part, whole in zip(at, most, strict=True))
    return (2 if layout == "pair" else 1) * (at.inside + max(0, at.outside - configured.outside))
