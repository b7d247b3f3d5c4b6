"""BPS and LAA by themselves: scores computed by hand, what is held and when it is released, states in and out."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from otaro.errors import OtaroError, PrecisionError
from otaro.precision import Precision
from otaro.tune.delay import DelayedOptimizer
from otaro.tune.selector import BitWidthPathSearch, UniformSelector, WidthSelector, make_selector

M8, M7, M6, M5, M4, M3 = Precision


def walk(selector: WidthSelector, losses: dict[Precision, float], batches: int) -> list[Precision | None]:
    chosen = []
    for _ in range(batches):
        width = selector.select()
        assert selector.select() == width
        selector.count(width)
        selector.record(width, 0.0 if width is None else losses[width])
        chosen.append(width)
    return chosen


def test_first_visits_go_from_the_widest_down() -> None:
    assert walk(BitWidthPathSearch([M3, M8, M5]), {M3: 9.0, M5: 1.0, M8: 5.0}, 3) == [M8, M5, M3]


def test_scores_are_those_computed_by_hand() -> None:
    selector = BitWidthPathSearch([M8, M4, M3], exploration=5.0)
    walk(selector, {M8: 2.0, M4: 2.5, M3: 3.0}, 3)
    # Batch 4, each width seen once: 5·sqrt(ln 4) = 5.887050112577373.
    assert selector.scores() == pytest.approx({M8: 3.887050112577373, M4: 3.387050112577373, M3: 2.887050112577373})
    assert selector.select() == M8
    selector.count(M8)
    selector.record(M8, 1.9)
    # Batch 5: 5·sqrt(ln 5 / 2) − 1.9 for E5M8, 5·sqrt(ln 5) − loss for the others.
    assert selector.scores() == pytest.approx({M8: 2.585306, M4: 3.843181, M3: 3.343181}, abs=1e-6)
    assert selector.select() == M4


def test_ties_go_to_the_wider() -> None:
    selector = BitWidthPathSearch(Precision)
    walk(selector, dict.fromkeys(Precision, 1.0), 6)
    assert selector.select() == M8


def test_the_path_leans_toward_wider_widths_as_time_passes() -> None:
    """The paper's Eq. 6-9: at first all widths are explored alike, later those with a smaller loss win."""
    losses = {M8: 2.0, M7: 2.05, M6: 2.1, M5: 2.3, M4: 3.0, M3: 4.0}
    chosen = walk(BitWidthPathSearch(Precision), losses, 4000)
    early, late = Counter(chosen[:60]), Counter(chosen[-2000:])
    assert late[M8] / 2000 > early[M8] / 60
    assert late[M3] / 2000 < early[M3] / 60
    assert [late[width] for width in Precision] == sorted((late[width] for width in Precision), reverse=True)
    assert late[M3] > 0


@pytest.mark.parametrize("method", ["bps", "uniform", "fixed:E5M4", "fp16"])
def test_a_restored_selector_goes_on_as_the_first_would(method: str) -> None:
    losses = {width: 2 + 0.1 * (8 - width.mantissa) for width in Precision}
    whole, begun = (make_selector(method, Precision, seed=4) for _ in range(2))
    expected = walk(whole, losses, 50)
    assert walk(begun, losses, 23) == expected[:23]
    begun.select()
    state = json.loads(json.dumps(begun.state_dict()))
    restored = make_selector(method, Precision, seed=99)
    restored.load_state_dict(state)
    assert walk(restored, losses, 27) == expected[23:]


def test_uniform_draws_every_width_about_as_often() -> None:
    counts = Counter(walk(UniformSelector(Precision, seed=1), dict.fromkeys(Precision, 1.0), 1200))
    assert all(150 < counts[width] < 250 for width in Precision)


def test_a_state_over_other_widths_is_refused() -> None:
    selector = make_selector("bps", [M8, M3])
    with pytest.raises(OtaroError, match="widths are E5M8, E5M3, not E5M8, E5M4"):
        make_selector("bps", [M8, M4]).load_state_dict(selector.state_dict())


@pytest.mark.parametrize("method", ["", "otaro:E5M3", "fixed", "random", "fp16:E5M3"])
def test_an_unknown_method_is_refused(method: str) -> None:
    with pytest.raises(OtaroError, match="unknown method"):
        make_selector(method, Precision)


def test_a_fixed_width_must_exist() -> None:
    with pytest.raises(PrecisionError, match="E5M9"):
        make_selector("fixed:E5M9", Precision)
    with pytest.raises(OtaroError, match="no widths"):
        make_selector("bps", [])


def test_tiers_are_tuned_in_full_precision() -> None:
    selector = make_selector("tiers", [M3, M8])
    assert selector.select() is None
    assert selector.widths == [M8, M3]


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor([1.0, -2.0])), torch.nn.Parameter(torch.tensor([3.0]))]


def delayed(tensors: list[torch.nn.Parameter], kind: str, **options: object) -> DelayedOptimizer:
    inner = torch.optim.SGD(tensors, lr=0.5) if kind == "sgd" else torch.optim.AdamW(tensors, lr=0.5)
    return DelayedOptimizer(inner, [M4, M3], **options)  # type: ignore[arg-type]


