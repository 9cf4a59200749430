"""Prices of GPUs: those of prices.toml, and those that a user states instead."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from harness.policy.types import UserError

FILE = Path(__file__).parent / "prices.toml"
OWN = "--price"


class Price(NamedTuple):
    """The dollars that one GPU costs an hour, with date and source."""

    usd_hour: float
    date: str
    source: str

    @property
    def told(self) -> str:
        """The price in words, with its source and date."""
        where = self.source if not self.date else f"{self.source}, {self.date}"
        return f"${self.usd_hour:g} an hour ({where})"


@cache
def listed() -> Mapping[str, Price]:
    """Read the prices that come with the bench, by kind of GPU."""
    data = tomllib.loads(FILE.read_text("utf-8"))
    return {kind: Price(float(entry["usd_hour"]), entry["date"], entry["source"]) for kind, entry in data.items()}


def prices(texts: Mapping[str, str]) -> Mapping[str, Price]:
    """Return the prices of all GPU kinds; prices that a user states replace those of prices.toml.

    Raises UserError for a price that is not a number above 0.
    """
    given = {}
    for kind, text in texts.items():
        try:
            usd = float(text)
        except ValueError:
            usd = math.nan
        if not (math.isfinite(usd) and usd > 0):
            raise UserError(f'--price {kind}="{text}" is not a number above 0')
        given[kind] = Price(usd, "", OWN)
    return {**listed(), **given}
