"""A paper's figure as data: who is compared on what, along which axes, and what the paper says comes out.

`figures/NAME.toml` is `bench reproduce NAME`; a file of the same form is a figure of one's own. Rows of panels share an
axis; each row is drawn for every trace and every model set.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.experiment.spec import MACHINE, from_dict, meant
from harness.experiment.toml_tables import made as _made
from harness.experiment.toml_tables import table as _table
from harness.experiment.toml_tables import tables as _tables
from harness.policy.types import UserError

HERE = Path(__file__).parent / "figures"
AXES = ("rate_scale", "slo_scale", "gpus", "models")
WORDS = ("reached", "never")


MACHINES = ("process", "sharing")  # what a row may have of its own, as words


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that share what runs along x; the others of rate, SLO scale, GPUs and number of models stand still."""

    axis: str  # rate_scale | slo_scale | gpus | models
    models: tuple[str, ...]  # sets, a line of panels each; along `models`, a point each
    gpus: tuple[int, ...]
    slo_scale: tuple[float, ...]
    rate_scale: tuple[float, ...] = ()  # none: searched along rate_scale, else as the row of rates found it
    full: tuple[float | str, ...] = ()  # more x for --full
    traces: tuple[str, ...] = ()  # instead of the figure's, one for each of them
    systems: tuple[str, ...] = ()  # of the figure's, its first among them; none: all
    process: str = ""  # processes on a GPU, as in a spec; "": the figure's
    sharing: str = ""  # of a GPU by processes, as in a spec; "": the figure's

    def along(self, full: bool = False) -> tuple[Any, ...]:
        """What is asked for along the axis; no rates: they are searched."""
        asked = (*getattr(self, self.axis), *(self.full if full else ()))
        return asked if self.axis == "models" else tuple(sorted({float(x) for x in asked}))

    @property
    def sets(self) -> tuple[str, ...]:
        """Every model set, --full or not."""
        return tuple(map(str, self.along(full=True))) if self.axis == "models" else self.models


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
    rates: int  # at least so many of each system
    window_s: float  # of synthetic traces; replayed ones take `replayed_s`
    replayed_s: float


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
    requests: int  # a window holds at least so many
    warmup_s: float
    gpu: str = "h100"
    host: str = "vllm-0.15"  # costs of the engine's host side
    process: str = "own"  # how many processes hold memory beside weights, as in a spec; so the bytes and rates below
    process_bytes: int | None = None
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
        kept = {
            i: replace(row, models=those, traces=() if traces else row.traces, systems=() if systems else row.systems)
            for i, row in enumerate(self.rows, 1)
            if (those := row.models if models is None else tuple(one for one in row.models if one in models))
        }
        number = {0: 0} | {old: new for new, old in enumerate(kept, 1)}
        claims = tuple(replace(claim, row=number[claim.row]) for claim in self.claims if claim.row in number)
        sets = {one for row in self.rows for one in row.models}
        if unknown := next((one for one in models or () if one not in sets), None):
            raise UserError(
                f'{self.name} has no model set "{unknown}"{meant(unknown, sets)} ({", ".join(sorted(sets))})'
            )
        quick, full = (replace(one, seeds=seeds or one.seeds) for one in (self.quick, self.full))
        titles = () if traces else self.titles
        return replace(
            self,
            systems=systems or self.systems,
            traces=traces or self.traces,
            titles=titles,
            rows=tuple(kept.values()),
            claims=claims,
            quick=quick,
            full=full,
        )

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
    path = Path(name) if name.endswith(".toml") else HERE / f"{name}.toml"
    if not name.endswith(".toml") and name not in names():
        raise UserError(f'no figure "{name}"{meant(name, names())} (there is: {", ".join(names())}; or a .toml)')
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        scopes = {key: _made(Scope, key, _table(key, data.pop(key, {}))) for key in ("quick", "full")}
        rows = tuple(_row(i, one) for i, one in enumerate(_tables("row", data.pop("row", [])), 1))
        claims = tuple(_claim(i, one) for i, one in enumerate(_tables("claim", data.pop("claim", [])), 1))
        found = _made(Figure, "", {**data, **scopes, "name": path.stem, "rows": rows, "claims": claims})
        _whole(found)
    except UserError as error:
        raise UserError(f"{path.name}: {error}") from None
    return found


def _row(i: int, data: Mapping[str, Any]) -> Row:
    lists = {key: value if isinstance(value, list) else [value] for key, value in data.items()}
    row = _made(Row, f"row {i}: ", {**lists, **{key: data[key] for key in ("axis", *MACHINES) if key in data}})
    if row.axis not in AXES:
        raise UserError(f'row {i}: axis is "{row.axis}"{meant(row.axis, AXES)} ({", ".join(AXES)})')
    for key in ("gpus", "slo_scale", "rate_scale"):
        values = getattr(row, key)
        if (not values and key != "rate_scale") or (len(values) > 1 and row.axis != key):
            raise UserError(f"row {i}: {key} is {list(values)}: one number, but along its own axis")
    return row


def _claim(i: int, data: Mapping[str, Any]) -> Claim:
    claim = _made(Claim, f"claim {i}: ", data)
    if isinstance(claim.paper, str) and claim.paper not in WORDS:
        raise UserError(f'claim {i}: paper is "{claim.paper}", not a number, reached or never')
    if isinstance(claim.paper, tuple) and not (len(claim.paper) == 2 and claim.paper[0] <= claim.paper[1]):
        raise UserError(f"claim {i}: paper is {list(claim.paper)}, not a number or two, the smaller first")
    if not isinstance(claim.comparable, bool):
        raise UserError(f"claim {i}: comparable is {claim.comparable!r}, not true or false")
    if not (claim.comparable or claim.why):
        raise UserError(f'claim {i}: comparable is false, and the key "why" is missing')
    return claim


def _known(i: int, asked: Mapping[str, str]) -> None:
    """UserError where a row asks for processes, or their way of sharing, that no spec has."""
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
        _known(i, {key: asked for key in MACHINES if (asked := getattr(row, key))})
        if len(row.traces) not in {0, len(found.traces)}:
            raise UserError(f"row {i}: traces are {len(row.traces)}, the figure has {len(found.traces)}")
        if unknown := next((one for one in row.systems if one not in found.systems), None):
            raise UserError(f'row {i}: system "{unknown}" is none of the figure\'s ({", ".join(found.systems)})')
        if row.systems and found.systems[0] not in row.systems:
            raise UserError(f"row {i}: systems are without {found.systems[0]}, the figure's first")
        if row.axis == "models" and not row.rate_scale:
            raise UserError(f"row {i}: no rate_scale, which a row along models needs")
        if row.axis != "rate_scale" and not row.rate_scale and not _rates(found, row):
            raise UserError(f"row {i}: no rate_scale, and no row along rate_scale with its models, GPUs and SLO scale")
    for i, claim in enumerate(found.claims, 1):
        if claim.axis not in axes:
            raise UserError(f'claim {i}: no row along "{claim.axis}"{meant(claim.axis, axes)}')
        if claim.row and axes[claim.row - 1 : claim.row] != [claim.axis]:
            raise UserError(f"claim {i}: row {claim.row} is none along {claim.axis}")


def _rates(found: Figure, row: Row) -> bool:
    """Tell whether a row of rates covers the sets of this row."""
    return any(
        one.axis == "rate_scale" and set(row.models) <= set(one.models) and one.gpus[0] in row.gpus
        for one in found.rows
    )
