"""Loading of studies from TOML files, and checks of their keys and values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from harness import toml
from harness.loop import strangers, system
from harness.policy.fields import asked, meant
from harness.policy.types import UserError
from harness.rows.definitions import DEFINITIONS
from harness.run.setup import load_trace
from harness.run.spec import Spec, from_dict
from harness.study.columns import COLUMNS
from harness.study.measured import HELD_RPS
from harness.study.study import (
    AA_SEED,
    AND,
    AXES,
    BESIDE,
    BEST,
    HELD,
    OR,
    ORIGINS,
    OTHER,
    SET_BY_STUDY,
    START,
    STUDIES,
    Claim,
    Condition,
    Study,
    evidence_of,
    mistakes_in,
    named,
    refuse_unknown,
    systems_of,
)

WORDS = ("reached", "never", "met", "missed", "ahead", "behind", "equal")  # instead of a number of the paper
CLASSES = "classes:"  # prefix of an SLO rule that names a file
ON = ("condition", "axis", "trace", "models", "gpus", "slo", "column")  # facts by which a claim chooses its panels


def names() -> list[str]:
    """List the studies that come with the bench."""
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def study(name: str) -> Study:
    """Load a study by name or by the path of its TOML. A UserError names the file and the wrong key."""
    if not name.endswith(".toml") and name not in (have := names()):
        raise UserError(f'no study "{name}"{meant(name, have)} (there is: {", ".join(have)}; or a .toml)')
    path = Path(name) if name.endswith(".toml") else STUDIES / f"{name}.toml"
    try:
        data = _beside(toml.tables(path), path.parent)
        strangers.name(*_texts(data))
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    with mistakes_in(path.name):
        loaded = _made(path.stem, data)
        check(loaded)
    return loaded


def _beside(value: Any, folder: Path) -> Any:
    """Return the data of a TOML file with paths of SLO class files relative to the working directory.

    Only `classes:` paths of files in the study's folder are changed.
    """
    if isinstance(value, str) and value.startswith(CLASSES) and (folder / value.removeprefix(CLASSES)).is_file():
        return f"{CLASSES}{os.path.relpath(folder / value.removeprefix(CLASSES))}"
    if isinstance(value, dict):
        return {key: _beside(inner, folder) for key, inner in value.items()}
    return [_beside(inner, folder) for inner in value] if isinstance(value, list) else value


def _texts(value: Any) -> Iterator[str]:
    """Yield every string of a TOML file.

    Some of these strings name files of code. A user who names the TOML file on a command line allows this code to run.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _made(name: str, data: dict[str, Any]) -> Study:
    for key in ("name", "base_engine"):
        if key in data:
            raise UserError(f'unknown key "{key}"')
    if not isinstance(texts := data.get("systems"), list):
        return toml.convert({"name": name, "condition": [], **data}, Study)
    labels = named([str(text) for text in texts])
    made = toml.convert({"name": name, "condition": [], **data, "systems": labels}, Study)
    by_text = {text: label for label, text in labels.items()}  # files name systems as --systems takes them

    def labelled(name: str) -> str:
        return AND.join(OR.join(by_text.get(text, text) for text in part) for part in systems_of(name))

    claims = (replace(c, system=labelled(c.system), over=labelled(c.over)) for c in made.claim)
    conditions = (replace(c, among=tuple(by_text.get(x, x) for x in c.among)) for c in made.condition)
    return replace(made, claim=tuple(claims), condition=tuple(conditions))


# ------------------------------------------------------------------ checks


def check(study: Study) -> None:
    """Raise UserError, naming the key, if a study has an unknown value or compares nothing."""
    from workloads import slo

    _entries(study)
    for key, texts in (("bounds", study.bounds), ("more", study.more)):
        for text in texts:
            with mistakes_in(key):
                system.path(asked(text).name)
    _settings("spec", study.spec)
    for name, setting in study.for_system.items():
        refuse_unknown("for_system: no system", [name], study.systems)
        _settings(f"for_system.{name}", setting)
    refuse_unknown("measures: no column", study.measures, COLUMNS)
    refuse_unknown("shown: no column", study.shown, (*study.measures, HELD_RPS))
    names = [condition.name for condition in study.condition]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f'condition "{twice}" is listed twice')
    if bad := next((name for name in names if not (name.strip() and name.isprintable())), None):
        raise UserError(f"condition {names.index(bad) + 1}: name is {toml.shown(bad)}, no name")
    for condition in study.condition:
        with mistakes_in(f'condition "{condition.name}"'):
            _condition(study, condition)
    most = max(len(study.varied(condition).get("trace", ("",))) for condition in study.condition)
    if study.titles and len(study.titles) != most:
        raise UserError(f"titles are {len(study.titles)}, traces of a condition at most {most}")
    slo.parse(study.slo)
    if study.cumulative:
        _one_more_each(study)
    for i, claim in enumerate(study.claim, 1):
        with mistakes_in(f"claim {i}"):
            _claim(study, claim)


