"""A tiny Llama that was trained on children's stories, tuned on Alpaca's answers as plain text; runs on a CPU.

    python -m experiments.stories.prepare --checkpoint stories260K.bin --tokenizer tok512.model \
        --alpaca alpaca_data.json --out DIR
    python -m experiments.stories.run --model DIR/model --train DIR/train.npy --test DIR/test.npy
"""

from __future__ import annotations

from experiments import tuning

FIXED = ("fixed-E5M4", "fixed-E5M3")
RUNS = (
    *("untuned", "fp16", "fp16+averaged", *FIXED, *(f"{name}+averaged" for name in FIXED)),
    *("tiers", "uniform", "bps", "otaro"),
)

if __name__ == "__main__":
    tuning.main(__file__, __doc__, RUNS, length=128, window=512, learning_rate=3e-3)
