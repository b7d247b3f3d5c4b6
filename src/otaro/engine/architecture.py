"""Which models the native engine runs, and what their tensors are called.

Decoders of the Llama kind: RMS norms, rotary positions, grouped queries, SwiGLU, with or without query and key norms
and biases. A model it does not run is told apart here, with the reason, before any weight is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from otaro.checkpoint.folder import PackedFolder
from otaro.engine.shape import MatrixRole, Shape, VectorRole
from otaro.errors import FormatError, OtaroError, Sentence
from otaro.model_config import MOST_LAYERS
from otaro.ops import cpu

T = TypeVar("T")

MOST_HEAD_DIMENSION, MOST_ROWS = 1024, 2**31 - 1
LAYER_NUMBER = re.compile("0|[1-9][0-9]{0,3}")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
EXPERT_TYPES = ("mixtral", "qwen3_moe")
"""Mixtures of experts, which run on GPUs alone."""
LARGEST = 1e30
"""Far beyond any setting, and still a float32."""
ROPE_TYPES = ("default", "linear", "llama3")

EMBEDDING, HEAD, ROUTER = "model.embed_tokens", "lm_head", "mlp.gate.weight"
MATRICES = {
    "self_attn.q_proj": MatrixRole.QUERY,
    "self_attn.k_proj": MatrixRole.KEY,
    "self_attn.v_proj": MatrixRole.VALUE,
    "self_attn.o_proj": MatrixRole.OUTPUT,
    "mlp.gate_proj": MatrixRole.GATE,
    "mlp.up_proj": MatrixRole.UP,
    "mlp.down_proj": MatrixRole.DOWN,
    "mlp.experts.gate_up_proj": MatrixRole.EXPERT_GATE_UP,
    "mlp.experts.down_proj": MatrixRole.EXPERT_DOWN,
}
VECTORS = {
    "input_layernorm.weight": VectorRole.ATTENTION_NORM,
    "post_attention_layernorm.weight": VectorRole.FEED_FORWARD_NORM,
    "self_attn.q_norm.weight": VectorRole.QUERY_NORM,
    "self_attn.k_norm.weight": VectorRole.KEY_NORM,
    "self_attn.q_proj.bias": VectorRole.QUERY_BIAS,
    "self_attn.k_proj.bias": VectorRole.KEY_BIAS,
    "self_attn.v_proj.bias": VectorRole.VALUE_BIAS,
    "self_attn.o_proj.bias": VectorRole.OUTPUT_BIAS,
    "mlp.gate_proj.bias": VectorRole.GATE_BIAS,
    "mlp.up_proj.bias": VectorRole.UP_BIAS,
    "mlp.down_proj.bias": VectorRole.DOWN_BIAS,
    "mlp.gate.weight": VectorRole.ROUTER,
}

EXPERT_ROLES = (MatrixRole.EXPERT_GATE_UP, MatrixRole.EXPERT_DOWN, VectorRole.ROUTER)

STATED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), (int,)),
    **dict.fromkeys(("num_key_value_heads", "vocab_size", "max_position_embeddings"), (int,)),
    "hidden_act": (str,),
    "rms_norm_eps": (int, float),
    "tie_word_embeddings": (bool,),
}


class UnsupportedError(Sentence):
    """Why the native engine does not run a model; the transformers path does."""


def open_native(
    folder: Path, backend: str, other: str, make: Callable[[], T], remark: Callable[[str], None], device: str = "cpu"
) -> T | None:
    """What `make` makes with the native engine, or None if `backend` is the other one, or the engine cannot.

    Then `remark` is told why; asked for the engine and nothing else, it is an error.
    """
    if backend == other:
        return None
    reason = cpu.available() if device == "cpu" else None
    if reason is None:
        try:
            return make()
        except UnsupportedError as error:
            reason = str(error)
    if backend == "native":
        raise OtaroError(f"{folder} does not run natively: {reason}")
    remark(f"{folder} runs through {other}: {reason}")
    return None


def matrix_place(name: str) -> tuple[int, MatrixRole] | None:
    """The layer and role of a packed tensor, by its name in the files."""
    if name == EMBEDDING:
        return 0, MatrixRole.EMBEDDING
    if name == HEAD:
        return 0, MatrixRole.HEAD
    layer, rest = _split(name)
    role = MATRICES.get(rest)
    return None if role is None else (layer, role)


def vector_place(name: str) -> tuple[int, VectorRole] | None:
    """The layer and role of a tensor that is not packed."""
    if name == "model.norm.weight":
        return 0, VectorRole.FINAL_NORM
    layer, rest = _split(name)
    role = VECTORS.get(rest)
    return None if role is None else (layer, role)


def _split(name: str) -> tuple[int, str]:
    parts = name.split(".", 3)
    if len(parts) == 4 and parts[:2] == ["model", "layers"] and LAYER_NUMBER.fullmatch(parts[2]):
        return int(parts[2]), parts[3]
    return 0, ""


class StatedConfig(SimpleNamespace):
    """What a config.json says, under the names that transformers' configs have."""

    def get_text_config(self) -> StatedConfig:
        return self


