"""Tests, in folders like those of the product: `harness/study/search.py` has `tests/harness/study/test_search.py`.

Beside these, tests of whole commands lie in `commands`, those of the repository in `repository`, those that need an
environment of their own in `servers` and `cluster`. `fuzz` and `tools` are programs.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
