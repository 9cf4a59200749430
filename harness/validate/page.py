"""Pages of `bench validate`: `docs/validation.md`, which `make validate` writes, and those of single comparisons."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from harness.validate import idle, ranks, sort
from harness.validate.names import Skipped
from harness.validate.ranks import Cell, Pair
from harness.validate.validate import GROUP_AIM, furthest, groups, notes, scores, worst

HEAD = """# The simulator beside measured runs

Written by `make validate`; do not edit. Each public measurement of a real engine is replayed under its own conditions,
as far as its source states them. Errors are those of runs without noise, as in the fits, in per cent of what was
measured: `median` and `P95` of their absolute values, `bias` their mean. `spread` is the standard deviation over seeds,
which vary the noise of steps and Poisson arrivals. `measured spread` is that of real runs under equal conditions, for
repeated rows. The engine's host profile was fitted on rows marked `fitted`, and not on those `left out`.
"""

TAIL = """
## Prices before and after 28 November 2026

```{include} ../results/prices.md
```

## Engines on this project's own hosts

`bench validate --engine` runs the same specs on an engine and on the simulator with a cost table of that engine.

### The torch engine, every system on real kernels

From [results/cpu/torch](../results/cpu/torch/README.md):

```{include} ../results/cpu/torch/README.md
:start-after: "# The torch engine"
:relative-images:
```

### vLLM on a processor

From [results/cpu](../results/cpu/README.md):

```{include} ../results/cpu/README.md
:start-after: "<!-- vllm -->"
:end-before: "<!-- /vllm -->"
:relative-images:
```"""
GROUPS = """
## Quantised models and mixtures of experts

Kernels by number format and the mechanism of experts were fitted on single calls; host profiles are those of 16-bit
models. Neither saw any of these rows. Errors are median/P95 in per cent of TPOT and of throughput (clients x output /
E2E); the aim for both is {}/{}. TTFT is reported: only InferenceX says how clients begin. An engine `as` another is
a version without rows of its own, which takes the last profile before it.

Conditions beside the columns: gpt-oss-120b's rows are those of InferenceX, whose prompts and outputs are drawn
between 0.8 and all of the stated lengths, and whose B200 has an FP8 KV cache. Its clients begin together, and its means
count that first wave. Its H100 and H200 serve experts by Marlin (VLLM_MXFP4_USE_MARLIN=1), of which no call on these
cards was measured: ours are Triton's.

Causes of the cells that miss the aim, each tried on its rows:

- vLLM 0.12, Llama-3.1-8B FP8: prompts were hits in the prefix cache. With 100 output tokens up to 118,000 prompt
  tokens a second a GPU are 1.8 PFLOP/s of a card whose FP8 peak is 1.98. If all prompts are found, the rows of 1,000
  and 2,000 tokens are off by +3, -3 and +1 % instead of +134, +178 and +203; 13 of 15 rows lie between none and all
  found, the other two within 3 % of all. Which share was found no row tells.
- SGLang 0.5.6, Llama-3.1-8B quantised when loaded: clients do not begin together. E2E is off by 8 % in the median,
  but measured TTFT is 0.3 of ours and TPOT 1.3 times ours. With clients that begin evenly spread over an E2E the bias
  of TPOT is -4 % instead of -22 and its median error 12 %, while E2E is off by 10 %. What is left grows with clients:
  with 500 output tokens and more -9 to +1 % below 200 clients, -8 to -26 % above. On one GPU it is 20 us a token:
  added to each step for each sequence, they bring the error of its rows from -11 % in the mean to at most 4 %. What
  no GPU shortens (the server's one process, or a sampler that every GPU runs alike) would then be 8 % too much on two
  GPUs above 200 clients, and kernels that GPUs share 5 % too little. The rows of 100 output tokens there, mostly
  prompts, are 11 to 18 % too long for another cause. So these rows do not tell one from the other, and nothing was
  fitted. A limit of tokens a second alone explains none of it: rows of one GPU end at 9,400, those of two at 15,300.
- vLLM 0.12, Qwen3-235B FP8: not measured. TPOT is 51 to 59 ms on two GPUs from 4 to 20 clients (correlation with
  clients -0.2), 37 to 46 on four; SGLang has 15 to 18 on two. Ruled out: the number of tokens; data-parallel
  attention and expert parallelism (57 and 53 ms, beside 54 with neither); the spread of tokens (`balanced` adds at
  most 12 ms to 28); and all-reduces outside CUDA graphs (188 x 20 us = 4 ms). As a + b / GPUs a is 30 ms, so not all
  of it is memory or arithmetic. Steps outside CUDA graphs would fit: 30 ms are 320 us a layer, and a dense layer in
  eager vLLM takes 110 us (`vllm-eager`, H100) and has fewer kernels. No row says whether graphs were on. The Llama
  rows of the same engine and card have no such term.
- SGLang 0.5.6, Qwen3-235B FP8: not measured. The four rows with 2 clients are 23 to 26 % too short, the eight with 3
  or 4 by 6 % in the mean: measured steps hardly depend on clients (15 to 18 ms), while ours read half as many experts
  for 2 as for 4. SGLang's kernels are in no table.
- gpt-oss-120b on H100: with 8 and 16 clients tokens share experts. The measured calls, and so ours, give 8 tokens 32
  distinct experts; 8 independent tokens of the same law touch 24. With that the bias is +3 and 0 % there instead of
  +14 and +12, and -8 % with 32 and 64 clients, where it is +1 now; so how tokens of this model spread decides, and
  was not measured.

Beside these rows there is one of INT4 on A100: Qwen3-14B-AWQ on one A100-80, eager vLLM 0.9.1, 16,000 + 200 tokens and
one client (QwenLM/Qwen3 issue 1536): TTFT 3.35 s and TPOT 20.6 ms, ours 2.65 s (-21 %) and 13.8 ms (-33 %) under
`vllm-eager`. Whether it ran AWQ's kernel or Marlin's it does not say, our calls are TensorRT-LLM's, and nothing was
fitted on it.
"""

IDLE = """
## What an idle elastic model keeps

KV memory that stays mapped once traffic has ended, with a prefix cache: kvcached's `bench_idle_footprint` (L40,
Qwen3-4B, vLLM 0.22.1; two runs a row), and ours after requests of the same kinds.
"""

SORT = """
## The sampler's sort

