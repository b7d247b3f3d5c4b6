"""vLLM's layers with planes in the place of their weights.

A layer of vLLM asks its quantisation for a method, which makes the layer's parameters and computes with them. Here the
parameters are the planes, cut and stacked by vLLM's own loaders. All layers of a model share one number, the mantissa
bits of the width in use, as a tensor on the CPU. It is an input of the ops below and is read inside of them: since
torch.compile cannot see into them, nothing it makes depends on the width, and a change holds from the next step on.

On a CPU few rows are multiplied by the native core, straight from the planes; many rows, and any rows on a GPU, by
torch with the values of this one weight, which are gone after the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from otaro import ops
from otaro.checkpoint.layout import QUANT_METHOD, Layout, read_layout
from otaro.errors import OtaroError
from otaro.packing import Planes
from otaro.precision import NARROWEST, Precision
from otaro.sefp import Format
from otaro.vllm.weights import available, check_columns, check_loaded, columns_of, rows_of, shapes_stored

WIDTH = "sefp_width"
ACTIVATIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    MoEActivation.SILU: functional.silu,
    MoEActivation.GELU: functional.gelu,
    MoEActivation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
}


class PackedConfig(QuantizationConfig):  # type: ignore[misc]
    """The `quantization_config` of a packed folder; the loader adds the width before the model is built."""

    loaded: Precision
    """The width whose planes the layers have."""
    width: Tensor
    """Mantissa bits of the width in use, a number that all layers share."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    def load(self, precision: Precision) -> None:
        self.loaded = precision
        self.width = torch.tensor(precision.mantissa, device="cpu")

    @classmethod
    def get_name(cls) -> str:
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedConfig:
        return cls(read_layout(config, "config.json"))

    def get_quant_method(self, layer: Any, prefix: str) -> PackedMethod | PackedExpertsMethod | None:
        if isinstance(layer, RoutedExperts):
            return PackedExpertsMethod(layer.moe_config, self)
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            return PackedMethod(self)
        return None


class PackedMethod(LinearMethodBase):  # type: ignore[misc]
    """Linear layers, embeddings and output heads."""

    def __init__(self, config: PackedConfig) -> None:
        self.config = config

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        format = self.config.layout.format
        check_columns(input_size_per_partition, input_size, format, layer.prefix)
        floor = self.config.layout.embedding_floor if isinstance(layer, VocabParallelEmbedding) else NARROWEST
        stored = format.stored(max(self.config.loaded, floor))
        shape = (sum(output_partition_sizes), input_size_per_partition)
        attributes |= {"input_dim": 1, "output_dim": 0}
        layer.sefp_planes = _add_planes(layer, "", shape, format, stored, attributes)
        layer.sefp_floor = floor.mantissa
        layer.register_buffer(WIDTH, self.config.width, persistent=False)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        for name in layer.sefp_planes:
            delattr(layer, name)
        layer.__dict__["sefp_tied_to"] = embed_tokens  # not a submodule: it has its own place in the model
        return layer

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        format = self.config.layout.format
        return torch.ops.vllm.otaro_linear(
            x, _planes(layer), bias, layer.sefp_width, layer.sefp_floor, format.scheme, format.group_size
        )

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        format = self.config.layout.format
        return torch.ops.vllm.otaro_embedding(
            ids,
            _planes(layer),
            layer.sefp_width,
            layer.sefp_floor,
            layer.embedding_dim,
            format.scheme,
            format.group_size,
            layer.params_dtype,
        )


class PackedExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Fused experts, computed one at a time."""

    def __init__(self, moe: Any, config: PackedConfig) -> None:
        super().__init__(moe)
        self.config = config

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        self._check(layer)
        format, stored = self.config.layout.format, self.config.layout.format.stored(self.config.loaded)
        check_columns(intermediate_size_per_partition, self.moe.intermediate_size, format, layer.layer_name)
        up = (num_experts, 2 * intermediate_size_per_partition, hidden_size)
        down = (num_experts, hidden_size, intermediate_size_per_partition)
        layer.sefp_up = _add_planes(layer, "w13_", up, format, stored, {})
        layer.sefp_down = _add_planes(layer, "w2_", down, format, stored, {})
        layer.register_buffer(WIDTH, self.config.width, persistent=False)

    def _check(self, layer: Any) -> None:
        parallel = self.moe.moe_parallel_config
        unsupported = {
            "expert parallelism": parallel.use_ep or parallel.enable_eplb,
            "biases": self.moe.has_bias,
            f"the activation {self.moe.activation.value}": self.moe.activation not in ACTIVATIONS,
            "weights of the router on their input": layer.apply_router_weight_on_input,
            "CUDA graphs: add --enforce-eager": not (
                current_platform.is_cpu() or get_current_vllm_config().model_config.enforce_eager
            ),
        }
        for what, used in unsupported.items():
            if used:
                raise OtaroError(f"{layer.layer_name}: packed experts do not work with {what}")

    def load(self, layer: Any, name: str, planes: Planes) -> set[str]:
        """Take this process's part of a stack of experts; returns the names of the parameters."""
        rank, ranks = self.moe.tp_rank, self.moe.tp_size
        up = name == "gate_up_proj"
        loaded = set()
        for own, plane in zip(layer.sefp_up if up else layer.sefp_down, planes.named().values(), strict=True):
            part = rows_of(plane, rank, ranks, 2) if up else columns_of(plane, rank, ranks)
            parameter = getattr(layer, own)
            if parameter.shape != part.shape:
                raise OtaroError(f"{layer.layer_name}.{name} does not fit the model its config describes")
            parameter.data.copy_(part)
            loaded.add(own)
        return loaded

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        format = self.config.layout.format
        return torch.ops.vllm.otaro_experts(
            x,
            topk_weights,
            topk_ids,
            [getattr(layer, name) for name in layer.sefp_up],
            [getattr(layer, name) for name in layer.sefp_down],
            layer.sefp_width,
            self.moe.activation.value,
            format.scheme,
            format.group_size,
        )


