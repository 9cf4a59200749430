"""Commands that look at results and files, those that write, and runs that are really made."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.judge import Case
from tests.fuzz.odd import words, written
from tests.fuzz.options import COMPARE

RUNS = [*words("!runs"), *words("{here}/empty {here}/file {here}/loop /proc/self")]
OF_RUN = """explain {} --misses; explain {} --request 0; explain {}; timeline {} -o t.json; run {} -o res;
study {} -o res --dry-run; check {}; check --engine {}; calibrate {} -o x"""
OF_NAMED = "plot {} -o x; plot {} --figure compare -o x; validate {} -o x --no-plot"  # without a name they are others
SETTINGS = words("""
warmup_s=0 warmup_s=1e5 window_s=0.001 window_s=1e-300 window_s=1e5 drain_s=0 drain_s=1e9 noise=9 decision_s=100
control_s=100 batch_cap=1 chunk_tokens=0 chunk_tokens=1 prefill_tokens=1 block_tokens=1 block_tokens=1000000
mem_fraction=0.05 mem_fraction=.84 process_bytes=0 pool_bytes=1 pool_bytes=3000000000 host_bytes=0
host_bytes=3000000000 watermark=1 node_gpus=1 pcie_gbps=1e-9 disk_gbps=1e-300 scaled={pcie=1e-300}
scaled={step=1e300} scaled={process=1e6} sharing=turns sharing=fluid process=model chunk_tokens=9223372036854775807
batch_cap=9223372036854775807 decision_s=1e300 control_s=1e300 drain_s=1e300 block_tokens=9223372036854775807""")
OPTIONS = """--rate-scale 1e-6; --rate-scale 0.01; --rate-scale 500; --slo-scale 1e-300; --slo-scale 1e300;
--slo absolute:ttft=1e-300,tpot=1e-300; --slo solo; --served 2; --served 64; --gpus 1; --gpus 64; --prefix-cache;
--scaling time; --scaling replicate --rate-scale 3; --scaling none; --json; --csv; --controls; --gpu l40s;
--models llama-3.3-70b*8; --models llama-3.2-1b*9; --engine attach+urls=http://127.0.0.1:1; --systems ./none.py;
--placement static; --policy-limit-s 0.001; --policy-limit-s 1e-9; --definition itl; --seeds 3 --workers 2;
--trace closed+clients=2; --trace arena-like+span_s=1; --trace arena-like+span_s=10"""
if find_spec("torch") is None:  # with torch it runs, for minutes
    OPTIONS += "; --engine torch"
WRONG = "--json --csv; --latex --markdown; --trace closed+clients=4+clients=5"
LINES = """list nope; list --markdown; list --matrix traces; list traces x; nope; --nope; ''; compare; trace nope;
fleet; reproduce fig7; check; check static --all; check nope; check static --law nope; check static --case nope;
check static --law ''; check static --store --law x; check --engine nope; check --engine ''; check ''; explain;
check static:equal; check static+x=1; calibrate; calibrate sim; calibrate nope -o x; price a; price nope@h100;
calibrate attach+urls=http://127.0.0.1:1 -o x; calibrate profiles --slots 2; calibrate --engine sim;
calibrate llamacpp --models nope -o x; calibrate llamacpp --models '' -o x; price llama-3.1-8b@0xh100;
price llama-3.1-8b@9999999999xh100; price --price h100; price --price h100=nan; price --tpot 0; plot --figure nope;
timeline nope -o x.txt; run /dev/zero -o res; new 'not a name.py'; new mine.txt; new 1.py; new .py; new a-b.py;
new x^260.py; new a¶b.py; new ¤.py"""
MADE = "new é.py; new import.py; new class.py"
# What a policy does when it first hears of something
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
IDLE = {"nothing", "stop", "empties models", "magic kv", "option of another type"}  # a row, or a skipped one
RAISED = "KeyboardInterrupt; SystemExit(0); GeneratorExit; MemoryError; BrokenPipeError; ValueError"
RAISED += "; ValueError('a\\nb'); ValueError('\\ud800')"
POLICIES: dict[str, dict[str, str]] = {
    **{error: {"on": f"raise {error}"} for error in RAISED.split("; ")},
    "nothing": {},
    "interrupt at init": {"init": "raise KeyboardInterrupt"},
    "interrupt at import": {"top": "raise KeyboardInterrupt"},
    "stop": {"on": "raise StopIteration"},
    "recursion": {"on": "self.on(event, view).__next__()"},
    "empties models": {"init": "cluster.models.clear()"},
    "magic kv": {"options": '"kv": "magic"'},
    "option of another type": {"options": '"kv": 1'},
    "os error": {"on": "open('/nope')"},
    "usage": {"on": "import click; raise click.UsageError('x')"},
    "abort": {"on": "import click; raise click.Abort"},
}
PASS = {"top": "", "options": "", "init": "pass", "on": "pass"}


def _split(text: str) -> list[tuple[str, ...]]:
    return [tuple(words(line)) for line in text.replace("\n", " ").split("; ")]


def _put(here: Path) -> None:
    (here / "empty").mkdir()
    (here / "file").write_text("mine")
    (here / "loop").symlink_to(here / "loop")


def _paths() -> list[Case]:
    every = list[Case]()
    for path in words("!paths"):
        what = f"-o {path[:30]!r}"
        if path != "nodir/deep/x":  # which is made, after all runs
            every.append(Case(f"commands/claims {what}", ("claims", "--only", "weaver", "-o", path), accept=False))
        made = ("trace", "make", "arena-like", "-o", f"{path}.parquet")
        sane = {"", "\udcff", "nodir/deep/x"}
        every += [
            Case(f"commands/new {what}", ("new", f"{path}.py"), accept=path == "nodir/deep/x"),
            Case(f"commands/timeline {what}", ("timeline", "nope", "-o", path), accept=False),
            Case(f"commands/plot {what}", ("plot", "{here}/empty", "-o", path), accept=False, put=_put),
            Case(f"commands/make {what}", made, accept=path == ""),
            Case(f"commands/compare {what}", (*COMPARE, "-o", path or "."), accept=path in sane),
        ]
    return every


def _policies() -> list[Case]:
    every = list[Case]()
    for number, (name, given) in enumerate(POLICIES.items()):
        put = written(f"mine{number}.py", POLICY % (PASS | given))
        file, stem, fine = f"{{here}}/mine{number}.py", f"mine{number}", name in IDLE
        argv = (*COMPARE, "--systems", f"static,{file}", "--policy-limit-s", "5")
        every.append(Case(f"commands/policy {name}", argv, stem, accept=fine, put=put))
        every.append(Case(f"commands/check policy {name}", ("check", file), stem, accept=False, put=put))
    put = written("loop.py", POLICY % (PASS | {"on": "while True: pass"}))
    for limit in ("nan", "0.5", "inf"):
        argv = (*COMPARE, "--systems", "{here}/loop.py", "--policy-limit-s", limit)
        every.append(Case(f"commands/policy without end, {limit}", argv, accept=False, put=put))
    return every


def cases(here: Path) -> st.SearchStrategy[Case]:
    """Draw each command that takes a path or a name, and runs under odd settings."""
    every = [*_paths(), *_policies()]
    for run in RUNS:
        for line in _split(f"{OF_RUN}; {OF_NAMED}" if run else OF_RUN):
            argv = tuple(run if word == "{}" else word for word in line)
            every.append(Case(f"commands/{' '.join(argv)[:60]!r}", argv, accept=False, put=_put))
    asked: list[tuple[str, tuple[str, ...]]] = [
        ("request", ("explain", "nope", "--request", value)) for value in words("!count")
    ]
    asked += [("", ("claims", "--only", only, "-o", "c.md")) for only in words("!text , nope fig7,nope fig7.toml")]
    every += [Case(f"commands/{argv!r:.90}", argv, culprit, accept=False) for culprit, argv in asked]
    for text, fine in ((LINES, False), (MADE, True)):
        every += [Case(f"commands/{argv!r:.90}", argv, accept=fine) for argv in _split(text)]
    every += [Case(f"commands/compare {setting}", (*COMPARE, "--set", setting)) for setting in SETTINGS]
    for text, fine in ((OPTIONS, True), (WRONG, False)):
        every += [Case(f"commands/compare {more}", (*COMPARE, *more), accept=fine) for more in _split(text)]
    return st.sampled_from(every)
