"""Does the path search work on a mixture of experts?

    python -m experiments.mixture.run --model DIR/model --train DIR/train.npy --test DIR/test.npy   # of stories

There is no small pretrained mixture at hand, so one is made: every MLP of a Llama becomes four experts, copies of it
with a little noise, and a router chooses two of them for each token (Mixtral's architecture; untuned it computes what
it does, but for the noise). Routers stay in full precision. Measured for each method: how often each width was
chosen, perplexity at every width, how evenly the experts are used, and how many of the router's choices at a width are
those it makes at full precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

from experiments import common, tuning
from otaro.precision import Precision
from otaro.tune.trainer import OtaroTrainer

RUNS = ("untuned", "fp16", "fixed-E5M4", "fixed-E5M3", "uniform", "bps", "tiers")
EXPERTS = 4
COPIED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHARED = ("vocab_size", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "tie_word_embeddings")


def upcycled(model: Any, noise: float = 0.02, seed: int = 0) -> Any:
    """A mixture whose experts are noisy copies of a Llama-like model's MLPs."""
    generator = torch.Generator().manual_seed(seed)
    options = {name: getattr(model.config, name) for name in (*COPIED, *SHARED)}
    config = MixtralConfig(**options, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=None)
    mixture = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")

    def copies(weight: Tensor) -> Tensor:
        apart = torch.randn((EXPERTS, *weight.shape), generator=generator)
        return weight + noise * weight.std() * apart

    with torch.no_grad():
        found = mixture.load_state_dict(model.state_dict(), strict=False)
        for layer, dense in zip(mixture.model.layers, model.model.layers, strict=True):
            layer.mlp.experts.gate_up_proj.copy_(
                copies(torch.cat([dense.mlp.gate_proj.weight, dense.mlp.up_proj.weight]))
            )
            layer.mlp.experts.down_proj.copy_(copies(dense.mlp.down_proj.weight))
            layer.mlp.gate.weight.copy_(0.05 * torch.randn(layer.mlp.gate.weight.shape, generator=generator))
    assert all(".mlp." in name for name in (*found.missing_keys, *found.unexpected_keys)), found
    return mixture


def load(model: str) -> Any:
    return upcycled(common.load_model(model, torch.device("cpu"))).to(common.device())


class Choices:
    """What the routers choose, while it watches."""

    def __init__(self, model: Any) -> None:
        self.layers: list[list[Tensor]] = [[] for _ in model.model.layers]
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.register_forward_hook(lambda *seen, number=number: self._see(number, seen[-1]))

    def _see(self, number: int, output: Any) -> None:
        self.layers[number].append(output[-1].cpu())

    def take(self) -> Tensor:
        """[layers, tokens, 2], each token's experts in order."""
        taken = torch.stack([torch.cat(seen) for seen in self.layers]).sort(-1).values
        self.layers = [[] for _ in self.layers]
        return taken


@torch.no_grad()
def measure(trainer: OtaroTrainer, tokens: Tensor, window: int) -> dict[str, Any]:
    """How evenly experts are used, and how many of the choices at a width are those made at full precision."""
    model: Any = trainer.model
    choices = Choices(model)
    windows = tokens[: len(tokens) // window * window].view(-1, window).to(model.device)
    result: dict[str, Any] = {"same_experts": {}}
    expected: Tensor | None = None
    for width in (None, *Precision):
        with trainer.at_width(width, exact=True):
            for batch in windows.split(4):
                model(input_ids=batch, use_cache=False)
        chosen = choices.take()
        if expected is None:
            expected = chosen
            shares = nn.functional.one_hot(chosen, EXPERTS).float().mean((1, 2))
            result |= {"least_used_expert": float(shares.min()), "most_used_expert": float(shares.max())}
        else:
            result["same_experts"][str(width)] = float((chosen == expected).all(-1).float().mean())
    return result


if __name__ == "__main__":
    tuning.main(__file__, __doc__, RUNS, load, measure, length=128, window=512, learning_rate=3e-3)
