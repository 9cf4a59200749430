"""Values of options: the types that click checks, and readers of lists and pairs."""

from __future__ import annotations

import errno
import math
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import click

from harness.policy.types import UserError

WORDS = "bench.words"  # key of the context's meta: the words of the command line
MOST_SHOWN = 60  # characters of a wrong value
OF_SYSTEMS = ("system", "preset", "fields")
OF_RUNS = {  # fields of a spec that no user sets, and why
    "seed": "--seeds sets how many there are",
    "workload": "the measurement of SLO bases sets it",
    "slo_s": "--slo sets it",
    "homes": "--placement sets it",
    "trace_sha256": "it is computed from the trace's rows",
    "measured_on": "it names the machine of a run",
    "token_times": "--definition itl and token ask for them",
}


def read_rates(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    """Read `--rate-scale LIST` as numbers above 0."""
    if text is None:
        return None

    try:
        rates = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise UserError(f'--rate-scale "{text}" is not a list of numbers, as in 1,2,4') from None
    if bad := [rate for rate in rates if not 0 < rate < float("inf")]:
        raise UserError(f"--rate-scale {bad[0]:g} is not a number above 0")
    return rates


def listed(option: str, text: str | None, between: str = ",") -> list[str] | None:
    """Split a list at `between`; None stays None. Raises UserError for an empty list."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(between) if part.strip()]
    if not parts:
        raise UserError(f'{option} "{text}" names nothing')
    return parts


def read_pairs(_ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    """Read KEY=VALUE of a repeated option. Raises UserError for any other form, and for a repeated key."""
    values = dict[str, str]()
    for pair in pairs:
        key, value = (part.strip() for part in pair.partition("=")[::2])
        if not key or not value:
            raise UserError(f'{param.opts[-1]}: "{_cut(pair)}" is not KEY=VALUE')
        if key in values:
            raise UserError(f"{param.opts[-1]}: {key} is there twice")
        values[key] = value
    return values


def read_joined(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    """Read KEY=VALUE pairs of a repeated option, where one value may have several pairs with commas between them."""
    return read_pairs(ctx, param, tuple(part for pair in pairs for part in pair.split(",")))


def read_settings(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Read `--set KEY=VALUE` as TOML, where a bare word is a string.

    Raises UserError for a key that another option or the bench itself sets.
    """
    from harness.policy.fields import toml_value

    texts = read_pairs(ctx, param, pairs)
    for key in texts:
        if key in OF_SYSTEMS:
            raise UserError(f"--set {key}: --systems sets it, as NAME[:PRESET][+FIELD=VALUE...]")
        flag = f"--{key.replace('_', '-')}"
        option = next((other.opts[0] for other in ctx.command.params if flag in other.opts), None)
        if option is not None:
            raise UserError(f"--set {key}: the option {option} sets it")
        if key in OF_RUNS:
            raise UserError(f"--set {key}: {OF_RUNS[key]}")
    return {key: toml_value(value) for key, value in texts.items()}


class Place(click.Path):
    """A path that is valid for the file system, whether or not there is a file."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse an empty path, one that is too long, and links that form a loop."""
        if value == "":
            self.fail("it is empty", param, ctx)
        try:
            Path(value).resolve().stat()
        except RuntimeError:  # before Python 3.13
            self.fail(f'"{value}": {os.strerror(errno.ELOOP)}', param, ctx)
        except OSError as error:
            if error.errno in {errno.ENAMETOOLONG, errno.ELOOP}:
                self.fail(f'"{_cut(value)}": {error.strerror}', param, ctx)
        return super().convert(value, param, ctx)


class Whole(click.IntRange):
    """An integer in a range; the help leaves out an upper limit that no user meets."""

    def _describe_range(self) -> str:
        return _range(self)


class Gpus(click.ParamType[int]):
    """A number of GPUs. For several counts the error names the `bench size` command that finds the fewest."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a whole number. Raises UserError for several counts."""
        text = str(value)
        if re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
            return int(text)
        if not re.fullmatch(r"[0-9]{1,4}([,-][0-9]{1,4})+", text):
            self.fail(f"{_cut(text)!r} is not a whole number", param, ctx)
        from harness.answers.commands import options_of

        counts = sorted(map(int, re.split("[,-]", text)))
        given = dict(options_of(ctx.meta.get(WORDS, ()) if ctx is not None else (), SIZES))
        options = [word for name in SIZES if name in given for word in (name, given[name][-1].removeprefix(f"{name}="))]
        command = shlex.join(["bench", "size", *options, "--gpus", f"{counts[0]}-{counts[-1]}"])
        raise UserError(
            f'--gpus "{text}" is several counts, and this takes one; for the fewest that suffice: {command}'
        )


SIZES = ("--trace", "--models", "--systems", "--gpu", "--slo")  # options of `bench size` too


class Number(click.FloatRange):
    """A finite number; help leaves out a limit that no user meets."""

    def _describe_range(self) -> str:
        return _range(self)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a number; refuse nan, which passes every limit, and infinity."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def _range(limits: click.IntRange | click.FloatRange) -> str:
    """Describe the limits of a number."""
    low, high = limits.min, limits.max if limits.max is not None and limits.max < LONGEST_S else None
    if low is None and high is None:
        return ""
    if high is None:
        return f"x{'>' if limits.min_open else '>='}{low:g}"
    below = f"x{'<' if limits.max_open else '<='}{high:g}"
    return below if low is None else f"{low:g}{'<' if limits.min_open else '<='}{below}"


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class Target(Place):
    """Path of a file to write, tested for writing before the content is computed. Parent folders may be missing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse a folder, and a place where nothing can be written."""
        path: Path = super().convert(value, param, ctx)
        if path.is_dir():
            self.fail(f'"{path}" is a folder', param, ctx)
        above = next(folder for folder in path.resolve().parents if folder.exists())
        try:
            with tempfile.TemporaryFile(dir=above):
                return path
        except OSError as error:
            self.fail(f'"{path}" cannot be written: {error.strerror or error}', param, ctx)


PATH = Place()
TARGET = Target()
POSITIVE = Number(0, min_open=True)
SOME_SEEDS = click.IntRange(1, 500)  # higher seeds are those of A/A copies, then those of tuning
PROCESSES = click.IntRange(1, 4096)
MOST_INT = (1 << 63) - 1
SHORTEST_S, LONGEST_S = 1e-3, 86400.0 * 365  # s, the limits that a timer can keep
