"""The stages with which `make gpu` ends: what they import, how they go on, and what is made of them elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.calibrate import tables
from harness.calibrate import torch as source
from harness.calibrate.rows import RAW, Journal, append, lines, measured
from harness.engines.costs import quantities, shapes
from harness.engines.machine import Config
from harness.engines.torch import kind
from harness.engines.wallclock import machine_facts
from harness.loop.system import ROOT
from harness.policy.types import GIB, UserError
from harness.rows import record
from harness.validate import torch_runs, torch_scenarios, torch_stages
from harness.validate.torch_stages import JOURNAL, PLAN, REQUESTS, Run, conduct, runs, states, workloads
from tests.harness.engines.torch.test_table import journal as timed
from workloads.models import shape

# What stands beside torch and NumPy in an environment of these two alone is torch's own.
ALONE = """
import sys
OURS = {"harness", "systems", "probe", "workloads", "traces"}
class Alone:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names | OURS | {"numpy", "torch"}:
            raise ModuleNotFoundError(f"{name} is not there")
sys.meta_path.insert(0, Alone())
from harness.loop import system
from harness.policy import fields
from harness.validate import torch_stages
from harness.engines.torch import links, nursery
from harness.engines.torch.costs import numbers
numbers()
torch_stages.workloads(torch_stages.PLAN, "cpu")[0].configured("h200")
for text in torch_stages.SEVEN:
    system.find(fields.asked(text).name)
