"""A llama2.c model as a GGUF file in float32: a small Llama with a SentencePiece tokenizer for `bench/agreement.py`.

    python bench/stories_gguf.py stories260K.bin tok512.bin stories260K.gguf

The checkpoint is of version 0: seven integers, then float32 tensors. The tokenizer's file has the longest length, then
score, length and text of each token.
"""

from __future__ import annotations

import argparse
import math
import struct
from pathlib import Path

import gguf
import numpy

SPECIAL = {
    0: ("<unk>", gguf.TokenType.UNKNOWN),
    1: ("<s>", gguf.TokenType.CONTROL),
    2: ("</s>", gguf.TokenType.CONTROL),
}


def add_tokens(writer: gguf.GGUFWriter, path: Path, count: int) -> None:
    data, place = path.read_bytes(), 4
    texts, scores, types = [], [], []
    for index in range(count):
        score, length = struct.unpack_from("<fi", data, place)
        text = data[place + 8 : place + 8 + length].decode()
        place += 8 + length
        kind = gguf.TokenType.BYTE if text.startswith("<0x") else gguf.TokenType.NORMAL
        text, kind = SPECIAL.get(index, (text.replace(" ", "\u2581"), kind))
        texts.append(text)
        scores.append(score)
        types.append(kind)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


def add_tensors(writer: gguf.GGUFWriter, values: numpy.ndarray, sizes: list[int], vocabulary: int) -> None:
    width, inner, layers, heads, shared = sizes
    narrow = width // heads * shared
    start = 0
    for name, shape in {
        "token_embd": (vocabulary, width),
        "attn_norm": (layers, width),
        "attn_q": (layers, width, width),
        "attn_k": (layers, narrow, width),
        "attn_v": (layers, narrow, width),
        "attn_output": (layers, width, width),
        "ffn_norm": (layers, width),
        "ffn_gate": (layers, inner, width),
        "ffn_down": (layers, width, inner),
        "ffn_up": (layers, inner, width),
        "output_norm": (width,),
    }.items():
        tensor = values[start : start + math.prod(shape)].reshape(shape)
        start += tensor.size
        if name in ("token_embd", "output_norm"):
            writer.add_tensor(f"{name}.weight", tensor)
        else:
            for number, weight in enumerate(tensor):
                writer.add_tensor(f"blk.{number}.{name}.weight", weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    data = arguments.checkpoint.read_bytes()
    *sizes, vocabulary, longest = struct.unpack("<7i", data[:28])
    if vocabulary <= 0:
        raise SystemExit(f"{arguments.checkpoint} has a head of its own, which is not supported")
    width, inner, layers, heads, shared = sizes
    writer = gguf.GGUFWriter(arguments.out, "llama")
    writer.add_name(arguments.out.stem)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(longest)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    add_tokens(writer, arguments.tokenizer, vocabulary)
    add_tensors(writer, numpy.frombuffer(data, numpy.float32, offset=28), sizes, vocabulary)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
