"""The check itself: each wrong system is told which law it breaks, and a right one is left alone."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import pytest

from harness.check import cases as workloads
from harness.check import trial as trials
from harness.check.cases import Case
from harness.check.check import check, subjects
from harness.check.laws import LAWS, otherwise
from harness.check.new import write
from harness.check.purity import impure
from harness.check.trial import Subject, Trial, needs, run
from harness.policy.actions import Action, Evict, Load, Move, Run, Wake
from harness.policy.types import Batch, Host, Inst, UserError
from tests.bench import bench, ok
from tests.cases import cases

HERE = Path(__file__).resolve().parent
SOUND = sorted((HERE / "sound").glob("*.py"))
A = Inst("a", (0,))

# Lines of sound/admits_each.py, and what stands in their place where laws are broken.
CLASS, HEARS = "class AdmitsEach:", "hears: frozenset[type] = frozenset({Woke, Arrived})"
PLACE = "m: Batch(Inst(m, tuple((k + j) % n for j in range(model.tp))))"
N, EVENT, EACH, RUN = "n = len(cluster.gpus)", "match event:", "for batch in self.batches.values():", "yield Run(batch)"
ARRIVED, ADMIT = "case Arrived(request):", "yield Admit(request.id, self.batches[request.model])"
BROKEN: dict[str, tuple[str, dict[str, str]]] = {
    "over_the_card": ("memory served idle", {PLACE: PLACE.replace("(k + j) % n", "j")}),
    "hash_order": ("deterministic", {EACH: "for batch in set(self.batches.values()):"}),
    "over_limit": ("memory", {RUN: f"{RUN}\nyield Limit(batch.inst.model, 0, 2 * self.gpu.mem_bytes)"}),
    "starves": ("served", {RUN: f"{RUN}\nyield Limit(batch.inst.model, 0, 0)"}),
    "undeclared_action": ("declared", {RUN: f"{RUN}\nyield Run(batch, seqs=4)"}),
    "undeclared_event": ("declared", {
        HEARS: HEARS.replace("Woke, ", ""),
        ADMIT: f"batch = self.batches[request.model]\nyield from (Load(batch.inst), Run(batch))\n{ADMIT}\n"
        'yield Wake(view.now_s + 1.0, "later")'}),
    "gives_up": ("survives", {
        RUN: f"{RUN}\nyield Evict(Inst(batch.inst.model, Host()))",
        ARRIVED: f"case Done(_, str(), why):\n    raise RuntimeError(why)\n{ARRIVED}"}),
    "retries": ("patient", {
        'case Woke("start"):': "case Woke(key):",
        RUN: f'if view.lane(batch, "mixed") is None:\n    {RUN}\n'
        'if key == "start":\n    yield Wake(view.now_s + 0.03, "again")'}),
    "dawdles": ("idle", {
        'case Woke("start"):': 'case Woke("start"):\n    yield Wake(60.0, "go")\ncase Woke("go"):'}),
    "loses_request": ("served", {ARRIVED: "case Arrived(request) if request.id % 7 != 3:"}),
    "serves_twice": ("served", {
        HEARS: HEARS.replace("Woke, ", "Woke, Finished, "),
        ARRIVED: f"case Finished(rid):\n    yield Admit(rid, event.batch)\n{ARRIVED}"}),
    "livelocks": ("livelock", {EVENT: f'if isinstance(event, Woke):\n    yield Wake(view.now_s, "again")\n{EVENT}'}),
    "never_ends": ("livelock", {ARRIVED: "case Arrived() | Woke():", ADMIT: 'yield Wake(view.now_s + 0.001, "again")'}),
    "keeps_view": ("fresh-view", {
        N: f"{N}\nself.view = None",
        ADMIT: "first, self.view = self.view or view, view\n"
        f"if first.batch(self.batches[request.model]).waiting >= 0:\n    {ADMIT}"}),
    "peeks_at_lengths": ("declared", {ARRIVED: "case Arrived(request) if view.oracle_tokens(request.id) > 0:"}),
    "peeks_inside": ("blind pure", {
        ARRIVED: "case Arrived(request) if view._sim._jobs.output_tokens[request.id] > 0:"}),
    "sets_the_clock": ("blind", {ADMIT: f"view.now_s = 5.0\n{ADMIT}"}),
    "sets_the_cluster": ("pure survives", {
        N: f"{N}\nself.cluster = cluster",
        ADMIT: f'object.__setattr__(self.cluster, "gpus", ())\n{ADMIT}\nself.cluster.gpus[0]'}),
    "empties_the_cluster": ("survives", {
        N: f"{N}\nself.cluster = cluster", ADMIT: f"self.cluster.models.clear()\n{ADMIT}"}),
    "peeks_at_frames": ("blind pure replayed", {
        ADMIT: "import sys\nframe = sys._getframe()\nwhile 'jobs' not in frame.f_locals:\n    frame = frame.f_back\n"
        f"if frame.f_locals['jobs'].output_tokens[request.id] % 2:\n    yield Drop(request.id)\nelse:\n    {ADMIT}"}),
    "reads_clock": ("pure", {CLASS: f"import time\n{CLASS}", ARRIVED: "case Arrived(request) if time.time() > 0.0:"}),
    "reads_slo": ("declared", {ADMIT: f"{ADMIT} if request.ttft_slo_s > 0.01 else Drop(request.id)"}),
    "remembers": ("replayed", {
        CLASS: f"known = []\n{CLASS}",
        ADMIT: f"{ADMIT}\nif request.id in known:\n    yield Drop(request.id)\nknown.append(request.id)"}),
}  # fmt: skip
WORDS = {  # what any of them may need
    "import Action, Admit, Load, Run": "import Action, Admit, Drop, Evict, Limit, Load, Run, Wake",
    "import Arrived, Event, Woke": "import Arrived, Done, Event, Finished, Woke",
    "import Batch, Cluster, Inst, Option": "import Batch, Cluster, Host, Inst, Option",
    '"Load", "Run", "Admit"': '"Load", "Run", "Admit", "Drop", "Evict", "Limit", "Wake"',
}


def broken(name: str, folder: Path) -> Path:
    """Write a system that breaks laws into a folder."""
    text = (HERE / "sound" / "admits_each.py").read_text("utf-8")
    for old, new in WORDS.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    lines = text.splitlines()
    for old, new in BROKEN[name][1].items():
        (at,) = (k for k, line in enumerate(lines) if line.strip().rstrip(",") == old)
        lines[at] = indent(new, lines[at][: lines[at].index(old)])
    path = folder / f"{name}.py"
    path.write_text("\n".join(lines), "utf-8")
    return path


FIRST = {law: name for name, (laws, _) in reversed(BROKEN.items()) for law in laws.split()}  # a count a law


@cases("name", sorted(set(FIRST.values())))
def test_the_broken_law_is_named(name: str, tmp_path: Path) -> None:
    laws = {failure.law for failure in check(str(broken(name, tmp_path)), twice="deterministic" in BROKEN[name][0])}
    assert laws == set(BROKEN[name][0].split())


@pytest.mark.full
@pytest.mark.parametrize("name", BROKEN)
def test_the_command_names_the_broken_law_and_no_other(name: str, tmp_path: Path) -> None:
    result = bench("check", broken(name, tmp_path))
    assert result.exit_code == 1, result.output
    assert set(re.findall(r"^([a-z-]+): ", result.stdout, re.MULTILINE)) == set(BROKEN[name][0].split())


def test_every_law_has_a_system_that_breaks_it() -> None:
    assert set(LAWS) - {law for laws, _ in BROKEN.values() for law in laws.split()} == {"starts", "stands"}  # see below


@cases("name", ["admits_each", "on_demand"])
def test_a_sound_system_passes(name: str) -> None:
    assert check(str(HERE / "sound" / f"{name}.py"), twice=False) == []


@pytest.mark.full
@pytest.mark.parametrize("path", SOUND, ids=lambda path: path.stem)
def test_a_sound_system_passes_in_two_processes(path: Path) -> None:
    assert check(str(path)) == []


def test_a_new_system_passes(tmp_path: Path) -> None:
    write(tmp_path / "mine.py")
    assert check(str(tmp_path / "mine.py"), twice=False) == []


def test_a_failure_is_shrunk_and_repeats(tmp_path: Path) -> None:
    path = str(broken("loses_request", tmp_path))
    (failure,) = check(path, twice=False)
    assert "its first 4 requests: request 3 of " in failure.message  # it loses 3, 10, 17, ...
    assert failure.event == 4  # the start, then one arrival after the other
    words = shlex.split(failure.command)
    assert words == ["bench", "check", path, "--law", "served", "--case", "calm"]
    assert check(path, only=words[4], case=words[6]) == [failure]


def test_a_quoted_rule_frees_of_the_law_about_idle_gpus_and_is_printed(tmp_path: Path) -> None:
    path = broken("dawdles", tmp_path)
    words = "check", path, "--law", "idle", "--case", "calm"
    wrong = bench(*words)
    assert wrong.exit_code == 1
    assert "until its weights are asked for, while GPU 0 holds nothing" in wrong.stdout
    text = path.read_text("utf-8")
    rule = '    leaves_idle = "by the minute (section 3)"\n'
    path.write_text(text.replace("    presets:", f"{rule}    presets:"), "utf-8")
    assert "by its own rule, so the law `idle` is not asked of it: by the minute (section 3)" in ok(*words)
    path.write_text(text.replace("    presets:", "    leaves_idle = True\n    presets:"), "utf-8")
    (failure,) = check(str(path), only="starts", case="calm")
    assert "`leaves_idle` is no text" in failure.message


GOOD = '''
"""Says what it does."""
from harness.policy.actions import Admit, Load, Run
from harness.policy.events import Woke
from harness.policy.types import Batch, Infeasible, Inst

class Mine:
    presets = {}
    uses = frozenset({"Load", "Run", "Admit"})
    hears = frozenset({Woke})
    options = {}

    def __init__(self, cluster):
        self.cluster = cluster

    def on(self, event, view):
        for k, (m, model) in enumerate(self.cluster.models.items()):
            batch = Batch(Inst(m, tuple(range(k % 2 + 1 - model.tp, k % 2 + 1))))
            yield from (Load(batch.inst), Run(batch), Admit(m, batch))
'''
SPOILT = [
    ("class Mine:", "class Mine", "SyntaxError"),
    ("class Mine:", "import no_such_module\nclass Mine:", "no_such_module"),
    ("def on(", "def off(", "expected one class with a method `on`, found 0"),
    ('"""Says what it does."""', "", "no docstring"),
    ("    presets = {}\n", "", "no `presets`"),
    ("presets = {}", 'presets = {"fast": {"tau": 1}}', "preset fast sets tau, which is no field"),
    ("(self, cluster)", "(self, cluster, tau=1)", "field tau is explained nowhere"),
    ("self.cluster = cluster", "self.cluster = cluster.clusters", "its default does not build: AttributeError"),
    ("{Woke}", "{Woke, int}", "hears <class 'int'>"),
    ('"Load", ', '"Lode", "Load", ', 'uses "Lode"'),
    ("self.cluster = cluster", 'raise Infeasible("too small")', "runs in no case: case calm: too small"),
    ("options = {}", 'options = {"kv": "buddy"}', "runs in no case: case calm: option kv=buddy"),
]


def mine(folder: Path, old: str = "", new: str = "") -> str:
    """Write the good system with one text in the place of another; return its path."""
    assert old in GOOD
    path = folder / "mine.py"
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    return str(path)


@cases(("old", "new", "says"), SPOILT)
def test_a_file_that_does_not_start(old: str, new: str, says: str, tmp_path: Path) -> None:
    (failure,) = [f for f in check(mine(tmp_path, old, new), only="starts", case="calm") if f.law == "starts"]
    assert says in failure.message


def test_state_is_a_field_that_no_user_sets(tmp_path: Path) -> None:
    """The template's line of state keeps the law; without `init=False` the law names that remedy."""
    write(path := tmp_path / "mine.py")
    stub = path.read_text("utf-8").replace("import dataclass\n", "import dataclass, field\n")
    (state,) = re.findall(r"    # state .*: (\w+: dict = field\(init=False, .*\))\n", stub)
    head, tail = stub.split("    hears = ")
    path.write_text(f"{head}    {state}\n    hears = {tail}", "utf-8")
    assert check(str(path), only="starts", case="calm") == []
    path.write_text(path.read_text("utf-8").replace(state, state.replace("init=False, ", "")), "utf-8")
    (failure,) = check(str(path), only="starts", case="calm")
    assert "field waiting is explained nowhere" in failure.message
    assert "field(init=False)" in failure.message