def worker_precision(worker: Any, precision: str | None = None) -> dict[str, Any]:
    """What the workers' method does: set the width of this process's model, if one is given, and describe it."""
    model = worker.get_model()
    configs = {id(config): config for module in model.modules() if (config := _config(module)) is not None}
    if not configs:
        raise OtaroError("this engine does not run a packed model: its precision cannot be chosen")
    config = next(iter(configs.values()))
    format = config.layout.format
    if precision is not None:
        check_loaded(Precision(precision), format, config.loaded)
        if not current_platform.is_cpu() and not worker.vllm_config.model_config.enforce_eager:
            raise OtaroError("CUDA graphs keep the width they were recorded at: start vLLM with --enforce-eager")
        for other in configs.values():
            other.width.fill_(Precision(precision).mantissa)
    return {
        "precision": str(Precision.from_mantissa(int(config.width))),
        "precisions": [str(width) for width in available(format, config.loaded)],
        "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
    }


def _config(module: nn.Module) -> PackedConfig | None:
    method = getattr(module, "quant_method", None)
    return method.config if isinstance(method, PackedMethod | PackedExpertsMethod) else None


def _add_planes(
    layer: Any,
    prefix: str,
    shape: tuple[int, ...],
    format: Format,
    stored: Precision,
    attributes: dict[str, Any],
) -> list[str]:
    """Register the planes of a tensor with a layer; returns their names there."""
    names = []
    for plane, plane_shape in shapes_stored(shape, format, stored).items():
        parameter = nn.Parameter(torch.zeros(plane_shape, dtype=torch.uint8), requires_grad=False)
        set_weight_attrs(parameter, attributes)
        layer.register_parameter(prefix + plane, parameter)
        names.append(prefix + plane)
    return names


def _planes(layer: Any) -> list[Tensor]:
    owner = layer.__dict__.get("sefp_tied_to", layer)
    return [getattr(owner, name) for name in owner.sefp_planes]


def _as_planes(tensors: list[Tensor]) -> Planes:
    base, scale, *bits = tensors
    return Planes(base, tuple(bits), scale)


def _width(width: Tensor, floor: int) -> Precision:
    return Precision.from_mantissa(max(int(width), floor))


def _product(x: Tensor, planes: Planes, precision: Precision, format: Format, bias: Tensor | None) -> Tensor:
    columns = x.shape[-1]
    if x.device.type == "cpu" and x.numel() <= ops.SMALL_BATCH * columns:
        # The native core multiplies in float32, straight from the planes.
        wide = None if bias is None else bias.float()
        return ops.linear(x.float(), planes, columns, precision, format, wide).to(x.dtype)
    return ops.linear(x, planes, columns, precision, format, bias)


def _linear(
    x: Tensor, planes: list[Tensor], bias: Tensor | None, width: Tensor, floor: int, scheme: str, group_size: int
) -> Tensor:
    format = Format(scheme, group_size)  # type: ignore[arg-type]
    return _product(x, _as_planes(planes), _width(width, floor), format, bias)


def _linear_fake(
    x: Tensor, planes: list[Tensor], bias: Tensor | None, width: Tensor, floor: int, scheme: str, group_size: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], planes[0].shape[0]))


def _embedding(
    ids: Tensor,
    planes: list[Tensor],
    width: Tensor,
    floor: int,
    columns: int,
    scheme: str,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    format = Format(scheme, group_size)  # type: ignore[arg-type]
    return ops.embedding(ids, _as_planes(planes), columns, _width(width, floor), format, dtype)


def _embedding_fake(
    ids: Tensor,
    planes: list[Tensor],
    width: Tensor,
    floor: int,
    columns: int,
    scheme: str,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    return planes[0].new_empty((*ids.shape, columns), dtype=dtype)


def _experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    up: list[Tensor],
    down: list[Tensor],
    width: Tensor,
    activation: str,
    scheme: str,
    group_size: int,
) -> Tensor:
    format, precision = Format(scheme, group_size), _width(width, 0)  # type: ignore[arg-type]
    activate = ACTIVATIONS[MoEActivation(activation)]
    result = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        both = _product(x[rows], _as_planes([plane[expert] for plane in up]), precision, format, None)
        gate, linear = both.chunk(2, -1)
        inner = activate(gate) * linear
        out = _product(inner, _as_planes([plane[expert] for plane in down]), precision, format, None)
        result.index_add_(0, rows, (out * weights[rows, slots, None]).to(x.dtype))
    return result


def _experts_fake(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    up: list[Tensor],
    down: list[Tensor],
    width: Tensor,
    activation: str,
    scheme: str,
    group_size: int,
) -> Tensor:
    return torch.empty_like(x)


direct_register_custom_op("otaro_linear", _linear, fake_impl=_linear_fake)
direct_register_custom_op("otaro_embedding", _embedding, fake_impl=_embedding_fake)
direct_register_custom_op("otaro_experts", _experts, fake_impl=_experts_fake)
