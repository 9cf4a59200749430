"""Results made by strangers: each word of a stored spec that can name a file names one that must not run or hang."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.fuzz.case import Case
from tests.fuzz.results import changed, facts, made, rewrite

ENDS = 'import os\nos._exit(77)  # the import of this file is a bad end\n"""A system."""\n'
NAMES = ("system", "engine", "models", "trace", "table", "slo", "placement", "profile", "host", "gpu", "preset")


def cases(here: Path, draw: random.Random) -> Iterator[Case]:
    """Yield commands that read results whose spec names code, devices, pipes, folders and files outside."""
    whole, numbers = made(here), count()
    bad = here / "theirs"
    bad.mkdir()
    (bad / "code.py").write_text(ENDS)
    (bad / "link.py").symlink_to("code.py")
    os.mkfifo(bad / "pipe.py")
    os.mkfifo(bad / "pipe.toml")
    (bad / "folder.py").mkdir()
    (bad / "deep.toml").write_text("a = " + "[" * 50_000)
    (bad / "code.toml").write_text(f'system = "{bad / "code.py"}"\n')
    (bad / "big.toml").write_bytes(b"#" * (1 << 20))
    files = ("code.py", "link.py", "pipe.py", "pipe.toml", "folder.py", "code.toml", "big.toml", "deep.toml", "none.py")
    names = [
        *(str(bad / name) for name in files),
        f"{bad / 'code.py'}+x=1",
        f"{bad}/../theirs/code.py",
        "../theirs/code.py",
        "/dev/zero",
        "/dev/stdin",
        "/proc/self/mem",
        "systems.prism",
        "../../etc/passwd",
        "a" * 5000,
        "\x1b[31mred",
        "x\ny",
        "-1",
    ]
    for key in NAMES:
        for name in names:
            store = whole.copy(here / f"{next(numbers):04d}")
            about: dict[str, Any] = changed(facts(store.rows), ("spec", key), name)
            rewrite(store.rows, pq.read_table(store.rows), about)
            commands = [*store.of_run(), *store.of_sweep(), *store.of_all()]
            for what, argv in draw.sample(commands, 2):
                yield Case(f"strangers/{key} {name[-20:]!r}/{what}", argv)
