"""At which precision answers are written.

A request names one, or leaves it to the server. The server's default is a precision, or "auto": then it is as wide as
what is in memory, one step narrower for every moment in which requests have to wait, and a step wider again after some
moments in which half of the seats were free. A narrower width reads fewer bits of every weight, so answers that are
being written get faster and those that wait get their turn sooner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from otaro.engine.engine import Engine
from otaro.engine.scheduler import Running
from otaro.errors import PrecisionError
from otaro.precision import NARROWEST, Precision, join
from otaro.serve.openai import Phases
from otaro.serve.problems import Problem

AUTO: Literal["auto"] = "auto"
Default = Precision | Literal["auto"]

MOMENT = 0.5
"""Seconds between two looks at how many requests wait."""
CALM_MOMENTS = 4
"""Looks without load after which the width rises by a step: it falls faster than it rises, so it does not swing."""


@dataclass(frozen=True)
class Choice:
    """The precision of a request: of reading its prompt (None: as of writing), and of writing (None: the default).

    `model` is the name that it was asked for by.
    """

    model: str
    prefill: Precision | None = None
    decode: Default | None = None


class AutoWidth:
    """How many steps below the widest precision "auto" is now; `observe` is called every moment."""

    def __init__(self, floor: Precision = NARROWEST) -> None:
        self.floor = floor
        self._steps = 0
        self._calm = 0

    def observe(self, waiting: int, running: int, seats: int, widest: Precision) -> None:
        deepest = max(0, widest.mantissa - self.floor.mantissa)
        self._steps = min(self._steps, deepest)
        if waiting:
            self._calm = 0
            self._steps = min(self._steps + 1, deepest)
        elif 2 * running <= seats:
            self._calm += 1
            if self._calm >= CALM_MOMENTS:
                self._calm = 0
                self._steps = max(self._steps - 1, 0)
        else:
            self._calm = 0

    def width(self, widest: Precision) -> Precision:
        floor = min(self.floor, widest)
        return Precision.from_mantissa(max(widest.mantissa - self._steps, floor.mantissa))


class Control:
    """The default precision, the width of "auto", and the answers that are being written."""

    def __init__(self, engine: Engine, name: str, default: Default, floor: Precision) -> None:
        self.engine = engine
        self.name = name
        self.auto = AutoWidth(floor)
        self._running: dict[str, list[Running]] = {}
        self._following: set[str] = set()
        self._automatic = False
        with contextlib.suppress(PrecisionError):  # planes that could not be read by now: the widest there is used
            self.set_default(default)

    @property
    def available(self) -> list[Precision]:
        """The precisions on disk, the widest first."""
        return self.engine.weights.folder.precisions

    @property
    def resident(self) -> Precision:
        """The widest precision that is in memory."""
        return self.engine.weights.loaded

    @property
    def default(self) -> Default:
        return AUTO if self._automatic else self.engine.precision

    def set_default(self, default: Default) -> None:
        """Takes until the engine has done its next step."""
        if default != AUTO:
            self.engine.precision = default
        self._automatic = default == AUTO

    def set_resident(self, resident: Precision) -> None:
        """Free the planes above a width, or read those up to it from disk; the default follows where it must."""
        if resident <= self.engine.limit:
            self.engine.drop_to(resident)
        else:
            default = self.engine.precision
            self.engine.raise_to(resident)
            self.engine.precision = default

    @property
    def width(self) -> Precision:
        """The width that a request gets which leaves it to the server."""
        return self.auto.width(self.resident) if self._automatic else self.engine.width

    def model_ids(self) -> dict[str, Precision | None]:
        """The names of the model: plain, and with each precision."""
        return {self.name: None, **{f"{self.name}@{width}": width for width in self.available}}

    def choose(self, model: str | None, asked: str | Phases | None) -> Choice:
        """The precision that a request asks for, by its model's name or its own field."""
        named, name = self._named(model), model or self.name
        if asked is None:
            return Choice(name, decode=named)
        if named is not None:
            raise Problem(400, f"the model's name says {named}: leave out precision", param="precision")
        if isinstance(asked, str):
            return Choice(name, decode=self.parse(asked))
        prefill = None if asked.prefill is None else self._precision(asked.prefill)
        return Choice(name, prefill, None if asked.decode is None else self.parse(asked.decode))

    def parse(self, text: str) -> Default:
        return AUTO if text.lower() == AUTO else self._precision(text)

    def parse_default(self, text: str, resident: Precision | None) -> Default:
        """The same, where `resident` is what will be in memory, if that is about to change."""
        if resident is None or text.lower() == AUTO:
            return self.parse(text)
        width = self.on_disk(text)
        if width > resident:
            raise PrecisionError(f"precision {width} is wider than {resident}, which is to be in memory: raise it")
        return width

    def decode(self, choice: Choice) -> tuple[Precision | None, bool]:
        """What an answer begins at, None where it follows the engine's own; and whether that follows the load."""
        if choice.decode == AUTO or (choice.decode is None and self._automatic):
            return self.auto.width(self.resident), True
        return choice.decode, False

    def add(self, id: str, running: list[Running], automatic: bool) -> None:
        self._running[id] = running
        if automatic:
            self._following.add(id)

    def remove(self, id: str) -> None:
        self._running.pop(id, None)
        self._following.discard(id)

    def set_running(self, id: str, text: str) -> Default:
        """Change the precision of an answer from its next token on."""
        found = self._running.get(id)
        if found is None:
            raise Problem(404, "no answer with this id is being written", param="id", code="not_running")
        wanted = self.parse(text)
        self._set(found, self.auto.width(self.resident) if wanted == AUTO else wanted)
        if wanted == AUTO:
            self._following.add(id)
        else:
            self._following.discard(id)
        return wanted

    def observe(self, waiting: int, running: int, seats: int) -> None:
        """Let "auto" follow the load, the answers that are being written too."""
        self.auto.observe(waiting, running, seats, self.resident)
        width = self.auto.width(self.resident)
        for id in self._following:
            self._set(self._running[id], width)

    @staticmethod
    def _set(running: Iterable[Running], width: Precision) -> None:
        for one in running:
            if one.precision != width:
                one.precision = width

    def _named(self, model: str | None) -> Precision | None:
        ids = self.model_ids()
        if model is not None and model not in ids:
            raise Problem(
                404,
                f"there is no model {model}: choose {self.name} or {self.name}@PRECISION with one of "
                f"{join(self.available)}",
                param="model",
                code="model_not_found",
            )
        width = None if model is None else ids[model]
        if width is not None:
            self._check(width)
        return width

    def _precision(self, text: str) -> Precision:
        width = self.on_disk(text)
        self._check(width)
        return width

    def on_disk(self, text: str) -> Precision:
        width = Precision(text)
        if width not in self.available:
            raise PrecisionError(f"precision {width} is not on disk here: choose from {join(self.available)}")
        return width

    def _check(self, width: Precision) -> None:
        if width > self.engine.limit:
            raise PrecisionError(
                f"precision {width} is not in memory, {self.engine.limit} is the widest there: "
                "raise it with PUT /v1/precision and resident"
            )