def step(optimizer: DelayedOptimizer, tensors: list[torch.nn.Parameter], width: Precision | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator)
    optimizer.width = width
    optimizer.step()
    optimizer.zero_grad()


def test_low_widths_wait_and_others_go_on_in_between() -> None:
    tensor = torch.nn.Parameter(torch.tensor([10.0]))
    optimizer = delayed([tensor], "sgd", delay=3)
    seen = []
    for width, gradient in [(M3, 1.0), (M8, 2.0), (M4, 4.0), (M5, 8.0), (M3, 16.0), (M3, 32.0)]:
        tensor.grad = torch.tensor([gradient])
        optimizer.width = width
        optimizer.step()
        optimizer.zero_grad()
        seen.append((float(tensor.detach()), optimizer.held))
    # 10 − 0.5·2 = 9, then − 0.5·8 = 5, then the three held together − 0.5·(1 + 4 + 16) = −5.5.
    assert seen == [(10.0, 1), (9.0, 1), (9.0, 2), (5.0, 2), (-5.5, 0), (-5.5, 1)]


def test_the_mean_divides_by_the_delay() -> None:
    tensor = torch.nn.Parameter(torch.tensor([10.0]))
    optimizer = delayed([tensor], "sgd", delay=4, apply="mean")
    for _ in range(4):
        tensor.grad = torch.tensor([2.0])
        optimizer.width = M3
        optimizer.step()
    assert float(tensor.detach()) == 9.0


def test_gradients_may_be_held_in_fewer_bits() -> None:
    tensor = torch.nn.Parameter(torch.tensor([10.0, 10.0]))
    optimizer = delayed([tensor], "sgd", delay=2, apply="mean", dtype=torch.bfloat16)
    for gradient in (1.0 + 2**-9, 3.0):
        tensor.grad = torch.tensor([gradient, gradient])
        optimizer.width = M3
        optimizer.step()
        if optimizer.held:
            assert optimizer.state_dict()["state"][0]["held_gradient"].dtype == torch.bfloat16
    # 1 + 2^-9 is 1 in bfloat16; the update itself is in float32: 10 − 0.5·(1 + 3)/2.
    assert tensor.grad is not None
    assert tensor.grad.dtype == torch.float32
    assert tensor.tolist() == [9.0, 9.0]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_held_batch_changes_nothing(kind: str) -> None:
    tensors = parameters()
    optimizer = delayed(tensors, kind, delay=5)
    step(optimizer, tensors, M8, 0)
    before = [tensor.detach().clone() for tensor in tensors]
    moments = {key: value.clone() for key, value in optimizer.state[tensors[0]].items() if torch.is_tensor(value)}
    step(optimizer, tensors, M3, 1)
    assert all(torch.equal(old, new) for old, new in zip(before, tensors, strict=True))
    assert all(torch.equal(value, optimizer.state[tensors[0]][key]) for key, value in moments.items())


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 9])
def test_a_restored_optimizer_goes_on_as_the_first_would(kind: str, cut: int, tmp_path: object) -> None:
    widths = [M3, M3, M8, M4, M3, M6, M4, M3, M3, M8, M3, M4]
    whole, begun, resumed = parameters(), parameters(), parameters()
    first = delayed(whole, kind, delay=4)
    for seed, width in enumerate(widths):
        step(first, whole, width, seed)
    second = delayed(begun, kind, delay=4)
    for seed, width in enumerate(widths[:cut]):
        step(second, begun, width, seed)
    file = f"{tmp_path}/optimizer.pt"
    torch.save(second.state_dict(), file)
    with torch.no_grad():
        for old, new in zip(begun, resumed, strict=True):
            new.copy_(old)
    third = delayed(resumed, kind, delay=4)
    third.load_state_dict(torch.load(file, weights_only=True))
    for seed, width in enumerate(widths[cut:], cut):
        step(third, resumed, width, seed)
    assert first.held == third.held
    assert all(torch.equal(old, new) for old, new in zip(whole, resumed, strict=True))


def test_a_step_without_a_width_updates() -> None:
    tensors = parameters()
    optimizer = delayed(tensors, "sgd")
    step(optimizer, tensors, None, 0)
    assert optimizer.held == 0
    assert not torch.equal(tensors[0], parameters()[0])


def test_scaled_gradients_are_held_unscaled() -> None:
    """Mixed precision in float16 scales the loss; a batch that overflows is neither applied nor held."""
    results = []
    for scaled in (False, True):
        tensors = parameters()
        optimizer = delayed(tensors, "adamw", delay=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for width, factor in [(M3, 1.0), (M8, 2.0), (M4, 3.0), (M3, 4.0)]:
            loss = sum((tensor**2).sum() for tensor in tensors) * factor
            scaler.scale(loss).backward()
            optimizer.width = width
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.held == 1
        results.append([tensor.detach().clone() for tensor in tensors])
        if scaled:
            for tensor in tensors:
                tensor.grad = torch.full_like(tensor, torch.inf)
            scaler.scale(torch.zeros(()))
            optimizer.width = M3
            scaler.step(optimizer)
            assert optimizer.held == 1
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
