"""SmolLM2 on WikiText-2: the recipe beside ordinary tuning and the runs made for one width (Fig. 7).

python -m experiments.wikitext.run --train wiki.train.tokens --test wiki.test.tokens
python -m experiments.wikitext.run --train wiki.train.tokens --test wiki.test.tokens --quick      # on a CPU
"""

from __future__ import annotations

from experiments import tuning
from otaro.precision import Precision

RUNS = ("untuned", "fp16", "fp16+averaged", *(f"fixed-{width}" for width in Precision), "tiers")

if __name__ == "__main__":
    tuning.main(__file__, __doc__, RUNS)