def stated_config(content: dict[str, Any]) -> StatedConfig | None:
    """A config.json as it stands, if all that the engine asks for is in it; None where transformers must fill it in.

    Files that transformers wrote are of that kind, and to read one by itself saves importing half of that library.
    """
    kind, rope = content.get("model_type"), content.get("rope_parameters")
    if kind not in MODEL_TYPES or "eos_token_id" not in content:
        return None
    if any(type(content.get(name)) not in types for name, types in STATED.items()) or not isinstance(rope, dict):
        return None
    if not {"rope_type", "rope_theta"} <= rope.keys():
        return None
    layers, types = content["num_hidden_layers"], content.get("layer_types")
    if kind in ("llama", "mistral"):  # a Mistral has windows unless it says otherwise
        windows = types is not None or content.get("sliding_window", 0 if kind == "mistral" else None) is not None
    else:
        windows = not isinstance(types, list) or len(types) != layers or set(map(str, types)) != {"full_attention"}
    if windows or (kind != "qwen2" and content.get("head_dim") is None):
        return None
    return StatedConfig(**{**content, "layer_types": None, "sliding_window": None})


def read_shape(folder: PackedFolder, config: Any, types: tuple[str, ...] = MODEL_TYPES) -> Shape:
    """What the engine must know of a packed model, from its transformers config, or why it cannot run it.

    `types` are the kinds of models that it runs.
    """
    if folder.format.scheme != "nested":
        raise UnsupportedError(
            f"its weights are packed by the scheme {folder.format.scheme}, and only nested runs natively"
        )
    if config.model_type not in types:
        raise UnsupportedError(f"models of type {config.model_type} do not run natively yet")
    if config.hidden_act != "silu":
        raise UnsupportedError(f"the activation {config.hidden_act} does not run natively")
    for entry in folder.entries:
        place = vector_place(entry.name) if entry.floor is None else matrix_place(entry.name)
        routed = place is not None and any(place[1] is role for role in EXPERT_ROLES)  # numbers of both kinds overlap
        if place is None or (routed and config.model_type not in EXPERT_TYPES):
            raise UnsupportedError(f"it has a tensor {entry.name} that the native engine does not know")
    try:
        shape = _shape(config)
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        raise FormatError(
            f"{folder.path}/config.json holds a setting that cannot be used ({error}): fetch it again"
        ) from error
    _check_tensors(folder, shape)
    return shape


def _shape(config: Any) -> Shape:
    heads = _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    head_dimension = _count(config, "head_dim", MOST_HEAD_DIMENSION, hidden // heads)
    frequency, factor = _rope(config, head_dimension)
    numbers = (config.rms_norm_eps, *frequency)
    if not all(isinstance(number, int | float) and abs(number) < LARGEST for number in numbers):
        raise ValueError("rms_norm_eps and the settings of rope must give finite numbers")
    return Shape(
        layers=_count(config, "num_hidden_layers", MOST_LAYERS),
        hidden=hidden,
        intermediate=_count(config, "intermediate_size"),
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", default=heads),
        head_dimension=head_dimension,
        vocabulary=_count(config, "vocab_size"),
        norm_epsilon=config.rms_norm_eps,
        rope_frequency=frequency,
        rope_factor=factor,
        window=_windows(config),
        **_experts(config),
    )


def _experts(config: Any) -> dict[str, Any]:
    if config.model_type not in EXPERT_TYPES:
        return {}
    count = _count(config, "num_local_experts")
    return {
        "experts": count,
        "experts_per_token": _count(config, "num_experts_per_tok", count),
        "expert_intermediate": _count(config, "moe_intermediate_size", default=_count(config, "intermediate_size")),
        "experts_normalized": bool(getattr(config, "norm_topk_prob", True)),
    }


def _count(config: Any, name: str, most: int = MOST_ROWS, default: int | None = None) -> int:
    """A size of the model, checked before anything as large as it says is made."""
    value = getattr(config, name, default)
    value = default if value is None else value
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"{name} is {value}, not a number from 1 to {most}")
    return value


