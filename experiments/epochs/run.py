"""A small text over several epochs: the tiny Llama and the text of `experiments.stories`, a small part of it.

    python -m experiments.epochs.run --model DIR/model --train DIR/train.npy --test DIR/test.npy \
        --out experiments/epochs/runs/four
    python -m experiments.epochs.run --model DIR/model --train DIR/train.npy --test DIR/test.npy \
        --tokens 24000 --steps 240 --learning-rate 0.0019 --out experiments/epochs/runs/ten

`experiments.stories.prepare` makes DIR.
"""

from __future__ import annotations

from experiments import tuning

NARROW = ("fixed-E5M4", "fixed-E5M3")
RUNS = (
    *("tiers", "tiers+held_back=0", "fp16", *NARROW),
    *(f"{name}+averaged" for name in ("fp16", *NARROW)),
)

if __name__ == "__main__":
    tuning.main(__file__, __doc__, RUNS, tokens=80_000, steps=312, batch=8, length=128, window=512)