vLLM up to 0.15 sorts the vocabulary of each sequence where requests, or a checkpoint's defaults, set top-p or top-k,
and nothing where they ask for temperature 0 (`sampling = "greedy"`). A decode step of Llama-3.1-8B under `vllm-0.15`
is below. The seconds are those of H100's rows, and of vLLM PR 40376 (a B200) for 64 and 128 sequences. The 512
sequences of that table take two thirds of what such a line says, so large batches are priced too high.
"""

Table = Callable[[Iterable[Sequence[str]]], Iterable[str]]  # rows, the first of which is the head, as Markdown


WIDE = 100  # characters of a line
PAGE_WIDE = 120  # of one of docs/validation.md


class Beside(NamedTuple):
    """A comparison of the simulator with what one folder holds."""

    title: str
    answer: str
    how: str  # it was measured and simulated
    rows: Sequence[tuple[str, ...]]  # the first is the head
    note: str = ""
    predictions: Sequence[str] = ()  # that were kept before, held against it: a line each

    def page(self, command: str, table: Table) -> str:
        """Return it as Markdown, with the command that wrote it."""
        parts = (f"# {self.title}", self.answer, f"{self.how} Written by `{command}`.")
        lines = [line for part in parts for line in (*textwrap.wrap(part, WIDE, break_on_hyphens=False), "")]
        after = [x for line in self.predictions for x in ("", f"- {line.strip()}" if line[0] == " " else line)]
        return "\n".join([*lines[:-1], *table(self.rows), *[self.note] * bool(self.note), *after]).rstrip() + "\n"


def page(frame: pd.DataFrame, skipped: Sequence[Skipped], shared: Sequence[str], kept: idle.Kept, table: Table) -> str:
    """Return the page as Markdown; `shared` are lines on models that share a card, `kept` is what an idle one keeps."""
    return "\n".join(_lines(frame, skipped, shared, kept, table)) + "\n"


def _lines(
    frame: pd.DataFrame, skipped: Sequence[Skipped], shared: Sequence[str], kept: idle.Kept, table: Table
) -> Iterator[str]:
    yield HEAD
    everything, frame = frame, frame[frame["group"] == ""]
    yield f"{frame.groupby(['file', 'row']).ngroups} cases of {frame['file'].nunique()} files; {len(skipped)} skipped."
    yield from table(scores(frame))
    yield from (f"- {line}" for line in (*notes(frame), *map(str, skipped)))
    yield "\n## The ten worst rows\n\nBy the mean with the largest error, as a ratio. Seconds, or tokens per second."
    yield from table(worst_rows(frame))
    if rows := groups(everything):
        yield GROUPS.format(*(f"{x:g}" for x in GROUP_AIM))
        yield from table(rows)
        yield "\nThe ten rows whose TPOT is furthest off:\n"
        yield from (f"- {line}" for line in furthest(everything))
        yield ""
    yield SORT
    yield from table(sort.rows())
    yield ""
    if shared:
        yield "## Models that share a card\n"
        yield from (f"- {line}" for line in shared)
    yield IDLE
    yield from table(idle.rows(kept))
    yield "\n" + textwrap.fill(idle.words(kept), PAGE_WIDE, break_on_hyphens=False)
    yield TAIL


def compared(
    command: str,
    told: Sequence[str],
    pairs: Sequence[Pair],
    cells: Sequence[Cell],
    attainment: str,
    met: Sequence[str],
    table: Table,
) -> str:
    """Return a comparison of an engine with the simulator as Markdown: what was said, pairs, cells, then the aims."""
    lines = [f"`{command}`\n", *(f"- {line}" for line in told), ""]
    lines += [*table(ranks.pair_rows(pairs)), ""] if pairs else []
    lines += ["Attainment in %; errors of simulated latencies, beside the spread of the measured repeats.\n"]
    lines += [*table(ranks.cell_rows(cells, attainment)), "", *(f"- {line}" for line in met)]
    return "\n".join(lines) + "\n"


def worst_rows(frame: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """Yield the worst rows and their conditions, under a head."""
    yield ("row", "engine", "GPUs", "model", "load", "flags", "rows", "metric", "measured", "ours", "error %")
    for row in worst(frame).to_dict("records"):
        load = f"{row['load']}, stage {row['stage']}" if row["stage"] else row["load"]
        which = "fitted" if row["fitted"] else "left out"
        numbers = f"{row['measured']:.4g}", f"{row['ours']:.4g}", f"{100 * row['error']:+.1f}"
        where = f"{row['file']}:{row['row']}", row["engine"], f"{row['tp']} x {row['gpu']}", row["model"]
        yield (*where, load, row["flags"] or "defaults", which, row["metric"], *numbers)
