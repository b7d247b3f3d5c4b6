"""Processes of their own for tests, forked from one that has already imported what takes seconds to import."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any

import torch

SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "accelerate.commands.accelerate_cli",
        "otaro.tune.command",
        "otaro.tune.report",
        "otaro.tune.trainer",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
    ]
)
TIMEOUT = 300


def _run(
    environment: dict[str, str], threads: int, function: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(threads)
    function(*arguments)


def run(function: Callable[..., object], *arguments: Any) -> int:
    """Call a function of a module; the exit code, or the negative number of the signal that ended the process."""
    process = SERVER.Process(target=_run, args=({}, torch.get_num_threads(), function, arguments))
    process.start()
    process.join(TIMEOUT)
    process.kill()
    assert process.exitcode is not None
    return process.exitcode


def run_twice(function: Callable[..., object], *arguments: Any, environment: dict[str, str] | None = None) -> None:
    """Call a function in two processes that know each other as torchrun has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    processes = []
    for rank in ("0", "1"):
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank, **(environment or {})}
        processes.append(SERVER.Process(target=_run, args=(own, 1, function, arguments)))
        processes[-1].start()
    waiting: list[Any] = [process.sentinel for process in processes]
    # One that fails leaves the other waiting for it.
    while waiting and not any(process.exitcode for process in processes):
        ended = wait(waiting, TIMEOUT)
        if not ended:
            break
        waiting = [sentinel for sentinel in waiting if sentinel not in ended]
    for process in processes:
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
