"""Paths and commands as they would be typed here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path


def short_path(path: Path) -> str:
    """Return the shortest form of a path: relative where it lies below the working directory, else as given."""
    try:
        near = os.path.relpath(path)
    except ValueError:
        return str(path)
    return near if not near.startswith("..") else str(path)


def real(path: Path) -> Path:
    """Return the path in full, with links resolved. If links form a loop, they are resolved only up to it."""
    return Path(os.path.realpath(path))


def check_command(system: str) -> str:
    """Return the command that checks a system's file, by name or path."""
    near = short_path(Path(system)) if system.endswith(".py") else system
    return shlex.join(["bench", "check", f"./{near}" if system.endswith(".py") and near[0] not in "/." else near])


def again(words: Iterable[str], *options: str) -> str:
    """Return the `bench` command of `words` with other values of `options`, which are names and values in turn.

    A new `--set` replaces only a former one of the same key.
    """
    pairs = list(zip(options[::2], options[1::2], strict=True))
    words_kept, rest = [], iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not any(name == option for option, _ in pairs):
            words_kept.append(word)
            continue
        value = value if equals else next(rest, "")
        if name == "--set" and not any(value.partition("=")[0] == new.partition("=")[0] for _, new in pairs):
            words_kept += [name, value]
    return shlex.join(["bench", *words_kept, *options])


def explain_command(run: Path, rule: str, *options: str) -> str:
    """Return the command that explains a run by an SLO rule."""
    return shlex.join(["bench", "explain", short_path(run), "--slo", rule, *options])
