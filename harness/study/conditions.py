"""Conditions side by side as data: what systems, on what, and what each condition changes.

`bridges/NAME.toml` is `bench bridge NAME`: from a fair default to a paper's setting, one assumption at a time, each
with where it comes from; its conditions are the default, the assumptions one after the other (cumulative), and each of
them alone. `regimes/NAME.toml` is `bench regimes NAME`: conditions with nothing in common but the systems.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from harness.policy.fields import meant
from harness.policy.types import UserError
from harness.rows.definitions import DEFINITIONS
from harness.run.spec import Spec, asked, from_dict
from harness.run.toml_tables import load, made, table, tables

HERE = Path(__file__).parent
Kind = Literal["bridge", "regimes"]
FOLDERS: Mapping[Kind, str] = {"bridge": "bridges", "regimes": "regimes"}
STEPS: Mapping[Kind, str] = {"bridge": "step", "regimes": "regime"}  # the key of their tables
ORIGINS = ("paper states", "released code", "unknown")
SET_BY_US = frozenset({"system", "preset", "fields", "rate_scale", "seed", "slo", "slo_s", "trace_sha256", "workload",
                       "measured_on", "token_times"})  # fmt: skip
START = "fair default"


@dataclass(frozen=True, slots=True)
class Ratio:
    """The rate at which `first` holds the level over that of `over`, by the names of [systems].

    `why` is printed where an end of a bridge differs from the paper.
    """

    first: str
    over: str
    paper: float | None = None  # what the paper states
    why: str = ""

    @property
    def label(self) -> str:
        """How tables name it."""
        return f"{self.first} / {self.over}"


@dataclass(frozen=True, slots=True)
class Change:
    """An assumption of a bridge, or a regime: the fields of the spec and the systems that it changes."""

    name: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    systems: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""  # one of ORIGINS; of a bridge only
    source: str = ""  # file and section; of a regime what it stands for
    slo: str = ""  # instead of the study's


@dataclass(frozen=True, slots=True)
class Condition:
    """What is measured side by side: a spec a system, whose rate and seed are still to be set."""

    kind: str  # base | cumulative | alone | regime
    change: Change
    slo: str  # rule
    specs: Mapping[str, Spec]


@dataclass(frozen=True, slots=True)
class Study:
    """Conditions as a file has them."""

    kind: Kind
    name: str
    paper: str
    systems: Mapping[str, str]  # by name: as --systems takes them
    ratios: tuple[Ratio, ...]
    changes: tuple[Change, ...]
    spec: Mapping[str, Any]  # what all conditions share but for their changes
    rates_rps: tuple[float, ...]  # at which every system is run; the rest is found by bisection
    bisections: int
    seeds: int
    definition: str = "both"  # of attainment
    slo: str = "5xP95"
    level: float = 0.99
    notes: tuple[str, ...] = ()  # for the caption

    def only(self, names: Collection[str] | None = None, seeds: int | None = None, **spec: Any) -> Study:
        """The study with some of its changes, other seeds or fields of the spec. UserError for an unknown change."""
        known = [change.name for change in self.changes]
        if unknown := next((name for name in names or () if name not in known), None):
            raise UserError(
                f'{self.name} has no {STEPS[self.kind]} "{unknown}"{meant(unknown, known)} ({", ".join(known)})'
            )
        changes = tuple(change for change in self.changes if names is None or change.name in names)
        return replace(self, changes=changes, seeds=seeds or self.seeds, spec={**self.spec, **spec})

    def conditions(self) -> tuple[Condition, ...]:
        """Every condition, in order."""
        if self.kind == "regimes":
            return tuple(self.condition("regime", change, (change,)) for change in self.changes)
        steps = range(len(self.changes))
        return (
            self.condition("base", Change(START), ()),
            *(self.condition("cumulative", self.changes[k], self.changes[: k + 1]) for k in steps),
            *(self.condition("alone", self.changes[k], (self.changes[k],)) for k in steps),
        )

    def condition(self, kind: str, change: Change, changes: Iterable[Change]) -> Condition:
        """A condition under some changes, named by the last of them."""
        spec, systems, slo = dict(self.spec), dict(self.systems), self.slo
        for one in changes:
            spec |= one.spec
            systems |= one.systems
            slo = one.slo or slo
        specs = {name: from_dict({**spec, **asked(text)}) for name, text in systems.items()}
        return Condition(kind, change, slo, specs)


def names(kind: Kind) -> list[str]:
    """Studies that come with the bench."""
    return sorted(path.stem for path in (HERE / FOLDERS[kind]).glob("*.toml"))


def study(kind: Kind, name: str) -> Study:
    """Load a bridge or regimes by name, or the path of a TOML; UserError names the file and key of a mistake."""
    return load(name, HERE / FOLDERS[kind], kind, partial(_study, kind))


def _study(kind: Kind, name: str, data: dict[str, Any]) -> Study:
    key = STEPS[kind]
    changes = tuple(_change(kind, f"{key} {i}: ", one) for i, one in enumerate(tables(key, data.pop(key, [])), 1))
    ratios = tuple(made(Ratio, f"ratio {i}: ", one) for i, one in enumerate(tables("ratio", data.pop("ratio", [])), 1))
    for one in ("systems", "spec"):
        data[one] = table(one, data.get(one, {}))
    found = made(Study, "", {**data, "kind": kind, "name": name, "changes": changes, "ratios": ratios})
    _whole(found)
    return found


def _change(kind: Kind, where: str, data: Mapping[str, Any]) -> Change:
    change = made(Change, where, data)
    for key in ("spec", "systems"):
        table(f"{where}{key}", getattr(change, key))
    if kind == "bridge" and change.origin not in ORIGINS:
        raise UserError(f'{where}origin is "{change.origin}"{meant(change.origin, ORIGINS)} ({", ".join(ORIGINS)})')
    if kind == "regimes" and change.origin:
        raise UserError(f"{where}origin is of the steps of a bridge")
    if not change.source:
        raise UserError(f'{where}the key "source" is missing')
    return change


def _whole(found: Study) -> None:
    """UserError where a study asks for what is not there, or for what makes no comparison."""
    from workloads import slo

    key = STEPS[found.kind]
    if not found.ratios or not found.changes:
        raise UserError(f"no table [[{key if found.ratios else 'ratio'}]]")
    for i, ratio in enumerate(found.ratios, 1):
        if unknown := next((one for one in (ratio.first, ratio.over) if one not in found.systems), None):
            raise UserError(f'ratio {i}: no system "{unknown}"{meant(unknown, found.systems)}')
    if found.definition not in DEFINITIONS:
        raise UserError(f'definition is "{found.definition}"{meant(found.definition, DEFINITIONS)}')
    if not found.rates_rps or any(not rate > 0 for rate in found.rates_rps):
        raise UserError(f"rates_rps is {list(found.rates_rps)}, not numbers above 0")
    for name, least in (("seeds", 1), ("bisections", 0)):
        if (count := getattr(found, name)) < least:
            raise UserError(f"{name} is {count}, below {least}")
    _sound("spec", found.spec)
    slo.parse(found.slo)
    twice = [change.name for change in found.changes]
    if again := next((name for name in twice if twice.count(name) > 1), None):
        raise UserError(f'{key} "{again}" is listed twice')
    changed: dict[tuple[str, str], str] = {}
    for i, change in enumerate(found.changes, 1):
        _sound(f"{key} {i}: spec", change.spec)
        slo.parse(change.slo or found.slo)
        if unknown := next((name for name in change.systems if name not in found.systems), None):
            raise UserError(f'{key} {i}: no system "{unknown}"{meant(unknown, found.systems)}')
        if found.kind == "bridge":
            _one_more(f"{key} {i}: ", found, change, changed)
    for condition in (found.condition("base", Change(START), ()), *found.conditions()):
        assert condition.specs  # each is read here, so that a value of the wrong kind is named before anything is run


def _sound(where: str, spec: Mapping[str, Any]) -> None:
    if own := next((key for key in spec if key in SET_BY_US), None):
        raise UserError(f'{where}: "{own}" is set by the bench')
    try:
        from_dict({**spec, "system": ""})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _one_more(where: str, found: Study, change: Change, changed: dict[tuple[str, str], str]) -> None:
    """An assumption of a bridge changes something, and nothing that another one changes."""
    keys = [("spec", key) for key in change.spec] + [("systems", key) for key in change.systems]
    keys += [("", "slo")] if change.slo else []
    if again := next((key for key in keys if key in changed), None):
        raise UserError(f'{where}{again[1]} is changed by step "{changed[again]}" already')
    changed.update(dict.fromkeys(keys, change.name))
    alone, base = found.condition("alone", change, (change,)), found.condition("base", Change(START), ())
    if (alone.specs, alone.slo) == (base.specs, base.slo):
        raise UserError(f"{where}it changes nothing of the {START}")


def told(change: Change) -> dict[str, Any]:
    """A change as plain values."""
    return asdict(change)
