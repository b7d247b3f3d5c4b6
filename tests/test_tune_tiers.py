"""Tiers: bits that narrow widths decide for themselves, and the ordinary weights made of them in the end."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from hard_weights import FORMATS
from torch import nn
from transformers import TrainerCallback
from tuning import Blocks, arguments, trainer

from otaro import convert, sefp
from otaro.errors import OtaroError
from otaro.nn import FakeSefpEmbedding, FakeSefpLinear
from otaro.precision import Precision
from otaro.sefp import Format, Tiers
from otaro.tune.average import UNAVERAGED
from otaro.tune.data import IGNORED, Collator
from otaro.tune.distillation import distilled_loss
from otaro.tune.measurement import Measured, measure
from otaro.tune.recipe import RECIPES, Recipe
from otaro.tune.tiers import add_tiers, set_apart_narrowest, settle, settle_model, share_gradients
from otaro.tune.trainer import OtaroTrainer

M8, M7, M6, M5, M4, M3 = Precision
SHARES = {M4: 0.5, M3: 0.15}
MEASURED = Measured({M4: 0.8, M3: 6 / 11}, {M8: 2.0, M5: 3.0}, SHARES)  # and turns for E5M5
NESTED = [format for format in FORMATS if format.scheme == "nested"]


def tiered(columns: int = 200, spread: float = 0.3) -> tuple[torch.Tensor, Tiers]:
    generator = torch.Generator().manual_seed(columns)
    weight, narrow, wide = torch.randn(3, 40, columns, generator=generator)
    return weight, [(M3, weight + spread * narrow), (M4, weight + spread * wide)]


@pytest.fixture
def hurt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rounding to E5M5 count as harmful, whatever it does to the loss."""
    monkeypatch.setitem(RECIPES, "default", replace(RECIPES["default"], wide_loss_gap=-1.0))


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
    [(M4, [M3, M4], [M4], [M3, M4]), (M8, [M3, M4], [], [M3, M4]), (M4, [M3], [], [M3]), (M3, [M3], [M3], [M3])],
)
def test_the_weight_itself_decides_the_widest(
    floor: Precision, widths: list[Precision], embedding: list[Precision], linear: list[Precision]
) -> None:
    """Tuned for E5M8 at most, or for E5M4 where that is no tier."""
    model = random_model("llama")
    convert.simulate(model, Format(), floor)
    add_tiers(model, widths, M8 if M4 in widths else M4)
    for layer, expected in ((model.model.embed_tokens, embedding), (model.model.layers[0].mlp.up_proj, linear)):
        assert [width for width, _ in layer.tiers.get("weight", ())] == expected
    before = {name: value.clone() for name, value in model.state_dict().items() if "_E5M" not in name}
    assert settle_model(model) == 0
    assert model.state_dict().keys() == before.keys()


def test_only_nested_has_tiers() -> None:
    layer = nn.Sequential(nn.Linear(64, 2))
    convert.simulate(layer, Format("nearest"))
    with pytest.raises(OtaroError, match="nested"):
        add_tiers(layer, [M3])


def share_by_hand(model: nn.Module, format: Format) -> int:
    """Three twentieths of the widest width's gradient for E5M3, half of it for E5M4; and E5M4's own where E5M3's cell
    holds an E5M4 weight back, for E5M3. Returns how many weights that were."""
    parameters = dict(model.named_parameters())
    count = 0
    for name, narrow in parameters.items():
        if name.endswith("_E5M3"):
            weight, wide = parameters[name.removesuffix("_E5M3")], parameters[name.removesuffix("3") + "4"]
            free, bound = (
                sefp.decode(sefp.encode_unchecked(weight.detach(), M4, format, tiers))
                for tiers in ([(M4, wide.detach())], [(M3, narrow.detach()), (M4, wide.detach())])
            )
            for tier in (narrow, wide):
                tier.grad = torch.zeros_like(tier) if tier.grad is None else tier.grad
            narrow.grad = narrow.grad + wide.grad * (free != bound)
            count += int((free != bound).sum())
    for name, parameter in parameters.items():
        for width, share in SHARES.items():
            if name.endswith(f"_{width}"):
                parameter.grad = parameter.grad + share * parameters[name.removesuffix(f"_{width}")].grad
    return count


