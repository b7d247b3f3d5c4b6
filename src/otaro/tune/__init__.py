"""Once tuning: one run that makes a model hold up at every precision.

`selector` says at which width an update is computed, `update` computes its gradients, `recipe` holds the constants,
`config` the settings, `trainer` is the loop on transformers' Trainer, `data` reads text and conversations, `command` is
``otaro tune``.
"""

from typing import TYPE_CHECKING

from otaro._lazy import lazy

if TYPE_CHECKING:
    from otaro.tune.config import TuneArguments
    from otaro.tune.data import load_blocks
    from otaro.tune.recipe import settings
    from otaro.tune.trainer import OtaroTrainer

__all__ = ["OtaroTrainer", "TuneArguments", "load_blocks", "settings"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "OtaroTrainer": "otaro.tune.trainer",
        "TuneArguments": "otaro.tune.config",
        "load_blocks": "otaro.tune.data",
        "settings": "otaro.tune.recipe",
    },
)
