"""Two models at work on one GPU at the same time: slow-downs that a probe measured, and those of the simulator.

`bench validate results/h200` is an example, which takes seconds. The probe and the simulator each give the slow-down of
a unit of work of one 8B model while another 8B model works. A unit is a decode step of 1 or 64 sequences with 1,024
tokens of context each, or a prefill of 2,048 tokens. `make gpu` measures these pairs of models; it calls each
measurement a duel. The comparison shows the slow-downs of both models of a pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.calibrate import rounds
from harness.calibrate.rows import RAW
from harness.engines.machine import Config, Served, machine
from harness.loop.engine import find
from harness.loop.replay import replay
from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Arrived, Event, Woke
from harness.policy.types import GIB, Batch, Inst, Jobs, UserError
from harness.policy.view import View
from harness.validate.page import Comparison
from workloads.models import shape

MODEL, HOST = "llama-3.1-8b", "vllm-0.15"
CONTEXT, PROMPT = 1024, 2048  # tokens, as in probe/duels.py
ACTS = {"decode1": 1, "decode64": 64, "prefill": 0}  # sequences
ACTS_TEXT = {
    "decode1": "a decode step of 1 sequence",
    "decode64": "a decode step of 64 sequences",
    "prefill": "a prefill of 2,048 tokens",
}
ROW_TEXT = {"decode1": "decode, 1 sequence", "decode64": "decode, 64 sequences", "prefill": "prefill, 2,048 tokens"}
MODES = {"plain": "both on all SMs", "split": "on 64 and 68 SMs"}
PARTS = (64, 68)  # SMs of the probe's split: the victim's, and the other's
PROMPTS, OUTPUT = 60, 3000
POOL = 100 * GIB  # bytes for weights and KV
BEGIN_S, WINDOW_S, END_S = 6.0, (6.2, 7.5), 60.0  # prefills begin once all decode; units count in the window
VICTIM, OTHER = (Batch(Inst(name, (0,))) for name in ("victim", "other"))


class Duel:
    """A policy that loads two models and lets both work at the same time, on all SMs or each on a part of its own."""

    uses = frozenset({"Load", "Run", "Admit", "Run.phase:prefill", "Run.phase:decode", "Run.chunk_tokens", "Run.sms"})
    hears = frozenset({Woke, Arrived})

    def __init__(self, split: bool) -> None:
        self.options = {"process": "model"}
        self.parts: tuple[int | None, int | None] = PARTS if split else (None, None)

    def on(self, event: Event, view: View) -> Iterable[Action]:  # noqa: ARG002 - both models run all the time
        """Load both models and start their prefills and decodes; admit each request to its own model."""
        match event:
            case Woke("start"):
                for batch, sms in zip((VICTIM, OTHER), self.parts, strict=True):
                    yield Load(batch.inst)
                    yield Run(batch, "prefill", chunk_tokens=0, sms=sms)
                    yield Run(batch, "decode", sms=sms)
            case Arrived(request):
                yield Admit(request.id, VICTIM if request.model == "victim" else OTHER)


def units_s(victim: str, other: str, *, split: bool, gpu: str, table: str | None) -> tuple[float, float]:
    """Return the simulated seconds per unit of work of each of two models that work at the same time.

    `victim` and `other` are the two models' kinds of work: keys of `ACTS`, or "". A model with "" gets no requests, and
    its seconds are NaN.
    """
    served = tuple(Served(name, shape(MODEL)) for name in ("victim", "other"))
    config = Config(
        served, gpu=gpu, table=table, host=HOST, pool_bytes=POOL, watermark=0.0, token_times=True, prefill_tokens=PROMPT
    )
    rows = sorted(row for k, act in enumerate((victim, other)) for row in _requests(k, act))
    model, prompt, output = (np.array(column, np.int32) for column in list(zip(*rows, strict=True))[1:])
    none = np.full(len(rows), math.inf)
    jobs = Jobs(("victim", "other"), np.array([row[0] for row in rows]), model, prompt, output, none, none)
    policy, priced = Duel(split), machine(config)
    engine = find("sim")(config, policy.options, priced)
    replay(policy, engine, jobs, end_s=END_S)  # type: ignore[arg-type]
    every = [row for part in engine.rows() for row in part.to_pylist()]
    first, second = (
        _unit_s(act, [row for row in every if row["model"] == name])
        for name, act in (("victim", victim), ("other", other))
    )
    return first, second


def _unit_s(act: str, done: list[dict[str, Any]]) -> float:
    """Return the median seconds between the ends of successive units of work of a model, within the window."""
    if not act:
        return math.nan
    if act == "prefill":
        ends_s = np.array(sorted(row["first_ns"] for row in done if row["first_ns"] is not None), float) / 1e9
    else:
        ends_s = np.array(done[0]["token_ns"], float) / 1e9 + done[0]["arrival_ns"] / 1e9
    return float(np.median(np.diff(ends_s[(ends_s > WINDOW_S[0]) & (ends_s < WINDOW_S[1])])))


def _requests(model: int, act: str) -> Iterator[tuple[float, int, int, int]]:
    """Yield (arrival in s, model, prompt tokens, output tokens) of each request of a kind of work."""
    if act == "prefill":
        yield from [(BEGIN_S, model, PROMPT, 1)] * PROMPTS
    elif act:
        yield from [(0.0, model, CONTEXT, OUTPUT)] * ACTS[act]


class Pair(NamedTuple):
    """Two models that worked at the same time: their kinds of work, and the measured and simulated slow-down of each.

    A slow-down is the seconds of a model's unit of work while the other model works, divided by its seconds alone.
    """

    mode: str
    acts: tuple[str, str]
    measured: tuple[float, float]
    simulated: tuple[float, float]

    @property
    def worst(self) -> float:
        """The larger of the two models' ratios of measured to simulated slow-down."""
        return max(seen / ours for seen, ours in zip(self.measured, self.simulated, strict=True))


