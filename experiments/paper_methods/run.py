"""The paper's methods on WikiText-2, and their constants λ and N (Figs. 3 and 8).

python -m experiments.paper_methods.run --train wiki.train.tokens --test wiki.test.tokens
"""

from __future__ import annotations

from experiments import tuning

RUNS = (
    *("untuned", "fp16", "uniform", "bps", "otaro", "otaro+mean", "paper"),
    *(f"bps+exploration-{value}" for value in (3, 4, 6, 7)),
    *(f"otaro+delay-{updates}" for updates in (5, 20)),
)

if __name__ == "__main__":
    tuning.main(__file__, __doc__, RUNS)
