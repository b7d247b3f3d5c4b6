"""What a model is tuned on: text and conversations, as blocks of tokens. docs/tuning.md says what records may hold.

Text is learned whole. Of requests and conversations the answers have labels, and what they answer has none: it is read
but not predicted, unless :func:`learn_prompts` gives it labels too. Pieces with and without labels are tokenised
apart, as they are when the model is used. An example begins with the token for the beginning (BOS) if the model wants
it there, and ends with the one for the end (EOS).

Examples are either packed, one after the other with an end token between them, and cut into blocks of the same length,
or padded, one to a sequence. Packing wastes nothing; a rest shorter than a block is left out.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from otaro.console import decode_text
from otaro.errors import OtaroError
from otaro.evaluate.perplexity import split_windows
from otaro.tokenizer import TemplateError, beginning, encode, encode_all, write_chat

IGNORED = -100
"""The label of a token that is not predicted, as transformers has it."""
TEXTS_AT_ONCE = 512
"""Texts that the tokenizer gets in one call."""
LOOKED_AT = 1000
Layout = Literal["packed", "padded"]
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
FILE_SUFFIXES = (*JSONL_SUFFIXES, ".txt", ".md", ".text", ".raw", ".tokens", ".csv", ".parquet")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
ALPACA_HEAD = "Below is an instruction that describes a task"
FORMS = "a text, an instruction with its output, or messages"
Example = list[tuple[str, bool]]
"""Pieces of text in order, each with whether it is learned; none if there is nothing to learn."""


class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences ready for the Trainer; `left_out` counts examples without an answer or whose answer did not fit."""

    def __init__(self, ids: list[list[int]], labels: list[list[int]], left_out: int = 0) -> None:
        self.ids = ids
        self.labels = labels
        self.left_out = left_out

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor(self.ids[index]), "labels": torch.tensor(self.labels[index])}

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    @property
    def highest(self) -> int:
        """The token with the highest number."""
        return max((max(ids) for ids in self.ids if ids), default=0)

    @property
    def prompt_tokens(self) -> int:
        """Tokens without a label."""
        return sum(labels.count(IGNORED) for labels in self.labels)


def load_blocks(
    sources: Sequence[str | Path], tokenizer: Any, length: int, *, longest: int | None = None, layout: Layout = "packed"
) -> Blocks:
    """The sequences of all sources in order, at most `length` tokens each; `longest` is what the model can read."""
    if length < 2:
        raise OtaroError(f"sequences of {length} tokens predict nothing: choose at least 2")
    if longest is not None and length > longest:
        raise OtaroError(f"sequences of {length} tokens are longer than the model's {longest} positions: choose fewer")
    named = " and ".join(str(source) for source in sources)
    examples = [example for source in sources for example in read_examples(source, tokenizer)]
    tokens = _tokens([example for example in examples if example], tokenizer)
    if sum(len(ids) for ids, _ in tokens) < 2:
        raise OtaroError(f"{named} holds no text to tune on: give a file with some")
    blocks = _pack(tokens, length, named) if layout == "packed" else _one_each(tokens, length)
    if not len(blocks):
        raise OtaroError(f"no answer in {named} lies within a sequence of {length} tokens: choose longer sequences")
    blocks.left_out += len(examples) - len(tokens)
    return blocks


