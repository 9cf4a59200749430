"""Usual names of the columns of logs, and usual units of their timestamps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from harness.policy.types import UserError

TimeUnit = Literal["s", "ms", "us", "ns", "clock", "datetime"]
PER_SECOND: Mapping[str, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds", "clock": "HH:MM:SS"}

# Seconds above 10^8 (three years) are a date's, not a trace's; above 4.1 x 10^9 they are no date before 2100 either.
EPOCH_S, LAST_EPOCH_S = 1e8, 4.1e9
# Mean gaps of public LLM logs lie between 0.5 ms (the largest providers) and 75 s (an image service).
MEAN_GAP_S = (1e-5, 150.0)

USUAL: Mapping[str, tuple[str, ...]] = {  # what logs call each canonical column, without case and punctuation
    "arrival_s": ("arrivals", "arrivaltime", "arrivedat", "timestamp", "time", "starttime", "startedat", "requesttime",
                  "createdat", "datetime", "ts", "receivedat", "timestampms", "timestampus", "timestampns"),
    "prompt_tokens": ("prompttokens", "inputtokens", "inputlength", "promptlen", "promptlength", "contexttokens",
                      "requesttokens", "tokensin", "inputlen", "numprefilltokens", "nprompttokens"),
    "output_tokens": ("outputtokens", "completiontokens", "outputlength", "outputlen", "generatedtokens",
                      "responsetokens", "tokensout", "generationtokens", "numdecodetokens", "ngeneratedtokens"),
    "model": ("model", "modelname", "modelid", "modelgroup", "servedmodelname", "deployment", "engine"),
}  # fmt: skip
OPTIONAL: Mapping[str, tuple[str, ...]] = {  # which a table need not have
    "request_id": ("requestid", "reqid", "xrequestid"),
    "status": ("status", "statuscode", "httpstatus", "httpstatuscode", "responsestatus", "respstatuscode"),
}
UNSERVED = tuple(
    "fail error cancel abort timeout timedout reject throttl exception disconnect notfound unavailable refused".split()
)
DENIED = tuple(f"{no}{word}" for no in ("no", "not") for word in UNSERVED)  # "no error", "not cancelled"
UNITS: dict[str, TimeUnit] = {"ms": "ms", "millis": "ms", "us": "us", "micros": "us"}
UNITS |= {"ns": "ns", "nanos": "ns", "nano": "ns"}
DATE = re.compile(r"\s*\d{4}-\d\d-\d\d")
CLOCK = re.compile(r"\s*\d+:\d\d:\d\d")
SHOWN = 12


def named(path: Path, missing: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """Return the file's column for each canonical column in `missing`, found by its usual names.

    UserError names all canonical columns that are not found, and for each the file's column with a similar name, if
    any.
    """
    columns: dict[str, str] = {}
    lacks: list[str] = []
    last = {name: _plain(name.rpartition(".")[2]) for name in names}
    for key in missing:
        fits = [name for usual in USUAL[key] for name in names if _plain(name) == usual]
        fits = fits or [name for usual in USUAL[key] for name in names if last[name] == usual]
        if fits:
            columns[key] = fits[0]
            continue
        close = get_close_matches(_plain(key), list(last.values()), 1, 0.5)
        close = close or [p for usual in USUAL[key] for p in get_close_matches(usual, list(last.values()), 1, 0.75)][:1]
        like = next((name for name, plain in last.items() if close and plain == close[0]), None)
        lacks.append(f"{key} (like {like}?)" if like else key)
    if lacks:
        more = "" if len(names) <= SHOWN else ", ..."
        way = " or --model NAME" if any(lack.startswith("model") for lack in lacks) else ""
        raise UserError(
            f"{path}: no usual name for {', '.join(lacks)} "
            f"(bench trace convert {path} --column CANONICAL=OWN{way}; it has "
            f"{', '.join(names[:SHOWN])}{more})"
        )
    return columns


def optional(names: Sequence[str]) -> dict[str, str]:
    """Return the columns of request ids and of request states, found by their usual names."""
    fits = {key: [name for plain in OPTIONAL[key] for name in names if _plain(name) == plain] for key in OPTIONAL}
    return {key: every[0] for key, every in fits.items() if every}


def served(status: Any) -> bool:
    """Tell whether a status is that of a request that was served.

    Such a status is empty, 0, an HTTP status of 2xx, or a text without any word of failure. A text that begins with a
    denied failure, such as "no error", is also such a status.
    """
    text = "" if status is None else str(status).strip()
    if (code := number(text.partition(" ")[0])) is not None:
        return code == 0 or 200 <= code < 300
    plain = _plain(text)
    return plain.startswith(DENIED) or not any(word in plain for word in UNSERVED)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def unit(name: str, stamps: pa.Array, *, trusted: bool = False) -> TimeUnit:
    """Guess the unit of timestamps from their type, their column's name, their size, or the gaps between them.

    The guess is seconds if none of these decides. If `trusted` is true, a column of numbers is in seconds unless its
    name states a unit.
    """
    if pa.types.is_temporal(stamps.type):
        return "datetime"
    if pa.types.is_string(stamps.type):
        first = next((text for text in stamps.to_pylist() if text and text.strip()), "")
        if DATE.match(first):
            return "datetime"
        if CLOCK.match(first):
            return "clock"
    words = re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
    if spoken := next((UNITS[word] for word in words if word in UNITS), None):
        return spoken
    numbers = floats(stamps.drop_null())
    numbers = numbers[np.isfinite(numbers)]
    if trusted or not len(numbers):
        return "s"
    first_, last = float(numbers.min()), float(numbers.max())
    units: tuple[TimeUnit, ...] = ("s", "ms", "us", "ns")
    if last > LAST_EPOCH_S:
        dated: tuple[TimeUnit, ...] = tuple(
            u for u in units if first_ / PER_SECOND[u] >= EPOCH_S * 5 and last / PER_SECOND[u] <= LAST_EPOCH_S
        )
        if dated:
            return dated[0]
    gap = (last - first_) / max(1, len(numbers) - 1)
    fits = (u for u in units if MEAN_GAP_S[0] <= gap / PER_SECOND[u] <= MEAN_GAP_S[1])
    return next(fits, "s") if gap > 0 else "s"


def floats(values: pa.Array) -> NDArray[np.float64]:
    """Return values as numbers, with NaN for values that are not numbers."""
    with suppress(pa.ArrowException):
        plain = pc.utf8_trim_whitespace(values) if pa.types.is_string(values.type) else values
        return np.asarray(plain.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)
    return np.array([number(value) for value in values.to_pylist()], np.float64)  # None becomes NaN


def number(text: Any) -> float | None:
    """Return a value as a number; None for a truth value and for anything that is not a number."""
    try:
        return None if isinstance(text, bool) else float(text)
    except (TypeError, ValueError, OverflowError):
        return None
