"""A spec is a value: its hash names it, and what is not a spec says so in one line."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from harness.run.spec import Spec, as_dict, canonical, digest, from_dict, read, stored
from tests.cases import cases
from workloads.usual import POOL_BYTES

WORDS = st.text("abcdefghij-._/0123456789 é", min_size=1, max_size=12)
SECONDS = st.floats(1e-6, 1e9, allow_nan=False)
OPTIONS = st.one_of(st.integers(), st.booleans(), WORDS, st.floats(allow_nan=False, allow_infinity=False))
SPECS = st.builds(
    Spec,
    system=WORDS,
    preset=st.none() | WORDS,
    fields=st.dictionaries(WORDS, OPTIONS, max_size=3).map(lambda x: tuple(x.items())),
    gpus=st.integers(1, 64),
    rate_scale=SECONDS,
    scaling=st.sampled_from(["rotate", "replicate", "time", "clients"]),
    seed=st.integers(0, 2**31),
    window_s=st.none() | SECONDS,
    slo_s=st.dictionaries(WORDS, st.tuples(SECONDS, SECONDS), max_size=3).map(
        lambda x: tuple((model, *pair) for model, pair in x.items())
    ),
    watermark=st.floats(0, 1),
    token_times=st.booleans(),
    served=st.none() | st.integers(2, 2**20),
)


@given(SPECS)
def test_canonical_text_holds_the_whole_spec(spec: Spec) -> None:
    assert from_dict(json.loads(canonical(spec))) == spec
    assert canonical(from_dict(as_dict(spec))) == canonical(spec)


@given(SPECS, st.sampled_from([f.name for f in fields(Spec)]), SPECS)
def test_the_hash_tells_specs_apart(spec: Spec, name: str, other: Spec) -> None:
    changed = replace(spec, **{name: getattr(other, name)})
    assert (changed.hash8 == spec.hash8) == (canonical(changed) == canonical(spec))


def test_the_hash_is_the_first_digits_of_sha256_of_the_text() -> None:
    assert digest("") == "e3b0c442"  # SHA-256 of nothing, published
    spec = Spec("static")
    assert spec.hash8 == digest(canonical(spec))
    assert spec.folder == f"static-{spec.hash8}"


def test_equal_values_hash_alike_however_they_are_written() -> None:
    first = Spec("static", rate_scale=1, fields=(("b", 1), ("a", 2)), slo_s=(("y", 1, 2), ("x", 3, 4)))
    second = Spec("static", rate_scale=1.0, fields=(("a", 2), ("b", 1)), slo_s=(("x", 3.0, 4.0), ("y", 1.0, 2.0)))
    assert canonical(first) == canonical(second)
    assert '"rate_scale":1.0' in canonical(first)


ASKED: dict[str, Any] = {"served": 8192, "sampling": "greedy", "sharing": "turns", "assign": "shuffled"}
ASKED |= {"placement": "static", "homes": (("m", (0, 1)),), "pool_bytes": 5}


@cases(("name", "value"), [*ASKED.items(), ("sharing", "fluid")])
def test_what_is_not_asked_for_is_not_in_a_runs_name(name: str, value: Any) -> None:
    plain, asked = Spec("static"), replace(Spec("static"), **{name: value})
    assert name not in as_dict(plain)
    assert plain.hash8 != asked.hash8
    assert (from_dict(as_dict(plain)), from_dict(as_dict(asked))) == (plain, asked)


def test_what_is_set_of_an_engine_is_part_of_a_run_but_for_the_name_of_a_key() -> None:
    bare, at = Spec("static", engine="attach"), Spec("static", engine="attach+urls=http://a:1,http://b:2")
    assert bare.hash8 != at.hash8
    keyed = replace(at, engine=f"{at.engine}+key_env=MY_KEY")
    assert keyed.hash8 == at.hash8
    assert "MY_KEY" not in canonical(keyed)


def test_a_stored_run_of_an_earlier_release_is_read() -> None:
    old = {**as_dict(Spec("static", engine="attach")), "attach": "http://a:1,http://b:2", "key_env": "MY_KEY"}
    assert stored(old) == Spec("static", engine="attach+key_env=MY_KEY+urls=http://a:1,http://b:2")
    assert stored(as_dict(Spec("static"))) == Spec("static")


def test_the_text_has_no_spaces_and_sorted_keys() -> None:
    text = canonical(Spec("static"))
    assert " " not in text
    assert list(json.loads(text)) == sorted(json.loads(text))


@cases(
    ("system", "preset", "options", "label"),
    [
        ("static", None, (), "static"),
        ("static", "equal", (), "static:equal"),
        ("chunked", None, (("tau", 256),), "chunked+tau=256"),
        ("/some/where/mine.py", "fast", (("x", 1), ("y", "z")), "mine:fast+x=1+y=z"),
    ],
)
def test_labels(system: str, preset: str | None, options: tuple[tuple[str, int], ...], label: str) -> None:
    spec = Spec(system, preset=preset, fields=options)
    assert spec.label == label
    assert spec.folder == f"{Path(system).stem}-{spec.hash8}"


def test_a_file_of_every_kind_of_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        'system = "static"\npreset = "equal"\nrate_scale = 2\nwarmup_s = 0\ntoken_times = true\n'
        '[fields]\nsize = "rate"\n[slo_s]\n"m/1" = [0.5, 0.05]\n'
    )
    spec = Spec("static", preset="equal", fields=(("size", "rate"),), rate_scale=2.0, warmup_s=0.0, token_times=True)
    spec = replace(spec, slo_s=(("m/1", 0.5, 0.05),))
    assert read(path) == replace(spec, pool_bytes=POOL_BYTES)  # as a comparison of the same world
    path.write_text('system = "static"\ngpus = 2\n')
    assert read(path) == Spec("static", gpus=2)  # of another world nothing is supposed
