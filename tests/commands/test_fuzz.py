"""The sweep of bad input: a sample of it ends well, and its judge sees each fault that is planted into a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import python

pytestmark = pytest.mark.slow
EXAMPLES = 27  # each group draws so many

# In a process of its own: the judge forks it. Each fault stands in place of `bench new`, and is judged by itself.
PLANTED = """
import json, os, sys, time
from pathlib import Path
import harness.check.new as new
from harness.cli.app import COMMANDS, load
from harness.policy.types import UserError
from tests.fuzz import judge
from tests.fuzz.judge import Case

for name in COMMANDS:
    load(name)
judge.CPU_S, judge.PEAK_BYTES = 1.0, 600 << 20

def traceback(path): raise ZeroDivisionError
def silent(path): pass
def hang(path): time.sleep(1000)
def busy(path):
    while True: pass
def memory(path): b"x" * (700 << 20); raise UserError(f"{path}: no")
def half(path): Path("part").write_text("x"); raise UserError(f"{path}: no")
def blame(path): raise UserError("something is wrong")
def lines(path): print("one", file=sys.stderr); raise UserError(f"{path}: no")
def mute(path): sys.exit(2)
def code(path): sys.exit(3)
def good(path): raise UserError(f"{path}: no")

faults = {}
for fault in (traceback, silent, hang, busy, memory, half, blame, lines, mute, code, good):
    new.write = fault
    judge.WALL_S = 2.0 if fault is hang else 120.0
    case = Case("planted/x", ("new", "mine.py"), "mine.py", accept=False)
    (end,) = judge.ends([case], Path(sys.argv[1]) / fault.__name__)
    faults[fault.__name__] = end.bad
print(json.dumps(faults))
"""

SAYS = {
    "traceback": "traceback",
    "silent": "accepted",
    "hang": "no end within 2 s",
    "busy": "s of processor time",
    "memory": "GiB",
    "half": "left part",
    "blame": '"mine.py" is not named',
    "lines": "2 lines on stderr",
    "mute": "no line",
    "code": "exit code 3",
    "good": "",
}


def test_the_judge_sees_a_fault_that_is_planted(tmp_path: Path) -> None:
    faults = json.loads(python("-c", PLANTED, tmp_path).stdout)
    assert faults.keys() == SAYS.keys()
    for fault, says in SAYS.items():
        assert says in faults[fault], (fault, faults)
        assert bool(faults[fault]) is bool(says), (fault, faults)


@pytest.mark.full
def test_a_sample_of_bad_input_ends_well() -> None:
    done = python("-m", "tests.fuzz", "--examples", EXAMPLES, "--workers", "2", check=False)
    assert done.stdout.splitlines()[-1].endswith(" cases, 0 bad"), done.stdout + done.stderr
    assert done.returncode == 0
