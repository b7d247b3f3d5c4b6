"""Libraries that keep to themselves what they would print."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and the hub from printing warnings and progress bars."""
    from huggingface_hub.utils import logging as hubs
    from transformers.utils import logging as ours

    verbosity, hub_verbosity, bars = ours.get_verbosity(), hubs.get_verbosity(), ours.is_progress_bar_enabled()
    ours.set_verbosity_error()
    hubs.set_verbosity_error()
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