"""


def test_the_stages_import_numpy_alone() -> None:
    run = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stderr == ""


def test_the_plan_has_the_stages_in_order_for_both_kinds_of_devices() -> None:
    for device in ("cpu", "cuda"):
        plan = workloads(PLAN, device)
        order = list(dict.fromkeys(run.stage for run in runs(plan, device)))
        assert order == ["correctness", "calibrate", "systems", "validate", "chats", "more chats"]
        (minute, *others) = plan
        assert minute.end_s - torch_runs.DRAIN_S == 60.0
        assert {run.name.partition(", ")[0] for run in runs(plan, device) if run.stage == "systems"} == {
            *torch_stages.SEVEN
        }
        assert [workload.stage for workload in others] == ["validate"] * 2 + ["chats"] * 2 + ["more chats"] * 2
        for workload in plan:
            systems = torch_runs.ONE_CARD.get(workload.stage)
            longest = 4096 if systems else 512
            if systems:
                assert workload.config["gpus"] == 1
                assert (workload.requests().prompt_tokens > 2000).any()
            jobs, config = workload.requests(), workload.configured("h200")
            assert jobs.models == tuple(model.name for model in config.models)
            assert (jobs.arrival_s >= config.start_s).all()
            assert (jobs.prompt_tokens + jobs.output_tokens <= longest).all()
            assert set(config.plan) == set(jobs.models)
            assert tuple(workload.specs) == (systems or torch_stages.SEVEN)
    assert len(list(runs(workloads(PLAN, "cuda"), "cuda"))) > len(list(runs(workloads(PLAN, "cpu"), "cpu")))  # bfloat16
    with pytest.raises(UserError, match="has nothing for DEVICE=tpu"):
        workloads(PLAN, "tpu")


@pytest.mark.slow
def test_the_plan_is_what_its_specs_say(tmp_path: Path) -> None:
    torch_runs.write(tmp_path / "plan.jsonl")
    assert (tmp_path / "plan.jsonl").read_text() == PLAN.read_text()


@pytest.mark.slow
def test_a_plan_of_one_device_has_room_for_every_model(tmp_path: Path) -> None:
    torch_runs.write(tmp_path / "plan.jsonl", devices=1, minute_s=4.0, window_s=4.0)
    for alone, halves in zip(workloads(tmp_path / "plan.jsonl", "cuda"), workloads(PLAN, "cuda"), strict=True):
        config = alone.configured("h200")
        assert (config.gpus, halves.configured("h200").gpus) == (1, 1 if halves.stage in torch_runs.ONE_CARD else 2)
        assert config.pool_bytes is not None
        assert config.pool_bytes > sum(shapes.weight_bytes(model.shape) for model in config.models)


def test_a_second_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, output, first = list[str](), list[str](), True

    def child(run: Run, folder: Path, *_: Any) -> str | None:
        made.append(run.text)
        if run.name.startswith("weaver"):
            return "failed: signal 9"
        if run.name.startswith("qlm") and (run.stage, first) != ("systems", False):
            return "late: it did not end within 3 s"
        append(folder / JOURNAL, {"stage": run.stage, "run": run.name, "state": "done"})
        return None

    monkeypatch.setattr(torch_stages, "child", child)
    every = [run.text for run in runs(workloads(PLAN, "cpu"), "cpu")]
    begun = conduct(
        tmp_path, PLAN, "cpu", 1.0, (), output.append
    )  # a minute is less than a run may take: it is cut off
    assert made == every[: len(made)]
    assert made[-1].startswith("systems: qlm")
    assert begun["left"] == len(every) - len(made) + 1
    made.clear()
    first = False
    last = conduct(tmp_path, PLAN, "cpu", 600.0, (), output.append)
    assert made == every[every.index(made[0]) :]
    assert made[0].startswith("systems: qlm")  # it was cut off, not late
    assert last == {"done": len(every) - 7, "failed": 3, "late": 4}
    made.clear()
    conduct(tmp_path, PLAN, "cpu", 600.0, ["validate: weaver, 1 req/s a model"], output.append)
    assert made == ["validate: weaver, 1 req/s a model"]
    assert sum("failed on an earlier call (--again '" in line for line in output) >= 2
    assert (tmp_path / REQUESTS).read_text() == PLAN.read_text()
    (tmp_path / REQUESTS).write_text("{}\n")
    with pytest.raises(UserError, match="was begun with other requests"):
        conduct(tmp_path, PLAN, "cpu", 1.0, (), output.append)


def test_a_line_that_was_cut_off_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    append(path, {"stage": "a", "run": "1", "state": "done"})
    path.write_bytes(path.read_bytes() + b'{"stage": "a", "ru')
    assert len(lines(path)) == 1
    append(path, {"stage": "a", "run": "2", "state": "late"})
    assert states(lines(path)) == {("a", "1"): "done", ("a", "2"): "late"}


def test_a_run_that_ends_badly_says_how(tmp_path: Path) -> None:
    run = Run("systems", "nothing, at all")
    why = torch_stages.child(run, tmp_path, tmp_path / "no.jsonl", "cpu", 300.0)
    assert why is not None
    assert why.startswith("failed: exit code 2: error: no plan ")


def stored(folder: Path, names: Sequence[str], card: dict[str, Any] | None) -> None:
    """Write what the stage calibrate leaves."""
    rows = timed(names)
    if card is not None:
        gbps = card["gbps"]["h2d"]
        kept = [row for row in rows if row.at.get("way") not in {"cold", "reinit"}]
        rows = [row._replace(at={**row.at, "gbps": gbps}) if row.quantity == "load" else row for row in kept]
    Journal(folder / RAW).add(*rows)
    about = {"device": "cpu", "gpu": "h100", "on": "cores"} | (card or {})
    shapes = [list(shape(name)) for name in names]
    about |= {"pool_bytes": 30 * GIB, "shapes": shapes, "measured_on": machine_facts()}
    (folder / source.ABOUT).write_text(json.dumps(about))


def written(folder: Path) -> tuple[Path, list[str]]:
    """Write the table of a folder; return its path, and the notes."""
    table = source.staged(folder)
    path = folder / f"{table.name}.toml"
    path.write_text(tables.dumps(table.file))
    tables.check(path, table.file)
    return path, list(table.notes(path))


def test_a_table_is_made_of_what_was_measured_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    stored(tmp_path / "cpu", ["llama-3.2-1b"], None)
    path, notes = written(tmp_path / "cpu")
    assert path.name == "torch-cpu.toml"
    assert any("a load over a decode step is" in note for note in notes)
    (tmp_path / "card").mkdir()
    known = quantities.gpu("h200")
    gbps = {"h2d": known.h2d / 2e9, "d2h": known.d2h / 2e9, "peer": known.nvlink / 1e9, "disk": known.disk / 2e9}
    half = {"device": "cuda", "gpu": "h200", "on": "1 part of 2, 64 SMs, of NVIDIA H200", "sms": 64, "gbps": gbps}
    stored(tmp_path / "card", ["llama-3.2-1b"], half)
    card = Journal(tmp_path / "card" / RAW)
    for what, at, facts, seconds in (
        ("apart", {"servers": 2, "seqs": 0}, {"alone_s": 0.01}, 0.015),
        ("apart", {"servers": 2, "seqs": 8}, {"alone_s": 0.01}, 0.012),
        ("kernels", {"phase": "decode", "seqs": 1, "ctx": 128}, {"step_s": 0.01}, 0.005),
        ("kernels", {"phase": "decode", "seqs": 8, "ctx": 128}, {"step_s": 0.01}, 0.007),
    ):
        card.add(measured(what, {"shape": "llama-3.2-1b", **at}, [seconds], "", wide=1, other_cores=0.0, **facts))
    path, notes = written(tmp_path / "card")
    company = "of llama-3.2-1b takes {} x while another part of the card does the same"
    assert notes[1:3] == [f"a prefill {company.format('1.50')}", f"a decode step of 8 {company.format('1.20')}"]
    assert path.name == "torch-h200.toml"
    made = quantities.machine(str(path))
    assert made is not None
    numbers = made.spec.h2d.value, made.spec.sms.value, made.spec.nvlink.value
    assert numbers == pytest.approx((known.h2d / 2, 64, known.nvlink))
    assert "cold" not in made.ladder
    assert made.co_run.decode.duty == {"llama-3.2-1b": pytest.approx(0.6)}
    assert made.co_run.prefill.duty == {}
    assert made.co_run.turns is not None
    assert made.co_run.turns.passes == quantities.quantities("h200")["co_run"]["passes"]
    assert made.served(shape("llama-3.2-1b")) == shape("llama-3.2-1b")  # as it is, not a twin
    assert "NVIDIA H200" in made.name
    assert notes[-1] == "not measured yet: move of llama-3.2-1b, turn of llama-3.2-1b"
    raw = tmp_path / "card" / RAW
    raw.write_text("".join(line for line in raw.read_text().splitlines(keepends=True) if '"decode"' not in line))
    with pytest.raises(UserError, match=r"no decode of llama-3\.2-1b"):
        source.staged(tmp_path / "card")
    with pytest.raises(UserError, match="nothing of the stage calibrate"):
        source.staged(tmp_path)


@pytest.mark.full
@pytest.mark.torch
def test_what_is_served_becomes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(torch_runs, "SEVEN", ("prism", "qlm"))
    serving = torch_runs.SERVINGS[0]
    workload = torch_runs.workload("systems", "few", serving, torch_runs.spec(serving, 0.5, 0, 2.0))
    (tmp_path / REQUESTS).write_text(json.dumps(workload._asdict()) + "\n")
    assert workloads(tmp_path / REQUESTS, "cpu")[0].requests().models == workload.requests().models
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no SciPy
    for text in ("prism", "qlm"):
        line = torch_stages.serve(workload, text, "h100") | {"device": "cpu"}
        append(tmp_path / JOURNAL, {"stage": "systems", "run": f"{text}, few", **line})
    append(tmp_path / JOURNAL, {"stage": "systems", "run": "weaver, few", "state": "skipped", "why": "a reason"})
    folder, notes = torch_runs.runs(tmp_path)
    assert notes == ["weaver, few: skipped: a reason"]
    made = {(about := record.meta(path))["spec"]["system"]: (path, about) for path in folder.iterdir()}
    assert dict(made["qlm"][1]["spec"]["fields"])["solver"] == "edf"  # the row says so
    for path, about in made.values():
        assert about["fidelity"] == "emulated"
        rows = record.read(path).to_pylist()
        assert len(rows) == len(workload.requests()) > 0
        for row in rows:
            assert row["state"] == "done"
            assert sum(row[f"{wait}_ns"] for wait in record.WAITS) == row["done_ns"] - row["arrival_ns"]


@pytest.mark.torch
def test_a_scenario_is_compared_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MODELS_DIR", "")
    line = torch_stages.correct("chunked")
    assert line["state"] == "done"
    assert 0 < line["worst"] < torch_scenarios.OFF
    forward = torch_scenarios.forward
    monkeypatch.setattr(torch_scenarios, "forward", lambda *given: forward(*given) + 1e-3)
    assert torch_stages.correct("chunked")["state"] == "wrong"


def test_cards_are_known_by_a_word_of_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, known in (("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L40S", "l40s")):
        monkeypatch.setattr(kind, "cards", lambda name=name: [name])
        assert torch_stages.card() == known
        assert torch_stages.card() in quantities.gpu_kinds()
    monkeypatch.setattr(kind, "cards", lambda: ["NVIDIA Tesla K80"])
    with pytest.raises(UserError, match="no cost table has a word of NVIDIA Tesla K80"):
        torch_stages.card()
    monkeypatch.setattr(kind, "cards", list)
    with pytest.raises(UserError, match="this machine has no NVIDIA card"):
        torch_stages.card()
    assert Config(()).gpu in quantities.gpu_kinds()