def part_tiers(model: nn.Module) -> None:
    """Move the tiers away from the weights they begin as."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("_E5M3", "_E5M4")):
                parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator))


def test_a_run_by_hand(tmp_path: Path) -> None:
    """What the trainer does, in plain torch: the same weights."""
    run = trainer(tmp_path, method="tiers", max_steps=6, per_device_train_batch_size=5, distillation=0.5)
    run.train_dataset = Blocks(30)
    model = random_model("llama")
    convert.simulate(model, run.args.format, run.args.floor)
    add_tiers(model, [M3, M4])
    part_tiers(run.model)
    model.load_state_dict(run.model.state_dict())
    narrow = [parameter for name, parameter in model.named_parameters() if name.endswith("_E5M3")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("_E5M3")]
    optimizer = torch.optim.SGD([{"params": others}, {"params": narrow, "lr": 1.4 * 0.05}], lr=0.05)
    everyone, most = [0, 1, 2, 3, 4], [0, 1, 3, 4]
    turns = [(M4, everyone), (M3, everyone), (M4, everyone), (M3, most), (M4, most), (M3, most)]
    wide = [M8, M8, M5, M8, M8, M5]
    batches = [batch["input_ids"] for batch in run.get_train_dataloader()]
    run.measured = MEASURED
    for wider, (width, rows), ids in zip(wide, turns, batches, strict=True):
        convert.set_precision(model, wider)
        outputs = model(input_ids=ids, labels=ids)
        outputs.loss.backward()
        teacher = outputs.logits.detach()
        convert.set_precision(model, width)
        logits = model(input_ids=ids[rows]).logits[:, :-1]
        cross_entropy = nn.functional.cross_entropy(logits.flatten(0, 1), ids[rows, 1:].flatten())
        expected = teacher[rows, :-1].softmax(-1)
        divergence = (expected * (expected.log() - logits.log_softmax(-1))).sum(-1).mean()
        (0.5 * cross_entropy + 0.5 * divergence).backward()
        assert share_by_hand(model, run.args.format) > 1000
        optimizer.step()
        optimizer.zero_grad()
    settle_model(model)
    run.train()
    state = run.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, state[name], atol=1e-5), name


def test_every_tier_learns_and_nothing_of_them_is_left(hurt: None, tmp_path: Path) -> None:
    options = {"optim": "adamw_torch", "learning_rate": 3e-3, "per_device_train_batch_size": 4, "max_steps": 40}
    run = trainer(tmp_path, method="tiers", **options)
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    assert sum(name.endswith(("_E5M3", "_E5M4")) for name in before) > 20
    seen: dict[str, torch.Tensor] = {}

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *args: object, **options: object) -> None:
            seen.update({name: parameter.detach().clone() for name, parameter in run.model.named_parameters()})

    run.add_callback(Keep())
    first = run.evaluate(Blocks(4))
    run.train()
    assert all(not torch.equal(before[name], seen[name]) for name in before)
    last = run.evaluate(Blocks(4))
    for width in Precision:
        assert last[f"eval_loss_{width}"] < 0.9 * first[f"eval_loss_{width}"]
    assert not any(name.endswith(("_E5M3", "_E5M4")) for name in run.model.state_dict())
    assert run.selector.counts == {M8: 27, M5: 13, M4: 20, M3: 20, M7: 0, M6: 0}


def test_a_tier_without_a_turn_takes_its_share() -> None:
    model = random_model("llama")
    convert.simulate(model, Format())
    add_tiers(model, [M3, M4])
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.grad = torch.ones_like(layer.weight)
    layer.weight_E5M4.grad = torch.ones_like(layer.weight)
    share_gradients(model, SHARES)
    assert torch.equal(layer.weight_E5M3.grad, torch.full_like(layer.weight, 0.15))
    assert torch.equal(layer.weight_E5M4.grad, torch.full_like(layer.weight, 1.5))
    assert model.model.layers[0].mlp.down_proj.weight_E5M3.grad is None  # its weight has none either


@pytest.mark.parametrize("architecture", ["llama-tied", "mixtral", "gpt2"])
def test_what_is_measured_before_tuning(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first update's batches and their labels, before anything has changed; and nothing of it is left."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    run = trainer(tmp_path, method="tiers", max_steps=2, architecture=architecture, **sizes)
    labels = Blocks().ids.clone()
    for row, label in enumerate(labels):
        label[: row + 1] = IGNORED
    run.train_dataset = [{"input_ids": ids, "labels": label} for ids, label in zip(Blocks().ids, labels, strict=True)]
    dropouts = [module for module in run.model.modules() if isinstance(module, nn.Dropout)]
    for module in dropouts:
        module.p = 0.0
    model = random_model(architecture).eval()
    convert.simulate(model, run.args.format, run.args.floor)
    batches = [batch for _, batch in zip(range(2), run.get_train_dataloader(), strict=False)]
    ids, wanted = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    gradients, losses = {}, {}
    for width in (M8, M5, M4, M3):
        convert.set_precision(model, width)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten())
        loss.backward()
        losses[width] = float(loss)
        gradients[width] = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    def watched(*arguments: Any, **options: Any) -> Measured:
        state = torch.get_rng_state()
        found = measure(*arguments, **options)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(parameter.grad is None for parameter in run.model.parameters())
        return found

    monkeypatch.setattr("otaro.tune.trainer.measure", watched)
    run.train()
    assert run.measured is not None
    assert run.measured.losses == pytest.approx(losses, abs=1e-5)
    assert losses[M5] != pytest.approx(losses[M8], abs=1e-5)
    assert run.measured.agreement.keys() == run.measured.shares.keys() == {M4, M3}
    for width, cosine in run.measured.agreement.items():
        tiers = {name.removesuffix(f"_{width}") for name in tier_names(architecture) if name.endswith(f"_{width}")}
        whole, own = (
            torch.cat([gradients[at][name].flatten() for name in sorted(tiers & gradients[M8].keys())])
            for at in (M8, width)
        )
        assert cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(whole, own, dim=0)), abs=1e-5)
        assert cosine < 0.999


def test_dropout_is_the_same_at_every_width_that_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path, method="tiers", max_steps=1, architecture="gpt2")
    states: list[torch.Tensor] = []
    hook = run.model.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))

    def watched(*arguments: Any, **options: Any) -> Measured:
        states.clear()
        found = measure(*arguments, **options)
        hook.remove()
        return found

    monkeypatch.setattr("otaro.tune.trainer.measure", watched)
    run.train()
    assert len(states) == 4
    assert all(torch.equal(state, states[0]) for state in states)


def test_gradients_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="tiers", max_steps=1)
    run.model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(OtaroError, match="before tuning the loss or its gradient at E5M4 is not finite"):
        run.train()


def test_a_checkpoint_without_what_was_measured_is_refused(tmp_path: Path) -> None:
    options = {"method": "tiers", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run = trainer(tmp_path, **options)
    run.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    file = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(file.read_text())
    again = trainer(tmp_path / "again", **options)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert run.measured is not None
    assert again.measured is not None
    assert again.measured.to_json() == run.measured.to_json()
    del state["stateful_callbacks"]["UpdateCallback"]["attributes"]["measured"]
    file.write_text(json.dumps(state))
    with pytest.raises(OtaroError, match="earlier version"):
        trainer(tmp_path / "again", **options).train(resume_from_checkpoint=tmp_path / "checkpoint-2")


def tier_names(architecture: str) -> list[str]:
    model = random_model(architecture)
    convert.simulate(model, Format())
    add_tiers(model, [M3, M4])
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("cosine, share", [(-0.5, 0.0), (0.0, 0.0), (0.5, 0.125), (0.8, 0.5), (0.99, 2.0), (1.0, 2.0)])
def test_the_share_grows_with_agreement(cosine: float, share: float) -> None:
    assert Recipe().shares({M3: cosine}) == {M3: pytest.approx(share)}


def test_a_batch_of_one_always_takes_part(hurt: None, tmp_path: Path) -> None:
    run = trainer(tmp_path, method="tiers", per_device_train_batch_size=1, max_steps=8)
    seen = Passes(run)
    run.train()
    turns = [M4, M3, M4, M3, M4, M3, M4, M3]
    wide = [M8, M8, M5, M8, M8, M5, M8, M8]
    assert [width for width, _ in seen.seen] == [width for pair in zip(wide, turns, strict=True) for width in pair]
    assert [rows for _, rows in seen.seen[::2]] == [rows for _, rows in seen.seen[1::2]]


class Passes:
    """Which sequences went through a model at which width while it was trained, agreement already being known."""

    def __init__(self, run: OtaroTrainer) -> None:
        self.seen: list[tuple[Precision | None, list[int]]] = []
        self._run = run
        run.model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model: nn.Module, arguments: object, inputs: dict[str, torch.Tensor]) -> None:
        if self._run.tiers and self._run.measured is None:
            return
        rows = [int((Blocks().ids == ids).all(-1).nonzero()) for ids in inputs["input_ids"]]
        self.seen.append((self._run.weights.width, rows))

    def at(self, width: Precision, passes: slice) -> list[int]:
        return sorted(row for seen, rows in self.seen[passes] if seen == width for row in rows)


def test_accumulated_batches_equal_one_large_batch(hurt: None, tmp_path: Path) -> None:
    options = {"method": "tiers", "max_steps": 8, "distillation": 0.5}
    large = trainer(tmp_path / "large", **options, per_device_train_batch_size=6)
    small = trainer(tmp_path / "small", **options, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    first, second = Passes(large), Passes(small)
    large.train()
    small.train()
    # A tier gets the same of an update's sequences, whether they come at once or in parts that are no thirds.
    for update in range(8):
        one, other = slice(2 * update, 2 * update + 2), slice(6 * update, 6 * update + 6)
        wide, turn = (width for width, _ in first.seen[one])
        assert wide in (M8, M5)
        assert turn in (M4, M3)
        for width, count in ((wide, 6), (turn, 6 if update < 4 else 4)):
            assert len(first.at(width, one)) == count
            assert first.at(width, one) == second.at(width, other)
    for name, value in large.model.state_dict().items():
        torch.testing.assert_close(small.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def check_update(run: OtaroTrainer, model: nn.Module) -> None:
    """A run of one update by SGD ends with the weights that a model with these gradients has after it."""
    share_by_hand(model, run.args.format)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.sub_(0.05 * (1.4 if name.endswith("_E5M3") else 1) * parameter.grad)
    settle_model(model)
    run.train()
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, run.model.state_dict()[name], atol=1e-5), name


def test_sequences_without_a_label_do_not_count(tmp_path: Path) -> None:
    """Tokens are counted over an update, not averaged over its batches."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    run = trainer(tmp_path, method="tiers", max_steps=1, distillation=1.0, **sizes)
    run.measured = MEASURED
    labels = Blocks().ids.clone()
    labels[:6, :-2] = -100
    run.train_dataset = [{"input_ids": ids, "labels": label} for ids, label in zip(Blocks().ids, labels, strict=True)]
    model = random_model("llama")
    convert.simulate(model, run.args.format, run.args.floor)
    add_tiers(model, [M3, M4])
    batches = [batch for _, batch in zip(range(2), run.get_train_dataloader(), strict=False)]
    ids, chosen = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
    assert len({int(count) for count in (chosen != -100).sum(-1)}) > 1
    convert.set_precision(model, M8)
    outputs = model(input_ids=ids, labels=chosen)
    outputs.loss.backward()
    convert.set_precision(model, M4)
    marked = chosen[:, 1:] != -100
    found = model(input_ids=ids).logits[:, :-1][marked].log_softmax(-1)
    expected = outputs.logits.detach()[:, :-1][marked].softmax(-1)
    (expected * (expected.log() - found)).sum(-1).mean().backward()
    check_update(run, model)