def lengths(sequences: Any) -> list[int]:
    """Tokens of up to LOOKED_AT sequences of a data set; none of a stream, which has no length to look through.

    A data set is anything the Trainer takes.
    """
    try:
        count = len(sequences)
    except TypeError:
        return []
    looked_at = range(0, count, -(-count // LOOKED_AT)) if count else range(0)
    return [len(sequences[index]["input_ids"]) for index in looked_at]


def text_blocks(token_ids: Tensor, length: int) -> Blocks:
    """A text to be measured on, in the windows that perplexity is measured in."""
    ids = split_windows(token_ids, length).tolist()
    return Blocks(ids, ids)


def _pack(tokens: Sequence[tuple[list[int], list[int]]], length: int, named: str) -> Blocks:
    ids, labels = (
        numpy.concatenate([numpy.array(part, numpy.int64) for part in parts]) for parts in zip(*tokens, strict=True)
    )
    count = len(ids) // length
    if count == 0:
        raise OtaroError(
            f"{named} holds {len(ids)} tokens, fewer than one sequence of {length}: give more text or "
            "choose shorter sequences"
        )
    ids, labels = (whole[: count * length].reshape(count, length) for whole in (ids, labels))
    # A block without an answer in it would give no loss; it is left out where prompts are learned, too.
    kept = (labels[:, 1:] != IGNORED).any(1)
    return Blocks(ids[kept].tolist(), labels[kept].tolist(), count - int(kept.sum()))


def _one_each(tokens: Iterable[tuple[list[int], list[int]]], length: int) -> Blocks:
    all_ids, all_labels, left_out = [], [], 0
    for ids, labels in tokens:
        # Text that is longer goes on in the next sequence; of a conversation the rest is cut off.
        whole = IGNORED not in labels
        for start in range(0, len(ids) if whole else 1, length):
            part = slice(start, start + length)
            if any(label != IGNORED for label in labels[part][1:]):
                all_ids.append(ids[part])
                all_labels.append(labels[part])
            elif not whole:
                left_out += 1
    return Blocks(all_ids, all_labels, left_out)


@dataclass(frozen=True)
class Collator:
    """Puts sequences into a batch, shorter ones padded at the end; padding is neither read nor predicted."""

    padding: int

    def __call__(self, sequences: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        rows = {name: [sequence[name] for sequence in sequences] for name in ("input_ids", "labels")}
        if len({len(ids) for ids in rows["input_ids"]}) > 1:  # without a mask, attention takes its fastest way
            rows["attention_mask"] = [torch.ones_like(ids) for ids in rows["input_ids"]]
        padding = {"input_ids": self.padding, "labels": IGNORED, "attention_mask": 0}
        return {name: pad_sequence(parts, True, padding[name]) for name, parts in rows.items()}


def learn_prompts(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch in which prompts, what has no label and is no padding, are learned too."""
    if "labels" not in batch:
        return batch
    prompt = batch["labels"] == IGNORED
    mask = batch.get("attention_mask")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != prompt.shape:
            raise OtaroError(
                "the collator's attention mask does not say which tokens are padding, so prompts cannot be told from "
                "it: give one of the shape of the labels, or set completion_only to True"
            )
        prompt &= mask.bool()
    return {**batch, "labels": torch.where(prompt, batch["input_ids"], batch["labels"])}


def make_collator(tokenizer: Any) -> Collator:
    """Pads with the tokenizer's padding token, or any other: padded positions are masked."""
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Collator(0 if padding is None else int(padding))


def read_examples(source: str | Path, tokenizer: Any) -> Iterator[Example]:
    """The examples of one source."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() in JSONL_SUFFIXES:
            for where, record in _read_jsonl(path):
                yield make_example(record, tokenizer, where)
        else:
            text = _read_text(path)
            yield [(text + (tokenizer.eos_token or "") if text.strip() else "", True)]
        return
    for number, record in enumerate(_open_data_set(source, path), 1):
        yield make_example(record, tokenizer, f"{source}, record {number}")


def make_example(record: Any, tokenizer: Any, where: str) -> Example:
    """A record as pieces of text; `where` names it in errors."""
    if not isinstance(record, dict):
        raise OtaroError(f"{where} is not a JSON object: each record is {FORMS}")
    end = tokenizer.eos_token or ""
    if record.get("messages") is not None:
        return _conversation(record["messages"], tokenizer, where)
    if record.get("instruction") is not None:
        request, given, answer = (_string(record, name, where) for name in ("instruction", "input", "output"))
        if record.get("output") is None:
            raise OtaroError(f"{where} has an instruction without an output: add the answer or take the record out")
        if not answer.strip():
            return []  # known data sets have a few; there is nothing to learn from them
        if tokenizer.chat_template is None:
            return [(alpaca_prompt(request, given), False), (answer + end, True)]
        content = f"{request}\n\n{given}" if given else request
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        return _conversation(messages, tokenizer, where)
    if record.get("text") is not None:
        return [(_string(record, "text", where).removeprefix("\ufeff") + end, True)]
    raise OtaroError(f"{where} has none of the fields text, instruction or messages: each record is {FORMS}")


def alpaca_prompt(instruction: str, given: str) -> str:
    """A request as the Alpaca models were trained on it, for models without a chat template."""
    if given:
        head = f"{ALPACA_HEAD}, paired with an input that provides further context."
        request = f"### Instruction:\n{instruction}\n\n### Input:\n{given}"
    else:
        head, request = f"{ALPACA_HEAD}.", f"### Instruction:\n{instruction}"
    return f"{head} Write a response that appropriately completes the request.\n\n{request}\n\n### Response:\n"


def _conversation(messages: Any, tokenizer: Any, where: str) -> Example:
    """What the template writes, the assistant's turns marked as learned."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise OtaroError(f"{where} has messages that are no list of objects with role and content")
    if tokenizer.chat_template is None:
        raise OtaroError(f"{where} is a conversation, but the model has no chat template: give text or instructions")
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise OtaroError(f"{where} is a conversation without an answer: one message must have the role assistant")

    def write(count: int, ask: bool) -> str:
        try:
            return write_chat(tokenizer, messages[:count], add_generation_prompt=ask)
        except TemplateError as error:
            raise OtaroError(f"{where} cannot be written as a conversation: {error}") from error

    pieces: Example = []
    written = ""
    for turn in turns:
        asked, answered = write(turn, ask=True), write(turn + 1, ask=False)
        if not asked.startswith(written) or not answered.startswith(asked):
            # The template rewrites earlier turns once a later one is there: only the last answer is as it will be.
            turn = turns[-1]
            asked, answered = write(turn, ask=True), write(turn + 1, ask=False)
            if not answered.startswith(asked):
                raise OtaroError(f"{where}: the chat template does not end a prompt where the answer begins")
            return [(asked, False), (answered[len(asked) :], True)]
        pieces += [(asked[len(written) :], False), (answered[len(asked) :], True)]
        written = answered
    return pieces


def _tokens(examples: Sequence[Example], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each example."""
    written = [[piece for piece in example if piece[0]] for example in examples]
    begin, line = beginning(tokenizer), encode(tokenizer, "\n")
    # A tokenizer may put a space before a text, but what goes on from another text must not get one: behind a new line
    # it has none.
    head = "" if encode(tokenizer, "\na") == line + encode(tokenizer, "a") else "\n"
    texts = [head + text if number else text for example in written for number, (text, _) in enumerate(example)]
    encoded = (
        ids
        for start in range(0, len(texts), TEXTS_AT_ONCE)
        for ids in encode_all(tokenizer, texts[start : start + TEXTS_AT_ONCE])
    )
    result = []
    for example in written:
        ids: list[int] = []
        labels: list[int] = []
        for number, (_, learned) in enumerate(example):
            piece = next(encoded)
            if number == 0:
                piece = piece if piece[: len(begin)] == begin else begin + piece
            elif head:
                piece = piece[len(line) :]
            ids += piece
            labels += piece if learned else [IGNORED] * len(piece)
        result.append((ids, labels))
    return result


def _string(record: dict[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise OtaroError(f"{where} has a field {name} that is no text")
    return value


def _read_text(path: Path) -> str:
    return decode_text(path.read_bytes(), str(path))


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """Records, and what each is called in errors."""
    text = _read_text(path)
    if text.lstrip().startswith("["):
        # Alpaca itself is published as one JSON array.
        try:
            records = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise OtaroError(f"{path} is not readable JSON: {error}") from error
        yield from ((f"{path}, record {number}", record) for number, record in enumerate(records, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise OtaroError(f"{path}, line {number} is not readable JSON: {error}") from error


def _open_data_set(source: str | Path, path: Path) -> Iterable[Any]:
    """The training records of a folder or hub data set; ``name:configuration`` chooses one of several."""
    is_name = HUB_NAME.fullmatch(str(source)) is not None and path.suffix.lower() not in FILE_SUFFIXES
    if not path.is_dir() and not is_name:
        raise OtaroError(f"there is no file or folder {source}: check the name")
    if find_spec("datasets") is None:
        raise OtaroError(
            f"{source} is not a file: folders and hub data sets need pip install 'otaro-llm[tune]', or give a file"
        )
    datasets: Any = importlib.import_module("datasets")
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            data = datasets.load_from_disk(str(path))
        else:
            name, _, configuration = (str(path), "", "") if path.is_dir() else str(source).partition(":")
            data = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # the library and the hub may fail in any way
        raise OtaroError(f"{source} is no file here and could not be opened as a data set: {error}") from error
    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            raise OtaroError(f"the data set {source} has no split named train, only {', '.join(data)}")
        data = data["train"]
    records: Iterable[Any] = data
    return records
