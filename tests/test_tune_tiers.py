"""Tiers: bits that narrow widths decide for themselves, and the ordinary weights made of them in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from hard_weights import FORMATS
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from tuning import Blocks, arguments, trainer

from otaro import convert, sefp
from otaro.errors import OtaroError
from otaro.nn import FakeSefpEmbedding, FakeSefpLinear
from otaro.precision import Precision
from otaro.refresh import Refresher
from otaro.sefp import Format, Tiers
from otaro.tune.callbacks import LOG_NAME, read_log
from otaro.tune.data import IGNORED, Collator
from otaro.tune.distillation import divergence
from otaro.tune.finishing import fitting_updates, without_dropout
from otaro.tune.fitting import fit, move
from otaro.tune.recipe import Recipe
from otaro.tune.tiers import add_tiers, leave_out_tiers, settle, settle_model
from otaro.tune.trainer import OtaroTrainer

M8, M7, M6, M5, M4, M3 = Precision
ADAM: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0}
NESTED = [format for format in FORMATS if format.scheme == "nested"]


def tiered(columns: int = 200, spread: float = 0.3) -> tuple[torch.Tensor, Tiers]:
    generator = torch.Generator().manual_seed(columns)
    weight, narrow, wide = torch.randn(3, 40, columns, generator=generator)
    return weight, [(M3, weight + spread * narrow), (M4, weight + spread * wide)]


@pytest.mark.parametrize("format", NESTED)
def test_every_width_is_a_prefix(format: Format) -> None:
    weight, tiers = tiered()
    widest = sefp.encode_unchecked(weight, M8, format, tiers)
    for width in Precision:
        alone = sefp.encode_unchecked(weight, width, format, tiers)
        assert torch.equal(alone.code, sefp.truncate(widest, width).code)
        assert torch.equal(alone.scale, widest.scale)


@pytest.mark.parametrize("format", NESTED)
def test_the_narrowest_tier_is_free_and_wider_ones_are_nearest_within_its_cell(format: Format) -> None:
    weight, tiers = tiered()
    codes = sefp.encode_unchecked(weight, M8, format, tiers)
    narrow, wide, own = (
        sefp.encode_unchecked(weight, M8, format, [(M8, tensor)]).code for tensor in (tiers[0][1], tiers[1][1], weight)
    )
    assert torch.equal(codes.code >> 5, narrow >> 5)
    # Of the codes in the narrower cell the one nearest to the tier's own, found by trying all.
    cell = (narrow >> 5)[..., None] * 2 + torch.arange(2)
    expected = cell.gather(-1, ((cell << 5) + 15 - 2 * wide[..., None]).abs().argmin(-1, keepdim=True))[..., 0]
    assert torch.equal(codes.code >> 4, expected)
    cell = (codes.code >> 4)[..., None] * 16 + torch.arange(16)
    assert torch.equal(codes.code, cell.gather(-1, (cell - own[..., None]).abs().argmin(-1, keepdim=True))[..., 0])


def test_tiers_like_the_weight_change_nothing() -> None:
    weight, _ = tiered()
    for width in Precision:
        alike = sefp.encode_unchecked(weight, width, Format(), [(M3, weight), (M4, weight)])
        assert torch.equal(alike.code, sefp.encode(weight, width).code)


@pytest.mark.parametrize("format", NESTED)
def test_settled_weights_have_the_codes_of_the_tiers(format: Format) -> None:
    weight, tiers = tiered(spread=0.05)
    settled, scale, lost = settle(weight, format, tiers)
    assert lost == 0
    again = sefp.encode_unchecked(settled, M8, format, scale=scale)
    wanted = sefp.encode_unchecked(weight, M8, format, tiers)
    assert torch.equal(scale, wanted.scale)
    assert torch.equal(again.code, wanted.code)
    # With scales found anew some groups would have lost theirs.
    assert not torch.equal(sefp.group_scales(settled, format), scale)
    # What needed no settling is left alone.
    assert 0.5 < (settled == weight).float().mean() < 1


def test_gradients_go_to_the_tier_of_the_width() -> None:
    layer = nn.Sequential(nn.Linear(128, 8))
    convert.simulate(layer, Format())
    add_tiers(layer, [M3, M4])
    names = {M3: "0.weight_E5M3", M4: "0.weight_E5M4", M5: "0.weight", M8: "0.weight"}
    for width, expected in names.items():
        convert.set_precision(layer, width)
        layer.zero_grad()
        layer(torch.ones(1, 128)).sum().backward()
        touched = {name for name, parameter in layer.named_parameters() if parameter.grad is not None}
        assert touched == {expected, "0.bias"}


def test_compiled_a_layer_stays_whole_and_the_same() -> None:
    layer = nn.Sequential(nn.Linear(70, 8))
    convert.simulate(layer, Format())
    add_tiers(layer, [M3, M4])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for width in Precision:
        convert.set_precision(layer, width)
        results = []
        for model in (layer, compiled):
            layer.zero_grad()
            result = model(torch.ones(1, 70))
            result.sum().backward()
            results.append((result.detach(), {name: p.grad for name, p in layer.named_parameters()}))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "gpt-oss", "gpt2"])
def test_models_compute_the_same_settled(name: str) -> None:
    model = random_model(name).eval()
    convert.simulate(model, Format())
    add_tiers(model, [M3, M4])
    generator = torch.Generator().manual_seed(0)
    assert any(key.endswith("_E5M3") for key in model.state_dict())
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("_E5M3", "_E5M4")):
                parameter.add_(0.002 * torch.randn(parameter.shape, generator=generator))
    ids = torch.arange(12)[None]

    @torch.no_grad()
    def answers(width: Precision) -> torch.Tensor:
        convert.set_precision(model, width)
        logits: torch.Tensor = model(input_ids=ids).logits
        return logits

    before = {width: answers(width) for width in Precision}
    assert settle_model(model) == 0
    assert not any(key.endswith(("_E5M3", "_E5M4")) for key in model.state_dict())
    for width in Precision:
        assert torch.allclose(answers(width), before[width], atol=1e-5)


def test_an_embedding_has_no_tier_below_its_floor() -> None:
    model = random_model("llama-tied")
    convert.simulate(model, Format())
    add_tiers(model, [M3, M4])
    layers = [module for module in model.modules() if isinstance(module, FakeSefpLinear | FakeSefpEmbedding)]
    widths = {
        type(layer).__name__ + str(layer.floor): [width for width, _ in layer.tiers["weight"]] for layer in layers
    }
    assert widths["FakeSefpEmbeddingE5M4"] == [M4]
    assert widths["FakeSefpLinearE5M3"] == [M3, M4]
    head = model.get_output_embeddings()
    assert head.tiers["weight"][0][1] is model.get_input_embeddings().tiers["weight"][0][1]
    assert "lm_head.weight_E5M4" not in model.state_dict()


@pytest.mark.parametrize(
    "floor, widths, embedding, linear",
    [(M4, [M3, M4], [M4], [M3, M4]), (M8, [M3, M4], [], [M3, M4]), (M4, [M3], [M4], [M3]), (M3, [M3], [M3], [M3])],
)
def test_the_weight_itself_decides_the_widest(
    floor: Precision, widths: list[Precision], embedding: list[Precision], linear: list[Precision]
) -> None:
    model = random_model("llama")
    convert.simulate(model, Format(), floor)
    add_tiers(model, widths)
    for layer, expected in ((model.model.embed_tokens, embedding), (model.model.layers[0].mlp.up_proj, linear)):
        assert [width for width, _ in layer.tiers.get("weight", ())] == expected
    before = {name: value.clone() for name, value in model.state_dict().items() if "_E5M" not in name}
    assert settle_model(model) == 0
    assert model.state_dict().keys() == before.keys()
    with pytest.raises(OtaroError, match="the weight itself"):
        add_tiers(model, [M8])


def test_only_nested_has_tiers() -> None:
    layer = nn.Sequential(nn.Linear(64, 2))
    convert.simulate(layer, Format("nearest"))
    with pytest.raises(OtaroError, match="nested"):
        add_tiers(layer, [M3])


def unsettled(run: OtaroTrainer, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Train, and give the weights and tiers as they were before they were settled."""
    found: dict[str, torch.Tensor] = {}

    def watch(model: nn.Module) -> int:
        found.update({name: value.clone() for name, value in model.state_dict().items()})
        return settle_model(model)

    monkeypatch.setattr("otaro.tune.finishing.settle_model", watch)
    run.train()
    return found


