"""What a step of once tuning costs, as a ratio to a step of ordinary tuning in the same run.

    python bench/tune_step.py --shape smollm2 --json bench/tune_step.json
    python bench/tune_step.py --shape smollm2 --cpu --batch 2 --length 256     # float32, not compiled
    python bench/tune_step.py --shape smollm2 --method tiers --cpu --batch 8 --length 256

On a GPU both sides run the same compiled model in bf16 with a fused AdamW. `otaro` also quantises every weight at the
start of each step, going through all six widths, and holds the gradients of E5M4 and E5M3 back (LAA). `tiers` computes
the batch at E5M8 and then at E5M4 or E5M3 in turns, two passes where `fp16` has one, and trains three sets of weights.
Steps are interleaved in rounds, medians taken. Checks the kernel against the torch codec first, bfloat16 included.
Weights are random, in the shape of SmolLM2-135M or Llama-3.2-1B: what a step costs does not depend on them. Layers are
compiled one by one, which all share one compiled graph, and so is the loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))
import common

from otaro import convert, sefp
from otaro.precision import Precision
from otaro.sefp import Format
from otaro.tune.delay import DelayedOptimizer
from otaro.refresh import Refresher
from otaro.tune.tiers import add_tiers, share_gradients

SHARES = {Precision.E5M4: 0.5, Precision.E5M3: 0.15}  # of SmolLM2's order; they do not change the speed


def check_kernel() -> int:
    """Bit equality with the torch codec on this GPU; returns how many tensors were compared."""
    from otaro.ops import gpu

    compared = 0
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for scheme in sefp.SCHEMES:
            for format in (Format(scheme, size) for size in sefp.GROUP_SIZES):
                weights = [
                    (torch.randn(shape, generator=generator) * 0.02).to(dtype).cuda()
                    for shape in ((576, 576), (33, 100), (1, 7), (4, 30, 200))
                ]
                weights.append(torch.zeros(3, 64, dtype=dtype, device="cuda"))
                results = [torch.full_like(weight, float("nan")) for weight in weights]
                batch = gpu.prepare(weights, results, format.group_size)
                for precision in Precision:
                    gpu.run(batch, precision, format)
                    for weight, result in zip(weights, results, strict=True):
                        expected = sefp.decode(sefp.encode(weight, precision, format), dtype)
                        if not torch.equal(result, expected):
                            raise SystemExit(f"the kernel differs from the codec: {dtype} {format} {precision}")
                        compared += 1
    return compared


SHAPES = {
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "llama-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def random_model(shape: str, device: str) -> Any:
    with torch.device(device):
        config = LlamaConfig(**SHAPES[shape], tie_word_embeddings=True)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class Step:
    """One side of the comparison: its own model and optimizer, for otaro widths, for tiers weights."""

    def __init__(self, arguments: argparse.Namespace, method: str) -> None:
        torch.manual_seed(0)
        self.device = "cpu" if arguments.cpu else "cuda"
        self.model = random_model(arguments.shape, self.device).train()
        self.widths = itertools.cycle(Precision) if method == "otaro" else None
        self.tiers = [Precision.E5M3, Precision.E5M4] if method == "tiers" else []
        self.turns = itertools.cycle(self.tiers)
        convert.simulate(self.model, Format())
        add_tiers(self.model, self.tiers)
        self.refresh = Refresher(self.model, torch.bfloat16)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        if method == "otaro":
            self.optimizer = DelayedOptimizer(
                self.optimizer,
                [Precision.E5M4, Precision.E5M3],
                dtype=None if arguments.cpu else torch.bfloat16,
            )
        self.loss = self.loss_of
        if not arguments.cpu:
            for layer in self.model.model.layers:
                layer.compile()
            self.loss = torch.compile(self.loss_of)

    def loss_of(self, hidden: torch.Tensor, ids: torch.Tensor, teacher: torch.Tensor | None = None) -> Any:
        """The cross entropy of the predictions, or their divergence from a teacher's; and the predictions."""
        logits = self.model.lm_head(hidden[:, :-1])
        if teacher is None:
            return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()), logits.detach()
        found, expected = (each.float().flatten(0, 1).log_softmax(-1) for each in (logits, teacher))
        return nn.functional.kl_div(found, expected, reduction="batchmean", log_target=True), logits.detach()

    def set_width(self, width: Precision, *, again: bool = False) -> None:
        convert.set_precision(self.model, width)
        self.refresh(again=again)

    def backward(self, ids: torch.Tensor, teacher: torch.Tensor | None = None) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            loss, logits = self.loss(hidden, ids, teacher)
        loss.backward()
        predictions: torch.Tensor = logits
        return predictions

    def __call__(self, ids: torch.Tensor) -> None:
        if self.widths is not None:
            width = next(self.widths)
            self.set_width(width)
            self.optimizer.width = width
        elif self.tiers:
            self.set_width(Precision.E5M8)
        teacher = self.backward(ids)
        if self.tiers:
            self.set_width(next(self.turns), again=True)
            self.backward(ids, teacher)
            share_gradients(self.model, SHARES, self.refresh)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def ratios(times: dict[str, list[float]], method: str, tokens: int) -> dict[str, float]:
    result = {}
    for name, seconds in times.items():
        result[f"{name}_step_seconds"] = statistics.median(seconds)
        result[f"{name}_tokens_per_second"] = tokens / statistics.median(seconds)
    result["step_ratio"] = statistics.median(o / f for o, f in zip(times[method], times["fp16"], strict=True))
    return result


