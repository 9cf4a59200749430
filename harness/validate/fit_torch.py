"""Time a device's steps, one model at a time, and fit what policies may know of them (costs.py).

python -m harness.validate.fit_torch    # three minutes on an idle machine; writes cpu.toml
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from harness.engines.costs.fit import dumps, error, sig
from harness.engines.machine import Config, Served
from harness.engines.torch.costs import NAMES, TABLE, Work, fit
from harness.engines.torch.engine import Torch
from harness.engines.torch.lanes import Watched
from harness.engines.torch.nets import Net
from harness.engines.torch.processes import Nursery, Seat
from harness.engines.torch.wire import send_files
from harness.engines.wallclock import machine_facts
from harness.loop.replay import replay
from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Arrived, Event, Finished, Woke
from harness.policy.types import GIB, Batch, Inst, Jobs
from harness.policy.view import View
from harness.rows.record import write_bytes
from workloads.models import shape

SHAPES = ("llama-tiny", "llama-small", "llama-3.2-1b", "llama-3.1-8b", "qwen-2.5-14b", "qwen-3-32b")
PROMPTS = (1, 4, 16, 64, 128, 256, 512, 1000)
SEQS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (16, 128, 512, 1000)
REPEATS, OUTPUT = 5, 20


class Group(NamedTuple):
    """Requests that run together, while no other one does."""

    model: str
    seqs: int
    prompt: int
    output: int


class Closed:
    """A policy that admits a group of requests once the one before it has ended."""

    uses = frozenset({"Load", "Run", "Admit"})
    hears = frozenset({Woke, Arrived, Finished})

    def __init__(self, groups: Iterable[Group]) -> None:
        self.options = {"kv": "paged", "process": "gpu"}
        self.groups = list(groups)
        self.rids: list[list[int]] = []
        for group in self.groups:
            start = self.rids[-1][-1] + 1 if self.rids else 0
            self.rids.append(list(range(start, start + group.seqs)))
        self.at, self.left, self.came = -1, 0, 0

    def on(self, event: Event, view: View) -> Iterable[Action]:  # noqa: ARG002 - it counts for itself
        """Start all models; then a group behind the other."""
        match event:
            case Woke("start"):
                for model in dict.fromkeys(group.model for group in self.groups):
                    yield Load(Inst(model, (0,)))
                    yield Run(Batch(Inst(model, (0,))))
            case Arrived():
                self.came += 1
                if self.came > self.rids[-1][-1]:
                    yield from self.go_on()
            case Finished():
                self.left -= 1
                if not self.left:
                    yield from self.go_on()

    def go_on(self) -> Iterator[Action]:
        """Admit the next group."""
        self.at += 1
        if self.at < len(self.groups):
            group, rids = self.groups[self.at], self.rids[self.at]
            self.left = len(rids)
            yield from (Admit(rid, Batch(Inst(group.model, (0,)))) for rid in rids)

    def jobs(self) -> Jobs:
        """Return the requests: all come at the start."""
        models = tuple(dict.fromkeys(group.model for group in self.groups))
        each = [group for group in self.groups for _ in range(group.seqs)]
        n = len(each)
        model, prompt, output = (
            np.array(column, np.int32)
            for column in zip(*((models.index(g.model), g.prompt, g.output) for g in each), strict=True)
        )
        return Jobs(models, np.zeros(n), model, prompt, output, np.full(n, np.inf), np.full(n, np.inf))


def groups(model: str) -> Iterator[Group]:
    """Yield what is measured of a model."""
    for prompt in PROMPTS:
        yield from [Group(model, 1, prompt, 1)] * (REPEATS + 1)
    for seqs in SEQS:
        for ctx in CONTEXTS:
            yield Group(model, seqs, ctx, OUTPUT)


def start_s() -> float:
    """Time the start of a process of its own, until it takes orders."""
    nursery, memory = Nursery(), os.memfd_create("device")
    try:
        begun_s = time.monotonic()
        seat = Seat(nursery, 0, cold=True)
        seat.send("begin", 0, os.sched_getaffinity(0), {}, False)
        send_files(seat.conn, [memory])
        assert seat.conn.recv() == "ready"
        return time.monotonic() - begun_s
    finally:
        nursery.close()
        os.close(memory)


def measured(models: Iterable[str]) -> list[tuple[Net, Work, float]]:
    """Time the steps of models, a run each; return (network, work, seconds).

    A prefill's seconds are the median over its repeats but the first; a decode's are from one step's order to the
    next's, so the engine's own time counts; both of the middle of its steps.
    """
    steps = list[tuple[Net, Work, float]]()
    for model in models:
        policy = Closed(groups(model))
        config = Config((Served(model, shape(model)),), pool_bytes=2 * GIB, watermark=0.0)
        engine = Torch(config, policy.options)
        watched = engine.watched = list[Watched]()
        try:
            replay(policy, engine, policy.jobs())  # type: ignore[arg-type]
        finally:
            engine.close()
        cells = defaultdict[Work, list[float]](list)
        for k, step in enumerate(watched):
            (start, tokens), seqs = step.rows[0], len(step.rows)
            if start == 0:
                if seqs == 1:
                    cells[Work(0, 0.0, 1, tokens, tokens**2 / 2)].append(step.ended_s - step.ordered_s)
                continue
            after = watched[k + 1] if k + 1 < len(watched) else None
            if after is not None and [at + 1 for at, _ in step.rows] == [at for at, _ in after.rows]:
                context = sum(at + 1 for at, _ in step.rows)
                cells[Work(seqs, float(context))].append(after.ordered_s - step.ordered_s)
        net = engine.nets[model]
        for work, seconds in _merged(cells).items():
            steps.append((net, work, float(np.median(seconds))))
        print(f"{model}: {len(watched)} steps", flush=True)
    return steps


def _merged(cells: dict[Work, list[float]]) -> dict[Work, list[float]]:
    """Join the decode steps of a group, whose contexts grow by one; leave a prompt's first repeat out."""
    merged: dict[Work, list[float]] = {}
    runs: dict[tuple[int, int], list[tuple[Work, float]]] = defaultdict(list)
    for work, seconds in cells.items():
        if work.prompts:
            merged[work] = seconds[1:] or seconds
        else:
            each = work.ctx_tokens / work.decodes
            group = max(ctx for ctx in CONTEXTS if ctx <= each)
            runs[work.decodes, group] += [(work, s) for s in seconds]
    for (seqs, _), pairs in runs.items():
        middle = float(np.median([work.ctx_tokens for work, _ in pairs]))
        merged[Work(seqs, middle)] = [s for _, s in pairs]
    return merged


def main() -> None:
    """Measure, fit and write the numbers."""
    steps = measured(SHAPES)
    fitted, off = fit(steps)
    facts = ", ".join(f"{key} {value}" for key, value in machine_facts("torch").items())
    file = {name: sig(value, 4) for name, value in zip(NAMES, fitted, strict=True)} | {
        "start_s": sig(float(np.median([start_s() for _ in range(3)])), 3),
        "source": f"python -m harness.validate.fit_torch on {facts}",
        "formula": "harness/engines/torch/costs.py",
        "fit": error(1 + off, np.ones(len(off))),
    }
    write_bytes(TABLE, dumps(file).encode())
    for (net, work, seconds), e in sorted(zip(steps, off.tolist(), strict=True), key=lambda pair: -abs(pair[1]))[:10]:
        print(f"{100 * e:+.0f} %  {net.shape.name} {work}: {1e3 * seconds:.3g} ms")
    print(f"{TABLE}: {len(steps)} steps, median error {100 * float(np.median(np.abs(off))):.1f} %")


if __name__ == "__main__":
    main()
