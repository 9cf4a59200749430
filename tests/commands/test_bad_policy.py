"""Policies that go wrong: each costs its row, never the comparison."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness.rows import record
from tests.bench import bench, mistake
from tests.cases import cases
from tests.commands.test_bad_input import COMPARE
from tests.harness.run.test_sweep import SYSTEM, files

HEARD = (SYSTEM % "").replace("import Woke", "import Arrived, Woke").replace("{Woke}", "{Woke, Arrived}")


AT = r"t = -?[\d.]+ s, Arrived\(id=0\)"


WRONG = [  # what a policy does when it first hears of a request, and what is said of it
    ("self.nope", rf"AttributeError at mine\.py:\d+ \('Mine' object has no attribute 'nope'\), {AT}"),
    ("yield Load(Inst('a', (0,))); raise KeyError('x')", rf"KeyError at mine\.py:\d+ \('x'\), {AT}"),
    ("raise SystemExit(0)", rf"SystemExit at mine\.py:\d+ \(0\), {AT}"),
    ("raise UserError('mine')", rf"UserError at mine\.py:\d+ \(mine\), {AT}"),
    ("view.request(99)", rf"KeyError at mine\.py:\d+ \('no request 99 yet'\), {AT}"),
    ("while True: pass", rf"no answer within 0\.2 s at mine\.py:\d+, {AT}"),
    ("while True: yield Wake(0.0)", rf"(no answer within 0\.2 s at mine\.py:\d+|answered 1,000,000 actions.*), {AT}"),
    ("yield 5", rf"answered 5, which is no action, {AT}"),
    ("yield Load('x')", rf"answered Load\(inst='x'\); a field is of the wrong type, {AT}"),
    ("yield Admit(0, None)", rf"answered Admit\(who=0, batch=None\); a field is of the wrong type, {AT}"),
    ("yield Wake(float('nan'))", rf"answered Wake\(at_s=nan\); a field is of the wrong type, {AT}"),
]


AT_ONCE = [  # a file that goes wrong before anything is run: what stands in it instead of what, and what is said
    ("def __post_init__", "import no_such\n    def __post_init__", r"ModuleNotFoundError at mine\.py:\d+ \(No mod"),
    ("@dataclass\nclass Mine:", "raise SystemExit(0)\n@dataclass\nclass Mine:", r"SystemExit at mine\.py:\d+ \(0\)"),
    ("self.names = list(self.cluster.models)", "1 / 0", r"ZeroDivisionError at mine\.py:\d+ \(division by zero\)"),
    ("self.names = list(self.cluster.models)", "\n        while True: pass", r"no answer within 0\.2 s at mine\.py:\d"),
    ("hears = ", "heard = ", r"has no `hears`, a frozenset of event classes"),
    ('options = {"kv": "paged"}', "", r"has no `options`, a mapping of names to values"),
    ("DECISION_S = 0.004", "DECISION_S = 'fast'", r"DECISION_S is 'fast', not seconds"),
    ("def __post_init__", "gpus_needed = 3\n    def __post_init__", r"TypeError \('int' object is not callable\)"),
    ("on(self, event, view)", "on(self, event)", r"TypeError \(.*positional arguments.*\), t = -60 s, Woke"),
]


def costs_its_row(path: Path, says: str, out: Path) -> None:
    """Compare a faulty policy with a sound one: the table of the sound one, one line about the other, exit code 2."""
    sound = (*COMPARE, "--slo", "absolute:ttft=1,tpot=1", "-o", out)
    assert bench(*sound).exit_code == 0  # the limit is for `mine`: on a busy machine an import alone may take as long
    limit = ("--policy-limit-s", "0.2") if "no answer" in says else ()
    result = bench(*sound, "--systems", f"static,{path}", *limit)
    assert result.exit_code == 2, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("static meets 100.0 % of SLOs at ")
    assert re.match(r"static +100\.0", lines[5])
    (line,) = (line for line in lines if line.startswith("mine: "))
    assert re.fullmatch(rf"mine: ({says}).*; bench check {re.escape(str(path))}", line), line
    assert lines[-1].startswith("next: ")
    assert result.stderr == ""
    assert {name.partition("-")[0] for name in files(out)} == {"static", "sample"}  # nothing of `mine`


@pytest.mark.full
@cases(("does", "says"), WRONG)
def test_a_policy_that_goes_wrong_costs_its_row(does: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    names = "from harness.policy.actions import Drop, Wake\nfrom harness.policy.types import UserError\n\nDECISION_S"
    does = f"if isinstance(event, Arrived):\n            {does}\n        if event =="
    path.write_text(HEARD.replace("DECISION_S", names, 1).replace("if event ==", does))
    costs_its_row(path, says, tmp_path / "out")


@cases(("old", "new", "says"), AT_ONCE)
def test_a_policy_that_does_not_start_costs_its_row(old: str, new: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    assert old in HEARD
    path.write_text(HEARD.replace(old, new))
    costs_its_row(path, says, tmp_path / "out")


def test_failures_reach_programs_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEARD.replace("self.names = list(self.cluster.models)", "1 / 0"))
    both = ("--systems", f"static,{path}", "-o", tmp_path / "out")
    told = f"mine: ZeroDivisionError at mine.py:26 (division by zero); bench check {path}"
    result = bench(*COMPARE, *both, "--json")
    assert (result.exit_code, result.stderr) == (2, told + "\n")
    assert json.loads(result.stdout)["failed"] == [told]
    result = bench(*COMPARE, *both, "--dry-run")
    assert result.exit_code == 2
    assert result.stdout.splitlines()[-1] == told
    mistake(bench(*COMPARE, "--systems", path, "-o", tmp_path / "out"), told)
    (tmp_path / "a.toml").write_text(f'system = "{path}"\ntrace = "sample"\nmodels = "llama-3.2-1b*2"\n')
    mistake(bench("run", tmp_path / "a.toml", "-o", tmp_path / "out"), told)


def test_what_a_policy_prints_is_no_result(tmp_path: Path) -> None:
    path, plain = tmp_path / "mine.py", tmp_path / "plain.py"
    plain.write_text(HEARD)
    path.write_text(HEARD.replace("def on(self, event, view):", "def on(self, event, view):\n        print('hello')"))
    results = [bench(*COMPARE, "--systems", f"static,{src}", "-o", tmp_path / "out", "--csv") for src in (plain, path)]
    assert [result.exit_code for result in results] == [0, 0]
    assert results[1].stdout == results[0].stdout.replace("plain", "mine")
    assert set(results[1].stderr.splitlines()) == {"hello"}


def test_refused_actions_are_told_under_the_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    asks = "if isinstance(event, Arrived): yield Load(Inst('nobody', (0,)))\n        if event =="
    path.write_text(HEARD.replace("if event ==", asks))
    args = (*COMPARE, "--systems", f"static,{path}", "--slo", "absolute:ttft=1,tpot=1", "-o", tmp_path / "out")
    first, again = bench(*args), bench(*args)
    assert (first.exit_code, first.stdout) == (0, again.stdout)
    (line,) = (line for line in first.stdout.splitlines() if line.startswith("mine: "))
    count, rest = re.fullmatch(r"mine: (\d+) actions refused, the first: (.*)", line).groups()  # type: ignore[union-attr]
    (run,) = (tmp_path / "out").glob("mine-*")
    assert int(count) == record.meta(run)["refused"] == record.read(run).num_rows  # one at each arrival
    assert re.fullmatch(r"Load\(inst=Inst\(model='nobody', place=\(0,\)\)\) at t = -?[\d.]+ s: .*nobody.*", rest)