def measure_cpu(arguments: argparse.Namespace) -> dict[str, Any]:
    ids = torch.randint(0, 40000, (arguments.batch, arguments.length))
    sides = {name: Step(arguments, name) for name in ("fp16", arguments.method)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.rounds + 1):
        for name, side in sides.items():
            started = time.perf_counter()
            side(ids)
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - started)
    return {
        "shape": arguments.shape,
        "batch": arguments.batch,
        "sequence": arguments.length,
        "threads": torch.get_num_threads(),
        "machine": common.machine(),
        **ratios(times, arguments.method, arguments.batch * arguments.length),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    result: dict[str, Any] = {
        "shape": arguments.shape,
        "batch": arguments.batch,
        "sequence": arguments.length,
        "machine": common.machine(),
        "kernel_compared": check_kernel(),
    }
    sides = {}
    ids = torch.randint(0, 40000, (arguments.batch, arguments.length), device="cuda")
    for name in ("fp16", arguments.method):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        side = Step(arguments, name)
        for _ in range(8):
            side(ids)
        torch.cuda.synchronize()
        result[f"{name}_warm_up_seconds"] = time.perf_counter() - started
        result[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated() - before
        sides[name] = side
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            for _ in range(6):
                side(ids)
            events[1].record()
            torch.cuda.synchronize()
            times[name].append(events[0].elapsed_time(events[1]) / 6 / 1000)
    result |= ratios(times, arguments.method, arguments.batch * arguments.length)
    result["memory_ratio"] = result[f"{arguments.method}_peak_bytes"] / result["fp16_peak_bytes"]
    refresh = sides[arguments.method].refresh
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        refresh()
    torch.cuda.synchronize()
    result["refresh_seconds"] = (time.perf_counter() - started) / 20
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--method", choices=["otaro", "tiers"], default="otaro", help="what to compare with fp16")
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="add the result to this file")
    arguments = parser.parse_args()
    if not (arguments.cpu or torch.cuda.is_available()):
        raise SystemExit("there is no GPU: add --cpu")
    result = measure_cpu(arguments) if arguments.cpu else measure(arguments)
    print(json.dumps(result, indent=1))
    if arguments.json:
        path = Path(arguments.json)
        results = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*results, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
