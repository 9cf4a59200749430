"""Seconds of a decode step with and without the sort of the sampler, where the loads of measured rows make it large."""

from __future__ import annotations

from collections.abc import Iterator

from harness.engines.costs import coefficients
from harness.engines.costs.profile import row, step_s
from workloads.models import shape

MODEL, HOST = "llama-3.1-8b", "vllm-0.15"
LOADS = (("h100", 128), ("b200", 256))  # a kind of GPU, and sequences of a step
CONTEXTS = (512, 1024)  # tokens of each
HEAD = ("GPU", "sequences", "context tokens of each", "greedy ms", "checkpoint ms", "sort %")


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a table of step times of `MODEL`, its head first: with greedy sampling and with sampling that sorts."""
    yield HEAD
    sampled = shape(MODEL)
    for kind, B in LOADS:
        priced = coefficients.tables([(sampled._replace(sampled=False), 1), (sampled, 1)], kind, HOST)
        for ctx in CONTEXTS:
            greedy, sorts = (1e3 * step_s(row(priced, i), B=B, C=B * ctx) for i in (0, 1))
            yield kind, str(B), f"{ctx:,}", f"{greedy:.1f}", f"{sorts:.1f}", f"{100 * (sorts / greedy - 1):+.0f}"
