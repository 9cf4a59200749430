"""Commands that look at results and files, those that write, and runs that are really made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz import pools
from tests.fuzz.case import Case
from tests.fuzz.options import COMPARE

RUNS = (*pools.NO_RUNS, "{here}/empty", "{here}/file", "{here}/loop", "/proc/self")
SETTINGS = (
    "warmup_s=0",
    "warmup_s=1e5",
    "window_s=0.001",
    "window_s=1e-300",
    "window_s=1e5",
    "drain_s=0",
    "drain_s=1e9",
    "noise=9",
    "decision_s=100",
    "control_s=100",
    "batch_cap=1",
    "chunk_tokens=0",
    "chunk_tokens=1",
    "prefill_tokens=1",
    "block_tokens=1",
    "block_tokens=1000000",
    "mem_fraction=0.05",
    "mem_fraction=.84",
    "process_bytes=0",
    "pool_bytes=1",
    "pool_bytes=3000000000",
    "host_bytes=0",
    "host_bytes=3000000000",
    "watermark=1",
    "node_gpus=1",
    "pcie_gbps=1e-9",
    "disk_gbps=1e-300",
    "scaled={pcie=1e-300}",
    "scaled={step=1e300}",
    "scaled={process=1e6}",
    "sharing=turns",
    "sharing=fluid",
    "process=model",
    "chunk_tokens=9223372036854775807",
    "batch_cap=9223372036854775807",
    "decision_s=1e300",
    "control_s=1e300",
    "drain_s=1e300",
    "block_tokens=9223372036854775807",
)
OPTIONS = (
    ("--rate-scale", "1e-6"),
    ("--rate-scale", "0.01"),
    ("--rate-scale", "500"),
    ("--slo-scale", "1e-300"),
    ("--slo-scale", "1e300"),
    ("--slo", "absolute:ttft=1e-300,tpot=1e-300"),
    ("--slo", "solo"),
    ("--served", "2"),
    ("--served", "64"),
    ("--gpus", "1"),
    ("--gpus", "64"),
    ("--prefix-cache",),
    ("--scaling", "time"),
    ("--scaling", "replicate", "--rate-scale", "3"),
    ("--scaling", "none"),
    ("--json",),
    ("--csv",),
    ("--json", "--csv"),
    ("--latex", "--markdown"),
    ("--controls",),
    ("--gpu", "l40s"),
    ("--models", "llama-3.3-70b*8"),
    ("--models", "llama-3.2-1b*9"),
    ("--engine", "attach+urls=http://127.0.0.1:1"),
    *((("--engine", "torch"),) if find_spec("torch") is None else ()),  # with torch it runs, for minutes
    ("--systems", "./none.py"),
    ("--placement", "static"),
    ("--policy-limit-s", "0.001"),
    ("--policy-limit-s", "1e-9"),
    ("--definition", "itl"),
    ("--seeds", "3", "--workers", "2"),
    ("--trace", "closed+clients=2"),
    ("--trace", "closed+clients=4+clients=5"),
    ("--trace", "arena-like+span_s=1"),
    ("--trace", "arena-like+span_s=10"),
)
# What a policy does when it first hears of something, and what the line must say
POLICY = """\
from harness.policy.actions import Load, Wake
from harness.policy.events import Arrived, Woke
from harness.policy.types import Inst
%(top)s

class Mine:
    hears = frozenset({Arrived, Woke})
    uses = frozenset({"Load"})
    options = {%(options)s}
    presets = {}

    def __init__(self, cluster):
        self.cluster = cluster
        %(init)s

    def on(self, event, view):
        %(on)s
        yield from ()
