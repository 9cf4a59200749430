"""vLLM's metrics, scraped or of Prometheus: a synthetic trace with the same requests and lengths in each interval.

The input is the answer of a range query (GET /api/v1/query_range, one JSON or a folder of them), or a folder of scrapes
of /metrics as text. It must have the counters themselves, as from the query
`{__name__=~"vllm:request_(success_total|(prompt|generation)_tokens_(bucket|sum))"}`; a rate() is not enough. The time
of a scrape is the number of ten digits or more in its file's name (seconds since 1970, or ms). Without such a number,
it is the file's time of modification.

A counter does not show single requests. So arrival times are drawn uniformly between two scrapes, and prompts and
outputs are paired at random. Lengths are drawn uniformly within their bucket of the histogram. If there is a counter of
tokens, the lengths are drawn so that their sum is the counter's rise. The label model_name names the model. Requests
that clients aborted, and those that failed, are left out and counted.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.policy.types import UserError
from traces import records, schema
from traces.arrivals import bounded
from traces.checks import MOST_TOKENS
from traces.served import count
from traces.usual import LAST_EPOCH_S, number

FOLDER = True  # it reads folders too
KEYS = ({"status", "data"},)
DONE = "vllm:request_success_total"
LENGTHS = {"vllm:request_prompt_tokens_bucket": "vllm:request_prompt_tokens_sum",
           "vllm:request_generation_tokens_bucket": "vllm:request_generation_tokens_sum"}  # fmt: skip
READ = frozenset({DONE, *LENGTHS, *LENGTHS.values()})
UNSERVED = {"abort": "aborted", "error": "failed"}  # reasons for which a request ended without its answer
STEEPEST = 2.0**6  # most power by which lengths lean to one end of their bucket
LINE = re.compile(r"(?P<name>[\w:]+)\{(?P<labels>[^}]*)\}\s+(?P<value>\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
STAMP = re.compile(r"\d{10,}")
I8 = NDArray[np.int64]
Points = dict[float, float]  # time -> value of a counter


class Curve(NamedTuple):
    """A counter that never falls: each value holds from its time in `at_s` until the next."""

    at_s: NDArray[np.float64]
    value: NDArray[np.float64]

    def at(self, when: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the values at the times `when`; 0 before the first time in `at_s`."""
        return np.concatenate([[0.0], self.value])[np.searchsorted(self.at_s, when, "right")]


# The counters of a model, summed over servers, and DONE over the reasons for which requests finish, without UNSERVED:
# by name, and by the upper bound of a bucket (0: there are no buckets).
Counters = Mapping[str, Mapping[float, Curve]]


def read(path: Path, *, name: str | None = None, model: str | None = None, jitter_seed: int = 0) -> pa.Table:
    """Draw requests at the rates and with the lengths that a server's counters show.

    UserError if no counter of requests rose, or if a model lacks the buckets of its lengths.
    """
    models = _models(path, model)
    draw = np.random.Generator(np.random.Philox(key=jitter_seed))
    times: list[NDArray[np.float64]] = []
    lengths: dict[str, list[I8]] = {bucket: [] for bucket in LENGTHS}
    owners: list[str] = []
    left = dict[str, int]()
    begin = min(float(counters[DONE][0.0].at_s[0]) for counters in models.values())
    end = max(float(counters[DONE][0.0].at_s[-1]) for counters in models.values())
    for label, counters in sorted(models.items()):
        if lacks := next((bucket for bucket in LENGTHS if bucket not in counters), None):
            raise UserError(f"{path}: no {lacks} of {label}")
        for reason in counters.keys() & UNSERVED.values():
            count(left, reason, round(float(counters[reason][0.0].value[-1])))
        done = counters[DONE][0.0]
        spans = list(pairwise(done.at_s.tolist()))
        rises = [_rise(done, a, b) for a, b in spans]
        bounded(f"{path}: requests of {label}", sum(rises), "a shorter range")
        for (a, b), rise in zip(spans, rises, strict=True):
            if rise:
                times.append(draw.uniform(a - begin, b - begin, rise))
                owners += [label] * rise
                for bucket, total in LENGTHS.items():
                    sums = counters.get(total, {}).get(0.0)
                    lengths[bucket].append(_lengths(draw, counters[bucket], sums, a, b, rise))
    if not owners:
        raise UserError(f"{path}: no counter of {DONE} rose")
    when = np.concatenate(times)
    order = np.argsort(when, kind="stable")
    names = pa.array(owners).dictionary_encode().take(pa.array(order))
    meta = {
        "name": name or path.name.split(".")[0],
        "tier": "synthetic",
        "licence": "not stated",
        "source": path.name,
        "length_origin": "sampled",
        "span_s": float(end - begin),
        "jitter_seed": jitter_seed,
        "streams": sorted(models),
        "dropped": left,
        "note": "drawn from counters: rates and lengths of each interval are the log's, single requests are not",
    }
    prompt, output = (np.concatenate(each)[order] for each in lengths.values())
    return schema.requests(when[order], names, prompt, output, meta)


