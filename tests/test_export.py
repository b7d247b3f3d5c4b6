"""GGUF twins hold the values of a width bit for bit, and all that llama.cpp needs to run them."""

from __future__ import annotations

import json
import shutil
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import architectures
import numpy
import pytest
import torch
from gguf import GGUFReader, dequantize
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM

import otaro
from otaro import sefp
from otaro.errors import FormatError, OtaroError
from otaro.export import export_gguf
from otaro.export.blocks import block_type, encode_blocks
from otaro.precision import Precision
from otaro.safetensors_file import SafetensorsFile
from otaro.sefp import Format

TYPES = {"E5M8": "F16", "E5M7": "F16", "E5M6": "Q8_0", "E5M5": "Q8_0", "E5M4": "Q5_1", "E5M3": "Q4_0"}


@pytest.mark.parametrize("exact", [False, True], ids=["default", "exact"])
@pytest.mark.parametrize("format", [Format(), Format(group_size=32)], ids=str)
@pytest.mark.parametrize("precision", list(Precision), ids=str)
def test_blocks_decode_to_the_same_bits(precision: Precision, format: Format, exact: bool) -> None:
    random = torch.Generator().manual_seed(2)
    weight = torch.randn(24, 192, generator=random) * 2.0 ** torch.randint(-13, 12, (24, 1), generator=random)
    weight[3, :64] = 0
    codes = sefp.encode(weight, precision, format)
    kind = block_type(precision, 192, exact=exact)
    assert kind.name == (TYPES[str(precision)] if not exact else "F32" if precision == Precision.E5M8 else "F16")
    values = dequantize(encode_blocks(codes, exact=exact).view(numpy.uint8), kind).astype(numpy.float32)
    expected = sefp.decode(codes).numpy()
    wanted = expected.astype(numpy.float16).astype(numpy.float32) if kind.name == "F16" else expected
    assert numpy.array_equal(values.reshape(expected.shape), wanted)
    assert numpy.array_equal(wanted, expected) == (exact or precision < Precision.E5M8)


def test_rows_that_are_no_multiple_of_a_block_become_float16() -> None:
    codes = sefp.encode(torch.randn(4, 40), Precision.E5M3, Format())
    assert block_type(Precision.E5M3, 40).name == "F16"
    assert numpy.array_equal(encode_blocks(codes).astype(numpy.float32), sefp.decode(codes).numpy())


def test_a_value_beyond_float16_is_refused() -> None:
    codes = sefp.encode(torch.full((1, 40), -81920.0), Precision.E5M3, Format())
    with pytest.raises(OtaroError, match="65520"):
        encode_blocks(codes)


ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_every_tensor_of_a_twin_has_the_model_s_values(name: str, packed_llama: Path, tmp_path: Path) -> None:
    config = architectures.config(name)
    config.hidden_size, config.intermediate_size, config.vocab_size = 64, 96, 259
    if name == "llama":
        config.rope_parameters = ROPE
        config.attention_bias = True
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for path in packed_llama.glob("tokenizer*"):
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    otaro.pack(tmp_path / "model", tmp_path / "packed")
    twin = export_gguf(tmp_path / "packed", tmp_path / "twin.gguf", "E5M4")

    reader = GGUFReader(twin)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    state = values_at(tmp_path / "packed", Precision.E5M4)
    for old, new in (("self_attn.q_proj", "attn_q"), ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm")):
        expected = state[f"model.layers.1.{old}.weight"].numpy()
        if new == "attn_q" and name == "llama":
            heads = config.num_attention_heads
            expected = expected.reshape(heads, 2, -1, expected.shape[-1]).swapaxes(1, 2).reshape(expected.shape)
        tensor = tensors[f"blk.1.{new}.weight"]
        assert numpy.array_equal(dequantize(tensor.data, tensor.tensor_type).reshape(expected.shape), expected)
    # Heads share values, whose products llama.cpp must not compute with activations of 8 bits.
    values = tensors["blk.1.attn_v.weight"]
    expected = state["model.layers.1.self_attn.v_proj.weight"].numpy()
    assert values.tensor_type.name == "F16"
    assert numpy.array_equal(values.data.astype(numpy.float32), expected)
    assert tensors["blk.1.attn_q.weight"].tensor_type.name == "Q5_1"
    assert len(tensors) == len(otaro.checkpoint.PackedFolder(tmp_path / "packed").entries) + (name == "llama")
    if name == "llama":
        factors = tensors["rope_freqs.weight"].data
        assert 1 <= factors[0] < factors[-1]
        assert factors[-1] == pytest.approx(4.0)
    assert field(reader, "general.architecture") == name
    assert field(reader, f"{name}.block_count") == config.num_hidden_layers
    assert field(reader, f"{name}.attention.head_count_kv") == config.num_key_value_heads
    assert field(reader, "tokenizer.ggml.model") == "gpt2"
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == 259


def values_at(folder: Path, precision: Precision) -> dict[str, torch.Tensor]:
    """Every weight of a packed model, decoded."""
    model = otaro.load(folder, precision)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, otaro.nn.SefpWeight):
            values[f"{name}.weight"] = module.dequantize()
    return values


