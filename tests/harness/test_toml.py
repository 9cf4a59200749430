"""Types of a class are the form of its file, and a mistake is one line with its place and the way out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, MinLen

from harness import toml
from harness.policy.types import Option, UserError
from harness.toml import TABLE, Count, Natural, NonNegative, Pairs, Positive, Share
from tests.cases import cases


@dataclass(frozen=True, slots=True)
class Row:
    """A table of a list."""

    name: str
    seeds: Count = 1
    share: Share = 1.0
    way: Literal["none", "rotate"] = "none"
    most: int | None = None
    axes: tuple[tuple[float, ...], ...] = ()
    two: Annotated[int, Ge(2)] | None = None

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("name is bad, not good")


@dataclass(frozen=True, slots=True)
class File:
    """Every kind of value."""

    title: str
    row: tuple[Row, ...] = ()
    by: Mapping[str, Row] | None = None
    options: Pairs[Option] = ()
    slo_s: Annotated[tuple[tuple[str, Positive, Positive], ...], TABLE] = ()
    scaled: Annotated[tuple[tuple[Literal["pcie", "disk"], NonNegative], ...], TABLE] = ()
    homes: Pairs[Annotated[tuple[Natural, ...], MinLen(1)]] = ()
    pair: tuple[float, float] = (1.0, 2.0)
    on: bool = False
    what: str | Row | tuple[str, ...] = ""
    class_: Pairs[Row] = ()

    def __post_init__(self) -> None:
        for name, value in toml.checked(self).items():
            object.__setattr__(self, name, value)


def convert(text: str) -> File:
    return toml.convert(tomllib.loads(text), File, "a.toml: ")


def test_every_kind_of_value_is_read() -> None:
    text = """
        title = "x"
        on = true
        pair = [1, 2]
        what = ["a"]
        options = { z = true, b = 1, c = 1.0, d = "s" }
        slo_s = { "m/1" = [1, 2] }
        scaled = { pcie = 2 }
        homes = { a = [0, 1] }
        by."m/1" = { name = "q" }
        class = { a = { name = "b" } }
        [[row]]
        name = "a"
        share = 1
        most = 3
        axes = [[1, 2], [3]]
    """
    row = Row("a", share=1.0, most=3, axes=((1.0, 2.0), (3.0,)))
    read = convert(text)
    assert read == File(
        "x",
        (row,),
        {"m/1": Row("q")},
        (("z", True), ("b", 1), ("c", 1.0), ("d", "s")),
        (("m/1", 1.0, 2.0),),
        (("pcie", 2.0),),
        (("a", (0, 1)),),
        (1.0, 2.0),
        on=True,
        what=("a",),
        class_=(("a", Row("b")),),
    )
    assert [type(value) for _, value in read.options] == [bool, int, float, str]
    assert type(read.row[0].share) is float


def test_types_that_are_no_dataclass_are_read_too() -> None:
    assert toml.convert({"a": {"name": "b"}}, dict[str, Row]) == {"a": Row("b")}
    assert toml.convert([1, 2], tuple[float, ...]) == (1.0, 2.0)
    with pytest.raises(UserError, match=r"^a\.name is 3, not a string$"):
        toml.convert({"a": {"name": 3}}, dict[str, Row])
    with pytest.raises(UserError, match=r"^item 2: name is 3, not a string$"):
        toml.convert([{"name": "a"}, {"name": 3}], tuple[Row, ...])


def test_what_is_made_in_code_is_held_to_the_same_types() -> None:
    made = File("x", slo_s=(("m", 1, 2),), pair=(1, 2), row=(Row("a"),))
    assert [type(x) for x in (*made.slo_s[0], *made.pair)] == [str, float, float, float, float]
    with pytest.raises(UserError, match=r"^options\.a is \[1\], not a string"):
        File("x", options=(("a", [1]),))  # type: ignore[arg-type]  # what is asked
    with pytest.raises(UserError, match=r"^row 1: seeds is 0, not at least 1$"):
        File("x", row=(Row("a", seeds=0),))


MISTAKES = {
    "title = 3": "title is 3, not a string",
    "titel = 'x'": 'unknown key "titel"; did you mean title?',
    "": "title is missing",
    "title = 2026-01-01\non = 2026-01-01": "on is 2026-01-01, not true or false",
    "on = 1": "title is missing",
    "title = 'x'\non = 1": "on is 1, not true or false",
    "title = 'x'\nby.'m/1' = {nme = 'q'}": 'by."m/1": unknown key "nme"; did you mean name?',
    "title = 'x'\nby.m = {name = 'bad'}": "by.m: name is bad, not good",
    "title = 'x'\nclas.m = 3": 'unknown key "clas"; did you mean class?',
    "title = 'x'\nclass.m = {}": "class.m.name is missing",
    "title = 'x'\nrow = 3": "row is 3, not a list of tables ([[row]])",
    "title = 'x'\nrow = {name = 'a'}": 'row is {name = "a"}, not a list of tables ([[row]])',
    "title = 'x'\nrow = [3]": "item 1 of row is 3, not a table",
    "title = 'x'\noptions.a = nan": "options.a is nan, not a finite number",
    "title = 'x'\nslo_s.m = [1, 0]": "item 2 of slo_s.m is 0, not above 0",
    "title = 'x'\nscaled.pci = 1": 'scaled: unknown key "pci"; did you mean pcie? (pcie, disk)',
    "title = 'x'\nscaled.pcie = -1": "scaled.pcie is -1, not at least 0",
    "title = 'x'\nhomes.a = []": "homes.a is [], not a list of 1 or more",
    "title = 'x'\nwhat = 3": "what is 3, not a string, a table ([what]) or a list of strings",
    "title = 'x'\nwhat = [3]": "item 1 of what is 3, not a string",
    "title = 'x'\nwhat = {name = 3}": "what.name is 3, not a string",
    "title = 'x'\npair = [1e999, 1]": "item 1 of pair is inf, not a finite number",
    **{
        f"title = 'x'\nrow = [{{name = 'a'}}, {{name = 'b', {wrong}}}]": f"row 2: {says}"
        for wrong, says in {
            "seeds = 0": "seeds is 0, not at least 1",
            "seeds = 1.0": "seeds is 1.0, not a whole number",
            "seeds = 'x'": 'seeds is "x", not a whole number',
            "sedes = 3": 'unknown key "sedes"; did you mean seeds?',
            "share = nan": "share is nan, not a finite number",
            "share = 2": "share is 2, not in (0, 1]",
            "way = 'rotat'": 'way is "rotat"; did you mean rotate? (none, rotate)',
            "axes = [3]": "item 1 of axes is 3, not a list of numbers",
            "axes = [[1, '2']]": 'item 2 of item 1 of axes is "2", not a number',
            "two = 1": "two is 1, not at least 2",
        }.items()
    },
}


@cases(("text", "says"), MISTAKES.items())
def test_a_mistake_is_one_line_with_its_place(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        convert(text)
    assert str(caught.value) == f"a.toml: {says}"


UNREADABLE = {
    "utf-8": b"\xff\xfe\x00",
    "Invalid value": b"title = ",
    "Cannot overwrite": b"title = 1\ntitle = 2",
    "digits": b"title = " + b"9" * 5000,
    "nested too deeply": b"title = " + b"[" * 100_000,
    "recursion limit": b"title = " + b"[" * 300 + b"]" * 300,
    "longer than 4 MiB": b"#" * (toml.MOST_BYTES + 1),
}


@cases(("says", "content"), UNREADABLE.items())
def test_a_file_that_is_no_toml_is_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.toml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        toml.read(path, File)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_one_line(tmp_path: Path) -> None:
    for path, says in {Path("/dev/zero"): "longer", tmp_path: "Is a directory", tmp_path / "none": "No such"}.items():
        with pytest.raises(UserError, match=rf"^{path}: {says}"):
            toml.tables(path)
