"""What follows the last update of a run with tiers: they are fitted, and settled into ordinary weights.

Adapters are merged first. Fitting has no state but the tiers themselves, so a run that is stopped meanwhile goes on
from its last checkpoint and a file of them beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer

from otaro.errors import OtaroError
from otaro.evaluate.results import Width
from otaro.partial import write_atomically
from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.tune.callbacks import LOG_NAME, append_to_log, cut_log, losses_text, read_losses
from otaro.tune.fitting import fit
from otaro.tune.graphs import Graphs
from otaro.tune.model import has_adapters, merge_adapters
from otaro.tune.resume import writing
from otaro.tune.tiers import add_tiers, drop_tiers, hold_scales, settle_model, start_tiers, tiers_of
from otaro.tune.update import Batch

if TYPE_CHECKING:
    from otaro.tune.trainer import OtaroTrainer

FILE_NAME = "tiers.safetensors"
DONE = "done"
"""How many updates the tiers in the file have had."""


def fitting_updates(updates: int, share: float, fewest: int) -> int:
    """How many updates fit after a run of so many: a share of them, but no fewer than `fewest` if it has those."""
    return max(round(share * updates), min(updates, fewest))


def finish(trainer: OtaroTrainer, *, fresh: bool) -> None:
    """Fit and settle the tiers of a trainer whose model is tuned.

    Unless the run is `fresh`, it goes on where it was stopped; if it is asked to stop again, it is `interrupted`.
    """
    trainer.graphs.forget()
    if trainer.optimizer is not None:
        trainer.optimizer.state.clear()  # moments and means are as large as the tiers
        trainer.optimizer.zero_grad()
    if has_adapters(trainer.model):
        trainer.model = trainer.model_wrapped = merge_adapters(trainer.model)
    if trainer.is_fsdp_enabled:
        start_tiers(trainer.model)
    else:
        add_tiers(trainer.model, trainer.tiers)
    hold_scales(trainer.model)
    trainer.graphs = Graphs(trainer.model, enabled=trainer.graphs.enabled)
    trainer.weights = Refresher(trainer.model, trainer.weights.dtype)
    device = trainer.args.device
    # Seeded for the order of the data, which is nobody else's business.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), without_dropout(trainer.model):
        fit_tiers(trainer, fresh=fresh)
    trainer.graphs.forget()  # settling needs the memory
    trainer.weights.set_width(None)
    if trainer.interrupted:
        drop_tiers(trainer.model)
        return
    trainer.unsettled = settle_model(trainer.model)
    if trainer.is_fsdp_enabled:
        counts = torch.tensor([trainer.unsettled], device=trainer.args.device)
        trainer.unsettled = int(trainer.accelerator.reduce(counts, "sum"))
    trainer.done = True


def fit_tiers(trainer: OtaroTrainer, *, fresh: bool) -> None:
    args, constants = trainer.args, trainer.args.constants
    # Of sharded tiers no file is written: a run that is stopped here fits them anew.
    keeps = args.save_strategy != "no" and not trainer.is_fsdp_enabled
    every = int(trainer.state.save_steps) if args.save_strategy == "steps" else 0
    first = trainer.is_world_process_zero()
    path, log = Path(args.output_dir) / FILE_NAME, Path(args.output_dir) / LOG_NAME
    if fresh and first:
        path.unlink(missing_ok=True)
    updates = trainer.state.max_steps
    if not args.fit_only:
        updates = fitting_updates(updates, constants.fitting, constants.fitting_updates)
    done = 0 if fresh or not keeps else read_tiers(path, trainer.model)
    if first:
        cut_log(log, trainer.state.global_step + done)
    for width in trainer.tiers:
        trainer.selector.counts[width] = done
    batches = every_batch(trainer)
    shown = first and trainer.progress is None and not args.disable_tqdm
    bar = tqdm(total=updates, initial=done, desc="fitting", disable=not shown)
    unread: dict[int, dict[Precision, Tensor]] = {}
    for number in range(1, updates + 1):
        trainer.batches = next(batches)
        if number <= done:
            continue
        with trainer.compiled("fitting"):
            unread[number] = fit(
                trainer.model,
                trainer.batches,
                trainer.weights,
                trainer.tiers,
                constants.fitting_step * (updates - number + 1) / updates,
                pull=constants.fitting_pull,
                context=trainer.accelerator.autocast,
                processes=trainer.processes(),
                kernel=trainer.compilation.kernel,
                graphs=trainer.graphs if trainer.full_batches else None,
            )
        asked = trainer.asked_to_stop and args.world_size == 1
        saves = keeps and every > 0 and number % every == 0
        if asked or saves or number == updates or len(unread) >= trainer.update_callback.read_every:
            log_losses(trainer, unread, log if first else None)
            unread = {}
        losses = losses_text(trainer.selector.losses)
        trainer.report(f"fitting, step {number}{losses and ', loss '}{losses}", (number, updates))
        bar.update()
        if first and keeps and (saves or trainer.interrupted):
            write_tiers(path, trainer.model, number)
        if trainer.interrupted:
            return


def log_losses(trainer: OtaroTrainer, unread: dict[int, dict[Precision, Tensor]], log: Path | None) -> None:
    """Wait for the losses of updates, by their numbers, and write them down."""
    tuned = "" if trainer.args.fit_only else "the tuned weights are in the last checkpoint; "

    def failure(what: str, _: int, width: Width) -> OtaroError:
        return OtaroError(
            f"{what} at {width} while tiers were fitted: {tuned}in float16 values may have become too large for it, "
            "bf16 has room for them"
        )

    waiting = [(number, width, loss) for number, losses in unread.items() for width, loss in losses.items()]
    read = iter(read_losses(trainer, waiting, failure))
    for _, width, _ in waiting:
        trainer.selector.count(width)
    if log is not None:
        step = trainer.state.global_step
        known = {number: {str(width): next(read) for width in losses} for number, losses in unread.items()}
        append_to_log(log, [{"step": step + number, "tiers": losses} for number, losses in known.items()])


def every_batch(trainer: OtaroTrainer) -> Iterator[list[Batch]]:
    """The micro-batches of the run's updates once more, from the first on; what teaches has learned them."""
    args = trainer.args
    torch.manual_seed(args.seed)  # what the order of the data is drawn by
    loader = trainer.get_train_dataloader()
    for epoch in count():
        torch.manual_seed(args.seed + epoch)
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        batches, any_left = iter(loader), False
        while found := trainer.get_batch_samples(batches, args.gradient_accumulation_steps, args.device)[0]:
            any_left = True
            yield [trainer._prepare_inputs(batch) for batch in found]
        if not any_left:
            raise OtaroError("the data can be read only once, but tiers are fitted on them: choose another method")


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Teacher and widths are to differ by their rounding alone."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    for module in training:
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # itself, not what is within: activations are checkpointed in training only
    try:
        yield
    finally:
        for module, before in training.items():
            module.training = before


def write_tiers(path: Path, model: nn.Module, done: int) -> None:
    tiers = {name: tier.detach().cpu().contiguous() for name, tier in tiers_of(model).items()}
    with writing(path, path.parent):
        write_atomically(path, lambda part: save_file(tiers, part, {DONE: str(done)}))


@torch.no_grad()
def read_tiers(path: Path, model: nn.Module) -> int:
    """Put tiers back; how many updates they have had, 0 where there is no file of them that can be used."""
    tiers = tiers_of(model)
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in tiers}
            done = int(file.metadata()[DONE])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return 0
    for name, tier in tiers.items():
        tier.copy_(found[name])
    return done
