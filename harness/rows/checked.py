"""Host profiles and GPU kinds that were compared with measured end-to-end runs: every caption names the others."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from harness.policy import mix

UNCHECKED = "unchecked end to end"
KERNELS_ONLY = "kernels only"


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("checked.toml").read_text("utf-8"))


def pairs() -> dict[str, list[str]]:
    """Return the checked GPU kinds by host profile."""
    kinds: dict[str, list[str]] = _file()["checked"]
    return kinds


def kernels_only() -> list[str]:
    """List the GPU kinds whose cost table uses measured kernels alone, with no end-to-end row of any engine."""
    kinds: list[str] = _file()["kernels_only"]
    return kinds


def checked(gpu: str, host: str) -> bool:
    """Tell whether a host profile was compared with measured end-to-end runs on a GPU kind, or all kinds of a mix."""
    return all(kind in pairs().get(host, ()) for kind in mix.names(gpu))


def note(gpu: str, host: str) -> str:
    """Return a caption's note on a GPU kind and a host profile; empty where they were checked."""
    if checked(gpu, host):
        return ""
    alone = [kind for kind in mix.names(gpu) if kind in kernels_only()]
    return f"{UNCHECKED} ({', '.join(alone)}: {KERNELS_ONLY})" if alone else UNCHECKED
