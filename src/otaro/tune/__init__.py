"""Once tuning: one run that makes a model hold up at every precision.

`path` chooses the width of each batch (BPS and the baselines), `delay` lets ultra-low widths wait (LAA), `config` holds
the settings and recipes, `trainer` is the loop on transformers' Trainer, `data` reads text and conversations, `command`
is ``otaro tune``.
"""

from typing import TYPE_CHECKING

from otaro._lazy import lazy

if TYPE_CHECKING:
    from otaro.tune.config import TuneArguments, recipe
    from otaro.tune.data import load_blocks
    from otaro.tune.trainer import OtaroTrainer

__all__ = ["OtaroTrainer", "TuneArguments", "load_blocks", "recipe"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "OtaroTrainer": "otaro.tune.trainer",
        "TuneArguments": "otaro.tune.config",
        "load_blocks": "otaro.tune.data",
        "recipe": "otaro.tune.config",
    },
)
