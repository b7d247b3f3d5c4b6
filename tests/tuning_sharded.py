"""For two processes: tuning with weights sharded by FSDP2, stopped half-way and gone on with from its state.

Gradients are held back and the weights averaged over the stop.

Writes the weights and what each process holds; the test compares them with an unsharded run of :func:`plain`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from architectures import random_model
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from tuning import Blocks

from otaro import convert
from otaro.nn import FakeSefp
from otaro.precision import Precision
from otaro.sefp import Format
from otaro.tune import average
from otaro.tune.delay import DelayedOptimizer

M8, M7, M6, M5, M4, M3 = Precision
WIDTHS = [M8, M3, M4, M6, M3, M4, M8, M3, M3, M5]
HALF = 6
AVERAGED = 0.7  # from before the half on
FULL = StateDictOptions(full_state_dict=True)


def build(shard: bool) -> tuple[Any, DelayedOptimizer]:
    model = random_model("llama").train()
    convert.simulate(model, Format())
    if shard:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    # A large epsilon keeps single weights from following rounding errors: see test_tune_distributed.
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    average.reserve(inner)
    return model, DelayedOptimizer(inner, [M4, M3], delay=3)


def steps(model: Any, optimizer: DelayedOptimizer, first: int, last: int, rank: int, ranks: int) -> None:
    ids = Blocks().ids
    for step in range(first, last):
        for module in model.modules():
            if isinstance(module, FakeSefp):
                module.precision = WIDTHS[step]
        batch = ids[rank * (4 // ranks) :][: 4 // ranks]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.width = WIDTHS[step]
        optimizer.step()
        optimizer.zero_grad()
        number = average.average_index(step + 1, len(WIDTHS), AVERAGED, 32)
        if number:
            average.add_weights(optimizer, number)
    if last == len(WIDTHS):
        average.use_average(optimizer)


def plain() -> dict[str, torch.Tensor]:
    model, optimizer = build(shard=False)
    steps(model, optimizer, 0, len(WIDTHS), 0, 1)
    return dict(model.state_dict())


def main(folder: str) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model, optimizer = build(shard=True)
    steps(model, optimizer, 0, HALF, rank, 2)
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    held = optimizer.held

    model, optimizer = build(shard=True)
    get_optimizer_state_dict(model, optimizer)  # what a distributed checkpoint does first: it must leave no trace
    set_model_state_dict(model, weights)
    set_optimizer_state_dict(model, optimizer, state)
    assert optimizer.held == held == 1, (optimizer.held, held)
    steps(model, optimizer, HALF, len(WIDTHS), rank, 2)
    result = get_model_state_dict(model, options=FULL)
    if rank == 0:
        torch.save(result, Path(folder) / "weights.pt")
    distributed.destroy_process_group()
