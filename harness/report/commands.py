"""Paths and commands as they would be typed here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path


def short_path(path: Path) -> str:
    """A path as short as it can be said here."""
    try:
        near = os.path.relpath(path)
    except ValueError:
        return str(path)
    return near if not near.startswith("..") else str(path)


def check_command(system: str) -> str:
    """The command that tries a system's file, by name or path."""
    near = short_path(Path(system)) if system.endswith(".py") else system
    return shlex.join(["bench", "check", f"./{near}" if system.endswith(".py") and near[0] not in "/." else near])


def again(words: Iterable[str], option: str, value: str) -> str:
    """The command of these words with another value of an option."""
    kept, rest = [], iter(words)
    for word in rest:
        if word == option:
            next(rest, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return shlex.join(["bench", *kept, option, value])


def explain_command(run: Path, rule: str, *options: str) -> str:
    """The command that explains a run by an SLO rule."""
    return shlex.join(["bench", "explain", short_path(run), "--slo", rule, *options])
