"""GGUF files in `otaro eval` and in llama.cpp: the same tokens, the same perplexity, the same greedy text.

    python bench/agreement.py FILE.gguf … --text TEXT [--float32] [--windows 16] [--json bench/agreement.json]

Of each file: the text's tokens here and in llama.cpp; perplexity in full precision as `otaro eval FILE.gguf` prints it,
and from llama.cpp's logits in the same windows; and greedy continuations of a few beginnings, compared token by token
wherever the two likeliest are not closer than `--tie` in logits. Needs llama-cpp-python. Where weights are quantised
llama.cpp rounds activations to 8 bits; `--float32` compares a copy of each file with the same values in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import torch

from otaro.bench.llama_cpp import LlamaCpp
from otaro.cli import main as otaro
from otaro.evaluate.model import open_subject
from otaro.evaluate.perplexity import split_windows, text_tokens
from otaro.tokenizer import beginning, encode, encode_prompt

PROMPTS = [
    "Once upon a time",
    "One day, Tom and Lily went to the park",
    "The capital of France is",
    "  Two spaces before this",
    "There was a big dog. It was called",
    'Mom said, "',
    "In 1969, the first",
    "A recipe for bread:\n\n1.",
]


@dataclass
class Agreement:
    """`continued` are the greedy tokens compared after each prompt, of which `differing` were not the same."""

    file: str
    tokens: int
    tokens_differing: int
    beginning: bool
    windows: int
    perplexity: float
    perplexity_llama_cpp: float
    difference: float
    continued: list[int]
    differing: int


def own_perplexity(path: Path, text: Path, window: int, windows: int) -> float:
    """What the command measures in full precision."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        options = ["--window", str(window), "--max-windows", str(windows), "--precisions", "E5M8", "--json", str(out)]
        if otaro(["eval", str(path), "--text", str(text), "--device", "cpu", *options]) != 0:
            raise SystemExit(1)
        figures = json.loads(out.read_text())["results"]
    return next(float(row["perplexity"]) for row in figures if row["precision"] == "full")


def peer_perplexity(peer: LlamaCpp, windows: torch.Tensor) -> float:
    losses = [
        torch.nn.functional.cross_entropy(torch.from_numpy(peer.logits(ids.tolist()))[:-1].double(), ids[1:])
        for ids in windows
    ]
    return math.exp(float(torch.stack(losses).mean()))


@torch.inference_mode()
def compare_greedy(
    model: torch.nn.Module, peer: LlamaCpp, prompt: list[int], count: int, tie: float
) -> tuple[int, int]:
    """How many of the next tokens were compared, and how many differed; both go on with the token found here."""
    ids, place = list(prompt), 0
    compared = differing = 0
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        chosen = int(logits.argmax())
        other = peer.run(ids[place:], place)
        place = len(ids)
        if best - second >= tie:
            compared += 1
            differing += other != chosen
        ids.append(chosen)
    return compared, differing


def float32_copy(path: Path, out: Path) -> Path:
    """The same model with its weights written out."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, *item = field.types
        writer.add_key_value(name, field.contents(), kind, item[-1] if item else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.reshape(tensor.shape[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def compare(path: Path, text: str, arguments: argparse.Namespace) -> Agreement:
    subject = open_subject(str(path), "E5M8", torch.device("cpu"))
    subject.backend.set_width(None)  # full precision
    peer = LlamaCpp(path, context=arguments.window, threads=arguments.threads)
    own, theirs = encode(subject.tokenizer, text), peer.encode(text)
    length = max(len(own), len(theirs))
    windows = split_windows(text_tokens(subject.tokenizer, text, arguments.window), arguments.window)
    windows = windows[: arguments.windows]
    expected = peer_perplexity(peer, windows)
    continued, differing = [], 0
    for prompt in PROMPTS:
        ids = encode_prompt(subject.tokenizer, prompt)
        tokens, others = compare_greedy(subject.backend.model, peer, ids, arguments.new_tokens, arguments.tie)
        continued.append(tokens)
        differing += others
    peer.close()
    found = own_perplexity(path, arguments.text, arguments.window, len(windows))
    return Agreement(
        file=path.name,
        tokens=length,
        tokens_differing=length - sum(one == other for one, other in zip(own, theirs, strict=False)),
        beginning=bool(beginning(subject.tokenizer)),
        windows=len(windows),
        perplexity=found,
        perplexity_llama_cpp=expected,
        difference=found / expected - 1,
        continued=continued,
        differing=differing,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--float32", action="store_true", help="compare copies with float32 weights")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--tie", type=float, default=0.05)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text = arguments.text.read_text(encoding="utf-8")
    results = []
    for path in arguments.files:
        with tempfile.TemporaryDirectory() as folder:
            name = path.name.removesuffix(".gguf")
            compared = float32_copy(path, Path(folder) / f"{name}-F32.gguf") if arguments.float32 else path
            found = compare(compared, text, arguments)
        print(
            f"{found.file}: {found.tokens_differing} of {found.tokens} tokens differ; "
            f"perplexity {found.perplexity:.4f}, "
            f"{found.perplexity_llama_cpp:.4f} in llama.cpp ({found.difference:+.4%}); "
            f"{found.differing} of {sum(found.continued)} greedy tokens differ"
        )
        results.append(asdict(found))
    if arguments.json is not None:
        facts = {"text": arguments.text.name, "window": arguments.window, "tie": arguments.tie, "prompts": PROMPTS}
        if arguments.json.exists():
            results = json.loads(arguments.json.read_text())["results"] + results
        arguments.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
