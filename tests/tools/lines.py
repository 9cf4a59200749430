"""Lines of code: `python -m tests.tools.lines PATH...` counts those of files, and of all Python below folders.

A line counts if code stands on it. Blank lines, comments and docstrings never do.
"""

from __future__ import annotations

import ast
import io
import sys
import token
import tokenize
from collections.abc import Iterator
from pathlib import Path

PROSE = {tokenize.COMMENT, tokenize.NL, token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER}


def code(source: str) -> set[int]:
    """Return the numbers of the lines of Python that count."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in PROSE for line in range(token.start[0], token.end[0] + 1)}
    alone = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    return lines - {line for node in alone if isinstance(node.value, ast.Constant) for line in spanned(node)}


def spanned(node: ast.stmt) -> range:
    """Return the numbers of the lines that a statement takes, with its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return range(first, (node.end_lineno or first) + 1)


def counted(paths: list[Path]) -> Iterator[tuple[Path, int]]:
    """Yield each file that paths name, or that lies below them, with its lines of code."""
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            try:
                yield file, len(code(file.read_text("utf-8")))
            except (OSError, SyntaxError, tokenize.TokenError) as error:
                sys.exit(f"{file}: not a file of Python: {error}")


def main(paths: list[str]) -> None:
    """Print the lines of code of each file, and their sum."""
    sizes = list(counted([Path(path) for path in paths]))
    for file, size in sizes:
        print(f"{size:6,}  {file}")
    print(f"{sum(size for _, size in sizes):6,}  in {len(sizes):,} files")


if __name__ == "__main__":
    main(sys.argv[1:])
