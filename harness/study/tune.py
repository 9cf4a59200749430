"""Fair tuning: fields that papers leave open are drawn equally often for each system, never on evaluation seeds.

    world   a trace, and the rule that assigns its streams to models
    cell    a world, rate and seed; all draws of all systems run on the same cells
    held    share of the cells in which 99 % of requests meet both SLOs; figures compare systems by the same criterion
    score   mean over cells of the attainment of TTFT and TPOT, over all requests
    unit    a world and seed, over all rates; intervals count it once, since its rates share arrivals and assignment
    regret  the highest `held` of any draw, minus `held` of the defaults

Draws are stratified (Latin hypercube). For a number, the range is split into n equal parts, and each of n draws comes
from a different part. The parts are logarithmic if the range exceeds a decade. For a choice, each value comes about
equally often. Draw 0 is the defaults.

The draw with the highest `held` is chosen; ties go to the highest score, then to the first. If `held` is 0 for all
draws, no draw reaches the objective. The system is then not tuned, its fields are those of the best score, and the
record says so (`tuned`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from harness import toml
from harness.loop import system
from harness.policy.fields import Domain, domains
from harness.policy.types import GIB, Option, UserError
from harness.rows.estimate import Estimate
from harness.rows.statistics import interval
from harness.run import score
from harness.run.shard import Shard
from harness.run.slo import SloTarget
from harness.run.spec import Spec
from harness.run.sweep import sweep
from harness.run.teller import Teller
from harness.study.bases import TUNING_SEEDS, slo_target
from harness.study.search import LEVEL

Assign = Literal["released", "shuffled", "square"]
# Streams go to models by chance, by a Latin square or as the release gives them; popularity stays or drifts.
WORLDS: tuple[tuple[str, Assign], ...] = (
    ("arena-like", "shuffled"),
    ("hyperbolic-like", "shuffled"),
    ("hyperbolic-like", "square"),
    ("hyperbolic-like-drift", "square"),
    ("hyperbolic-like", "released"),
)
# 0.6 to 23 requests a second: at the lowest a system misses only by its own moves, at the highest none holds its SLOs
RATE_SCALES = (0.5, 2.0, 4.0, 8.0)
SEEDS = TUNING_SEEDS[:4]
RULE, DEFINITION = "5xP95", "both"
BASE = Spec(
    "",
    models="heavy8",
    gpus=2,
    pool_bytes=round(67.28 * GIB),
    chunk_tokens=2048,
    batch_cap=256,
    mem_fraction=0.9,
    admission="prompt",
)
DRAWS = 16
DECADE, DIGITS = 10.0, 3  # a range whose ends have a larger ratio is drawn in logarithm; digits of a drawn number
PLACES = 4  # decimals kept: a hundredth of a percentage point of score

LISTED = re.compile(r"\[\n((?: {4}.*,\n)+)\]")  # a list with a line a value, as tomli_w writes all

Fields = Mapping[str, Option]


class Draw(NamedTuple):
    """Values of the tuned fields of a system, with the results of their runs."""

    fields: Fields
    held: float
    score: float
    gain: Estimate  # gain in `held` over the defaults, paired


@dataclass(frozen=True, slots=True)
class Tuned:
    """The draws of a system in order, and the index of the chosen draw."""

    system: str
    draws: tuple[Draw, ...]
    chosen: int

    @property
    def regret(self) -> float:
        """The share of cells in which the best draw meets the objective, minus the share for the defaults (draw 0)."""
        return max(draw.held for draw in self.draws) - self.draws[0].held

    @property
    def tuned(self) -> bool:
        """Tell whether some draw meets the objective in a cell; if none does, the score alone decided the choice."""
        return any(draw.held > 0 for draw in self.draws)


def open_fields(name: str) -> dict[str, Domain]:
    """Return the fields of a system that its source leaves open. Raises UserError if there are none."""
    fields = {field: domain for field, domain in domains(system.find(name)).items() if domain.tuned}
    if not fields:
        raise UserError(f"{name} has no tuned field: a field is one by tuned=True where it is declared")
    return fields


def drawn(name: str, draws: int) -> list[dict[str, Option]]:
    """Return the values of the fields for each draw, the defaults first; equal arguments give equal draws."""
    import numpy as np

    rng = np.random.default_rng([TUNING_SEEDS[0], zlib.crc32(name.encode())])
    tried: list[dict[str, Option]] = [{} for _ in range(draws)]
    for field, domain in open_fields(name).items():
        n = draws - 1
        at = (rng.permutation(n) + rng.random(n)) / max(n, 1)
        values = [domain.default, *(_value(domain, float(u)) for u in at)]
        for fields, value in zip(tried, values, strict=True):
            fields[field] = value
    return tried


def _value(domain: Domain, u: float) -> Option:
    """Return the value of a field's domain at the quantile `u`, in [0, 1)."""
    if domain.choices:
        open_ = [choice for choice in domain.choices if choice not in domain.undrawn]
        return open_[int(u * len(open_))]
    least, most = domain.least, domain.most
    log = least > 0 and most / least > DECADE
    x = least * (most / least) ** u if log else least + (most - least) * u
    return round(x) if isinstance(domain.default, int) else float(f"{x:.{DIGITS}g}")