"""
IDLE = {
    "nothing",
    "stop",
    "empties models",
    "magic kv",
    "option of another type",
}  # a row in the table, or a skipped one
POLICIES: dict[str, dict[str, str]] = {
    "nothing": {},
    "interrupt": {"on": "raise KeyboardInterrupt"},
    "interrupt at init": {"init": "raise KeyboardInterrupt"},
    "interrupt at import": {"top": "raise KeyboardInterrupt"},
    "exit": {"on": "raise SystemExit(0)"},
    "generator exit": {"on": "raise GeneratorExit"},
    "stop": {"on": "raise StopIteration"},
    "recursion": {"on": "self.on(event, view).__next__()"},
    "memory": {"on": "raise MemoryError"},
    "empties models": {"init": "cluster.models.clear()"},
    "magic kv": {"options": '"kv": "magic"'},
    "option of another type": {"options": '"kv": 1'},
    "broken pipe": {"on": "raise BrokenPipeError"},
    "os error": {"on": "open('/nope')"},
    "usage": {"on": "import click; raise click.UsageError('x')"},
    "abort": {"on": "import click; raise click.Abort"},
    "error without words": {"on": "raise ValueError"},
    "lines": {"on": "raise ValueError('a\\nb')"},
    "surrogate": {"on": "raise ValueError('\\ud800')"},
}


def cases(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield each command that takes a path or a name, and runs under odd settings."""
    (here / "empty").mkdir()
    (here / "file").write_text("mine")
    (here / "loop").symlink_to(here / "loop")
    for name in RUNS:
        run = name.replace("{here}", str(here))
        for argv in (
            ("explain", run, "--misses"),
            ("explain", run, "--request", "0"),
            ("explain", run),
            ("timeline", run, "-o", "t.json"),
            ("plot", run, "-o", "x"),
            ("plot", run, "--figure", "compare", "-o", "x"),
        ):
            if run or argv[0] != "plot":
                yield Case(f"commands/{' '.join(argv)[:60]!r}", argv, accept=False)
        yield Case(f"commands/run {run[:40]!r}", ("run", run, "-o", "res"), accept=False)
        if run:
            yield Case(f"commands/validate {run[:40]!r}", ("validate", run, "-o", "x", "--no-plot"), accept=False)
        yield Case(f"commands/study {run[:40]!r}", ("study", run, "-o", "res", "--dry-run"), accept=False)
        yield Case(f"commands/check {run[:40]!r}", ("check", run), accept=False)
        yield Case(f"commands/check --engine {run[:40]!r}", ("check", "--engine", run), accept=False)
        yield Case(f"commands/calibrate {run[:40]!r}", ("calibrate", run, "-o", "x"), accept=False)
    yield Case("commands/run /dev/zero", ("run", "/dev/zero", "-o", "res"), "/dev/zero", accept=False)
    for value in pools.COUNTS:
        yield Case(
            f"commands/explain --request {value!r}", ("explain", "nope", "--request", value), "request", accept=False
        )
    for only in ("", ",", "nope", "fig7,nope", "a\nb", " ", "\udcff", "fig7.toml"):
        yield Case(f"commands/claims --only {only!r}", ("claims", "--only", only, "-o", "c.md"), accept=False)
    for path in pools.NO_PATHS:
        if path != "nodir/deep/x":  # which is made, after all runs
            yield Case(f"commands/claims -o {path[:30]!r}", ("claims", "--only", "weaver", "-o", path), accept=False)
        yield Case(f"commands/new {path[:30]!r}", ("new", f"{path}.py"), accept=path == "nodir/deep/x")
        yield Case(f"commands/timeline -o {path[:30]!r}", ("timeline", "nope", "-o", path), accept=False)
        yield Case(f"commands/plot -o {path[:30]!r}", ("plot", str(here / "empty"), "-o", path), accept=False)
        yield Case(
            f"commands/make -o {path[:30]!r}",
            ("trace", "make", "arena-like", "-o", f"{path}.parquet"),
            accept=path == "",
        )
        yield Case(
            f"commands/compare -o {path[:30]!r}",
            (*COMPARE, "-o", path or "."),
            accept=path in {"", "\udcff", "nodir/deep/x"},
        )
    for name in (
        "not a name.py",
        "mine.txt",
        "class.py",
        "1.py",
        "é.py",
        ".py",
        "a-b.py",
        "import.py",
        "x" * 260 + ".py",
        "a\nb.py",
        "\udcff.py",
    ):
        yield Case(f"commands/new {name[:30]!r}", ("new", name), accept=name in {"é.py", "import.py", "class.py"})
    for words in (
        ("list", "nope"),
        ("list", "--markdown"),
        ("list", "--matrix", "traces"),
        ("list", "traces", "x"),
        ("nope",),
        ("--nope",),
        ("",),
        ("compare",),
        ("trace", "nope"),
        ("fleet",),
        ("reproduce", "fig7"),
        ("check",),
        ("check", "static", "--all"),
        ("check", "nope"),
        ("check", "static", "--law", "nope"),
        ("check", "static", "--case", "nope"),
        ("check", "static", "--law", ""),
        ("check", "static", "--store", "--law", "x"),
        ("check", "--engine", "nope"),
        ("check", "--engine", ""),
        ("check", ""),
        ("check", "static:equal"),
        ("check", "static+x=1"),
        ("calibrate",),
        ("calibrate", "sim"),
        ("calibrate", "nope", "-o", "x"),
        ("calibrate", "attach+urls=http://127.0.0.1:1", "-o", "x"),
        ("calibrate", "profiles", "--slots", "2"),
        ("calibrate", "--engine", "sim"),
        ("calibrate", "llamacpp", "--models", "nope", "-o", "x"),
        ("calibrate", "llamacpp", "--models", "", "-o", "x"),
        ("explain",),
        ("price", "a"),
        ("price", "llama-3.1-8b@0xh100"),
        ("price", "llama-3.1-8b@9999999999xh100"),
        ("price", "nope@h100"),
        ("price", "--price", "h100"),
        ("price", "--price", "h100=nan"),
        ("price", "--tpot", "0"),
        ("plot", "--figure", "nope"),
        ("timeline", "nope", "-o", "x.txt"),
    ):
        yield Case(f"commands/{' '.join(words)!r}", words, accept=False)
    for setting in SETTINGS:
        yield Case(f"commands/run with {setting}", (*COMPARE, "--set", setting))
    for option in OPTIONS:
        wrong = option in {
            ("--json", "--csv"),
            ("--latex", "--markdown"),
            ("--trace", "closed+clients=4+clients=5"),
        }
        yield Case(f"commands/compare {' '.join(option)}", (*COMPARE, *option), accept=not wrong)
    for name, given in POLICIES.items():
        (file := here / f"{name.replace(' ', '_')}.py").write_text(
            POLICY % ({"top": "", "options": "", "init": "pass", "on": "pass"} | given)
        )
        quick = ("--policy-limit-s", "5")
        yield Case(
            f"commands/policy {name}",
            (*COMPARE, "--systems", f"static,{file}", *quick),
            file.stem,
            accept=name in IDLE,
        )
        yield Case(f"commands/check policy {name}", ("check", str(file)), file.stem, accept=False)
    (file := here / "loop.py").write_text(POLICY % {"top": "", "options": "", "init": "pass", "on": "while True: pass"})
    for limit in ("nan", "0.5", "inf"):
        yield Case(
            f"commands/policy without end, {limit}",
            (*COMPARE, "--systems", str(file), "--policy-limit-s", limit),
            accept=False,
        )
