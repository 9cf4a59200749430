"""The engine contract: found by file name, light until asked, readied once and closed however a run ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.check.new import write
from harness.engines.machine import Config, Served, machine
from harness.loop import engine
from harness.loop.interrupted import Terminated
from harness.loop.replay import replay
from harness.loop.system import ROOT
from harness.policy.types import UserError
from harness.rows import record
from harness.run import resolve as resolve_module
from harness.run import sweep
from harness.run.execute import execute
from harness.run.resolve import resolve
from harness.run.setup import Failed, Setup
from harness.run.sources import Task, current
from harness.run.spec import Spec, canonical
from tests.cases import cases
from workloads.models import shape

HEAVY = ("numba", "torch")
CONFIG = Config((Served("a", shape("llama-3.2-1b")),))


def imported(code: str) -> str:
    """Return those of the heavy libraries that a fresh interpreter has imported after `code`."""
    tail = f"\nimport sys; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    command = [sys.executable, "-c", code + tail]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


@cases("module", ["machine", "rows"])
def test_what_every_engine_needs_is_not_compiled(module: str) -> None:
    assert imported(f"from harness.engines import {module}") == ""


def test_engines_are_the_files_that_define_make() -> None:
    assert "sim" in engine.names()
    assert not {"machine", "cost", "kernel", "rows"} & set(engine.names())  # helpers beside them
    assert imported("from harness.loop import engine; engine.names()") == ""


@cases(
    ("name", "says"),
    [
        ("simm", 'no engine "simm"; did you mean sim?'),
        ("machine", 'no engine "machine"'),
        ("./gone.py", "no file ./gone.py"),
        (__file__, "no function `make`, so it is no engine"),
    ],
)
def test_what_is_no_engine_is_said(name: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        engine.find(name)


FIELDS = """
from dataclasses import dataclass
from harness.engines.sim.engine import Sim
from harness.policy.fields import choice, number

@dataclass(frozen=True)
class Fields:
    step_s: float = number(0.01, 0.001, 1)
    order: str = choice("edf", "fcfs")
    key_env: str = ""
    presets = {"slow": {"step_s": 0.5}}

def make(config, options, machine, fields):
    made = Sim(config, options, machine)
    made.fields = fields
    return made