def _check_tensors(folder: PackedFolder, shape: Shape) -> None:
    """The config is not covered by the files' checksums: everything it says must fit the tensors."""
    heads, kv_heads = shape.heads * shape.head_dimension, shape.kv_heads * shape.head_dimension
    shapes = {
        MatrixRole.EMBEDDING: (shape.vocabulary, shape.hidden),
        MatrixRole.HEAD: (shape.vocabulary, shape.hidden),
        MatrixRole.QUERY: (heads, shape.hidden),
        MatrixRole.KEY: (kv_heads, shape.hidden),
        MatrixRole.VALUE: (kv_heads, shape.hidden),
        MatrixRole.OUTPUT: (shape.hidden, heads),
        MatrixRole.GATE: (shape.intermediate, shape.hidden),
        MatrixRole.UP: (shape.intermediate, shape.hidden),
        MatrixRole.DOWN: (shape.hidden, shape.intermediate),
        MatrixRole.EXPERT_GATE_UP: (shape.experts, 2 * shape.expert_intermediate, shape.hidden),
        MatrixRole.EXPERT_DOWN: (shape.experts, shape.hidden, shape.expert_intermediate),
    }
    entries = {entry.name: entry for entry in folder.entries}
    needed = {"model.norm.weight", EMBEDDING}
    for layer in range(shape.layers):
        norms = [name for name, role in VECTORS.items() if role <= VectorRole.FEED_FORWARD_NORM]
        prefix = f"model.layers.{layer}."
        routed = shape.experts > 0 and f"{prefix}{ROUTER}" in entries
        matrices = [
            name for name in MATRICES if not name.startswith("mlp.") or name.startswith("mlp.experts.") == routed
        ]
        needed |= {prefix + name for name in [*matrices, *norms, *([ROUTER] if routed else ())]}
    missing = min(needed - set(entries), default=None)
    if missing is not None:
        raise FormatError(f"{folder.path}/config.json speaks of a tensor {missing} that is not there: fetch it again")
    for entry in entries.values():
        place = matrix_place(entry.name) if entry.floor is not None else vector_place(entry.name)
        fits = place is not None and place[0] < shape.layers
        if place is not None and isinstance(place[1], MatrixRole):
            fits = fits and entry.shape == shapes[place[1]]
        elif place is not None:
            router = place[1] == VectorRole.ROUTER
            fits = fits and entry.shape == ((shape.experts, shape.hidden) if router else (_length(place[1], shape),))
        if not fits:
            raise FormatError(f"{folder.path}/config.json does not fit the tensor {entry.name}: fetch it again")
    if shape.heads % shape.kv_heads or shape.head_dimension % 2 or shape.head_dimension > MOST_HEAD_DIMENSION:
        raise FormatError(f"{folder.path}/config.json has heads that do not go together: fetch it again")


def _length(role: VectorRole, shape: Shape) -> int:
    lengths = {
        VectorRole.QUERY_NORM: shape.head_dimension,
        VectorRole.KEY_NORM: shape.head_dimension,
        VectorRole.QUERY_BIAS: shape.heads * shape.head_dimension,
        VectorRole.KEY_BIAS: shape.kv_heads * shape.head_dimension,
        VectorRole.VALUE_BIAS: shape.kv_heads * shape.head_dimension,
        VectorRole.GATE_BIAS: shape.intermediate,
        VectorRole.UP_BIAS: shape.intermediate,
    }
    return lengths.get(role, shape.hidden)


def _windows(config: Any) -> tuple[int, ...]:
    """How far back each layer sees; 0: to the beginning."""
    width = _count(config, "sliding_window") if getattr(config, "sliding_window", None) else 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (width,) * config.num_hidden_layers
    unknown = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
    if unknown is not None:
        raise UnsupportedError(f"layers of type {unknown} do not run natively")
    return tuple(width if kind == "sliding_attention" else 0 for kind in kinds)


def _rope(config: Any, dimension: int) -> tuple[tuple[float, ...], float]:
    """The frequencies of the rotary embedding, and the factor of its cosines and sines."""
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise UnsupportedError(f"rotary embeddings of type {kind} do not run natively")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError("rotary embeddings of a part of a head do not run natively")
    frequencies = [parameters["rope_theta"] ** (-2 * i / dimension) for i in range(dimension // 2)]
    if kind == "linear":
        frequencies = [frequency / parameters["factor"] for frequency in frequencies]
    elif kind == "llama3":
        frequencies = [_llama3(frequency, parameters) for frequency in frequencies]
    return tuple(frequencies), 1.0


def _llama3(frequency: float, parameters: dict[str, Any]) -> float:
    """Low frequencies slowed down by the factor, high ones kept, those in between blended."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequency / (2 * math.pi)
    slowed = frequency / parameters["factor"]
    if turns < low:
        return slowed
    if turns > high:
        return frequency
    blend = (turns - low) / (high - low)
    return (1 - blend) * slowed + blend * frequency