@pytest.mark.parametrize("average", [0.0, 0.5])
def test_weights_are_what_fp16_makes_of_them(average: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: nothing that narrow widths learn reaches them."""
    options: dict[str, Any] = {**ADAM, "max_steps": 6, "average": average}
    found = unsettled(trainer(tmp_path / "tiers", method="tiers", **options), monkeypatch)
    plain = trainer(tmp_path / "fp16", method="fp16", **options)
    plain.train()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(found[name], value), name
    apart = [not torch.equal(found[name], found[name.rpartition("_")[0]]) for name in found if "proj.weight_" in name]
    assert len(apart) > 10
    assert all(apart)


def fit_by_hand(model: nn.Module, ids: torch.Tensor, step: float) -> None:
    """Full precision teaches E5M3 and E5M4, which go by the size of their cells and are drawn back."""
    weights = Refresher(model)
    weights.set_width(None)
    expected = model(input_ids=ids).logits.detach()[:, :-1].softmax(-1)
    for width in (M3, M4):
        weights.set_width(width)
        found = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        (expected * (expected.log() - found)).sum(-1).mean().backward()
    parameters = dict(model.named_parameters())
    for name, tier in parameters.items():
        if name.endswith(("_E5M3", "_E5M4")):
            weight, width = parameters[name.rpartition("_")[0]].detach(), Precision(name[-4:])
            for row, scales, gradients in zip(tier.data, sefp.group_scales(weight, Format()), tier.grad, strict=True):
                for number, scale in enumerate(scales):
                    group = slice(64 * number, 64 * number + 64)
                    gradient = torch.nn.functional.pad(gradients[group], (0, 64 - len(gradients[group])))
                    size = (gradient.square() + gradient.square().mean()).sqrt()
                    moved = sefp.step(scale, width).abs() * gradient / size.clamp(min=1e-30)
                    row[group] -= step * moved[: len(row[group])]
            tier.data -= Recipe().fitting_pull * step * (tier.data - weight)
    model.zero_grad()


def test_a_run_by_hand(tmp_path: Path) -> None:
    """What the trainer does, in plain torch: the same weights. What fits goes through the data twice."""
    run = trainer(tmp_path, method="tiers", max_steps=4, per_device_train_batch_size=5, average=0.5)
    run.train_dataset = Blocks(10)
    model = random_model("llama")
    convert.simulate(model, run.args.format, run.args.floor)
    model.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(run.args.seed)
    loader = run.get_train_dataloader()
    seen = []
    batches = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        batches += list(loader)
    for batch in batches:
        Refresher(model).set_width(None)
        model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: value.detach().clone() for name, value in model.named_parameters()})
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_((seen[2][name] + seen[3][name]) / 2)
    add_tiers(model, [M3, M4])
    for number, batch in enumerate(batches):
        fit_by_hand(model, batch["input_ids"], Recipe().fitting_step * (4 - number) / 4)
    settle_model(model)
    torch.manual_seed(run.args.seed)
    run.train()
    state = run.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, state[name], atol=1e-5), name


def test_every_width_learns_and_nothing_of_the_tiers_is_left(tmp_path: Path) -> None:
    options = {"optim": "adamw_torch", "learning_rate": 3e-3, "per_device_train_batch_size": 4, "max_steps": 40}
    run = trainer(tmp_path, method="tiers", average=0.4, **options)
    first = run.evaluate(Blocks(4))
    run.train()
    last = run.evaluate(Blocks(4))
    for width in Precision:
        assert last[f"eval_loss_{width}"] < 0.9 * first[f"eval_loss_{width}"]
    assert not any(name.endswith(("_E5M3", "_E5M4")) for name in run.model.state_dict())
    fitted = Recipe().fitting_updates
    assert run.selector.counts == {M8: 0, M7: 0, M6: 0, M5: 0, M4: fitted, M3: fitted}
    assert run.selector.losses.keys() == {M4, M3}


def test_fitting_leaves_everything_else_alone() -> None:
    """Norms too, and gradients."""
    model = random_model("llama-tied")
    convert.simulate(model, Format())
    add_tiers(model, [M3, M4])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = Blocks(3).ids
    losses = fit(model, [{"input_ids": ids, "labels": ids}], Refresher(model), [M3, M4], 0.5)
    assert losses.keys() == {M3, M4}
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) is not name.endswith(("_E5M3", "_E5M4")), name


def test_a_step_is_no_more_than_its_share_of_a_cell() -> None:
    layer = nn.Sequential(nn.Linear(100, 8))
    convert.simulate(layer, Format())
    add_tiers(layer, [M3])
    weight, tier = layer[0].weight, layer[0].weight_E5M3
    tier.grad = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)) * 1e-6
    tier.grad[0] = 0
    move(layer, [M3], 0.1)
    cells = sefp.step(sefp.group_scales(weight.detach(), Format()), M3).abs().repeat_interleave(64, 1)[:, :100]
    moved = (tier - weight).detach()
    assert (moved.abs() <= 0.1 * cells + 1e-7).all()
    assert torch.equal(moved.sign(), -tier.grad.sign())
    tier.grad.zero_()
    move(layer, [M3], 0.1, pull=3)
    torch.testing.assert_close((tier - weight).detach(), 0.7 * moved)  # back by 3 · 0.1 of the way


def test_a_tier_ends_where_pull_and_gradient_agree() -> None:
    layer = nn.Sequential(nn.Linear(64, 8))
    convert.simulate(layer, Format())
    add_tiers(layer, [M3])
    weight, tier = layer[0].weight, layer[0].weight_E5M3
    for _ in range(300):
        tier.grad = torch.ones(8, 64)
        move(layer, [M3], 0.05, pull=3)
    cells = sefp.step(sefp.group_scales(weight.detach(), Format()), M3).abs().repeat_interleave(64, 1)
    torch.testing.assert_close((tier - weight).detach() / cells, torch.full((8, 64), -0.85 / 3 / 2**0.5))


def test_accumulated_batches_equal_one_large_batch(tmp_path: Path) -> None:
    options = {"method": "tiers", "max_steps": 6, "average": 0.5}
    large = trainer(tmp_path / "large", **options, per_device_train_batch_size=6)
    small = trainer(tmp_path / "small", **options, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    large.train()
    small.train()
    for name, value in large.model.state_dict().items():
        torch.testing.assert_close(small.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert small.selector.losses == pytest.approx(large.selector.losses, rel=1e-4)


def test_tokens_without_a_label_do_not_count() -> None:
    """Over an update, not over its batches."""
    ids = Blocks(4).ids
    labels = ids.clone()
    labels[:3, :-2] = IGNORED
    results = []
    for size in (4, 1):
        model = random_model("llama")
        convert.simulate(model, Format())
        add_tiers(model, [M3])
        parts = zip(ids.split(size), labels.split(size), strict=True)
        batches = [{"input_ids": part, "labels": label} for part, label in parts]
        results.append((fit(model, batches, Refresher(model), [M3], 0.1), model.state_dict()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def asked_and_answered() -> list[dict[str, torch.Tensor]]:
    """Sequences of several lengths, of which the first half is a question."""
    sequences = []
    for number, ids in enumerate(Blocks().ids):
        kept = ids[: 16 - number % 3]
        sequences.append({"input_ids": kept, "labels": kept.clone().index_fill(0, torch.arange(8), IGNORED)})
    return sequences


def test_prompts_in_padded_and_accumulated_batches(tmp_path: Path) -> None:
    results = []
    for size in (4, 2):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 4 // size}
        run = trainer(tmp_path / str(size), method="tiers", max_steps=2, completion_only=False, **options)
        run.train_dataset, run.data_collator = asked_and_answered(), Collator(0)
        passed: list[set[str]] = []
        run.model.register_forward_pre_hook(lambda _, __, given, to=passed: to.append(set(given)), with_kwargs=True)
        run.train()
        assert set().union(*passed) <= {"input_ids", "labels", "attention_mask", "use_cache", "num_items_in_batch"}
        results.append(run.model.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    """The forward pass is computed again in the backward one, at the width it had."""
    runs = [trainer(tmp_path / str(on), method="tiers", max_steps=6, gradient_checkpointing=on) for on in (0, 1)]
    for run in runs:
        run.train()
    plain, checkpointed = (run.model.state_dict() for run in runs)
    assert all(torch.equal(value, checkpointed[name]) for name, value in plain.items())


def test_bf16_trains_float32_weights(tmp_path: Path) -> None:
    options = {"bf16": True, "optim": "adamw_torch", "learning_rate": 3e-3, "max_steps": 30}
    run = trainer(tmp_path, method="tiers", per_device_train_batch_size=4, **options)
    first = run.evaluate(Blocks(4))
    run.train()
    assert {value.dtype for value in run.model.state_dict().values()} == {torch.float32}
    last = run.evaluate(Blocks(4))
    assert all(last[f"eval_loss_{width}"] < first[f"eval_loss_{width}"] for width in Precision)


@pytest.mark.parametrize(
    "widths, tiers",
    [
        ("E5M6,E5M3", ["E5M3"]),
        ("E5M4,E5M3", ["E5M4", "E5M3"]),
        ("E5M8,E5M5,E5M4", ["E5M4"]),
        ("E5M7,E5M5", []),
        ("E5M3", ["E5M3"]),
    ],
)
def test_only_widths_that_are_wanted(widths: str, tiers: list[str], tmp_path: Path) -> None:
    run = trainer(tmp_path, method="tiers", widths=widths, max_steps=4)
    assert {str(width) for width in run.tiers} == set(tiers)
    run.train()
    assert {str(width) for width, count in run.selector.counts.items() if count} == set(tiers)


def test_the_divergence_has_the_gradient_that_autograd_finds() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, teacher = torch.randn(2, 3, 200, 50, generator=generator).mul(2)
    labels = torch.randint(0, 50, (3, 200), generator=generator)
    labels[0, :150] = IGNORED
    logits.requires_grad_()
    loss, cross_entropy = divergence(logits, teacher, labels)
    (found,) = torch.autograd.grad(3 * loss, logits)
    chosen = labels[:, 1:] != IGNORED
    values = logits[:, :-1][chosen].log_softmax(-1)
    expected = nn.functional.nll_loss(values, labels[:, 1:][chosen], reduction="sum")
    torch.testing.assert_close(cross_entropy, expected.detach())
    wanted = nn.functional.kl_div(values, teacher[:, :-1][chosen].log_softmax(-1), reduction="sum", log_target=True)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found, torch.autograd.grad(3 * wanted, logits)[0], rtol=1e-4, atol=1e-6)
    assert not cross_entropy.requires_grad


def test_an_optimizer_of_ones_own_trains_the_weights_only() -> None:
    model = random_model("llama")
    convert.simulate(model, Format())
    add_tiers(model, [M3, M4])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    leave_out_tiers(optimizer, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left = {names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}
    assert left == {name for name in names.values() if "_E5M" not in name}


@pytest.mark.parametrize("updates, expected", [(1000, 333), (200, 67), (60, 24), (24, 24), (3, 3)])
def test_how_many_updates_fit(updates: int, expected: int) -> None:
    assert fitting_updates(updates, Recipe().fitting, Recipe().fitting_updates) == expected


def test_a_gradient_that_overflowed_moves_nothing() -> None:
    layer = nn.Sequential(nn.Linear(64, 2))
    convert.simulate(layer, Format())
    add_tiers(layer, [M3])
    weight, tier = layer[0].weight.detach(), layer[0].weight_E5M3
    tier.grad = torch.ones(2, 64)
    tier.grad[0, 0], tier.grad[0, 1] = torch.inf, torch.nan
    move(layer, [M3], 0.1)
    assert torch.equal(tier[0, :2], weight[0, :2])
    assert (tier[1] != weight[1]).all()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_teacher_and_widths_have_no_dropout(checkpointing: bool) -> None:
    model = random_model("gpt2").train()
    assert model.config.resid_pdrop > 0
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.arange(12)[None]
    with without_dropout(model):
        first, second = (model(input_ids=ids).logits for _ in range(2))
        assert torch.equal(first, second)
        assert any(module.training for module in model.modules()) == any(
            isinstance(module, GradientCheckpointingLayer) for module in model.modules()
        )
    assert all(module.training for module in model.modules())
    assert not torch.equal(model(input_ids=ids).logits, first)


def test_a_trainer_tunes_once(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="tiers", max_steps=2)
    run.train()
    assert not run.optimizer.state  # which would be as large as the tiers
    with pytest.raises(OtaroError, match="make a new one"):
        run.train()


def test_too_many_tiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OtaroError, match="at most 2"):
        arguments(tmp_path, method="tiers", ultra_low="E5M5,E5M4,E5M3")


def test_ultra_low_widths_are_those_with_tiers(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="tiers", ultra_low="E5M3", max_steps=2)
    run.train()
    assert read_log(tmp_path / LOG_NAME)[-1]["tiers"].keys() == {"E5M3"}
    assert len(arguments(tmp_path, method="otaro", ultra_low="E5M5,E5M4,E5M3").ultra_low_widths) == 3


def test_weights_that_stay_as_they_are_are_refused(tmp_path: Path) -> None:
    model = random_model("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    with pytest.raises(OtaroError, match="all weights that are packed, or adapters"):
        OtaroTrainer(model, arguments(tmp_path, method="tiers"), train_dataset=Blocks())
    model.model.embed_tokens.weight.requires_grad_(True)
    model.model.norm.weight.requires_grad_(False)  # as routers have corrections that are not learned
    OtaroTrainer(model, arguments(tmp_path, method="tiers"), train_dataset=Blocks())
