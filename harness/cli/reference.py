"""The generated parts of docs/reference/, as Markdown; `generated` writes them.

Commands come from click, forms of files from the dataclasses that read them, systems from `systems/`, and GPUs from
`harness/engines/`. `bench list` prints names of traces, models, studies and
definitions.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import sys
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from harness.answers.table import laid
from harness.cli import lists

BOUNDS: Mapping[str, Mapping[float | None, str]] = {  # words for a bound, by attribute and value (None: any)
    "ge": {0: "0 or more", None: "at least {:g}"},
    "gt": {None: "above {:g}"},
    "le": {None: "at most {:g}"},
    "min_length": {1: "not empty", None: "at least {} of them"},
}
QUOTE = '"'
OF_RUNS = {"trace_sha256", "slo_s", "homes", "measured_on", "workload"}  # keys of a spec that the bench fills in
KINDS = {str: "string", int: "whole number", float: "number", bool: "true or false", Any: "any value"}


def parts() -> dict[str, Iterator[str]]:
    """Return the lines of each part of the pages, by its name."""
    from harness.calibrate.formats import DEGREES
    from harness.engines.costs import forms, whole
    from harness.run.spec import Spec
    from harness.study.study import Claim, Condition, Sample, Scope, Study
    from workloads.models import Checkpoint, Member, Seconds, SetFile
    from workloads.slo import Classes

    plain: dict[type, Collection[str]] = {Spec: OF_RUNS, Study: ("name", "base_engine")}
    plain |= dict.fromkeys((SetFile, Checkpoint, Classes, forms.Table, whole.Machine), ())
    degrees = ",".join(f"ep {ep} {which}" for ep in DEGREES for which in ("<", "≥"))
    return {
        "commands": _commands(),
        "options of systems": _systems(),
        **{kind.__name__: _form(kind, without) for kind, without in plain.items()},
        **{kind.__name__: _explained(kind) for kind in (Member, Seconds, Condition, Sample, Scope, Claim)},
        "GPUs": _named(lists.gpu_rows()),
        "errors of mixtures": table(f"kind,format,fitted,left out,{degrees}", _mixtures()),
        "hosts": _named(lists.host_rows()),
    }


def table(head: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table and a blank line.

    `head` has the columns' names, separated by commas. Line breaks in cells become spaces.
    """
    cells = ([" ".join(cell.split()) or " " for cell in row] for row in rows)
    yield from islice(laid([head.split(","), *cells]), 1, None)


def code(text: str) -> str:
    """Return a text as code in Markdown; an empty one stays empty."""
    return f"`{text}`" if text else ""


# ------------------------------------------------------------------ commands


def _commands() -> Iterator[str]:
    from harness.cli.app import COMMANDS, load, main

    bench = click.Context(main, **main.context_settings)
    yield from _options(bench)
    for name in COMMANDS:
        yield from _command(load(name), bench, f"bench {name}", "##")


def _command(command: click.Command, parent: click.Context, words: str, level: str) -> Iterator[str]:
    """Describe a command with its options and examples, and then its subcommands."""
    context = click.Context(command, parent)
    arguments = " ".join(param.make_metavar(context) for param in command.params if isinstance(param, click.Argument))
    yield f"{level} {words}\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    yield f"```text\n{words}{f' {arguments}' if arguments else ''} [OPTIONS]\n```\n"
    yield from _options(context)
    if command.epilog:
        yield f"```sh\n{inspect.cleandoc(command.epilog.partition('Examples:')[2])}\n```\n"
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _command(inner, context, f"{words} {name}", f"{level}#")


def _options(context: click.Context) -> Iterator[str]:
    records = (p.get_help_record(context) for p in context.command.get_params(context) if isinstance(p, click.Option))
    yield from table("option,what it does", ((f"`{record[0]}`", _plain(record[1])) for record in records if record))


def _plain(text: str) -> str:
    """Return a help text as Markdown, with its markup characters escaped."""
    return re.sub(r"([\[\]<>*_|])", r"\\\1", text).replace(r"\|", "|")


# ------------------------------------------------------------------ systems


def _systems() -> Iterator[str]:
    from harness.loop import system
    from harness.policy import fields as declared

    for name in system.names():
        policy = system.find(name)
        title = (system.module(name).__doc__ or "").strip().partition("\n")[0]
        yield f"## `{name}`\n"
        yield f"{_plain(title)}\n"
        takes = declared.domains(policy)
        seconds, drawn = system.module(name).DECISION_S, [f"`{key}`" for key, domain in takes.items() if domain.tuned]
        decided = f"A decision takes {seconds * 1e6:g} \u00b5s." if seconds else "Decisions take no time."
        left_open = f"Left open by its source, and drawn by `bench tune`: {', '.join(drawn)}."
        yield f"{decided} {left_open if drawn else 'No open choice.'}\n"
        if takes:
            notes = comments(policy)
            rows = (
                (f"`{key}`", _value(domain.default), _domain(domain), _plain(notes.get(key, "")))
                for key, domain in takes.items()
            )
            yield from table("field,default,values,note", rows)
        if policy.presets:
            presets = ((code(f"{name}:{key}"), _setting(preset)) for key, preset in policy.presets.items())
            yield from table("preset,sets", presets)


def _setting(preset: Mapping[str, Any]) -> str:
    return ", ".join(code(f"{key}={_toml(value).strip(QUOTE)}") for key, value in preset.items())


def _value(value: Any) -> str:
    return "required" if value is inspect.Parameter.empty else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _domain(domain: Any) -> str:
    """Return the values of a field in words."""
    if domain.choices:
        return ", ".join(f"`{_toml(choice)}`" for choice in domain.choices)
    if domain.stated:
        return f"{'`MODEL=NUMBER ...`, ' * isinstance(domain.default, str)}{domain.least:g} to {domain.most:g}"
    return KINDS.get(type(domain.default), "string")


