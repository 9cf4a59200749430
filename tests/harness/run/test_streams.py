"""Assignments of a trace's streams: shipped sets as ever, models of equal names by these; and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness.policy.types import UserError
from harness.run.setup import Setup, load_models
from harness.run.spec import Spec
from harness.run.streams import lines
from harness.study.traffic import million_tokens_hour
from tests.bench import bench
from tests.cases import cases
from tests.workloads.test_workloads import SPAN_S, drawn
from traces import schema
from traces.chosen import chosen
from traces.kept import canonical
from traces.load import manifest, sized
from traces.load import trace as load
from workloads.models import ModelSet, Served, model_set, sets, shape
from workloads.picking import assigned

LATER = {"agents8", "quant3", "today12"}  # sets that came after names were matched
GENERATED = {"poisson", "power-law", "hot-cold"}  # traces that did
GOLDEN = json.loads(Path(__file__).with_name("streams.json").read_text("utf-8"))


@pytest.mark.full
@cases("pair", sorted(GOLDEN))
def test_shipped_sets_have_the_streams_that_they_had(pair: str) -> None:
    """streams.json: of seeds 0 and 1 (once where equal), with shifts; nothing: there are too few. Written before names
    were matched; pairs whose trace is not here are left out."""
    name, _, asked = pair.partition(" <- ")
    models = model_set(name)
    try:
        rows = load(sized(asked, len(models.members)))
    except UserError:
        return
    if rows.name != asked:
        return  # a stand-in
    if not GOLDEN[pair]:
        with pytest.raises(UserError):
            assigned(rows, models)
        return
    drawn = [assigned(rows, models, seed).streams for seed in (0, 1)]
    texts = [" ".join(f"{stream}{shift:+g}" if shift else stream for stream, shift in streams) for streams in drawn]
    assert list(dict.fromkeys(texts)) == GOLDEN[pair]


def test_every_shipped_pair_is_in_the_list() -> None:
    assert {pair.partition(" <- ")[0] for pair in GOLDEN} == set(sets()) - LATER
    alone = {name for name in manifest() if not name.startswith("aegaeon-synth")} - GENERATED
    assert {pair.partition(" <- ")[2] for pair in GOLDEN} >= alone


def test_equal_names_match() -> None:
    """Streams s0 to s4, of which s3 and s1 have a model of their name; the others take what is left by the old rule."""
    rows = drawn(300, streams=5)
    llama = shape("llama-3.2-1b")

    def of(*names: str, ordered: bool = False) -> tuple[str, list[str]]:
        dealt = assigned(replace(rows, ordered=ordered), ModelSet("own", tuple(Served(name, llama) for name in names)))
        return dealt.rule, [stream for stream, _ in dealt.streams]

    assert of("s3", "s1", "s0", "s4", "s2") == ("by name", ["s3", "s1", "s0", "s4", "s2"])
    assert of("s3", "s1") == ("by name", ["s3", "s1"])
    assert of("s3", "mine", "s1", "other", ordered=True) == ("by name", ["s3", "s0", "s1", "s2"])
    assert of("mine", "other", ordered=True) == ("in order", ["s0", "s1"])
    rule, streams = of("mine", "s1", "other", "more", "last")
    assert (rule, streams[1], set(streams)) == ("by name", "s1", {"s0", "s1", "s2", "s3", "s4"})
    assert of("mine", "other")[0] == "by traffic"
    named = ModelSet("own", (Served("s0", llama, stream="s1"), Served("s1", llama, stream="s0")))
    assert assigned(rows, named).streams == (("s1", 0.0), ("s0", 0.0))  # what the set says goes before names
    assert assigned(rows, named).rule == "released"
    assert assigned(rows, named, assign="shuffled").rule == "shuffled"


def test_a_trace_of_ones_own_says_who_gets_what(tmp_path: Path) -> None:
    rows = drawn(300, streams=3)
    counts = np.bincount(rows.model)
    file = tmp_path / "gateway.parquet"
    columns = {name: getattr(rows, name) for name in ("arrival_s", "prompt_tokens", "output_tokens")}
    columns |= {"request_id": np.arange(300), "model": [rows.models[k] for k in rows.model]}
    meta = {"name": "gateway", "tier": "replayed", "span_s": SPAN_S}
    pq.write_table(schema.table(columns, meta), file)

    def told(models: str, **more: object) -> list[str]:
        text = "".join(f'[[model]]\nname = "{name}"\nshape = "llama-3.2-1b"\n' for name in models.split())
        (tmp_path / "own.toml").write_text(text)
        load_models.cache_clear()
        spec = Spec("static", trace=str(file), models=str(tmp_path / "own.toml"), **more)  # type: ignore[arg-type]
        return lines(Setup(spec))

    assert told("s2 s0 s1") == ["streams by name"]
    assert told("s0 s1 mine") == [
        f"streams by name: 2 of 3 models; gateway -> own: mine <- s2 ({counts[2]:,} requests)"
    ]
    (line,) = told("a b c", assign="shuffled")
    assert line.startswith("streams shuffled (as each seed draws; seed 0): gateway -> own: a <- s")
    (line,) = told("a b c", assign="square")
    assert line.startswith(
        "streams square (each of the busiest meets each size of model once in 2 seeds; seed 0): gateway -> own: a <- s"
    )
    (line,) = told("a b c")
    assert line.startswith(
        "streams by traffic (no model is named as a stream is, so each seed draws which of the busiest it gets; "
        "seed 0): gateway -> own: a"
    )
    assert line.count(" <- ") == 3
    assert lines(Setup(Spec("static", trace="sample", models="llama-3.2-1b*2"))) == []


# ---------------------------------------------------------------- streams of a log without a model


ABSOLUTE = ("--slo", "absolute:ttft=1s,tpot=50ms")
TWO = '[[model]]\nname = "chat"\nshape = "llama-3.2-1b"\n[[model]]\nname = "code"\nshape = "llama-3.2-1b"\n'


def of_log(tmp_path: Path) -> tuple[Path, Path]:
    """A log of 300 requests, of which 80 are of chat-v2, and a set of chat and code."""
    (log := tmp_path / "two.csv").write_text(
        "timestamp,model,prompt_tokens,completion_tokens\n"
        + "".join(f"{i / 5},{'code' if i % 3 == 0 else 'chat' if i < 180 else 'chat-v2'},800,150\n" for i in range(300))
    )
    (models := tmp_path / "two.toml").write_text(TWO)
    load_models.cache_clear()
    return log, models


def test_a_log_with_streams_that_no_model_serves_is_refused_with_counts(tmp_path: Path) -> None:
    log, models = of_log(tmp_path)
    for command in ("compare", "size"):
        refused = bench(command, "--systems", "static", "--trace", log, "--models", models, *ABSOLUTE)
        assert refused.exit_code == 2
        assert refused.stderr.splitlines()[-1] == (
            "error: log two: 80 of 300 requests are of streams for which set two has no model: chat-v2 80 "
            "(--rename OLD=NEW, or --drop-streams NAME,... leaves them out, '*' all of them)"
        )
    assert bench("compare", "--systems", "static", "--models", models, "--dry-run", *ABSOLUTE).exit_code == 0  # fitted


@cases(
    ("options", "why"),
    [
        (("--rename", "chat-v3=chat"), '--rename chat-v3=chat: the log has no stream "chat-v3"; did you mean chat-v2?'),
        (("--rename", "chat-v2=chat", "--rename", "chat-v2=code"), "--rename: chat-v2 is there twice"),
        (("--rename", "chat-v2=chat,chat-v2=code"), "--rename: chat-v2 is there twice"),
        (("--drop-streams", "rag"), '--drop-streams rag: the log has no stream "rag"'),
        (("--rename", "chat=a,code=b", "--drop-streams", "*"), "--drop-streams * leaves no request of 300"),
    ],
)
def test_a_stream_that_is_not_there_and_a_log_without_requests_are_refused(
    tmp_path: Path, options: tuple[str, ...], why: str
) -> None:
    log, models = of_log(tmp_path)
    refused = bench("size", "--systems", "static", "--trace", log, "--models", models, *ABSOLUTE, *options)
    assert refused.exit_code == 2
    assert refused.stderr.splitlines()[-1].startswith(f"error: {why}")


def test_of_a_named_trace_no_stream_is_chosen() -> None:
    refused = bench("size", "--trace", "sample", "--drop-streams", "*", *ABSOLUTE)
    assert (refused.exit_code, 'not of "sample"' in refused.stderr) == (2, True)


def test_renamed_streams_are_one_and_dropped_ones_are_counted(tmp_path: Path) -> None:
    log, _ = of_log(tmp_path)

    def made(rename: dict[str, str], *drop: str) -> tuple[dict[str, int], float]:
        rows = load(str(canonical(log, tmp_path, streams=chosen(rename, drop, ["chat", "code"]))[0]))
        return dict(zip(rows.models, np.bincount(rows.model).tolist(), strict=True)), rows.kept_share

    assert made({"chat-v2": "chat"}) == ({"chat": 200, "code": 100}, 1.0)
    assert made({"chat": "code", "code": "chat"}) == ({"chat": 100, "chat-v2": 80, "code": 120}, 1.0)  # all at once
    for name in ("*", "chat-v2"):
        counts, kept = made({}, name)
        assert counts == {"chat": 120, "code": 100}
        assert kept == pytest.approx(220 / 300)


def test_requests_of_a_gateway_whose_clock_is_off_are_shifted(tmp_path: Path) -> None:
    """Gateways a and b take requests in turn, each second one; b's clock is 40 s late, so its rows stand later."""
    rows = [(t + 40 * (t % 2), "ab"[t % 2]) for t in range(10)]
    (log := tmp_path / "both.csv").write_text(
        "timestamp,gateway,prompt_tokens,completion_tokens\n"
        + "".join(f"{at + 0.5},{gateway},{100 + k},5\n" for k, (at, gateway) in enumerate(rows))
    )
    made = tmp_path / "both.parquet"
    common = ("trace", "convert", log, "-o", made, "--sort")
    for name, column in (("b", ("--column", "model=gateway")), ("b", ("--column", "src=gateway", "--model", "chat"))):
        assert bench(*common, *column, "--shift", f"{name}=-40").exit_code == 0
        assert load(str(made)).arrival_s.tolist() == [t + 0.5 for t in range(10)]
        assert load(str(made)).prompt_tokens.tolist() == [100 + t for t in range(10)]
    refused = bench(*common, "--column", "model=gateway", "--shift", "c=3")
    assert (refused.exit_code, refused.stderr) == (2, 'error: --shift c=3: the log has no stream "c" (it has a, b)\n')
    assert "no number of seconds" in bench(*common, "--model", "m", "--shift", "b=soon").stderr


