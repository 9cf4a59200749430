"""The verdict on a run on real servers: whether it measured the servers, or rather the client and its machine.

    lag              write time - due time of each request that left. The due time is the request's intended time; for
                     a held request, it is the time at which the policy ordered it to be sent
    offered          number of due requests / seconds from the first due time to the last
    achieved         number of due requests that left or failed / seconds from the first due time to the last write
    by event         number of finished requests whose token count in the server's usage differs from their chunks' sum
    chunks per read  above 1 if the client reads late, or if a server sends several chunks at once
    cached           number of requests whose prompt was partly in the server's cache, according to the server's usage;
                     no two prompts are alike, so there should be none
    other load       cores kept busy by processes that are neither the client nor the servers

If the last due time is after the last write, the seconds of `achieved` end at the last due time. A run that exceeds a
limit is invalid, and every table and figure says so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.client.log import DONE, FAILED, Log

LAG_P99_S = 0.005
LAG_OF_TTFT = 0.05  # share of the median TTFT
RATE_GAP = 0.005  # between achieved and offered
CHUNKS_PER_READ = 1.1
CACHED = 0.01  # share of the requests that had an answer
OTHER_CORES = 0.2
FINE_LAG_P99_S = 0.001  # what a claim below a millisecond needs


class Verdict(NamedTuple):
    """The verdict on a run: whether it is valid, with the numbers behind it."""

    valid: bool
    reasons: tuple[str, ...]  # why it is not
    below_ms: bool  # claims below a millisecond hold: the timer is the kernel's, and lag P99 < 1 ms
    lag_p50_s: float  # median over what left; nan: nothing did
    lag_p99_s: float
    lag_max_s: float
    ttft_p50_s: float  # from the intended time; nan: no token came
    offered_per_s: float
    achieved_per_s: float
    chunks_per_read: float
    other_cores: float  # nan: not measured
    precise: bool
    by_event: int = 0  # requests whose tokens are known by event alone (`Log.by_event`)
    cached: int = 0  # requests that found tokens of their prompt in a cache

    @property
    def text(self) -> str:
        """The verdict in words, on one line."""
        events = f"; tokens by event in {self.by_event} requests: several came in one" if self.by_event else ""
        events += f"; a cache had prompt tokens of {self.cached} requests" if self.cached and self.valid else ""
        if not self.valid:
            return "invalid: " + "; ".join(self.reasons) + events
        fine = "" if self.precise else "; no claim below a millisecond: the kernel's timer is not there"
        return f"valid: lag P99 {1e3 * self.lag_p99_s:.2f} ms{fine}{events}"


def verdict(log: Log, other_cores: float, behind: str = "") -> Verdict:
    """Judge a run by its log and by the load of other processes (`load.OtherLoad`; nan: not measured).

    `behind` is the reason why the parent ended the run early; "" if it did not.
    """
    due, left = log.due_ns >= 0, log.write_ns >= 0
    lags_s = 1e-9 * (log.write_ns - log.due_ns)[due & left]
    p50_s, p99_s, max_s = np.quantile(lags_s, [0.5, 0.99, 1.0]) if lags_s.size else [np.nan] * 3
    came = log.first_ns >= 0
    ttft_s = 1e-9 * float(np.median((log.first_ns - log.intended_ns)[came])) if came.any() else np.nan
    offered, achieved = _rates(log)
    reads = len(log.chunk_ns) - int(log.chunk_shared.sum())
    per_read = len(log.chunk_ns) / reads if reads else 1.0

    reasons = [behind] if behind else []
    if not lags_s.size:
        reasons.append("no request left")
    if p99_s > LAG_P99_S:
        reasons.append(f"lag P99 is {1e3 * p99_s:.1f} ms, the limit {1e3 * LAG_P99_S:g} ms")
    if p99_s > LAG_OF_TTFT * ttft_s:
        reasons.append(
            f"lag P99 is {p99_s / ttft_s:.0%} of the median TTFT of {1e3 * ttft_s:.1f} ms, the limit {LAG_OF_TTFT:.0%}"
        )
    if abs(achieved - offered) > RATE_GAP * offered:
        reasons.append(
            f"{achieved:.1f} requests/s left of {offered:.1f} offered, {abs(1 - achieved / offered):.1%} off, "
            f"the limit {RATE_GAP:.1%}"
        )
    if per_read > CHUNKS_PER_READ:
        reasons.append(f"{per_read:.2f} chunks came in a read, the limit {CHUNKS_PER_READ:g}")
    cached = int((log.cached_tokens > 0).sum())
    if cached > CACHED * came.sum():
        reasons.append(f"a cache had prompt tokens of {cached} of {int(came.sum())} requests, the limit {CACHED:.0%}")
    if np.isnan(other_cores):
        reasons.append("the load of other processes was not measured")
    elif other_cores > OTHER_CORES:
        reasons.append(f"other processes took {other_cores:.2f} cores, the limit {OTHER_CORES:g}")
    return Verdict(
        not reasons,
        tuple(reasons),
        log.precise and bool(p99_s < FINE_LAG_P99_S),
        float(p50_s),
        float(p99_s),
        float(max_s),
        ttft_s,
        offered,
        achieved,
        per_read,
        other_cores,
        log.precise,
        int(log.by_event.sum()),
        cached,
    )


def _rates(log: Log) -> tuple[float, float]:
    """Return the offered and the achieved requests per second; both are 0 if all requests were due at the same time."""
    due = log.due_ns >= 0
    left = due & ((log.write_ns >= 0) | (log.state == FAILED) | (log.state == DONE))
    if not left.any():
        return 0.0, 0.0
    first_ns, last_ns = int(log.due_ns[due].min()), int(log.due_ns[due].max())
    if first_ns == last_ns:
        return 0.0, 0.0
    end_ns = max(last_ns, int(log.write_ns[left].max()))
    return 1e9 * int(due.sum()) / (last_ns - first_ns), 1e9 * int(left.sum()) / (end_ns - first_ns)
