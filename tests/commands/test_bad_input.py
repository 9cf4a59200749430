"""A user's mistake is one line with exit code 2 and leaves nothing behind; a bug keeps its traceback, exits 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from harness.loop.system import ROOT
from tests.bench import bench, mistake, python
from tests.cases import cases
from tests.harness.run.test_sweep import SYSTEM, files
from traces import schema

COMPARE = tuple(
    ("compare --systems static --trace sample --models llama-3.2-1b*2 --seeds 1 --rate-scale 1 --no-plot").split()
)


def test_several_counts_of_gpus_are_a_question_of_size() -> None:
    words = ("--systems=static,prism", "--models", "my set.toml", "--seeds", "2")
    answer = "bench size --models 'my set.toml' --systems static,prism --gpus 4-16\n"
    for counts in ("4,6,16", "16,4", "4-16"):
        mistake(bench("compare", *words, "--gpus", counts), f'--gpus "{counts}" is several', answer)
    done = bench("compare", *words, "--gpus", "four")
    assert (done.exit_code, "'four' is not a whole number" in done.stderr) == (2, True)


# ------------------------------------------------------------------ traces

HEADER = "time,who,n_in,n_out\n"
COLUMNS = tuple(
    ("--column arrival_s=time --column model=who --column prompt_tokens=n_in --column output_tokens=n_out").split()
)


@cases(
    ("row", "says"),
    [
        ("-0.5,a,3,4", "time"),
        ("0.5,a,-3,4", "n_in"),
        ("0.5,a,3,x", '"x"'),
        ("0.5,a,3.5,4", "n_in"),
        ("0.5,a,,4", "n_in"),
    ],
)
def test_a_malformed_row_is_named(row: str, says: str, tmp_path: Path) -> None:
    path, out = tmp_path / "my.csv", tmp_path / "out.parquet"
    path.write_text(f"{HEADER}0,a,3,4\n{row}\n")
    mistake(bench("trace", "convert", path, "-o", out, *COLUMNS), f"{path}:3", says)
    mistake(bench("trace", "convert", path, "-o", out, *COLUMNS, "--column", "none"), '"none" is not KEY=VALUE')
    assert list(tmp_path.iterdir()) == [path]


def table(**columns: object) -> pa.Table:
    rows = {"request_id": [0, 1], "arrival_s": [0.0, 1.0], "model": ["a", "b"]}
    rows |= {"prompt_tokens": [3, 4], "output_tokens": [5, 6]}
    return schema.table(rows | columns, {"name": "mine", "tier": "replayed", "span_s": 2.0})


@cases(
    ("columns", "says"),
    [
        ({"arrival_s": [0.0, float("nan")]}, "arrival_s"),
        ({"output_tokens": [5, 0]}, "output_tokens"),
        ({"prompt_tokens": [3, 200_000]}, "exceed"),
        ({"request_id": [7, 7]}, "request_id"),
        ({"arrival_s": [0.0, 3.0]}, "span_s"),
    ],
)
def test_a_canonical_file_is_checked_again(columns: dict[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.parquet"
    schema.write(table(**columns), path)
    mistake(bench(*COMPARE, "--trace", path, "-o", tmp_path / "out"), path.name, says)
    assert files(tmp_path / "out") == {}


def test_a_cut_or_foreign_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.parquet"
    schema.write(table(), path)
    whole = path.read_bytes()
    for harm in (whole[:-9], b"", b"PAR1 and nothing else"):
        path.write_bytes(harm)
        mistake(bench("trace", "stats", path), path)


# ------------------------------------------------------------------ names and numbers


@cases(
    ("args", "says"),
    [
        (("--systems", "statik"), 'no system "statik"; did you mean static? (bench list)'),
        (("--systems", "ideal"), 'system "ideal" is called unshared'),
        (("--systems", "static,static"), '"static" is listed twice'),
        (("--systems", "static:equl"), "did you mean equal?"),
        (("--systems", "chunked+tua=3"), "did you mean tau?"),
        (("--trace", "arena-chad"), "did you mean arena-chat?"),
        (("--models", "heavy9"), "did you mean heavy8?"),
        (("--models", "llama-3.2-1b*0"), '"0" is not a count of models'),
        (("--models", "llama-3.2-1b*9"), "8 models"),
        (
            ("--models", "llama-3.3-70b", "--gpu", "a100-40g"),
            "llama-3.3-70b/1 needs 132.7 GiB on each GPU, a100-40g has",
        ),
        (("--gpu", "h10"), "did you mean h100?"),
        (("--gpus", "0"), "gpus is 0"),
        (("--engine", "sin"), "did you mean sim?"),
        (("--host", "vlm-graph"), "vllm-graph"),
        (("--rate-scale", "0"), "--rate-scale 0"),
        (("--rate-scale", "nan"), "--rate-scale nan"),
        (("--rate-scale", "fast"), '"fast" is not a list of numbers'),
        (("--slo-scale", "0"), "SLO scale is 0"),
        (("--slo", "released"), "released"),
        (("--set", "chunk_token=3"), "did you mean chunk_tokens?"),
        (("--set", "chunk_tokens"), "KEY=VALUE"),
    ],
)
def test_a_wrong_name_or_number_is_one_line(args: tuple[str, ...], says: str, tmp_path: Path) -> None:
    mistake(bench(*COMPARE, *args, "-o", tmp_path / "out"), says)
    assert files(tmp_path / "out") == {}


@cases(
    ("text", "says"),
    [
        ("system = 'statik'", "did you mean static?"),
        ("system = 'static'\ngpu = 'h10'", "did you mean h100?"),
        ("system = 'static'\n[slo_s]\n'nobody' = [1, 1]\n", "nobody"),
    ],
)
def test_a_wrong_spec_names_its_file(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    mistake(bench("run", path, "-o", tmp_path / "out"), path, says)
    assert files(tmp_path / "out") == {}


@cases(
    "args",
    [
        ("run", "none.toml"),
        ("trace", "stats", "none"),
        ("trace", "make", "smaple", "-o", "x.parquet"),
        ("new", "not a name.py"),
    ],
)
def test_what_is_not_there_is_one_line(args: tuple[str, ...]) -> None:
    mistake(bench(*args), args[-1] if "-o" not in args else "")


def test_a_system_that_is_not_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    for text, says in (("def f(:", ":1: invalid syntax"), ("x = 1", "expected one class with a method `on`, found 0")):
        path.write_text(text)
        mistake(bench(*COMPARE, "--systems", path), path, says)


# ------------------------------------------------------------------ disks


def test_results_in_the_way_of_a_file_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    for out in (path, path / "below", Path("/proc/none")):
        mistake(bench(*COMPARE, "-o", out), out, "cannot write results")
    assert path.read_text() == "mine"


LIMITED = """
import resource, sys
from harness.cli.app import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
main()
"""


def limited(size: int, *args: object) -> subprocess.CompletedProcess[str]:
    return python("-c", LIMITED, size, *args, check=False)


@pytest.mark.full
@cases("workers", [1, 2])
def test_a_full_disk_is_one_line_and_nothing_half_written(workers: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert bench(*COMPARE, "-o", tmp_path / "other").exit_code == 0  # so that the compiler has nothing left to write
    done = limited(2000, *COMPARE, "-o", out, "--workers", workers, "--quiet")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {out}/dedicated-")
    assert "File too large" in done.stderr
    assert list(out.rglob("*")) == []
    assert bench(*COMPARE, "-o", out).exit_code == 0


# ------------------------------------------------------------------ what is no mistake


def test_a_pair_that_is_skipped_is_a_result(tmp_path: Path) -> None:
    path = tmp_path / "turns.py"
    path.write_text(SYSTEM % ', "Load.way:tape"')
    result = bench(*COMPARE, "--systems", f"static,{path}", "-o", tmp_path / "out")
    assert result.exit_code == 0
    assert "skipped: turns, Load.way:tape" in result.stdout


# ------------------------------------------------------------------ policies


def test_a_bug_of_the_bench_shows_its_traceback(tmp_path: Path) -> None:
    code = (
        "from harness.cli.app import main\nfrom harness.engines.sim.engine import Sim\n"
        "def view(self): raise ValueError('planted')\nSim.view = view\nmain()\n"
    )
    done = python("-c", code, *COMPARE, "--slo", "absolute:ttft=1,tpot=1", "-o", tmp_path / "out", check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ValueError: planted\n")


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    command = f"{sys.executable} -m harness list traces | true"
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert done.stderr == ""


# ------------------------------------------------------------------ odd numbers and names


def test_odd_numbers_of_a_price_a_growth_and_a_node_are_one_line(tmp_path: Path) -> None:
    for count in ("²", "٢", "0", "9" * 30, "1" * 5000, "-1", "4097"):
        mistake(bench("price", f"llama-3.1-8b@{count}xh100"))
    size = (*"size --trace sample --models llama-3.2-1b --systems static --gpus 1-1 -o".split(), tmp_path)
    for grow in ("1e-300", "1e-3", "1e300", "nan", "inf"):
        mistake(bench(*size, "--grow", grow), "--grow", "is not a number from 0.01 to 100")
    mistake(bench(*COMPARE, "--set", "node_gpus=9223372036854775807", "-o", tmp_path), "node_gpus")


def test_a_name_with_dollar_signs_is_drawn_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "set.toml").write_text('[[model]]\nname = "a$x_{$"\nshape = "llama-3.2-1b"\n')
    (tmp_path / "t$^$.csv").write_text(
        "time,model,prompt_tokens,output_tokens\n" + "".join(f"{k / 4},a$x_{{$,100,20\n" for k in range(100))
    )
    (tmp_path / "mine$_{$.py").write_text((ROOT / "tests/harness/check/sound/admits_each.py").read_text("utf-8"))
    given = ("--trace", tmp_path / "t$^$.csv", "--models", tmp_path / "set.toml", "-o", tmp_path / "out")
    asked = ("--systems", f"{tmp_path}/mine$_{{$.py,static:equal", *given)
    done = bench(*"compare --seeds 1 --rate-scale 1 --slo absolute:ttft=1,tpot=1".split(), *asked)
    assert done.exit_code == 0, done.output
    (sweep,) = (path.parent for path in (tmp_path / "out").glob("*/attainment.parquet"))
    assert bench("plot", sweep, "--rename", "static:equal=$x_{$", "-o", tmp_path / "figure").exit_code == 0
    assert bench("trace", "stats", tmp_path / "t$^$.csv", "-o", tmp_path / "t.pdf").exit_code == 0
    assert (tmp_path / "figure.png").stat().st_size > 10_000
