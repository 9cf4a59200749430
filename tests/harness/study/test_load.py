"""Studies read from TOML: what a file says, and every mistake in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.policy.types import GIB, UserError
from harness.study import grid
from harness.study.load import study
from harness.study.study import START, Claim, Condition, Scope
from tests.cases import cases

MINE = """
paper = "A test"
definitions = ["ttft", "tpot"]
slo = "absolute:ttft=2,tpot=0.1"
controls = true
requests = 100
warmup_s = 10.0
titles = ["one"]
bounds = ["dedicated"]
sample = { rule = "bisect", points = 5 }
quick = { seeds = 2, window_s = 50.0 }
full = { seeds = 3, points = 8 }
systems = { chunked = "chunked", theirs = "static" }
spec = { trace = "sample", gpus = 1 }

[[condition]]
name = "rates"
vary = { gpus = [1, 2] }
at_rps = [1.0, 8.0]
spec = { models = "llama-3.1-8b*3", pool_bytes = 64961380352, assign = "shuffled" }

[[condition]]
name = "scales"
along = "slo_scale"
at = [1.0, 2.0]
full = [1.5]
spec = { models = "llama-3.1-8b*3", rate_rps = 2.0, plan = "trace" }

[[condition]]
name = "counts"
along = "gpus"
at = [1, 2]
extra = true
among = ["chunked", "theirs"]
spec = { models = "llama-3.1-8b*5", slo_scale = 2.0 }

[[claim]]
what = "ratio"
on = { condition = "rates" }
definition = "ttft"
system = "chunked"
over = "theirs"
paper = 2.3

[[claim]]
what = "fewest"
on = { axis = "gpus" }
system = "chunked"
paper = 4
"""


TWO_STEPS = """
[[condition]]
name = "larger steps"
spec = { chunk_tokens = 4096 }
origin = "paper states"
source = "a section"

