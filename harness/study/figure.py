"""A paper's figure as data: who is compared on what, along which axes, and what the paper says comes out.

`figures/NAME.toml` is `bench reproduce NAME`; a file of the same form is a figure of one's own. Rows of panels share an
axis; each row is drawn for every trace and every model set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.policy.fields import meant
from harness.policy.types import UserError
from harness.run.spec import MACHINE, from_dict
from harness.run.toml_tables import load, made, table, tables

HERE = Path(__file__).parent / "figures"
AXES = ("rate_scale", "slo_scale", "gpus", "models")
WORDS = ("reached", "never")


SETTING = ("process", "sharing", "assign", "plan", "placement")  # what a row may have of its own, as a spec says it
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that share what runs along x; the others of rate, SLO scale, GPUs and number of models stand still."""

    axis: str  # rate_scale | slo_scale | gpus | models
    models: tuple[str, ...]  # sets, a line of panels each; along `models`, a point each
    gpus: tuple[int, ...]
    slo_scale: tuple[float, ...]
    rate_scale: tuple[float, ...] = ()  # none: searched along rate_scale, else as the row of rates found it
    rate_rps: tuple[float, ...] = ()  # instead, of all models together; along rates others come by bisection
    full: tuple[float | str, ...] = ()  # more x for --full
    extra: bool = False  # the row itself is only for --full; a file says `full = true`
    traces: tuple[str, ...] = ()  # instead of the figure's: one for each column, or for the first ones
    systems: tuple[str, ...] = ()  # of the figure's, its first among them; none: all
    window_s: float = 0.0  # 0: the scope's
    pool_gib: float = 0.0  # of a GPU for weights and KV, processes beside it; 0: the figure's
    process: str = ""  # processes on a GPU, as in a spec; "": the figure's
    sharing: str = ""  # of a GPU by processes, as in a spec; "": the figure's
    assign: str = ""  # of streams to models, as in a spec
    plan: str = ""  # what planners see, as in a spec
    placement: str = ""  # one for all systems, as in a spec

    def along(self, full: bool = False) -> tuple[Any, ...]:
        """What is asked for along the axis; no rates: they are searched."""
        asked = (*getattr(self, self.axis), *(self.full if full else ()))
        return asked if self.axis == "models" else tuple(sorted({float(x) for x in asked}))

    @property
    def sets(self) -> tuple[str, ...]:
        """Every model set, --full or not."""
        return tuple(map(str, self.along(full=True))) if self.axis == "models" else self.models

    @property
    def own(self) -> dict[str, Any]:
        """What this row says of its setting, as a file does."""
        return {key: said for key in (*SETTING, "pool_gib") if (said := getattr(self, key))}

    @property
    def spec(self) -> dict[str, Any]:
        """The fields of a spec that this row sets."""
        pool = {"pool_bytes": round(self.pool_gib * GIB)} if self.pool_gib else {}
        return {key: said for key, said in self.own.items() if key != "pool_gib"} | pool


