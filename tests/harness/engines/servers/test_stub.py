"""The engine before processes that serve and compute nothing: its laws, faults, and servers that run already."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from harness.check.engine import check
from harness.client.body import Server
from harness.engines import attach
from harness.engines.machine import Config, Served
from harness.engines.servers.engine import Servers
from harness.loop import system
from harness.loop.replay import replay
from harness.loop.system import ROOT
from harness.policy.actions import Action
from harness.policy.events import Event, Prefilled
from harness.policy.types import Jobs, UserError
from harness.policy.view import View
from harness.rows import record
from tests.bench import bench, ok
from tests.cases import cases
from tests.harness.engines.servers import stubbed
from tests.harness.engines.servers.staged import Script, batch, routed
from workloads.models import shape

ENGINE = str(Path(stubbed.__file__))
QUICK = ("--ttft-ms", "3", "--itl-ms", "0")
BOTH = routed("a", "b")
ONCE = (
    *("--trace", "sample", "--slo", "absolute:ttft=9,tpot=9", "--seeds", "1", "--rate-scale", "1"),
    *("--no-plot", "--set", "warmup_s=0"),
)
SPEC = """
system = "dedicated"
models = "llama-3.2-1b*2"
trace = "sample"
window_s = 3
warmup_s = 0
slo = "absolute:ttft=9,tpot=9"
"""


@contextmanager
def stub(*options: str) -> Iterator[str]:
    """Yield the URL of a server that runs already."""
    command = [sys.executable, "-m", "tests.harness.engines.servers.stub", "--with-parent", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def jobs(n: int, span_s: float, tokens: int) -> Jobs:
    """Return requests of two models by turns."""
    none = np.full(n, np.inf)
    sizes = np.full(n, 8, np.int32), np.full(n, tokens, np.int32)
    return Jobs(("a", "b"), np.linspace(0.0, span_s, n), np.arange(n, dtype=np.int32) % 2, *sizes, none, none)


def fails(*args: object) -> str:
    """Return the words of a command that ends with a user's mistake."""
    result = bench(*args)
    assert result.exit_code == 2, result.output
    return str(result.stderr)


def served(kind: Any, script: Any, work: Jobs) -> tuple[Servers, list[dict[str, Any]]]:
    """Run on servers of a kind, which are gone after it; return the engine, and its rows."""
    engine = Servers(kind.config, kind)
    try:
        replay(script, engine, work)
        rows = [row for part in engine.rows() for row in part.to_pylist()]
    finally:
        engine.close()
    for row in rows:
        assert sum(row[f"{wait}_ns"] for wait in record.WAITS) == row["done_ns"] - row["arrival_ns"]
    for process in kind.processes:
        assert not psutil.pid_exists(process.pid) or psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    return engine, rows


def config(**fields: Any) -> Config:
    """Return a config of two models."""
    return Config(tuple(Served(m, shape("llama-3.2-1b")) for m in ("a", "b")), **fields)


def swapped(way: str, **of: Any) -> tuple[Servers, list[dict[str, Any]]]:
    """Serve five requests by turns, with room for a server at a time; return the engine, and its rows."""
    room = stubbed.WEIGHT_BYTES + 2 * stubbed.TOKENS * stubbed.TOKEN_BYTES
    kind = stubbed.Stubbed(config(pool_bytes=room), **of)
    policy = system.build(system.find("swap"), kind.cluster, {"queue": "fifo", "way": way})
    return served(kind, policy, jobs(5, 0.2, 4))


@pytest.mark.slow
def test_an_engine_of_stubs_conforms() -> None:
    assert check(ENGINE) == []


def test_a_system_that_swaps_in_order_of_arrival_swaps_for_every_request() -> None:
    engine, rows = swapped("cold")
    assert [row["state"] for row in rows] == ["done"] * 5
    assert (engine.stats()["loads"], engine.stats()["evicts"]) == (4.0, 4.0)
    done_ns = [row["done_ns"] for row in rows]
    assert done_ns == sorted(done_ns)  # one at a time
    assert all(row["load_ns"] + row["admission_ns"] > 0 for row in rows[1:])
    starts = [entry["model"] for entry in engine.side()["servers"] if entry["what"] == "start"]
    assert starts == ["a", "b", "a", "b", "a"]