def _entries(study: Study) -> None:
    """Raise UserError if systems, conditions or definitions are missing, unknown or repeated, or seeds are too many."""
    if not study.systems:
        raise UserError("systems is empty")
    for key, scope in (("quick", study.quick), ("full", study.full)):
        if scope is not None and scope.seeds > AA_SEED:
            raise UserError(f"{key}.seeds is {scope.seeds}, above {AA_SEED}: those of A/A copies begin there")
    for name in named(study.more):
        if name in study.systems:
            raise UserError(f'more: "{name}" is one of systems')
    if not study.condition:
        raise UserError("no table [[condition]]")
    names = study.definitions
    refuse_unknown("definitions: no definition", names, DEFINITIONS)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f'definitions: "{twice}" is there twice')
    if not names:
        raise UserError("definitions is empty")


def _settings(where: str, setting: Mapping[str, Any]) -> None:
    if mine := next((key for key in setting if key in SET_BY_STUDY), None):
        raise UserError(f'{where}: "{mine}" is set by the bench')
    plain = {key: value for key, value in setting.items() if key not in BESIDE}
    if plain.get("rate_scale") == HELD:
        del plain["rate_scale"]
    with mistakes_in(where):
        from_dict({**plain, "system": ""})
    for key in BESIDE:
        value = setting.get(key, 1.0)
        if type(value) not in {int, float} or not value > 0:
            raise UserError(f"{where}: {key} is {value!r}, not a number above 0")


def _condition(study: Study, condition: Condition) -> None:
    from workloads import slo

    _settings("spec", condition.spec)
    _settings("band", condition.band)
    if not condition.band.keys() <= (condition.spec if study.cumulative else {}).keys():
        raise UserError("band: it is the other end of what a step of a cumulative study changes in its spec")
    if "slo" in condition.spec:
        slo.parse(condition.spec["slo"])
    axis = study.axis(condition)
    refuse_unknown("along is", [axis], AXES)
    refuse_unknown("no system", (*condition.systems, *condition.among), study.systems)
    if condition.among and study.first not in condition.among:
        raise UserError(f"among is without {study.first}, the study's first system")
    _varied(study.varied(condition), axis)
    if {"rate_rps", "rate_scale"} <= study.settings(condition).keys():
        raise UserError("rate_rps and rate_scale are both given")
    _xs(study, condition, axis)
    if axis in condition.spec:
        raise UserError(f'spec: "{axis}" is along x')
    if study.cumulative:
        refuse_unknown("origin is", [condition.origin], ORIGINS)
    elif condition.origin:
        raise UserError("origin is of the steps of a cumulative study")
    for name in study.contestants(condition):
        study.spec_of(condition, name)  # so that a value of the wrong kind is named before anything is run


def _varied(vary: Mapping[str, Sequence[Any]], axis: str) -> None:
    """Raise UserError if a condition varies a field that may not vary, or gives a field no value or a wrong one."""
    for key, values in vary.items():
        if not values:
            raise UserError(f"vary.{key} is empty")
        if key in SET_BY_STUDY or key == axis:
            raise UserError(f'vary: "{key}" is {"along x" if key == axis else "set by the bench"}')
        for value in values:
            _settings("vary", {key: value})


def _xs(study: Study, condition: Condition, axis: str) -> None:
    """Raise UserError if the given x do not fit the axis or the sample."""
    given = (*(condition.at or study.at), *condition.full)
    if condition.at_rps and (axis != "rate_scale" or condition.at or condition.full):
        raise UserError("at_rps is given along rate_scale, instead of at and full")
    if axis == "models":
        if (bad := next((x for x in given if not isinstance(x, str)), None)) is not None:
            raise UserError(f"at: {bad!r} is not the name of a model set")
    elif bad := [x for x in (*condition.at_rps, *given) if type(x) not in {int, float} or not x > 0]:
        raise UserError(f"at: {bad[0]!r} is not a number above 0")
    if axis == "gpus" and any(x != int(x) for x in given):
        raise UserError(f"at is {list(given)}: GPUs are whole numbers")
    rule = study.sample.rule
    if rule == "bracket" and len(condition.at or study.at) != 2:
        raise UserError(f"at is {list(condition.at or study.at)}, not the least and the most that are tried")
    if not given and not condition.at_rps and not (rule == "knee" and axis == "rate_scale"):
        raise UserError(f"no x: at is empty, and {axis} is not searched")


