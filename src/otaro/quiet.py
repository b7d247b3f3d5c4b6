"""Libraries that keep to themselves what they would print."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and the hub from printing warnings, progress bars, and errors that they raise besides.

    What they would print may hold the folder's own text, control characters and all.
    """
    from huggingface_hub.utils import logging as hubs
    from transformers.utils import logging as ours

    verbosity, hub_verbosity, bars = ours.get_verbosity(), hubs.get_verbosity(), ours.is_progress_bar_enabled()
    ours.set_verbosity(logging.CRITICAL)
    hubs.set_verbosity(logging.CRITICAL)
    ours.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        ours.set_verbosity(verbosity)
        hubs.set_verbosity(hub_verbosity)
        if bars:
            ours.enable_progress_bar()
