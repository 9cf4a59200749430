"""The fewest GPUs by bracketing: the right count in few runs, none run twice; fleets and ablations as data."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.engines.costs import shapes
from harness.policy.types import GIB, UserError
from harness.rows import record, statistics
from harness.rows.statistics import Estimate
from harness.run import toml_tables
from harness.study import ablation, fewest
from harness.study.claims import judged
from harness.study.fewest import Claim, Contest, next_count, ratio
from harness.study.fewest_text import count, lines, spread
from harness.study.rates import Workload
from plots import fig_fleet
from tests.test_sweep import files
from workloads.models import model_set

LEVEL = 0.99
Attained = Callable[[int, int], float]  # of a number of GPUs and a seed


def searched(attained: Attained, least: int, most: int, seeds: int = 1) -> tuple[Estimate, list[int]]:
    """The answer of a search, and the counts that it sampled in order."""
    curves: dict[int, dict[float, float]] = {}
    order: list[int] = []
    while (gpus := next_count(curves, least, most, LEVEL)) is not None:
        order.append(gpus)
        for seed in range(seeds):
            curves.setdefault(seed, {})[float(gpus)] = attained(gpus, seed)
    return statistics.fewest(curves, LEVEL).at, order


# ------------------------------------------------------------------ bracketing


@pytest.mark.parametrize("least", [1, 4])
def test_a_step_is_found_in_few_counts_and_none_twice(least: int) -> None:
    def step_at(step: int) -> Attained:
        return lambda n, _: 1.0 if n >= step else 0.5

    for step in range(least, 33):
        at, order = searched(step_at(step), least, 32)
        assert at.mean == step
        assert at.sign == ("<" if step == least else "=")
        assert len(order) == len(set(order)) <= 2 + math.ceil(math.log2(32 - least + 1))
        assert all(least <= n <= 32 for n in order)


def test_what_the_most_cannot_do_costs_one_count() -> None:
    at, order = searched(lambda n, _: n / 100, 4, 32)
    assert (at.mean, at.sign, order) == (32, ">", [32])


def test_the_answers_neighbours_are_sampled() -> None:
    at, order = searched(lambda n, _: 1.0 if n >= 11 else 0.5, 4, 32)
    assert at.mean == 11
    assert {10, 11, 12} <= set(order)


def test_a_lone_count_that_holds_by_luck_is_no_answer() -> None:
    """Halving meets 10, which holds; the count above fails by more, so the search goes on above it."""
    lucky = {10: 0.991, 11: 0.95}
    at, order = searched(lambda n, _: lucky.get(n, 1.0 if n >= 14 else 0.5), 4, 32)
    assert {10, 11} <= set(order)
    assert at.mean == 14
    assert len(order) == len(set(order))


def test_the_mean_over_seeds_decides() -> None:
    at, _ = searched(lambda n, seed: 1.0 if n >= 9 + 2 * seed else 0.98, 4, 32, seeds=3)  # 9, 11 and 13 alone
    assert at.mean == 11  # (1 + 1 + 0.98) / 3 = 0.993; at 10 it is 0.987


@pytest.mark.parametrize("seed", range(200))
def test_under_noise_the_answer_is_sampled_and_holds(seed: int) -> None:
    draw = random.Random(seed)
    step, noise = draw.randint(4, 32), {n: draw.gauss(0, 0.01) for n in range(4, 33)}
    seen: dict[float, float] = {}

    def attained(n: int, _: int) -> float:
        seen[float(n)] = min(1.0, max(0.0, (0.995 if n >= step else 0.97) + noise[n]))
        return seen[float(n)]

    at, order = searched(attained, 4, 32)
    assert len(order) == len(set(order))
    if at.sign == ">":
        assert statistics.fewest({0: seen}, LEVEL).at.sign == ">"
    else:
        assert seen[at.mean] >= LEVEL
        assert at.mean in {4, 32} or {at.mean - 1, at.mean + 1} <= seen.keys()
        assert at.mean == 4 or seen[at.mean - 1] < LEVEL or at.mean == 32


def test_a_ratio_of_bounds_is_a_bound() -> None:
    def e(mean: float, sign: str = "=") -> Estimate:
        return Estimate(mean, None, None, 3, sign)  # type: ignore[arg-type]

    assert ratio(e(32), e(16)) == Estimate(2.0, None, None, 3)
    assert ratio(e(32, ">"), e(16)) == Estimate(2.0, None, None, 3, ">")
    assert ratio(e(32), e(16, ">")) == Estimate(2.0, None, None, 3, "<")
    assert ratio(e(32, ">"), e(16, ">")) == Estimate(2.0, None, None, 3, "~")
    assert ratio(None, e(16)) is None


def test_counts_in_words() -> None:
    at = [Estimate(9, None, None, 1), Estimate(11, None, None, 1), Estimate(32, None, None, 1, ">")]
    assert [count(e) for e in at] == ["9", "11", ">32"]
    assert spread(at) == " [9 - >32]"
    assert spread(at[:1] * 3) == ""


# ------------------------------------------------------------------ the set and the files


def test_prism58_is_what_its_header_says() -> None:
    members = model_set("prism58").members
    gib = [shapes.weight_bytes(one.shape, 1) / GIB for one in members]
    assert len(members) == len({one.name for one in members}) == 58
    assert sum(gib) == pytest.approx(596, abs=0.5)
    assert sum(gib) / 67.28 == pytest.approx(8.9, abs=0.05)
    small = [one.shape.name for one in members if one.tp == 1 and one.shape.name != "qwen-2.5-14b"]
    assert sorted(small) == sorted(3 * [one.shape.name for one in model_set("prism18").members])
    assert [one.tp for one in members if one.tp > 1] == [4, 4, 4]
    assert all(one.tp in shapes.degrees(one.shape) and one.tp <= 8 for one in members)
    assert all(one.stream is None for one in members)


def test_figure_12_as_data() -> None:
    found = fewest.fleet("fig12")
    assert [entry.label for entry in found.entries][:2] == ["prism", "muxserve:plusplus"]
    assert (found.gpus, found.level, found.definition) == ((4, 32), 0.99, "ttft")
    assert found.spec["pool_bytes"] == round(67.28 * 2**30)
    assert {one.paper for one in found.claim} == {16, 20, 32, (2.0, 8.0)}


def test_ablations_of_prism_as_data() -> None:
    found = ablation.ablation("prism")
    assert {part.figure for part in found.part} >= {8, 9, 10, 11}
    assert {one.paper for one in found.activation} == {(0.0, 0.7), 1.3, (0.0, 1.5)}
    assert found.spec["pool_bytes"] == round(67.28 * 2**30)


MINE = """
paper = "A test"
systems = ["static", "chunked"]
bounds = ["dedicated"]
gpus = [1, 3]
slos = ["5xP95", "absolute:ttft=5,tpot=1"]
seeds = 2

