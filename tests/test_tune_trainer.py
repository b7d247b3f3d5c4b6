"""The loop against one written by hand, its invariants, and what stops it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from conftest import byte_tokenizer
from safetensors.torch import load_file
from torch.nn import functional
from torch.utils.data import IterableDataset
from transformers import AutoTokenizer, EarlyStoppingCallback, HfArgumentParser, TrainingArguments
from tuning import Blocks, arguments, trainer

from otaro import convert, ops
from otaro.errors import OtaroError, PrecisionError
from otaro.evaluate.perplexity import perplexity
from otaro.nn import FakeSefp
from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.tune import recipe, report
from otaro.tune.callbacks import LOG_NAME, cut_log, read_log
from otaro.tune.config import TuneArguments
from otaro.tune.data import IGNORED
from otaro.tune.model import add_adapters
from otaro.tune.tiers import without_tiers
from otaro.tune.trainer import OtaroTrainer

M4, M3 = Precision.E5M4, Precision.E5M3


def weights(run: OtaroTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run.model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def algorithm_1(args: Any, delayed: bool) -> tuple[list[Precision], dict[str, torch.Tensor]]:
    """The paper's Algorithm 1, line by line, in plain torch."""
    model = random_model("llama").train()
    convert.simulate(model, args.format, args.floor)
    layers = [module for module in model.modules() if isinstance(module, FakeSefp)]
    blocks = Blocks().ids
    batches = [blocks[start : start + 2] for start in range(0, len(blocks), 2)]
    parameters = list(model.parameters())
    count: dict[Precision, int] = {}
    latest: dict[Precision, float] = {}
    chosen = []
    held: list[torch.Tensor] = []
    i = 0
    for t in range(1, args.max_steps + 1):
        best, best_score = Precision.E5M8, -math.inf
        for b in (Precision(f"E5M{m}") for m in (8, 7, 6, 5, 4, 3)):
            if b not in count:
                best = b
                break
            score = 5.0 * math.sqrt(math.log(t) / count[b]) - latest[b]
            if score > best_score:
                best, best_score = b, score
        chosen.append(best)
        for layer in layers:
            layer.precision = best
        ids = batches[(t - 1) % len(batches)]
        logits = model(input_ids=ids).logits
        targets = functional.pad(ids, (0, 1), value=-100)[:, 1:].reshape(-1)
        loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets, reduction="sum")
        loss = loss / (ids.shape[0] * (ids.shape[1] - 1))
        gradients = torch.autograd.grad(loss, parameters)
        count[best] = count.get(best, 0) + 1
        latest[best] = float(loss.detach())
        with torch.no_grad():
            update: list[torch.Tensor] | None = list(gradients)
            if delayed and best in (M4, M3):
                held = list(gradients) if i == 0 else [old + new for old, new in zip(held, gradients, strict=True)]
                i += 1
                update = held if i == args.delay else None
                i %= args.delay
            if update is not None:
                for parameter, gradient in zip(parameters, update, strict=True):
                    parameter.sub_(gradient * args.learning_rate)
    return chosen, dict(model.state_dict())


@pytest.mark.parametrize("method", ["otaro", "bps"])
@pytest.mark.parametrize("scheme", ["nested", "nearest"])
def test_algorithm_1_bit_for_bit(method: str, scheme: str, tmp_path: Path) -> None:
    # A learning rate that is a power of two: SGD may fuse the product and the subtraction, which then round alike.
    options: dict[str, Any] = {"train_sampling_strategy": "sequential", "learning_rate": 0.0625, "scheme": scheme}
    run = trainer(tmp_path, method=method, max_steps=40, **options)
    run.train()
    chosen, expected = algorithm_1(run.args, delayed=method == "otaro")
    assert [line["width"] for line in read_log(tmp_path / LOG_NAME)] == [str(width) for width in chosen]
    assert len(set(chosen)) == 6
    assert same(weights(run), expected)


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "qwen3-moe", "gpt-oss", "mixtral", "gpt2"])
def test_every_trained_parameter_changes(architecture: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, architecture, optim="adamw_torch", learning_rate=1e-3)
    before = weights(run)
    run.train()
    unchanged = [name for name, value in weights(run).items() if torch.equal(value, before[name])]
    assert unchanged == []


