"""Facts of a study (its panels, systems, SLO targets), read from the footer of its table `record.SWEEP`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from harness.rows import record
from harness.rows.sealed import Facts

Panel = Mapping[str, Any]  # facts of a panel, as grid.facts has them (forms.PANEL)


@dataclass(frozen=True)
class About:
    """The facts of a study that texts, figures and verdicts use; the study's table stores them (forms.SCORED)."""

    study: str
    layout: str
    paper: str
    level: float
    definitions: tuple[str, ...]  # attainment is judged by them; the study's first decides
    slo: str
    titles: tuple[str, ...]  # each stands above a column of panels
    systems: tuple[str, ...]  # as tables name them, the study's own first
    controls: tuple[str, ...]
    seeds: int  # runs of each point
    sample: Mapping[str, Any]
    panels: tuple[Panel, ...]
    claims: tuple[Mapping[str, Any], ...]  # fields of study.Claim
    values: tuple[float | None, ...]  # one for each claim: seconds where the claim needs no run
    notes: tuple[str, ...]
    judges: tuple[Facts, ...]  # as slo.judgements has them
    runs: Mapping[str, str]  # a folder maps to the system's name
    texts: Mapping[str, str] = field(default_factory=dict)  # a name maps to the system as --systems takes it
    fuller: str = ""  # what --full adds
    setting: str = ""  # describes all runs if claims are about measures
    headline: str = ""  # the first line of its answer, with {} where the numbers stand
    shown: tuple[str, ...] = ()  # measures that the answer has a table of
    bound: Mapping[str, Any] | None = None  # study.bound gives it for a comparison along rates

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> About:
        """Build the facts from those of a table's footer. Raises Damaged if a fact without a default is missing."""
        needed = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
        given: dict[str, Any] = {f.name: facts[f.name] for f in fields(cls) if f.name in {*needed, *facts}}
        return cls(**given | {key: tuple(x) for key, x in given.items() if isinstance(x, list)})

    @classmethod
    def read(cls, table: Path) -> About:
        """Read the facts of a stored table. Raises Damaged, and FileNotFoundError."""
        return cls.of(record.footer(table))