[spec]
models = "llama-3.1-8b*5"
warmup_s = 5.0

[[workload]]
trace = "sample"
rate_scale = 1.0

[[claim]]
system = "static"
slo = "5xP95"
paper = 2

[[claim]]
system = "static"
over = "chunked"
slo = "5xP95"
paper = [0.5, 2.0]
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("gpus = [1, 3]", "gpus = [3, 1]", "gpus is [3, 1], not the least and the most"),
        ("gpus = [1, 3]", "gpus = [1.0, 3.0]", "gpus is [1.0, 3.0], not the least"),
        ("seeds = 2", "seeds = 0", "seeds is 0, not a whole number above 0"),
        ("seeds = 2", "", 'the key "seeds" is missing'),
        ("seeds = 2", "seed = 2", 'unknown key "seed"; did you mean seeds?'),
        ('slo = "5xP95"', 'slo = "4xP95"', 'claim 1: slo is "4xP95", none of the fleet\'s'),
        ('system = "static"', 'system = "qlm"', 'claim 1: system is "qlm", none of the fleet\'s'),
        (
            "paper = 2\n",
            "paper = 2\ncomparable = false\n",
            'claim 1: comparable is false, and the key "why" is missing',
        ),
        ('trace = "sample"', "", 'workload 1: the key "trace" is missing'),
        ('systems = ["static", "chunked"]', 'systems = ["static", "static"]', 'system "static" is listed twice'),
        ('models = "llama', 'model = "llama', 'unknown key "model"; did you mean models?'),
        ("[[workload]]", "[[workload]", "mine.toml: "),
    ],
)
def test_mistakes_of_a_fleet_name_file_and_key(old: str, new: str, says: str, tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_text(MINE.replace(old, new, 1))
    with pytest.raises(UserError) as error:
        fewest.fleet(str(path))
    assert "mine.toml: " in str(error.value)
    assert says in str(error.value)


def test_a_fleet_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='no fleet "fig13"; did you mean fig12'):
        fewest.fleet("fig13")
    with pytest.raises(UserError, match="No such file"):
        fewest.fleet(str(tmp_path / "none.toml"))


