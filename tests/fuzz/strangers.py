"""Results made by strangers: each word of a stored spec that can name a file names one that must not run or hang."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.judge import Case
from tests.fuzz.odd import changed, words
from tests.fuzz.results import facts, made, rewrite

ENDS = 'import os\nos._exit(77)  # the import of this file is a bad end\n"""A system."""\n'
KEYS = "system engine models trace table slo placement profile host gpu preset".split()
FILES = "code.py link.py pipe.py pipe.toml folder.py code.toml big.toml deep.toml none.py"
NAMES = [f"{{here}}/{name}" for name in FILES.split()]
NAMES += words("{here}/code.py+x=1 {here}/../here/code.py ../here/code.py /dev/zero /dev/stdin /proc/self/mem")
NAMES += ["systems.prism", "../../etc/passwd", "a" * 5000, "\x1b[31mred", "x\ny", "-1"]


def cases(here: Path) -> st.SearchStrategy[Case]:
    """Draw commands that read results whose spec names code, devices, pipes, folders and files outside."""
    whole = made(here)
    table, about = pq.read_table(whole.rows), facts(whole.rows)
    there = whole._replace(top=Path("{here}/whole"))

    def case(key: str, name: str, command: tuple[str, tuple[str, ...]]) -> Case:
        def put(bad: Path) -> None:
            shutil.copytree(here, bad, dirs_exist_ok=True)
            (bad / "code.py").write_text(ENDS)
            (bad / "link.py").symlink_to("code.py")
            os.mkfifo(bad / "pipe.py")
            os.mkfifo(bad / "pipe.toml")
            (bad / "folder.py").mkdir()
            (bad / "deep.toml").write_text("a = " + "[" * 50_000)
            (bad / "code.toml").write_text(f'system = "{bad / "code.py"}"\n')
            (bad / "big.toml").write_bytes(b"#" * (1 << 20))
            named = changed(about, ("spec", key), name.replace("{here}", str(bad)))
            rewrite(whole._replace(top=bad / "whole").rows, table, named)

        return Case(f"strangers/{key} {name[-20:]!r}/{command[0]}", command[1], put=put)

    commands = [*there.of_run(), *there.of_sweep(), there.again]
    return st.builds(case, st.sampled_from(KEYS), st.sampled_from(NAMES), st.sampled_from(commands))