def test_losses_fall_at_every_width(tmp_path: Path) -> None:
    run = trainer(tmp_path, optim="adamw_torch", learning_rate=3e-3, max_steps=150, method="bps")
    run.train()
    lines = read_log(tmp_path / LOG_NAME)
    for width in Precision:
        losses = [line["loss"] for line in lines if line["width"] == str(width)]
        assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    "method, expected",
    [("fixed:E5M3", {"E5M3"}), ("fp16", {"full"}), ("uniform", {str(width) for width in Precision})],
)
def test_baselines_are_settings_of_the_same_loop(method: str, expected: set[str], tmp_path: Path) -> None:
    run = trainer(tmp_path, method=method, max_steps=30)
    run.train()
    assert {line["width"] for line in read_log(tmp_path / LOG_NAME)} == expected
    assert run.delayed is None


def test_full_precision_is_plain_training(tmp_path: Path) -> None:
    """The method fp16 must give what transformers' own Trainer gives without any of this."""
    from transformers import Trainer

    run = trainer(tmp_path, method="fp16")
    run.train()
    plain = Trainer(random_model("llama"), arguments(tmp_path / "plain"), train_dataset=Blocks())
    plain.train()
    assert same(weights(run), dict(plain.model.state_dict()))


def test_accumulated_batches_share_a_width_and_equal_one_large_batch(tmp_path: Path) -> None:
    large = trainer(tmp_path / "large", max_steps=18, per_device_train_batch_size=4)
    small = trainer(tmp_path / "small", max_steps=18, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    seen: list[Any] = []
    small.model.register_forward_pre_hook(lambda *_: seen.append(small._layers[0].precision))
    large.train()
    small.train()
    assert len(seen) == 18 * 4
    assert all(len(set(seen[start : start + 4])) == 1 for start in range(0, len(seen), 4))
    first, second = (read_log(tmp_path / name / LOG_NAME) for name in ("large", "small"))
    assert [line["width"] for line in first] == [line["width"] for line in second]
    # The same sums in another order: float32 rounding, grown over 18 updates.
    for name, value in weights(large).items():
        torch.testing.assert_close(weights(small)[name], value, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    plain, checkpointed = (trainer(tmp_path / str(on), gradient_checkpointing=on) for on in (False, True))
    plain.train()
    checkpointed.train()
    assert same(weights(plain), weights(checkpointed))


def test_bf16_trains_float32_weights(tmp_path: Path) -> None:
    run = trainer(tmp_path, bf16=True, optim="adamw_torch", learning_rate=3e-3, max_steps=60)
    run.train()
    assert {value.dtype for value in weights(run).values()} == {torch.float32}
    lines = read_log(tmp_path / LOG_NAME)
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("method", ["bps", "tiers"])
def test_perplexity_of_a_bf16_run_is_that_of_its_weights(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of values made for training in bfloat16, as they are on a GPU, nor that of computing in bfloat16."""

    def fill(self: Refresher, *, again: bool = False) -> None:
        self.clear()
        for layer in self._layers:
            if layer.width is not None:
                tiers = layer.tiers.get("weight", ())
                layer.values = layer.simulate(layer.weight).detach().to(self.dtype)
                layer.__dict__["trained"] = ops.deciding(layer.weight, layer.width, tiers) if tiers else None

    monkeypatch.setattr(Refresher, "__call__", fill)
    run = trainer(tmp_path, method=method, bf16=True, optim="adamw_torch", learning_rate=3e-3)
    tokens = Blocks().ids.flatten()
    found = []
    for trained in (False, True):
        if trained:
            run.train()
        plain = random_model("llama").eval()
        plain.load_state_dict(without_tiers(weights(run)))
        settled = [(path, layer) for path, layer in run.model.named_modules() if getattr(layer, "settled", False)]
        scales = {f"{path}.{name}": scale for path, layer in settled for name, scale in layer.scales.items()}
        assert bool(scales) == (trained and method == "tiers")
        convert.simulate(plain, run.args.format, run.args.floor, scales=scales)
        for width, measured in report.measure(run, tokens, [Precision.E5M8, M3], 16, None).items():
            convert.set_precision(plain, Precision(width))
            assert measured == perplexity(plain, tokens, window=16).perplexity
            found.append(measured)
    assert len(set(found)) == len(found)


def test_the_log_tells_what_is_held(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=30, lr_scheduler_type="linear")
    run.train()
    lines = read_log(tmp_path / LOG_NAME)
    assert [line["step"] for line in lines] == list(range(1, 31))
    held = 0
    for line in lines:
        held = (held + (line["width"] in ("E5M4", "E5M3"))) % 3
        assert line["held"] == held
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.05 * (1 - t / 30) for t in range(30)])
    counts = Counter(line["width"] for line in lines)
    assert {str(width): count for width, count in run.selector.counts.items()} == counts


def test_evaluation_goes_over_every_width(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=0.0,
        save_total_limit=2,
    )
    run = OtaroTrainer(
        random_model("llama"),
        args,
        train_dataset=Blocks(),
        eval_dataset=Blocks(4),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    run.train()
    assert run.state.global_step == 12  # never better than at step 4, so patience ends it two evaluations later
    metrics = next(entry for entry in run.state.log_history if "eval_loss" in entry)
    losses = [metrics[f"eval_loss_{width}"] for width in Precision]
    assert len(set(losses)) == 6
    assert metrics["eval_loss"] == pytest.approx(sum(losses) / 6)


class Masked(Blocks):
    """Blocks of which the second half has labels."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        half = torch.arange(16) < 8
        return {"input_ids": self.ids[index], "labels": self.ids[index].masked_fill(half, IGNORED)}


def test_questions_are_learned_if_asked_for(tmp_path: Path) -> None:
    """As if they had labels; evaluation keeps to the labels there are."""

    def run(name: str, data: Blocks, **options: Any) -> OtaroTrainer:
        args = arguments(tmp_path / name, method="uniform", max_steps=4, **options)
        made = OtaroTrainer(random_model("llama"), args, train_dataset=data, eval_dataset=Masked(4))
        made.train()
        return made

    whole, asked, answers = (
        run("whole", Blocks()),
        run("asked", Masked(), completion_only=False),
        run("answers", Masked()),
    )
    assert same(weights(asked), weights(whole))
    assert not same(weights(answers), weights(whole))
    assert asked.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]


def test_the_best_weights_are_kept(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=1.0,
        save_total_limit=1,
    )
    run = OtaroTrainer(random_model("llama"), args, train_dataset=Blocks(), eval_dataset=Blocks(4))
    run.train()
    losses = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert min(losses) < losses[-1]
    assert run.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-5)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path, save_strategy="steps", save_steps=4, method="fixed:E5M3")
    compute = run.compute_loss

    def broken(*args: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = compute(*args, **options)
        return loss * math.nan if run.state.global_step == 6 else loss

    run.compute_loss = broken
    with pytest.raises(OtaroError, match="loss became nan at step 7, at the width E5M3"):
        run.train()
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").exists()
    assert len(read_log(tmp_path / LOG_NAME)) == 6


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    run = trainer(tmp_path, save_strategy="steps", save_steps=4, learning_rate=1e38, method="fixed:E5M4", max_steps=8)
    with pytest.raises(OtaroError, match="E5M4"):
        run.train()
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory: 12 bytes")])
def test_out_of_memory_says_what_to_lower(error: Exception, tmp_path: Path) -> None:
    run = trainer(tmp_path)

    def fail(*args: Any) -> torch.Tensor:
        raise error

    run.training_step = fail  # type: ignore[method-assign]
    with pytest.raises(OtaroError, match="batches of 2: lower the batch size"):
        run.train()


def test_other_errors_are_not_taken_for_memory(tmp_path: Path) -> None:
    run = trainer(tmp_path)

    def fail(*args: Any) -> torch.Tensor:
        raise RuntimeError("shapes do not match")

    run.training_step = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="shapes"):
        run.train()


