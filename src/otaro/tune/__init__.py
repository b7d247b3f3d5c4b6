"""Once tuning: one run that makes a model hold up at every precision. docs/architecture.md says what lies where."""

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
