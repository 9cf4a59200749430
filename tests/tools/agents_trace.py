"""Draw the trace of agents in suite-1: `python -m tests.tools.agents_trace` writes it again, with equal rows.

No log with shared prefixes may come with the bench. Streams by popularity have a system prompt each; the prompt of
a session's turn is that one, all turns before it, and what a tool has returned.
"""

from __future__ import annotations

import numpy as np

from harness.suite.suite import HERE
from traces import schema

PATH = HERE / "agents.parquet"
SEED, SPAN_S, SESSIONS, STREAMS = 20261129, 600.0, 150, 8
BLOCK = 512  # tokens of a block of a prompt
SYSTEM = (4, 13)  # blocks of a stream's system prompt, the second excluded
TURNS = 9.0  # mean of a session, geometric
TOOL_TOKENS, OUTPUT_TOKENS, PAUSE_S = 900.0, 160.0, 6.0  # medians of a turn, lognormal
SPREAD = 0.8  # of their logarithms
MOST_TOKENS = 32_000  # of a prompt, where a session ends


def main() -> None:
    """Draw the trace, and write it beside the suite."""
    rng = np.random.default_rng(SEED)
    popular = 1.0 / np.arange(1, STREAMS + 1)
    system = rng.integers(*SYSTEM, STREAMS) * BLOCK
    rows = []
    for session in range(SESSIONS):
        stream = int(rng.choice(STREAMS, p=popular / popular.sum()))
        at_s, tokens = rng.uniform(0.0, SPAN_S), int(system[stream])
        for _ in range(int(rng.geometric(1.0 / TURNS))):
            tool, output, pause_s = (
                median * float(np.exp(SPREAD * rng.standard_normal()))
                for median in (TOOL_TOKENS, OUTPUT_TOKENS, PAUSE_S)
            )
            tokens += max(1, int(tool))
            if tokens > MOST_TOKENS:
                break
            whole = tokens // BLOCK
            shared = int(system[stream]) // BLOCK
            ids = [1 + stream * 1000 + k if k < shared else (session + 1) * 100_000 + k for k in range(whole)]
            rows.append((at_s % SPAN_S, stream, tokens, max(1, int(output)), ids))
            tokens += max(1, int(output))
            at_s += pause_s
    rows.sort()
    arrival_s, streams, prompts, outputs, chains = zip(*rows, strict=True)
    columns = {
        "request_id": range(len(rows)),
        "model": [f"agent_{stream + 1}" for stream in streams],
        "arrival_s": arrival_s,
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "prefix_hashes": chains,
    }
    meta = {
        "name": "suite-1-agents",
        "tier": "synthetic",
        "licence": "Apache-2.0",
        "length_origin": "sampled",
        "span_s": SPAN_S,
        "seed": SEED,
        "timestamp_resolution_s": None,
        "block_tokens": BLOCK,
    }
    schema.write(schema.table(columns, meta), PATH)


if __name__ == "__main__":
    main()