def test_the_file_that_is_spoilt_starts_as_it_is(tmp_path: Path) -> None:
    assert check(mine(tmp_path), case="calm") == []


@cases(
    ("old", "new", "law", "says"),
    [
        ("hears = ", "heard = ", "starts", "its default does not build: has no `hears`"),
        ("self.cluster = cluster", "raise SystemExit(0)", "starts", "does not build: SystemExit at mine.py:14 (0)"),
        ("class Mine:", "raise SystemExit(0)\nclass Mine:", "starts", "be imported: SystemExit at mine.py:7 (0)"),
        ("for k, (m", "raise SystemExit(0)\n        for k, (m", "survives", "raised SystemExit at mine.py:17 (0)"),
        ("for k, (m", "yield Load('x')\n        for k, (m", "survives", "answered Load(inst='x')"),
        ("for k, (m", "yield 5\n        for k, (m", "declared", "answered 5, which is no action"),
        (
            "self.cluster = cluster",
            "self.cluster = cluster\n        1 / (len(cluster.gpus) - 3)",
            "survives",
            "case crowd, without a request: raised ZeroDivisionError at mine.py:15 (division by zero)",
        ),
    ],
)
def test_whatever_a_system_does_is_a_finding(old: str, new: str, law: str, says: str, tmp_path: Path) -> None:
    (failure,) = check(mine(tmp_path, old, new), only=law)
    assert says in failure.message