# ------------------------------------------------------------------ all of it, on the committed sample


class Heard:
    """Remembers how much of each phase stood before."""

    def __init__(self) -> None:
        self.stood: dict[str, tuple[int, int]] = {}

    def say(self, line: str) -> None:
        """See Teller."""

    def progress(self, what: str, done: int, total: int) -> None:
        """See Teller."""
        self.stood.setdefault(what, (done, total))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[fewest.Fleet, fewest.Found, Path]:
    """A small fleet, run once."""
    folder = tmp_path_factory.mktemp("fleet")
    (path := folder / "mine.toml").write_text(MINE)
    asked = fewest.fleet(str(path))
    return asked, fewest.fewest(asked, folder / "out", workers=1), folder / "out"


def test_a_small_fleet(found: tuple[fewest.Fleet, fewest.Found, Path]) -> None:
    asked, result, out = found
    at = {Contest(x.workload, x.slo, x.label): x for x in result.answers}
    assert len(at) == 2 * 3
    for one, x in at.items():
        if one.label == "dedicated":
            assert (x.at.mean, x.at.sign, x.counts, x.seeds) == (5, "=", 1, ())
            continue
        assert x.at.mean >= 2  # five of 15 GiB do not fit one GPU
        assert len(x.seeds) == 2
        assert 1 <= x.counts <= 3
        assert 0 <= x.worst <= x.attained <= 1
        assert x.attained >= LEVEL or x.at.sign == ">"
        assert x.cpu_s >= 0
    strict, lax = (at[Contest(Workload("sample", 1.0), slo, "static")].at.mean for slo in asked.slos)
    assert lax <= strict
    heard = Heard()
    before = files(out)
    again = fewest.fewest(asked, out, workers=1, teller=heard)
    assert again.answers == result.answers
    assert heard.stood
    assert all(done == total for done, total in heard.stood.values())
    assert files(out) == before


def test_a_fleet_in_words_and_drawn(found: tuple[fewest.Fleet, fewest.Found, Path], tmp_path: Path) -> None:
    _, result, _ = found
    text = "\n".join(lines(result))
    assert "fewest GPUs of 1 to 3 for 99 % TTFT · sample (synthetic)" in text
    assert "static / chunked, GPUs at SLO 5xP95" in text
    assert "\n| static | " in "\n".join(lines(result, markdown=True))
    paths = fig_fleet.render(result.folder, tmp_path / "fig", "a test")
    assert [path.suffix for path in paths] == [".pdf", ".png", ".csv"]
    points = fig_fleet.points(pq.read_table(result.folder / record.SWEEP), fig_fleet.about(result.folder))
    own = points[points["label"] == "static"]
    answers = {x.slo: x.at for x in result.answers if x.label == "static" and x.at.sign != ">"}
    assert {r.slo: r.gpus for r in own[own["answer"]].itertuples()} == {slo: at.mean for slo, at in answers.items()}
    assert fig_fleet.draws(result.folder)


