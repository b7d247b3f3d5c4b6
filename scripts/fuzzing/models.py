"""Models as small as it gets, of the kinds that run through different code: folders, the same packed, GGUF files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

CONTEXT = 400
VOCABULARY = 300
SOURCES, PACKED, FILES = "sources", "packed", "files"
TEXT = "Once upon a time there was a text of a few words, and that is all there was to it.\n"
CONVERSATION = (
    '{"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho! A b c d e."}]}\n'
)
TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}{{ '<sys>' + messages[0]['content'] | trim }}\n"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('only users and assistants speak here') }}{% endif %}"
    "<{{ message.role }}>{% generation %}{{ message['content'] }}{% endgeneration %}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_models(place: Path) -> None:
    """Everything that rounds begin with, in folders of `place`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    import otaro
    from otaro.export import export_gguf
    from otaro.sefp import Format

    logging.disable_progress_bar()
    for kind in (SOURCES, PACKED, FILES):
        (place / kind).mkdir()
    sizes: dict[str, Any] = {
        **{"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    }
    llama3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 16
    experts = {"num_local_experts": 2, "head_dim": 12}
    plain = {"n_embd": 24, "n_inner": 40, "n_layer": 1, "n_head": 2, "n_positions": CONTEXT, "vocab_size": VOCABULARY}
    kinds: dict[str, tuple[str, dict[str, Any], Format]] = {
        "llama": ("llama", {"attention_bias": True, "mlp_bias": True}, Format()),
        "llama3": ("llama", {"rope_parameters": llama3, "tie_word_embeddings": True}, Format(group_size=32)),
        "mistral": ("mistral", {"sliding_window": 5, "head_dim": 20}, Format(group_size=256)),
        "qwen3": ("qwen3", {"head_dim": 12, "num_hidden_layers": 2}, Format()),
        "mixtral": ("mixtral", experts, Format(scheme="nearest")),
        "gpt2": ("gpt2", plain, Format()),
    }
    tokenizers = make_tokenizers()
    for number, (name, (kind, options, format)) in enumerate(kinds.items()):
        torch.manual_seed(0)
        source = place / SOURCES / name
        config = AutoConfig.for_model(kind, **{**sizes, **options})
        dtype = torch.bfloat16 if name == "llama3" else torch.float32
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        model.save_pretrained(source, max_shard_size="20KB" if name in ("llama", "mixtral") else "5GB")
        tokenizers[number % len(tokenizers)].save_pretrained(source)
        otaro.pack(source, place / PACKED / name, format=format, max_shard_size=20_000 if name == "gpt2" else 10**9)
    for name, width in (("llama", "E5M8"), ("llama3", "E5M4"), ("qwen3", "E5M3")):
        export_gguf(place / PACKED / name, place / FILES / f"{name}.gguf", width)
    (place / "text.txt").write_text(TEXT)
    (place / "chat.jsonl").write_text(CONVERSATION * 4)


def make_tokenizers() -> list[Any]:
    """Byte-level ones that cut words in two ways, and one of pieces with byte fallback."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("e", "r")]
    words = {text: number for number, text in enumerate([*letters, *("".join(pair) for pair in merges)])}
    cut = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    cut += r"|\s+(?!\S)|\s+"
    by_byte = []
    for expression in (None, cut):
        tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges))
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
        parts = [] if expression is None else [pre_tokenizers.Split(Regex(expression), "isolated")]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, level]) if parts else level
        tokenizer.decoder = decoders.ByteLevel()
        by_byte.append(tokenizer)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "th", "the"]
    fallback = Tokenizer(
        models.BPE(
            vocab={text: number for number, text in enumerate(pieces)},
            merges=[("t", "h"), ("th", "e")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    fallback.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = []
    for tokenizer in (*by_byte, fallback):
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
        fast.add_special_tokens({"eos_token": AddedToken("</s>" if tokenizer is fallback else "<end>", special=True)})
        fast.add_tokens(["<user>", AddedToken("<assistant>", lstrip=True, normalized=False)])
        fast.chat_template = TEMPLATE
        made.append(fast)
    return made


def copy_model(place: Path, kind: str, name: str) -> Path:
    """A fresh copy to spoil."""
    work = place / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    original = place / kind / name
    if original.is_dir():
        return Path(shutil.copytree(original, work / name))
    return Path(shutil.copyfile(original, work / name))