def tune(
    systems: Sequence[str],
    out: Path,
    *,
    draws: int = DRAWS,
    gpus: int | None = None,
    workers: int | None = None,
    teller: Teller | None = None,
    shard: Shard | None = None,
) -> list[Tuned]:
    """Run every draw of each system in every cell, and choose a draw for each system.

    With `shard`, only the systems of that shard are tuned. Runs are stored in `out`, so that an interrupted tuning
    resumes. Raises UserError for fewer than 2 draws, and for a system that does not fit the number of GPUs with any
    draw.
    """
    if draws < 2:
        raise UserError(f"--draws {draws} is not at least 2: the first are the defaults")
    tried = {name: drawn(name, draws) for name in (shard.part(systems, str) if shard else systems)}
    base = replace(BASE, gpus=gpus or BASE.gpus)
    under = {
        trace: slo_target(replace(base, system=systems[0], trace=trace), RULE, out, workers=workers, teller=teller)
        for trace, _ in WORLDS
    }
    run = partial(sweep, out=out, workers=workers, teller=teller)
    return [_tuned(base, name, fields, under, run) for name, fields in tried.items()]


def _tuned(
    base: Spec, name: str, tried: Sequence[Fields], under: Mapping[str, SloTarget], run: Callable[..., list[Path]]
) -> Tuned:
    cells = [(world, seed, rate) for world in WORLDS for seed in SEEDS for rate in RATE_SCALES]
    each = [replace(base, system=name, fields=tuple(fields.items())) for fields in tried]
    specs = [
        under[trace].spec(replace(spec, trace=trace, assign=assign, seed=seed, rate_scale=rate))
        for spec in each
        for (trace, assign), seed, rate in cells
    ]
    runs = run(specs, what=name)
    if not any(score.ran(run) for run in runs):
        raise UserError(f"{name} fits with no draw on {base.gpus} GPU(s): --gpus N gives it more")
    folders = iter(runs)
    units, scores = [], []
    for _ in tried:
        got = {cell: score.attained(next(folders), under[cell[0][0]], [DEFINITION])[DEFINITION] for cell in cells}
        reached = {cell: float(share >= LEVEL) for cell, share in got.items()}
        units.append([fmean(reached[world, seed, rate] for rate in RATE_SCALES) for world in WORLDS for seed in SEEDS])
        scores.append(round(fmean(got.values()), PLACES))
    chosen_from = [
        Draw(fields, round(fmean(mine), PLACES), mean, rounded([a - b for a, b in zip(mine, units[0], strict=True)]))
        for fields, mine, mean in zip(tried, units, scores, strict=True)
    ]
    return Tuned(name, tuple(chosen_from), choose(chosen_from))


def rounded(gains: Sequence[float]) -> Estimate:
    """Return mean and interval, rounded as the record stores them, so that the choice follows from the record."""
    exact = interval(gains)
    low, high = (None if x is None else round(x, PLACES) for x in (exact.low, exact.high))
    return replace(exact, mean=round(exact.mean, PLACES), low=low, high=high)


def choose(draws: Sequence[Draw]) -> int:
    """Return the index of the draw that meets the objective in most cells.

    Ties go to the highest score, then to the first.
    """
    return max(range(len(draws)), key=lambda k: (draws[k].held, draws[k].score, -k))


# ------------------------------------------------------------------ the record


def shown(fields: Fields) -> str:
    """Render fields in a line: `z=2.0 moves="copy"`."""
    return " ".join(f"{name}={toml.shown(value)}" for name, value in fields.items())


HEAD = """\
# Written by the command below. Each draw: its values; held, the share of (world, rate, seed) in which 99 %
# of both SLOs are met; its score, the mean attainment of both; the gain of held over draw 0, the defaults
# before tuning, with a 95 % interval over (world, seed). Chosen: the most held, then the best score, then
# the first. `tuned` is false where no draw holds any: the choice is by its score alone, and no tuning. Regret:
# the share of cells that draw 0 holds less than the draw that holds most.
"""


def as_toml(tunings: Sequence[Tuned], day: str, command: str, gpus: int | None = None) -> str:
    """Render the record of a tuning: how it was made, every draw in order with its score, and the chosen draw."""
    import tomli_w

    about = {
        "date": date.fromisoformat(day),
        "command": command,
        "seeds": SEEDS,
        "worlds": [" ".join(world) for world in WORLDS],
        "rate_scales": RATE_SCALES,
        "models": BASE.models,
        "gpus": gpus or BASE.gpus,
        **({"pool_bytes": BASE.pool_bytes} if BASE.pool_bytes is not None else {}),
        "slo": RULE,
    }
    systems = {
        t.system: {
            "chosen": t.chosen,
            "tuned": t.tuned,
            "regret": round(t.regret, PLACES),
            "draw": [_recorded(draw) for draw in t.draws],
        }
        for t in tunings
    }
    text = tomli_w.dumps(about | systems)
    return HEAD + LISTED.sub(lambda values: f"[{' '.join(values[1].split()).rstrip(',')}]", text)


def _recorded(draw: Draw) -> dict[str, Any]:
    gain = [draw.gain.mean, draw.gain.low or 0.0, draw.gain.high or 0.0]
    return {"held": draw.held, "score": draw.score, "gain": gain, "fields": dict(draw.fields)}
