"""Small vocabularies whose tokens llama.cpp was asked for (`scripts/llama_cpp_tokens.py`), and GGUF files of them."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from otaro.sources.gguf_file import GgufFile
from otaro.sources.gguf_tokenizer import SPACE, read_tokenizer

EXPECTED = Path(__file__).with_name("llama_cpp_tokens.json")


def load_expected() -> dict[str, Any]:
    """What the script wrote: texts, vocabularies, files and the tokens of each text in each file."""
    expected: dict[str, Any] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return expected


def expected_ids(expected: dict[str, Any], name: str) -> list[list[int]]:
    """The tokens of all texts in one file, without any that are put before or behind."""
    file = expected["files"][name]
    return [ways[choice] for ways, choice in zip(expected["ids"][file["vocabulary"]], file["choices"], strict=True)]


def write_vocabulary(path: Path, vocabulary: dict[str, Any], metadata: dict[str, Any]) -> Path:
    """A GGUF file with a vocabulary and no weights; `metadata` are keys after `tokenizer.ggml.`, or whole ones."""
    write_metadata(path, lambda writer: add_vocabulary(writer, vocabulary, metadata))
    return path


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: dict[str, Any], metadata: dict[str, Any]) -> None:
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    if "merges" in vocabulary:
        writer.add_token_merges(vocabulary["merges"])
    for name, value in metadata.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)


def write_metadata(path: Path, add: Callable[[gguf.GGUFWriter], Any]) -> Any:
    """A GGUF file without weights; what `add` returns."""
    writer = gguf.GGUFWriter(path, "llama")
    added = add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return added


METASPACE = {"type": "Metaspace", "replacement": SPACE, "split": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
FOLDERS: dict[str, tuple[dict[str, Any], tuple[str, ...], bool]] = {
    "prepend": ({"normalizer": {"type": "Prepend", "prepend": SPACE}, "pre_tokenizer": None}, ("<s>", "A"), True),
    "metaspace first": ({"pre_tokenizer": {**METASPACE, "prepend_scheme": "first"}}, ("<s>", "A"), False),
    "metaspace always": ({"pre_tokenizer": {**METASPACE, "prepend_scheme": "always"}}, ("A",), False),
    "metaspace never": ({"pre_tokenizer": {**METASPACE, "prepend_scheme": "never"}}, ("<s>", "A", "</s>"), True),
    "bytes": ({"pre_tokenizer": BYTE_LEVEL}, ("A",), True),
    "bytes with a beginning": ({"pre_tokenizer": BYTE_LEVEL}, ("<s>", "A"), True),
    "bytes with an end": ({"pre_tokenizer": BYTE_LEVEL}, ("A", "</s>"), True),
    "normalized bytes": ({"normalizer": {"type": "NFC"}, "pre_tokenizer": BYTE_LEVEL}, ("<s>", "A"), False),
}
"""Tokenizers of model folders: what is special about each, what is put around a text, whether GGUF can say it all."""


def write_folder(folder: Path, name: str, expected: dict[str, Any]) -> Path:
    """A folder with a tokenizer.json as Hugging Face models have it, made of a vocabulary whose tokens are known."""
    changes, around, _ = FOLDERS[name]
    source = "llama" if "space" in name or name == "prepend" else "gpt2 gpt-2"
    file = expected["files"][source]
    path = write_vocabulary(folder / "made.gguf", expected["vocabularies"][file["vocabulary"]], file["metadata"])
    tokenizer = read_tokenizer(GgufFile(path)).tokenizer
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    if name == "prepend":
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        changes = {"normalizer": {"type": "Sequence", "normalizers": [changes["normalizer"], replace]}}
    described |= {"normalizer": None, **changes}
    pieces = [
        {"Sequence": {"id": "A", "type_id": 0}} if text == "A" else {"SpecialToken": {"id": text, "type_id": 0}}
        for text in around
    ]
    special = {text: {"id": text, "ids": [tokenizer.convert_tokens_to_ids(text)], "tokens": [text]} for text in around}
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pieces,
        "special_tokens": {text: entry for text, entry in special.items() if text != "A"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def plain(text: str, tokenizer: Any) -> bool:
    """Whether a text has nothing in it that a tokenizer may treat in a way of its own."""
    special = any(token in text for token in tokenizer.added_tokens_encoder)
    return text[:1] not in (" ", SPACE) and not special and unicodedata.is_normalized("NFC", text)


def write_model(path: Path, name: str, expected: dict[str, Any], **changes: Any) -> Path:
    """A GGUF file of a small model with random weights: Gemma 3 for its vocabulary, Llama for the others."""
    file = expected["files"][name]
    vocabulary = expected["vocabularies"][file["vocabulary"]]
    architecture = "gemma3" if name == "llama gemma" else "llama"
    sizes = {
        "vocab_size": len(vocabulary["tokens"]),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    config = Gemma3TextConfig(**sizes) if architecture == "gemma3" else LlamaConfig(**sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    state = model.state_dict()
    random = numpy.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(sizes["head_dim"])
    if architecture == "gemma3":
        writer.add_sliding_window(64)
    add_vocabulary(writer, vocabulary, {**file["metadata"], **changes})
    for target, origin in get_gguf_hf_weights_map(model, processor).items():
        if origin in state and origin not in model.all_tied_weights_keys:
            values = random.standard_normal(tuple(state[origin].shape), numpy.float32) * 0.05
            writer.add_tensor(target, values + (state[origin].dim() == 1 and architecture == "llama"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
