"""The memory that a system without room lacks, and the smallest changes that give it room. Each change is tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from harness.engines.costs import quantities, servers
from harness.loop import system
from harness.policy import mix
from harness.policy.types import GIB, Infeasible, Unsupported, UserError
from harness.run.placement import started
from harness.run.resolve import resolve
from harness.run.setup import Setup, blamed
from harness.run.spec import Spec

FRACTIONS = tuple(k / 100 for k in range(91, 98))  # share of a card for the engine; the driver needs part of the rest
PROCESS_BYTES = (GIB, GIB // 2)  # bytes of a process beside weights: a CUDA context with little else
MOST_TIMES = 4  # the most GPUs that are tried, as a multiple of the spec's
STEP_BYTES = GIB // 10


class Remedy(NamedTuple):
    """A change of spec fields that gives systems room on their GPUs."""

    fields: tuple[tuple[str, Any], ...]

    @property
    def options(self) -> tuple[str, ...]:
        """The change as words of a command line, for `bench compare`."""
        return tuple(
            word
            for key, value in self.fields
            for word in ((f"--{key}", str(value)) if key == "gpus" else ("--set", f"{key}={value}"))
        )


def fits(spec: Spec, more_bytes: int = 0) -> bool:
    """Tell whether a system has room at the start of its run, with `more_bytes` on each GPU for weights and KV.

    Also return False if the spec is refused, the engine lacks something or the policy fails.
    """
    try:
        setup = Setup(resolve(spec))
        with blamed(spec):
            policy, cluster = setup.policy, setup.engine.cluster
            if more_bytes:
                gpus = tuple(gpu._replace(mem_bytes=gpu.mem_bytes + more_bytes) for gpu in cluster.gpus)
                policy = system.build(setup.make_policy, replace(cluster, gpus=gpus), setup.keywords)
            started(setup, policy)
    except (Infeasible, Unsupported, UserError):
        return False
    return True


def short_bytes(spec: Spec) -> int | None:
    """Return how many more bytes each GPU needs for a system to start; None if even twice the memory is not enough.

    The result is a multiple of 0.1 GiB.
    """
    most = max(quantities.gpu(kind, spec.table).mem_bytes for kind in mix.names(spec.gpu)) // STEP_BYTES
    if not fits(spec, most * STEP_BYTES):
        return None
    none, enough = 0, most
    while enough - none > 1:
        middle = (none + enough) // 2
        none, enough = (none, middle) if fits(spec, middle * STEP_BYTES) else (middle, enough)
    return enough * STEP_BYTES


def remedies(specs: Sequence[Spec]) -> list[Remedy]:
    """Return up to two changes that each give all specs room: one of memory, then one of the number of GPUs.

    For each, possible changes are tried from the cheapest on, and the first that works is returned. The order for
    memory is fixed. First, the engine gets a larger share of a card. Then a step gets fewer tokens and sequences,
    because a process reserves memory for them. Last come the bytes of a process other than weights, because they are a
    fact of the engine, not a choice.
    """
    cheapest = []
    for kind in (_memory(specs[0]), _gpus(specs[0])):
        works = (change for change in kind if all(fits(_changed(spec, change)) for spec in specs))
        if (first := next(works, None)) is not None:
            cheapest.append(first)
    return cheapest


def _memory(spec: Spec) -> Iterator[Remedy]:
    if spec.pool_bytes is not None:
        return
    settings, less = Setup(spec).settings, servers.bench()
    process_bytes = settings.process_bytes
    shares = [("mem_fraction", x) for x in FRACTIONS if x > settings.mem_fraction]
    yield from (Remedy((share,)) for share in shares)
    if process_bytes is None and (settings.batch_cap > less.batch_cap or settings.chunk_tokens > less.chunk_tokens):
        cap, chunk = min(settings.batch_cap, less.batch_cap), min(settings.chunk_tokens, less.chunk_tokens)
        step = ("batch_cap", cap), ("chunk_tokens", chunk)
        yield Remedy(step)
        yield from (Remedy((*step, share)) for share in shares)
    yield from (Remedy((("process_bytes", x),)) for x in PROCESS_BYTES if process_bytes is None or x < process_bytes)


def _gpus(spec: Spec) -> Iterator[Remedy]:
    kept = (("pool_bytes", spec.pool_bytes),) if spec.pool_bytes is not None else ()
    step = mix.size(spec.gpu)
    yield from (Remedy((("gpus", n), *kept)) for n in range(spec.gpus + step, MOST_TIMES * spec.gpus + 1, step))


def _changed(spec: Spec, remedy: Remedy) -> Spec:
    """Apply a remedy to a spec; its placement is decided again."""
    return replace(spec, homes=(), **dict(remedy.fields))
