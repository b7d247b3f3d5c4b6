"""Reading a packed folder into a model of vLLM.

The loader opens the folder, tells the layers the width before they are built, and hands vLLM's own loaders the planes
of that width's files. In between it settles what vLLM and the folder see differently: which layers are packed (vLLM
leaves some embeddings unquantised that are packed, and offers planes to routers that are not), and what tensors are
called (packed folders have the names of transformers' models, vLLM expects those of the original checkpoints).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import GateLinear, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.utils import PPMissingLayer

from otaro import hf
from otaro.checkpoint import PackedFolder
from otaro.checkpoint.layout import QUANT_METHOD, Entry
from otaro.errors import OtaroError
from otaro.packing import Planes
from otaro.vllm.layers import PackedConfig, PackedExpertsMethod, PackedMethod
from otaro.vllm.weights import Route, chosen_precision, routed

logger = init_logger("vllm.otaro")


class PackedLoader(BaseModelLoader):  # type: ignore[misc]
    """vLLM's load format "otaro". `model_loader_extra_config` may hold a precision."""

    def download_model(self, model_config: Any) -> None:
        self._open(model_config)

    def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        folder = self._open(model_config)
        config = vllm_config.quant_config
        if not isinstance(config, PackedConfig):
            raise OtaroError(f"{model_config.model} is not a packed model: leave out the load format")
        config.load(chosen_precision(folder, self.load_config.model_loader_extra_config))
        # vLLM keeps compiled graphs by a hash of its settings, which must tell apart layers with more and fewer planes.
        if isinstance(vllm_config.additional_config, dict):
            vllm_config.additional_config[QUANT_METHOD] = str(config.loaded)
        model = super().create_model(vllm_config, model_config, prefix)
        self._routes = settle(model, folder, config, model_config.hf_config.model_type)
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        folder = self._open(model_config)
        precision = next(
            method.config.loaded
            for module in model.modules()
            if isinstance(method := getattr(module, "quant_method", None), PackedMethod | PackedExpertsMethod)
        )
        experts = _experts(model)
        direct: set[str] = set()

        def weights() -> Iterator[tuple[str, Tensor]]:
            for route, name, value in routed(folder, precision, self._routes, model_config.dtype):
                if isinstance(value, Planes):
                    layer, _, stack = route.name.rpartition(".")
                    path, module = experts[layer]
                    direct.update(f"{path}.{own}" for own in module.quant_method.load(module, stack, value))
                else:
                    yield name, value

        loaded = model.load_weights(weights())
        if loaded is not None:
            missing = sorted({name for name, _ in model.named_parameters()} - loaded - direct)
            if missing:
                raise OtaroError(f"{folder.path} lacks the tensor {missing[0]} that its config speaks of")

    def _open(self, model_config: Any) -> PackedFolder:
        precision = self.load_config.model_loader_extra_config.get("precision")
        place = {"revision": model_config.revision, "cache_dir": self.load_config.download_dir}
        return PackedFolder(hf.local(model_config.model, precision, **place))


def settle(model: nn.Module, folder: PackedFolder, config: PackedConfig, model_type: str) -> dict[str, Route]:
    """Give every layer the method that its weights in the folder ask for; returns where each tensor goes."""
    names = _Names(model, config, model_type)
    routes = {entry.name: names.route(entry) for entry in folder.entries}
    packed = {names.layer(routes[entry.name].name) for entry in folder.entries if entry.floor is not None}
    for path, layer in model.named_modules():
        if not isinstance(layer, LinearBase | VocabParallelEmbedding) or "sefp_tied_to" in layer.__dict__:
            continue
        if path in packed and not isinstance(layer.quant_method, PackedMethod):
            if not isinstance(layer, GateLinear):  # its kernels want floats
                _replace(layer, PackedMethod(config))
        elif path not in packed and isinstance(layer.quant_method, PackedMethod):
            plain = UnquantizedEmbeddingMethod if isinstance(layer, VocabParallelEmbedding) else UnquantizedLinearMethod
            _replace(layer, plain())
    decoded = []
    for entry in folder.entries:
        route = routes[entry.name]
        layer = names.modules.get(names.layer(route.name))
        if route.form == "planes" and not isinstance(getattr(layer, "quant_method", None), PackedMethod):
            routes[entry.name] = Route(route.name, "values")
            decoded.append(entry.name)
    if decoded:
        logger.warning(
            "vLLM has %d layers that cannot hold planes, %s among them: they hold values of %s and do not change with "
            "the precision",
            len(decoded),
            decoded[0],
            config.loaded,
        )
    return routes


def _replace(layer: Any, method: Any) -> None:
    """Make a layer's parameters anew by another method."""
    for name in getattr(layer, "sefp_planes", ["weight"]):
        delattr(layer, name)
    layer.quant_method = method
    method.create_weights(
        layer,
        layer.input_size_per_partition if hasattr(layer, "input_size_per_partition") else layer.input_size,
        layer.output_partition_sizes,
        layer.input_size,
        layer.output_size,
        params_dtype=layer.params_dtype,
        weight_loader=layer.weight_loader,
    )


def _experts(model: nn.Module) -> dict[str, tuple[str, Any]]:
    return {
        module.layer_name: (path, module) for path, module in model.named_modules() if isinstance(module, RoutedExperts)
    }


class _Names:
    """From the names in a packed folder to those that vLLM's loaders know, and to its layers."""

    def __init__(self, model: Any, config: PackedConfig, model_type: str) -> None:
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.mapper = getattr(model, "hf_to_vllm_mapper", None)
        self.merged = {part: whole for whole, parts in config.packed_modules_mapping.items() for part in parts}
        self.experts = _experts(model)
        self.missing = [path for path, module in self.modules.items() if isinstance(module, PPMissingLayer)]
        """Layers that another stage of a pipeline has."""
        conversions = get_checkpoint_conversion_mapping(model_type) or []
        self.renamings = [entry.reverse_transform() for entry in conversions if type(entry) is WeightRenaming]

    def route(self, entry: Entry) -> Route:
        suffix = "" if entry.floor is None else ".weight"
        for name in (entry.name, self._renamed(entry.name)):
            if entry.floor is not None and name.rpartition(".")[0] in self.experts:
                return Route(name, "experts")
            owner = f"{name}{suffix}".rpartition(".")[0]
            if self.layer(owner) in self.modules:
                return Route(name, "as it is" if entry.floor is None else "planes")
            if any(self.layer(owner).startswith(f"{path}.") for path in self.missing):
                return Route(name, "elsewhere")
        raise OtaroError(f"vLLM's model has no place for {entry.name}: this architecture is not supported")

    def layer(self, name: str) -> str:
        """The path of the layer that a weight of that name goes to."""
        mapped = name
        if self.mapper is not None:
            mapped = (self.mapper.map_name(f"{name}.weight") or "").removesuffix(".weight")
        if mapped not in self.modules:
            parent, _, last = mapped.rpartition(".")
            mapped = f"{parent}.{self.merged[last]}" if last in self.merged else mapped
        return mapped

    def _renamed(self, name: str) -> str:
        for renaming in self.renamings:
            name, _ = renaming.rename_source_key(name)
        return name
