"""The command line: one screen that answers, help with examples, the same results again at once.

Over 600 lines: one for each command and what it prints.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import click
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from harness.cli import codes, terminal
from harness.cli.app import COMMANDS, load, main
from harness.cli.asked import Asked
from harness.cli.lists import list_
from harness.cli.options import GROUPS
from harness.loop import engine, system
from harness.loop.system import ROOT, names
from harness.policy.types import UserError
from harness.rows import record
from harness.run.spec import Spec
from harness.study import load as studies
from harness.study.study import AA, AA_SEED
from tests.cases import cases
from tests.harness.check.test_check import broken
from tests.harness.run.test_sweep import SYSTEM, files
from traces import readers

MODELS = ("--trace", "sample", "--models", "llama-3.2-1b*2")
COMPARE = ("compare", "--systems", "static,chunked", *MODELS, "--seeds", "2", "--rate-scale", "1,2", "--no-plot")


def bench(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


def ok(*args: object) -> str:
    result = bench(*args)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return results of `COMPARE`."""
    folder = tmp_path_factory.mktemp("results")
    ok(*COMPARE, "-o", folder)
    return folder


@cases(("gpus", "unfit"), [(4, set()), (1, {"aegaeon", "disaggregated", "weaver"})])
def test_all_systems_have_a_row_or_a_reason(gpus: int, unfit: set[str], tmp_path: Path) -> None:
    """Those that need two GPUs of a kind (one that prefills, one for the hot model) say so on one."""
    common = (
        "--trace",
        "sample",
        "--models",
        "llama-3.2-1b*2",
        "--seeds",
        "1",
        "--rate-scale",
        "1",
        "--set",
        "window_s=10",
        "--set",
        "warmup_s=2",
        "--no-plot",
        "-o",
        tmp_path,
    )
    lines = ok("compare", "--systems", "static:equal,all", *common, "--gpus", gpus).splitlines()
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
    args = (
        "compare",
        "--systems",
        "dedicated,static",
        "--models",
        "llama-3.2-1b*2",
        "--trace",
        name,
        "--seeds",
        "1",
        "--rate-scale",
        "1,2",
        "--no-plot",
        "-o",
        tmp_path,
    )
    output = ok(*args)
    assert "2 clients a model, 8 requests, 0.1 s between them" in output
    assert "--scaling clients" in output
    assert "unchecked end to end" not in output  # the default host on h100
    assert "unchecked end to end" in ok(*args, "--gpu", "a100-80g")


# ------------------------------------------------------------------ help


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        command = load(name) if group is main else command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def test_every_promised_command_is_there() -> None:
    asked = "compare, run, list, list traces, trace stats, trace convert, trace make, plot, check, new, explain"
    assert {tuple(words.split()) for words in asked.split(", ")} <= set(commands())


