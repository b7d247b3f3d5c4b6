"""An update by itself, and as the trainer runs it: compiled, without waiting for the device, on transformers' hooks."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback, masking_utils
from transformers.utils import import_utils
from tuning import Blocks, arguments, trainer

from otaro import convert, ops
from otaro.errors import OtaroError
from otaro.nn import FakeSefp
from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.sefp import Format
from otaro.tune import compilation, graphs
from otaro.tune.callbacks import LOG_NAME, read_log
from otaro.tune.recipe import RECIPES, Recipe, settings
from otaro.tune.trainer import OtaroTrainer
from otaro.tune.update import Processes, compute_gradients

M8, M7, M6, M5, M4, M3 = Precision
ADAM: dict[str, Any] = {"optim": "adamw_torch_fused", "learning_rate": 1e-3, "max_grad_norm": 1.0}


def simulated(architecture: str = "llama") -> Any:
    model = random_model(architecture).train()
    convert.simulate(model, Format())
    return model


@pytest.mark.parametrize("width", [None, M3])
def test_an_update_needs_no_trainer(width: Precision | None) -> None:
    """The gradients of three micro-batches are those of one large batch."""
    ids = Blocks(6).ids
    large, small = simulated(), simulated()
    small.load_state_dict(large.state_dict())
    losses = [
        compute_gradients(
            model, [{"input_ids": part, "labels": part} for part in ids.split(size)], width, Refresher(model)
        )
        for model, size in ((large, 6), (small, 2))
    ]
    torch.testing.assert_close(losses[0], losses[1])
    for (name, first), second in zip(large.named_parameters(), small.parameters(), strict=True):
        assert first.grad is not None, name
        assert second.grad is not None, name
        torch.testing.assert_close(first.grad, second.grad, rtol=1e-3, atol=1e-6)


def test_two_processes_have_the_gradients_of_one() -> None:
    """Their mean, as launchers take it."""
    ids = Blocks(4).ids
    gradients: list[list[torch.Tensor]] = []
    losses: list[list[torch.Tensor]] = []
    first = simulated().state_dict()
    for count in (1, 2):
        model = simulated()
        model.load_state_dict(first)
        losses.append([])
        for index in range(count):
            batch = {"input_ids": ids[index::count], "labels": ids[index::count]}
            processes = Processes(count, lambda value: value * count)  # noqa: B023
            losses[-1].append(compute_gradients(model, [batch], M3, Refresher(model), processes=processes))
        gradients.append([parameter.grad / count for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(sum(losses[1]) / 2, losses[0][0])


def test_a_width_needs_simulated_layers() -> None:
    plain = Refresher(torch.nn.Linear(2, 2))
    assert plain.width is None
    with pytest.raises(OtaroError, match="no simulated layers to compute at E5M4"):
        plain.set_width(Precision.E5M4)


class Waits(TorchDispatchMode):
    """Counts what a GPU would have to be waited for."""

    SYNCHRONISING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket._qualified_op_name.removeprefix("aten::") in self.SYNCHRONISING
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["tiers", "uniform", "fixed:E5M3", "fp16"])
def test_nothing_is_waited_for_between_logs(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses stay on the device until they are logged; so does the norm of the gradients."""
    run = trainer(tmp_path, method=method, max_steps=12, average=0.5, per_device_train_batch_size=4, **ADAM)
    run.train_dataset = Blocks(48)  # one epoch: a data loader draws seeds at the beginning of each
    run.update_callback.read_every = 5
    waits = Waits()
    counts: list[int] = []
    to_list = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        waits.count += 1  # on a CPU it reads memory without an operation
        return to_list(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)

    class Count(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **options: Any) -> None:
            counts.append(waits.count)
            waits.count = 0

    run.add_callback(Count())
    fits: list[int] = []
    report = run.report

    def count_fit(*arguments: Any) -> None:
        if arguments[0].startswith("fitting"):
            fits.append(waits.count)
            waits.count = 0
        report(*arguments)

    monkeypatch.setattr(run, "report", count_fit)
    with waits:
        run.train()
    read = {5, 10, 12}  # every fifth, and the last
    assert [count for step, count in enumerate(counts, 1) if step not in read | {1}] == [0] * 8
    assert all(counts[step - 1] > 0 for step in read)
    fitted = 12 if method == "tiers" else 0
    assert [line["step"] for line in read_log(tmp_path / LOG_NAME)] == list(range(1, 13 + fitted))
    # The rest is what settling asks for, of each weight.
    if method == "tiers":
        assert len(fits) == fitted
        assert [fits[step - 1] for step in range(1, 13) if step not in read | {1}] == [0] * 8


