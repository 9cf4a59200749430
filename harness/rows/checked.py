"""Which engines were compared with measured end-to-end runs, and on which GPUs: what every caption has to say."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

UNCHECKED = "unchecked end to end"


@cache
def _pairs() -> dict[str, list[str]]:
    """GPU kinds by host profile."""
    return tomllib.loads(Path(__file__).with_name("checked.toml").read_text("utf-8"))


def checked(gpu: str, host: str) -> bool:
    """Whether measured end-to-end runs judge a host profile on a GPU kind (`bench validate`)."""
    return gpu in _pairs().get(host, ())


def note(gpu: str, host: str) -> str:
    """What a caption says of a GPU kind and a host profile; empty where they were checked."""
    return "" if checked(gpu, host) else UNCHECKED
