"""Pages of `bench validate`: `docs/validation.md`, which `make validate` writes, and those of single comparisons."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from harness.validate import idle, ranks
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
## Engines on this project's own hosts

`bench validate --engine` runs the same specs on an engine and on the simulator with a cost table of that engine.

### The torch engine, every system on real kernels

```{include} ../results/README.md
:start-after: "<!-- torch -->"
:end-before: "<!-- /torch -->"
:relative-images:
```

### vLLM on a processor

```{include} ../results/README.md
:start-after: "<!-- vllm -->"
:end-before: "<!-- /vllm -->"
:relative-images:
```"""
GROUPS = """
## Quantised models and mixtures of experts

Kernels by number format and the mechanism of experts were fitted on single calls; host profiles are those of 16-bit
models. Neither saw any of these rows. Errors are median/P95 in per cent of TPOT and of throughput (clients x output /
E2E); the aim for both is {}/{}. TTFT is reported: no source says how clients begin. An engine `as` another is a
version without rows of its own, which takes the last profile before it.

Causes, as far as rows tell them:

- vLLM 0.12, Llama-3.1-8B FP8, 100 output tokens: up to 118,000 prompt tokens a second a GPU are 1.8 PFLOP/s of a card
  whose FP8 peak is 1.98, beside all decode steps: prompts came again, and were hits in the prefix cache.
- vLLM 0.12, Qwen3-235B FP8: TPOT is 51 to 59 ms from 4 to 20 clients, and SGLang has 15 to 18 ms for the same
  checkpoint on the same two cards: what these steps took does not depend on their tokens, so no kernel explains it.
- SGLang 0.5.6, Llama-3.1-8B quantised when loaded: 27 to 40 ms from 20 to 512 clients, far above a decode step: steps
  wait for prompts, which go first there, and a wave of clients brings more of them than ours does.
- gpt-oss-120b with 16 to 32 clients: fewer experts are touched than by tokens that spread as assumed.
"""

IDLE = """
## What an idle elastic model keeps

KV memory that stays mapped once traffic has ended, with a prefix cache: kvcached's `bench_idle_footprint` (L40, Qwen3-4B,
vLLM 0.22.1; two runs a row), and ours after requests of the same kinds.
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

    def page(self, command: str, table: Table) -> str:
        """Return it as Markdown, with the command that wrote it."""
        parts = (f"# {self.title}", self.answer, f"{self.how} Written by `{command}`.")
        lines = [line for part in parts for line in (*textwrap.wrap(part, WIDE, break_on_hyphens=False), "")]
        return "\n".join([*lines[:-1], *table(self.rows), *[self.note] * bool(self.note)]).rstrip() + "\n"


def page(
    frame: pd.DataFrame, skipped: Sequence[Skipped], shared: Sequence[str], kept: idle.Kept, table: Table
) -> str:  # fmt: skip
    """Return the page as Markdown; `shared` are lines on models that share a card, `kept` is what an idle one keeps."""
    return "\n".join(_lines(frame, skipped, shared, kept, table)) + "\n"


def _lines(
    frame: pd.DataFrame, skipped: Sequence[Skipped], shared: Sequence[str], kept: idle.Kept, table: Table
) -> Iterator[str]:  # fmt: skip
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
    if shared:
        yield "## Models that share a card\n"
        yield from (f"- {line}" for line in shared)
    yield IDLE
    yield from table(idle.rows(kept))
    yield "\n" + textwrap.fill(idle.words(kept), PAGE_WIDE, break_on_hyphens=False)
    yield TAIL


def compared(
    command: str, told: Sequence[str], pairs: Sequence[Pair], cells: Sequence[Cell], attainment: str,
    met: Sequence[str], table: Table,
) -> str:  # fmt: skip
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
