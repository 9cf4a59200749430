"""The definitions of SLO attainment by name; `attainment.SCORES` holds the formula of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Definition(NamedTuple):
    """How a definition of attainment is used."""

    beside: tuple[str, ...] = ()  # the definitions that its table shows beside it
    by_token: bool = False  # needs the time of each token


DEFINITIONS: Mapping[str, Definition] = {
    "both": Definition(beside=("ttft", "tpot")),
    "ttft": Definition(),
    "tpot": Definition(),
    "e2e": Definition(),
    "token": Definition(beside=("qos", "both"), by_token=True),
    "qos": Definition(beside=("token", "both"), by_token=True),
    "itl": Definition(beside=("ttft", "tpot"), by_token=True),
}
BY_TOKEN = frozenset(name for name, one in DEFINITIONS.items() if one.by_token)