"""


def test_an_engine_takes_fields_as_a_system_does(tmp_path: Path) -> None:
    (path := tmp_path / "mine.py").write_text(FIELDS)

    def fields(text: str) -> tuple[float, str]:
        made = engine.find(text)(CONFIG, {}, machine(CONFIG))
        chosen = made.fields  # type: ignore[attr-defined]
        return chosen.step_s, chosen.order

    assert fields(f"{path}") == (0.01, "edf")
    assert fields(f"{path}:slow+order=fcfs") == (0.5, "fcfs")
    for text, says in {
        "+stop_s=1": "did you mean step_s?",
        "+step_s=2": "field step_s is 2.0, not in [0.001, 1]",
        ":slov": "did you mean slow?",
        "+order": "+order is not +FIELD=VALUE",
    }.items():
        with pytest.raises(UserError, match=re.escape(says)):
            engine.find(f"{path}{text}")
    with pytest.raises(UserError, match='sim has no field "step_s"'):
        engine.find("sim+step_s=1")


def test_what_is_asked_of_an_engine_has_one_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "mine.py").write_text(FIELDS)
    monkeypatch.chdir(tmp_path)
    assert engine.canonical("sim") == "sim"
    assert engine.canonical("./mine.py") == engine.canonical("./mine.py+step_s=0.01+order=edf") == str(path)
    assert engine.canonical("./mine.py+step_s=1+order=fcfs") == f"{path}+order=fcfs+step_s=1.0"
    assert engine.canonical("./mine.py:slow+step_s=0.01+order=edf") == f"{path}:slow+step_s=0.01"
    spec = Spec("static", engine="./mine.py+key_env=MY_KEY", models="llama-3.2-1b", trace="sample")
    assert resolve(spec).engine == f"{path}+key_env=MY_KEY"  # a run needs it
    assert resolve(spec).hash8 == resolve(replace(spec, engine=str(path))).hash8


BROKEN = {
    "raises": ("x = 1\nraise KeyError('m9')\ndef make(config, options, machine): ...", ":2: KeyError ('m9')"),
    "is no Python": ("def make(config:\n", ":1: SyntaxError ("),
    "fails": ("def make(config, options, machine):\n    return 1 / 0", ":2: ZeroDivisionError (division by zero)"),
    "lacks all": ("def make(config, options, machine): return object()", ": its engine has no `can`"),
    "lacks one": (
        (
            "from harness.engines.sim.engine import Sim\nclass Mine(Sim): poll = property()\n"
            "def make(*parts): return Mine(*parts)"
        ),
        ": its engine has no `poll`",
    ),
    "ends it all": ("import sys\nsys.exit(3)\ndef make(config, options, machine): ...", ":2: SystemExit (3)"),
}


@cases("how", [*BROKEN])
def test_a_broken_file_is_one_line(how: str, tmp_path: Path) -> None:
    text, says = BROKEN[how]
    (path := tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=f"^{re.escape(str(path) + says)}"):
        engine.find(str(path))(CONFIG, {}, machine(CONFIG))


# ------------------------------------------------------------------ the life of an engine, by its diary


@pytest.fixture
def diary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIARY", str(tmp_path / "diary"))
    return tmp_path / "diary"


def lines(diary: Path) -> list[str]:
    """Return its lines, without processes and without the engines that were made and no more."""
    return [line.split()[0] for line in diary.read_text().splitlines() if not line.startswith("made")]


SPEC = Spec(
    "chunked", engine=str(ROOT / "tests/harness/loop/diary.py"), trace="sample", models="llama-3.2-1b*3", slo=""
)


def done(spec: Spec, out: Path) -> Path:
    return execute(resolve(spec), out, "")


def test_an_engine_is_readied_once_and_closed(diary: Path, tmp_path: Path) -> None:
    resolve(SPEC)
    assert lines(diary) == []  # made to be asked, and no more
    done(SPEC, tmp_path / "out")
    assert lines(diary) == ["ready", "begin", "closed"]


def test_an_engine_that_cannot_serve_a_system_is_not_readied(diary: Path, tmp_path: Path) -> None:
    folder = done(replace(SPEC, system="static"), tmp_path / "out")
    assert record.meta(folder)["skipped"] == "Limit"
    assert lines(diary) == ["closed"]


@pytest.mark.parametrize(
    ("end", "error"), [("error", ValueError), ("interrupt", KeyboardInterrupt), ("terminate", Terminated)]
)
def test_an_engine_is_closed_however_its_run_ends(
    end: str, error: type[BaseException], diary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIARY_END", end)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error):
        done(SPEC, tmp_path / "out")
    assert lines(diary) == ["ready", "begin", "closed"]
    assert not list((tmp_path / "out").glob("*/*.parquet"))
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_engine_is_closed_when_the_policy_fails(diary: Path, tmp_path: Path) -> None:
    write(mine := tmp_path / "mine.py")
    text = mine.read_text().replace("import Woke", "import Finished, Woke").replace("({Woke})", "({Woke, Finished})")
    mine.write_text(
        text.replace("        if event ==", "        if isinstance(event, Finished): 1 / 0\n        if event ==")
    )
    with pytest.raises(Failed, match="ZeroDivisionError"):
        done(replace(SPEC, system=str(mine)), tmp_path / "out")
    assert lines(diary)[0] == "ready"
    assert lines(diary)[-1] == "closed"


@pytest.mark.parametrize(("end", "code"), [("interrupt", 130), ("terminate", 143)])
def test_a_command_that_is_ended_closes_its_engine(end: str, code: int, diary: Path, tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        "".join(f"{key} = {json.dumps(getattr(SPEC, key))}\n" for key in ("system", "engine", "models", "trace", "slo"))
    )
    command = [sys.executable, "-m", "harness", "run", str(spec), "-o", str(tmp_path / "out")]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"DIARY_END": end}
    )
    assert (ended.returncode, lines(diary)) == (code, ["ready", "begin", "closed"]), ended.stderr
    assert "interrupted: finished runs are kept" in ended.stderr


def test_runs_of_an_exclusive_engine_come_one_by_one(diary: Path, tmp_path: Path) -> None:
    both = [replace(SPEC, engine=name, seed=seed) for seed in range(3) for name in (SPEC.engine, "sim")]
    folders = sweep.sweep(both, tmp_path / "out", workers=2)
    assert [record.meta(folder)["fidelity"] for folder in folders] == ["emulated", "simulated"] * 3
    assert lines(diary) == ["ready", "begin", "closed"] * 3
    assert {line.split()[1] for line in diary.read_text().splitlines()} == {str(os.getpid())}


# ------------------------------------------------------------------ real time, a real machine


def test_nothing_is_added_to_a_wall_clock(diary: Path) -> None:
    spec = resolve(SPEC)
    assert (spec.decision_s, spec.control_s, spec.noise) == (0.0, 0.0, 0.0)
    for name in ("decision_s", "control_s", "noise"):
        with pytest.raises(UserError, match=f"{name} is 0.01: on .*diary.py time is real"):
            resolve(replace(SPEC, **{name: 0.01}))  # type: ignore[arg-type]
    setup = Setup(spec)
    with pytest.raises(ValueError, match="wall clock"):
        replay(setup.policy, setup.engine, setup.jobs(), decision_s=0.01)


def test_a_run_says_where_it_was_measured(diary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = resolve(SPEC)
    about = record.meta(done(SPEC, tmp_path))
    assert about["measured_on"] == {"host": "here", "cpu": "of a test"}
    assert about["spec"]["measured_on"] == here.measured_on == "host here, cpu of a test"
    assert current(Task.of(here, ""), tmp_path)
    monkeypatch.setenv("DIARY_HOST", "there")
    resolve_module._traits.cache_clear()  # as another process
    there = resolve(SPEC)
    assert there.hash8 != here.hash8
    assert not current(Task.of(there, ""), tmp_path)
    with pytest.raises(UserError, match="measured on host here, cpu of a test; here is host there"):
        resolve(here)


def test_a_simulated_run_is_the_same_everywhere() -> None:
    spec = resolve(replace(SPEC, engine="sim"))
    assert spec.measured_on == ""
    assert "measured_on" not in canonical(spec)


def test_an_engine_whose_library_is_missing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    spec = resolve(replace(SPEC, system="static", engine="torch", gpus=1))
    with pytest.raises(UserError, match="torch needs torch: pip install torch"):
        execute(spec, tmp_path, "")
    assert not record.exists(tmp_path / spec.folder)


def test_an_engine_without_a_cost_table_leaves_out_who_asks_for_one(tmp_path: Path) -> None:
    for system, lacks in (("qlm", "cost table"), ("unshared", "option memory=unlimited, option sharing=none")):
        folder = done(replace(SPEC, system=system, engine="vllm", gpus=1), tmp_path)
        assert record.meta(folder)["skipped"] == lacks
    setup = Setup(resolve(replace(SPEC, system="static", engine="vllm", gpus=1)))
    jobs = setup.jobs()
    with pytest.raises(UserError, match="no SLO by solo latency on vllm: it has no cost table"):
        setup.solo_s(jobs.model, jobs.prompt_tokens, jobs.output_tokens)
