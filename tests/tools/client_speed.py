"""The client's punctuality and its cost before `tests/harness/engines/servers/stub.py`: a part of `make bench`.

16 tokens a request, 50 ms to the first, 10 ms between. Lag: write - intended. TTFT overhead: from the client's write to
its first chunk, less what the stub says that it took from reading the request to handing the first token to its socket.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray

from harness.client.body import Server, Style
from harness.client.client import Client
from harness.client.load import OtherLoad
from harness.client.log import DONE, Log
from harness.client.verdict import FINE_LAG_P99_S, verdict
from tests.workloads.asked import asked

TOKENS, PROMPT_TOKENS, SECONDS = 16, 100, 10.0
BURST, BURSTS, BURST_S = 40, 40, 0.002  # bursts of 40 equal stamps, and within what a burst is to be out
RATES = (200.0, 500.0, 1000.0, 1500.0, 2000.0, 2500.0, 3000.0)
LIMIT_MS = 1e3 * FINE_LAG_P99_S  # ms of lag P99; beyond it the client is the limit
HEAD = (
    f"{'client':12} {'offered/s':>10} {'achieved/s':>10} {'lag ms P50':>11} {'P99':>7} {'max':>7} "
    f"{'TTFT+ ms P50':>13} {'P99':>7} {'cores':>6} {'peak MB':>8} {'other cores':>12}  note"
)


class Row(NamedTuple):
    """A line of the table."""

    name: str
    offered: float
    achieved: float
    lag_ms: NDArray[np.float64]
    overhead_ms: NDArray[np.float64]
    cores: float
    peak_mb: float
    other: float
    note: str

    @property
    def text(self) -> str:
        """The line."""
        a, b, c = np.quantile(self.lag_ms, [0.5, 0.99, 1.0])
        d, e = np.quantile(self.overhead_ms, [0.5, 0.99]) if self.overhead_ms.size else (np.nan, np.nan)
        return (
            f"{self.name:12} {self.offered:10.1f} {self.achieved:10.1f} {a:11.2f} {b:7.2f} {c:7.2f} {d:13.2f} "
            f"{e:7.2f} {self.cores:6.2f} {self.peak_mb:8.0f} {self.other:12.2f}  {self.note}"
        )


@contextmanager
def stub() -> Iterator[tuple[str, int]]:
    """Yield a stub's URL and process; argument 1 names one that already runs, with argument 2 its process."""
    if len(sys.argv) > 2:
        yield sys.argv[1], int(sys.argv[2])
        return
    words = ["--models", "m", "--ttft-ms", "50", "--itl-ms", "10", "--with-parent"]
    command = [sys.executable, "-m", "tests.harness.engines.servers.stub", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        try:
            yield tool.stdout.readline().split()[-1], tool.pid
        finally:
            tool.terminate()


def told(url: str) -> dict[str, Any]:
    """Return the stub's rows by column."""
    with urlopen(f"{url}/stub/rows") as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


def reset(url: str) -> None:
    """Forget what the stub saw."""
    urlopen(Request(f"{url}/stub/reset", method="POST")).close()


def run(url: str, pid: int, at_s: NDArray[np.float64]) -> tuple[Log, float, NDArray[np.float64]]:
    """Run our client; return its log, the load of others, and the TTFT overhead of each request in ms."""
    work = asked("m", at_s, 0, PROMPT_TOKENS, TOKENS)
    reset(url)
    with Client(work, seed=0, timeout_s=30.0, style=Style()) as client:
        client.route("m", Server(url, "m"))
        load = OtherLoad([pid, os.getpid()])
        client.begin(time.monotonic_ns() + 1_000_000_000)
        ended = 0
        while ended < len(work):
            ended += sum(event.kind in {"done", "failed"} for event in client.poll(60.0))
        other = load.cores()
        log = client.log()
    rows = told(url)
    server_ns = np.full(len(work), -1)
    server_ns[[int(rid) for rid in rows["id"]]] = np.array(rows["first_ns"]) - np.array(rows["read_ns"])
    return log, other, (log.first_ns - log.write_ns - server_ns)[log.state == DONE] / 1e6


def row(name: str, log: Log, other: float, overhead_ms: NDArray[np.float64], note: str) -> Row:
    """Return the line of a run."""
    judged, lag_ms = verdict(log, other), (log.write_ns - log.due_ns) / 1e6
    cores, peak_mb = log.cpu_s / log.wall_s, log.peak_bytes / 1e6
    return Row(name, judged.offered_per_s, judged.achieved_per_s, lag_ms, overhead_ms, cores, peak_mb, other, note)


def ours(url: str, pid: int, rate: float) -> Row:
    """Measure a constant rate."""
    log, other, overhead_ms = run(url, pid, np.arange(int(rate * SECONDS)) / rate)
    judged = verdict(log, other)
    lost = str(int(((log.state != DONE) | (log.tokens != TOKENS)).sum()))
    if why := Counter(filter(None, log.error)).most_common(1):
        lost = f"{lost} ({why[0][1]}: {why[0][0]})"
    note = f"{lost} lost; {judged.chunks_per_read:.3f} chunks a read; {judged.text}"
    return row("this client", log, other, overhead_ms, note)


def limit(lag_ms: Mapping[float, float]) -> str:
    """Say up to which rate lag P99 is within `LIMIT_MS`, from its ms by rate in ascending order."""
    late = next((rate for rate, ms in lag_ms.items() if not ms <= LIMIT_MS), None)
    if late is None:
        return f"lag P99 is within {LIMIT_MS:g} ms at each rate, up to {max(lag_ms):,.0f} requests/s"
    held = [rate for rate in lag_ms if rate < late]
    upto = f"up to {held[-1]:,.0f} requests/s" if held else "at no rate"
    says = f"at {late:,.0f} it is {lag_ms[late]:.2f} ms: client or stub is the limit"
    return f"lag P99 is within {LIMIT_MS:g} ms {upto}; {says}"


def bursts(url: str, pid: int) -> Row:
    """Measure bursts of equal stamps over 100 other requests a second."""
    at_s = np.arange(BURSTS) * 0.25
    rest_s = np.cumsum(np.random.default_rng(0).exponential(0.01, int(100 * BURSTS * 0.25)))
    all_s = np.concatenate([np.repeat(at_s, BURST), rest_s])
    order = np.argsort(all_s, kind="stable")
    log, other, overhead_ms = run(url, pid, all_s[order])
    lag_ms = (log.write_ns - log.due_ns) / 1e6
    last_ms = lag_ms[np.argsort(order)[: BURST * BURSTS]].reshape(BURSTS, BURST).max(1)
    share = float((last_ms <= 1e3 * BURST_S).mean())
    note = f"{share:.0%} of {BURSTS} bursts of {BURST} out within {1e3 * BURST_S:g} ms; last of a burst "
    note += f"P50 {np.median(last_ms):.2f} ms, P95 {np.quantile(last_ms, 0.95):.2f} ms"
    return row("... bursts", log, other, overhead_ms, note)


def main() -> None:
    """Print the table."""
    print(
        f"the load client before tests/harness/engines/servers/stub.py: {TOKENS} tokens a request, {SECONDS:g} s a row"
    )
    print(HEAD)
    with stub() as (url, pid):
        lag_ms = dict[float, float]()
        for rate in RATES:
            measured = ours(url, pid, rate)
            lag_ms[rate] = float(np.quantile(measured.lag_ms, 0.99))
            print(measured.text, flush=True)
        print(limit(lag_ms), flush=True)
        print(bursts(url, pid).text, flush=True)


if __name__ == "__main__":
    main()
