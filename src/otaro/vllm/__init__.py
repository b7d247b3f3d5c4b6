"""The plugin for vLLM: `vllm serve FOLDER` and `vllm.LLM(FOLDER)` run a packed folder at a width, from its planes.

    weights.py   what of a folder goes into which layer, and which slice of it; knows nothing of vLLM
    layers.py    vLLM's linear layers, embeddings, heads and experts, with planes in the place of their weights
    loader.py    opens the folder, gives layers their planes, reads the files of the width and no others
    route.py     GET and POST /v1/precision for `vllm serve`

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``). Importing this package
imports neither vLLM nor torch. The width of a running engine is changed by :func:`set_precision` and its twin for the
server, which also forget what the engine kept of earlier texts: keys and values of one width must not serve another.
"""

from __future__ import annotations

from typing import Any

from otaro.errors import OtaroError
from otaro.precision import Precision

NAME = "otaro"
"""Of the quantisation, the load format and the plugin; the first stands in a packed folder's config."""
WORKER_METHOD = "otaro_precision"


def register() -> None:
    """Enter the quantisation, the loader and the workers' method; may be called again."""
    from functools import wraps

    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.v1.worker.worker_base import WorkerBase

    if NAME in QUANTIZATION_METHODS:
        return
    from otaro.vllm.layers import PackedConfig, worker_precision
    from otaro.vllm.loader import PackedLoader

    register_quantization_config(NAME)(PackedConfig)
    register_model_loader(NAME)(PackedLoader)
    setattr(WorkerBase, WORKER_METHOD, worker_precision)

    # vLLM has no hook by which a model's config names its load format.
    create = EngineArgs.create_model_config

    @wraps(create)
    def create_model_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        if config.quantization == NAME and self.load_format == "auto":
            self.load_format = NAME
        return config

    EngineArgs.create_model_config = create_model_config


def set_precision(llm: Any, precision: Precision | str) -> None:
    """Change the width of a `vllm.LLM`, in all of its processes, and forget its prefix cache."""
    llm.collective_rpc(WORKER_METHOD, args=(str(Precision(precision)),))
    if not llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise OtaroError("the prefix cache could not be cleared: it holds keys and values of the former precision")


async def set_precision_async(engine: Any, precision: Precision | str) -> None:
    """The same for vLLM's `AsyncLLM`, between two steps: requests under way are computed anew at the new width."""
    await engine.pause_generation(mode="keep", clear_cache=True)
    try:
        await engine.collective_rpc(WORKER_METHOD, args=(str(Precision(precision)),))
    finally:
        await engine.resume_generation()
