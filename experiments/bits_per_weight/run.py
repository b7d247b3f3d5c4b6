"""Perplexity against bits per weight: one tuned model at every width, and what a user would make without it.

    python -m experiments.bits_per_weight.run --tuned TUNED --plain PLAIN --tokenizer smollm2 \
        --train wiki.train.tokens --test wiki.test.tokens --llama-cpp DIR --out experiments/bits_per_weight/NAME.json

TUNED is a model that `otaro tune` made, PLAIN one by `--method fp16 --average 0.4` and else the same options, which
llama.cpp's own converter and quantiser make files of, with an importance matrix from the beginning of the training
text and without. DIR is llama.cpp's source, built in `build`: `cmake -B build && cmake --build build --target
llama-quantize llama-imatrix` (the source distribution of llama-cpp-python has it in vendor/llama.cpp). Its converter
needs the packages gguf and sentencepiece. Every file's weights are measured by the same code, activations in float32;
bits are those of all matrices, scales and embeddings included.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import torch

import otaro
from experiments import common
from otaro.json_file import write_json
from otaro.precision import Precision
from otaro.sources import open_source

TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_0", "Q3_K_M")
CALIBRATION = 300_000
"""Characters of the training text that the importance matrix is made from."""
CONTEXT = 512


def tool(llama_cpp: Path, name: str, *arguments: object) -> None:
    """Run one of llama.cpp's programs; what it says is shown where it fails."""
    done = subprocess.run(
        [llama_cpp / "build" / "bin" / name, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


@contextmanager
def with_tokenizer(folder: Path, tokenizer: str) -> Iterator[Path]:
    """A copy of a model folder with the tokenizer of another source beside it."""
    with tempfile.TemporaryDirectory(prefix="otaro-bits-") as place:
        copy = Path(place) / folder.name
        shutil.copytree(folder, copy)
        if tokenizer.endswith(".model"):
            shutil.copyfile(tokenizer, copy / "tokenizer.model")
        else:
            with open_source(tokenizer) as source:
                source.save_extras(copy)
        yield copy


def bits_of(file: Path) -> float:
    """Bits per weight of the matrices in a GGUF file."""
    matrices = [tensor for tensor in gguf.GGUFReader(file).tensors if len(tensor.shape) > 1]
    return 8 * sum(int(tensor.n_bytes) for tensor in matrices) / sum(int(tensor.n_elements) for tensor in matrices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=Path, required=True)
    parser.add_argument("--plain", type=Path, required=True)
    parser.add_argument("--tokenizer", required=True, help="smollm2, a model folder or a sentencepiece model")
    parser.add_argument("--train", type=Path, required=True, help="text for the importance matrix")
    parser.add_argument("--test", type=Path, required=True, help="text, or token ids as .npy")
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=16)
    arguments = parser.parse_args()
    window = arguments.window
    tokens = common.tokens_of(arguments.test, arguments.tokenizer)[: arguments.windows * window]
    result: dict[str, Any] = {
        "window": window,
        "windows": len(tokens) // window,
        "text": arguments.test.name,
        "machine": common.machine(),
        "otaro": {},
        "llama.cpp": {},
    }

    def add(group: str, name: str, bits: float, model: torch.nn.Module) -> None:
        result[group][name] = {"bits": round(bits, 4), "perplexity": common.perplexity(model, tokens, window, 4)}
        print(f"{group:10s} {name:18s} {bits:6.3f} bits  {result[group][name]['perplexity']:8.4f}", flush=True)
        write_json(result, arguments.out)

    with tempfile.TemporaryDirectory(prefix="otaro-bits-") as place:
        packed = Path(place) / "packed"
        with with_tokenizer(arguments.tuned, arguments.tokenizer) as folder:
            info = otaro.pack(folder, packed)
        model = otaro.load(packed, device=str(common.device()))
        for width in Precision:
            model.set_precision(width)
            add("otaro", str(width), info.bits_per_weight(width), model)
        del model
        whole, importance, calibration = (Path(place) / name for name in ("whole.gguf", "importance.gguf", "text"))
        with with_tokenizer(arguments.plain, arguments.tokenizer) as folder:
            converter = [sys.executable, arguments.llama_cpp / "convert_hf_to_gguf.py", folder]
            subprocess.run([*converter, "--outtype", "f16", "--outfile", whole], check=True, capture_output=True)
        add("llama.cpp", "F16", bits_of(whole), common.load_model(str(whole)))
        text = common.clean_wikitext(arguments.train.read_text(encoding="utf-8"))[:CALIBRATION]
        calibration.write_text(text, encoding="utf-8")
        tool(arguments.llama_cpp, "llama-imatrix", *("-m", whole, "-f", calibration, "-o", importance, "-c", CONTEXT))
        for kind in TYPES:
            for label, options in (("", ()), (" with importance", ("--imatrix", importance))):
                file = Path(place) / "quantised.gguf"
                tool(arguments.llama_cpp, "llama-quantize", *options, whole, file, kind)
                add("llama.cpp", kind + label, bits_of(file), common.load_model(str(file)))
    assert all(
        math.isfinite(entry["perplexity"]) for group in ("otaro", "llama.cpp") for entry in result[group].values()
    )


if __name__ == "__main__":
    main()
