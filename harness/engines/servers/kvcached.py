"""Limits of elastic KV memory: accounts of kvcached 0.1.6, which its servers read while they run.

An account is a file of shared memory with three integers of 8 bytes: the limit, bytes in use, and bytes mapped in
advance. Its form is that of `MemInfoStruct` and `RwLockedShm` in kvcached/cli/utils.py, and its folder is SHM_DIR in
kvcached/utils.py. The limit is written here, under kvcached's lock. The command `kvctl limit` of kvcached is not used,
for two reasons. It imports torch, which takes seconds, and it ends with status 0 even if there is no account
(`cmd_limit` in kvcached/cli/kvctl.py).
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from harness.policy.types import UserError

FOLDER = Path("/dev/shm")
BYTES = 24  # an account has three numbers: limit, used, prepared


def limit(account: str, limit_bytes: int) -> None:
    """Limit the KV memory of a running server.

    Raises UserError if the server has no account of kvcached, or one of another layout.
    """
    path = FOLDER / account
    try:
        with path.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if (size := path.stat().st_size) != BYTES:
                raise UserError(f"{path} has {size} bytes, an account of kvcached 0.1.6 has {BYTES}")
            file.write(limit_bytes.to_bytes(8, "little", signed=True))
    except FileNotFoundError:
        raise UserError(f"no account {path}: the server runs without kvcached, or has ended") from None
