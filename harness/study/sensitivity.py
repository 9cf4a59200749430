"""Which constant of the machine turns the order of two systems: one at a time is changed, and all else stays.

The SLOs stay as well, in seconds: they are those of the machine as it is. Runs are paired by seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.policy.types import UserError
from harness.report.summary import scores, summarize
from harness.rows import record, statistics
from harness.rows.statistics import Curve, Estimate
from harness.run import score
from harness.run.resolve import resolve
from harness.run.setup import Failed
from harness.run.spec import Spec
from harness.run.sweep import sweep, tasks
from harness.run.teller import Teller
from harness.study.compare import Compared, Entry
from harness.study.constants import Constant, Setting, constants, settings
from harness.study.rates import LEVEL

if TYPE_CHECKING:
    import pyarrow as pa

AS_IS = Setting("", "as it is", {})


class Row(NamedTuple):
    """A change of a constant, and the lead of the first system under it; without one, `note` says why none was run."""

    constant: Constant
    setting: str
    lead: Estimate | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The lead of one system over another, on the machine as it is and under every change of it.

    At one rate it is a difference of attainment; over several the ratio of the rates at which they meet `LEVEL`.
    """

    first: str
    second: str
    definition: str
    rates: tuple[float, ...]
    base: Estimate
    rows: tuple[Row, ...]

    @property
    def many(self) -> bool:
        """Whether the lead is over several rates."""
        return len(self.rates) > 1

    @property
    def even(self) -> float:
        """The lead of equals."""
        return 1.0 if self.many else 0.0

    def order(self, lead: Estimate) -> int:
        """1 where the first system leads beyond the interval, -1 where the second does, 0 where neither."""
        return (lead.low is not None and lead.low > self.even) - (lead.high is not None and lead.high < self.even)

    def swing(self, constant: str) -> float:
        """Between the largest and the smallest lead under a constant, the machine as it is among them."""
        seen = [self.base.mean, *(row.lead.mean for row in self.rows if row.constant.name == constant and row.lead)]
        return math.log(max(seen) / min(seen)) if self.many else max(seen) - min(seen)

    @property
    def ranked(self) -> list[Constant]:
        """Constants by falling swing, then those that were left."""
        tried = {row.constant.name for row in self.rows if row.lead}
        every = dict.fromkeys(row.constant for row in self.rows)
        return sorted(every, key=lambda one: (one.name not in tried, -self.swing(one.name)))


def leading(found: Compared, definition: str, silent: Collection[str]) -> tuple[Entry, Entry]:
    """The first two of a comparison: by the rate at 99 %, or by attainment where there is one rate.

    Labels in `silent` do not contend, unless only two are compared.
    """
    labels = [entry.label for entry in found.entries]
    silent = silent if len(labels) > 2 else ()
    shown = summarize(found.table, labels, definition, LEVEL, controls=silent)
    rivals = [system for system in shown.systems if not system.control]
    if len(rivals) < 2:
        raise UserError("an order takes two systems: --systems a,b")
    key = definition if any(system.values.get("rate_99") is None for system in rivals) else "rate_99"
    best = sorted(rivals, key=lambda system: -system.mean(key))[:2]
    first, second = (next(e for e in found.entries if e.label == system.label) for system in best)
    return first, second


def telling(found: Compared, pair: tuple[Entry, Entry], definition: str) -> float:
    """The rate of a comparison at which two systems differ most."""

    def apart(rate: float) -> float:
        ours, theirs = (scores(found.table, entry.label, rate, definition) for entry in pair)
        return abs(statistics.paired(ours, theirs).mean)

    return max(found.rates, key=apart)


