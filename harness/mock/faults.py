"""Faults on request: by shares of all requests, or ordered by one request's header."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Literal

Fault = Literal["500", "429", "hang", "cut", "malformed"]


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of all requests, at most 1 together: by the fault's name, `fail` for 500 and `reject` for 429."""

    fail: float = 0.0
    reject: float = 0.0
    hang: float = 0.0
    cut: float = 0.0
    malformed: float = 0.0


FAULTS: dict[str, Fault] = {"fail": "500", "reject": "429", "hang": "hang", "cut": "cut", "malformed": "malformed"}


@dataclass(frozen=True, slots=True)
class Order:
    """The faults of a request."""

    fault: Fault | None = None  # 500 and 429 at once; hang: no byte ever; cut, malformed: halfway through
    slow_s: float = 0.0  # by which it joins its batch later


NONE = Order()
ONLY: dict[Fault, Order] = {fault: Order(fault) for fault in FAULTS.values()}


class Faults:
    """Faults drawn for requests in the order of their arrival, so equal seeds give equal faults."""

    def __init__(self, shares: Shares, seed: int) -> None:
        self._shares = [(getattr(shares, field.name), FAULTS[field.name]) for field in fields(shares)]
        self._any = any(share for share, _ in self._shares)
        self._seed = seed
        self.restart()

    def restart(self) -> None:
        """Draw from the first again."""
        self._random = random.Random(self._seed)

    def draw(self) -> Order:
        """Draw what goes wrong with the next request."""
        if not self._any:
            return NONE
        drawn = self._random.random()
        for share, fault in self._shares:
            if drawn < share:
                return ONLY[fault]
            drawn -= share
        return NONE


def ordered(text: str) -> Order:
    """Parse the header `x-mock`: a fault, `slow=SECONDS`, or both with a comma between. ValueError otherwise."""
    order = NONE
    for part in (part.strip() for part in text.split(",")):
        name, equals, value = part.partition("=")
        if name == "slow" and equals:
            seconds = float(value)
            if not 0 <= seconds <= 86400:
                raise ValueError(f"slow={value} is not between 0 and 86400 seconds")
            order = replace(order, slow_s=seconds)
        elif part in ONLY and order.fault is None:
            order = replace(order, fault=part)
        else:
            raise ValueError(f'"{part}" is not one of {", ".join(ONLY)}, slow=SECONDS')
    return order
