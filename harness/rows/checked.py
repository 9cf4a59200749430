"""Host profiles and GPU kinds that were compared with measured end-to-end runs; captions name any that were not."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from harness.policy import mix

UNCHECKED = "unchecked end to end"
KERNELS_ONLY = "kernels only"


_FILE = tomllib.loads(Path(__file__).with_name("checked.toml").read_text("utf-8"))
PAIRS: Mapping[str, list[str]] = _FILE["checked"]  # a host profile maps to the GPU kinds on which it was checked
KINDS_BY_KERNELS: list[str] = _FILE["kernels_only"]  # their cost tables use kernels alone: no engine ran end to end


def checked(gpu: str, host: str) -> bool:
    """Tell whether a host profile was compared with measured end-to-end runs on a GPU kind, or all kinds of a mix."""
    return all(kind in PAIRS.get(host, ()) for kind in mix.names(gpu))


def note(gpu: str, host: str) -> str:
    """Return a caption's note that a GPU kind and a host profile are unchecked; empty if they were checked."""
    if checked(gpu, host):
        return ""
    alone = [kind for kind in mix.names(gpu) if kind in KINDS_BY_KERNELS]
    return f"{UNCHECKED} ({', '.join(alone)}: {KERNELS_ONLY})" if alone else UNCHECKED
