"""Options that `bench compare`, `size` and `sensitivity` share: systems in a setting, an SLO, a folder of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from harness.answers.commands import real
from harness.cli import options, values
from harness.policy.types import UserError
from workloads.usual import WORLD

if TYPE_CHECKING:
    from harness.study.study import Study


@dataclass(frozen=True)
class Asked:
    """The values of the options that several commands share; an option that a command lacks has its default here."""

    systems: str
    setting: Mapping[str, Any]  # fields of a spec
    slo: str | None = None
    slo_scale: float | None = None
    definition: str | None = None
    rates: Sequence[float] | None = None
    seeds: int | None = None
    controls: bool = False
    workers: int | None = None
    out: Path | None = None

    @property
    def rule(self) -> str:
        """The SLO rule with its scale, as in `5xP95`."""
        return options.slo_rule(self.slo, self.slo_scale, self.setting.get("models", WORLD["models"]))

    @property
    def folder(self) -> Path:
        """The folder of runs."""
        return real(self.out or options.RESULTS)

    def figure(self, name: str) -> Path:
        """Return the path of a figure, without its ending."""
        return (options.FIGURES if self.out is None else self.folder) / name

    def study(self, setting: Mapping[str, Any] | None = None) -> Study:
        """Build the study of a comparison; `setting`, if given, replaces the user's setting.

        `all` in `systems` stands for every system that is not listed. If the user set no `seeds`, the study begins with
        FIRST_SEEDS seeds, and in the simulator it has a budget for more seeds. With --scaling none it then has ONCE
        seeds and no budget, or one seed if all seeds replay the same requests. Raises UserError if no system is named.
        """
        from harness.study.compare import comparison, filled, repeats

        names = [name.strip() for name in self.systems.split(",") if name.strip()]
        if not names:
            raise UserError(f'--systems "{self.systems}" names no system (bench list)')
        given = {key: value for key, value in (setting or self.setting).items() if value is not None}
        unset = [key for key in ("trace", "gpus") if _default(key)]
        given = filled(given, unset)
        once = given.get("scaling") == "none"
        if once and _default("plan"):
            del given["plan"]
        study = comparison(
            options.every_of(names),
            given,
            rates=self.rates,
            seeds=self.seeds or (options.ONCE if once else options.FIRST_SEEDS),
            rule=self.rule,
            definition=self.definition,
            controls=self.controls,
            budget=options.MORE if self.seeds is None and given.get("engine") == "sim" and not once else 0,
        )
        return study.only(seeds=1) if once and self.seeds is None and repeats(study.spec) else study


def _default(option: str) -> bool:
    """Tell whether the running command has an option that its user did not set."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and ctx.get_parameter_source(option) is ParameterSource.DEFAULT


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that it gets the shared options as one `Asked`, and its other options as parameters."""
    names, shared = signature(command).parameters, [field.name for field in fields(Asked)]

    @wraps(command)
    def called(*, settings: dict[str, Any], **given: Any) -> None:
        alone = {name: given.pop(name) for name in names if name in given}
        alike = {name: given.pop(name) for name in shared if name in given}
        command(Asked(setting={**given, **settings}, **alike), **alone)

    return called


def contest(systems: str, rates: str, definition: str) -> Callable[[Any], Any]:
    """Return the options of a comparison; the arguments are help texts of options that differ between commands."""
    return options.grouped(
        options.systems(systems, required=True),
        options.SETTING,
        click.option("--rate-scale", "rates", callback=values.read_rates, metavar="LIST", help=rates),
        options.SCALING,
        options.SLO,
        click.option("--definition", type=options.DEFINITION, help=definition),
        options.SEEDS,
    )
