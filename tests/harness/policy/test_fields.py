"""The fields of systems: each states its domain where it is declared, and what presets set lies in it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.loop import system
from harness.policy.fields import Asked, Domain, asked, choice, domains, number, values
from harness.policy.types import UserError
from tests.cases import cases


@dataclass
class Mine:
    cluster: object
    order: str = choice("edf", "fcfs")
    tau: float = number(0.5, 0, 2)
    most: int = number(4, 1, 8)
    fast: bool = True
    seen: int = field(default=0, init=False)


class Plain:
    def __init__(self, cluster: object, share: float, kind: str = "a") -> None:
        self.said = cluster, share, kind


def test_a_field_states_its_domain_and_state_is_no_field() -> None:
    assert domains(Mine) == {
        "order": Domain("edf", choices=("edf", "fcfs")),
        "tau": Domain(0.5, least=0, most=2),
        "most": Domain(4, least=1, most=8),
        "fast": Domain(True),
    }
    assert [name for name, domain in domains(Mine).items() if domain.stated] == ["order", "tau", "most"]
    made = Mine(None)
    assert (made.order, made.tau, made.most) == ("edf", 0.5, 4)


def test_a_class_that_is_no_dataclass_states_types_only() -> None:
    assert domains(Plain) == {"share": Domain(inspect.Parameter.empty), "kind": Domain("a")}


@cases("name", system.names())
def test_defaults_and_presets_lie_in_their_domains(name: str) -> None:
    make = system.find(name)
    takes = domains(make)
    for preset in ({}, *make.presets.values()):
        for what, value in {**{n: domain.default for n, domain in takes.items()}, **preset}.items():
            domain = takes[what]
            assert type(value) is type(domain.default)
            assert not domain.choices or value in domain.choices
            assert isinstance(value, str) or domain.least <= value <= domain.most
            assert domain.stated or type(value) is bool, f"{name}: field {what} states neither choices nor a range"


# ------------------------------------------------------------------ NAME[:PRESET][+FIELD=VALUE...]

URLS = "http://a:8000,http://[::1]:8001/v1?x=1+2"


@cases(
    ("text", "read"),
    [
        ("sim", Asked("sim")),
        ("chunked:strict+tau=256", Asked("chunked", "strict", {"tau": 256})),
        ("a+x=0.5+y=true+z=word", Asked("a", None, {"x": 0.5, "y": True, "z": "word"})),
        (f"attach+urls={URLS}+key_env=MY_KEY", Asked("attach", None, {"urls": URLS, "key_env": "MY_KEY"})),
        ('attach+urls="http://a/?x+y=1"+key_env=K', Asked("attach", None, {"urls": "http://a/?x+y=1", "key_env": "K"})),
        ("./c++/mine.py", Asked("./c++/mine.py")),
        ("/a:b/mine.py:fast+table=./t.py", Asked("/a:b/mine.py", "fast", {"table": "./t.py"})),
        ("a+x=", Asked("a", None, {"x": ""})),
    ],
)
def test_what_is_asked_for_is_read(text: str, read: Asked) -> None:
    assert asked(text) == read
    assert asked(str(read)) == read


@cases("text", ["chunked+tau", "chunked:a+b", "x++y=3"])
def test_a_field_without_a_value_is_a_mistake(text: str) -> None:
    with pytest.raises(UserError, match=r"is not \+FIELD=VALUE"):
        asked(text)


OPTIONS = st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["C"]))


@given(st.dictionaries(st.from_regex(r"[a-z_]\w*", fullmatch=True), OPTIONS | WORDS, max_size=4))
def test_whatever_the_values_the_text_is_read_as_them(fields: dict[str, int | float | str]) -> None:
    read = asked(str(Asked("mine", None, fields)))
    assert read == Asked("mine", None, fields)
    assert [type(read.fields[name]) for name in fields] == [type(value) for value in fields.values()]


def test_a_preset_comes_first_and_what_is_not_taken_is_said() -> None:
    takes, presets = domains(Mine), {"late": {"tau": 2.0, "most": 8}}
    assert values(asked("mine:late+tau=1"), takes, presets) == {"tau": 1.0, "most": 8}
    for text, says in {
        "mine:lat": "did you mean late?",
        "mine+tua=1": "did you mean tau?",
        "mine+tau=3": r"tau is 3.0, not in \[0, 2\]",
        "mine+order=edff": "did you mean edf?",
        "mine+fast=1": "fast is 1, not of the kind of True",
    }.items():
        with pytest.raises(UserError, match=says):
            values(asked(text), takes, presets)