def test_prompts_are_learned_by_tiers_from_predictions_alone(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="tiers", max_steps=1, distillation=0.5, completion_only=False)
    run.measured = MEASURED
    labels = Blocks().ids.clone()
    labels[:, :9] = IGNORED
    run.train_dataset = [{"input_ids": ids, "labels": label} for ids, label in zip(Blocks().ids, labels, strict=True)]
    model = random_model("llama")
    convert.simulate(model, run.args.format, run.args.floor)
    add_tiers(model, [M3, M4])
    ids = next(iter(run.get_train_dataloader()))["input_ids"]
    convert.set_precision(model, M8)
    outputs = model(input_ids=ids, labels=ids)
    outputs.loss.backward()
    convert.set_precision(model, M4)
    found = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    expected = outputs.logits.detach()[:, :-1].softmax(-1)
    divergence = (expected * (expected.log() - found)).sum(-1)
    entropy = -found.gather(2, ids[:, 1:, None])[..., 0]
    (0.5 * (divergence.sum() + entropy[:, 8:].sum()) / entropy.numel()).backward()
    check_update(run, model)
    # What is logged is the loss of all there is to predict, as that of the wide width.
    assert run.selector.losses[M4] == pytest.approx(float(entropy.detach().mean()), rel=1e-4)


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