def field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def test_what_cannot_be_exported_leaves_nothing_behind(packed_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "twin.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(OtaroError, match="exists already"):
        export_gguf(packed_llama, out, "E5M4")
    assert out.read_bytes() == b"mine"
    with pytest.raises(OtaroError, match="no folder"):
        export_gguf(packed_llama, tmp_path / "none" / "twin.gguf", "E5M4")
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in packed_llama.iterdir():
        if not path.name.startswith("tokenizer"):
            (bare / path.name).write_bytes(path.read_bytes())
    with pytest.raises(OtaroError, match="holds no tokenizer that can be read"):
        export_gguf(bare, tmp_path / "other.gguf", "E5M4")
    assert {path.name for path in tmp_path.iterdir()} == {"twin.gguf", "bare"}


def test_the_largest_steps_are_refused_where_a_block_cannot_hold_them() -> None:
    codes = sefp.encode(torch.full((1, 64), 65000.0), Precision.E5M4)
    with pytest.raises(FormatError, match="wider"):
        encode_blocks(codes)


def exported(config: Any, packed_llama: Path, folder: Path) -> Path:
    """The twin of a random model with the tiny tokenizer."""
    config.hidden_size, config.intermediate_size, config.vocab_size = 64, 96, 259
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    for path in packed_llama.glob("tokenizer*"):
        (folder / "model" / path.name).write_bytes(path.read_bytes())
    otaro.pack(folder / "model", folder / "packed")
    return export_gguf(folder / "packed", folder / "twin.gguf", "E5M4")


def test_a_window_is_refused_where_it_would_be_lost(packed_llama: Path, tmp_path: Path) -> None:
    config = architectures.config("mistral")
    config.sliding_window = config.max_position_embeddings // 2
    with pytest.raises(OtaroError, match="sees 32 tokens back, and llama.cpp lets mistral see all"):
        exported(config, packed_llama, tmp_path)
    assert not (tmp_path / "twin.gguf").exists()
    whole = tmp_path / "whole"
    whole.mkdir()
    config.sliding_window = config.max_position_embeddings
    assert exported(config, packed_llama, whole).exists()


def test_rotary_embeddings_are_refused_where_they_would_be_lost(packed_llama: Path, tmp_path: Path) -> None:
    config = architectures.config("qwen3")
    config.rope_parameters = ROPE
    with pytest.raises(OtaroError, match="no rotary embeddings of type llama3 for qwen3"):
        exported(config, packed_llama, tmp_path)


@pytest.mark.parametrize("settings", [{"max_position_embeddings": 2**32}, {"rope_theta": 1e39}], ids=str)
def test_numbers_that_do_not_fit_the_metadata_are_refused(
    packed_llama: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = architectures.config("llama")
    config.rope_parameters["rope_theta"] = settings.get("rope_theta", 10000.0)
    config.max_position_embeddings = settings.get("max_position_embeddings", 64)
    with pytest.raises(OtaroError, match="has a number too large for GGUF's metadata"):
        exported(config, packed_llama, tmp_path)
    assert not (tmp_path / "twin.gguf").exists()


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


@pytest.mark.parametrize(
    "pre_tokenizer, name",
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "gpt-2"),
        (
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
            "smollm",
        ),
        (split(WORDS + r"\p{N}{1,3}" + REST), "dbrx"),
        (split(WORDS + r"\p{N}" + REST), "qwen2"),
        (split(WORDS + r"\p{N}{1,2}" + REST), None),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        (pre_tokenizers.Whitespace(), None),
        (None, None),
    ],
    ids=str,
)
def test_only_known_ways_of_cutting_words_are_exported(
    packed_llama: Path, tmp_path: Path, pre_tokenizer: Any, name: str | None
) -> None:
    folder = tmp_path / "packed"
    shutil.copytree(packed_llama, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.save(str(folder / "tokenizer.json"))
    else:
        described = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**described, "pre_tokenizer": None}))
    out = tmp_path / "twin.gguf"
    if name is None:
        with pytest.raises(OtaroError, match="cuts texts into words in a way that llama.cpp has no name for"):
            export_gguf(folder, out, "E5M3")
        assert list(tmp_path.iterdir()) == [folder]
    else:
        assert field(GGUFReader(export_gguf(folder, out, "E5M3")), "tokenizer.ggml.pre") == name


def test_memory_holds_a_tensor_at_a_time(packed_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = architectures.config("llama")
    config.hidden_size, config.intermediate_size, config.vocab_size, config.num_hidden_layers = 256, 512, 259, 10
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for path in packed_llama.glob("tokenizer*"):
        shutil.copyfile(path, tmp_path / "model" / path.name)
    otaro.pack(tmp_path / "model", tmp_path / "packed")
    original, held = SafetensorsFile.read, [0, 0]  # bytes of planes in memory: now, and at most

    def count(change: int) -> None:
        held[0] += change
        held[1] = max(held)

    def read(file: SafetensorsFile, name: str) -> torch.Tensor:
        tensor = original(file, name)
        count(tensor.nbytes)
        weakref.finalize(tensor, count, -tensor.nbytes)
        return tensor

    monkeypatch.setattr(SafetensorsFile, "read", read)
    tracemalloc.start()  # NumPy tells it what the file's own data take
    try:
        twin = export_gguf(tmp_path / "packed", tmp_path / "twin.gguf", "E5M8")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = twin.stat().st_size
    assert held[1] < size / 16
    assert peak < size / 4