def test_a_claim_is_judged_by_the_rule_of_all_claims(found: tuple[fewest.Fleet, fewest.Found, Path]) -> None:
    _, result, _ = found
    here = next(x.at for x in result.answers if (x.label, x.slo) == ("static", "5xP95"))
    first, second = fewest.verdicts(result)
    assert first.claim == Claim("static", "5xP95", 2)
    assert first.here == here
    assert first.says == judged(2, here)
    assert second.claim.paper == (0.5, 2.0)
    assert second.here is not None
    assert 1 / 3 <= second.here.mean <= 3


# ------------------------------------------------------------------ ablations


def test_a_loss_is_paired_by_seed_and_names_the_model_that_loses_most() -> None:
    part = ablation.Part("a+b=false", "b", "it helps")
    whole = {"": {0: 0.9, 1: 0.7}, "x": {0: 0.9, 1: 0.9}, "y": {0: 0.8, 1: 0.6}}
    without: Mapping[str, Mapping[int, float]] = {"": {0: 0.8, 1: 0.6}, "x": {0: 0.9, 1: 0.9}, "y": {0: 0.3, 1: 0.1}}
    found = ablation.loss(part, Workload("t", 2.0), whole, without)
    assert found.pooled.mean == pytest.approx(0.1)
    assert found.pooled.low == pytest.approx(0.1)  # both seeds differ by the same: no spread
    assert found.model == "y"
    assert found.most.mean == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[[part]]", "[[parts]]", 'unknown key "parts"; did you mean part?'),
        ('system = "prism+elastic=false"', 'system = "prism"', 'part 1: system "prism" is listed twice'),
        ('off = "KV memory on demand"', "", 'part 1: the key "off" is missing'),
        ('why = "figure 11', 'because = "figure 11', 'part 4: unknown key "because"'),
    ],
)
def test_mistakes_of_an_ablation_name_file_and_key(old: str, new: str, says: str, tmp_path: Path) -> None:
    text = (ablation.ABLATIONS / "prism.toml").read_text()
    assert old in text
    (path := tmp_path / "mine.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as error:
        ablation.ablation(str(path))
    assert "mine.toml: " in str(error.value)
    assert says in str(error.value)


ABLATED = """
paper = "A test"
base = "static:rate"
slo = "5xP95"
seeds = 2

[spec]
models = "llama-3.1-8b*5"
gpus = 2
warmup_s = 5.0

[[workload]]
trace = "sample"
rate_scale = 1.0

[[workload]]
trace = "sample"
rate_scale = 2.0

[[part]]
system = "static:equal"
off = "sizes by rate"
says = "it helps"
paper = [0.0, 1.0]

[[activation]]
shape = "llama-3.1-8b"
paper = [0.0, 0.8]
"""


def test_a_small_ablation(tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_text(ABLATED)
    found = ablation.ablate(ablation.ablation(str(path)), tmp_path / "out", workers=1)
    assert [x.workload.rate_scale for x in found.losses] == [1.0, 2.0]
    assert all(0 <= e.mean <= 1 for e in found.whole.values())
    for x in found.losses:
        assert x.pooled.n == 2
        assert x.most.mean >= x.pooled.mean - 1e-12  # the model that loses most loses no less than all together
    text = "\n".join(ablation.lines(found))
    assert "sizes by rate" in text
    assert "activation of llama-3.1-8b, TP 1" in text
    assert "0.74 s" in text  # 0.7 s, and 15 GiB over eight PCIe links, gathered over NVLink


def test_lists_of_tables_and_files() -> None:
    assert toml_tables.names(fewest.FLEETS) == ["fig12"]
    with pytest.raises(UserError, match=r"workload is 3, not a list of tables"):
        toml_tables.each(Workload, "workload", 3)
