"""Shards make the bytes of the study that one machine makes, in one folder or in several that are copied together."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest

from harness.loop.interrupted import Terminated, terminable
from harness.loop.system import ROOT
from harness.policy.types import UserError
from harness.rows import record
from harness.run import shard, sweep
from harness.run.shard import Shard
from harness.run.spec import Spec
from harness.study import load, shards, tune
from harness.study.measure import measure
from tests.bench import bench, ok
from tests.cases import cases

PAPERS = {"side.json", "receipt.json", "figures.json", record.COMMAND}  # files that hold times, or who made them

SEARCHED = """
systems = ["static:equal", "elastic"]
slo = "P95"
sample = { rule = "bisect", points = 3 }
quick = { seeds = 2, window_s = 20.0, budget = 2000 }
spec = { trace = "hyperbolic-like+span_s=60", models = "llama-3.2-1b*3", gpus = 1, slo_scale = 5.0 }
condition = [
  { name = "rates", at = [1.0, 4.0] },
  { name = "scales", along = "slo_scale", at = [2.0, 5.0], spec = { rate_scale = "held" } },
  { name = "other lengths", at = [1.0, 4.0], spec = { trace = "hyperbolic-like+span_s=61" } },
  { name = "other again", at = [1.0, 4.0], spec = { trace = "hyperbolic-like+span_s=62" } },
]
"""

FIXED = """
systems = ["static:equal", "elastic"]
slo = "P95"
sample = { rule = "fixed" }
quick = { seeds = 2, window_s = 20.0 }
spec = { trace = "hyperbolic-like+span_s=60", models = "llama-3.2-1b*3", gpus = 1, slo_scale = 5.0 }
condition = [{ name = "rates", at = [1.0, 2.0, 4.0] }]
"""


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in PAPERS
    }


def stored(folder: Path, text: str) -> Path:
    path = folder / "mini.toml"
    path.write_text(text)
    return path


@pytest.mark.full
@cases(("text", "of_all"), [(SEARCHED, 3), (FIXED, 0)])
def test_shards_make_the_bytes_of_one_machine(text: str, of_all: int, tmp_path: Path) -> None:
    study = load.study(str(stored(tmp_path, text)))
    whole = measure(study, tmp_path / "whole", workers=1)
    pool = measure(study, tmp_path / "pool", workers=2)
    assert pool.table == whole.table
    assert files(tmp_path / "pool") == files(tmp_path / "whole")
    for n in (2, 7):
        parts = [
            shards.measure_shard(study, tmp_path / f"{n}" / f"{k}", Shard(k, n), workers=1) for k in range(1, n + 1)
        ]
        assert sum(part.searches for part in parts) == of_all
        merged = tmp_path / f"merged-{n}"
        for k in range(1, n + 1):
            shutil.copytree(tmp_path / f"{n}" / f"{k}", merged, dirs_exist_ok=True) if parts[k - 1].runs else None
        with sweep.stored_only():
            collected = measure(study, merged, workers=1)
        assert collected.table == whole.table
        assert files(merged) == files(tmp_path / "whole")


def test_each_shard_of_a_fixed_grid_runs_a_part_of_it(tmp_path: Path) -> None:
    study = load.study(str(stored(tmp_path, FIXED)))
    runs = [shards.measure_shard(study, tmp_path / "one", Shard(k, 5), workers=1).runs for k in range(1, 6)]
    assert sum(runs) == 2 * 2 * 3
    assert max(runs) - min(runs) <= 1


@cases("of", [1, 2, 7, 40])
def test_shards_share_items_without_rest(of: int) -> None:
    items = [f"item {k}" for k in range(23)]
    parts = [Shard(k, of).part(items, str) for k in range(1, of + 1)]
    assert sorted(chain.from_iterable(parts)) == sorted(items)
    assert {len(part) for part in parts} <= {23 // of, 23 // of + 1}
    assert [Shard(1, of).part(reversed(items), str)] == parts[:1]  # whatever the order they come in


@cases("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/3", "1/3/5", ""])
def test_what_is_no_shard_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match="is not I/N"):
        shard.read(text)
    assert shard.read("3/16") == Shard(3, 16)


@pytest.mark.slow
def test_collect_and_status_say_what_is_missing(tmp_path: Path) -> None:
    path, out = stored(tmp_path, SEARCHED), tmp_path / "out"
    empty = bench("study", path, "--collect", "-o", out)
    assert empty.exit_code == 75
    assert "0 of 3 searches are done, 0 runs are stored" in empty.stderr
    assert f"what makes them: bench study {path} -o {out}" in empty.stderr
    assert not out.exists()
    assert "shard 1/3: 1 of 3 searches" in ok("study", path, "--shard", "1/3", "--workers", "1", "-o", out)
    told = ok("study", path, "--status", out)
    assert told.startswith("1 of 3 searches are done")
    assert len(re.findall(r" done$", told, re.MULTILINE)) == 1
    for k in (2, 3):
        ok("study", path, f"--shard={k}/3", "--workers", "1", "-o", out)
    before = files(out)
    assert "static:equal" in ok("study", path, "--collect", "--no-plot", "-o", out)
    assert before.items() <= files(out).items()


def test_a_tuning_goes_by_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "WORLDS", (("hyperbolic-like+span_s=60", "shuffled"),))
    monkeypatch.setattr(tune, "RATE_SCALES", (1.0,))
    monkeypatch.setattr(tune, "SEEDS", tune.SEEDS[:1])
    monkeypatch.setattr(tune, "BASE", Spec("", models="llama-3.2-1b*3"))
    names = ["prism", "elastic"]
    parts = [tune.tune(names, tmp_path, draws=2, workers=1, shard=Shard(k, 2)) for k in (1, 2)]
    assert sorted(tuned.system for part in parts for tuned in part) == sorted(names)
    with sweep.stored_only():
        assert [tuned.system for tuned in tune.tune(names, tmp_path, draws=2, workers=1)] == names
        with pytest.raises(sweep.Missing, match="are missing"):
            tune.tune(names, tmp_path / "nowhere", draws=2, workers=1)


# ------------------------------------------------------------------ as batch systems run it

LONG = SEARCHED.replace("seeds = 2", "seeds = 40")


def test_a_second_sigterm_disturbs_no_closing() -> None:
    """A worker hears a batch system's and then its parent's."""
    before, closed = signal.getsignal(signal.SIGTERM), list[int]()

    def ended() -> None:
        with terminable():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                closed.append(1)

    with pytest.raises(Terminated):
        ended()
    assert closed == [1]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
@cases("workers", [1, 2])
def test_sigterm_in_a_shard_leaves_no_part(workers: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = f"-m harness study {stored(tmp_path, LONG)} --shard 1/2 --workers {workers} -o {out}"
    command, pipe = [sys.executable, *words.split()], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        while len(list(out.glob("*/" + record.ROWS))) <= 12:  # the test's limit ends it
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)  # as Slurm does: to all processes of the job
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "finished runs are kept" in err
    assert not list(out.rglob("*.part"))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_files_of_batch_systems_make_the_study(tmp_path: Path) -> None:
    path = stored(tmp_path, FIXED)
    whole = measure(load.study(str(path)), tmp_path / "whole", workers=1)
    python = f"{sys.executable} -m harness"
    (tmp_path / "bench").write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    (tmp_path / "bench").chmod(0o755)
    usual = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def sh(script: str, **env: str) -> None:
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=usual | env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    cluster = ROOT / "docs/cluster"
    job = re.search(r"args: \['(.*)'\]", (cluster / "job.yaml").read_text())
    matrix = re.search(r"run: (.*--shard.*)", (cluster / "matrix.yml").read_text())
    assert job is not None
    assert matrix is not None
    for k in (1, 2):
        task = {"SLURM_ARRAY_TASK_ID": str(k), "SLURM_ARRAY_TASK_COUNT": "2"}
        sh((cluster / "slurm.sh").read_text(), STUDY=str(path), OUT="slurm", **task)
    for k in range(16):
        sh(job[1].replace("fig7 ", f"{path} ").replace("/results/fig7", "job"), JOB_COMPLETION_INDEX=str(k))
    for k in range(1, 9):
        command = matrix[1].replace("${{ matrix.shard }}", str(k))
        sh(command.replace(".venv/bin/bench study fig7", f"bench study {path}"))
    for folder in ("slurm", "job", "runs"):
        with sweep.stored_only():
            assert measure(load.study(str(path)), tmp_path / folder, workers=1).table == whole.table