def measured(folder: Path) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return the measured slow-downs of both models, keyed by mode ("plain" or "split") and the two kinds of work.

    Each slow-down is the median over repeated duels.
    """
    slow: dict[tuple[str, str, str], list[list[float]]] = {}
    for duel in rounds.duels(folder):
        names = [rounds.WORKS.get(work._replace(part=""), "") for work in duel.works]
        parts = [work.part for work in duel.works]
        if len(names) == 2 and all(names) and not duel.way and parts in (["", ""], ["64", "64-"]):
            slow.setdefault(("split" if parts[0] else "plain", names[0], names[1]), []).append(duel.slow)
    return {key: (float(x[0]), float(x[1])) for key, each in slow.items() for x in [np.median(each, 0)]}


def pairs(folder: Path, gpu: str, table: str | None) -> Iterator[Pair]:
    """Yield each pair of models that was measured, with its measured and simulated slow-downs."""
    seen = measured(folder)
    for mode in MODES:

        def simulated(*acts: str, split: bool = mode == "split") -> tuple[float, float]:
            return units_s(*acts, split=split, gpu=gpu, table=table)

        alone = {act: (simulated(act, "")[0], simulated("", act)[1]) for act in ACTS if any(act in key for key in seen)}
        for victim, other in product(ACTS, ACTS):
            if (both := seen.get((mode, victim, other))) is not None:
                a, b = simulated(victim, other)
                yield Pair(mode, (victim, other), both, (a / alone[victim][0], b / alone[other][1]))


def rms(every: Sequence[Pair], mode: str) -> float:
    """Return the root mean square of ln(simulated / measured slow-down) over both models of all pairs of a mode."""
    both = [lane for pair in every if pair.mode == mode for lane in zip(pair.measured, pair.simulated, strict=True)]
    return math.sqrt(np.mean([math.log(ours / seen) ** 2 for seen, ours in both]))


def holds(folder: Path) -> bool:
    """Tell whether a folder contains the measurements that `make gpu` writes."""
    return (folder / RAW).is_file()


def compare(folder: Path, table: str | None) -> Comparison:
    """Compare the simulator with measurements of two models at work on one GPU, from a folder that `make gpu` wrote.

    `table` replaces the card's own cost table. Raises UserError if the folder has no such measurements.
    """
    gpu, tables = folder.resolve().name, sorted(folder.glob("*-measured.toml"))
    with_ = table or (str(tables[0]) if tables else None)
    if not measured(folder):
        raise UserError(f"{folder}: nothing was measured of two models at once; make gpu measures it (turns, decodes)")
    every = list(pairs(folder, gpu, with_))
    pair = max(every, key=lambda pair: pair.worst)
    kindest = max((0, 1), key=lambda k: pair.measured[k] / pair.simulated[k])
    texts = [ACTS_TEXT[pair.acts[k]] for k in (kindest, 1 - kindest)]
    answer = (
        f"The simulator is off by {rms(every, 'plain'):.0%} (rms) on all SMs and {rms(every, 'split'):.0%} on"
        f" partitions. It is kindest to {texts[0]} beside {texts[1]}, {MODES[pair.mode]}: it takes"
        f" {pair.measured[kindest]:.1f} times as long as alone, and {pair.simulated[kindest]:.1f} times in the"
        " simulator."
    )
    how = (
        f"Seconds of a unit of either, as a multiple of those alone on the same SMs; two models of {MODEL}. Measured by"
        f" `make gpu`; simulated with {with_ or 'the committed table'}."
    )
    rows: list[tuple[str, ...]] = [("SMs", "unit", "beside", "measured", "simulated", "the other", "simulated")]
    for p in every:
        slow = (f"{x:.2f}" for lane in zip(p.measured, p.simulated, strict=True) for x in lane)
        rows.append((MODES[p.mode], *(ROW_TEXT[act] for act in p.acts), *slow))
    return Comparison(f"Two models at once on one {gpu.upper()}", answer, how, rows)