@dataclass(frozen=True, slots=True)
class Claim:
    """What the paper says of a row: a number or two that it lies between, or that the level is `reached` or `never`.

    With `over` the number is a ratio of crossings, system / over. `why` is printed where ours differs. `comparable` is
    false where the paper leaves out what a comparison needs, as `why` then says.
    """

    axis: str
    system: str
    paper: float | str | tuple[float, float]
    definition: str
    over: str | None = None
    trace: str = ""  # how the trace's name begins; "": any
    row: int = 0  # which row alone, from 1; 0: any along the axis
    column: int = 0  # which trace alone, from 1; 0: any
    why: str = ""
    comparable: bool = True


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is run."""

    seeds: int
    rates: int  # of each system: at least so many where they are searched by doubling, at most by bisection
    window_s: float  # of synthetic traces
    replayed_s: float = 0.0  # of replayed traces; 0: all that a seed replays


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure; its first system is the paper's own."""

    name: str
    paper: str
    systems: tuple[str, ...]  # as --systems takes them
    traces: tuple[str, ...]
    definitions: tuple[str, ...]  # of attainment, a column of panels each; the first decides where a search ends
    rows: tuple[Row, ...]
    quick: Scope
    full: Scope
    requests: int  # the seeds of a point hold at least so many together
    warmup_s: float
    engine: str = "sim"
    table: str | None = None  # the engine's own costs, as in a spec
    gpu: str = "h100"
    host: str = "vllm-0.15"  # costs of the engine's host side
    process: str = "own"  # how many processes hold memory beside weights, as in a spec; so the bytes and rates below
    process_bytes: int | None = None
    pool_bytes: int | None = None  # of a GPU for weights and KV, processes beside it
    sharing: str = "own"  # of a GPU by processes, as in a spec
    pcie_gbps: float | None = None
    nvlink_gbps: float | None = None
    net_gbps: float | None = None
    disk_gbps: float | None = None
    slo: str = "P95"  # base of the SLO (workloads/slo.py)
    level: float = 0.99  # of attainment, at which systems are compared
    claims: tuple[Claim, ...] = ()
    titles: tuple[str, ...] = ()  # of the traces' columns; none: their names
    notes: tuple[str, ...] = ()  # for the caption

    def only(
        self,
        systems: tuple[str, ...] | None = None,
        traces: tuple[str, ...] | None = None,
        models: tuple[str, ...] | None = None,
        seeds: int | None = None,
    ) -> Figure:
        """The figure with other systems, traces or seeds, or a part of its model sets. UserError for an unknown set."""
        sets = {one for row in self.rows for one in row.models}
        if unknown := next((one for one in models or () if one not in sets), None):
            raise UserError(
                f'{self.name} has no model set "{unknown}"{meant(unknown, sets)} ({", ".join(sorted(sets))})'
            )
        found = self.with_rows({
            i: replace(row, models=those, traces=() if traces else row.traces, systems=() if systems else row.systems)
            for i, row in enumerate(self.rows, 1)
            if (those := row.models if models is None else tuple(one for one in row.models if one in models))
        })  # fmt: skip
        quick, full = (replace(one, seeds=seeds or one.seeds) for one in (self.quick, self.full))
        titles = () if traces else self.titles
        return replace(
            found,
            systems=systems or self.systems,
            traces=traces or self.traces,
            titles=titles,
            quick=quick,
            full=full,
        )

    def of(self, full: bool) -> Figure:
        """The figure without the rows that are only for --full, unless they are asked for."""
        return self.with_rows({i: row for i, row in enumerate(self.rows, 1) if full or not row.extra})

    def with_rows(self, rows: Mapping[int, Row]) -> Figure:
        """The figure with some of its rows, by number from 1, and the claims that are about them."""
        number = {0: 0} | {old: new for new, old in enumerate(rows, 1)}
        left = {row.axis for row in rows.values()}
        claims = (one for one in self.claims if one.row in number and one.axis in left)
        claims = (replace(one, row=number[one.row]) for one in claims)
        return replace(self, rows=tuple(rows.values()), claims=tuple(claims))

    def without(self, gone: Collection[str]) -> Figure | None:
        """The figure without some of its systems; None where no other one is in every row, to stand first."""
        left = [name for name in self.systems if name not in gone]
        first = next((x for x in left if all(x in (row.systems or left) for row in self.rows)), None)
        if first is None:
            return None
        rows = (replace(row, systems=tuple(x for x in row.systems if x not in gone)) for row in self.rows)
        return replace(self, systems=(first, *(x for x in left if x != first)), rows=tuple(rows))


