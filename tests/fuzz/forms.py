"""TOML files of every form: specs, model sets, SLO classes, placements, cost tables, studies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hypothesis import strategies as st

from harness.run.spec import Spec
from tests.fuzz import odd
from tests.fuzz.judge import Case
from tests.fuzz.options import DRY

NEVER = {"nan", "inf", "-inf", '"\\u0000"', "[[]]", "[nan]"}  # right for no key at all

SOUND = Path(__file__).parent / "sound"  # holds a file a form; lines below a key are wrong values
STUDY = ("study", "{}", "--dry-run", "--no-plot", "-o", "res")
FORMS: Mapping[str, tuple[str, ...]] = {  # the command that takes it, {} being the file
    "spec": ("run", "{}", "--dry-run", "-o", "res"),
    "set": (*DRY, "--models", "{}"),
    "classes": (*DRY, "--slo", "classes:{}"),
    "placement": (*DRY, "--placement", "{}"),
    "table": (*DRY, "--table", "{}"),
    **dict.fromkeys(("study", "study-rich", "study-steps"), STUDY),
}


def cases(here: Path) -> st.SearchStrategy[Case]:
    """Draw of every form: files that are no TOML, a line too few or too many, odd values of every key."""
    return st.one_of([each for name in FORMS for each in _of_form(name)])


def _of_form(name: str) -> list[st.SearchStrategy[Case]]:
    def case(what: str, content: str | bytes, *, culprit: str = "", accept: bool = True) -> Case:
        argv = tuple(word.replace("{}", "{here}/mine.toml") for word in FORMS[name])
        return Case(f"forms/{name} {what}", argv, culprit, accept, odd.written("mine.toml", content))

    lines = (SOUND / f"{name}.toml").read_text("utf-8").splitlines(keepends=True)
    sound = base = "".join(line for line in lines if not line.startswith("#! "))
    if name == "spec":  # each field of a spec, whether it stands there or not
        keys = [field for field in Spec.__dataclass_fields__ if f"{field} = " not in sound]
        sound += "".join(f"{key} = 0\n" for key in keys)
    whole = [
        case(what, data, culprit="mine.toml", accept=(name, what) == ("table", "empty"))
        for what, data in odd.NO_TOML.items()
    ]
    for what, put in odd.INSTEAD.items():
        stands = case(what, b"", culprit="mine.toml", accept=False)
        whole.append(stands._replace(put=partial(odd.at, "mine.toml", put)))
    wrong = [line[3:-1] for line in lines if line.startswith("#! ")]
    whole += [case(f"{line[:60]!r} wrong", _with(base, line.replace("¶", "\n")), accept=False) for line in wrong]
    long = f"{base}\n{'k' * 5000} = 1\n"
    whole.append(case("long key", long, accept=name != "spec"))

    def swapped(of: tuple[str, str, str]) -> Case:
        key, value, text = of
        changed = _with(base, f"{key} = {value}") if name == "spec" else text
        return case(f"{key} = {value[:40]}", changed, accept=value not in NEVER)

    values = odd.values(sound).map(swapped)
    left_out = odd.lines(base).map(lambda of: case(*of))
    return [values, values, left_out, st.sampled_from(whole)]


def _with(sound: str, line: str) -> str:
    """Return the sound file with this line in place of the first of the same key, else before the first table."""
    key, lines = line.partition(" = ")[0], sound.splitlines()
    at = next((k for k, row in enumerate(lines) if row.partition(" = ")[0] == key), None)
    if at is None:
        return f"{sound}{line}\n" if line.startswith("[") else f"{line}\n{sound}"
    return "\n".join([*lines[:at], line, *lines[at + 1 :]]) + "\n"
