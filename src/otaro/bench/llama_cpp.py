"""llama.cpp as a peer to measure against: the same tokens through the same number of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
from numpy.typing import NDArray

from otaro.errors import OtaroError


def import_llama_cpp() -> ModuleType:
    try:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise OtaroError("llama.cpp is not installed: pip install llama-cpp-python") from error
    module: ModuleType = llama_cpp
    return module


class LlamaCppTokenizer:
    """The tokenizer of one GGUF file in llama.cpp."""

    def __init__(self, path: Path, *, vocabulary_only: bool = True) -> None:
        self._api: Any = import_llama_cpp()
        self._silence = self._api.llama_log_callback(lambda *_: None)  # kept: the library calls it later
        self._api.llama_log_set(self._silence, None)
        settings = self._api.llama_model_default_params()
        settings.n_gpu_layers = 0
        settings.vocab_only = vocabulary_only
        self._model = self._api.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise OtaroError(f"llama.cpp cannot load {path}")
        self._tokens = self._api.llama_model_get_vocab(self._model)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """A text's tokens, special ones within it found; `add_special` adds those that the model wants around it."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = self._api.llama_tokenize(self._tokens, data, len(data), ids, len(ids), add_special, True)
        return list(ids[:count])

    def close(self) -> None:
        self._api.llama_model_free(self._model)


class LlamaCpp(LlamaCppTokenizer):
    """One GGUF file in llama.cpp, driven through its C API so that no wrapper is measured."""

    def __init__(self, path: Path, *, context: int, threads: int) -> None:
        super().__init__(path, vocabulary_only=False)
        options = self._api.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = context
        options.n_threads = options.n_threads_batch = threads
        self._context = self._api.llama_init_from_model(self._model, options)
        if not self._context:
            self._api.llama_model_free(self._model)
            raise OtaroError(f"llama.cpp has no memory for {context} tokens of {path}: ask for fewer")
        self._vocabulary = self._api.llama_vocab_n_tokens(self._tokens)

    def run(self, tokens: Sequence[int], position: int) -> int:
        """Run tokens from a position on; the likeliest next token."""
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_seq_rm(memory, -1, position, -1)
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        if self._api.llama_decode(self._context, self._api.llama_batch_get_one(ids, len(tokens))) != 0:
            raise OtaroError("llama.cpp could not run the tokens")
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return int(numpy.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())

    def logits(self, tokens: Sequence[int]) -> NDArray[numpy.float32]:
        """The logits after every token of a text, a row each."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        batch = self._api.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for place, token in enumerate(tokens):
                batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            if self._api.llama_decode(self._context, batch) != 0:
                raise OtaroError("llama.cpp could not run the tokens")
            rows = [self._api.llama_get_logits_ith(self._context, place) for place in range(len(tokens))]
            return numpy.stack([numpy.ctypeslib.as_array(row, shape=(self._vocabulary,)) for row in rows])
        finally:
            self._api.llama_batch_free(batch)

    def close(self) -> None:
        self._api.llama_free(self._context)
        super().close()
