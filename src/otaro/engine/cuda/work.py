"""Running texts on a device: what `otaro.engine.session.Work` is on a CPU.

Steps of up to 16 tokens in all go through the model as rows of one batch, whatever texts they are of; a prompt of more
goes alone, many tokens at a time. Rows of other widths are another batch.

On a GPU a batch is a captured graph: one for its widths, its size (1, 8 or 16 rows; the rest is left empty), the
longest text (in stretches of keys) and whether tokens are drawn. It is captured when it is first needed, after it has
run once as it is, which compiles the kernels. What it reads, tokens, positions, addresses of texts and settings, is one
small copy to the device; what comes back is a token for each row. `ahead`: the next step may have begun by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from otaro.engine.cuda import fused, picking
from otaro.engine.cuda.ahead import Ahead
from otaro.engine.cuda.forward import Prompt, states
from otaro.engine.cuda.fused import KEYS
from otaro.engine.cuda.launches import captures
from otaro.engine.cuda.model import DeviceModel
from otaro.engine.cuda.rows import CacheLayout, DeviceSession, Rows
from otaro.engine.native import NO_MEMORY_CODE, NOT_FINITE_CODE, Logits
from otaro.engine.numbers import MOST_CONTEXT, whole
from otaro.engine.sampling import CSampling
from otaro.engine.session import Step

SIZES = (1, 8, 16)
"""Rows of a batch: those for which there is a product of its own."""
MOST_ROWS = SIZES[-1]
MOST_GRAPHS = 64
HEAD_ROWS = 512
"""Rows of logits that are made at a time."""
_TOKEN, _POSITION, _ADDRESS, _CAPACITY, _SEED, _TOP_K, _TEMPERATURE, _TOP_P, _MIN_P = range(9)
_FIELDS = 9


@dataclass(frozen=True)
class Kind:
    """What a graph is made for."""

    widths: bytes
    size: int
    stretches: int
    drawn: bool
    draft_rows: int
    layout: CacheLayout
    stamp: int


@dataclass(frozen=True)
class Outcome:
    """On the device: logits of each row, the tokens picked from them, and for drafts how far each is ahead."""

    logits: Tensor
    picked: Tensor
    margin: Tensor | None


@dataclass(frozen=True)
class Captured:
    """A graph, the memory it reads from and what it leaves behind."""

    graph: Any
    inputs: Tensor
    outcome: Outcome


class DeviceWork:
    """What running a model on a device takes besides keys and values. One call at a time."""

    prefill_tokens, prompt_tokens, alone_tokens, scored_tokens = 2048, 512, 2048, 256

    def __init__(self, model: DeviceModel, *, graphs: bool = True) -> None:
        self._model = model
        self._device = model.device
        self._graphs = graphs and captures(self._device)
        self._captured: dict[Kind, Captured] = {}
        self._pool: Any = None
        self._graph_bytes = 0
        pinned = self._device.type == "cuda"
        self._host = {size: torch.zeros((_FIELDS, size), dtype=torch.int64, pin_memory=pinned) for size in SIZES}
        self._fields = {size: host.numpy() for size, host in self._host.items()}
        self._tokens = {size: torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for size in SIZES}
        self._ahead = Ahead()
        self._settings: dict[int, NDArray[numpy.float64]] = {
            size: fields.view(numpy.float64) for size, fields in self._fields.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes that captured graphs hold."""
        return self._graph_bytes

    def run(self, steps: Sequence[Step], *, threads: int = 1) -> None:
        """Run all of them; what came of each is in it afterwards. Where it is an error, no text is any longer."""
        try:
            self._run(steps)
        except BaseException:
            for step in steps:
                step.session.length = min(step.session.length, step.position)
            self._ahead.forget()
            raise

    def _run(self, steps: Sequence[Step]) -> None:
        groups: dict[tuple[bytes, CacheLayout], list[Step]] = {}
        for step in steps:
            session: DeviceSession = step.session
            session.length = min(session.length, step.position)
            step.cancelled = step.cancel is not None and step.cancel.value != 0
            end = step.position + len(step.tokens)
            if step.cancelled or not self._has_room(step, end):
                continue
            session.tokens[step.position : end] = step.tokens
            groups.setdefault((step.widths, session.layout), []).append(step)
        with self._on_device():
            for (widths, _), group in groups.items():
                for batch in _batches([step for step in group if len(step.tokens) <= MOST_ROWS]):
                    self._run_batch(batch, widths)
                for step in group:
                    if len(step.tokens) > MOST_ROWS:
                        self._run_prompt(step)

    @staticmethod
    def _has_room(step: Step, length: int) -> bool:
        """Make room for a text's tokens; where there is none, this text alone fails."""
        try:
            step.session.reserve(length)
        except torch.OutOfMemoryError:
            step.failed = NO_MEMORY_CODE
        return step.failed == 0

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _run_batch(self, batch: list[Step], widths: bytes) -> None:
        count = sum(len(step.tokens) for step in batch)
        size = next(size for size in SIZES if size >= count)
        fields, settings = self._fields[size], self._settings[size]
        fields[_POSITION] = -1
        fields[_TOKEN] = 0
        sessions: list[DeviceSession | None] = [None] * size
        row, longest, drawn = 0, 0, False
        for step in batch:
            end, tokens = row + len(step.tokens), len(step.tokens)
            fields[_TOKEN, row:end] = step.tokens
            fields[_POSITION, row:end] = numpy.arange(step.position, step.position + tokens)
            fields[_ADDRESS, row:end] = step.session.cache.data_ptr()
            fields[_CAPACITY, row:end] = step.session.capacity
            sessions[row:end] = [step.session] * tokens
            if step.rows and _draws(step.sampling):
                drawn = True
            if step.sampling is not None:
                fields[_SEED, row:end] = picking.signed(step.sampling.seed)
                fields[_TOP_K, row:end] = step.sampling.top_k
                settings[_TEMPERATURE, row:end] = step.sampling.temperature
                settings[_TOP_P, row:end] = step.sampling.top_p
                settings[_MIN_P, row:end] = step.sampling.min_p
            longest = max(longest, step.position + tokens)
            row = end
        stamp = self._model.stamp(widths)
        kind = Kind(widths, size, _stretches(longest), drawn, 0, batch[0].session.layout, stamp)
        outcome, picked = self._picked(kind, sessions, all(_goes_on(step) for step in batch))
        row = 0
        for step in batch:
            end = row + len(step.tokens)
            first = end - step.rows
            self._answer(step, outcome.logits[first:end], picked[first:end])
            row = end

    def _picked(self, kind: Kind, sessions: Sequence[DeviceSession | None], goes_on: bool) -> tuple[Outcome, list[int]]:
        """Run a batch, and get its tokens; where it `goes_on`, the next one may be launched before they are there."""
        fields, ahead = self._fields[kind.size], self._ahead
        texts = (kind, tuple(None if session is None else session.mark for session in sessions))
        under_way = ahead.launched(texts, fields)
        outcome = self._captured[kind].outcome if under_way else self._outcome(kind, sessions)
        tokens = self._tokens[kind.size]
        tokens.copy_(outcome.picked, non_blocking=True)
        there = torch.cuda.Event() if self._device.type == "cuda" else None
        if there is not None:
            there.record()
        following = fields.copy()
        present = following[_POSITION] >= 0
        following[_POSITION] += present
        fits = bool((following[_POSITION] < following[_CAPACITY])[present].all())
        within = _stretches(int(following[_POSITION].max()) + 1) == kind.stretches
        launch = goes_on and fits and within and ahead.worth and kind in self._captured
        if launch:
            captured = self._captured[kind]
            captured.inputs[_TOKEN] = outcome.picked  # not the graph's own, which has not run if it is new
            captured.inputs[_POSITION] += captured.inputs[_POSITION] >= 0
            captured.graph.replay()
        if there is not None:
            there.synchronize()
        following[_TOKEN] = numpy.where(present, tokens.numpy(), 0)
        if goes_on:
            ahead.expect(texts, following, launch)
        return outcome, tokens.tolist()

    def _outcome(self, kind: Kind, sessions: Sequence[DeviceSession | None]) -> Outcome:
        host = self._host[kind.size]
        captured = self._captured.get(kind)
        if captured is not None:
            captured.inputs.copy_(host, non_blocking=True)
            captured.graph.replay()
            return captured.outcome
        inputs = host.to(self._device)
        outcome = self._forward(inputs, kind, sessions)
        if self._graphs:
            self._try_to_capture(kind, inputs)
        return outcome

    def _try_to_capture(self, kind: Kind, inputs: Tensor) -> None:
        """Capture a graph; where memory is short all go, and the next step tries again."""
        try:
            self._capture(kind, inputs)
        except RuntimeError as error:  # the end of what was not captured may be a further one
            if not any(isinstance(cause, torch.OutOfMemoryError) for cause in (error, error.__context__)):
                raise
            self._forget_graphs()

    def _make_room(self) -> None:
        """Forget graphs where one reads planes which have gone, or where there are many: all, as they share memory."""
        stale = any(other.stamp != self._model.stamp(other.widths) for other in self._captured)
        if stale or len(self._captured) >= MOST_GRAPHS:
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        self._captured.clear()
        self._pool, self._graph_bytes = None, 0

    def _capture(self, kind: Kind, inputs: Tensor) -> None:
        self._make_room()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.memory_allocated(self._device)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            # Other threads may take memory meanwhile, for texts that are about to begin.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outcome = self._forward(inputs, kind, [None] * kind.size)
        finally:
            torch.cuda.set_stream(stream)
        self._captured[kind] = Captured(graph, inputs, outcome)
        self._graph_bytes += max(0, torch.cuda.memory_allocated(self._device) - before)

    def _forward(self, inputs: Tensor, kind: Kind, sessions: Sequence[DeviceSession | None]) -> Outcome:
        model = self._model
        places = inputs[_ADDRESS : _CAPACITY + 1]
        rows = Rows(inputs[_TOKEN], inputs[_POSITION], places, sessions, kind.layout, kind.stretches)
        hidden = states(model, rows, kind.widths)
        head = model.head.first(kind.draft_rows) if kind.draft_rows else model.head
        logits = head.multiply(hidden, kind.widths[-1])
        if kind.draft_rows:
            two = logits.float().topk(2)
            return Outcome(logits, two.indices[:, 0], two.values[:, 0] - two.values[:, 1])
        if not kind.drawn:
            return Outcome(logits, fused.likeliest(logits), None)
        settings = inputs.view(torch.float64)
        picked = picking.drawn(
            *(logits, settings[_TEMPERATURE], settings[_TOP_P], settings[_MIN_P]),
            *(inputs[_TOP_K], inputs[_SEED], inputs[_POSITION] + 1),
        )
        return Outcome(logits, picked, None)

    def _run_prompt(self, step: Step) -> None:
        """Many tokens of one text, a piece at a time, of which the last `rows` have logits."""
        session: DeviceSession = step.session
        self._ahead.forget()
        count, found = len(step.tokens), list[Tensor]()
        for start in range(0, count, self.prefill_tokens):
            tokens = torch.from_numpy(step.tokens[start : start + self.prefill_tokens].astype(numpy.int64))
            many, position = len(tokens), step.position + start
            places = torch.tensor([[session.cache.data_ptr()], [session.capacity]], dtype=torch.int64)
            rows = Rows(
                tokens.to(self._device),
                torch.arange(position, position + many, device=self._device),
                places.expand(2, many).contiguous().to(self._device),
                [session] * many,
                session.layout,
            )
            hidden = states(self._model, rows, step.widths, Prompt(session, position))
            wanted = min(many, start + many - (count - step.rows))
            for part in hidden[many - wanted :].split(HEAD_ROWS) if wanted > 0 else ():
                logits = self._model.head.multiply(part, step.widths[-1])
                found.append(logits if step.sampling is not None else logits.float().cpu())
        self._answer(step, torch.cat(found) if found else torch.empty(0), None)

    def _answer(self, step: Step, logits: Tensor, picked: list[int] | None) -> None:
        """Tokens, up to the first that is not the one run after it, or the logits themselves."""
        session, count = step.session, len(step.tokens)
        end = step.position + count
        if step.rows == 0 or step.sampling is None:
            if step.rows:
                step.logits = logits.float().cpu().numpy()
            session.ran(end)
            return
        penalty = step.sampling.repetition_penalty
        for row in range(step.rows):
            place = end - step.rows + row + 1  # of the token that is picked
            if picked is not None and penalty == 1:
                token = picked[row]
            else:
                token = self._pick(logits[row], step.sampling, session.tokens[:place], place)
            if token == picking.NONE:
                step.failed, step.picked = NOT_FINITE_CODE, []
                session.length = step.position
                return
            step.picked.append(token)
            if step.top is not None:
                odds = torch.log_softmax(logits[row].float(), -1)
                step.logprobs.append(float(odds[token]))
                top = odds.topk(step.top)
                step.tops.append(list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
            if place < end and token != step.tokens[place - step.position]:
                break
        session.ran(end - step.rows + len(step.picked))

    def _pick(self, logits: Tensor, sampling: CSampling, history: NDArray[numpy.int32], position: int) -> int:
        """One token, by settings that no graph has."""
        if sampling.repetition_penalty != 1:
            different = torch.from_numpy(numpy.unique(history).astype(numpy.int64)).to(self._device)
            logits = picking.penalized(logits, different, sampling.repetition_penalty)

        def one(value: float) -> Tensor:
            dtype = torch.int64 if isinstance(value, int) else torch.float64
            return torch.tensor([value], dtype=dtype, device=self._device)

        if not _draws(sampling):
            return int(picking.greedy(logits[None]))
        settings = (sampling.temperature, sampling.top_p, sampling.min_p)
        whole_numbers = (sampling.top_k, picking.signed(sampling.seed), position)
        return int(picking.drawn(logits[None], *map(one, settings), *map(one, whole_numbers)))

    def logits(
        self, session: Any, tokens: Sequence[int], position: int, widths: bytes, *, threads: int = 1, rows: int = 1
    ) -> Logits:
        """Run tokens of one text; the last rows of logits."""
        ids = session.checked(tokens, position, len(tokens))
        count = whole("the number of logits", rows, 0, len(ids))
        step = Step(session, numpy.array(ids, dtype=numpy.int32), position, widths, count)
        self.run([step])
        empty = numpy.empty((0, self._model.shape.vocabulary), dtype=numpy.float32)
        return empty if step.logits is None else step.logits

    def draft(
        self,
        session: Any,
        token: int,
        position: int,
        widths: bytes,
        *,
        most: int,
        rows: int,
        margin: float,
        threads: int = 1,
    ) -> list[int]:
        """Guess up to `most` tokens after a token, each the likeliest of the first `rows` of the vocabulary.

        The guessing ends with a token that is ahead of the next likeliest by less than `margin`. What lay at the
        position and behind is forgotten.
        """
        whole("the number of drafts", most, 1, MOST_CONTEXT)
        session.checked([token], position, most)
        session.length = min(session.length, position)
        session.claim(position + most)
        self._ahead.forget()
        drafts: list[int] = []
        fields = self._fields[1][:, 0]
        with self._on_device():
            for place in range(position, position + most):
                fields[: _CAPACITY + 1] = (token, place, session.cache.data_ptr(), session.capacity)
                stamp = self._model.stamp(widths)
                kind = Kind(widths, 1, _stretches(place + 1), False, rows, session.layout, stamp)
                outcome = self._outcome(kind, [session])
                session.tokens[place] = token
                session.ran(place + 1)
                assert outcome.margin is not None
                token = int(outcome.picked)
                drafts.append(token)
                if not float(outcome.margin) >= margin:
                    break
        return drafts


def _goes_on(step: Step) -> bool:
    """Whether one token is run and one is picked by the device, of which nothing else is wanted."""
    plain = step.sampling is not None and step.sampling.repetition_penalty == 1
    return plain and step.top is None and step.rows == len(step.tokens) == 1


def _draws(sampling: CSampling | None) -> bool:
    return sampling is not None and sampling.temperature != 0 and sampling.top_k != 1


def _batches(steps: list[Step]) -> Iterator[list[Step]]:
    """As many at a time as have room in a batch, in their order."""
    batch: list[Step] = []
    for step in steps:
        if batch and sum(len(other.tokens) for other in batch) + len(step.tokens) > MOST_ROWS:
            yield batch
            batch = []
        batch.append(step)
    if batch:
        yield batch


def _stretches(length: int) -> int:
    """Stretches of keys that a launch has room for: 1, 4, 16 and so on."""
    count = 1
    while count * KEYS < length:
        count *= 4
    return count
