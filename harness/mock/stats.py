"""Counts of the mock, and times of its requests."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

MOST_ROWS = 250_000  # of the latest requests
COLUMNS = ("number", "id", "model", "read_ns", "first_ns", "end_ns", "tokens", "end")


class Row:
    """A completion request: CLOCK_MONOTONIC stamps, -1 for what has not come."""

    __slots__ = (*COLUMNS, "period")

    def __init__(self, period: int, number: int, name: str, read_ns: int) -> None:
        self.period = period  # of the counts that it belongs to
        self.number = number  # in order of arrival
        self.id = name  # the header x-request-id, or ""
        self.model = ""  # "": none of that name
        self.read_ns = read_ns  # its last byte was read
        self.first_ns = -1  # its first token was handed to the socket
        self.end_ns = -1
        self.tokens = 0
        self.end = ""  # how it ended: an HTTP status, "hang", "cut", "malformed", "cancelled"; "": it goes on


class Stats:
    """Counts since the start, or the last reset."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._period = 0
        self.reset()

    def reset(self) -> None:
        """Begin anew; what is in flight stays so, and its end is not counted."""
        self._period += 1
        self.requests = 0
        self.in_flight_max = self.in_flight
        self.tokens = 0
        self.models: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.rows: deque[Row] = deque(maxlen=MOST_ROWS)

    def begin(self, name: str, read_ns: int) -> Row:
        """Count a request that was read, and return its row."""
        row = Row(self._period, self.requests, name, read_ns)
        self.requests += 1
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        self.rows.append(row)
        return row

    def name(self, row: Row, model: str) -> None:
        """Note the model of a request."""
        row.model = model
        self.models[model] += 1

    def end(self, row: Row, end: str, at_ns: int) -> None:
        """Note the end of a request."""
        row.end, row.end_ns = end, at_ns
        self.in_flight -= 1
        if row.period == self._period:
            self.tokens += row.tokens
            self.ends[end] += 1

    def told(self) -> dict[str, Any]:
        """Return everything as JSON: columns of rows under their names."""
        return {
            "requests": self.requests,
            "in_flight": self.in_flight,
            "in_flight_max": self.in_flight_max,
            "tokens": self.tokens,
            "models": dict(self.models),
            "ends": dict(self.ends),
            "rows": {name: [getattr(row, name) for row in self.rows] for name in COLUMNS},
        }