def test_without_predictions_tiers_learn_prompts_from_the_data(tmp_path: Path) -> None:
    results = []
    for name, prompt in (("asked", True), ("whole", False)):
        run = trainer(tmp_path / name, method="tiers", max_steps=2, distillation=0.0, completion_only=not prompt)
        whole = [{"input_ids": ids, "labels": ids} for ids in Blocks().ids]
        masked = [{**each, "labels": each["labels"].clone().index_fill(0, torch.arange(8), IGNORED)} for each in whole]
        run.train_dataset = masked if prompt else whole
        run.train()
        results.append(run.model.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


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
    "widths, passes, tiers",
    [
        ("E5M6,E5M3", [M6, M3, M6, M3, M6, M3, M6, M3], ["E5M3"]),
        ("E5M4,E5M3", [M4, M3, M4, M3, M4, M3, M4, M3], ["E5M3"]),
        ("E5M8,E5M5,E5M4", [M8, M4, M8, M4, M5, M4, M8, M4], ["E5M4"]),
        ("E5M7,E5M5", [M7, M7, M7, M7], []),
        ("E5M3", [M3, M3, M3, M3], []),
    ],
)
def test_only_widths_that_are_wanted(
    widths: str, passes: list[Precision], tiers: list[str], hurt: None, tmp_path: Path
) -> None:
    run = trainer(tmp_path, method="tiers", widths=widths, max_steps=4)
    found = {name.rpartition("weight_")[2] for name in run.model.state_dict() if "proj.weight_" in name}
    assert found == set(tiers)
    seen = Passes(run)
    run.train()
    assert [width for width, _ in seen.seen] == passes
    if len(set(passes)) == 1:
        fixed = trainer(tmp_path / "fixed", method=f"fixed:{passes[0]}", max_steps=4)
        fixed.train()
        for name, value in fixed.model.state_dict().items():
            assert torch.equal(value, run.model.state_dict()[name])


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("distillation", [0.0, 0.75, 1.0])
def test_the_taught_loss_has_the_gradient_that_autograd_finds(distillation: float, prompt: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits, teacher = torch.randn(2, 3, 200, 50, generator=generator).mul(2)
    labels = torch.randint(0, 50, (3, 200), generator=generator)
    labels[0, :150] = IGNORED
    asked = torch.rand(3, 200, generator=generator) < (0.4 if prompt else 0.0)
    logits.requires_grad_()
    loss, cross_entropy = distilled_loss(logits, teacher, labels, distillation, asked if prompt else None)
    (found,) = torch.autograd.grad(3 * loss, logits)
    chosen = labels[:, 1:] != IGNORED
    values = logits[:, :-1][chosen].log_softmax(-1)
    expected = nn.functional.nll_loss(values, labels[:, 1:][chosen], reduction="sum")
    torch.testing.assert_close(cross_entropy, expected.detach())
    divergence = nn.functional.kl_div(values, teacher[:, :-1][chosen].log_softmax(-1), reduction="sum", log_target=True)
    own = ~asked[:, 1:][chosen]
    learned = nn.functional.nll_loss(values[own], labels[:, 1:][chosen][own], reduction="sum")
    wanted = (1 - distillation) * learned + distillation * divergence
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found, torch.autograd.grad(3 * wanted, logits)[0], rtol=1e-4, atol=1e-6)
    assert not cross_entropy.requires_grad