def test_servers_that_sleep_keep_their_processes() -> None:
    engine, rows = swapped("sleep")
    assert [row["state"] for row in rows] == ["done"] * 5
    did = [span["what"] for span in engine.side()["servers"]]
    assert did == ["start", "sleep", "start", "sleep", "wake", "sleep", "wake", "sleep", "wake"]
    assert (engine.stats()["loads"], engine.stats()["evicts"]) == (4.0, 4.0)


def test_a_server_that_is_killed_takes_its_requests_with_it_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    kind = stubbed.Stubbed(config(), ("--ttft-ms", "4", "--itl-ms", "50"))

    def kills(event: Event, view: View) -> Iterable[Action]:
        yield from BOTH(event, view)
        if isinstance(event, Prefilled) and event.batch == batch("a"):
            os.kill(kind.processes[0].pid, signal.SIGKILL)

    engine, rows = served(kind, Script(kills), jobs(8, 0.4, 8))
    assert [row["state"] for row in rows] == ["failed", "done"] * 4
    (fault,) = engine.side()["faults"]
    assert fault.startswith("the server of a on GPU 0 ended by itself")
    assert capsys.readouterr().err == f"{fault}\n"
    assert all(row["made_tokens"] < row["output_tokens"] for row in rows[::2])


def test_a_server_that_cannot_start_is_told_with_the_last_lines_of_its_log() -> None:
    with pytest.raises(UserError, match=r"(?s)ended before it was ready \(exit code 2\).*unrecognized.*--no-such"):
        served(stubbed.Stubbed(config(), ("--no-such-option",)), Script(BOTH), jobs(2, 0.1, 4))


# ------------------------------------------------------------------ servers that run already


def test_models_are_matched_by_name_and_else_in_order() -> None:
    at = [Server("u", "x"), Server("u", "b"), Server("v", "y")]
    assert attach.match(["a", "b", "c"], at) == {"a": (at[0], "order"), "b": (at[1], "name"), "c": (at[2], "order")}
    with pytest.raises(UserError, match="4 models, and the servers have 3"):
        attach.match(["a", "b", "c", "d"], at)


