"""The command line: one screen that answers, help with examples, the same results again at once."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from harness.cli.asked import Asked
from harness.loop.system import ROOT, names
from harness.policy.types import UserError
from harness.rows import record
from harness.study import load as studies
from harness.study.study import AA, AA_SEED
from tests.bench import bench, ok, python
from tests.cases import cases
from tests.harness.run.test_sweep import SYSTEM, files

MODELS = ("--trace", "sample", "--models", "llama-3.2-1b*2")
COMPARE = ("compare", "--systems", "static,chunked", *MODELS, "--seeds", "2", "--rate-scale", "1,2", "--no-plot")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return results of `COMPARE`."""
    folder = tmp_path_factory.mktemp("results")
    ok(*COMPARE, "-o", folder)
    return folder


@cases(("gpus", "unfit"), [(4, set()), (1, {"aegaeon", "disaggregated", "weaver"})])
def test_all_systems_have_a_row_or_a_reason(gpus: int, unfit: set[str], tmp_path: Path) -> None:
    """Those that need two GPUs of a kind (one that prefills, one for the hot model) say so on one."""
    asked = "compare --systems static:equal,all --seeds 1 --rate-scale 1 --set window_s=10 --set warmup_s=2 --no-plot"
    lines = ok(*asked.split(), *MODELS, "--gpus", gpus, "-o", tmp_path).splitlines()
    rows = {line.split()[0].rstrip("†"): line for line in lines if line.strip()}
    reasons = dict(re.findall(r"^(\w+)  does not fit: (.+)$", "\n".join(lines), re.MULTILINE))
    assert {"weaver", "pdmux", "disaggregated", "muxserve"} < set(names())
    assert {name for name in names() if name not in rows} == set()
    assert reasons.keys() == unfit
    assert all(reason.endswith("(fits with --gpus 2)") for reason in reasons.values())
    assert "static:equal" in rows


def test_all_is_every_system_that_is_not_listed() -> None:
    def listed(systems: str) -> list[str]:
        return list(Asked(systems, {"trace": "sample"}, slo="P95", rates=(1.0,), seeds=1).study().systems)

    assert listed("static,all") == ["static", *(name for name in names() if name != "static")]
    with pytest.raises(UserError, match=r'system "\w+" is listed twice'):
        listed("all,all")


def test_scaling_none_needs_no_search_and_has_one_rate(tmp_path: Path) -> None:
    common = ("compare", "--systems", "dedicated", *MODELS, "--scaling", "none", "--no-plot", "-o", tmp_path)
    output = ok(*common, "--seeds", "1")
    assert "(1 x the trace's rate, --scaling none)" in output
    assert "next: bench plot" in output or "next: bench explain" in output
    result = bench(*common, "--rate-scale", "1,2")
    assert result.exit_code == 2
    assert 'rate_scale is 2: scaling "none" takes the trace as it is, at 1' in result.stderr
    assert "search" not in ok(*common, "--dry-run")


def test_a_closed_loop_on_the_command_line(tmp_path: Path) -> None:
    name = "closed+clients=2+requests=8+prompt=64+output=8+think_s=0.1"
    common = "compare --systems dedicated,static --models llama-3.2-1b*2 --seeds 1 --rate-scale 1,2 --no-plot"
    args = (*common.split(), "--trace", name, "-o", tmp_path)
    output = ok(*args)
    assert "2 clients a model, 8 requests, 0.1 s between them" in output
    assert "--scaling clients" in output
    assert "unchecked end to end" not in output  # the default host on h100
    assert "unchecked end to end" in ok(*args, "--gpu", "a100-80g")


# ------------------------------------------------------------------ help


