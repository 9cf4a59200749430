"""The same specs on servers and on the simulator with their cost table: `bench validate --engine E`.

Nothing that is measured here goes back into the table. Runs are kept like all runs, so a second call goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from harness.engines.machine import cluster
from harness.policy.types import Inst, UserError
from harness.rows import record, requests, tidy
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
from harness.validate.ranks import METRICS, QUANTILES, SERVERS, SIMULATOR

# What servers that are started and stopped can run (bench list --matrix).
SYSTEMS = ("static", "serverlessllm", "swap", "swap:llama-swap-fifo", "swap+most=2", "swap:router", "swap:ollama")
SHARES = (0.3, 0.7, 1.0)  # of the saturated rate
SERVED = 512  # longest prompt + output
# A request a second and model, at rate 1. Prompts are long, so that the client's lag is short beside a first token.
TRACE = f"aegaeon-like+rate_rps=1+lengths=uniform+max_tokens={SERVED}"
FLOOD = 100.0  # a rate that no server keeps up with
FLOOD_S = 10.0
WARMUP_S = 2.0
SHORT = 128  # tokens of a prompt whose solo latency the SLO is a multiple of
TTFT_X, TPOT_X = 10.0, 8.0


class Predicted(NamedTuple):
    """Scored runs of both."""

    frame: pd.DataFrame  # a line a run and measure, as `ranks` takes it
    attainment: str  # the measure that is compared
    rule: str
    machine: str  # of the servers, as their cost table names it
    notes: list[str]


class Plan(NamedTuple):
    """The plan of a comparison: models, systems, counts, shares of the saturated rate, repeats."""

    engine: str
    table: str
    model: str  # a shape that the table has
    systems: Sequence[str] = SYSTEMS
    counts: Sequence[int] = (2, 4, 8)  # of models
    shares: Sequence[float] = SHARES
    repeats: int = 5
    window_s: float = 10.0
    again: int = 0  # how often an invalid run is made again

    def spec(self, count: int, engine: str) -> Spec:
        """Return the spec of so many models on an engine, whose rate and seed are still to be set."""
        return Spec(
            "static", engine=engine, table=self.table, models=f"{self.model}*{count}", gpus=1, trace=TRACE,
            served=SERVED, window_s=self.window_s, warmup_s=WARMUP_S,
        )  # fmt: skip


def spans(plan: Plan, out: Path, rule: str | None = None) -> list[Span]:
    """Return the spans of every run on servers, stored or not, before any begins."""
    asked = rule or slo_rule(plan)
    planned = list[Span]()
    for count in plan.counts:
        drain_s = ahead(plan.spec(count, "sim"), asked, out).drain_s
        span = Span(WARMUP_S, plan.window_s, math.inf if drain_s is None else drain_s)
        planned += [span] * (len(plan.systems) * len(plan.shares) * plan.repeats)
    return planned


def predict(plan: Plan, out: Path, teller: Teller, rule: str | None = None) -> Predicted:
    """Run the plan on both. Raises UserError."""
    asked = rule or slo_rule(plan)
    frames, notes = list[pd.DataFrame](), list[str]()
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
            runs = [(label, out / task.spec.folder) for (label, _), task in zip(cells, scheduled, strict=True)]
            table = tidy.scores(score.scorable(label, run, under) for label, run in runs).to_pandas()
            frames.append(_lines(table, side, count, {rate: share for share, rate in rates.items()}, under.definition))
            notes += _skipped(table, side)
    frame = pd.concat(frames, ignore_index=True)
    priced = Setup(resolve(plan.spec(1, "sim"))).machine
    return Predicted(frame, under.definition, asked, priced.spec.name, list(dict.fromkeys(notes)))


def grid(
    plan: Plan, count: int, engine: str, rates: dict[float, float], under: SloTarget
) -> Iterator[tuple[str, Spec]]:
    """Yield the runs with systems side by side in time, so that a drift of the machine meets all of them."""
    base = plan.spec(count, engine)
    for rate in rates.values():
        for seed in range(plan.repeats):
            for text in plan.systems:
                spec = another(base, text)
                yield spec.label, under.spec(replace(spec, rate_scale=rate, seed=seed))


def _again(done: Sequence[Task], out: Path, times: int, teller: Teller) -> None:
    """Make invalid runs again, the last one of which is kept."""
    for _ in range(times):
        invalid = [task for task in done if (record.meta(out / task.spec.folder).get("verdict") or {}).get("reasons")]
        for count, task in enumerate(invalid):
            teller.progress("invalid runs again", count, len(invalid))
            execute(task.spec, out, task.code)


def saturated_rps(plan: Plan, count: int, out: Path, teller: Teller) -> float:
    """Return the requests a second that the simulator finishes under overload, on a tuning seed, to two digits."""
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
    """Return an SLO rule in seconds: multiples of a short prompt and a step alone, and a server's start."""
    setup = Setup(resolve(plan.spec(1, "sim")))
    config, priced = setup.config, setup.machine
    profile = cluster(config, priced=priced).profile
    inst = Inst(config.models[0].name, (0,))
    start_s = max(way.fixed_s for way in priced.ladder.values())
    ttft_s = start_s + TTFT_X * (priced.host.api_in_s + profile.prefill_s(inst, SHORT))
    tpot_s = TPOT_X * profile.step_s(inst, 1, SHORT)
    return f"absolute:ttft={ttft_s:.2g},tpot={tpot_s:.2g}"


def _lines(table: pd.DataFrame, side: str, count: int, shares: dict[float, float], attainment: str) -> pd.DataFrame:
    wanted = {attainment, *(f"{metric}_p{q}_s" for metric in METRICS for q in QUANTILES)}
    rows = table[(table["over"] == "pooled") & table["definition"].isin(wanted) & table["skipped"].isna()]
    load = [f"{count} models, {100 * shares[rate]:.0f} %" for rate in rows["rate_scale"]]
    return pd.DataFrame(
        {
            "condition": load, "label": rows["label"].astype(str), "seed": rows["seed"], "side": side,
            "measure": rows["definition"].astype(str), "value": rows["value"], "invalid": rows["invalid"].notna(),
        }
    )  # fmt: skip


def _skipped(table: pd.DataFrame, side: str) -> Iterator[str]:
    """List systems that did not run, and invalid runs, each with the reason."""
    for column, says in (("skipped", "cannot run on"), ("infeasible", "does not fit on"), ("invalid", "invalid on")):
        rows = table[table[column].notna()].drop_duplicates(["run"])
        for label, group in rows.groupby(table["label"].astype(str), sort=False):
            if len(group):
                yield f"{label} {says} {side}: {group[column].astype(str).iloc[0]} ({len(group)} runs)"
