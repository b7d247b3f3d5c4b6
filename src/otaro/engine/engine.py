"""Tokens in, tokens out: a packed model run natively, at a precision that may change between two tokens.

One copy of the weights serves every width, so a switch is the choice of how many planes to read, made anew for each
token. The keys and values of tokens stay as they were computed. Results do not depend on the number of threads nor on
how many tokens are run at a time, so a text continued token by token, in a batch or by speculation is the same to
the bit.

Speculation lets a narrow width draft a few tokens and the wanted width check all of them in one reading of the weights,
which takes little longer than running one token. Drafts that the wanted width would have picked too are kept. With
temperature 0 the outcome is exactly that of the wanted width alone; otherwise each draft is kept with probability
min(1, p / q) and replaced by a draw from the rest of p where q exceeded it, which leaves p's distribution as it was
(p, q: what the wanted and the drafting width give the token).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy

from otaro.checkpoint.folder import Progress
from otaro.engine.native import Logits, Session
from otaro.engine.sampling import Probabilities, Sampler, Sampling
from otaro.engine.weights import Weights
from otaro.errors import FormatError, OtaroError
from otaro.precision import NARROWEST, Precision

DEFAULT_CONTEXT = 8192
PREFILL_TOKENS = 256
"""Prompt tokens run between two looks at whether to stop."""
MOST_DRAFTS = 4
SURE_ENOUGH = 0.5
"""Drafting goes on while the drafting width gives its choice at least this probability."""


def usable_cores() -> int:
    """The cores this process may use, where the system says; all of them elsewhere."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Engine:
    """A packed folder ready to run. `precision` is the width in use; set it at any time, even between two tokens.

    With `progressive` it is ready as soon as the narrowest width is in; wider planes join in the background, and the
    width in use rises with them up to `precision`, unless it is set meanwhile.

    `context` is how many tokens a text may have, at most the model's own limit. One text runs at a time: a second
    caller waits until the first one's iterator has ended or is closed. Precision and planes may change meanwhile.
    """

    def __init__(
        self,
        folder: str | Path,
        precision: Precision | str | None = None,
        *,
        context: int | None = None,
        threads: int | None = None,
        progressive: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.threads = threads or usable_cores()
        chosen = None if precision is None else Precision(precision)
        first = NARROWEST if progressive else chosen
        self.weights = Weights(Path(folder), first, threads=self.threads, progress=progress)
        limit = self.weights.config.max_position_embeddings
        if type(limit) is not int or limit < 1:
            raise FormatError(f"{folder}/config.json allows {limit} positions: fetch it again")
        if context is not None and not 1 <= context <= limit:
            raise OtaroError(f"a context of {context} tokens is not possible: the model's own is {limit}")
        self.context = context or min(limit, DEFAULT_CONTEXT)
        self._session = Session(self.weights.model, self.context)
        self._precision = self.weights.precision
        self._held: list[int] = []
        self._text = threading.Lock()  # held while a text is run, between its tokens too
        self._lock = threading.RLock()  # held while weights are read or changed
        self._loader: threading.Thread | None = None
        self._failure: Exception | None = None
        self._rising = progressive  # until somebody sets the width
        if progressive:
            wanted = chosen or self.weights.folder.precisions[0]
            self.weights.folder.check_available(wanted)
            self._loader = threading.Thread(target=self._load_wider, args=(wanted,), daemon=True)
            self._loader.start()

    @property
    def precision(self) -> Precision:
        return self._precision

    @precision.setter
    def precision(self, precision: Precision | str) -> None:
        width = Precision(precision)
        self.weights.widths(width)
        self._rising = False
        self._precision = width

    def drop_to(self, precision: Precision | str) -> None:
        """Free the planes above a width; the width in use follows if it was above."""
        width = Precision(precision)
        with self._lock:
            self._rising = False
            self.weights.drop_to(width)
            self._precision = min(self._precision, width)

    def raise_to(self, precision: Precision | str) -> None:
        """Read the planes up to a width from the folder again and use it."""
        width = Precision(precision)
        self._rising = False
        self.weights.raise_to(width, self._lock)
        self._precision = width

    def finish_loading(self) -> None:
        """Wait until all planes have joined; an error if some could not be read."""
        if self._loader is not None:
            self._loader.join()
        if self._failure is not None:
            raise self._failure

    def _load_wider(self, precision: Precision) -> None:
        try:
            for width in sorted(Precision):
                if NARROWEST < width <= precision:
                    self.weights.raise_to(width, self._lock)
                    if self._rising:
                        self._precision = width
        except Exception as error:  # of any kind: nobody would see it in this thread
            self._failure = error

    @property
    def memory(self) -> dict[str, int]:
        """Bytes taken by the packed weights, and by keys, values and working memory."""
        return {"weights": self.weights.nbytes, "session": self._session.nbytes}

    def logits(self, tokens: Sequence[int], precision: Precision | str | None = None) -> Logits:
        """The logits after each token of a text, [tokens, vocabulary]."""
        self._check_prompt(tokens, 0)
        with self._text:
            self._held = []
            return self.run(tokens, 0, self._widths(precision), logits=len(tokens))

    def tokens(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        prefill: Precision | str | None = None,
        overrides: Mapping[str, Precision] | None = None,
        draft: Precision | str | None = None,
        end: Sequence[int] = (),
        reuse: bool = False,
    ) -> Iterator[int]:
        """Continue a prompt, token by token, until one of `end` (not given out) or the limit.

        The prompt is read at `prefill`, new tokens are run at `precision`, whatever it is set to by then. `overrides`
        gives single layers other widths, as in `Weights.widths`. With `draft` that width drafts and `precision` checks.
        With `reuse`, what the prompt shares with the text before is not run again. Closing the iterator stops.
        """
        if max_new_tokens < 1:
            raise OtaroError(f"max_new_tokens is {max_new_tokens}: ask for at least 1 token")
        self._check_prompt(prompt, max_new_tokens)
        return self._tokens(
            list(prompt),
            max_new_tokens,
            Sampler(sampling),
            lambda: self.weights.widths(self.precision, overrides),
            self.weights.widths(self.precision if prefill is None else Precision(prefill), overrides),
            None if draft is None else self._widths(draft),
            frozenset(end),
            reuse,
        )

    def _tokens(
        self,
        text: list[int],
        max_new_tokens: int,
        sampler: Sampler,
        widths: Callable[[], bytes],
        prefill: bytes,
        draft: bytes | None,
        end: frozenset[int],
        reuse: bool,
    ) -> Iterator[int]:
        with self._text:
            logits = self._prefill(text, prefill, reuse)
            limit = len(text) + max_new_tokens
            fresh = [sampler.pick(logits, text)]
            while True:
                for token in fresh:
                    if token in end:
                        return
                    text.append(token)
                    yield token
                    if len(text) == limit:
                        return
                room = min(MOST_DRAFTS, limit - len(text) - 1)
                if draft is None or room < 1:
                    fresh = [sampler.pick(self.run(text[-1:], len(text) - 1, widths())[0], text)]
                else:
                    fresh = self._speculate(text, sampler, widths(), draft, room)

    def _prefill(self, text: list[int], widths: bytes, reuse: bool) -> Logits:
        """Run all of a prompt that is not held already; the last token's logits."""
        done = 0
        if reuse:
            shared = min(len(text) - 1, len(self._held), self._session.length)
            done = next((i for i in range(shared) if text[i] != self._held[i]), shared)
        self._held = text  # the list itself: it grows as the text does
        logits = numpy.empty((1, 0), dtype=numpy.float32)
        while done < len(text):
            part = text[done : done + PREFILL_TOKENS]
            last = done + len(part) == len(text)
            logits = self.run(part, done, widths, logits=1 if last else 0)
            done += len(part)
        return logits[0]

    def _speculate(self, text: list[int], sampler: Sampler, widths: bytes, draft: bytes, most: int) -> list[int]:
        """At least one new token: drafts that hold, and one of the wanted width after them."""
        start = len(text) - 1
        drafts: list[int] = []
        beliefs: list[Probabilities] = []
        while len(drafts) < most:
            logits = self.run([*text[-1:], *drafts][-1:], start + len(drafts), draft)[0]
            beliefs.append(sampler.distribution(logits, text + drafts))
            drafts.append(sampler.draw(beliefs[-1]))
            if _confidence(logits) < SURE_ENOUGH:
                break
        rows = self.run([*text[-1:], *drafts], start, widths, logits=len(drafts) + 1)
        kept: list[int] = []
        for token, belief, logits in zip(drafts, beliefs, rows, strict=False):
            wanted = sampler.distribution(logits, text + kept)
            if not sampler.accepts(wanted[token] / belief[token]):
                rest = numpy.maximum(wanted - belief, 0)
                last = sampler.draw(rest if rest.any() else wanted)  # nothing is left where they differ by rounding
                break
            kept.append(token)
        else:
            last = sampler.pick(rows[-1], text + kept)
        self._session.length = start + 1 + len(kept)  # behind lie drafts that did not hold
        return [*kept, last]

    def run(self, tokens: Sequence[int], position: int, widths: bytes, logits: int = 1) -> Logits:
        """Run tokens at a position; the last rows of logits. For measuring: `tokens` is what continues a text."""
        with self._lock:
            return self._session.run(tokens, position, widths, threads=self.threads, logits=logits)

    def _widths(self, precision: Precision | str | None) -> bytes:
        return self.weights.widths(self.precision if precision is None else Precision(precision))

    def _check_prompt(self, prompt: Sequence[int], new: int) -> None:
        if not prompt:
            raise OtaroError("the prompt has no tokens: give some text to go on from")
        if len(prompt) + new > self.context:
            raise OtaroError(
                f"{len(prompt)} tokens of prompt and {new} new ones do not fit the context of {self.context}: "
                "shorten the prompt or ask for fewer"
            )


def widest_that_fits(weights_bytes: Mapping[Precision, int], memory: int) -> Precision:
    """The widest precision whose weights fit into `memory` bytes."""
    fitting = [precision for precision, size in weights_bytes.items() if size <= memory]
    if not fitting:
        least = min(weights_bytes.values())
        raise OtaroError(f"{memory / 1e6:.0f} MB are too little: {NARROWEST} needs {least / 1e6:.0f} MB")
    return max(fitting)


def _confidence(logits: Logits) -> float:
    """The probability of the likeliest token at temperature 1."""
    return float(1 / numpy.exp(logits - logits.max()).sum())
