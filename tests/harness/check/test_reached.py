"""Each branch of a policy is run by a case of `bench check`, or its lines are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.check.cases import cases as workloads
from harness.check.check import check
from harness.check.reached import Reached
from harness.rows import vetted
from tests.bench import bench, ok
from tests.cases import cases
from tests.commands.test_bad_input import COMPARE

SOURCE = (Path(__file__).parent / "sound" / "admits_each.py").read_text("utf-8")
START, ARRIVED = 'case Woke("start"):', "case Arrived(request):"
ERROR = f"\n{16 * ' '}raise RuntimeError('planted')"
NEXT = f"{ERROR}\n{12 * ' '}"
BRANCHES = {  # by its name: a line of the file, and what stands in its place, with an error planted into it
    "start": (START, START + ERROR),
    "arrival": (ARRIVED, ARRIVED + ERROR),
    "later": (ARRIVED, f"case Arrived() if view.now_s > 1e4:{NEXT}{ARRIVED}"),
    "long": (ARRIVED, f"case Arrived(request) if request.prompt_tokens > 10**6:{NEXT}{ARRIVED}"),
    "key": (START, f"case Woke('never'):{NEXT}{START}"),
}


@cases("branch", list(BRANCHES))
def test_an_error_in_a_branch_breaks_a_law_or_its_line_is_named(branch: str, tmp_path: Path) -> None:
    line, planted = BRANCHES[branch]
    assert line in SOURCE
    (file := tmp_path / "mine.py").write_text(SOURCE.replace(line, planted))
    at = file.read_text().splitlines().index(ERROR[1:]) + 1
    reached = Reached(str(file))
    failures = check(str(file), twice=False, reached=reached)
    assert ("survives" in {failure.law for failure in failures}) is (branch in {"start", "arrival"})
    assert failures or at in reached.lines
    assert failures or f"line {at}" in reached.text


def test_a_policy_that_is_run_whole_has_nothing_to_name() -> None:
    reached = Reached(str(Path(__file__).parent / "sound" / "admits_each.py"))
    assert not check(reached.file, twice=False, reached=reached)
    assert reached.text == ""


def test_an_action_that_the_file_builds_and_does_not_declare_breaks_a_law_though_no_case_runs_it(
    tmp_path: Path,
) -> None:
    line, planted = BRANCHES["later"]
    imports = "from harness.policy.actions import "
    evicts = planted.replace("raise RuntimeError('planted')", "yield Evict(next(iter(self.batches.values())).inst)")
    source = SOURCE.replace(line, evicts).replace(imports, f"{imports}Evict, ", 1)
    (file := tmp_path / "mine.py").write_text(source)
    (failure,) = check(str(file), only="declared", twice=False)
    assert "builds Evict" in failure.message
    file.write_text(source.replace('"Run"', '"Run", "Evict"'))
    reached = Reached(str(file))
    assert check(str(file), twice=False, reached=reached) == []
    assert reached.text.startswith("Evict, line")


def test_what_no_case_reached_is_said_by_check_and_by_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    line, planted = BRANCHES["later"]
    (file := tmp_path / "mine.py").write_text(SOURCE.replace(line, planted))
    printed = ok("check", file)
    assert "mine.py: all laws hold\n  no case reached line " in printed
    assert vetted.unreached(str(file)) in printed
    done = bench(*COMPARE[:2], file, *COMPARE[3:], "--slo", "absolute:ttft=1,tpot=1", "-o", tmp_path / "out")
    assert "mine (checked in part) " in done.stdout
    assert "static (checked" not in done.stdout
    assert f"checked in part: mine: no case of bench check reached {vetted.unreached(str(file))}" in done.stdout


def test_the_popular_model_of_a_case_drifts_and_gpus_of_another_idle_beside_a_hot_one() -> None:
    drift, spare = workloads()["drift"].jobs, workloads()["spare-gpu"].jobs
    quarters = np.array_split(drift.model, 4)
    assert [np.bincount(part, minlength=4).argmax() for part in quarters] == [0, 1, 2, 3]
    assert all(np.bincount(part).max() > len(part) / 2 for part in quarters)
    others = np.flatnonzero(spare.model)
    assert spare.arrival_s[-1] - spare.arrival_s[others].max() > 20
    assert (np.diff(spare.arrival_s) >= 0).all()
