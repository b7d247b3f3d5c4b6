"""The command ``otaro tune``: from a model and some data to one model that is good at every width.

While it runs everything lies in a folder beside the result, OUT.tuning, from which --resume goes on; when it is done
the result is written at once and that folder is deleted.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from otaro.console import decode_text, note, progress_bar, results
from otaro.errors import OtaroError
from otaro.json_file import read_json, write_json
from otaro.partial import refuse_existing
from otaro.precision import Precision

if TYPE_CHECKING:
    from otaro.tune.config import TuneArguments
    from otaro.tune.trainer import OtaroTrainer

EXIT_STOPPED = 130
EXAMPLE = "Example: otaro tune smollm2 smollm2-tuned --data book.txt --steps 200 --eval-text chapter.txt"
REPORT_NAME, PLOT_NAME, BEFORE_NAME = "tune.json", "tune.png", "before.json"


def tune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A Hugging Face model folder or name, a GGUF file, or 'smollm2' for the demo's model."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist yet.")],
    data: Annotated[
        list[str],
        typer.Option(metavar="DATA", help="Text, JSONL, a folder or a hub data set; may be given several times."),
    ],
    recipe: Annotated[str, typer.Option(help="Where settings come from: default, or the paper's: paper.")] = "default",
    method: Annotated[
        str | None, typer.Option(help="otaro, bps, uniform, tiers, fp16, or fixed:E5M8 … fixed:E5M3.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Updates that tune; overrides --epochs. Those that fit tiers come after them."),
    ] = None,
    epochs: Annotated[float, typer.Option(min=0.001, help="Times to go through the data.")] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per process that are computed at once.")] = 8,
    gradient_accumulation: Annotated[int, typer.Option(min=1, help="Batches that make one update.")] = 1,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 512,
    padded: Annotated[
        bool, typer.Option("--padded", help="One example to a sequence, padded, instead of packed into blocks.")
    ] = False,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Left out: the recipe's, for the size of the model and of an update.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw_torch, sgd or another of transformers' names.")] = None,
    widths: Annotated[str | None, typer.Option(help="The widths to tune for: 'all', or names with commas.")] = None,
    scheme: Annotated[str | None, typer.Option(help="How weights are rounded, as in otaro pack.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Weights that share a scale, as in otaro pack.")] = None,
    embedding_floor: Annotated[
        str | None, typer.Option(metavar="PRECISION", help="The floor of embeddings and head, as in otaro pack.")
    ] = None,
    exploration: Annotated[float | None, typer.Option(help="λ of BPS.")] = None,
    delay: Annotated[int | None, typer.Option(min=1, help="N of LAA.")] = None,
    delay_apply: Annotated[str | None, typer.Option(help="Apply held gradients as their sum or mean.")] = None,
    ultra_low: Annotated[
        str | None, typer.Option(help="The widths whose gradients LAA holds back, or that tiers are fitted for.")
    ] = None,
    completion_only: Annotated[
        bool | None,
        typer.Option(
            help="Learn the answers of instructions and conversations only, not the prompts too. Left out: the "
            "recipe's with tiers, the answers only with other methods."
        ),
    ] = None,
    average: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Average the weights over this last share of the run, their learning rate staying higher; 0: take the "
            "last ones. Left out: the recipe's with tiers, 0 with other methods and with --early-stopping.",
        ),
    ] = None,
    held_back: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.5,
            help="Of data seen twice or more, do not learn this last share but measure on it, and keep the weights "
            "from before they get worse there; 0: learn all. Left out: the recipe's. For the method tiers.",
        ),
    ] = None,
    fit_only: Annotated[
        bool, typer.Option("--fit-only", help="Tune nothing, only fit the ultra-low widths to the weights as they are.")
    ] = False,
    lora: Annotated[
        int | None, typer.Option(metavar="RANK", min=1, help="Train LoRA adapters of this rank, merged at the end.")
    ] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16; weights stay in float32.")] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="Compute in float16 with loss scaling.")] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory for more computing.")
    ] = False,
    eval_text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure perplexity on this text before and after.")
    ] = None,
    eval_windows: Annotated[int, typer.Option(min=1, help="Measure on at most this many windows of the text.")] = 64,
    save_steps: Annotated[int, typer.Option(min=1, help="Updates between checkpoints.")] = 100,
    early_stopping: Annotated[
        int | None,
        typer.Option(
            metavar="CHECKPOINTS",
            min=1,
            help="Stop when the loss on --eval-text, a mean over the widths, got no better over this many checkpoints; "
            "the best one is kept.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was stopped or killed, if it is not done.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Decides the order of the data and random widths.")] = 0,
    report_to: Annotated[str, typer.Option(help="Also report to tensorboard, wandb or another such tool.")] = "none",
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU even where there is a GPU.")] = False,
    compile: Annotated[
        bool | None, typer.Option(help="Compile the model, which the first updates wait for. Left out: on a GPU.")
    ] = None,
) -> None:
    """Tune a model once, so that it is good at every precision.

    Settings that are left out and have no default here are the recipe's.
    """
    given = {**locals(), "optim": optimizer}  # options by their names
    import torch

    from otaro.sefp import Format
    from otaro.tune.config import TuneArguments
    from otaro.tune.recipe import SETTINGS, find_recipe, settings
    from otaro.tune.resume import last_complete

    if not out.name:
        raise OtaroError(f"{str(out)!r} is no name for a folder: choose one that does not exist yet")
    work = out.with_name(f"{out.name}.tuning")
    if resume and (updates := finished_updates(out)) is not None:
        if _is_first():
            shutil.rmtree(work, ignore_errors=True)  # of a run that was killed while it cleared up
            note(f"{out} holds the finished run of {updates} updates: nothing is left to do")
        return
    refuse_existing(out)
    decode_text(os.fsencode(out), "the name of the folder to write")
    if not out.absolute().parent.is_dir():
        raise OtaroError(f"{out.absolute().parent} is not a folder: create it first")
    if early_stopping is not None and eval_text is None:
        raise OtaroError("early stopping watches the loss on a text: give it with --eval-text")
    if early_stopping is not None and average:
        raise OtaroError("early stopping keeps the best checkpoint, not an average: leave --average out")
    for name in ("learning_rate", "optimizer", "average", "held_back", "lora"):
        if fit_only and given[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise OtaroError(f"{option} has no meaning where tiers are only fitted: leave it or --fit-only out")
    options: dict[str, Any] = {name: given[name] for name in SETTINGS if given.get(name) is not None}
    constants = find_recipe(recipe)
    chosen = Format(scheme or constants.scheme).scheme  # type: ignore[arg-type]
    if method is None and constants.method == "tiers" and chosen != "nested" and not fit_only:
        options["method"] = "bps"
        if _is_first():
            note(f"the scheme {chosen} has no tiers, so the method is bps")
    args = TuneArguments(
        **settings(recipe, **options, fit_only=fit_only, load_best_model_at_end=early_stopping is not None),
        output_dir=str(work),
        max_steps=-1 if steps is None else steps,
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation,
        bf16=bf16,
        fp16=fp16,
        gradient_checkpointing=gradient_checkpointing,
        save_strategy="steps",
        save_steps=save_steps,
        save_total_limit=1 if early_stopping is None else 2,  # the best one and the last one
        eval_strategy="no" if early_stopping is None else "steps",
        eval_steps=save_steps,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        seed=seed,
        report_to=report_to,
        logging_steps=10 if report_to != "none" else 500,
        disable_tqdm=True,
        use_cpu=cpu or not torch.accelerator.is_available(),
        compile=compile,
    )
    text = None if eval_text is None else (str(eval_text), decode_text(eval_text.read_bytes(), str(eval_text)))
    shared = ("sequence_length", "padded", "lora", "eval_windows", "early_stopping", "resume")
    fresh = not work.exists()
    try:
        run(model, out, args, data, eval_text=text, **{name: given[name] for name in shared})
    except BaseException:
        if fresh and _is_first() and last_complete(work) is None:
            shutil.rmtree(work, ignore_errors=True)  # nothing in it that could be gone on with
        raise
    if _is_first():
        note(f"The tuned model is in {out}: pack it with otaro pack {out} {out}-packed{pack_options(args)}")


def finished_updates(out: Path) -> int | None:
    """How many updates made the model in a folder; None where no run has ended there."""
    try:
        return int(read_json(out / REPORT_NAME)["updates"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_first() -> bool:
    """Of several processes the first one talks."""
    return os.environ.get("RANK", "0") == "0"


def run(
    model: str,
    out: Path,
    args: TuneArguments,
    data: list[str],
    *,
    sequence_length: int,
    padded: bool = False,
    lora: int | None = None,
    eval_text: tuple[str, str] | None = None,
    eval_windows: int = 64,
    resume: bool = False,
    early_stopping: int | None = None,
) -> None:
    """Tune, measure and write; `args` says where checkpoints go. `eval_text` is a file's name and what it holds."""
    import torch
    from transformers import EarlyStoppingCallback

    from otaro.evaluate.perplexity import text_tokens
    from otaro.model_config import check_tokens, context_length
    from otaro.sources import open_source
    from otaro.sources.loading import load_model, source_tokenizer
    from otaro.tune import report
    from otaro.tune.callbacks import LOG_NAME, read_log
    from otaro.tune.data import Layout, load_blocks, text_blocks
    from otaro.tune.model import add_adapters, has_adapters, merge_adapters, save_model
    from otaro.tune.resume import last_complete, writing
    from otaro.tune.tiers import without_tiers
    from otaro.tune.trainer import OtaroTrainer

    work = Path(args.output_dir)
    checkpoint = last_complete(work)
    if not resume and checkpoint is not None:
        raise OtaroError(f"{work} holds a run that was not finished: add --resume to go on, or delete that folder")
    if resume and checkpoint is None:
        raise OtaroError(f"there is no checkpoint in {work} to go on from: start without --resume")
    first = _is_first()
    with open_source(model) as source, progress_bar() if first else nullcontext(_silence) as progress:
        tokenizer = source_tokenizer(source)
        longest = context_length(source.model)
        layout: Layout = "padded" if padded else "packed"
        blocks = load_blocks(data, tokenizer, sequence_length, longest=longest, layout=layout)
        check_tokens(source.model, blocks.highest)
        network = load_model(source, progress)
        if lora is not None and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1"):
            raise OtaroError("adapters cannot be merged into sharded weights: use LoRA with DDP, not with FSDP")
        if lora is not None:
            torch.manual_seed(args.seed)  # what adapters begin with
            network = add_adapters(network, args.format, args.floor, rank=lora)
        measured = None
        if eval_text is not None:
            name, text = eval_text
            measured = text_tokens(tokenizer, text, sequence_length, name)[: sequence_length * eval_windows]
        trainer = OtaroTrainer(
            network,
            args,
            progress=progress,
            train_dataset=blocks,
            eval_dataset=None if measured is None else text_blocks(measured, sequence_length),
            processing_class=tokenizer,
            callbacks=[] if early_stopping is None else [EarlyStoppingCallback(early_stopping)],
        )
        if first:
            left_out = f", {blocks.left_out} left out for want of an answer" if blocks.left_out else ""
            asked = ", prompts learned too" if blocks.prompt_tokens and not args.completion_only else ""
            rate = "" if args.fit_only else f", learning rate {trainer.args.learning_rate:.3g}"
            note(f"{len(blocks)} sequences, {blocks.tokens} tokens{asked}{left_out}{rate}")
            if trainer.held_out is not None:
                note(f"holding back the last {len(trainer.held_out)} sequences, to see when others are known by heart")
        before = measure_before(trainer, work, measured, sequence_length, progress, resume=resume)
        trainer.train(checkpoint)
        if trainer.interrupted:
            if first:
                fits = trainer.tiers and trainer.tuned
                when = "while fitting" if fits else f"after {trainer.state.global_step} updates"
                note(f"stopped {when}: add --resume to the same command to go on")
            raise typer.Exit(EXIT_STOPPED)
        watch = trainer.watch
        if first and watch.ended:
            note(f"best on the sequences held back after update {watch.update}: those weights are kept")
        kept = trainer.state.best_global_step if early_stopping else trainer.state.global_step
        state = without_tiers(trainer.accelerator.get_state_dict(trainer.model)) if trainer.is_fsdp_enabled else None
        final = trainer.accelerator.unwrap_model(trainer.model)
        if has_adapters(final):
            final = trainer.model = merge_adapters(final)
        after = {} if measured is None else report.measure(trainer, measured, [*Precision], sequence_length, progress)
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            log = read_log(work / LOG_NAME)
            figures = {
                "model": source.label,
                "method": args.method,
                "completion_only": args.completion_only,
                "learning_rate": None if args.fit_only else trainer.args.learning_rate,
                "updates": trainer.state.max_steps if args.fit_only else trainer.state.global_step,
                "fit_only": args.fit_only,
                "kept_update": watch.update if watch.ended else kept,
                "held_back": len(trainer.held_out or ()),
                "averaged_updates": trainer.averaged,
                "unsettled_groups": trainer.unsettled,
                "tokens": blocks.tokens,
                "perplexity_before": report.finite(before),
                "perplexity_after": report.finite(after),
                "batches": {str(width): count for width, count in trainer.selector.counts.items()},
            }
            with writing(out, work):
                write_json(figures, work / REPORT_NAME)
                extras = [work / LOG_NAME, work / REPORT_NAME]
                if report.write_plot(log, before, after, work / PLOT_NAME):
                    extras.append(work / PLOT_NAME)
                save_model(final, source, out, extras, state)
            shutil.rmtree(work)
            results().print(report.table(before, after, log))


