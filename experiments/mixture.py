"""Does the path search work on a mixture of experts?

    python experiments/mixture.py --train wiki.train.tokens --valid wiki.valid.tokens --json FILE
    python experiments/mixture.py --train wiki.train.tokens --valid wiki.valid.tokens --quick     # on a CPU
    python experiments/mixture.py --show FILE … [--plot FILE.png]     # of several seeds together

There is no small pretrained mixture at hand, so one is made: every MLP of SmolLM2 becomes four experts, copies of it
with a little noise, and a router chooses two of them for each token (Mixtral's architecture; untuned it computes what
SmolLM2 does, but for the noise). Routers stay in full precision. Measured for each method: how often each width was
chosen, perplexity at every width, how evenly the experts are used, and how many of the router's choices at a width are
those it makes at full precision.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import common
import tables
import torch
from lab import Idea, Lab, add_arguments
from recipe_search import UNIFORM, chosen, drawn, fixed, searched
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

from otaro.precision import Precision
from otaro.sefp import Format

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


class Choices:
    """What the routers choose, while it watches."""

    def __init__(self, model: Any) -> None:
        self.layers: list[list[Tensor]] = [[] for _ in model.model.layers]
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.register_forward_hook(lambda *seen, number=number: self._see(number, seen[-1]))
        self.watching = False

    def _see(self, number: int, output: Any) -> None:
        if self.watching:
            self.layers[number].append(output[-1].cpu())

    def take(self) -> Tensor:
        """[layers, tokens, 2], each token's experts in order."""
        taken = torch.stack([torch.cat(seen) for seen in self.layers]).sort(-1).values
        self.layers = [[] for _ in self.layers]
        return taken


def measure(lab: Lab, choices: Choices, tokens: Tensor, window: int) -> dict[str, Any]:
    result: dict[str, Any] = {"perplexity": {}, "same_experts": {}}
    choices.watching = True
    expected: Tensor | None = None
    for width in (None, *Precision):
        result["perplexity"] |= lab.perplexity(tokens, [width], window, batch=4)
        found = choices.take()
        if expected is None:
            expected = found
            shares = nn.functional.one_hot(found, EXPERTS).float().mean((1, 2))
            result["least_used_expert"] = float(shares.min())
            result["most_used_expert"] = float(shares.max())
        else:
            result["same_experts"][str(width)] = float((found == expected).all(-1).float().mean())
    choices.watching = False
    return result


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = torch.from_numpy(common.tokens_of(Path(arguments.train), arguments.model)).long().to(device)
    valid = torch.from_numpy(common.tokens_of(Path(arguments.valid), arguments.model)).long().to(device)
    window = arguments.window
    if arguments.quick:
        arguments.steps, arguments.batch, arguments.length, arguments.windows, window = 6, 2, 64, 1, 128
    blocks = train[: len(train) // arguments.length * arguments.length].view(-1, arguments.length)
    valid = valid[: arguments.windows * window]
    settings = {
        name: getattr(arguments, name)
        for name in ("steps", "batch", "length", "window", "windows", "seed", "learning_rate")
    }
    result: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "settings": settings,
        "machine": common.machine(),
        "runs": {},
    }
    dense: Any = common.load_model(arguments.model, torch.device("cpu"))
    if arguments.quick:
        # Three sets of weights of all layers, with an optimizer's state, would take 20 GB.
        dense.model.layers = dense.model.layers[:6]
        dense.config.num_hidden_layers = len(dense.model.layers)
    lab = Lab(upcycled(dense), device, compiled=False)
    choices = Choices(lab.model)
    rate = arguments.learning_rate
    runs: dict[str, Idea | None] = {
        "before tuning": None,
        "fp16": Idea(fixed(None), rate, format=Format()),
        "fixed:E5M4": Idea(fixed(Precision.E5M4), rate, format=Format()),
        "fixed:E5M3": Idea(fixed(Precision.E5M3), rate, format=Format()),
        "uniform": Idea(drawn(UNIFORM, arguments.seed), rate, format=Format()),
        "bps": Idea(searched(5.0), rate, format=Format(), needs_losses=True),
        "tiers": chosen(rate),
    }
    for name, idea in runs.items():
        took: dict[str, Any] = {}
        if idea is not None:
            took = {
                "seed": arguments.seed,
                **lab.tune(idea, blocks, arguments.steps, arguments.batch, arguments.seed),
            }
        row = {**took, **measure(lab, choices, valid, window)}
        result["runs"][name] = [row]
        print(name, {key: round(value, 3) for key, value in row["perplexity"].items()}, flush=True)
        if arguments.json:
            common.write_json(Path(arguments.json), result)
    return result


def show(result: dict[str, Any]) -> None:
    passes, same, used = {}, {}, {}
    for name, rows in result["runs"].items():
        counts = sorted(rows[0].get("passes", {}).items(), reverse=True)
        passes[name] = ", ".join(f"{width} {count}" for width, count in counts)
        same[name] = f"{statistics.mean(row['same_experts']['E5M3'] for row in rows):.0%}"
        shares = [statistics.mean(row[f"{which}_used_expert"] for row in rows) for which in ("least", "most")]
        used[name] = ", ".join(f"{share:.0%}" for share in shares)
    tables.show(result, passes_of_the_first_seed=passes, same_experts_at_E5M3=same, used_least_and_most=used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, steps=150)
    parser.add_argument("--valid", help="WikiText-2's wiki.valid.tokens, or its token ids as .npy")
    parser.add_argument("--windows", type=int, default=16, help="how many windows to measure on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="a few small updates each of the first six layers, for a look"
    )
    parser.add_argument("--show", nargs="+", help="print the table of earlier runs, a file to a seed, and stop")
    arguments = parser.parse_args()
    if arguments.show:
        result = tables.together(arguments.show)
    elif arguments.train and arguments.valid:
        result = run(arguments)
    else:
        parser.error("--train and --valid, or --show, are needed")
    show(result)
    if arguments.plot:
        tables.draw(result, Path(arguments.plot), arguments.title or result["model"], ("before tuning",))


if __name__ == "__main__":
    main()