def test_a_size_is_of_the_requests_that_are_served_and_says_their_share(tmp_path: Path) -> None:
    log, models = of_log(tmp_path)
    common = ("size", "--systems", "static", "--gpus", "1", "--trace", log, "--models", models, *ABSOLUTE)
    size = (*common, "--json", "--no-plot", "-o", tmp_path / "out", "--grow", "1.5")
    part, whole = (bench(*size, *way) for way in (("--drop-streams", "*"), ("--rename", "chat-v2=chat")))
    assert "in the whole log, of 73.3 % of the log's requests" in json.loads(part.stdout)["sentence"]
    assert "of the log" not in json.loads(whole.stdout)["sentence"].partition("whole log")[2]
    lines = bench(*common, "--drop-streams", "*", "--dry-run").stdout.splitlines()
    assert lines[0] == "streams by name: chat (120 requests), code (100 requests)"


def test_tokens_by_which_a_price_is_divided_are_those_of_the_models() -> None:
    """s0 and s1 of five streams are served: the others' tokens cost nothing."""
    rows = drawn(300, streams=5)
    models = ModelSet("own", tuple(Served(name, shape("llama-3.2-1b")) for name in ("s0", "s1")))
    mine = np.isin(rows.model, [0, 1])
    tokens = (rows.prompt_tokens.astype(int) + rows.output_tokens)[mine].sum()
    assert million_tokens_hour(rows, models) == pytest.approx(tokens / SPAN_S * 3600 / 1e6)