def test_studies_are_listed_and_a_dry_run_runs_nothing(tmp_path: Path) -> None:
    listed = {line.split()[0]: line for line in ok("study").splitlines()}
    assert {"study", str(len(studies.names())), *studies.names()} == set(listed)
    assert "Prism, arXiv 2505.04021, figure 12" in listed["fig12"]
    output = ok("study", "fig12", "--dry-run", "--only", "equal rates; hyperbolic", "--seeds", "2", "-o", tmp_path)
    assert {line.split(" / ")[0] for line in output.splitlines() if " / " in line} == {"hyperbolic", "equal rates"}
    assert re.search(r"^\d+ runs, about \d+ s on one core", output, re.MULTILINE)
    assert not list(tmp_path.iterdir())
    for args, says in (
        (("fig77",), 'no study "fig77"; did you mean fig7?'),
        (("fig12", "--only", "equal"), 'fig12 has no condition "equal"; did you mean equal rates?'),
    ):
        result = bench("study", *args, "--dry-run", "-o", tmp_path)
        assert (result.exit_code, says in result.stderr) == (2, True)


def test_python_m_harness_is_bench_and_runs_from_any_folder(tmp_path: Path) -> None:
    for args in (["--version"], ["list", "traces"]):
        done = python("-m", "harness", *args, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert re.match(r"bench|\d+ of \d+ traces are here", done.stdout)


# ------------------------------------------------------------------ compare


def test_one_screen_says_all_that_a_reader_must_know(out: Path) -> None:
    lines = ok(*COMPARE, "-o", out).splitlines()
    assert "static" in lines[0]  # the answer
    assert lines[1] == "sample (synthetic) · 2 of 8 models · simulated · SLO 5xP95 · 2 seeds · --all says more"
    assert re.match(r"Table: at [\d.]+ req/s \([12] x the trace's rate\)", lines[2])
    assert lines[4].split()[:4] == ["system", "pooled", "worst", "pooled"]
    assert max(map(len, lines[1:7])) <= 100
    assert [line.split()[0] for line in lines[5:7]] == ["static", "chunked"]
    every = ok(*COMPARE, "-o", out, "--all").splitlines()
    facts = "sample, synthetic, 2 of 8 models, requests in 60 s, 1 x h100, simulated, SLO 5xP95, 2 seeds"
    assert [fact for fact in facts.split(", ") if fact not in every[1]] == []
    assert re.match(
        r"server: vLLM 0\.15, 8,192 tokens a step, 1,024 sequences, 0\.90: .+ GiB of KV, .+ tokens", every[2]
    )
    assert every[5].split()[:4] == ["system", "pooled", "mean", "worst"]
    assert lines[-1].startswith("next: bench ")
    assert str(next(out.glob("sample-*")).name) in lines[-2]
    assert "\x1b" not in "".join(lines)  # plain in a pipe
    assert len(lines) < 24


def test_a_second_run_redoes_nothing_and_says_the_same(out: Path) -> None:
    before, stamps = files(out), {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    first, second = bench(*COMPARE, "-o", out), bench(*COMPARE, "-o", out)
    assert first.stdout == second.stdout
    assert first.stderr == second.stderr == ""
    assert files(out) == before
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == stamps


def test_the_next_command_works(out: Path, tmp_path: Path) -> None:
    """Explain whose request misses; where none does, ask the same question at twice the rate."""
    missed = ok(*COMPARE, "--slo", "absolute:ttft=0.001,tpot=1", "-o", out)  # no first token comes so soon
    words = shlex.split(missed.splitlines()[-1].removeprefix("next: "))
    assert words[:2] == ["bench", "explain"]
    assert ok(*words[1:])
    command = ("compare", "--systems", "dedicated", *MODELS, "--rate-scale=1", "--seeds", "1", "--no-plot")
    words = shlex.split(ok(*command, "-o", tmp_path).splitlines()[-1].removeprefix("next: "))
    asked = [word for word in command if word != "--rate-scale=1"]
    assert words == ["bench", *asked, "-o", str(tmp_path), "--rate-scale", "2"]
    assert "(2 x the trace's rate)" in ok(*words[1:])


def test_machines_get_the_same_numbers(out: Path) -> None:
    facts = json.loads(ok(*COMPARE, "-o", out, "--json"))
    assert (facts["trace"], facts["tier"], facts["slo"], facts["seeds"]) == ("sample", "synthetic", "5xP95", 2)
    rows = list(csv.DictReader(io.StringIO(ok(*COMPARE, "-o", out, "--csv"))))
    assert [row["system"] for row in rows] == [row["system"] for row in facts["systems"]] == ["static", "chunked"]
    for row, other in zip(rows, facts["systems"], strict=True):
        assert row.keys() == other.keys()
        assert float(row["both_pct"]) == other["both_pct"]
        assert (other["both_pct_low"], other["both_pct_high"]) == (None, None)  # of two windows of a block each
        assert other["ttft_p50_s_low"] <= other["ttft_p50_s"] <= other["ttft_p50_s_high"]
    assert ok(*COMPARE, "-o", out, "--markdown").startswith("| system | ")
    latex = ok(*COMPARE, "-o", out, "--latex")
    assert latex.splitlines()[0].startswith("% bold: ")
    assert latex.splitlines()[1].startswith(r"\begin{tabular}")
    assert latex.count(r"\\") == 3


def test_controls_are_an_independent_copy_and_the_bounds(tmp_path: Path) -> None:
    asked = "compare --systems static --seeds 2 --rate-scale 1 --no-plot --controls --json".split()
    answer = json.loads(ok(*asked, *MODELS, "-o", tmp_path))
    rows = {row["system"]: row for row in answer["systems"]}
    assert list(rows) == ["static", "dedicated", "unshared", "static:oracle", f"static{AA}"]
    assert [row["control"] for row in rows.values()] == [False, True, True, True, True]
    seeds = {record.meta(path)["spec"]["seed"] for path in tmp_path.glob("static-*")}
    assert seeds == {0, 1, AA_SEED, AA_SEED + 1}


def test_gpus_that_served_nobody_are_told(tmp_path: Path) -> None:
    """Two models of one GPU each on four: two GPUs are left; on two, none is."""
    small = ("compare", "--systems", "dedicated,static:equal", "--trace", "sample", "--models", "llama-3.2-1b*2",
             "--seeds", "2", "--rate-scale", "1", "--set", "window_s=10", "--no-plot", "-o", tmp_path)  # fmt: skip
    told = ok(*small, "--gpus", "4")
    assert "static:equal: 2 of 4 GPUs served no request in every run (GPUs 2 to 3)" in told.splitlines()
    assert "served no request" not in ok(*small, "--gpus", "2")
    told = ok(*small, "--systems", "weaver", "--gpus", "4")
    assert "weaver: 2 of 4 GPUs prefilled no request in every run (GPUs 0 to 1)" in told.splitlines()


def test_a_system_without_room_says_what_it_lacks_and_the_way_out_works(tmp_path: Path) -> None:
    full = ("compare", "--systems", "static,elastic", "--trace", "sample", "--models", "heavy8", "--gpus", "2",
            "--served", "2048", "--seeds", "1", "--rate-scale", "1", "--set", "window_s=10", "--no-plot",
            "-o", tmp_path)  # fmt: skip
    lines = ok(*full).splitlines()
    (row,) = (line for line in lines if line.startswith("elastic "))
    ways = r"\(fits with --set batch_cap=256 --set chunk_tokens=2048 --set (mem_fraction=0\.9\d) or --gpus 3\)"
    match = re.fullmatch(rf"elastic  does not fit: \d+\.\d GiB short on each GPU: .+ {ways}", row)
    assert match, row
    assert not any("the rate of" in line or "points more" in line for line in lines)
    words = shlex.split(lines[-1].removeprefix("next: "))
    assert words[-2:] == ["--set", match[1]]
    again = ok(*words[1:], "--all")
    assert "does not fit" not in again
    assert f"{match[1].partition('=')[2]} of a GPU's memory for the engine" in again.splitlines()[1]


def test_a_figure_is_drawn_after_the_table(tmp_path: Path) -> None:
    text = ok("compare", "--systems", "static", *MODELS, "--seeds", "1", "--rate-scale", "1", "-o", tmp_path)
    stem = next(tmp_path.glob("compare-*.pdf")).with_suffix("")
    assert stem.name in text
    assert {path.suffix for path in tmp_path.glob("compare-*")} == {".pdf", ".png", ".csv"}
    sweep = next(tmp_path.glob("sample-*"))
    first, *drawn = ok("plot", sweep, "-o", tmp_path / "again.pdf").splitlines()
    assert first.endswith(f"{sweep.name} · SLO 5xP95")
    assert [Path(line).name for line in drawn] == ["again.pdf", "again.png", "again.csv"]
    assert (tmp_path / "again.png").read_bytes() == stem.with_suffix(".png").read_bytes()


@pytest.mark.full
def test_a_plot_marks_what_older_sources_made(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(SYSTEM % "")
    args = ("compare", "--systems", f"static,{mine}", *MODELS, "--seeds", "1", "--rate-scale", "1", "--no-plot")
    ok(*args, "-o", tmp_path / "out")
    sweep = next((tmp_path / "out").glob("sample-*"))
    assert bench("plot", sweep, "-o", tmp_path / "a").stderr == ""
    mine.write_text((SYSTEM % "") + "EDITED = True\n")
    os.utime(mine, ns=(1, 1))
    assert "Stale, made by older sources: mine." in bench("plot", sweep, "-o", tmp_path / "b").stderr


def test_a_trace_that_is_not_here_says_so_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    if (ROOT / "traces" / "data").exists():
        pytest.skip("traces/data may hold the real trace")
    asked = "-m harness compare --systems static --trace arena-chat --seeds 1 --rate-scale 1 --no-plot -o".split()
    first = python(*asked, tmp_path / "out").stdout.splitlines()[0]
    assert first.startswith("arena-chat is not here")
    assert "synthetic" in first
    assert "traces/data" in first
    assert re.search(r"^not here: arena-chat, .*mooncake-conversation", ok("list", "traces"), re.MULTILINE)
    listed = ok("list", "traces", "--all")
    assert "arena-chat is not here (arena-like stands in)" in listed
    assert "mooncake-conversation is not here (nothing stands in)" in listed


# ------------------------------------------------------------------ run, explain, list, trace, new


@cases(
    ("args", "answer"),
    [
        (("list",), r"\d+ systems, \d+ engines, "),
        (("list", "systems"), r"\d+ systems; "),
        (("list", "gpus"), r"\d+ kinds of GPU; "),
        (("list", "hosts"), r"\d+ host profiles, "),
        (("list", "studies"), r"\d+ studies come "),
        (("list", "traces"), r"\d+ of \d+ traces are here; "),
        (("list", "figures"), r"\d+ figures; "),
        (("list", "definitions"), r"\d+ definitions of SLO attainment; "),
        (("trace", "stats", "sample"), r"sample: of 8 models the busiest has 34 % of the requests\. "),
        (("explain", "static", "--misses"), r"\d+ of \d+ requests missed"),
        (("explain", "static", "--request", "0"), r"request 0: (met|missed) TTFT"),
        (("explain", "sweep", "--misses"), r"\S+ misses [\d.]+ %.*; \S+ misses [\d.]+ %"),
    ],
)
def test_what_is_printed_is_one_screen_that_answers_first(
    args: tuple[str, ...], answer: str, out: Path, tmp_path: Path
) -> None:
    folders = {"static": next(out.glob("static-*"))}
    if "sweep" in args:
        ok(*COMPARE, "--slo", "absolute:ttft=0.001,tpot=1", "-o", tmp_path)  # no first token comes so soon
        folders["sweep"] = next(tmp_path.glob(f"*/{record.SWEEP}")).parent
    words = [folders.get(word, word) for word in args]
    lines = ok(*words).splitlines()
    assert re.match(answer, lines[0])
    assert len(lines) <= 30
    assert [line for line in lines if len(line) > 100 and not line.startswith("next: ")] == []
    if (args[1:] and args[1] in {"stats", "traces"}) or args[0] == "explain":
        assert len(ok(*words, "--all").split()) >= sum(len(line.split()) for line in lines)
