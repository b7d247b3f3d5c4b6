"""Output that appears under its name only when it is whole.

It is written beside its place, as `.NAME.partial-XXXXXXXX`, and renamed at the end; what fails leaves nothing behind. A
process that is killed cannot tidy up, so whoever writes into the same folder next does it. Beside the output lies
`.NAME.partial-XXXXXXXX.lock`, locked while its process lives and never longer: a lock that can be had belongs to nobody
any more. Locks of another machine may not be seen over a shared folder, so its leftovers stay.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from otaro.errors import OtaroError

if sys.platform != "win32":
    import fcntl

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BOOT = Path("/proc/sys/kernel/random/boot_id")


def refuse_existing(out: Path) -> None:
    """What is to be written must be new; a link that leads nowhere is in the way too."""
    if out.exists() or out.is_symlink():
        raise OtaroError(f"{out} exists already: choose another name or delete it first")


def check_room(out: Path, size: int) -> None:
    """Refuse output of so many bytes where the disk has no room for it."""
    parent = out.absolute().parent
    if not parent.is_dir():
        raise OtaroError(f"{out} cannot be written: there is no folder {parent}, create it first")
    free = shutil.disk_usage(parent).free
    if size > free:
        raise OtaroError(f"{out} needs {size / 1e6:.1f} MB but only {free / 1e6:.1f} MB are free: make room first")


@contextlib.contextmanager
def partial_path(out: Path, parent: Path) -> Iterator[Path]:
    """A path in `parent` at which to write `out`, file or folder, and from which to rename it.

    What is still there when the block ends is deleted; a disk that is full is one sentence.
    """
    try:
        with _beside(out, parent) as partial:
            yield partial
    except OSError as error:
        # numpy counts what it could not write, and names no reason.
        if error.errno in FULL or (error.errno is None and "requested and" in str(error)):
            reason = error.strerror or os.strerror(errno.ENOSPC)
            raise OtaroError(f"{out} cannot be written: {reason}; free some space or choose another folder") from error
        raise


@contextlib.contextmanager
def new_folder(out: Path, size: int = 0) -> Iterator[Path]:
    """A folder that appears under its name only when the block has ended well, and leaves nothing behind otherwise."""
    refuse_existing(out)
    check_room(out, size)
    with partial_path(out, out.absolute().parent) as partial:
        partial.mkdir()
        yield partial
        if out.exists():
            raise OtaroError(f"{out} appeared while it was being written: choose another name")
        partial.rename(out)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file that takes the place of another one when it is whole; errors are the system's own."""
    with _beside(path, path.parent) as partial:
        write(partial)
        partial.replace(path)


@contextlib.contextmanager
def _beside(out: Path, parent: Path) -> Iterator[Path]:
    _sweep(parent)
    partial = parent / f".{out.name}.partial-{secrets.token_hex(4)}"
    lock = partial.with_name(f"{partial.name}.lock")
    with _locked(lock):
        try:
            yield partial
        finally:
            _delete(partial)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A new file that is locked for the block, and says which machine that is; a full disk may not take even that."""
    if sys.platform == "win32":  # leftovers are not told from others there
        yield
        return
    while True:
        with path.open("xb", buffering=0) as file:
            try:
                with contextlib.suppress(OSError):  # a file system without locks: leftovers stay
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not path.exists():  # swept before it was locked
                    continue
                file.write(json.dumps(_machine()).encode())
                yield
                return
            finally:
                path.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Delete what killed processes of this machine and user left in a folder."""
    if sys.platform == "win32":
        return
    for lock in folder.glob(".*.partial-*.lock"):
        with contextlib.suppress(OSError, ValueError), lock.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error where its process lives
            if _is_of_this_machine(file):
                _delete(lock.with_suffix(""))
                lock.unlink(missing_ok=True)


def _is_of_this_machine(file: BinaryIO) -> bool:
    said = file.read(1000)
    if not said:  # killed before it said anything
        return True
    machine, ours = json.loads(said), _machine()
    return isinstance(machine, dict) and any(machine.get(name) == value for name, value in ours.items() if value)


def _machine() -> dict[str, str]:
    """How a machine is told from others: by its name, or where that changes, as in containers, by its last start."""
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    return {"host": socket.gethostname(), "boot": boot}