def _silence(description: str, done: int, total: int) -> None:
    """Progress that nobody sees."""


def measure_before(
    trainer: OtaroTrainer, work: Path, tokens: Any, window: int, progress: Any, *, resume: bool
) -> dict[str, float]:
    """Perplexity before tuning; a resumed run reads what the first one measured, if it was on the same text."""
    from otaro.tune import report

    if tokens is None:
        return {}
    path, text = work / BEFORE_NAME, hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    known = read_json(path) if resume and path.exists() else {}
    if known.get("text") == text:
        return {name: float("inf") if value is None else value for name, value in known["perplexity"].items()}
    measured = report.measure(trainer, tokens, [*Precision], window, progress)
    if trainer.is_world_process_zero():
        write_json({"text": text, "perplexity": report.finite(measured)}, path)
    return measured


def pack_options(args: TuneArguments) -> str:
    """What otaro pack must be told so that it packs what was tuned."""
    from otaro.precision import EMBEDDING_FLOOR
    from otaro.sefp import Format

    chosen = args.format
    default = Format(chosen.scheme)
    options = "" if chosen.scheme == Format().scheme else f" --scheme {chosen.scheme}"
    options += "" if chosen.group_size == default.group_size else f" --group-size {chosen.group_size}"
    return options + ("" if args.floor == EMBEDDING_FLOOR else f" --embedding-floor {args.floor}")
