"""Runs of the same specs on servers and on the simulator with the servers' cost table: `bench validate --engine E`.

What is measured here does not enter the cost table. Runs are stored like all others, so a second call resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from harness.engines.costs import shapes
from harness.engines.machine import cluster
from harness.policy.types import Inst, UserError
from harness.rows import record, requests, scoring
from harness.run import score
from harness.run.execute import execute
from harness.run.realtime import Span
from harness.run.resolve import resolve
from harness.run.setup import Setup
from harness.run.slo import SloTarget
from harness.run.sources import Task
from harness.run.spec import Spec, another
from harness.run.sweep import sweep, tasks
from harness.run.teller import Teller
from harness.study.bases import TUNING_SEEDS, ahead, slo_target
from harness.validate.ranks import KEYS, LATENCIES, SERVERS, SIMULATOR

# Systems that servers which are started and stopped can run (bench list --matrix).
SYSTEMS = ("static", "serverlessllm", "swap", "swap:llama-swap-fifo", "swap+most=2", "swap:router", "swap:ollama")
SHARES = (0.3, 0.7, 1.0)  # shares of the saturated rate
SERVED = 512  # longest prompt + output
# Each model gets a request a second at rate 1. Prompts are long, so that TTFT is long beside the client's lag.
TRACE = f"aegaeon-like+rate_rps=1+lengths=uniform+max_tokens={SERVED}"
FLOOD = 100.0  # requests a second, more than any server keeps up with
FLOOD_S = 10.0
WARMUP_S = 2.0
SHORT = 128  # tokens of a prompt whose solo latency the SLO is a multiple of
TTFT_X, TPOT_X = 10.0, 8.0
PAGE = 4096  # bytes of which memory is a multiple


class Predicted(NamedTuple):
    """Scored runs of the servers and of the simulator."""

    frame: pd.DataFrame  # a line a run and measure, as `ranks` takes it
    attainment: str  # the measure that is compared
    rule: str
    machine: str  # the servers' machine, as their cost table names it
    notes: list[str]
    waits: pd.DataFrame  # a line a run: the mean seconds of an ended request, a column for each cause


class Memory(NamedTuple):
    """The memory of each GPU.

    It has room for the weights of its models and, per model, for the KV of `requests` requests of the greatest length.
    """

    requests: int  # longest requests, for whose KV each model has room

    def pool_bytes(self, spec: Spec) -> int:
        """Return the bytes of each GPU for weights and KV."""
        setup = Setup(replace(spec, engine="sim"))
        members = setup.served.members
        each = [shapes.weight_bytes(m.shape) + self.requests * SERVED * shapes.kv_token_bytes(m.shape) for m in members]
        return math.ceil(math.ceil(len(each) / spec.gpus) * max(each) / PAGE) * PAGE


class Plan(NamedTuple):
    """The runs to compare: a model, its numbers of copies, systems, shares of the saturated rate, and repeats."""

    engine: str
    table: str
    model: str  # a shape that the table has
    systems: Sequence[str] = SYSTEMS
    counts: Sequence[int] = (2, 4, 8)  # numbers of models
    shares: Sequence[float] = SHARES
    repeats: int = 5
    window_s: float = 10.0
    again: int = 0  # how often an invalid run is made again
    gpus: int = 1
    memory: Memory | None = None  # None: as the table was measured
    drain_s: float | None = None  # None: until all have ended, or ten times the SLO
    way: str = ""  # the SLO of a first token leaves room for this way of loading; "": the slowest
    judged: bool = True  # whether aims are judged

    def spec(self, count: int, engine: str) -> Spec:
        """Return the spec of `count` copies of the model on an engine; the caller sets its system, rate and seed."""
        spec = Spec(
            "static",
            engine=engine,
            table=self.table,
            models=f"{self.model}*{count}",
            gpus=self.gpus,
            trace=TRACE,
            served=SERVED,
            window_s=self.window_s,
            warmup_s=WARMUP_S,
            drain_s=self.drain_s,
        )
        return spec if self.memory is None else replace(spec, pool_bytes=self.memory.pool_bytes(spec))


def spans(plan: Plan, out: Path, rule: str | None = None) -> list[Span]:
    """Return the warm-up, window and drain of each planned run on servers, including runs that are already stored."""
    asked = rule or slo_rule(plan)
    planned = list[Span]()
    for count in plan.counts:
        drain_s = plan.drain_s if plan.drain_s is not None else ahead(plan.spec(count, "sim"), asked, out).drain_s
        span = Span(WARMUP_S, plan.window_s, math.inf if drain_s is None else drain_s)
        planned += [span] * (len(plan.systems) * len(plan.shares) * plan.repeats)
    return planned


def predict(plan: Plan, out: Path, teller: Teller, rule: str | None = None) -> Predicted:
    """Run the plan on the simulator, then on the servers. Raises UserError if the plan cannot run."""
    asked = rule or slo_rule(plan)
    frames, notes, waits = list[pd.DataFrame](), list[str](), list[dict[str, object]]()
    for count in plan.counts:
        rps = saturated_rps(plan, count, out, teller)
        notes.append(f"{count} models: {rps:g} requests/s saturate the machine, by the simulator")
        rates = {share: rps * share / count for share in plan.shares}
        under = slo_target(plan.spec(count, "sim"), asked, out, teller=teller)
        for side, engine in ((SIMULATOR, "sim"), (SERVERS, plan.engine)):  # a mistake shows where runs are cheap
            cells = list(grid(plan, count, engine, rates, under))
            sweep([spec for _, spec in cells], out, teller=teller, what=f"{count} models on {engine}")
            scheduled = tasks(spec for _, spec in cells)
            _again(scheduled, out, plan.again, teller)
            runs = [(label, out / task.folder) for (label, _), task in zip(cells, scheduled, strict=True)]
            table = scoring.scores(score.scorable(label, run, under) for label, run in runs).to_pandas()
            frames.append(_lines(table, side, count, {rate: share for share, rate in rates.items()}, under.definition))
            notes += _skipped(table, side)
            by_rate = {rate: f"{count} models, {100 * share:.0f} %" for share, rate in rates.items()}
            for (label, spec), (_, run) in zip(cells, runs, strict=True):
                key = {"condition": by_rate[spec.rate_scale], "label": label, "seed": spec.seed, "side": side}
                waits.append({**key, **_waits_s(run)})
    frame = pd.concat(frames, ignore_index=True)
    priced = Setup(resolve(plan.spec(1, "sim"))).machine
    return Predicted(frame, under.definition, asked, priced.spec.name, list(dict.fromkeys(notes)), pd.DataFrame(waits))


def _waits_s(run: Path) -> dict[str, float]:
    """Return the mean seconds that requests waited, for each cause of waiting.

    The mean is over the requests that arrived in the run's window and are done.
    """
    columns = [f"{cause}_ns" for cause in record.WAITS]
    rows = record.read(run, ["arrival_ns", "state", *columns]).to_pandas()
    done = rows[(rows["arrival_ns"] >= 0) & (rows["state"].astype(str) == "done")]
    return {cause: float(done[f"{cause}_ns"].mean()) / 1e9 for cause in record.WAITS if len(done)}


def cause(waits: pd.DataFrame, condition: str, label: str) -> str:
    """Name the cause of waiting whose mean seconds per request differ most between simulator and servers.

    The text states both means. It is "" if no cause has a mean on both sides.
    """
    here = waits[(waits["condition"] == condition) & (waits["label"] == label)]
    sides: Any = here.groupby("side")[[c for c in record.WAITS if c in here]].mean()
    if {SERVERS, SIMULATOR} - set(sides.index):
        return ""
    off = (sides.loc[SIMULATOR] - sides.loc[SERVERS]).dropna()
    if off.empty:
        return ""
    most = str(off.abs().idxmax())
    measured, simulated = sides.loc[SERVERS, most], sides.loc[SIMULATOR, most]
    return f"{most} {simulated:.3g} s a request, measured {measured:.3g} s"


def grid(
    plan: Plan, count: int, engine: str, rates: dict[float, float], under: SloTarget
) -> Iterator[tuple[str, Spec]]:
    """Yield a label and a spec for each run.

    At each rate and seed, all systems run one after another. A drift in the machine's speed thus affects all systems
    alike.
    """
    base = plan.spec(count, engine)
    for rate in rates.values():
        for seed in range(plan.repeats):
            for text in plan.systems:
                spec = another(base, text)
                yield spec.label, under.spec(replace(spec, rate_scale=rate, seed=seed))


def _again(done: Sequence[Task], out: Path, times: int, teller: Teller) -> None:
    """Repeat each invalid run until it is valid, at most `times` times; a repeat replaces the earlier run."""
    for _ in range(times):
        invalid = [task for task in done if (record.meta(out / task.folder).get("verdict") or {}).get("reasons")]
        for count, task in enumerate(invalid):
            teller.progress("invalid runs again", count, len(invalid))
            execute(task.spec, out, task.code)


def saturated_rps(plan: Plan, count: int, out: Path, teller: Teller) -> float:
    """Return the requests per second that the simulator finishes under overload, rounded to two digits.

    The requests of the overload are drawn from a tuning seed.
    """
    flood = plan.spec(count, "sim")
    flood = replace(flood, rate_scale=FLOOD / count, seed=TUNING_SEEDS[0], window_s=FLOOD_S, warmup_s=0.0, slo="")
    (folder,) = sweep([flood], out, teller=teller, what="saturation")
    if why := record.meta(folder)["infeasible"]:
        raise UserError(f"{count} models do not run on the simulator: {why}")
    rows = requests.rows(record.read(folder))
    ends_s = (rows.arrival_s + rows.e2e_s)[rows.done]
    if not len(ends_s):
        raise UserError(f"{count} models: no request ends on the simulator")
    return float(f"{len(ends_s) / float(ends_s.max()):.2g}")


def slo_rule(plan: Plan) -> str:
    """Return an SLO rule in seconds, computed from the simulated seconds of one request alone.

    The TTFT limit is the time that a server takes to start, plus TTFT_X times the time from arrival to the first token.
    The TPOT limit is TPOT_X times the time of a decode step.
    """
    setup = Setup(resolve(plan.spec(1, "sim")))
    config, priced = setup.config, setup.machine
    profile = cluster(config, priced=priced).profile
    inst = Inst(config.models[0].name, (0,))
    start_s = profile.load_s(inst, plan.way) if plan.way else max(way.fixed_s for way in priced.ladder.values())
    ttft_s = start_s + TTFT_X * (priced.host.api_in_s + profile.prefill_s(inst, SHORT))
    tpot_s = TPOT_X * profile.step_s(inst, 1, SHORT)
    return f"absolute:ttft={ttft_s:.2g},tpot={tpot_s:.2g}"


def _lines(table: pd.DataFrame, side: str, count: int, shares: dict[float, float], attainment: str) -> pd.DataFrame:
    wanted = table["definition"].isin({attainment, *LATENCIES})
    rows = table[(table["over"] == "pooled") & wanted & table["skipped"].isna()]
    load = [f"{count} models, {100 * shares[rate]:.0f} %" for rate in rows["rate_scale"]]
    words = {"label": rows["label"].astype(str), "measure": rows["definition"].astype(str)}
    lines = rows.assign(condition=load, side=side, invalid=rows["invalid"].notna(), **words)
    return lines[[*KEYS, "side", "measure", "value", "invalid"]]


def _skipped(table: pd.DataFrame, side: str) -> Iterator[str]:
    """Yield a line for each system with runs that were skipped, did not fit or are invalid.

    A line has the number of these runs, and the reason of the first one. `side` names where they ran: on servers or in
    the simulator.
    """
    for column, says in (("skipped", "cannot run on"), ("infeasible", "does not fit on"), ("invalid", "invalid on")):
        rows = table[table[column].notna()].drop_duplicates(["run"])
        for label, group in rows.groupby(table["label"].astype(str), sort=False):
            yield f"{label} {says} {side}: {group[column].astype(str).iloc[0]} ({len(group)} runs)"
