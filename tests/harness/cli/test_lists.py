"""`bench list`, `trace`, `new` and `check`: what there is to choose from, and what users add to it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from harness.cli.lists import list_
from harness.loop import engine, system
from harness.loop.system import names
from tests.bench import bench, ok, python
from tests.harness.check.test_check import broken
from tests.harness.cli.test_cli import MODELS


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
    done = python("-c", code)
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
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    source.write_text("\n".join([head, *lines]) + "\n")
    convert = ("trace", "convert", "--from", "burstgpt", source, "-o", path)
    report, counted, *_ = ok(*convert, "--span-s", "200").splitlines()
    assert report == "BurstGPT_1.csv read as a log of burstgpt; left out: 1 without output tokens"
    assert counted == "2 requests of 2 models in 200 s, 0.01 requests/s"
    refused = bench(*convert, "--column", "model=Model")
    assert (refused.exit_code, refused.stderr) == (2, "error: --from burstgpt knows its columns: give no --column\n")


def test_trace_convert_makes_what_compare_takes(tmp_path: Path) -> None:
    source, path = tmp_path / "log.csv", tmp_path / "mine.parquet"
    rows = [f"{i * 500},m{i % 2},{10 + i},{20 + i}" for i in range(40)]
    source.write_text("t,who,n_in,n_out\n" + "\n".join(rows) + "\n")
    columns = ("arrival_s=t", "model=who", "prompt_tokens=n_in", "output_tokens=n_out")
    named = [word for column in columns for word in ("--column", column)]
    lines = ok("trace", "convert", source, "-o", path, *named, "--time-unit", "ms").splitlines()
    assert lines[1].startswith("40 requests of 2 models in 20 s")
    common = "--models llama-3.2-1b*2 --rate-scale 1 --seeds 1 --no-plot --all".split()
    text = ok("compare", "--systems", "static", "--trace", path, *common, "-o", tmp_path / "out")
    assert "2 of 2 models" in text
    assert "40 requests in 20 s" in text


def test_new_writes_a_system_that_can_be_compared_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    ok("new", path)
    written = path.read_text()
    assert bench("new", path).exit_code == 2
    assert path.read_text() == written
    common = (*MODELS, "--rate-scale", "1", "--seeds", "1", "--no-plot", "-o", tmp_path / "out")
    text = ok("compare", "--systems", f"static,{path}", *common)
    assert re.search(r"^mine \(unchecked\) +100\.0", text, re.MULTILINE)
    assert text.startswith("mine meets 100.0 % of SLOs at ")  # it is a file's, though not the first
    assert ok("check", path).splitlines()[-1] == f"next: bench compare --systems {path},static"
    assert re.search(r"^mine +100\.0", ok("compare", "--systems", f"static,{path}", *common), re.MULTILINE)


def test_check_passes_what_new_wrote_and_names_what_is_broken(tmp_path: Path) -> None:
    ok("new", tmp_path / "mine.py")
    assert "all laws hold" in ok("check", tmp_path / "mine.py")
    assert ok("check", "static").splitlines()[-1] == "next: bench compare --systems static,elastic"
    result = bench("check", broken("loses_request", tmp_path))
    assert result.exit_code == 1
    words = shlex.split(re.findall(r"repeat: bench (.*)", result.stdout)[0])
    assert bench(*words).exit_code == 1
