"""Log probabilities of tokens in the two forms that OpenAI's API has: one for chats, an older one for completions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from otaro.engine.scheduler import Token
from otaro.text import UNFINISHED
from otaro.tokenizer import decode, encode

LEAST = -9999.0
"""What stands for a probability of nothing, as JSON has no infinity."""


class TokenTexts:
    """The text of single tokens, as they stand within a text: SentencePiece drops a space where one begins."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before = encode(tokenizer, "a")[-1:]
        self._length = len(decode(tokenizer, self._before, special=True))
        self.text = lru_cache(1 << 16)(self._text)

    def _text(self, token: int) -> str:
        return decode(self._tokenizer, [*self._before, token], special=True)[self._length :]

    # ---- chats

    def chat(self, tokens: Iterable[Token]) -> dict[str, Any]:
        content = [
            {**self._entry(token.id, token.logprob), "top_logprobs": [self._entry(*entry) for entry in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.text(token)
        # A token that is part of a character has no text; what its bytes are, the tokenizer does not say.
        return {
            "token": text,
            "logprob": rounded(logprob),
            "bytes": None if UNFINISHED in text else list(text.encode()),
        }

    # ---- completions

    def completion(self, tokens: Iterable[Token], offset: int, top: int) -> dict[str, Any]:
        """`offset` is where the text of the tokens begins."""
        texts, offsets, values, tops = [], [], [], []
        for token in tokens:
            texts.append(self.text(token.id))
            offsets.append(offset)
            offset += len(texts[-1])
            values.append(rounded(token.logprob))
            best: dict[str, float | None] = {}
            for id, logprob in token.top:
                best.setdefault(self.text(id), rounded(logprob))
            tops.append(best if top and token.logprob is not None else None)
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops if top else None,
            "text_offset": offsets,
        }


def rounded(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
