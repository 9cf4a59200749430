"""Paths and commands, written as a user in the working directory would type them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path


def short_path(path: Path) -> str:
    """Return a path relative to the working directory if it lies below that directory, else as given."""
    try:
        near = os.path.relpath(path)
    except ValueError:
        return str(path)
    return near if not near.startswith("..") else str(path)


def real(path: Path) -> Path:
    """Return the absolute path with links resolved. If links form a loop, resolve them only up to the loop."""
    return Path(os.path.realpath(path))


def check_command(system: str) -> str:
    """Return the command that checks a system's file, by name or path."""
    near = short_path(Path(system)) if system.endswith(".py") else system
    return shlex.join(["bench", "check", f"./{near}" if system.endswith(".py") and near[0] not in "/." else near])


def again(words: Iterable[str], *options: str) -> str:
    """Return the `bench` command made of `words`, with new values for some options.

    `options` alternates option names and their new values. A new `--set` replaces only an earlier `--set` of the same
    key.
    """
    pairs = list(zip(options[::2], options[1::2], strict=True))
    names, keys = {name for name, _ in pairs}, {value.partition("=")[0] for _, value in pairs}
    repeated = list[str]()
    for name, part in options_of(words, names):
        value = part[-1].removeprefix("--set=")
        if name not in names:
            repeated += part
        elif name == "--set" and value.partition("=")[0] not in keys:
            repeated += [name, value]
    return shlex.join(["bench", *repeated, *options])


def options_of(words: Iterable[str], valued: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the words of each option on a command line.

    An option in `valued` takes the next word as its value. Any other word is yielded as an option without a value.
    """
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        yield name, [word] if equals or name not in valued else [word, next(rest, "")]


def explain_command(run: Path, rule: str, *options: str) -> str:
    """Return the `bench explain` command for a run's folder, with an SLO rule and further options."""
    return shlex.join(["bench", "explain", short_path(run), "--slo", rule, *options])
