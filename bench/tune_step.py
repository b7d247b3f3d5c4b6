"""What an update of once tuning costs, as a ratio to one of ordinary tuning: the updates of `otaro tune` itself.

    python bench/tune_step.py --shape smollm2 --method tiers,bps --json bench/tune_step.json
    python bench/tune_step.py --shape smollm2 --cpu --batch 2 --length 256     # float32, not compiled
    python bench/tune_step.py --shape llama-1b --method tiers,bps --batch 4

Each round runs the trainer with the recipe `default` once for `fp16` and once for each method; medians over the rounds,
the first of which compiles and is left out where there are more. `tiers` fits after it has tuned: what that costs is
spread over the updates (`fitting_seconds` is one that fits, `update_seconds` one that tunes and its share of those). On
a GPU passes are in bf16 and the kernel is checked against the torch codec first. Weights are random, in the shape of
SmolLM2-135M or Llama-3.2-1B: what an update costs does not depend on them. `--no-compile` measures without compiling.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback

from otaro import diagnostics, sefp
from otaro.precision import Precision
from otaro.sefp import Format
from otaro.tune.config import TuneArguments
from otaro.tune.data import Blocks, Collator
from otaro.tune.recipe import Recipe, settings
from otaro.tune.trainer import OtaroTrainer


def machine() -> dict[str, Any]:
    """Hardware and versions, for the record beside a result."""
    found = diagnostics.collect()
    return {"cpu": found.cpu, "gpus": found.gpus, "versions": found.versions}


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


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of an update after the first ones, which compile."""

    def __init__(self, first: int, on_gpu: bool) -> None:
        self.first = first
        self.on_gpu = on_gpu
        self.started = 0.0
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step not in (self.first, state.max_steps):
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds = (now - self.started) / (state.max_steps - self.first)
        self.started = now


class FittingClock:
    """Seconds of an update that fits, from what progress is told."""

    def __init__(self, first: int, on_gpu: bool) -> None:
        self.first = first
        self.on_gpu = on_gpu
        self.started = 0.0
        self.seconds = 0.0
        self.updates = 0

    def __call__(self, description: str, done: int, total: int) -> None:
        first = min(self.first, total - 1)
        if not description.startswith("fitting") or done not in (first, total):
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds, self.updates = (now - self.started) / (total - first), total
        self.started = now


def measure_run(arguments: argparse.Namespace, method: str) -> dict[str, float]:
    """Seconds of an update, and on a GPU the most memory that was taken."""
    on_gpu = not arguments.cpu
    torch.manual_seed(0)
    gc.collect()  # what the run before has left
    model = random_model(arguments.shape, "cuda" if on_gpu else "cpu")
    # None comes twice, else some would be held back and measured on.
    count = (arguments.first + arguments.updates) * arguments.batch
    ids = torch.randint(0, 40000, (count, arguments.length)).tolist()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock, fitting = Clock(arguments.first, on_gpu), FittingClock(arguments.first, on_gpu)
    with tempfile.TemporaryDirectory(prefix="otaro-bench-") as folder:
        args = TuneArguments(
            output_dir=folder,
            **settings("default", method=method),
            max_steps=arguments.first + arguments.updates,
            per_device_train_batch_size=arguments.batch,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            compile=arguments.compile,
            save_strategy="no",
            report_to="none",
            logging_steps=500,
            disable_tqdm=True,
        )
        options: dict[str, Any] = {"train_dataset": Blocks(ids, ids), "data_collator": Collator(0)}
        OtaroTrainer(model, args, callbacks=[clock], progress=fitting, **options).train()
    memory = {"peak_bytes": torch.cuda.max_memory_allocated()} if on_gpu else {}
    if not fitting.updates:
        return {"update_seconds": clock.seconds, **memory}
    spread = Recipe().fitting * fitting.seconds
    return {"update_seconds": clock.seconds + spread, "fitting_seconds": fitting.seconds, **memory}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    methods = ("fp16", *arguments.method.split(","))
    rounds: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for _ in range(arguments.rounds):
        for method in methods:
            rounds[method].append(measure_run(arguments, method))
            print(method, rounds[method][-1], flush=True)
    shape = {name: getattr(arguments, name) for name in ("shape", "method", "batch", "length", "updates", "compile")}
    result: dict[str, Any] = {**shape, "machine": machine()}
    counted = {method: runs[1:] or runs for method, runs in rounds.items()}
    for method, runs in counted.items():
        for name in runs[0]:
            result[f"{method}_{name}"] = statistics.median(run[name] for run in runs)
            if method != "fp16":
                pairs = zip(counted["fp16"], runs, strict=True)
                if name in counted["fp16"][0]:
                    ratio = statistics.median(other[name] / one[name] for one, other in pairs)
                    result[f"{method}_{name}_ratio"] = ratio
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--method", default="tiers", help="what to compare with fp16, with commas between")
    parser.add_argument("--cpu", action="store_true", help="measure on the CPU")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--first", type=int, default=12, help="updates that are not timed")
    parser.add_argument("--updates", type=int, default=40, help="updates that are")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--no-compile", dest="compile", action="store_const", const=False)
    parser.add_argument("--json", help="add the result to this file")
    arguments = parser.parse_args()
    if not (arguments.cpu or torch.cuda.is_available()):
        raise SystemExit("there is no GPU: add --cpu")
    compared = {} if arguments.cpu else {"kernel_compared": check_kernel()}
    result = {**measure(arguments), **compared}
    print(json.dumps(result, indent=1))
    if arguments.json:
        path = Path(arguments.json)
        results = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*results, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
