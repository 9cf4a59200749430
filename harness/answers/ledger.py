"""The ledger of claims in words: as Markdown, as a table on one screen, and as counts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from textwrap import wrap

from harness.answers.table import WIDTH, Table
from harness.rows.estimate import NONE
from harness.study.ledger import Evidence, Ledger, Statement
from harness.study.rule import CLASSES, SAYS

SHOWN = 2  # results beside a statement
UNKNOWN = "nothing is known that is sufficient"


def markdown(ledger: Ledger) -> Iterator[str]:
    """Yield the ledger as Markdown.

    It begins with a table of classes by paper and the meaning of each class. Every statement follows, with its
    comparisons.
    """
    yield "# Claims"
    yield ""
    yield from _wrapped(
        "Claims of papers, beside the results here: each statement once, by one rule for all "
        "(`harness/study/rule.py`), fixed before anything ran. Made by `bench claims` (`make claims`).",
        "",
    )
    yield ""
    verdicts = [s.verdict for s in ledger.statements if s.stands]
    classes = [word for word in SAYS if word in CLASSES or word in verdicts]
    yield from _by_paper([s for s in ledger.statements if s.stands], classes)
    yield ""
    for word in classes:
        yield from _wrapped(f"**{verdicts.count(word)} {word}**: {SAYS[word]}", "- ")
    for paper, group in groupby(sorted(ledger.statements, key=_of), key=_of):
        yield from ("", f"## {paper}")
        for statement in group:
            yield ""
            yield from block(statement)
    if ledger.missing or ledger.left:
        yield from ("", "## Not among them", "")
        for name, why in (*ledger.missing.items(), *((name, "not asked for (--only)") for name in ledger.left)):
            yield from _wrapped(escaped(f"{name}: {why}"), "- ")


def _by_paper(statements: Sequence[Statement], classes: Sequence[str]) -> Iterator[str]:
    """Yield the number of statements by paper and class as a Markdown table."""
    yield f"| paper | {' | '.join(classes)} |"
    yield f"|---{'|---:' * len(classes)}|"
    for paper, group in groupby(sorted(statements, key=_of), key=_of):
        verdicts = [statement.verdict for statement in group]
        yield f"| {escaped(paper)} | {' | '.join(str(verdicts.count(word) or '') for word in classes)} |"


def _of(statement: Statement) -> str:
    """Return the paper of a statement, without its figures and sections."""
    return re.split(r", (?:figures?|section) ", statement.paper)[0]


def block(stated: Statement) -> Iterator[str]:
    """Yield a statement in Markdown: its class, its words, its comparisons, and the reason for its class."""
    section = f" ({escaped(stated.section)})" if stated.section else ""
    verdict = stated.verdict if stated.stands else "beside a statement of another study"
    yield from _wrapped(f"**{verdict}** · {escaped(stated.says)}{section}. The paper: {escaped(stated.number)}.", "")
    yield ""
    shown = (line for line in stated.lines if line.here != NONE or line.says in CLASSES or line.note)
    order = sorted(shown, key=lambda line: line.evidence)
    for (where, evidence), lines in groupby(order, key=lambda line: (line.where, line.evidence)):
        comparisons = list(lines)
        if where:
            place = "under the same conditions" if evidence and where == order[0].where else f"on {escaped(where)}"
            yield from _wrapped("beside it, " * evidence + place, "- ")
        for line in comparisons:
            yield from _wrapped(escaped(_comparison(line)), "  - " if where else "- ")
    if words := _why(stated):
        yield from _wrapped(escaped(words), "- ")


def _comparison(line: Evidence) -> str:
    """Render a comparison in words."""
    says = f" ({line.says})" if line.says != "input" else ""
    extra = "".join(f"; {text}" for text in (line.note, line.weak and f"but only {line.weak}") if text)
    return f"{line.what + ': ' if line.what else ''}{line.here}{says}{extra}"


def _why(statement: Statement) -> str:
    """Return the reason why a statement has its class; empty for the classes "size" and "up to"."""
    match statement.verdict:
        case "size" | "up to":
            return ""
        case "input":
            return f"input: {statement.why}"
        case "contradicted" if not statement.why:
            return UNKNOWN
    return statement.why


def _wrapped(text: str, bullet: str) -> list[str]:
    indent = " " * len(bullet)
    return wrap(
        text, WIDTH, initial_indent=bullet, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def escaped(text: str) -> str:
    """Escape the signs of Markdown in a text."""
    return re.sub(r"([\\*<~_])", r"\\\1", " ".join(text.split()))


def listed(statements: Iterable[Statement], room: int) -> Iterator[str]:
    """Yield a table of statements, and a line that says what their classes mean.

    The row of a statement has its class, the paper's number, the number measured here, and the statement in words.
    """
    standing = [s for s in statements if s.stands]
    several = len({_of(s) for s in standing}) > 1
    stated = [(s.verdict, s.number, _here(s), s.says + f" ({_of(s)})" * several) for s in standing]
    yield from Table(("class", "paper", "here", "statement"), stated).text(room)
    yield "; ".join(f"{word}: {SAYS[word]}" for word in SAYS if any(word == verdict for verdict, *_ in stated))


def _here(statement: Statement) -> str:
    """Return the results on which a statement's class is based, without their intervals.

    At most SHOWN are listed; the others are counted.
    """
    every = [line.here for line in statement.lines if not line.evidence and line.here != NONE]
    values = list(dict.fromkeys(text.partition(" [")[0].removeprefix("reached by ") for text in every))
    return "; ".join([*values[:SHOWN], *([f"{len(values) - SHOWN} more"] if len(values) > SHOWN else [])]) or NONE


def counted(statements: Iterable[Statement]) -> str:
    """Count the statements of each class, in a line."""
    verdicts = [statement.verdict for statement in statements if statement.stands]
    return ", ".join(f"{verdicts.count(word)} {word}" for word in SAYS if word in verdicts) or "no claims"