def test_a_workload_is_replayed_against_servers_that_run(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    with stub("--models", "x", *QUICK) as first, stub("--models", "llama-3.2-1b/1", *QUICK) as second:
        output = ok("run", tmp_path / "spec.toml", "--engine", f"attach+urls={first},{second}/v1/", "-o", tmp_path)
        words = "compare", "--systems", "dedicated,static", "--engine", f"attach+urls={first},{second}", "--models"
        table = json.loads(ok(*words, "llama-3.2-1b*2", *ONCE, "--set", "window_s=2", "--json", "-o", tmp_path))
    assert f"llama-3.2-1b/1: served as llama-3.2-1b/1 at {second}, matched by name" in output
    assert f"llama-3.2-1b/2: served as x at {first}, matched by order" in output
    head, *by_model = (line.split() for line in output.splitlines() if line.startswith(("system ", "dedicated ")))
    assert head[:3] == ["system", "model", "offered"]
    assert [line[1] for line in by_model] == ["llama-3.2-1b/1", "llama-3.2-1b/2"]
    assert sum(int(line[2]) for line in by_model) > 3
    (folder,) = (path for path in tmp_path.glob("dedicated-*") if record.meta(path)["spec"]["window_s"] == 3)
    rows = record.read(folder).to_pylist()
    assert {row["state"] for row in rows} == {"done"}
    assert all(row["made_tokens"] == row["output_tokens"] for row in rows)
    about = record.meta(folder)
    assert (about["fidelity"], about["stats"]["loads"]) == ("real", 0.0)
    assert about["verdict"]["text"] in output
    assert table["skipped"] == ["skipped: static, Limit"]
    explained = ok("explain", folder)
    assert explained.startswith(about["verdict"]["text"])


def test_requests_that_fail_stand_in_the_default_output(tmp_path: Path) -> None:
    with stub("--models", "x", *QUICK, "--fail") as url:
        words = "compare", "--systems", "dedicated", "--engine", f"attach+urls={url}", "--models", "llama-3.2-1b"
        output = ok(*words, *ONCE, "--set", "window_s=4", "-o", tmp_path)
        (run,) = tmp_path.glob("dedicated-*")
        explained = ok("explain", run, "--misses", "--slo", "absolute:ttft=9,tpot=9")
    (line,) = (line for line in output.splitlines() if line.startswith("dedicated: ") and "requests failed: " in line)
    count, of = line.split()[1], line.split()[3]
    assert count == of
    assert f"requests failed: {count} HTTP 500: " in line
    assert next(row for row in explained.splitlines() if row.startswith("all ")).split()[-2:] == ["100", "%"]
    assert "failed: the server refused it" in explained


def test_runs_on_attached_servers_have_a_salt_each() -> None:
    salts = set()
    with stub("--models", "x", *QUICK) as url:
        for _ in range(3):
            kind = attach.Attached.__new__(attach.Attached)
            kind.config, kind.urls, kind.key_env, kind.lacks = config(), (url, url), "", ""
            kind.ready(Path())
            salts.add(kind.style.salt)
    assert len(salts) == 3
    assert 0 not in salts


def test_a_run_that_did_not_measure_its_servers_says_so_wherever_it_is_shown(tmp_path: Path) -> None:
    from harness.answers.caveats import invalid
    from harness.answers.comparison import records
    from harness.rows import scoring
    from harness.study.summary import summarize
    from plots import style

    spec = {
        "system": "one",
        "trace": "t",
        "models": "m",
        "gpu": "h100",
        "gpus": 1,
        "engine": "attach",
        "seed": 0,
        "rate_scale": 1.0,
        "scaling": "rotate",
        "slo": "s",
        "window_s": 3.0,
    }
    verdict = {"valid": False, "reasons": ["too late", "too few"]}
    bad = {"spec": spec, "tier": "t", "fidelity": "real", "verdict": verdict}
    good = {**bad, "spec": {**spec, "system": "two"}, "verdict": {"valid": True, "reasons": []}}
    rows = record.SCHEMA.empty_table()
    scored = scoring.scores(scoring.Run(name, about, rows, {}) for name, about in (("one-1", bad), ("two-2", good)))
    assert invalid(scored) == ["invalid: one: too late; too few"]
    shown = summarize(scored, ["one", "two"], "both", 0.99)
    assert [shown.name(system) for system in shown.systems] == ["one (invalid)", "two"]
    assert [row["invalid"] for row in records(shown).records()] == [True, False]
    assert shown.best(shown.columns[0]) <= {"two"}
    frame = scored.to_pandas()
    assert "INVALID: one (too late; too few)." in style.caption(frame, [1])
    assert "INVALID" not in style.caption(frame[frame["label"] == "two"], [1])


@cases(
    ("url", "says"),
    [("http://127.0.0.1:1", "http://127.0.0.1:1 does not answer"), ("127.0.0.1:80", "is no http://HOST:PORT")],
)
def test_a_server_that_is_not_there_is_one_line(url: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(SPEC)
    assert says in fails("run", tmp_path / "spec.toml", "--engine", f"attach+urls={url}", "-o", tmp_path)


def test_attach_asks_for_urls_and_only_attach_takes_them(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(SPEC + 'engine = "sim+urls=http://127.0.0.1:1"\n')
    (tmp_path / "none.toml").write_text(SPEC + 'engine = "attach"\n')
    assert "--engine attach+urls=http://HOST:PORT" in fails("run", tmp_path / "none.toml", "-o", tmp_path)
    assert 'sim has no field "urls"' in fails("run", tmp_path / "other.toml", "-o", tmp_path)


def test_a_key_is_named_and_never_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    (tmp_path / "spec.toml").write_text(SPEC)
    with stub("--models", "x,y", *QUICK) as url:
        ok("run", tmp_path / "spec.toml", "--engine", f"attach+urls={url}+key_env=MY_KEY", "-o", tmp_path / "out")
        again = ok("run", tmp_path / "spec.toml", "--engine", f"attach+urls={url}+key_env=KEY2", "-o", tmp_path / "out")
        none = fails(
            "run", tmp_path / "spec.toml", "--engine", f"attach+urls={url}+key_env=KEY2", "-o", tmp_path / "new"
        )
    assert again.startswith("dedicated: 6 done")  # it is the same run, whatever its key is called
    assert "the environment variable KEY2 holds no key" in none
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 3
    assert all(b"sk-very-secret" not in path.read_bytes() for path in files)