def test_an_incomplete_last_batch(tmp_path: Path) -> None:
    """Seven of twelve sequences, and five; in the second half of the run every third is left out."""
    run = trainer(tmp_path, method="tiers", per_device_train_batch_size=7, max_steps=4)
    seen = Passes(run)
    run.train()
    assert [len(rows) for _, rows in seen.seen] == [7, 7, 5, 5, 7, 5, 5, 4]


def test_the_narrowest_tier_has_its_own_rate_and_the_settings_of_its_group(tmp_path: Path) -> None:
    options = {"optim": "adamw_torch", "weight_decay": 0.1, "lr_scheduler_type": "cosine", "learning_rate": 1e-3}
    run = trainer(tmp_path, method="tiers", max_steps=4, **options)
    run.create_optimizer_and_scheduler(4)
    assert run.optimizer is not None
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in run.optimizer.param_groups]
    assert sorted(name for group in groups for name in group) == sorted(names.values())
    narrow = [all(name.endswith("_E5M3") for name in group) for group in groups]
    assert narrow == [any(name.endswith("_E5M3") for name in group) for group in groups]
    # What E5M3 computes with rests: its tier, of embeddings and head, which stop at E5M4, that one, and the norms.
    floored = ["lm_head.weight_E5M4", "model.embed_tokens.weight_E5M4"]
    resting = [group.get(UNAVERAGED, False) for group in run.optimizer.param_groups]
    assert resting == [False, True, True, True]
    assert all("norm" in name for name in groups[1])
    assert [sorted(group) for group, fast in zip(groups, narrow, strict=True) if not fast][2] == floored
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.1, 0.0, 0.1, 0.1]
    for _ in range(3):
        rates = [group["lr"] for group in run.optimizer.param_groups]
        assert rates == pytest.approx([1.4 * rates[0] if fast else rates[0] for fast in narrow])
        assert rates[0] > 0
        run.optimizer.step()
        run.lr_scheduler.step()


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2", "gpt-oss"])
@pytest.mark.parametrize("widths", ["all", "E5M8,E5M3"])
def test_what_the_narrowest_width_computes_with_rests(architecture: str, widths: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, architecture, method="tiers", widths=widths, optim="adamw_torch", learning_rate=1e-3)
    optimizer = run.create_optimizer()
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    rates = {
        names[id(parameter)]: (group["lr"], group.get(UNAVERAGED, False))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert rates.keys() == set(names.values())
    with_tiers = {name.rpartition("_")[0] for name in rates if name.endswith(("_E5M3", "_E5M4"))}
    assert len(with_tiers) > 5
    assert any("norm" in name or "ln_" in name for name in rates.keys() - with_tiers)
    for name, (rate, rests) in rates.items():
        is_wider = name.endswith("_E5M4") and f"{name[:-1]}3" in rates
        assert rests is not (name in with_tiers or is_wider), name
        assert rate == pytest.approx(1.4e-3 if name.endswith("_E5M3") and widths == "all" else 1e-3), name


def test_a_group_without_anything_to_average_is_split_all_the_same() -> None:
    model = random_model("llama")
    convert.simulate(model, Format())
    add_tiers(model, [M3, M4])
    layer = model.model.layers[0].mlp.up_proj
    norm = model.model.norm.weight
    optimizer = torch.optim.SGD([{"params": [layer.weight_E5M3, norm]}, {"params": [layer.weight]}], lr=0.5)
    set_apart_narrowest(optimizer, model, [M3, M4], 1.4)
    groups = [
        (id(parameter), group["lr"], group.get(UNAVERAGED, False))
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    assert groups == [(id(layer.weight_E5M3), 0.7, True), (id(layer.weight), 0.5, False), (id(norm), 0.5, True)]
    assert len(optimizer.param_groups) == 3


def test_an_optimizer_that_does_not_know_the_tiers_is_refused(tmp_path: Path) -> None:
    model = random_model("llama")
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    run = OtaroTrainer(model, arguments(tmp_path, method="tiers"), train_dataset=Blocks(), optimizers=optimizers)
    with pytest.raises(OtaroError, match="optimizers"):
        run.train()


def test_too_many_tiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OtaroError, match="at most 2"):
        arguments(tmp_path, method="tiers", tiers="E5M5,E5M4,E5M3")


def test_adapters_are_refused(tmp_path: Path) -> None:
    model = random_model("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    with pytest.raises(OtaroError, match="adapters"):
        OtaroTrainer(model, arguments(tmp_path, method="tiers"), train_dataset=Blocks())
