"""Verdicts on runs of the client: worked numbers on both sides of each limit."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from harness.client import load
from harness.client.load import OtherLoad
from harness.client.log import DONE, FAILED, Book, Log, assemble
from harness.client.verdict import Verdict, verdict
from tests.cases import cases
from tests.tools.client_speed import limit

MS = 1_000_000


def log(
    lag_ms: float = 0.2,
    ttft_ms: float = 50.0,
    *,
    n: int = 101,
    every_ms: float = 10.0,
    last_ms: float = 0.0,
    late: int = 0,
    shared: int = 0,
    precise: bool = True,
) -> Log:
    """Return n requests of 10 chunks every so often; `late` of them lag by 1 s; `shared` chunks come with another."""
    book = Book(n)
    for i in range(n):
        due = round((1000 + i * every_ms) * MS)
        lag = 1000.0 if i < late else lag_ms
        book.intended_ns[i] = book.due_ns[i] = due
        book.write_ns[i] = round(due + (lag + last_ms * (i == n - 1)) * MS)
        book.state[i] = DONE
        first = round(due + ttft_ms * MS)
        for k in range(10 - shared):
            book.chunks(i, first + k * MS, [1] if k else [1] * (1 + shared))
    book.precise = precise
    return assemble(book, [book.spill()])


def test_a_good_run_is_valid_and_says_its_numbers() -> None:
    judged = verdict(log(), 0.1)
    assert (judged.valid, judged.reasons, judged.below_ms, judged.precise) == (True, (), True, True)
    assert judged.lag_p99_s == judged.lag_max_s == pytest.approx(0.0002)
    assert judged.ttft_p50_s == pytest.approx(0.05)
    assert judged.offered_per_s == pytest.approx(101.0)
    assert judged.chunks_per_read == 1.0
    assert judged.text == "valid: lag P99 0.20 ms"


@cases(
    ("run_log", "other_cores", "says"),
    [
        (log(5.1, 200.0, every_ms=20.0), 0.0, "lag P99 is 5.1 ms, the limit 5 ms"),
        (log(2.6, 50.0), 0.0, "lag P99 is 5% of the median TTFT of 50.0 ms, the limit 5%"),
        (log(last_ms=6.0), 0.0, "requests/s left of 101.0 offered, 0.6% off, the limit 0.5%"),
        (log(shared=1), 0.0, "1.11 chunks came in a read, the limit 1.1"),
        (log(), 0.21, "other processes took 0.21 cores, the limit 0.2"),
        (log(), float("nan"), "the load of other processes was not measured"),
    ],
)
def test_each_limit_has_its_reason(run_log: Log, other_cores: float, says: str) -> None:
    judged = verdict(run_log, other_cores)
    assert not judged.valid
    assert [says in reason for reason in judged.reasons] == [True]
    assert judged.text == f"invalid: {judged.reasons[0]}"


@cases(
    ("run_log", "other_cores"),
    [(log(4.9, 200.0), 0.2), (log(2.4, 50.0), 0.0), (log(last_ms=4.0), 0.0), (log(late=1), 0.0)],
)
def test_within_the_limits_is_valid(run_log: Log, other_cores: float) -> None:
    assert verdict(run_log, other_cores).reasons == ()


def test_without_the_kernels_timer_nothing_is_claimed_below_a_millisecond() -> None:
    judged = verdict(log(precise=False), 0.0)
    assert (judged.valid, judged.below_ms) == (True, False)
    assert "no claim below a millisecond" in judged.text
    assert not verdict(log(1.1), 0.0).below_ms


def test_lag_counts_from_when_a_held_request_was_sent() -> None:
    run_log = log()
    held = run_log._replace(intended_ns=run_log.intended_ns - 3000 * MS)
    assert verdict(held, 0.0).lag_p99_s == pytest.approx(0.0002)
    assert verdict(held, 0.0).ttft_p50_s == pytest.approx(3.05)


def test_a_refused_connection_is_not_the_clients_fault() -> None:
    run_log = log()
    state, write = run_log.state.copy(), run_log.write_ns.copy()
    state[50:60], write[50:60] = FAILED, -1
    assert verdict(run_log._replace(state=state, write_ns=write), 0.0).valid
    state[50:60] = 1  # still waiting for a connection at the end
    assert "left of" in verdict(run_log._replace(state=state, write_ns=write), 0.0).reasons[0]


def test_a_run_in_which_nothing_left_is_invalid() -> None:
    judged = verdict(assemble(Book(3), [Book(3).spill()]), 0.0)
    assert isinstance(judged, Verdict)
    assert judged.reasons == ("no request left",)


def test_chunks_are_grouped_by_request_in_the_order_of_their_reads() -> None:
    book = Book(2)
    book.chunks(1, 10, [1, 1])
    spilt = [book.spill()]
    book.chunks(0, 11, [1])
    book.chunks(1, 20, [3])
    run_log = assemble(book, [*spilt, book.spill()])
    assert run_log.offsets.tolist() == [0, 1, 4]
    assert run_log.chunk_ns.tolist() == [11, 10, 10, 20]
    assert run_log.chunk_tokens.tolist() == [1, 1, 1, 3]
    assert run_log.chunk_shared.tolist() == [False, False, True, False]
    assert (run_log.tokens.tolist(), run_log.first_ns.tolist()) == ([1, 5], [11, 10])


def test_other_load_is_the_machines_less_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = psutil.Process().cpu_times()
    clock_s, busy_s = iter([100.0, 104.0]), iter([10.0, 13.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock_s))
    monkeypatch.setattr(load, "_busy_s", lambda: next(busy_s))
    nobody = OtherLoad([2**22 + 1])  # no such process
    assert nobody.cores() == 0.75
    assert load.own_s([os.getpid(), os.getpid()]) == pytest.approx(sum(cpu[:4]), abs=5.0)
    assert load.own_s([os.getpid()]) >= cpu.user + cpu.system


def test_the_rate_at_which_the_client_is_the_limit_is_the_first_beyond_a_millisecond() -> None:
    assert limit({200.0: 0.2, 1000.0: 1.0}) == "lag P99 is within 1 ms at each rate, up to 1,000 requests/s"
    late = limit({200.0: 0.2, 1000.0: 1.01, 3000.0: 0.9})
    assert late == "lag P99 is within 1 ms up to 200 requests/s; at 1,000 it is 1.01 ms: client or stub is the limit"
    assert limit({200.0: float("nan")}).startswith("lag P99 is within 1 ms at no rate; at 200 it is nan ms")
