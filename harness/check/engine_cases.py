"""The workloads on which engines are checked, each with the script that a policy follows to serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from harness.check.trial import needs
from harness.loop.engine import Engine
from harness.policy.actions import Action, Admit, Drop, Evict, Limit, Load, Move, Run
from harness.policy.events import Arrived, Event, Finished, Prefilled, Woke
from harness.policy.types import Batch, Cluster, Host, Inst, Jobs, Model

MODELS = ("a", "b")


class Case(NamedTuple):
    """A workload, and the script that a policy follows to serve it."""

    script: Callable[[Event, Cluster], Iterable[Action]]
    jobs: Jobs
    needs: frozenset[str] = frozenset()  # what `can` of the engine must hold, beside Load, Run and Admit
    tells: frozenset[type] = frozenset({Arrived, Finished})  # events that the engine must tell for the script to work
    all_done: bool = True  # every request must end as done
    gpus: int = 1
    room_tokens: int = 0  # tokens of KV per model for which a GPU has room beside weights; 0: all of its memory


def batch(model: str) -> Batch:
    """Return the batch in which scripts serve a model."""
    return Batch(Inst(model, (0,)))


def started(event: Event, _: Cluster) -> Iterator[Action]:
    """Load both models at the start, and open a lane for each."""
    if event == Woke("start"):
        for m in MODELS:
            yield from (Load(batch(m).inst), Run(batch(m)))


def routed(event: Event, cluster: Cluster) -> Iterator[Action]:
    """Load both models at the start, and route all requests of each to its batch."""
    yield from started(event, cluster)
    if event == Woke("start"):
        yield from (Admit(m, batch(m)) for m in MODELS)


def sliced(slice_layers: int | None) -> Callable[[Event, Cluster], Iterator[Action]]:
    """Return a script that prefills and decodes in separate lanes, and prefills in slices of `slice_layers` layers.

    It drops some requests. If `slice_layers` is None, prefills are not sliced.
    """

    def script(event: Event, _: Cluster) -> Iterator[Action]:
        if event == Woke("start"):
            for m in MODELS:
                yield Load(batch(m).inst)
                yield from (Run(batch(m), "prefill", slice_layers=slice_layers), Run(batch(m), "decode"))
        if isinstance(event, Arrived):
            yield Admit(event.request.id, batch(event.request.model))
            if event.request.id % 5 == 3:  # while others are in a slice
                yield Drop(event.request.id - 1)

    return script


def one_by_one(event: Event, _: Cluster) -> Iterator[Action]:
    """Admit each request when it arrives, and load the second model when a request for it first arrives."""
    if event == Woke("start"):
        yield from (Load(batch("a").inst), Run(batch("a")), Run(batch("b")))
    if isinstance(event, Arrived):
        m = event.request.model
        yield from (Load(batch(m).inst), Admit(event.request.id, batch(m)))


def squeezed(event: Event, cluster: Cluster) -> Iterator[Action]:
    """Limit each model's KV memory to three requests of 48 tokens; the requests grow beyond that."""
    if event == Woke("start"):
        for m, model in cluster.models.items():
            yield Limit(m, 0, blocks(model, 3 * 48))
    yield from routed(event, cluster)


def dropped(event: Event, cluster: Cluster) -> Iterator[Action]:
    """Drop every other request, on arrival or at its first token."""
    yield from started(event, cluster)
    if isinstance(event, Arrived):
        request = event.request
        yield Drop(request.id) if request.id % 4 == 1 else Admit(request.id, batch(request.model))
    if isinstance(event, Prefilled) and event.rid % 4 == 3:
        yield Drop(event.rid)


def lent(event: Event, cluster: Cluster) -> Iterator[Action]:
    """Move the KV of every other request to a second GPU, which then computes the attention of that request.

    The kernels of model "b" are split into pieces of at most `op_s` seconds.
    """
    yield from routed(event, cluster)
    if event == Woke("start"):
        yield Run(batch("b"), op_s=1e-4)
    if isinstance(event, Prefilled) and event.rid % 2:
        yield Move(event.rid, (1,), attend=True)


def swapped(event: Event, _: Cluster) -> Iterator[Action]:
    """Keep one model loaded at a time: it is evicted when a request for the other model arrives."""
    if event == Woke("start"):
        yield from (Run(batch(m)) for m in MODELS)
    if isinstance(event, Arrived):
        mine, other = batch(event.request.model), batch(MODELS[event.request.model == MODELS[0]])
        yield from (Admit(event.request.id, mine), Load(mine.inst), Evict(other.inst))


