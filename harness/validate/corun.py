"""Two models at once on one GPU, as a probe measured them and as the simulator shares the GPU between them.

`bench validate results/h200` is an example, of seconds. Both ask how many times as long a unit of work of one 8B model
takes while another 8B works beside it: decode steps of 1 or 64 sequences with 1,024 tokens of context each, and
prefills of 2,048 tokens. The probe is `make gpu`'s `interfere`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from harness.engines import sim
from harness.engines.machine import Config, Served, machine
from harness.loop.replay import replay
from harness.policy.actions import Action, Admit, Load, Run
from harness.policy.events import Arrived, Event, Woke
from harness.policy.types import GIB, Batch, Inst, Jobs, UserError
from harness.policy.view import View
from harness.validate.page import Beside
from probe import conduct, report
from workloads.models import shape

MODEL, HOST = "llama-3.1-8b", "vllm-0.15"
CONTEXT, PROMPT = 1024, 2048  # tokens, as in probe/sharing.py
ACTS = {"decode1": 1, "decode64": 64, "prefill": 0}  # sequences
ACTS_TEXT = {
    "decode1": "a decode step of 1 sequence", "decode64": "a decode step of 64 sequences",
    "prefill": "a prefill of 2,048 tokens",
}  # fmt: skip
MODES = {"plain": "both on all SMs", "split": "on 64 and 68 SMs"}
PARTS = (64, 68)  # SMs of the probe's split: the victim's, and the other's
PROMPTS, OUTPUT = 60, 3000
BEGIN_S, WINDOW_S, END_S = 6.0, (6.2, 7.5), 60.0  # prefills begin once all decode; where units are looked at; the end
VICTIM, OTHER = (Batch(Inst(name, (0,))) for name in ("victim", "other"))


class Duel:
    """A policy that opens the lanes of both models at the start."""

    uses = frozenset({"Load", "Run", "Admit", "Run.phase:prefill", "Run.phase:decode", "Run.chunk_tokens", "Run.sms"})
    hears = frozenset({Woke, Arrived})

    def __init__(self, split: bool) -> None:
        self.options = {"process": "model"}
        self.parts: tuple[int | None, int | None] = PARTS if split else (None, None)

    def on(self, event: Event, view: View) -> Iterable[Action]:  # noqa: ARG002 - both models run all the time
        """Admit each request to its own model."""
        match event:
            case Woke("start"):
                for batch, sms in zip((VICTIM, OTHER), self.parts, strict=True):
                    yield Load(batch.inst)
                    yield Run(batch, "prefill", chunk_tokens=0, sms=sms)
                    yield Run(batch, "decode", sms=sms)
            case Arrived(request):
                yield Admit(request.id, VICTIM if request.model == "victim" else OTHER)


def unit_s(victim: str, other: str, *, split: bool, gpu: str, table: str | None) -> float:
    """Return the simulated seconds of the victim's unit beside the other's; `other` "": alone."""
    served = tuple(Served(name, shape(MODEL)) for name in ("victim", "other"))
    config = Config(served, gpu=gpu, table=table, host=HOST, pool_bytes=100 * GIB, watermark=0.0, token_times=True,
                    prefill_tokens=PROMPT)  # fmt: skip
    rows = [row for k, act in enumerate((victim, other)) for row in _requests(k, act)]
    rows.sort()
    model, prompt, output = (np.array(column, np.int32) for column in list(zip(*rows, strict=True))[1:])
    none = np.full(len(rows), math.inf)
    jobs = Jobs(("victim", "other"), np.array([row[0] for row in rows]), model, prompt, output, none, none)
    policy, priced = Duel(split), machine(config)
    engine = sim.make(config, policy.options, priced)
    replay(policy, engine, jobs, end_s=END_S)  # type: ignore[arg-type]
    done = [row for part in engine.rows() for row in part.to_pylist() if row["model"] == "victim"]
    if victim == "prefill":
        ends = sorted(row["first_ns"] for row in done if row["first_ns"] is not None)
    else:
        ends = done[0]["token_ns"]
    ends_s = np.array(ends, float) / 1e9 + (0.0 if victim == "prefill" else done[0]["arrival_ns"] / 1e9)
    inside = ends_s[(ends_s > WINDOW_S[0]) & (ends_s < WINDOW_S[1])]
    return float(np.median(np.diff(inside)))


def _requests(model: int, act: str) -> Iterator[tuple[float, int, int, int]]:
    """Yield arrival, model, prompt and output tokens of each request of an act."""
    if act == "prefill":
        yield from [(BEGIN_S, model, PROMPT, 1)] * PROMPTS
    elif act:
        yield from [(0.0, model, CONTEXT, OUTPUT)] * ACTS[act]


def factors(folder: Path, gpu: str, table: str | None) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield (mode, victim, other, measured, simulated): seconds of the victim's unit, of those alone."""
    book = report.read(folder)
    for mode in MODES:
        measured = report.matrix(book, mode)
        for victim in ACTS:
            alone_s = unit_s(victim, "", split=mode == "split", gpu=gpu, table=table)
            for other in ACTS:
                if (seen := measured.get(victim, {}).get(other)) is not None:
                    beside_s = unit_s(victim, other, split=mode == "split", gpu=gpu, table=table)
                    yield mode, victim, other, seen, beside_s / alone_s


def _rms(rows: Iterable[tuple[str, str, str, float, float]], mode: str) -> float:
    """Return the root of the mean squared ln error of a mode's rows."""
    return math.sqrt(np.mean([math.log(ours / seen) ** 2 for of, _, _, seen, ours in rows if of == mode]))


def holds(folder: Path) -> bool:
    """Tell whether a folder is one of `make gpu`."""
    return (folder / conduct.RAW).is_file()


def beside(folder: Path, table: str | None) -> Beside:
    """Compare two models at once, as measured in a folder of `make gpu`, with the simulator.

    The card's own cost table is used unless `table` is given. Raises UserError where two at once were not measured.
    """
    gpu, tables = folder.resolve().name, sorted(folder.glob("*-measured.toml"))
    with_ = table or (str(tables[0]) if tables else None)
    book = report.read(folder)
    if not any(report.matrix(book, mode) for mode in MODES):
        raise UserError(f"{folder}: nothing was measured of two models at once; make gpu measures it (interfere)")
    factored = list(factors(folder, gpu, with_))
    mode, victim, other, seen, ours = max(factored, key=lambda row: row[3] / row[4])
    answer = (
        f"The simulator is off by {_rms(factored, 'plain'):.0%} (rms) on all SMs and {_rms(factored, 'split'):.0%} on"
        f" partitions. It is kindest to {ACTS_TEXT[victim]} beside {ACTS_TEXT[other]}, {MODES[mode]}: it takes"
        f" {seen:.2f} times as long as alone, and {ours:.2f} times in the simulator."
    )
    how = (
        f"Seconds of a unit as a multiple of those alone on the same SMs; two models of {MODEL}. Measured by `make"
        f" gpu`; simulated with {with_ or 'the committed table'}."
    )
    rows = [("SMs", "unit", "beside", "measured", "simulated")]
    rows += [(MODES[mode], ACTS_TEXT[victim], ACTS_TEXT[other], f"{seen:.2f}", f"{ours:.2f}")
             for mode, victim, other, seen, ours in factored]  # fmt: skip
    return Beside(f"Two models at once on one {gpu.upper()}", answer, how, rows)