def test_one_gpu_of_several_is_used_and_how_to_use_all_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 4))
    with pytest.warns(UserWarning, match=r"one of 4 GPUs.* accelerate launch .*ddp.yaml --num_processes 4") as said:
        run = trainer(tmp_path, max_steps=2)
    assert len(said) == 1
    run.train()
    assert run.model_wrapped is run.model  # and not DataParallel around it
    assert run.args.train_batch_size == 2


def test_a_checkpoint_holds_tokenizer_and_arguments_and_no_pickled_object(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, learning_rate=None)
    run = OtaroTrainer(random_model("llama"), args, train_dataset=Blocks(), processing_class=byte_tokenizer())
    run.train()
    run.save_model(str(tmp_path / "result"))
    for folder in (tmp_path / "checkpoint-2", tmp_path / "result"):
        assert AutoTokenizer.from_pretrained(folder)("abc")["input_ids"] == byte_tokenizer()("abc")["input_ids"]
        (read,) = HfArgumentParser(TuneArguments).parse_json_file(str(folder / "training_args.json"))
        assert read.to_dict() == run.args.to_dict()
        assert not (folder / "training_args.bin").exists()
        for path in folder.glob("*.pt"):
            torch.load(path, weights_only=True)


def test_the_weights_of_any_module_are_saved(tmp_path: Path) -> None:
    """Adapters by themselves, and a model that is none of transformers'."""
    pytest.importorskip("peft")
    args = arguments(tmp_path)
    adapted = add_adapters(random_model("llama"), args.format, args.floor, rank=2)
    OtaroTrainer(adapted, args, train_dataset=Blocks()).save_model(str(tmp_path / "adapters"))
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64))
    OtaroTrainer(plain, args, train_dataset=Blocks()).save_model(str(tmp_path / "plain"))
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == {"0.weight", "0.bias"}


