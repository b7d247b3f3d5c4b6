"""Text from a packed model that transformers runs, piece by piece as it is made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from otaro.errors import OtaroError, foreign_code
from otaro.generation.request import Request
from otaro.model_config import check_tokens, context_length
from otaro.precision import Precision
from otaro.text import NO_TOKENS, GenerationResult, TextStream, check_room, end_tokens


class TransformersRunner:
    """transformers' own code with packed layers."""

    def __init__(self, model: Any, tokenizer: Any, context: int | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        # Of the folder's settings for generation, as in the native engine, only what ends an answer counts: others
        # could ask for any number of beams, or for code from the hub.
        self.model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
        self.longest_context = context_length(model)
        if context is not None and context > self.longest_context:
            raise OtaroError(
                f"a context of {context} tokens is not possible: the model's own is {self.longest_context}"
            )
        self.context = context or self.longest_context

    @property
    def precision(self) -> Precision:
        precision: Precision = self.model.precision
        return precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self.model.set_precision(precision)

    @property
    def width(self) -> Precision:
        return self.precision

    @property
    def memory(self) -> int:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def generate(
        self,
        prompt: Sequence[int],
        request: Request,
        on_text: Callable[[str], None] | None = None,
        on_width: Callable[[Precision], None] | None = None,
    ) -> GenerationResult:
        for name in ("prefill", "draft"):
            if getattr(request, name) is not None:
                raise OtaroError(f"--{name} needs the native engine, which does not run this model")
        sampling = request.sampling
        settings: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            settings = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
            }
        if on_width is not None:
            on_width(self.width)
        return continue_tokens(
            self.model,
            self.tokenizer,
            torch.tensor([list(prompt)]),
            max_new_tokens=request.limit(self.context - len(prompt)),
            context=self.context,
            settings={**settings, "repetition_penalty": sampling.repetition_penalty},
            seed=sampling.seed,
            stop=request.stop,
            on_text=on_text,
        )

    def check_loading(self) -> None:
        """All has been read before the first token."""


def _check_finite(ids: Tensor, scores: Tensor) -> Tensor:
    """The scores as they are: one that is no number would make any token the likeliest."""
    if bool(torch.isnan(scores).any()) or bool(torch.isposinf(scores).any()):
        raise OtaroError("the model's logits are not finite: its weights are broken")
    return scores


@torch.inference_mode()
def continue_tokens(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    *,
    max_new_tokens: int,
    context: int | None = None,
    settings: dict[str, Any],
    seed: int | None = None,
    stop: Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
) -> GenerationResult:
    """Go on from tokens, [1, tokens], until one of the `stop` strings; `settings` go to transformers' generate.

    `context` is how many tokens there may be in all; what the model allows if left out.
    """
    ids = ids.to(model.device)
    context = context or context_length(model)
    check_room(ids.shape[1], max_new_tokens, context)
    if ids.shape[1] == 0:
        raise OtaroError(NO_TOKENS)
    check_tokens(model, int(ids.max()))
    ends = end_tokens(tokenizer, model.generation_config.eos_token_id)
    streamer = _Streamer(tokenizer, stop, on_text)
    if stop:
        settings = {**settings, "stop_strings": list(stop), "tokenizer": tokenizer}
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        start = time.perf_counter()
        with streamer.callers_errors(), foreign_code("transformers cannot go on from this prompt"):
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                streamer=streamer,
                logits_processor=[_check_finite],
                **settings,
            )
    seconds = time.perf_counter() - start
    first_token_seconds = streamer.first_token_time - start
    decoding = seconds - first_token_seconds
    return GenerationResult(
        text="".join(streamer.pieces),
        tokens=streamer.tokens,
        seconds=seconds,
        tokens_per_second=(streamer.tokens - 1) / decoding if streamer.tokens > 1 else 1 / seconds,
        first_token_seconds=first_token_seconds,
        width=model.precision,
        widths={model.precision: streamer.tokens},
    )


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Hands over each piece of text, and notes when the first token came and how many there were."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], on_text: Callable[[str], None] | None) -> None:
        self._tokenizer, self._stop, self._on_text = tokenizer, stop, on_text
        self._stream: TextStream | None = None
        self.pieces: list[str] = []
        self._raised: BaseException | None = None
        self.tokens = 0
        self.first_token_time = 0.0

    def put(self, value: Tensor) -> None:
        tokens = value.flatten().tolist()
        if self._stream is None:  # the prompt comes first
            self._stream = TextStream(self._tokenizer, self._stop, tokens)
            return
        if self.tokens == 0:
            self.first_token_time = time.perf_counter()
        self.tokens += len(tokens)
        for token in tokens:
            self._hand_over(self._stream.push(token))

    def end(self) -> None:
        if self._stream is not None:
            self._hand_over(self._stream.finish())

    def _hand_over(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
            if self._on_text is not None:
                try:
                    self._on_text(piece)
                except BaseException as error:
                    self._raised = error
                    raise

    @contextlib.contextmanager
    def callers_errors(self) -> Iterator[None]:
        """What `on_text` raised comes out as it was, whatever was made of it on the way."""
        try:
            yield
        except OtaroError:
            if self._raised is not None:
                raise self._raised from None
            raise