@cases("path", [(), *commands()])
def test_help_shows_an_example_that_parses(path: tuple[str, ...]) -> None:
    text = ok(*path, "--help")
    after = text.partition("Examples:")[2].replace("\\\n", " ")
    examples = re.findall(r"^\s+(bench .*)$", after, re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(example, comments=True)
        words = words[1 : words.index("&&")] if "&&" in words else words[1:]
        command: click.Command = main
        while words and isinstance(command, click.Group) and words[0] in command.commands:
            command = load(words.pop(0)) if command is main else command.commands[words.pop(0)]
        flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        assert {word for word in words if word.startswith("-") and word != "..."} <= flags | {"--help"}


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    for name, (_, line) in COMMANDS.items():
        assert (load(name).name, (load(name).help or "").splitlines()[0]) == (name, line)


def test_the_list_of_commands_cuts_nothing_and_has_the_main_ones_first() -> None:
    text = ok("--help")
    assert all(len(line) <= 60 for _, line in COMMANDS.values())
    listed = text.partition("Main commands:")[2].partition("Exit codes:")[0]
    shown = re.findall(r"^  (\w+) {2,}(\S.*)$", listed, re.MULTILINE)
    assert shown == [(name, line) for name, (_, line) in COMMANDS.items()]
    assert [name for name, _ in shown[:4]] == ["compare", "size", "study", "explain"]


@cases("path", [(name,) for name in COMMANDS if isinstance(load(name), click.Group)])
def test_the_list_of_subcommands_cuts_nothing(path: tuple[str, ...]) -> None:
    group = load(path[0])
    assert isinstance(group, click.Group)
    for name, command in group.commands.items():
        assert re.search(
            rf"^  {name} +{re.escape((command.help or '').splitlines()[0])}$", ok(*path, "--help"), re.MULTILINE
        ), name


@cases("path", [(), *commands()])
def test_help_has_80_columns_however_wide_the_terminal(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("80", "240"):
        monkeypatch.setenv("COLUMNS", columns)
        assert [line for line in ok(*path, "--help").splitlines() if len(line) > 80] == []


def test_long_help_has_each_option_once_in_a_group_and_no_group_names_one_that_is_none() -> None:
    commands = {name: load(name) for name in ("compare", "size", "study", "sensitivity")}
    known = set()
    for name, command in commands.items():
        text = ok(name, "--help")
        options = [
            max(param.opts, key=len) for param in command.params if isinstance(param, click.Option) and not param.hidden
        ]
        assert sorted(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)) == sorted([*options, "--help"])
        assert [line for line in text.splitlines() if line == "Output:"] == ["Output:"]
        known |= {option.lstrip("-") for option in options}
    assert {option for names in GROUPS.values() for option in names} <= known


def test_help_imports_no_command() -> None:
    code = (
        "import sys\nfrom harness.cli.app import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print(*(name for name in sys.modules if name.startswith('harness.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    light = {
        "harness.cli",
        "harness.cli.app",
        "harness.cli.codes",
        "harness.cli.options",
        "harness.cli.values",
        "harness.loop",
        "harness.loop.interrupted",
        "harness.loop.strangers",
        "harness.rows",
        "harness.rows.definitions",
        "harness.target",
    }
    assert set(done.stdout.splitlines()[-1].split()) == light


def test_wrong_words_keep_clicks_lines_and_get_a_suggestion() -> None:
    for args, says in (
        (("compar",), "compare"),
        (("compare", "--sytems", "x"), "--systems"),
        (("list", "trace"), "traces"),
    ):
        result = bench(*args)
        assert result.exit_code == 2
        assert "Usage:" in result.stderr
        assert says in result.stderr


@cases("former", ["reproduce fig7", "fleet fig12", "bridge prism", "regimes prism", "ablate prism"])
def test_a_former_command_names_what_stands_for_it(former: str) -> None:
    result = bench(*former.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: bench {former.split(maxsplit=1)[0]} is bench study ")
    assert result.stderr.count("\n") == 1


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
        (("fig12", "--only", " ; "), '--only " ; " names nothing'),
        (("fig12", "--table", "x.toml"), "cost table x.toml"),
    ):
        result = bench("study", *args, "--dry-run", "-o", tmp_path)
        assert (result.exit_code, says in result.stderr) == (2, True)


@cases(
    ("typed", "offered"),
    [
        ("bench com", "compare"),
        ("bench study prism-b", "prism-bridge"),
        ("bench compare --systems st", "static"),
        ("bench compare --systems static,ch", "static,chunked"),
        ("bench compare --trace aren", "arena-chat"),
        ("bench compare --gpu h1", "h100"),
        ("bench compare --models li", "light8"),
        ("bench check uns", "unshared"),
    ],
)
def test_the_shell_completes(typed: str, offered: str) -> None:
    env = os.environ | {"_BENCH_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code = "from harness.cli.app import main; main(prog_name='bench')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, cwd=ROOT)
    assert f"plain,{offered}" in done.stdout.splitlines()


def test_python_m_harness_is_bench_and_runs_from_any_folder(tmp_path: Path) -> None:
    for args in (["--version"], ["list", "traces"]):
        done = subprocess.run(
            [sys.executable, "-m", "harness", *args],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert re.match(r"bench|\d+ of \d+ traces are here", done.stdout)


# ------------------------------------------------------------------ compare


def test_one_screen_says_all_that_a_reader_must_know(out: Path) -> None:
    lines = ok(*COMPARE, "-o", out).splitlines()
    assert "static" in lines[0]  # the answer
    assert lines[1] == "sample (synthetic) · 2 of 8 models · simulated · SLO 5xP95 · 2 seeds · --all says more"
    assert re.match(r"Table: at [\d.]+ req/s \([12] x the trace's rate, 2 rates ran\)", lines[2])
    assert lines[4].split()[:4] == ["system", "pooled", "worst", "pooled"]
    assert max(map(len, lines[1:7])) <= 100
    assert [line.split()[0] for line in lines[5:7]] == ["static", "chunked"]
    every = ok(*COMPARE, "-o", out, "--all").splitlines()
    facts = (
        "sample",
        "synthetic",
        "2 of 8 models",
        "requests in 60 s",
        "1 x h100",
        "simulated",
        "SLO 5xP95",
        "2 seeds",
    )
    assert [fact for fact in facts if fact not in every[1]] == []
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
    assert ok(*COMPARE, "-o", out, "--answer").splitlines() == ok(*COMPARE, "-o", out).splitlines()[:1]
    assert ok(*COMPARE, "-o", out, "--markdown").startswith("| system | ")
    latex = ok(*COMPARE, "-o", out, "--latex")
    assert latex.splitlines()[0].startswith("% bold: ")
    assert latex.splitlines()[1].startswith(r"\begin{tabular}")
    assert latex.count(r"\\") == 3


def test_controls_are_an_independent_copy_and_the_bounds(tmp_path: Path) -> None:
    answer = json.loads(
        ok(
            "compare",
            "--systems",
            "static",
            *MODELS,
            "--seeds",
            "2",
            "--rate-scale",
            "1",
            "--no-plot",
            "--controls",
            "--json",
            "-o",
            tmp_path,
        )
    )
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


def test_a_dry_run_runs_nothing(tmp_path: Path) -> None:
    text = ok(*COMPARE, "--dry-run", "-o", tmp_path / "out")
    assert [line.split()[:5] for line in text.splitlines()[1:3]] == [
        ["static", "1", "rate_scale", "1,2", "4"],
        ["chunked", "1", "rate_scale", "1,2", "4"],
    ]
    assert "about" in text
    assert not (tmp_path / "out").exists()


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
    command = [
        sys.executable,
        "-m",
        "harness",
        "compare",
        "--systems",
        "static",
        "--trace",
        "arena-chat",
        "--seeds",
        "1",
        "--rate-scale",
        "1",
        "--no-plot",
        "-o",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    first = done.stdout.splitlines()[0]
    assert first.startswith("arena-chat is not here")
    assert "synthetic" in first
    assert "traces/data" in first
    assert re.search(r"^not here: arena-chat, .*mooncake-conversation", ok("list", "traces"), re.MULTILINE)
    listed = ok("list", "traces", "--all")
    assert "arena-chat is not here (arena-like stands in)" in listed
    assert "mooncake-conversation is not here (nothing stands in)" in listed


# ------------------------------------------------------------------ run, explain, list, trace, new


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
    (stored,) = json.loads(pq.read_metadata(sweep / record.SWEEP).metadata[b"judges"])
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
    rules = {
        sweep: json.loads(pq.read_metadata(sweep / record.SWEEP).metadata[b"judges"])[0]["rule"]
        for sweep, _ in crowd.values()
    }
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


def test_list_shows_systems_engines_and_gaps() -> None:
    text = ok("list", "--all")
    _, head, *lines = (re.split("  +", line) for line in text.splitlines())
    engines = engine.names()  # without torch and servers, too
    assert {"attach", "llamacpp", "sglang", "sglang_pdmux", "sim", "torch", "vllm"} <= set(engines)
    most = 2 + len(engines)
    assert head[:most] == ["system", "presets", *engines]
    rows = {line[0]: dict(zip(head[1:most], line[1:most], strict=True)) for line in lines if len(line) > most}
    for name, presets in (("static", "rate, equal, oracle, replicas, production-stack"), ("unshared", "-")):
        assert (rows[name]["presets"], rows[name]["sim"]) == (presets, "yes")
    assert (rows["static"]["llamacpp"], rows["swap"]["llamacpp"], rows["pdmux"]["llamacpp"]) == ("yes", "in part", "no")
    assert (rows["dedicated"]["attach"], rows["static"]["attach"]) == ("yes", "no")
    assert rows["qlm"]["torch"] == "yes"  # it asks for a cost table, and torch has one
    assert "qlm on vllm: no cost table" in text.splitlines()
    assert not [
        line for line in text.splitlines() if " on torch: " in line and not line.startswith(("unshared ", "contiguous"))
    ]
    assert "static on attach: no Limit" in text.splitlines()
    assert "attach needs the URLs of servers that run: --engine attach+urls=http://HOST:PORT" in text.splitlines()
    assert text == ok("list", "systems", "--all")


def test_list_names_systems_engines_models_and_gpus() -> None:
    text = ok("list")
    for name in (*names(), *engine.names(), "heavy8", "h100", *list_.commands):
        assert re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", text), name
    assert re.search(r"^chunked +Chunked prefill \(Sarathi-Serve\)", text, re.MULTILINE)


def test_list_imports_none_of_the_libraries_that_take_a_second() -> None:
    """A list is asked for at a prompt: numpy alone takes as long as all of it."""
    code = (
        "import sys\nfrom harness.cli.app import main\n"
        "try:\n    main(['list'], prog_name='bench')\nexcept SystemExit as done:\n    assert not done.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "static" in done.stdout
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert not loaded & {"numpy", "scipy", "pandas", "numba", "pyarrow", "matplotlib", "torch", "systems"}


def test_list_models_has_bytes_of_sets_and_shapes() -> None:
    rows = {line.split()[0]: line.split() for line in ok("list", "models").splitlines() if line}
    # 8,030,261,248 parameters, and 2 x 32 layers x 8 heads x 128, of 2 bytes each
    assert rows["llama-3-8b"][1:] == ["14.96", "128", "8192", "meta-llama/Meta-Llama-3-8B"]
    assert rows["qwen-3-14b"][-1] == "Qwen/Qwen3-14B"
    assert rows["llama-3.1-8b-tp8"][1:] == ["1", "15.0", "1", "x", "llama-3.1-8b"]


def test_a_file_that_is_not_python_costs_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def (")
    path = system.path
    monkeypatch.setattr(system, "path", lambda name: tmp_path / "mine.py" if name == "static" else path(name))
    assert re.search(r"^static +broken: not Python", ok("list"), re.MULTILINE)


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
    if args[1:] and args[1] not in {"figures", "definitions", "gpus", "hosts", "studies"}:  # which are short
        assert len(ok(*words, "--all").split()) >= sum(len(line.split()) for line in lines)


def test_a_public_log_is_named_with_a_command_that_converts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "of burst" / "BurstGPT_1.csv"
    log.parent.mkdir()
    log.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,API log\n45,GPT-4,417,276,693,API log\n"
    )
    (tmp_path / "notes.csv").write_text("of nobody\n")
    monkeypatch.setenv("TRACES_DIR", str(tmp_path))
    assert "1 public logs lie in TRACES_DIR" in ok("list", "traces").splitlines()[0]
    assert re.search(r"^burstgpt +1 +of burst/BurstGPT_1.csv$", ok("list", "traces"), re.MULTILINE)
    (command,) = [line for line in ok("list", "traces", "--all").splitlines() if line.startswith("bench trace convert")]
    *words, target = shlex.split(command)[1:]
    done = ok(*(word.replace("$TRACES_DIR", str(tmp_path)) for word in words), tmp_path / target)
    assert done.splitlines()[1].startswith("2 requests of 2 models in ")


@cases("name", [name for name in COMMANDS if not isinstance(load(name), click.Group)])
def test_every_command_can_be_made_quiet_or_verbose(name: str) -> None:
    assert {"-q", "-v"} <= {flag for param in load(name).params for flag in param.opts}


@cases("name", ["claims", "compare", "sensitivity", "study", "tune"])
def test_progress_of_a_long_command_can_be_json(name: str) -> None:
    assert "--json-progress" in {flag for param in load(name).params for flag in param.opts}


def test_verbose_tells_when_and_quiet_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    printed = {}
    for level in ("", "quiet", "verbose"):
        token = terminal.LEVEL.set(level)
        try:
            terminal.Terminal().say("compiling")
        finally:
            terminal.LEVEL.reset(token)
        printed[level] = capsys.readouterr().err
    assert (printed[""], printed["quiet"]) == ("compiling\n", "")
    assert re.fullmatch(r" +\d+\.\d s  compiling\n", printed["verbose"])


def test_the_exit_codes_have_a_page_and_stand_in_the_help() -> None:
    assert (ROOT / "docs/exit-codes.md").read_text("utf-8") == codes.page(), "make docs writes it anew"
    told = re.findall(r"^  (\d+) {2,}(\S.*)$", ok("--help").partition("Exit codes:")[2], re.MULTILINE)
    assert told == [(str(code.value), when) for code, when in codes.MEANS.items()]
    assert set(codes.MEANS) == set(codes.Code)
    sources = [path for path in (ROOT / "harness").rglob("*.py") if "codes" not in path.name]
    literal = re.compile(r"(sys\.exit|Exit)\(\d|code = \d")
    assert [path.name for path in sources if literal.search(path.read_text("utf-8"))] == []


def test_trace_stats_and_make(tmp_path: Path) -> None:
    first, second = tmp_path / "one.parquet", tmp_path / "two.parquet"
    for path in (first, second):
        ok("trace", "make", "sample", "--seed", "5", "-o", path)
    assert first.read_bytes() == second.read_bytes()
    facts = json.loads(ok("trace", "stats", first, "--json"))
    assert (facts["requests"], facts["models"], facts["tier"]) == (200, 8, "synthetic")
    assert "iat_cv" in ok("trace", "stats", first)


def test_trace_convert_reads_a_released_format(tmp_path: Path) -> None:
    source, path = tmp_path / "BurstGPT_1.csv", tmp_path / "b.parquet"
    lines = ["5,ChatGPT,472,18,490,API log", "45,GPT-4,300,0,300,API log", "118,GPT-4,417,276,693,API log"]
    source.write_text(
        "\n".join(["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *lines]) + "\n"
    )
    convert = ("trace", "convert", "--from", "burstgpt", source, "-o", path)
    report, counted, *_ = ok(*convert, "--span-s", "200").splitlines()
    assert report == "BurstGPT_1.csv read as a log of burstgpt; left out: 1 without output tokens"
    assert counted == "2 requests of 2 models in 200 s, 0.01 requests/s"
    refused = bench(*convert, "--column", "model=Model")
    assert (refused.exit_code, refused.stderr) == (2, "error: --from burstgpt knows its columns: give no --column\n")
    listed = ok("list", "traces", "--all")
    assert all(f"\n{name} " in listed for name in readers.names())


def test_a_deprecated_option_works_and_says_what_replaces_it(tmp_path: Path) -> None:
    source = tmp_path / "log.csv"
    source.write_text("arrival_s,model,prompt_tokens,output_tokens\n0,a,3,4\n1,a,3,0\n2,b,5,6\n")
    convert = ("trace", "convert", source, "-o", tmp_path / "mine.parquet")
    made, new = bench(*convert, "--empty", "drop"), bench(*convert, "--drop-bad")
    assert (made.exit_code, made.stdout) == (0, new.stdout)
    assert made.stderr == "--empty is deprecated, and 0.3.0 removes it: --drop-bad does what --empty drop did\n"
    assert new.stderr == ""
    assert bench(*convert, "--empty", "error").exit_code == bench(*convert).exit_code == 2
    assert "--empty" not in ok("trace", "convert", "--help")


def test_trace_convert_makes_what_compare_takes(tmp_path: Path) -> None:
    source, path = tmp_path / "log.csv", tmp_path / "mine.parquet"
    rows = [f"{i * 500},m{i % 2},{10 + i},{20 + i}" for i in range(40)]
    source.write_text("t,who,n_in,n_out\n" + "\n".join(rows) + "\n")
    columns = [
        f"{ours}={theirs}"
        for ours, theirs in (
            ("arrival_s", "t"),
            ("model", "who"),
            ("prompt_tokens", "n_in"),
            ("output_tokens", "n_out"),
        )
    ]
    named = [word for column in columns for word in ("--column", column)]
    assert (
        ok("trace", "convert", source, "-o", path, *named, "--time-unit", "ms")
        .splitlines()[1]
        .startswith("40 requests of 2 models in 20 s")
    )
    text = ok(
        "compare",
        "--systems",
        "static",
        "--trace",
        path,
        "--models",
        "llama-3.2-1b*2",
        "--rate-scale",
        "1",
        "--seeds",
        "1",
        "--no-plot",
        "--all",
        "-o",
        tmp_path / "out",
    )
    assert "2 of 2 models" in text
    assert "40 requests in 20 s" in text


def test_new_writes_a_system_that_can_be_compared_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    ok("new", path)
    written = path.read_text()
    result = CliRunner().invoke(main, ["new", str(path)])
    assert result.exit_code == 2
    assert path.read_text() == written
    text = ok(
        "compare",
        "--systems",
        f"static,{path}",
        *MODELS,
        "--rate-scale",
        "1",
        "--seeds",
        "1",
        "--no-plot",
        "-o",
        tmp_path / "out",
    )
    assert re.search(r"^mine \(unchecked\) +100\.0", text, re.MULTILINE)
    assert text.startswith("mine meets 100.0 % of SLOs at ")  # it is a file's, though not the first
    assert ok("check", path).splitlines()[-1] == f"next: bench compare --systems {path},static"
    text = ok(
        "compare",
        "--systems",
        f"static,{path}",
        *MODELS,
        "--rate-scale",
        "1",
        "--seeds",
        "1",
        "--no-plot",
        "-o",
        tmp_path / "out",
    )
    assert re.search(r"^mine +100\.0", text, re.MULTILINE)


def test_check_passes_what_new_wrote_and_names_what_is_broken(tmp_path: Path) -> None:
    ok("new", tmp_path / "mine.py")
    assert "all laws hold" in ok("check", tmp_path / "mine.py")
    assert ok("check", "static").splitlines()[-1] == "next: bench compare --systems static,elastic"
    result = bench("check", broken("loses_request", tmp_path))
    assert result.exit_code == 1
    words = shlex.split(re.findall(r"repeat: bench (.*)", result.stdout)[0])
    assert bench(*words).exit_code == 1


# ------------------------------------------------------------------ the table


def test_labels_carry_presets_fields_and_other_gpu_counts(tmp_path: Path) -> None:
    text = ok(
        "compare",
        "--systems",
        "dedicated,static:equal,chunked+tau=256",
        *MODELS,
        "--gpus",
        "1",
        "--seeds",
        "1",
        "--rate-scale",
        "1",
        "--no-plot",
        "-o",
        tmp_path,
    )
    for label in ("dedicated (2 GPUs)", "static:equal", "chunked+tau=256"):
        assert f"\n{label}  " in text
    assert Spec("static", preset="equal").label == "static:equal"