@pytest.mark.parametrize("method", ["tiers", "bps"])
def test_losses_read_late_are_those_read_at_once(method: str, tmp_path: Path) -> None:
    """What is searched for needs them at once."""
    runs = [trainer(tmp_path / name, method=method, max_steps=7, **ADAM) for name in ("late", "at-once")]
    assert runs[0].update_callback.read_every == 1
    if method != "bps":
        runs[0].update_callback.read_every = 3
    for run in runs:
        run.train()
    assert (tmp_path / "late" / LOG_NAME).read_bytes() == (tmp_path / "at-once" / LOG_NAME).read_bytes()
    assert runs[0].selector.losses == runs[1].selector.losses


def test_on_a_gpu_losses_are_read_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, method="tiers")
    monkeypatch.setattr(type(made.args), "device", torch.device("cuda"))
    assert type(made.update_callback)(made).read_every > 1
    monkeypatch.undo()
    searched = trainer(tmp_path, method="bps")
    monkeypatch.setattr(type(made.args), "device", torch.device("cuda"))
    assert type(searched.update_callback)(searched).read_every == 1


def test_compiled_it_is_the_same_run(tmp_path: Path) -> None:
    """Layers and losses through torch.compile, without its code generator; the last batches of an epoch as they are."""
    options: dict[str, Any] = {"method": "tiers", "max_steps": 3, "per_device_train_batch_size": 5, **ADAM}
    options["widths"] = "E5M8,E5M4"
    said: list[str] = []

    def run(name: str, **more: Any) -> OtaroTrainer:
        args = arguments(tmp_path / name, **options, **more)
        progress = lambda text, *_: said.append(text)  # noqa: E731
        made = OtaroTrainer(random_model("llama"), args, train_dataset=Blocks(), progress=progress)
        made.train()
        return made

    plain = run("plain")
    assert not any("compiling" in text for text in said)
    torch._dynamo.utils.counters.clear()
    compiled = run("compiled", compile=True, compile_backend="eager")
    assert compiled.compilation.enabled
    assert sum("compiling" in text for text in said) >= 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2
    assert not torch._dynamo.utils.counters["graph_break"]
    for (name, first), second in zip(plain.model.named_parameters(), compiled.model.parameters(), strict=True):
        assert torch.equal(first, second), name