def _models(path: Path, model: str | None) -> dict[str, Counters]:
    values: dict[tuple[str, str, str], dict[tuple[str, ...], Points]] = defaultdict(lambda: defaultdict(dict))
    for at, labels, value in _samples(path):
        what = labels.get("__name__", "")
        if what in READ and math.isfinite(value):
            if what == DONE:
                what = UNSERVED.get(labels.get("finished_reason", ""), DONE)
            key = (model or labels.get("model_name", "") or "unnamed", what, labels.get("le", ""))
            values[key][tuple(sorted(f"{k}={v}" for k, v in labels.items()))][at] = value
    if not values:
        names = ", ".join([DONE, *LENGTHS])
        raise UserError(f"{path}: none of {names} is in it (ask for the counters, not for rate() of them)")
    models: dict[str, dict[str, dict[float, Curve]]] = defaultdict(lambda: defaultdict(dict))
    for (label, what, le), each in values.items():
        bound = (number(le) or 0.0) if what in LENGTHS else 0.0
        if what in LENGTHS and not (0 < bound <= MOST_TOKENS or bound == math.inf):
            raise UserError(f'{path}: a bucket of {what} has le="{le}", no number of tokens')
        models[label][what][bound] = _summed(each.values())
    if not any(DONE in counters for counters in models.values()):
        raise UserError(f"{path}: no {DONE} is in it")
    return {label: counters for label, counters in models.items() if DONE in counters}


def _summed(each: Iterable[Points]) -> Curve:
    """Return the sum of the counters of several servers, each counted from its first value.

    A restart sets a server's counter back to 0; the sum continues to rise.
    """
    rising = []
    for points in each:
        at_s, value = np.array(sorted(points.items()), np.float64).T
        steps = np.diff(value)
        rising.append(Curve(at_s, np.concatenate([[0.0], np.cumsum(np.where(steps >= 0, steps, value[1:]))])))
    every = np.unique(np.concatenate([curve.at_s for curve in rising]))
    return Curve(every, np.sum([curve.at(every) for curve in rising], axis=0))


def _rise(curve: Curve, a: float, b: float) -> int:
    before, after = curve.at(np.array([a, b]))
    return max(0, round(float(after - before)))


def _lengths(
    draw: np.random.Generator, buckets: Mapping[float, Curve], sums: Curve | None, a: float, b: float, count: int
) -> I8:
    """Draw the lengths of the `count` requests that came between times a and b.

    If the buckets rose by exactly `count` in this interval, the lengths follow these rises. If the log also has the
    counter of tokens, the lengths then add up to its rise, as nearly as the buckets allow. Otherwise the lengths follow
    the buckets' totals over the whole log.
    """
    bounds = sorted(buckets)
    each = np.diff([0, *(_rise(buckets[bound], a, b) for bound in bounds)]).clip(0)
    if complete := each.sum() == count:
        bucket = draw.permutation(np.repeat(np.arange(len(bounds)), each))
    else:
        all_ = np.diff([0.0, *(buckets[bound].value[-1] for bound in bounds)]).clip(0)
        shares = all_ / all_.sum() if all_.sum() else np.full(len(bounds), 1 / len(bounds))
        bucket = draw.choice(len(bounds), count, p=shares)
    finite = [bound for bound in bounds if math.isfinite(bound)] or [1.0]
    tops = np.array([min(MOST_TOKENS, 2 * finite[-1]) if math.isinf(bound) else bound for bound in bounds])
    low = np.concatenate(([0.0], tops[:-1]))
    span = np.maximum(1, np.floor(tops) - np.floor(low))
    at = draw.uniform(0, 1, count)

    def leaning(power: float) -> I8:
        return np.asarray(np.maximum(1, np.floor(low)[bucket] + np.ceil(at**power * span[bucket])), np.int64)

    if not complete or sums is None:
        return leaning(1.0)
    total, short, long = _rise(sums, a, b), STEEPEST, 1 / STEEPEST
    for _ in range(40):  # bisections: the higher the power, the fewer tokens
        middle = math.sqrt(short * long)
        short, long = (short, middle) if leaning(middle).sum() > total else (middle, long)
    return leaning(short)


def _samples(path: Path) -> Iterator[tuple[float, Mapping[str, str], float]]:
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    for file in files:
        with records.opened(file) as opened:
            text = opened.read().decode("utf-8", "replace")
        if text.lstrip()[:1] in {"{", "["}:
            yield from _range(file, text)
        elif path.is_dir():
            yield from _scrape(file, text)
        else:
            raise UserError(f"{path}: one scrape has no rate; name a folder of them")


def _range(path: Path, text: str) -> Iterator[tuple[float, Mapping[str, str], float]]:
    try:
        answers = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {str(error)[:80]}") from None
    for answer in answers if isinstance(answers, list) else [answers]:
        data = answer.get("data") if isinstance(answer, Mapping) else None
        if not (
            isinstance(data, Mapping) and data.get("resultType") == "matrix" and isinstance(data.get("result"), list)
        ):
            raise UserError(f"{path}: not the answer of a range query (resultType matrix)")
        for series in data["result"]:
            try:
                labels = {str(k): str(v) for k, v in series["metric"].items()}
                points = [(float(at), float(value)) for at, value in series["values"]]
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                raise UserError(f"{path}: a series without metric and values") from None
            if odd := next((at for at, _ in points if not 0 <= at <= LAST_EPOCH_S), None):
                raise UserError(f"{path}: a series has the time {odd:g}, not seconds since 1970")
            yield from ((at, labels, value) for at, value in points)


def _scrape(path: Path, text: str) -> Iterator[tuple[float, Mapping[str, str], float]]:
    digits = max(STAMP.findall(path.stem), key=len, default="")
    at = path.stat().st_mtime if not digits else float(digits) / 10 ** (len(digits) - 10)
    for match in LINE.finditer(text):
        if match["name"] in READ:
            if (value := number(match["value"])) is None:
                raise UserError(f"{path}: {match['name']} is {match['value']}, no number")
            yield at, {"__name__": match["name"], **dict(LABEL.findall(match["labels"]))}, value