def names() -> list[str]:
    """Figures that come with the bench."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def figure(name: str) -> Figure:
    """Load a figure by name or the path of its TOML; UserError names the file and key of a mistake."""
    return load(name, HERE, "figure", _figure)


def _figure(name: str, data: dict[str, Any]) -> Figure:
    scopes = {key: made(Scope, key, table(key, data.pop(key, {}))) for key in ("quick", "full")}
    rows = tuple(_row(i, one) for i, one in enumerate(tables("row", data.pop("row", [])), 1))
    claims = tuple(_claim(i, one) for i, one in enumerate(tables("claim", data.pop("claim", [])), 1))
    found = made(Figure, "", {**data, **scopes, "name": name, "rows": rows, "claims": claims})
    _whole(found)
    return found


def _row(i: int, data: Mapping[str, Any]) -> Row:
    if isinstance(data.get("full"), bool):
        data = {key: value for key, value in data.items() if key != "full"} | {"extra": data["full"]}
    lists = {key: value if isinstance(value, list) else [value] for key, value in data.items()}
    single = ("axis", "extra", "window_s", "pool_gib", *SETTING)
    row = made(Row, f"row {i}: ", {**lists, **{key: data[key] for key in single if key in data}})
    if row.axis not in AXES:
        raise UserError(f'row {i}: axis is "{row.axis}"{meant(row.axis, AXES)} ({", ".join(AXES)})')
    several = {"rate_rps": "rate_scale", "gpus": "rate_scale"}  # a panel each, or fixed rates
    for key in ("gpus", "slo_scale", "rate_scale", "rate_rps"):
        values = getattr(row, key)
        if (not values and key not in {"rate_scale", "rate_rps"}) or (
            len(values) > 1 and row.axis not in {key, several.get(key)}
        ):
            raise UserError(f"row {i}: {key} is {list(values)}: one number, but along its own axis")
    for key in ("rate_rps", "pool_gib", "window_s"):
        value = getattr(row, key)
        if not all(type(x) in {int, float} and x >= 0 for x in (value if isinstance(value, tuple) else [value])):
            raise UserError(f"row {i}: {key} is {value!r}, not numbers of 0 or more")
    if row.rate_rps and (row.rate_scale or min(row.rate_rps) <= 0 or row.axis == "models"):
        raise UserError(f"row {i}: rate_rps is {list(row.rate_rps)}: above 0, without rate_scale, not along models")
    if row.rate_rps and row.axis == "rate_scale" and row.full:
        raise UserError(f"row {i}: full is {list(row.full)}: with rate_rps, --full has more rates by bisection")
    return row


def _claim(i: int, data: Mapping[str, Any]) -> Claim:
    claim = made(Claim, f"claim {i}: ", data)
    if isinstance(claim.paper, str) and claim.paper not in WORDS:
        raise UserError(f'claim {i}: paper is "{claim.paper}", not a number, reached or never')
    if isinstance(claim.paper, tuple) and not (len(claim.paper) == 2 and claim.paper[0] <= claim.paper[1]):
        raise UserError(f"claim {i}: paper is {list(claim.paper)}, not a number or two, the smaller first")
    if not isinstance(claim.comparable, bool):
        raise UserError(f"claim {i}: comparable is {claim.comparable!r}, not true or false")
    if not (claim.comparable or claim.why):
        raise UserError(f'claim {i}: comparable is false, and the key "why" is missing')
    return claim


def _known(i: int, asked: Mapping[str, Any]) -> None:
    """UserError where a row asks for what no spec has."""
    try:
        from_dict({"system": "", **asked})
    except UserError as error:
        raise UserError(f"row {i}: {error}") from None


def _whole(found: Figure) -> None:
    """UserError where rows or claims ask for what is not there."""
    axes = [row.axis for row in found.rows]
    from_dict({"system": "", **{name: getattr(found, name) for name in MACHINE}})
    if len(found.titles) not in {0, len(found.traces)}:
        raise UserError(f"titles are {len(found.titles)}, the figure has {len(found.traces)} traces")
    for i, row in enumerate(found.rows, 1):
        _known(i, row.spec)
        if len(row.traces) > len(found.traces):
            raise UserError(f"row {i}: traces are {len(row.traces)}, the figure has {len(found.traces)}")
        if unknown := next((one for one in row.systems if one not in found.systems), None):
            raise UserError(f'row {i}: system "{unknown}" is none of the figure\'s ({", ".join(found.systems)})')
        if row.systems and found.systems[0] not in row.systems:
            raise UserError(f"row {i}: systems are without {found.systems[0]}, the figure's first")
        if row.axis == "models" and not row.rate_scale:
            raise UserError(f"row {i}: no rate_scale, which a row along models needs")
        if row.axis != "rate_scale" and not (row.rate_scale or row.rate_rps) and not _rates(found, row):
            raise UserError(f"row {i}: no rate_scale, and no row along rate_scale with its models, GPUs and SLO scale")
    for i, claim in enumerate(found.claims, 1):
        if claim.axis not in axes:
            raise UserError(f'claim {i}: no row along "{claim.axis}"{meant(claim.axis, axes)}')
        if claim.row and axes[claim.row - 1 : claim.row] != [claim.axis]:
            raise UserError(f"claim {i}: row {claim.row} is none along {claim.axis}")


def _rates(found: Figure, row: Row) -> bool:
    """Tell whether a row of rates covers the sets of this row."""
    return any(
        one.axis == "rate_scale" and set(row.models) <= set(one.models) and not set(one.gpus).isdisjoint(row.gpus)
        for one in found.rows
    )
