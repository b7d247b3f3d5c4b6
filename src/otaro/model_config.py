"""A model's config.json as transformers reads it, and models made from it, no larger than their files.

A config says how many layers to make, labels to name, experts to list; transformers makes them all before anyone looks
whether there are weights for them. So what counts things is bounded here first, and a model that is made may not have
many more parts than there are tensors.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from otaro.errors import FormatError, OtaroError, foreign_code

MOST_LAYERS = 4096
MOST_COUNTED = 2**18
"""Heads, experts, labels: whatever is called ``num_…``."""
MOST_VALUES = 50_000
"""In a config, all in all."""
MODULES_PER_TENSOR = 50
SPARE_MODULES = 1000
UNSTATED_CONTEXT = 2048
"""Tokens of a model whose config does not say how many it can read."""
ADAPTER = "adapter_config.json"


def load_config(folder: Path, content: dict[str, Any]) -> Any:
    """The transformers config of a folder whose config.json holds `content`; no code that lies there is run."""
    from transformers import AutoConfig

    from otaro.quiet import quiet

    check_counts(content, f"config.json of {folder.name}")
    with foreign_code(f"config.json of {folder.name} cannot be used", FormatError), quiet():
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _forget_how_to_run(config)
        return config


def _forget_how_to_run(config: Any) -> None:
    """A config says what a model is; how it is run, with kernels from the hub perhaps, is not the folder's to say."""
    from transformers import PreTrainedConfig

    waiting = [config]
    while waiting:
        part = waiting.pop()
        part._attn_implementation = part._experts_implementation = None
        part.return_dict, part.output_attentions, part.output_hidden_states = True, False, False
        within = (getattr(part, name, None) for name in part.sub_configs)
        waiting += [inner for inner in within if isinstance(inner, PreTrainedConfig)]


def check_no_adapter(folder: Path, label: str | Path, kind: type[OtaroError] = FormatError) -> None:
    """Refuse a folder with an adapter beside its weights: transformers would put it into the model, the engine not."""
    if os.path.lexists(folder / ADAPTER):
        raise kind(f"{label} holds an adapter ({ADAPTER}): merge it into the weights, and pack the whole")


def check_counts(content: Any, place: str) -> None:
    """Refuse numbers of things that no model has; `place` names the file."""
    waiting, seen = [content], 0
    while waiting:
        entry = waiting.pop()
        seen += 1
        if seen > MOST_VALUES:
            raise FormatError(f"{place} holds more than {MOST_VALUES} values: fetch it again")
        if isinstance(entry, dict):
            for name, value in entry.items():
                layers = "layer" in name and "size" not in name
                most = MOST_LAYERS if layers else MOST_COUNTED if name.startswith("num_") else None
                if most is not None and type(value) in (int, float) and not value <= most:
                    raise FormatError(f"{place} says that {name} is {value}, which is more than {most}: fetch it again")
                waiting.append(value)
        elif isinstance(entry, list):
            waiting += entry


def context_length(model: Any) -> int:
    """The most tokens the model was made to read at once, under either name; -1 says that there is no limit."""
    config = model.config.get_text_config()
    stated = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((int(length) for length in stated if length is not None and length > 0), UNSTATED_CONTEXT)


def check_tokens(model: Any, highest: int) -> None:
    """Refuse a token that the model does not know."""
    size = int(model.config.get_text_config().vocab_size)
    if highest >= size:
        raise OtaroError(
            f"the tokenizer gives the token {highest}, but the model knows {size} tokens: they do not belong together"
        )


@contextlib.contextmanager
def modules_bounded(tensors: int) -> Iterator[None]:
    """ValueError when a model is made that has far more modules than there are tensors for it."""
    from torch.nn.modules.module import register_module_module_registration_hook

    left = SPARE_MODULES + MODULES_PER_TENSOR * tensors

    def count(*given: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"it describes a far larger model than {tensors} tensors make")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
