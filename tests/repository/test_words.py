"""Names and texts: variables that say what they hold, plain docstrings, and messages in words that users know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from harness.cli.app import COMMANDS, load, main
from tests import ROOT

PRODUCT = ("harness", "plots", "probe", "systems", "traces", "workloads")
# Folders whose variables or docstrings still break a rule; it must be empty.
TO_DO: tuple[str, ...] = ()
FOLDERS = tuple(
    str(path.relative_to(ROOT))
    for name in (*PRODUCT, "tests")
    for path in (ROOT / name, *sorted((ROOT / "harness").iterdir() if name == "harness" else ()))
    if path.is_dir() and path.name != "__pycache__"
)
VAGUE = {"found", "one", "own", "said"}  # names that any variable could have
QUESTION = re.compile(r"(What|Who|Whom|Whose|Where|Whether|Which|How|When|Why)\b")
PROSE = re.compile(
    r"\b(a|an|and|as|at|by|for|in|is|it|no|not|of|on|or|that|the|to|with)\b"
)  # lists of names have none of these
MOST_WORDS = 30  # a sentence has at most these
LEAST_WORDS = 3  # shorter strings are keys, not sentences
PRIVATE = {  # words of ours, each with those that users know
    "where time passes": "simulator, or real servers",
    "nobody": "no request, no model",
    "anybody": "a request, a model",
    "whoever": "the first request that",
    "whom": "which system",
    r"(is|are|was|were) told(?! apart)": "is reported, is sent",
    "so many": "a number",
    "(goes|go) on": "continues, resumes",
    "says it": "is set by",
    "anew": "again",
    "what came out": "the result",
    "(rest|rests) on": "is based on, uses",
    "held against": "compared with",
    "(is|are|of) none": "is not a ..., is not one of",
    "(deals|dealt)": "splits, assigns",
}


class Text(NamedTuple):
    """A text that a user or a reader of the code sees, and its place."""

    place: str
    text: str


# ------------------------------------------------------------------ rules


def vague(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each variable, argument, pattern, field, function or class with a vague name."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                pass
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case _:
                continue
        if name in VAGUE:
            yield node.lineno, name


def sentences(text: str) -> list[str]:
    """Split a text into sentences; a blank line ends one too."""
    parts = re.split(r"\n\s*\n|(?<=[.?!:])\s+(?=[A-Z`\"'(])", text.strip())
    return [" ".join(part.split()) for part in parts]


def long(text: str) -> list[str]:
    """List the sentences of a text that have too many words."""
    return [part for part in sentences(text) if len(part.split()) > MOST_WORDS]


def private(text: str) -> list[str]:
    """List the private words of a text."""
    words = " ".join(text.lower().split())
    return [word for word in PRIVATE if re.search(rf"\b{word}\b", words)]


# ------------------------------------------------------------------ texts


@cache
def trees(folder: str) -> tuple[tuple[Path, ast.Module], ...]:
    """Parse the Python files of a folder; those of harness alone without its folders."""
    paths = (ROOT / folder).glob("*.py") if folder == "harness" else (ROOT / folder).rglob("*.py")
    return tuple((path, ast.parse(path.read_text("utf-8"))) for path in sorted(paths))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def docstrings(folder: str) -> Iterator[Text]:
    """Yield the docstrings of modules, classes and functions."""
    for path, tree in trees(folder):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield Text(place(path, node), ast.get_docstring(node) or "")


def strings(folder: str) -> Iterator[Text]:
    """Yield messages, notes and captions, with X for each value in them.

    Docstrings are apart, and so are lists of names and the sources of numbers, which tables keep as they were fitted.
    """
    for path, tree in trees(folder):
        nodes = list(ast.walk(tree))
        apart = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        apart |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        dicts = (zip(node.keys, node.values, strict=True) for node in nodes if isinstance(node, ast.Dict))
        apart |= {id(value) for pairs in dicts for key, value in pairs if getattr(key, "value", None) == "source"}
        for node in nodes:
            match node:
                case ast.Constant(value=str(text)):
                    pass
                case ast.JoinedStr(values=values):
                    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in values)
                case _:
                    continue
            if id(node) not in apart and len(text.split()) >= LEAST_WORDS and PROSE.search(text):
                yield Text(place(path, node), text.replace("\n", "\n\n"))


def helps() -> Iterator[Text]:
    """Yield the help of each command and of each of its options."""
    commands: list[tuple[str, click.Command]] = [("bench", main)]
    commands += [(f"bench {name}", load(name)) for name in COMMANDS]
    for words, command in commands:
        yield Text(words, command.help or "")
        yield from (Text(f"{words} {param.opts[0]}", getattr(param, "help", None) or "") for param in command.params)
        if isinstance(command, click.Group) and command is not main:
            commands += [(f"{words} {name}", inner) for name, inner in command.commands.items()]


# ------------------------------------------------------------------ tests


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder not in TO_DO])
def test_variables_say_what_they_hold(folder: str) -> None:
    assert [
        f"{path.relative_to(ROOT)}:{line} {name}" for path, tree in trees(folder) for line, name in vague(tree)
    ] == []


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder not in TO_DO])
def test_docstrings_name_their_subject_first_and_in_a_short_sentence(folder: str) -> None:
    assert [doc for doc in docstrings(folder) if QUESTION.match(doc.text) or long(sentences(doc.text)[0])] == []


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "tests"])
def test_messages_are_short_sentences_in_words_that_users_know(folder: str) -> None:
    assert [(text.place, wrong) for text in strings(folder) if (wrong := private(text.text) + long(text.text))] == []


def test_help_is_short_sentences_in_words_that_users_know() -> None:
    texts = list(helps())
    assert len(texts) > 200
    assert [(text.place, wrong) for text in texts if (wrong := private(text.text) + long(text.text))] == []


def test_planted_habits_are_told() -> None:
    assert private("Where time passes: a name (bench list).") == ["where time passes"]
    assert len(long("A run is " + "very " * 27 + "long. It ends.")) == 1
    assert QUESTION.match("What a run is worth.")
    planted = (
        "for one in rows:\n    def f(own, *said): ...\n    total = [found for found in one]\nclass A:\n    one: int\n"
    )
    assert sorted(name for _, name in vague(ast.parse(planted))) == ["found", "one", "one", "own", "said"]
