"""The fields of systems: each states its domain where it is declared, and what presets set lies in it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import pytest

from harness.loop import system
from harness.policy.fields import Domain, choice, domains, number


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
    assert [name for name, one in domains(Mine).items() if one.stated] == ["order", "tau", "most"]
    made = Mine(None)
    assert (made.order, made.tau, made.most) == ("edf", 0.5, 4)


def test_a_class_that_is_no_dataclass_states_types_only() -> None:
    assert domains(Plain) == {"share": Domain(inspect.Parameter.empty), "kind": Domain("a")}


@pytest.mark.parametrize("name", system.names())
def test_defaults_and_presets_lie_in_their_domains(name: str) -> None:
    make = system.find(name)
    takes = domains(make)
    for preset in ({}, *make.presets.values()):
        for what, value in {**{n: one.default for n, one in takes.items()}, **preset}.items():
            one = takes[what]
            assert type(value) is type(one.default)
            assert not one.choices or value in one.choices
            assert isinstance(value, str) or one.least <= value <= one.most
            assert one.stated or type(value) is bool, f"{name}: field {what} states neither choices nor a range"