def test_a_file_that_is_not_text_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(bytes(range(256)))
    (failure,) = check(str(path))
    assert failure.law == "starts"
    assert "null bytes" in failure.message


def test_a_system_may_print(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "print('hello')\n        import os\n        os.write(1, b'raw')\n        for k, (m, model)"
    assert {failure.law for failure in check(mine(tmp_path, "for k, (m, model)", text), case="calm")} == {"pure"}
    out, err = capfd.readouterr()
    assert "hello" not in out
    assert "hello" in err


@cases(
    ("answer", "longest_s", "says"),
    [
        ("while True: pass", 0.25, "thought for 0.25 s without an answer"),
        ("yield from iter(lambda: Load(Inst('m0', (0,))), None)", 200.0, "an answer of 10000 actions or more"),
    ],
)
def test_an_answer_without_end(
    answer: str, longest_s: float, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "LONGEST_S", longest_s)
    (failure,) = check(mine(tmp_path, "for k, (m, model)", f"{answer}\n        for k, (m, model)"))
    assert (failure.law, failure.event) == ("livelock", 0)
    assert says in failure.message


@cases(
    ("args", "says"),
    [
        ({"name": "statik"}, 'no system "statik"; did you mean static?'),
        ({"name": "./no_such.py"}, "no file"),
        ({"name": "static", "only": "severed"}, 'no law "severed"; did you mean served?'),
        ({"name": "static", "case": "clam"}, 'no case "clam"; did you mean calm?'),
    ],
)
def test_a_wrong_name_gets_a_suggestion(args: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        check(**args)


@cases(
    ("action", "uses"),
    [
        (Wake(1.0), []),
        (Load(A), ["Load"]),
        (Load(A, "pool"), ["Load", "Load.way:pool"]),
        (Evict(A, drain=False), ["Evict", "Evict.drain"]),
        (Run(Batch(A)), ["Run"]),
        (Run(Batch(A), "decode", steps=0, sms=8), ["Run", "Run.phase:decode", "Run.steps:0", "Run.sms"]),
        (Run(Batch(A), steps=5), ["Run", "Run.steps"]),
        (Move(3, None), ["Move.to:none", "Move"]),
        (Move(3, Host(0)), ["Move.to:host", "Move"]),
        (Move(3, (0,), attend=True), ["Move.to:gpu", "Move", "Move.attend"]),
    ],
)
def test_what_an_action_needs(action: Action, uses: list[str]) -> None:
    assert list(needs(action)) == uses


def test_what_a_system_may_not_import_or_call() -> None:
    standard = (
        "asyncio contextvars ctypes datetime gc glob importlib io logging multiprocessing os pathlib pickle queue "
        "random secrets signal socket subprocess sys tempfile threading time uuid weakref"
    )
    for name in f"{standard} numba numpy.random pyarrow torch harness.loop.replay systems.static".split():
        assert list(impure(f"import {name}")) == [(1, f"imports {name}")]
        assert next(iter(impure(f"def f():\n    from {name} import x"))) == (2, f"imports {name}.x")
    for source, what in (
        ("from numpy import random", "imports numpy.random"),
        ("from . import static", "imports ..static"),
        ("from harness.engines.sim.engine import Sim", "imports harness.engines.sim.engine.Sim"),
        ("from harness import load", "imports harness.load"),
        ("import numpy as np\nx = np.random.default_rng(0)", "uses numpy.random"),
        ("import numpy as np\nx = np.load('x')", "uses numpy.load"),
        ("x = open('x')", "uses open"),
        ("x = hash('x')", "uses hash"),
        ("x = map(open, [])", "uses open"),
        ("def f(x, name): return getattr(x, name)", "getattr with a name that is no literal"),
        ("def f(x): return getattr(x, '__dict__')", "uses __dict__"),
        ("def f(x): return x.format()", "uses .format"),
        ("def f(x): return '{0.id}'.format(x)", "format with the attribute of an argument"),
        ("def f(x): return '{:{0.id}}'.format(x, x)", "format with the attribute of an argument"),
        ("def f(x): return x._rest", "uses _rest, which is not its own"),
        ("class A:\n    def f(self, x): self._sim = x", "uses _sim, a name inside of the bench; call it otherwise"),
        ("class A:\n    __match_args__ = ('x',)", "uses __match_args__"),
        ("class A:\n    def __getattr__(self, name): return 0", "uses __getattr__"),
        ("class A(metaclass=B): pass", "a class with metaclass="),
        ("A = type('A', (), {})", "uses type"),
        ("object.__setattr__(view, 'x', 1)", "uses __setattr__"),
        ("import math\nx = [math]", "passes the module math on"),
        ("import math\nmath.pi = 3", "changes math.pi"),
        ("import enum\nx = enum.sys", "uses enum.sys"),
        ("def f(x: 'open(0)'): pass", "a type that is computed"),
        ("async def f(): pass", "uses async"),
    ):
        assert what in [reason for _, reason in impure(source)]
        assert {line for line, _ in impure(source)} <= {1, 2}


def test_what_a_system_may_import_and_call() -> None:
    imports = (
        "import math",
        "import numpy as np",
        "from scipy.optimize import milp",
        "from collections.abc import Iterable",
        "from harness.policy.types import Inst",
    )
    body = """
x = request.id
y = np.argsort(z).mean(axis=0)
w = np.linalg.norm(y)
text = "{:.3f} {name}".format(x, name=y)
kind: type[int] = type(x)
late = getattr(x, "id", None)
_kept = Inst("m", (0,))._replace(place=(1,))


class A:
    __slots__ = ("_queue", "tau")
    __hash__ = None

    def __init__(self, queue: "list[int]") -> None:
        object.__setattr__(self, "_queue", queue)

    def __lt__(self, other: "A") -> bool:
        return len(self._queue) < len(other._queue)
"""
    assert list(impure("\n".join([*imports, body]))) == []


def tried(name: str, system: str = "chunked") -> Trial:
    return run(next(subject for subject in subjects(system, case=name).values() if subject.preset is None))


def test_cases_are_as_hard_as_they_say() -> None:
    every = workloads.cases()
    assert max(row["done_ns"] for row in tried("overload").rows) > 3e9 * every["overload"].jobs.arrival_s[-1]
    assert sum(row["preemptions"] for row in tried("pressure").rows) > 0
    assert every["long-prompts"].jobs.prompt_tokens.min() > 2 * every["long-prompts"].config.chunk_tokens
    assert set(every["one-token"].jobs.output_tokens) == {1}
    assert np.unique(every["simultaneous"].jobs.arrival_s, return_counts=True)[1].min() > 1
    assert len(set(every["idle-model"].jobs.model)) < len(every["idle-model"].jobs.models)
    assert len(every["no-requests"].jobs) == 0
    room = every["room"].config
    assert room.gpus > sum(m.tp for m in room.models)
    assert len(tried("refused").refused) > 1
    assert {m.tp for m in every["tensor-parallel"].config.models} == {1, 2}


@cases("share", [0.0, 0.3, 0.9, 1.0])
def test_another_future_has_the_same_past(share: float) -> None:
    subject: Subject = next(iter(subjects("chunked", case="one-gpu").values()))
    case: Case = subject.case
    t_s = float(np.quantile(case.jobs.arrival_s, share))
    until = run(subject, case.jobs, t_s)
    other = otherwise(until)
    n = until.seen
    assert (np.diff(other.arrival_s) >= 0).all()
    assert (other.output_tokens >= 1).all()
    assert (case.jobs.arrival_s[n:] > t_s - 1.0).all()
    assert (other.arrival_s[n:] > t_s).all()
    for name in ("arrival_s", "model", "prompt_tokens"):
        assert getattr(other, name)[:n].tolist() == getattr(case.jobs, name)[:n].tolist()
    for row in until.rows[:n]:
        asked = other.output_tokens[row["id"]]
        assert asked == row["output_tokens"] if row["state"] == "done" else asked > row["made_tokens"]
    left = [row["id"] for row in until.rows if row["state"] != "done"]
    assert (other.output_tokens[left] != case.jobs.output_tokens[left]).mean() > 0.9 or not left