def blocks(model: Model, tokens: int) -> int:
    """Return the bytes of the whole pages that hold the KV of `tokens` tokens."""
    return -(-tokens * model.kv_token_bytes // model.page_bytes) * model.page_bytes


def impossible(cluster: Cluster) -> dict[Action, str]:
    """Return the actions that no engine can carry out, and why."""
    nowhere, gone = Inst("a", (len(cluster.gpus),)), Inst("nobody", (0,))
    return {
        Load(gone): "there is no such model",
        Load(nowhere): "there is no such GPU",
        Load(Inst("a", ())): "no GPU is named",
        Limit("nobody", 0, 1): "there is no such model",
        Admit(10**9, batch("a")): "there is no such request",
        Admit(-1, batch("a")): "there is no such request",
        Admit("a", batch("b")): "a batch serves its own model",
        Admit("nobody", Batch(gone)): "there is no such model",
        Drop(10**9): "there is no such request",
        Run(Batch(nowhere)): "there is no such GPU",
        Run(Batch(Inst("a", Host(0)))): "a host runs nothing",
        Run(batch("a"), "decode", slice_layers=1): "only prefills run in slices",
        Move(batch("a"), (0,), attend=True): "KV on a batch's own GPU is not attended elsewhere",
    }


def beyond(engine: Engine) -> list[Action]:
    """Return sample actions that need a feature missing from an engine's `can`, one for each such feature."""
    inst, lane = batch("a").inst, batch("a")
    every: tuple[Action, ...] = (
        Load(inst, "no-such-way"),
        Evict(inst, drain=False),
        Run(lane, "prefill"),
        Run(lane, "decode"),
        Run(lane, for_s=1.0),
        Run(lane, steps=1),
        Run(lane, seqs=1),
        Run(lane, chunk_tokens=16),
        Run(lane, slice_layers=1),
        Run(lane, op_s=1e-3),
        Run(lane, sms=1),
        Move(lane, None),
        Move(lane, Host(0)),
        Move(lane, (0,)),
        Move(lane, (0,), attend=True),
    )
    return [action for action in every if not set(needs(action)) <= engine.can]


def refused(event: Event, cluster: Cluster) -> Iterator[Action]:
    """Ask for impossible actions at each arrival, before the request is admitted."""
    yield from started(event, cluster)
    if isinstance(event, Arrived):
        yield from impossible(cluster)
        yield Admit(event.request.id, batch(event.request.model))


def jobs(seed: int, n: int, span_s: float, prompt: tuple[int, int], output: tuple[int, int], burst: int = 1) -> Jobs:
    """Draw `n` requests for both models over `span_s` seconds, in bursts of `burst`, with uniform lengths."""
    draw = np.random.default_rng(seed)
    arrival_s = np.sort(draw.uniform(0.0, span_s, -(-n // burst))).repeat(burst)[:n]
    prompts, outputs = (draw.integers(*bounds, n, np.int32, endpoint=True) for bounds in (prompt, output))
    none = np.full(n, np.inf)
    return Jobs(MODELS, arrival_s, draw.integers(0, 2, n, np.int32), prompts, outputs, none, none)


def chained(jobs: Jobs) -> Jobs:
    """Turn a workload into a closed loop of two clients."""
    n = len(jobs)
    after = np.where(np.arange(n) < 2, -1, np.arange(n) - 2).astype(np.int32)
    arrival_s = np.where(after < 0, 0.0, np.inf)
    return replace(jobs, arrival_s=arrival_s, after=after, think_s=np.full(n, 0.01))


SHORT = (8, 48), (1, 12)
SLICES = frozenset({"Run.slice_layers"})


def cases() -> dict[str, Case]:
    """Return every case by name."""
    limit, drop, evict = (frozenset({name}) for name in ("Limit", "Drop", "Evict"))
    lanes = frozenset({"Run.phase:prefill", "Run.phase:decode"})
    attend = frozenset({"Move", "Move.to:gpu", "Move.attend", "Run.op_s"})
    return {
        "routed": Case(routed, jobs(0, 16, 0.3, *SHORT)),
        "one-by-one": Case(one_by_one, jobs(1, 12, 0.3, *SHORT)),
        "burst": Case(routed, jobs(2, 16, 0.2, *SHORT, burst=8)),
        "one-token": Case(routed, jobs(3, 8, 0.1, (8, 48), (1, 1))),
        "closed": Case(routed, chained(jobs(4, 10, 0.3, *SHORT))),
        "squeezed": Case(squeezed, jobs(5, 10, 0.05, (8, 160), (48, 64)), limit, all_done=False),
        "full": Case(routed, jobs(13, 24, 0.05, (8, 160), (48, 64)), all_done=False, room_tokens=2 * 224),
        "dropped": Case(dropped, jobs(6, 12, 0.2, *SHORT), drop, frozenset({Arrived, Prefilled}), all_done=False),
        "swapped": Case(swapped, jobs(7, 10, 2.0, *SHORT), evict),
        "sliced": Case(sliced(1), jobs(12, 12, 0.05, (200, 800), (16, 24)), lanes | drop | SLICES, all_done=False),
        "lent": Case(lent, jobs(10, 12, 0.2, (8, 48), (8, 24)), attend, frozenset({Arrived, Prefilled}), gpus=2),
        "refused": Case(refused, jobs(8, 6, 0.2, *SHORT), limit | drop),
        "no-requests": Case(routed, jobs(9, 16, 0.3, *SHORT).first(0)),
    }
