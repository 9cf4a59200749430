"""Ctrl-C and SIGTERM at random instants end a command soon, with their exit codes and whole results."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import harness
from harness.loop.guard import Fault, guarded
from harness.loop.interrupted import Interrupted, Terminated, came, terminable
from harness.loop.system import ROOT
from harness.policy.types import UserError
from harness.rows import record
from tests.bench import bench, python
from tests.cases import cases
from tests.commands.test_bad_input import COMPARE
from tests.harness.engines.servers.test_stub import ENGINE, SPEC

PATIENCE_S = 20.0  # of an end, far below the 30 s after which workers are killed
WAYS = {  # to an end: of workers, one process, servers, a check's second process
    "workers": (*COMPARE, "--seeds", "6", "--workers", "2", "-o", "OUT"),
    "one process": (*COMPARE, "--seeds", "6", "--workers", "1", "-o", "OUT"),
    "servers": ("run", "SPEC", "-o", "OUT"),
    "check": ("check", "static"),
}
TRIES = 60 // len(WAYS) if os.environ.get("BENCH_FULL") else 1
SWALLOWS = """
import os, signal, sys
from harness.loop.interrupted import Terminated, terminable
class Swallows:
    def __del__(self):
        os.kill(os.getpid(), {number})
        for _ in range(10**5): pass
try:
    with terminable():
        Swallows()
        print("swallowed", flush=True)
        while True: pass
except Terminated:
    sys.exit(143)
except KeyboardInterrupt:
    sys.exit(130)
"""
IMPORTS = """
import os, signal, sys
from harness.cli import app
def load(name):
    os.kill(os.getpid(), signal.SIGINT)
app.load = lambda name: command
import click
@click.command()
def command():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("numpy.core.multiarray failed to import")
app.main(["list"], prog_name="bench")
"""


DEAF = """
import ctypes, os, sys, threading, time
from harness.loop import interrupted
def tell():
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_lineno != line:
        time.sleep(0)
    os.kill(os.getpid(), {number})
interrupted.DEAF_S = 2
lock = ctypes.create_string_buffer(256)
libc = ctypes.CDLL(None)
line = 17  # the last
sys.setswitchinterval(100)  # who tells runs only where this thread waits: in the library
with interrupted.terminable():
    libc.pthread_mutex_lock(lock)
    threading.Thread(target=tell, daemon=True).start()
    libc.pthread_mutex_lock(lock)
"""


LOST = "interrupted: a library did not return; finished runs are kept\n"


@cases(("script", "printed"), [(SWALLOWS, "swallowed\n"), (DEAF, LOST)])
def test_a_signal_ends_a_process_that_swallows_it_or_whose_library_waits_for_ever(script: str, printed: str) -> None:
    """A destructor swallows the exception; a call goes on and lets no Python run, as Arrow's futures may."""
    for number, exits in ((int(signal.SIGTERM), 143), (int(signal.SIGINT), 130)):
        done = python("-c", script.format(number=number), timeout=60, check=False)
        assert (done.returncode, printed in done.stdout + done.stderr) == (exits, True), done.stderr


def test_a_command_without_addresses_is_refused_before_its_libraries_fail() -> None:
    """They would crash, or wait for a thread that has ended, at one limit or another below."""
    for kib in (100_000, 2_000_000):
        limited = f"import resource\nresource.setrlimit(resource.RLIMIT_AS, ({kib << 10},) * 2)\n"
        for words in (COMPARE, ("list", "systems")):
            done = python("-c", f"{limited}from harness.cli.app import main\nmain()", *words, check=False)
            says = f"error: ulimit -v is {kib}, the bench needs 3145728: raise it, or limit memory by a cgroup\n"
            assert (done.returncode, done.stdout, done.stderr) == (2, "", says)


def test_an_import_that_fails_by_an_interrupt_is_interrupted() -> None:
    done = python("-c", IMPORTS, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        130,
        "interrupted: finished runs are kept; the same command resumes there\n",
    )


@cases("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_while_a_policy_is_asked_is_not_its_fault(number: signal.Signals) -> None:
    with pytest.raises(Interrupted), terminable(), guarded():
        signal.raise_signal(number)
    with pytest.raises(Fault, match="KeyboardInterrupt"), terminable(), guarded():
        raise KeyboardInterrupt


def test_a_signal_is_remembered_until_the_next_command() -> None:
    with pytest.raises(Terminated), terminable():
        signal.raise_signal(signal.SIGTERM)
    assert came(signal.SIGTERM)
    with terminable():
        assert not came(signal.SIGTERM, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
def test_a_command_ends_soon_at_whatever_instant_it_is_interrupted(way: str, tmp_path: Path) -> None:
    """It leaves no process and no half result, whatever it was at."""
    draw, spec = random.Random(way), tmp_path / "spec.toml"
    spec.write_text(SPEC + f'engine = "{ENGINE}"\ngpus = 2\n')
    for k in range(TRIES):
        number, out = draw.choice([signal.SIGINT, signal.SIGTERM]), tmp_path / f"out{k}"
        words = [{"SPEC": str(spec), "OUT": str(out)}.get(word, word) for word in WAYS[way]]
        with subprocess.Popen(
            [sys.executable, "-m", "harness", *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as run:
            family = list[psutil.Process]()
            try:
                run.wait(draw.uniform(0.3, 8.0))
            except subprocess.TimeoutExpired:
                family = psutil.Process(run.pid).children(recursive=True)
                run.send_signal(number)
            begun_s = time.monotonic()
            assert run.stderr is not None
            _, err = run.communicate(timeout=PATIENCE_S)
        before = -number  # the command line was not there yet
        assert run.returncode in {0, 128 + number, before}, err.decode()
        assert time.monotonic() - begun_s < PATIENCE_S
        assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
        for folder in (path.parent for path in out.rglob("requests.parquet")) if out.exists() else ():
            record.read(folder)


def test_columns_may_be_any_sequence_and_a_misspelt_one_is_named(tmp_path: Path) -> None:
    assert bench(*COMPARE, "--slo", "absolute:ttft=1,tpot=1", "-o", tmp_path).exit_code == 0
    for columns in (("first_ns",), ["first_ns"], "first_ns"):
        assert "first_s" in harness.load(tmp_path, columns=columns).requests.frame()
    with pytest.raises(UserError, match=r'no column "frist_ns".*first_ns'):
        harness.load(tmp_path, columns=("frist_ns",))