def _one_more_each(study: Study) -> None:
    """Raise UserError for a step of a cumulative study that changes nothing, or changes what another step changes.

    A step that names no source also raises the error.
    """
    changed: dict[tuple[str, str], str] = {}
    base = study.steps()[0]
    for step in study.condition:
        keys = [("spec", key) for key in step.spec] + [("systems", key) for key in step.systems]
        if again := next((key for key in keys if key in changed), None):
            raise UserError(f'condition "{step.name}": {again[1]} is changed by "{changed[again]}" already')
        changed.update(dict.fromkeys(keys, step.name))
        names = study.contestants(step)
        others = [
            (*map(each.get, BESIDE), each.get("rate_scale") == HELD) for each in map(study.settings, (base, step))
        ]
        if others[0] == others[1] and all(study.spec_of(step, name) == study.spec_of(base, name) for name in names):
            raise UserError(f'condition "{step.name}": it changes nothing of the {START}')
        if not step.source:
            raise UserError(f'condition "{step.name}": the key "source" is missing')


def _claim(study: Study, claim: Claim) -> None:
    for key in ("system", "over"):
        for text in filter(None, chain(*systems_of(getattr(claim, key)))):
            _takes(study, key, text, claim)
    if claim.what in {"ratio", "difference"} and not claim.over:
        raise UserError(f'a {claim.what} is over another system: the key "over" is missing')
    if claim.measure:
        refuse_unknown("measure is", [claim.measure], (*study.measures, HELD_RPS))
    if study.layout == "claims" and not (claim.measure or claim.lacks):
        raise UserError('neither the key "measure" is there, nor "lacks": the datum that is missing')
    if claim.what == "value" and not claim.shape:
        raise UserError('the key "shape" is missing')
    refuse_unknown("definition is", filter(None, [claim.definition]), study.definitions)
    _on(study, claim.on)
    _number(claim)
    for other in claim.also:
        refuse_unknown("also: unknown key", other, (*ON, *OTHER))
        _claim(study, evidence_of(claim, other))
    if not (claim.comparable or claim.why):
        raise UserError('comparable is false, and the key "why" is missing')


def _on(study: Study, facts: Mapping[str, Any]) -> None:
    """Raise UserError if a claim's facts about its panels are unknown, or if no panel of the study has them."""
    if (name := facts.get("condition")) is not None:
        refuse_unknown("no condition", [name], [condition.name for condition in study.condition])
    axes = sorted({study.axis(condition) for condition in study.condition})
    if (axis := facts.get("axis")) is not None:
        refuse_unknown("no condition along", [axis], axes)
    if not any(name in {None, c.name} and axis in {None, study.axis(c)} for c in study.condition):
        raise UserError(f'condition "{name}" is not along "{axis}"')
    if (trace := facts.get("trace")) is not None:
        texts = {text for condition in study.condition for text in _over(study, condition, "trace", Spec("").trace)}
        traces = [load_trace(str(text)).name for text in sorted(texts)]
        if not any(name.startswith(str(trace)) for name in traces) and not _exists(str(trace)):
            raise UserError(f'no condition on trace "{trace}"{meant(str(trace), traces)} ({", ".join(traces)})')
    if (rule := facts.get("slo")) is not None:
        rules = [_over(study, condition, "slo", study.slo) for condition in study.condition]
        refuse_unknown("slo is", [str(rule)], dict.fromkeys(str(rule) for rule in chain.from_iterable(rules)))
    refuse_unknown("on: unknown key", facts, ON)


def _exists(trace: str) -> bool:
    """Tell whether a trace exists, even if no condition of the study uses it."""
    try:
        load_trace(trace)
    except UserError:
        return False
    return True


def _takes(study: Study, key: str, name: str, claim: Claim) -> None:
    """Raise UserError if a claim names a system that is neither in the study nor known to the bench."""
    known = tuple(study.systems) if claim.what == "difference" else (*study.systems, *named(study.bounds))
    if name in known:
        return
    try:
        system.path(asked(name.removeprefix(BEST)).name)
    except UserError:
        raise UserError(f'{key} is "{name}"{meant(name, known)} ({", ".join(known)})') from None


def _number(claim: Claim) -> None:
    """Raise UserError if the paper's value in a claim is no number, range or known word, or does not fit the claim."""
    paper = claim.paper
    if isinstance(paper, str) and paper not in WORDS:
        raise UserError(f'paper is "{paper}"{meant(paper, WORDS)}, not a number or one of {", ".join(WORDS)}')
    if isinstance(paper, tuple) and not (len(paper) == 2 and paper[0] <= paper[1]):
        raise UserError(f"paper is {list(paper)}, not a number or two, the smaller first")
    if claim.bound and not isinstance(paper, float | int):
        raise UserError(f'bound is "{claim.bound}", and paper is no number')
    if claim.what != "measure" and (paper in {"met", "missed"}) != (claim.at > 0):
        raise UserError('the key "at" is where a level is met or missed, and goes with these words')


def _over(study: Study, condition: Condition, key: str, default: str) -> tuple[Any, ...]:
    """Return the values that a field has in a condition."""
    return study.varied(condition).get(key, (study.settings(condition).get(key, default),))