def sensitivity(
    found: Compared,
    out: Path,
    *,
    definition: str,
    silent: Collection[str] = (),
    only: Collection[str] | None = None,
    knee: bool = False,
    workers: int | None = None,
    teller: Teller | None = None,
) -> Found:
    """Change constants (of `only` these, None: all) under the first two of a comparison; kept beside its table.

    They are compared at the rate at which they differ most; with `knee` by the rates at which they meet `LEVEL`. A
    change under which a model does not fit a GPU any more is no run. Raises UserError.
    """
    if knee and len(found.rates) < 2:
        raise UserError("--knee needs several rates: leave --rate-scale out, or name a list as 1,2,4")
    pair, under = leading(found, definition, silent), found.judge
    rates = found.rates if knee else (telling(found, pair, definition),)
    specs = [entry.spec for entry in pair]
    changes, left = settings(specs, only)
    known = {one.name: one for one in constants(specs)}

    def cells(change: Setting) -> list[Spec]:
        return [
            under.spec(replace(change.of(spec), rate_scale=rate, seed=spec.seed + seed))
            for spec in specs
            for rate in rates
            for seed in range(found.seeds)
        ]

    grid, misfit = [(AS_IS, cells(AS_IS))], dict[int, str]()
    for k, change in enumerate(changes):
        try:
            grid.append((change, [resolve(spec) for spec in cells(change)]))
        except Failed:
            raise
        except UserError as why:
            misfit[k] = str(why)
    every = [spec for _, own in grid for spec in own]
    folders = sweep(every, out, workers=workers, teller=teller, what="constants")

    def rows() -> Iterator[dict[str, Any]]:
        each = len(specs) * len(rates) * found.seeds
        runs = [folders[k : k + each] for k in range(0, len(folders), each)]
        for (change, _), own in zip(grid, runs, strict=True):
            met = [score.attained(run, under, [definition])[definition] for run in own]
            lacks = (entry.label for entry, run in zip(pair, own[:: each // 2], strict=True) if infeasible(run))
            note = ", ".join(f"{label} is infeasible" for label in lacks)
            lead = lead_of(met[: each // 2], met[each // 2 :], rates, found.seeds)
            yield {"constant": change.constant, "setting": change.said, **asdict(lead), "note": note}
        for k, why in misfit.items():
            yield {"constant": changes[k].constant, "setting": changes[k].said, "note": why}
        for name, why in left.items():
            yield {"constant": name, "setting": "", "note": why}

    def make() -> pa.Table:
        import pyarrow as pa

        told = (row | dict(zip(Constant._fields[1:], known[row["constant"]][1:], strict=True)) if row["constant"]
                else row for row in rows())  # fmt: skip
        return pa.Table.from_pylist(list(told), schema=schema())

    about = {"first": pair[0].label, "second": pair[1].label, "definition": definition, "rates": rates,
             "sweep": _key(found.folder / record.SWEEP), "asked": sorted(only or ())}  # fmt: skip
    path = found.folder / record.SENSITIVITY
    return _found(about, score.kept(path, about, tasks(every), __file__, make))


def infeasible(run: Path) -> bool:
    """Tell whether a system could not hold its models in a run."""
    return bool(record.meta(run)["infeasible"])


def lead_of(ours: Sequence[float], theirs: Sequence[float], rates: Sequence[float], seeds: int) -> Estimate:
    """The lead from attainment by rate, then by seed."""
    if len(rates) == 1:
        return statistics.paired(dict(enumerate(ours)), dict(enumerate(theirs)))

    def curves(met: Sequence[float]) -> dict[int, Curve]:
        return {seed: dict(zip(rates, met[seed::seeds], strict=True)) for seed in range(seeds)}

    return statistics.crossing_ratio(curves(ours), curves(theirs), LEVEL)


# ------------------------------------------------------------------ what is kept


def schema() -> pa.Schema:
    """Columns of the table that is kept; a lead is null where nothing was run, and `note` says why."""
    import pyarrow as pa

    words = [(name, pa.string()) for name in ("constant", "means", "value", "source", "setting")]
    numbers = [(name, pa.float64()) for name in ("mean", "low", "high")]
    return pa.schema([*words, *numbers, ("n", pa.int32()), ("sign", pa.string()), ("note", pa.string())])


def read(folder: Path) -> Found | None:
    """What is kept beside a comparison's table, if it is of that table's runs."""
    import pyarrow.parquet as pq

    path = folder / record.SENSITIVITY
    with suppress(OSError, ValueError, KeyError):  # a file that cannot be read says nothing
        stored = {key.decode(): json.loads(value) for key, value in (pq.read_metadata(path).metadata or {}).items()
                  if key != b"ARROW:schema"}  # fmt: skip
        if stored["sweep"] == _key(folder / record.SWEEP):
            return _found(stored, pq.read_table(path))
    return None


def _key(table: Path) -> str:
    """By what a comparison's table is told from another one of the same name."""
    import pyarrow.parquet as pq

    return str(json.loads((pq.read_metadata(table).metadata or {})[b"key"]))


def _found(about: Mapping[str, Any], table: pa.Table) -> Found:
    base, *rows = table.to_pylist()

    def lead(row: Mapping[str, Any]) -> Estimate | None:
        return None if row["mean"] is None else Estimate(*(row[x] for x in ("mean", "low", "high", "n", "sign")))

    known = (Constant(row["constant"], row["means"], row["value"], row["source"]) for row in rows)
    start = lead(base)
    assert start is not None
    return Found(
        about["first"],
        about["second"],
        about["definition"],
        tuple(about["rates"]),
        start,
        tuple(Row(one, row["setting"], lead(row), row["note"]) for one, row in zip(known, rows, strict=True)),
    )