[[condition]]
name = "equal parts"
systems = { theirs = "static:equal" }
origin = "unknown"
source = "nothing says so"
"""
STEPS = """
paper = "A test"
definitions = ["ttft"]
slo = "absolute:ttft=10,tpot=1"
along = "rate_rps"
at = [1.0, 8.0]
cumulative = true
layout = "steps"
systems = { ours = "chunked", theirs = "static" }
spec = { trace = "sample", models = "llama-3.2-1b*4", gpus = 1 }
"""
STEPS += TWO_STEPS


def written(folder: Path, text: str) -> str:
    (path := folder / "mine.toml").write_text(text)
    return str(path)


def test_a_file_is_a_study(tmp_path: Path) -> None:
    mine = study(written(tmp_path, MINE))
    assert (mine.name, mine.systems) == ("mine", {"chunked": "chunked", "theirs": "static"})
    assert (mine.quick, mine.full) == (Scope(2, window_s=50.0), Scope(3, points=8))
    rates, scales, counts = mine.condition
    assert (rates.spec["assign"], rates.spec["pool_bytes"]) == ("shuffled", round(60.5 * GIB))
    assert (mine.along_x(scales), mine.along_x(scales, full=True)) == ((1.0, 2.0), (1.0, 1.5, 2.0))
    assert counts == Condition(
        "counts",
        {"models": "llama-3.1-8b*5", "slo_scale": 2.0},
        among=("chunked", "theirs"),
        along="gpus",
        at=(1, 2),
        extra=True,
    )
    assert mine.claim[1] == Claim("fewest", "chunked", on={"axis": "gpus"}, paper=4)
    quick = mine.of(full=False)
    assert ([condition.name for condition in quick.condition], mine.of(full=True)) == (["rates", "scales"], mine)
    assert [panel.key for panel in grid.panels(quick, full=False)] == ["rates / 1", "rates / 2", "scales"]


def test_steps_add_up_in_their_order_and_stand_alone(tmp_path: Path) -> None:
    asked = study(written(tmp_path, STEPS))

    def walk(names: list[str] | None) -> list[tuple[str, str, str | None, int | None]]:
        part = asked.only(names)
        specs = ((step, part.spec_of(step, "theirs"), part.spec_of(step, "ours")) for step in part.steps())
        return [(step.kind, step.name, theirs.preset, ours.chunk_tokens) for step, theirs, ours in specs]

    assert walk(None) == [
        ("base", START, None, None),
        ("cumulative", "larger steps", None, 4096),
        ("cumulative", "equal parts", "equal", 4096),
        ("alone", "larger steps", None, 4096),
        ("alone", "equal parts", "equal", None),
    ]
    assert walk(["equal parts"]) == [
        ("base", START, None, None),
        ("cumulative", "equal parts", "equal", None),
        ("alone", "equal parts", "equal", None),
    ]


MISTAKES: list[tuple[str, str, str]] = [  # what stands in MINE, what stands there instead, and what is said
    ('paper = "A test"', 'paper = "A test"\nrows = 2', 'unknown key "rows"'),
    ("[[condition]]", "[[condition", "mine.toml"),
    ("controls = true", 'measures = ["done_rp"]', 'mine.toml: measures: no column "done_rp"; did you mean done_rps?'),
    ("controls = true", "for_system = { prism = { batch_cap = 2 } }", 'mine.toml: for_system: no system "prism"'),
    ("controls = true", 'layout = "claims"', 'claim 1: neither the key "measure" is there, nor "lacks"'),
    (
        'definitions = ["ttft", "tpot"]',
        'definitions = ["ttfd"]',
        'no definition "ttfd"; did you mean ttft?',
    ),
    ('definitions = ["ttft", "tpot"]', "definitions = []", "definitions is empty"),
    ('slo = "absolute:ttft=2,tpot=0.1"', 'slo = "P59"', "P59"),
    ('titles = ["one"]', 'titles = ["one", "two"]', "titles are 2, traces of a condition at most 1"),
    ("gpus = 1 }", "gpsu = 1 }", 'spec: unknown key "gpsu"; did you mean gpu?'),
    ("systems = {", 'more = ["chunked"]\nsystems = {', 'more: "chunked" is one of systems'),
    ("systems = {", 'more = ["chunkd"]\nsystems = {', "did you mean chunked?"),
    ("gpus = 1 }", "seed = 1 }", 'spec: "seed" is set by the bench'),
    ('along = "gpus"', 'along = "gpu"', 'condition "counts": along is "gpu"; did you mean gpus?'),
    ('name = "counts"', 'name = "rates"', 'condition "rates" is listed twice'),
    ("at = [1.0, 2.0]\nfull = [1.5]\n", "", 'condition "scales": no x: at is empty, and slo_scale is not searched'),
    ("at_rps = [1.0, 8.0]", "at_rps = [0.0]", 'condition "rates": at: 0.0 is not a number above 0'),
    ("at_rps = [1.0, 8.0]", "at_rps = [1.0]\nat = [1.0]", "at_rps is given along rate_scale, instead of at and full"),
    ("at = [1.0, 2.0]", 'at = ["a"]', "condition \"scales\": at: 'a' is not a number above 0"),
    ("at = [1, 2]", "at = [1.5, 2]", 'condition "counts": at is [1.5, 2]: GPUs are whole numbers'),
    ('rule = "bisect"', 'rule = "bracket"', 'condition "rates": at is [], not the least and the most that are tried'),
    ("rate_rps = 2.0", "rate_rps = [2.0, 3.0]", "spec: rate_rps is [2.0, 3.0], not a number above 0"),
    ("rate_rps = 2.0", "rate_rps = 0.0", "spec: rate_rps is 0.0, not a number above 0"),
    ("rate_rps = 2.0", "rate_rps = 2.0, rate_scale = 1.0", "rate_rps and rate_scale are both given"),
    ("pool_bytes = 64961380352", 'pool_bytes = "60"', 'condition "rates": spec: pool_bytes is'),
    ('plan = "trace"', 'plan = "traces"', "did you mean trace?"),
    ("vary = { gpus = [1, 2] }", "vary = { gpus = [] }", "vary.gpus is empty"),
    ("vary = { gpus = [1, 2] }", "vary = { rate_scale = [1.0] }", 'vary: "rate_scale" is along x'),
    ("vary = { gpus = [1, 2] }", "vary = { seed = [1] }", 'vary: "seed" is set by the bench'),
    ('among = ["chunked", "theirs"]', 'among = ["theirs"]', "among is without chunked, the study's first system"),
    ('among = ["chunked", "theirs"]', 'among = ["chunked", "qlm"]', 'condition "counts": no system "qlm"'),
    ('among = ["chunked", "theirs"]', 'systems = { their = "x" }', 'no system "their"; did you mean theirs?'),
    ('among = ["chunked", "theirs"]', 'origin = "unknown"', "origin is of the steps of a cumulative study"),
    ('among = ["chunked", "theirs"]', 'band = { host = "none" }', "band: it is the other end of what a step"),
    ("paper = 2.3", 'paper = "always"', 'claim 1: paper is "always", not a number or one of reached, never, met,'),
    ("paper = 2.3", 'paper = "met"', 'claim 1: the key "at" is where a level is met or missed'),
    ("paper = 2.3", 'paper = "ahead"\nbound = "up to"', 'claim 1: bound is "up to", and paper is no number'),
    ("paper = 2.3", "paper = 2.3\nalso = [{ over = 'thers' }]", 'claim 1: over is "thers"; did you mean theirs?'),
    ("paper = 2.3", "paper = 2.3\nalso = [{ ovre = 'theirs' }]", 'also: unknown key "ovre"; did you mean over?'),
    ("paper = 2.3", "paper = [3, 2]", "claim 1: paper is [3.0, 2.0], not a number or two, the smaller first"),
    ("paper = 2.3", "paper = 2.3\ncomparable = false", 'claim 1: comparable is false, and the key "why" is missing'),
    ('on = { condition = "rates" }', 'on = { condition = "rate" }', 'no condition "rate"; did you mean rates?'),
    ('on = { condition = "rates" }', 'on = { slos = "x" }', 'claim 1: on: unknown key "slos"; did you mean slo?'),
    ('on = { axis = "gpus" }', 'on = { axis = "gpu" }', 'claim 2: no condition along "gpu"; did you mean gpus?'),
    ('on = { axis = "gpus" }', 'on = { slo = "4xP95" }', 'claim 2: slo is "4xP95" (absolute:ttft=2,tpot=0.1)'),
    ('on = { axis = "gpus" }', 'on = { axis = "gpus", condition = "rates" }', 'condition "rates" is not along'),
    ('along = "gpus"\nat = [1, 2]', 'along = "models"\nat = [1, 2]', "at: 1 is not the name of a model set"),
    ('definition = "ttft"', 'definition = "both"', 'claim 1: definition is "both" (ttft, tpot)'),
    ('system = "chunked"\nover', 'system = "best qln"\nover', 'claim 1: system is "best qln"'),
    ('system = "chunked"\nover', 'system = "chunked and qln"\nover', 'claim 1: system is "qln"'),
    ('over = "theirs"', 'over = "thers"', 'claim 1: over is "thers"; did you mean theirs?'),
    ('over = "theirs"\n', "", 'claim 1: a ratio is over another system: the key "over" is missing'),
    ('what = "fewest"', 'what = "value"', 'claim 2: the key "shape" is missing'),
    ('what = "fewest"', 'what = "measure"\nmeasure = "ended"', 'claim 2: measure is "ended"'),
]


OF_STEPS: list[tuple[str, str, str]] = [
    ("chunk_tokens = 4096", "chunk_token = 4096", 'condition "larger steps": spec: unknown key "chunk_token"'),
    ("chunk_tokens = 4096", 'chunk_tokens = "x"', 'condition "larger steps": spec: chunk_tokens is'),
    ("chunk_tokens = 4096", "watermark = 0.01", 'condition "larger steps": it changes nothing of the fair default'),
    ('origin = "unknown"', 'origin = "unkown"', 'condition "equal parts": origin is "unkown"; did you mean unknown?'),
    ('source = "a section"\n', "", 'condition "larger steps": the key "source" is missing'),
    ('systems = { theirs = "static:equal" }', "spec = { chunk_tokens = 512 }", 'chunk_tokens is changed by "larger'),
]


@cases(("text", "old", "new", "says"), [(MINE, *edit) for edit in MISTAKES] + [(STEPS, *edit) for edit in OF_STEPS])
def test_a_mistake_names_file_and_key_in_one_line(tmp_path: Path, text: str, old: str, new: str, says: str) -> None:
    assert old in text
    with pytest.raises(UserError) as error:
        study(written(tmp_path, text.replace(old, new)))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("mine.toml: ") or str(error.value).startswith(str(tmp_path))


def test_a_system_is_listed_once(tmp_path: Path) -> None:
    systems = '{ chunked = "chunked", theirs = "static" }'
    with pytest.raises(UserError, match=r'mine\.toml: system "static" is listed twice'):
        study(written(tmp_path, MINE.replace(systems, '["static", "static"]')))
    with pytest.raises(UserError, match=r"mine\.toml: systems is empty"):
        study(written(tmp_path, MINE.replace(systems, "[]")))


def test_a_file_of_slo_classes_may_lie_beside_its_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (there / "slow.toml").write_text('[class.slow]\nttft_s = 9.0\ntpot_s = 0.2\n[models]\n"*" = "slow"\n')
    (there / "mine.toml").write_text(
        'systems = ["prism"]\nslo = "classes:slow.toml"\nat = [1.0]\n[[condition]]\nname = "a"\n'
    )
    monkeypatch.chdir(here)
    assert study("../there/mine.toml").slo == "classes:../there/slow.toml"
    (there / "slow.toml").rename(here / "slow.toml")  # as seen from here, where none lies beside it
    assert study("../there/mine.toml").slo == "classes:slow.toml"