def test_deepspeed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OtaroError, match="DeepSpeed is not supported"):
        arguments(tmp_path, deepspeed={})
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(OtaroError, match="DeepSpeed is not supported"):
        arguments(tmp_path)


@pytest.mark.parametrize(
    "options, kind, message",
    [
        ({"method": "best"}, OtaroError, "unknown method"),
        ({"widths": "E5M8,E5M2"}, PrecisionError, "E5M2"),
        ({"delay": 0}, OtaroError, "delay of 0"),
        ({"delay_apply": "max"}, OtaroError, "sum or mean"),
        ({"average": 1.5}, OtaroError, "no share"),
        (
            {"average": 0.5, "load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"},
            OtaroError,
            "not both",
        ),
        ({"embedding_floor": "E4M3"}, PrecisionError, "E4M3"),
        ({"fit_only": True}, OtaroError, "method otaro for all has no tiers that could be fitted"),
        ({"fit_only": True, "method": "tiers", "widths": "E5M8"}, OtaroError, "for E5M8 has no tiers .* E5M4 or E5M3"),
        ({"fit_only": True, "method": "tiers", "average": 0.4}, OtaroError, "nothing is averaged"),
        (
            {"fit_only": True, "method": "tiers", "load_best_model_at_end": True},
            OtaroError,
            "leave early stopping out",
        ),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message):
        arguments(tmp_path, **options)


@pytest.mark.parametrize(("name", "method"), [("default", "tiers"), ("paper", "otaro")])
def test_recipes_are_settings(name: str, method: str, tmp_path: Path) -> None:
    assert set(recipe.RECIPES) == {"default", "paper"}
    assert arguments(tmp_path, **recipe.settings(name)).method == method
    with pytest.raises(OtaroError, match="unknown recipe"):
        recipe.settings("best")


def test_the_learning_rate_of_model_and_batch() -> None:
    rate = recipe.Recipe().learning_rate_for
    assert rate(576, 16 * 512) == 3e-4  # what the experiments chose
    assert rate(4096, 16 * 512) == pytest.approx(3e-4 * 576 / 4096)
    assert rate(576, 2 * 256) == 7.5e-5  # what the demo was measured with
    assert rate(576, 64 * 512) == rate(576, None) == 3e-4
    assert rate(None, 16 * 512) == 3e-4


def test_a_run_without_a_learning_rate_takes_that_of_its_model_and_update(tmp_path: Path) -> None:
    args = arguments(tmp_path, learning_rate=None, gradient_accumulation_steps=4)
    expected = recipe.Recipe().learning_rate_for(48, 2 * 4 * 16)
    made = OtaroTrainer(random_model("llama"), args, train_dataset=Blocks())
    assert made.args.learning_rate == made.create_optimizer().param_groups[0]["lr"] == expected
    assert args.learning_rate is None  # and may be used for another model
    whole = OtaroTrainer(
        random_model("llama"),
        arguments(tmp_path, learning_rate=None, per_device_train_batch_size=1000),
        train_dataset=Blocks(),
    )
    assert whole.args.learning_rate == recipe.Recipe().learning_rate_for(48, len(Blocks()) * 16)
    assert trainer(tmp_path, learning_rate=0.25).args.learning_rate == 0.25


def test_the_learning_rate_of_adapters_and_streams(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    args = arguments(tmp_path, learning_rate=None)
    adapted = add_adapters(random_model("llama"), args.format, args.floor, rank=2)
    assert OtaroTrainer(adapted, args, train_dataset=Blocks()).args.learning_rate == (
        recipe.Recipe().learning_rate_for(None, 2 * 16)
    )

    class Stream(IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            return iter(Blocks()[index] for index in range(12))

    streamed = OtaroTrainer(random_model("llama"), args, train_dataset=Stream())
    assert streamed.args.learning_rate == recipe.Recipe().learning_rate_for(48, None)


def test_the_paper_recipe_is_the_papers(tmp_path: Path) -> None:
    args = arguments(tmp_path, **recipe.settings("paper"))
    assert (args.optim, args.learning_rate, args.exploration, args.delay, args.delay_apply) == (
        "sgd",
        1e-5,
        5,
        10,
        "sum",
    )
    assert (args.scheme, args.group_size, args.lr_scheduler_type, args.max_grad_norm) == ("nearest", 64, "constant", 0)
    assert args.completion_only


def test_a_log_cut_short_is_cut_back(tmp_path: Path) -> None:
    log = tmp_path / LOG_NAME
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_log(log, 2)
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'