# ------------------------------------------------------------------ forms of files


def _explained(kind: type) -> Iterator[str]:
    """Yield the docstring of a dataclass, then the table of its keys."""
    yield f"{_paragraphs(inspect.cleandoc(kind.__doc__ or ''))}\n"
    yield from _form(kind)


def _paragraphs(doc: str) -> str:
    """Return a docstring as Markdown; a paragraph with aligned columns becomes a block of plain text."""
    parts = doc.split("\n\n")
    return "\n\n".join(f"```text\n{part}\n```" if re.search(r"\S {2,}\S", part) else _plain(part) for part in parts)


def _form(kind: type, without: Iterable[str] = ()) -> Iterator[str]:
    """Yield the table of the keys of a file that is read as a dataclass."""
    hints, notes = get_type_hints(kind, include_extras=True), comments(kind)
    rows = []
    for field in fields(kind):
        if field.name in without or field.name.startswith("_"):
            continue
        bare = field.default is MISSING and field.default_factory is MISSING
        default = "required" if bare else _default(field.default)
        key = field.name.removesuffix("_")
        note = notes.get(field.name, "").replace("None:", "left out:")
        rows.append((f"`{key}`", wanted(hints[field.name]), default, _plain(note or _first_line(hints[field.name]))))
    yield from table("key,value,default,what it is", rows)


def _first_line(hint: Any) -> str:
    """Return the first line of the docstring of a key's dataclass; "" if it has none."""
    inner = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), None)
    return (inspect.getdoc(inner) or "").partition("\n")[0] if inner is not None else ""


def _default(value: Any) -> str:
    if isinstance(value, str | int | float | tuple) and value not in {"", ()}:
        return f"`{_toml(value)}`"
    return "none" if value is MISSING or value in (None, "", ()) else "as below"


def body(kind: type) -> list[ast.stmt]:
    """Return the statements of a class."""
    (defined,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body
    return defined.body if isinstance(defined, ast.ClassDef) else []


@cache
def comments(kind: type) -> Mapping[str, str]:
    """Return the comment on each field of a class; it is at the end of the field's line or in the lines above."""
    source = inspect.cleandoc("\n" + inspect.getsource(kind))
    notes = {
        at.start[0]: at.string.lstrip("# ")
        for at in tokenize.generate_tokens(io.StringIO(source).readline)
        if at.type == tokenize.COMMENT
    }
    lines, by_field = source.splitlines(), {}
    for node in body(kind):
        if not isinstance(node, ast.AnnAssign):
            continue
        above = node.lineno - 1
        while above in notes and lines[above - 1].lstrip().startswith("#"):
            above -= 1
        inside = range(above + 1, (node.end_lineno or node.lineno) + 1)
        texts = [notes[line] for line in inside if line in notes and not notes[line].startswith(("fmt:", "noqa"))]
        by_field[ast.unparse(node.target)] = " ".join(texts)
    return by_field


def wanted(hint: Any) -> str:
    """Return in words what a key takes, as in `whole number, at least 1`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return ", ".join([wanted(inner[0]), *(text for note in inner[1:] for text in _bounds(note))])
    if origin in {Union, UnionType}:
        return " or ".join(dict.fromkeys(wanted(part) for part in inner if part is not NoneType))
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in inner)
    if origin is tuple:
        if get_origin(inner[0]) is tuple and get_args(inner[0])[0] is str:  # pairs, which a file has as a table
            values = get_args(inner[0])[1:]
            item = wanted(values[0]) if len(values) == 1 else f"list of {len(values)}: {wanted(values[0])}"
            return f"table, each: {item}"
        return ("list, each: " if ... in inner else f"list of {len(inner)}: ") + wanted(inner[0])
    if origin is not None and issubclass(origin, Mapping):
        return f"table, each: {wanted(inner[1])}"
    return KINDS.get(hint, "table")


def _bounds(note: Any) -> Iterator[str]:
    """Yield in words the bounds that an annotation of a type sets."""
    for name, words in BOUNDS.items():
        bound = getattr(note, name, None)
        if bound is not None and bound != sys.maxsize:
            yield words.get(bound, words[None]).format(bound)


# ------------------------------------------------------------------ lists


def _named(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a list of `bench list` as a Markdown table, its first column as code."""
    head, *rest = rows
    yield from islice(laid([head, *((code(name), *cells) for name, *cells in rest)]), 1, None)


def _mixtures() -> Iterator[tuple[str, ...]]:
    from harness.calibrate.formats import DEGREES, LONG, PRICED_AS
    from harness.calibrate.profiles import FOLDERS
    from harness.engines.costs import quantities

    def error(e: Mapping[str, float]) -> str:
        signed = f" ({100 * e['bias']:+.0f})" if "bias" in e else ""
        return f"{100 * e['median']:.1f} / {100 * e['p95']:.0f}{signed}"

    for kind in FOLDERS:
        for op, q in quantities.quantities(kind).items():
            if not op.startswith("experts_"):
                continue
            if other := PRICED_AS.get((kind, op)):
                default = f"as {other.of.removeprefix('experts_')}"
                yield code(kind), op.removeprefix("experts_"), default, *["-"] * (1 + 2 * len(DEGREES))
            else:
                parts = (
                    q["parallel_parts"].get(f"ep {ep}, {which} {LONG} tokens")
                    for ep in DEGREES
                    for which in ("below", "from")
                )
                parallel = (error(part) if part else "-" for part in parts)
                yield code(kind), op.removeprefix("experts_"), error(q["fit"]), error(q["held"]), *parallel