@pytest.mark.parametrize(("method", "graphs"), [("fp16", 2), ("uniform", 2), ("tiers", 5)])
def test_layers_and_widths_share_what_is_compiled(
    method: str, graphs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where values are made beforehand: a layer and a loss; the teacher and each tier too."""

    def fill(self: Refresher, width: Precision, shared: Any) -> None:
        for layer, *_ in shared:
            tiers = [(tier, weight.detach()) for tier, weight in layer.tiers.get("weight", ())]
            values = ops.fake_quantize(layer.weight.detach(), width, layer.format, tiers)
            self._results.setdefault(layer.weight.data_ptr(), torch.empty_like(values)).copy_(values)

    monkeypatch.setattr(Refresher, "_fills", lambda self, layer: True)
    monkeypatch.setattr(Refresher, "_fill", fill)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options: dict[str, Any] = {"method": method, "max_steps": 8, "per_device_train_batch_size": 6, **ADAM}
    args = arguments(tmp_path, **options, compile=True, compile_backend="eager")
    OtaroTrainer(random_model("llama"), args, train_dataset=Blocks(48), progress=lambda *_: None).train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not torch._dynamo.utils.counters["graph_break"]


def test_what_chooses_tokens_by_looking_at_them_is_not_compiled() -> None:
    models = {name: random_model(name) for name in ("llama", "mixtral")}
    for model in models.values():
        convert.simulate(model, Format())
    assert {name: compilation.can_compile(model) for name, model in models.items()} == {"llama": True, "mixtral": False}


def test_recipes_cannot_be_changed_and_decide_every_setting(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        RECIPES["default"].average = 0.0  # type: ignore[misc]
    args = arguments(tmp_path, **{**settings("default"), "use_cpu": True})
    assert args.constants is RECIPES["default"] == Recipe()
    plain = settings("default", method="fp16")
    assert (plain["average"], plain["completion_only"]) == (0.0, True)
    assert settings("default", method="fp16", average=0.4)["average"] == 0.4
    assert settings("default", load_best_model_at_end=True)["average"] == 0.0


HOOKS = {
    "_run_epoch": 1,
    "_load_callback_state": 1,
    "_save_checkpoint": 1,
    "_save": 1,
    "_save_rng_state": 1,
    "_issue_warnings_after_load": 1,
}
"""What OtaroTrainer overrides though it is private, and how often a run that is resumed comes by at least."""


def test_the_private_hooks_of_transformers_are_there_and_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overridden = {name for name in vars(OtaroTrainer) if name in vars(Trainer) and name.startswith("_")}
    assert overridden - {"__init__", "__module__", "__doc__", "__annotations__"} == HOOKS.keys()
    calls = dict.fromkeys(HOOKS, 0)
    for name in HOOKS:
        original = getattr(OtaroTrainer, name)

        def counted(self: Any, *args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            calls[name] += 1
            return original(self, *args, **options)

        monkeypatch.setattr(OtaroTrainer, name, counted)
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer(tmp_path, **options).train()
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    trainer(tmp_path, **options).train(resume_from_checkpoint=True)
    assert all(calls[name] >= least for name, least in HOOKS.items()), calls


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("get_batch_samples", ["self", "epoch_iterator", "num_batches", "device"]),
        ("training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        ("compute_loss", ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]),
        ("_prepare_inputs", ["self", "inputs"]),
        ("compute_loss_context_manager", ["self"]),
        ("_save_rng_state", ["self", "output_dir"]),
        ("_save", ["self", "output_dir", "state_dict"]),
        ("_issue_warnings_after_load", ["self", "load_result"]),
        ("_load_callback_state", ["self"]),
    ],
)
def test_transformers_hooks_take_what_they_are_given(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(Trainer, name)).parameters) == parameters


def test_transformers_looks_for_packed_sequences_where_it_is_kept_from_it() -> None:
    """Positions that begin anew are another sequence, in a batch that has positions, and in no other."""
    assert list(inspect.signature(masking_utils.find_packed_sequence_indices).parameters) == ["position_ids"]
    model, ids = simulated(), Blocks(2).ids
    plain: dict[str, Any] = {"input_ids": ids, "labels": ids}
    positions = torch.arange(8).repeat(2, 2)
    losses = {
        name: float(compute_gradients(model, [batch], None, Refresher(model)))
        for name, batch in {
            "plain": plain,
            "in order": {**plain, "position_ids": torch.arange(16).expand(2, -1)},
            "packed": {**plain, "position_ids": positions},
        }.items()
    }
    assert losses["plain"] == losses["in order"] != losses["packed"]


def test_captured_passes_attend_without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 makes them where a graph is captured: another attention than in the passes before, which would
    be compiled anew, and no capture bears that."""
    assert list(inspect.signature(masking_utils.is_tracing).parameters) == ["tensor"]
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    attention, masks = torch.nn.functional.scaled_dot_product_attention, []

    def record(*args: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        masks.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    model, ids = simulated(), Blocks(2).ids
    with graphs.without_masks():
        compute_gradients(model, [{"input_ids": ids, "labels": ids}], None, Refresher(model))
    assert masks
    assert all(mask is None for mask in masks)


def test_transformers_tells_the_last_micro_batch_and_how_many_there_are(tmp_path: Path) -> None:
    """An update is computed when the Trainer comes to its last micro-batch, and batches of an epoch may be fewer."""
    run = trainer(tmp_path, method="bps", max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    seen: list[tuple[bool, int, int]] = []
    step = run.training_step

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        waiting = (run.accelerator.sync_gradients, run.current_gradient_accumulation_steps, len(run.batches))
        seen.append(waiting)
        return step(*args, **options)

    run.training_step = watched  # type: ignore[method-assign]
    run.train()
    first, second = [(False, 4, 4)] * 3 + [(True, 4, 4)], [(False, 2, 2), (True, 2, 2)]
    assert seen == (first + second) * 2


class Replayed:
    """A captured graph, without a GPU: the same code again on the same tensors. Capturing computes nothing."""

    count = 0

    def __init__(self, function: graphs.Function, inputs: dict[str, torch.Tensor], pool: Any) -> None:
        self.inputs, self._function = inputs, function
        self.result = torch.empty(0)
        Replayed.count += 1

    def replay(self) -> None:
        result = self._function(dict(self.inputs))
        if not self.result.numel():
            self.result = torch.empty_like(result)
        self.result.copy_(result)


@pytest.mark.parametrize("options", [{"method": "tiers", "average": 0.5}, {"method": "uniform"}, {"method": "fp16"}])
def test_captured_passes_give_the_same_bits(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with micro-batches, with gradients in buffers and with an incomplete batch at the end of an epoch."""
    monkeypatch.setattr(graphs, "Captured", Replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(Replayed, "count", 0)
    states = []
    for enabled in (False, True):
        run = trainer(
            tmp_path / str(enabled),
            **{**ADAM, **options, "max_steps": 14, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 2},
        )
        run.graphs = graphs.Graphs(run.model, enabled=enabled)
        run.train()
        states.append({name: value.clone() for name, value in run.model.state_dict().items()})
        assert (Replayed.count > 0) is enabled
        assert not run.graphs._captured  # their memory is given back
    # In full precision; then the teacher's, each tier's and the step of those; widths that were taken often enough.
    assert Replayed.count == {"tiers": 1 + 4, "uniform": 2, "fp16": 1}[options["method"]]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_scales_stand_still() -> None:
    """A captured pass finds those of layers that quantise for themselves where they were, found anew."""
    model = simulated("gpt2")
    weights = Refresher(model)
    layers = [layer for layer in model.modules() if isinstance(layer, FakeSefp)]

    def scales() -> list[torch.Tensor]:
        return [scale for layer in layers for scale in layer.scales.values()]

    weights.set_width(Precision.E5M4)
    first = scales()
    before = [scale.clone() for scale in first]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2
    weights.set_width(Precision.E5M3)
    assert first
    assert all(one is other for one, other in zip(first, scales(), strict=True))
    assert all(torch.equal(one + 4, other) for one, other in zip(before, first, strict=True))


def test_a_pass_that_is_captured_must_be_told_its_loss() -> None:
    model, ids = simulated(), Blocks(2).ids
    batches = [{"input_ids": ids, "labels": ids}]
    with pytest.raises(ValueError, match="tokens of one update"):
        compute_gradients(model, batches, None, Refresher(model), graphs=graphs.Graphs(model, enabled=True))


def test_what_cannot_be_captured_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graphs, "Captured", fail)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    captured = graphs.Graphs(torch.nn.Linear(2, 2), enabled=True)
    given = {"x": torch.ones(2)}
    for _ in range(graphs.PLAIN):
        assert captured.run("double", lambda inputs: 2 * inputs["x"], given).tolist() == [2, 2]
    with pytest.warns(UserWarning, match="could not be captured: operation not permitted when stream is capturing$"):
        assert captured.run("double", lambda inputs: 2 * inputs["x"], given).tolist() == [2, 2]
    assert not captured.enabled
    assert captured.run("double", lambda inputs: 2 * inputs["x"], given).tolist() == [2, 2]
