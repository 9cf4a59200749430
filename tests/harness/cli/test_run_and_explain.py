"""`bench run` and `bench explain`: every second of a request, every miss by its cause, under the SLO that judged it."""

from __future__ import annotations

import json
import re
import shlex
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.rows import record
from tests.bench import ok
from tests.cases import cases
from tests.harness.cli.test_cli import COMPARE


def test_run_takes_a_file_and_tells_what_came(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('system = "chunked"\npreset = "strict"\ntrace = "sample"\nmodels = "llama-3.2-1b*2"\nseed = 7\n')
    text = ok("run", path, "-o", tmp_path / "out")
    assert text.startswith("chunked:strict: ")
    assert "attainment" in text
    (folder,) = (tmp_path / "out").glob("chunked-*")
    assert record.meta(folder)["spec"]["seed"] == 7
    dry = ok("run", path, "--dry-run", "-o", tmp_path / "other")
    assert json.loads(dry[: dry.rindex("}") + 1])["preset"] == "strict"
    assert not (tmp_path / "other").exists()


def test_explain_accounts_for_every_second(tmp_path: Path) -> None:
    ok(*COMPARE, "-o", tmp_path)
    folder = next(tmp_path.glob("static-*"))
    rows = record.read(folder).to_pylist()
    for rid in (0, len(rows) // 2, len(rows) - 1):
        first, slo, *lines = ok("explain", folder, "--request", rid, "--all").splitlines()
        q = rows[rid]
        assert slo.startswith("SLO 5xP95 (P95 measured on dedicated), as sample-")
        assert re.match(rf"request {rid}: (met|missed) TTFT: .* SLO", first)
        assert lines[0].startswith(f"  {q['model']} · {q['prompt_tokens']} tokens in, {q['output_tokens']} out")
        start = next(i for i, line in enumerate(lines) if "by cause" in line)
        parts = [float(line.split()[0]) for line in lines[start + 1 :]]
        latency = (q["done_ns"] - q["arrival_ns"]) / 1e9
        assert sum(parts) == pytest.approx(latency, abs=1e-4 * len(parts))


def test_explain_counts_misses_by_model_and_cause(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('system = "static"\ntrace = "sample"\nmodels = "nemo-12b*4"\ngpus = 2\nrate_scale = 40\n')
    text = ok("run", path, "-o", tmp_path / "out")
    (folder,) = (tmp_path / "out").glob("static-*")
    first, slo, *lines = ok("explain", folder, "--misses").splitlines()
    lines.insert(0, first)
    assert re.match(r"SLO 5xP95 \(P95 measured on dedicated\), as sample-[0-9a-f]{8} judged this run$", slo)
    missed, offered = (int(x) for x in re.match(r"(\d+) of (\d+) requests", lines[0]).groups())  # type: ignore[union-attr]
    assert 0 < missed <= offered
    share = float(re.search(r"attainment ([\d.]+) %", text)[1])  # type: ignore[index]
    assert 100 * (1 - missed / offered) == pytest.approx(share, abs=0.1)
    whole = next(line.split() for line in lines if line.startswith("all "))
    assert [int(x) for x in whole[1:3]] == [offered, missed]
    words = shlex.split(lines[-1])
    assert words[:6] == ["next:", "bench", "explain", str(folder), "--slo", "5xP95"]
    assert "missed" in ok(*words[2:])


CLASSES = """
[class.fast]
ttft_s = 0.05
tpot_s = 0.01
[class.slow]
ttft_s = 1.0
tpot_s = 0.05
[models]
"llama-3.1-8b/1" = "fast"
"*" = "slow"
"""


CROWD = ("compare", "--systems", "static,prism", "--trace", "sample", "--models", "llama-3.1-8b*4", "--gpus", "1",
         "--seeds", "1", "--rate-scale", "10", "--no-plot", "--set", "drain_s=64", "--set", "chunk_tokens=2048",
         "--set", "batch_cap=256")  # fmt: skip


RULES = ("absolute:ttft=0.5,tpot=0.03", "8xP95", "5xsolo", "classes:classes.toml")


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Judge one run of static by every rule in one folder; return each rule's table and its `next:`."""
    folder, tables = tmp_path_factory.mktemp("crowd"), {}
    (folder / "classes.toml").write_text(CLASSES)
    for rule in RULES:
        lines = ok(*CROWD, "--slo", rule.replace("classes:", f"classes:{folder}/"), "-o", folder / "out").splitlines()
        tables[rule] = (folder / "out" / Path(lines[-2]).name, lines[-1].removeprefix("next: "))
    return tables


def attained(sweep: Path, label: str) -> tuple[Path, float]:
    """Return the run of a label in a sweep of one point, and its attainment by the rule's definition."""
    rows = pq.read_table(sweep / record.SWEEP).to_pylist()
    definition = "e2e" if "solo" in rows[0]["slo"] else "both"
    (row,) = (r for r in rows if (r["label"], r["definition"], r["over"]) == (label, definition, "pooled"))
    return sweep.parent / row["run"], row["value"]


@cases(("rule", "label"), product(RULES, ("static", "prism")))  # prism reads the SLO: each rule is a run of its own
def test_explain_misses_what_the_table_misses(rule: str, label: str, crowd: dict[str, tuple[Path, str]]) -> None:
    sweep, following = crowd[rule]
    folder, value = attained(sweep, label)
    assert 0 < value < 1 or label == "prism"
    (stored,) = record.footer(sweep / record.SWEEP)["judges"]
    text = ok("explain", folder, "--misses", "--slo", stored["rule"])
    missed, offered = (int(x) for x in re.search(r"^(\d+) of (\d+) requests missed", text, re.MULTILINE).groups())  # type: ignore[union-attr]
    assert missed == round((1 - value) * offered)
    assert text.splitlines()[1].startswith(f"SLO {stored['rule']} (")
    asked = shlex.split(following)
    assert asked[:2] == ["bench", "explain"]
    assert asked[2:] == [str(sweep), "--misses", "--system", "static"]
    assert f"SLO {stored['rule']} (" in " ".join(ok(*asked[1:]).split())


def test_explain_names_every_judge_where_none_is_asked_for(crowd: dict[str, tuple[Path, str]]) -> None:
    (folder,) = {attained(sweep, "static")[0] for sweep, _ in crowd.values()}
    newest = max(crowd.values(), key=lambda entry: (entry[0] / record.SWEEP).stat().st_mtime_ns)[0]
    rules = {sweep: record.footer(sweep / record.SWEEP)["judges"][0]["rule"] for sweep, _ in crowd.values()}
    _, first, *others = ok("explain", folder, "--misses", "--all").partition("\nmodel ")[0].splitlines()
    assert first.startswith(f"SLO {rules.pop(newest)} (")
    assert first.endswith(f", as {newest.name} judged this run")
    assert set(others) == {f"{sweep.name} judged it otherwise: --slo {rule}" for sweep, rule in rules.items()}


def test_explain_by_a_rule_that_nobody_used_measures_it(crowd: dict[str, tuple[Path, str]]) -> None:
    folder, _ = attained(crowd["8xP95"][0], "static")
    near, far = (ok("explain", folder, "--misses", "--slo", "P95", "--slo-scale", x).splitlines() for x in (8, 16))
    assert near[1].endswith("judged this run")
    assert far[1] == "SLO 16xP95 (P95 measured on dedicated), as asked for"
    assert int(far[0].split()[0]) < int(near[0].split()[0])
    assert "--slo 16xP95" in far[-1]


def test_seconds_of_a_spec_judge_its_run_in_explain_too(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        'system = "static"\ntrace = "sample"\nmodels = "llama-3.2-1b*2"\n'
        '[slo_s]\n"llama-3.2-1b/1" = [1e-9, 1.0]\n"llama-3.2-1b/2" = [60.0, 60.0]\n'
    )
    lines = ok("run", path, "-o", tmp_path / "out").splitlines()
    share = float(re.search(r"attainment ([\d.]+) %", lines[0])[1])  # type: ignore[index]
    assert 0 < share < 100
    text = ok(*shlex.split(lines[-1].removeprefix("next: "))[1:])
    assert f"({100 - share:.1f} %, both)" in text


def test_a_run_that_no_table_names_is_judged_by_the_default_and_says_so(tmp_path: Path) -> None:
    from harness.run.execute import execute
    from harness.run.resolve import resolve
    from harness.run.sources import code
    from tests.harness.run.test_sweep import TINY

    folder = execute(resolve(TINY), tmp_path, code(resolve(TINY)))
    slo = ok("explain", folder, "--misses").splitlines()[1]
    assert slo == "SLO 5xP95 (P95 measured on dedicated), the default, for no comparison beside this run judged it"
