"""Searches under a precision and a budget: kills change no byte, and what is left goes where it tells systems apart."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from harness.study.measure import measure
from harness.study.study import HELD, Condition, Study
from tests.cases import cases
from tests.harness.run.test_sweep import Heard, files
from tests.harness.study.test_measure import study, told

SEARCHED = """
systems = ["chunked", "static"]
definitions = ["ttft"]
slo = "absolute:ttft=0.12,tpot=0.2"
requests = 40
warmup_s = 5.0
sample = { rule = "bisect" }
quick = { seeds = 2, points = 4, window_s = 40.0, replayed_s = 40.0, budget = 60000, precision = 0.02 }
spec = { trace = "hyperbolic-like+span_s=120", host = "vllm-graph" }
condition = [{ name = "rates", at_rps = [4.0, 16.0], spec = { models = "llama-3.1-8b*3", gpus = 1, slo_scale = 1.0 } }]
"""


KILLED = """
import os, signal, sys
from pathlib import Path
from harness.study.measure import measure
from tests.harness.run.test_sweep import Heard
from tests.harness.study.test_measure import study
from tests.harness.study.test_seeds import SEARCHED

class Killed(Heard):
    def progress(self, what, done, total, left=None):
        if sys.argv[2] in what and done == 1:
            os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
measure(study(folder, SEARCHED), folder / "two", workers=1, teller=Killed())
"""


@pytest.mark.full
def test_workers_and_kills_in_a_search_under_a_precision_change_no_byte(tmp_path: Path) -> None:
    """Killed in the second round of the search, then in the second of more seeds, then ended by two workers."""
    straight = measure(study(tmp_path, SEARCHED), tmp_path / "one", workers=1)
    for stage in ("round 2", "more seeds 2"):
        killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path, stage], check=False, timeout=300)
        assert killed.returncode == -signal.SIGKILL, stage
        assert not list((tmp_path / "two").glob("mine-*"))
    resumed = measure(study(tmp_path, SEARCHED), tmp_path / "two", workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert (straight.folder.name, straight.table) == (resumed.folder.name, resumed.table)


@pytest.mark.full
def test_what_is_left_of_a_budget_goes_to_the_systems_that_do_not_need_full(tmp_path: Path) -> None:
    """It suffices for more runs of the two that are compared without --full, not of all five."""
    more = 'more = ["elastic", "prism", "pdmux"]\nfull = { seeds = 2, points = 4, window_s = 40.0, replayed_s = 40.0, '
    wide = study(tmp_path, SEARCHED.replace("spec = ", f"{more}budget = 60000, precision = 0.02 }}\nspec = ", 1))
    ran = defaultdict[str, set[tuple[float, int]]](set)
    table = measure(wide, tmp_path / "full", full=True, workers=2).table
    for row in table.select(["label", "x", "seed"]).to_pylist():
        ran[row["label"]].add((row["x"], row["seed"]))
    counts = {label: len(runs) for label, runs in ran.items()}
    assert counts["chunked"] == counts["static"] > counts["elastic"] == counts["prism"] == counts["pdmux"]


SPARSE = """
systems = ["chunked", "static"]
definitions = ["ttft"]
slo = "P95"
requests = 100
sample = { rule = "fixed" }
quick = { seeds = 2, points = 2, window_s = 20.0, replayed_s = 20.0, budget = 2000 }
spec = { trace = "sample", host = "vllm-graph" }
condition = [{ name = "rates", at_rps = [0.002, 0.1], spec = { models = "llama-3.1-8b*3", gpus = 1, slo_scale = 1.0 } }]
"""


def test_a_rate_at_which_nothing_was_offered_decides_nothing_and_is_asked_for_once(tmp_path: Path) -> None:
    heard = Heard()
    measured = measure(study(tmp_path, SPARSE), tmp_path / "out", workers=1, teller=heard)
    rows = measured.table.select(["label", "x", "seed", "definition", "n"]).to_pylist()
    offered = {
        (row["x"], row["seed"]): row["n"] for row in rows if row["label"] == "static" and row["definition"] == "ttft"
    }
    low = min(x for x, _ in offered)
    assert {n for (x, _), n in offered.items() if x == low} == {0}
    assert max(offered.values()) > 0
    assert told(measured)


@cases("at", [HELD, 1.0])
def test_a_rate_is_held_or_given(at: float | str) -> None:
    condition = Condition(
        "one", {"rate_scale": at, "models": "light8", "trace": "sample"}, along="slo_scale", at=(1.0,)
    )
    asked = Study("mine", {"static": "static"}, (condition,))
    assert asked.spec_of(condition, "static").rate_scale == 1.0  # until it is searched
