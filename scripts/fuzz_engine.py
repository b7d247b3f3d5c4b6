"""Feeds the engine broken packed folders and odd prompts: whatever comes, it must answer or say one clear error.

    python scripts/fuzz_engine.py --seconds 60 [--seed 1]

Each round changes some bytes of one file of a tiny packed model, or cuts it short, and runs a prompt that may be odd
too. In half of the rounds checksums are not looked at, so that what was changed gets through to the native code. Run it
with a library built with -DOTARO_SANITIZE=ON to see errors that would otherwise pass unnoticed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import otaro
from otaro.checkpoint.folder import PackedFolder
from otaro.engine.architecture import UnsupportedError
from otaro.engine.engine import Engine
from otaro.engine.sampling import Sampling
from otaro.errors import OtaroError
from otaro.precision import Precision


def tiny_folder(place: Path) -> dict[str, bytes]:
    """The files of a packed model, as small as it gets."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(place / "model")
    otaro.pack(place / "model", place / "packed")
    names = [path.name for path in (place / "packed").iterdir() if path.suffix in (".json", ".safetensors")]
    return {name: (place / "packed" / name).read_bytes() for name in names}


def mutate(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.2:
        return data[: chance.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def one_round(folder: Path, chance: random.Random) -> str:
    try:
        engine = Engine(folder, chance.choice((None, *Precision)), threads=chance.choice((1, 2)), context=32)
        prompt = [chance.randrange(40) for _ in range(chance.randrange(30))]
        if prompt and chance.random() < 0.2:
            prompt[chance.randrange(len(prompt))] = chance.choice((-1, 40, 2**31))
        draft = chance.choice((None, engine.weights.precisions[-1]))
        sampling = Sampling(chance.choice((0.0, 1.0)), top_k=chance.randrange(3), seed=1)
        list(engine.tokens(prompt, max_new_tokens=chance.randrange(1, 8), sampling=sampling, draft=draft))
    except (OtaroError, UnsupportedError) as error:
        return type(error).__name__
    return "ran"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    outcomes: Counter[str] = Counter()
    check_file = PackedFolder._check_file
    with tempfile.TemporaryDirectory() as name:
        files = tiny_folder(Path(name))
        folder = Path(name) / "packed"
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            target = chance.choice(sorted(files))
            (folder / target).write_bytes(mutate(files[target], chance) if chance.random() < 0.9 else files[target])
            trusting = chance.random() < 0.5
            PackedFolder._check_file = (lambda self, file, metadata: (file.path.name, 0)) if trusting else check_file  # type: ignore[method-assign]
            outcomes[one_round(folder, chance)] += 1
            (folder / target).write_bytes(files[target])
    print(f"{sum(outcomes.values())} rounds, nothing broke:", dict(outcomes))


if __name__ == "__main__":
    main()
