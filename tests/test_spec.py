"""A spec is a value: its hash names it, and what is not a spec says so in one line."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.policy.types import UserError
from harness.run.spec import Spec, as_dict, canonical, digest, from_dict, read, stored

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
    one = Spec("static", rate_scale=1, fields=(("b", 1), ("a", 2)), slo_s=(("y", 1, 2), ("x", 3, 4)))
    two = Spec("static", rate_scale=1.0, fields=(("a", 2), ("b", 1)), slo_s=(("x", 3.0, 4.0), ("y", 1.0, 2.0)))
    assert canonical(one) == canonical(two)
    assert '"rate_scale":1.0' in canonical(one)


def test_a_run_that_names_no_longest_request_keeps_its_name() -> None:
    assert "served" not in as_dict(Spec("static"))
    assert as_dict(Spec("static", served=8192))["served"] == 8192


def test_a_run_that_leaves_the_sharing_of_gpus_to_its_system_keeps_its_name() -> None:
    own, turns = Spec("static"), Spec("static", sharing="turns")
    assert "sharing" not in as_dict(own)
    assert len({own.hash8, turns.hash8, Spec("static", sharing="fluid").hash8}) == 3
    assert from_dict(as_dict(turns)) == turns
    assert from_dict(as_dict(own)) == own


def test_what_is_set_of_an_engine_is_part_of_a_run_but_for_the_name_of_a_key() -> None:
    bare, at = Spec("static", engine="attach"), Spec("static", engine="attach+urls=http://a:1,http://b:2")
    assert bare.hash8 != at.hash8
    keyed = replace(at, engine=f"{at.engine}+key_env=MY_KEY")
    assert keyed.hash8 == at.hash8
    assert "MY_KEY" not in canonical(keyed)


def test_a_stored_run_of_an_earlier_release_is_read() -> None:
    old = {**as_dict(Spec("static", engine="attach")), "attach": "http://a:1,http://b:2", "key_env": "MY_KEY"}
    assert stored(old) == Spec("static", engine="attach+key_env=MY_KEY+urls=http://a:1,http://b:2")
    assert stored({**as_dict(Spec("static", engine="llamacpp")), "keep_s": 7}).engine == "llamacpp+keep_s=7"
    assert stored(as_dict(Spec("static"))) == Spec("static")


def test_the_text_has_no_spaces_and_sorted_keys() -> None:
    text = canonical(Spec("static"))
    assert " " not in text
    assert list(json.loads(text)) == sorted(json.loads(text))


@pytest.mark.parametrize(
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
    assert read(path) == Spec(
        "static", preset="equal", fields=(("size", "rate"),), rate_scale=2.0, warmup_s=0.0, token_times=True,
        slo_s=(("m/1", 0.5, 0.05),),
    )  # fmt: skip


WRONG = [
    ("", "system is missing"),
    ("systm = 'x'", 'unknown key "systm"; did you mean system?'),
    ("system = 3", "system is 3, not a string"),
    ("system = 'x'\nkeep_s = 7", 'keep_s is a field of the engine: engine = "llamacpp+keep_s=VALUE"'),
    ("system = 'x'\nattach = 'http://a:1'", 'engine = "attach+urls=VALUE"'),
    ("system = 'x'\npreset = 3", "preset is 3, not a string"),
    ("system = 'x'\nrate_scale = 0", "rate_scale is 0, not above 0"),
    ("system = 'x'\nrate_scale = -1", "rate_scale is -1, not above 0"),
    ("system = 'x'\nrate_scale = nan", "rate_scale is nan, not a finite number"),
    ("system = 'x'\nrate_scale = inf", "rate_scale is inf, not a finite number"),
    ("system = 'x'\nrate_scale = '2'", 'rate_scale is "2", not a number'),
    ("system = 'x'\nrate_scale = true", "rate_scale is true, not a number"),
    ("system = 'x'\ngpus = 0", "gpus is 0, not at least 1"),
    ("system = 'x'\ngpus = 1.5", "gpus is 1.5, not a whole number"),
    ("system = 'x'\ngpus = true", "gpus is true, not a whole number"),
    ("system = 'x'\nseed = -1", "seed is -1, not at least 0"),
    ("system = 'x'\nwindow_s = 0", "window_s is 0, not above 0"),
    ("system = 'x'\nwarmup_s = -1", "warmup_s is -1, not at least 0"),
    ("system = 'x'\nmem_fraction = 1.5", "mem_fraction is 1.5, not in (0, 1]"),
    ("system = 'x'\nwatermark = -0.1", "watermark is -0.1, not in [0, 1]"),
    ("system = 'x'\nnoise = -0.1", "noise is -0.1"),
    ("system = 'x'\nscaling = 'rotat'", 'scaling is "rotat"; did you mean rotate?'),
    ("system = 'x'\nplan = 'truth'", "(held-out, window, trace, prefix)"),
    ("system = 'x'\nsharing = 'turn'", 'sharing is "turn"; did you mean turns?'),
    ("system = 'x'\ntoken_times = 1", "token_times is 1, not true or false"),
    ("system = 'x'\nfields = 3", "fields is 3, not a table ([fields])"),
    ("system = 'x'\n[fields]\na = [1]", "fields.a is [1], not a string, a whole number, a number or true or false"),
    ("system = 'x'\n[fields]\na = nan", "fields.a is nan, not a finite number"),
    ("system = 'x'\n[slo_s]\nm = 3", "slo_s.m is 3, not a list of 2 numbers"),
    ("system = 'x'\n[slo_s]\nm = [1, 0]", "item 2 of slo_s.m is 0, not above 0"),
    ("system = 'x'\n[slo_s]\n'm/1' = [1, '2']", 'item 2 of slo_s."m/1" is "2", not a number'),
    ("system = 'x'\n[homes]\nm = []", "homes.m is [], not a list of 1 or more"),
    ("system = 'x'\n[homes]\nm = [-1]", "item 1 of homes.m is -1, not at least 0"),
    ("system = 'x'\n[homes]\nm = 0", "homes.m is 0, not a list of whole numbers"),
    ("system = 'x'\n[scaled]\npci = 2", 'scaled has no constant "pci"; did you mean pcie?'),
    ("system = 'x'\n[scaled]\npcie = 0", "scaled.pcie is 0, not above 0"),
    ("system = 'x'\nscaling = 'none'\nrate_scale = 2", 'rate_scale is 2: scaling "none"'),
    ("system = \ngpus = 2", "line 1"),
    ("system = 'x'\nsystem = 'y'", "overwrite"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_a_mistake_is_one_line_with_file_and_key(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert says in message
    assert "\n" not in message


def test_an_absent_or_binary_file_is_one_line(tmp_path: Path) -> None:
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.toml", tmp_path, binary):
        with pytest.raises(UserError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: ")
