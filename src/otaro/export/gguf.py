"""GGUF twins: files that llama.cpp, Ollama and LM Studio load, with the values a packed model has at a width.

A twin is written a tensor at a time, after the description of all of them: memory is bounded by the largest tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    get_tensor_name_map,
)
from numpy.typing import NDArray
from torch import Tensor

from otaro.checkpoint.folder import PackedFolder
from otaro.engine.architecture import UnsupportedError, read_shape
from otaro.engine.shape import Shape
from otaro.engine.weights import read_config
from otaro.errors import OtaroError, foreign_code
from otaro.export.blocks import block_type, encode_blocks
from otaro.export.tokenizer import add_tokenizer
from otaro.packing import Planes, unpack_rows
from otaro.partial import check_room, partial_path, refuse_existing
from otaro.precision import WIDEST, Precision
from otaro.progress import Progress
from otaro.sefp import Format

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}
FILE_TYPES = {
    GGMLQuantizationType.Q4_0: LlamaFileType.MOSTLY_Q4_0,
    GGMLQuantizationType.Q5_1: LlamaFileType.MOSTLY_Q5_1,
    GGMLQuantizationType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
    GGMLQuantizationType.F16: LlamaFileType.MOSTLY_F16,
    GGMLQuantizationType.F32: LlamaFileType.ALL_F32,
}

WEIGHTS_AT_ONCE = 1 << 20
"""Weights whose codes are in memory at a time."""


def export_gguf(
    folder: str | Path,
    out: str | Path,
    precision: Precision | str,
    progress: Progress | None = None,
    remark: Callable[[str], None] | None = None,
    *,
    exact: bool = False,
) -> Path:
    """Write the GGUF twin of a packed folder at a width; the file appears under its name when it is whole.

    `remark` is told where llama.cpp will make other tokens of a text. `exact` takes 16 bits a weight, 32 at
    E5M8, so that llama.cpp does not round activations to 8 bits, nor E5M8 to float16.
    """
    folder, out, precision = Path(folder), Path(out), Precision(precision)
    refuse_existing(out)
    check_room(out, 0)
    packed = PackedFolder(folder)
    packed.check_headers(precision)
    try:
        config = read_config(packed)
        shape = read_shape(packed, config)
    except UnsupportedError as error:
        raise OtaroError(f"{folder} cannot be exported: {error}") from error
    architecture = ARCHITECTURES[config.model_type]
    _check_metadata(folder, config, shape)
    with partial_path(out, out.absolute().parent) as partial:
        writer = GGUFWriter(partial, arch=_name(architecture))
        try:
            remarks = _write(writer, packed, config, shape, precision, exact, out, progress)
        finally:
            writer.close()
        partial.rename(out)
    if remark is not None:
        for sentence in remarks:
            remark(f"in llama.cpp {sentence}: some texts become other tokens there")
    return out


def _write(
    writer: GGUFWriter,
    packed: PackedFolder,
    config: Any,
    shape: Shape,
    precision: Precision,
    exact: bool,
    out: Path,
    progress: Progress | None,
) -> list[str]:
    """What the tokenizer's description leaves out is returned (`add_tokenizer`)."""
    architecture = ARCHITECTURES[config.model_type]
    _add_description(writer, packed, config, shape, precision, exact)
    with foreign_code(f"the tokenizer of {packed.path} cannot be exported"):
        remarks = add_tokenizer(writer, packed.path, shape.vocabulary)
    names = get_tensor_name_map(architecture, shape.layers)
    factors = _rope_factors(config, shape)
    if factors is not None:
        _announce(writer, "rope_freqs.weight", factors.shape, GGMLQuantizationType.F32)
    size = 0
    for entry in packed.entries:
        name = names.get_name(entry.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise OtaroError(f"{packed.path} cannot be exported: llama.cpp has no name for the tensor {entry.name}")
        if entry.floor is None:
            size += _announce(writer, name, entry.shape, GGMLQuantizationType.F32)
        else:
            width = max(precision, entry.floor)
            kind = block_type(width, entry.shape[-1], exact=exact or _rounds_badly(entry.name, width, shape))
            size += _announce(writer, f"{name}.weight", entry.shape, kind)
    check_room(out, size)
    writer.write_header_to_file()
    try:
        writer.write_kv_data_to_file()
    except (struct.error, OverflowError) as error:
        raise OtaroError(
            f"{packed.path} cannot be exported: its config or tokenizer has a number too large for GGUF's metadata"
        ) from error
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for number, (entry, content) in enumerate(packed.tensors(precision), 1):
        permuted = _permutation(architecture, entry.name, shape)
        rows = torch.arange(entry.shape[0]) if permuted is None else permuted
        if isinstance(content, Planes):
            width = precision if entry.floor is None else max(precision, entry.floor)
            whole = exact or _rounds_badly(entry.name, width, shape)
            data = _encode(content, rows, entry.shape[-1], width, packed.format, whole)
        else:
            data = content.to(torch.float32)[rows].numpy()
        writer.write_tensor_data(data)
        if progress is not None:
            progress(f"writing {out.name}", number, len(packed.entries))
    return remarks


def _rounds_badly(name: str, width: Precision, shape: Shape) -> bool:
    """Whether a matrix is written as F16 because its products suffer most from activations of 8 bits: values, where
    they are few because heads share them."""
    return ".v_proj" in name and shape.kv_heads < shape.heads and width < WIDEST


def _announce(writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    """Describe a tensor whose data come when all are described; their bytes."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    # The type of the values does not matter beside `raw_dtype`, as long as it is not that of bytes.
    size = math.prod(shape) // block * block_bytes
    writer.add_tensor_info(name, shape, numpy.dtype(numpy.float32), size, kind)
    return size


def _encode(
    planes: Planes, rows: Tensor, columns: int, width: Precision, format: Format, exact: bool
) -> NDArray[numpy.uint8]:
    """A matrix's rows, in the order asked for, as bytes of a GGUF file; by parts, as codes take far more memory."""
    block, block_bytes = GGML_QUANT_SIZES[block_type(width, columns, exact=exact)]
    data = numpy.empty((len(rows), columns // block * block_bytes), dtype=numpy.uint8)
    done = 0
    for part in rows.split(max(1, WEIGHTS_AT_ONCE // columns)):
        codes = unpack_rows(planes, part, columns, width, format)
        data[done : done + len(part)] = encode_blocks(codes, exact=exact).view(numpy.uint8)
        done += len(part)
    return data


def _check_metadata(folder: Path, config: Any, shape: Shape) -> None:
    """Refuse what llama.cpp has no metadata for in these architectures: it would run, and run something else."""
    window = min((window for window in shape.window if window > 0), default=config.max_position_embeddings)
    if window < config.max_position_embeddings:
        raise OtaroError(
            f"{folder} cannot be exported: its attention sees {window} tokens back, and llama.cpp lets "
            f"{config.model_type} see all; set max_position_embeddings to {window} in config.json if that is enough"
        )
    rope = config.rope_parameters.get("rope_type")
    if rope == "llama3" and ARCHITECTURES[config.model_type] != MODEL_ARCH.LLAMA:
        raise OtaroError(
            f"{folder} cannot be exported: llama.cpp has no rotary embeddings of type {rope} for {config.model_type}"
        )


def _name(architecture: MODEL_ARCH) -> str:
    from gguf import MODEL_ARCH_NAMES

    return str(MODEL_ARCH_NAMES[architecture])


def _add_description(
    writer: GGUFWriter, packed: PackedFolder, config: Any, shape: Shape, precision: Precision, exact: bool
) -> None:
    writer.add_name(f"{packed.described.get('source', packed.path.name)} {precision}")
    writer.add_file_type(FILE_TYPES[block_type(precision, shape.hidden, exact=exact)])
    writer.add_quantization_version(2)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dimension)
    writer.add_value_length(shape.head_dimension)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_rope_dimension_count(shape.head_dimension)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(shape.vocabulary)
    if config.rope_parameters.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])


def _rope_factors(config: Any, shape: Shape) -> NDArray[numpy.float32] | None:
    """Llama 3's slowed frequencies: what llama.cpp divides each of them by."""
    if config.rope_parameters.get("rope_type") != "llama3":
        return None
    theta = config.rope_parameters["rope_theta"]
    plain = [theta ** (-2 * i / shape.head_dimension) for i in range(shape.head_dimension // 2)]
    factors = [one / other for one, other in zip(plain, shape.rope_frequency, strict=True)]
    return numpy.array(factors, dtype=numpy.float32)


def _permutation(architecture: MODEL_ARCH, name: str, shape: Shape) -> Tensor | None:
    """llama.cpp rotates neighbouring dimensions of a Llama's heads, transformers those half a head apart."""
    if architecture != MODEL_ARCH.LLAMA:
        return None
    if ".q_proj" in name:
        heads = shape.heads
    elif ".k_proj" in name:
        heads = shape.kv_heads
    else:
        return None
    rows = torch.arange(heads * shape.head_dimension)
    return rows.view(heads, 2, shape.head_dimension // 2).transpose(1, 2).flatten()
