"""Which planes are in memory and which width is in use, both changed while a model runs.

Three may act at a time: whoever runs a text, whoever switches, drops or raises, and the thread that reads wider planes
in the background. Two locks keep them apart:

    running     held while tokens are run, and for the moments in which a plane comes or goes or the width changes
    changing    held from the first plane of a width to the last by whoever adds or frees planes

So tokens run while a file is being read, and a width is there as a whole or not at all. How far the background goes is
looked at before every plane: lowering it stops the reading at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from otaro.engine.weights import AnyWeights
from otaro.precision import NARROWEST, Precision


class FairLock:
    """A lock that its holder may take again, and that whoever has waited gets before who lets it go and comes back.

    A thread that runs token after token would otherwise keep all others waiting.
    """

    def __init__(self) -> None:
        self._lock, self._next = threading.RLock(), threading.Lock()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._holder == threading.get_ident():
            self._lock.acquire()
        else:
            with self._next:  # held by the one who waits for the lock: who comes back waits behind
                self._lock.acquire()
        self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
        self._lock.release()


class LiveWeights:
    """Weights whose planes come and go. `close` them, or their background thread goes on."""

    def __init__(self, weights: AnyWeights) -> None:
        self.weights = weights
        self.running = FairLock()
        self._changing = threading.Lock()
        self._asked = weights.loaded
        self._limit = weights.loaded  # how far planes are or will be there
        self._loader: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def precision(self) -> Precision:
        """The width asked for."""
        return self._asked

    @precision.setter
    def precision(self, width: Precision) -> None:
        with self.running:
            self.check(width)
            self._asked = width

    @property
    def width(self) -> Precision:
        """The width in use: the one asked for, or the widest that is there by now."""
        return self.at(self._asked)

    @property
    def limit(self) -> Precision:
        """The widest precision that is there, or to come."""
        return self._limit

    def check(self, width: Precision) -> None:
        """An error if a width is neither there nor was to come."""
        if width > self._limit:
            self.weights.widths(width)

    def at(self, width: Precision) -> Precision:
        """A width asked for, or where its planes are still to come or were dropped since the widest that is there."""
        return min(width, self.weights.loaded)

    def drop_to(self, width: Precision) -> None:
        """Free the planes above a width, and let none of them come any more."""
        with self.running:
            self._limit = min(self._limit, width)  # before waiting for the background: it stops
        with self._changing, self.running:
            self._limit, self._asked = min(self._limit, width), min(self._asked, width)
            self.weights.drop_to(width)

    def raise_to(self, width: Precision) -> None:
        """Read the planes up to a width and use it; should that fail, what was there is in use as before."""
        self.weights.folder.check_available(width)
        with self._changing:
            for missing in self.weights.missing(width):
                self.weights.add(missing, self.running)
            with self.running:
                self._asked = width
                self._limit = max(self._limit, width)

    def load_in_background(self, width: Precision) -> None:
        """Read the planes up to a width while texts run; the width in use rises with them, unless it is set."""
        self.weights.folder.check_available(width)
        self._asked = self._limit = width
        self._loader = threading.Thread(target=self._load, daemon=True)
        self._loader.start()

    def finish_loading(self) -> None:
        """Wait until the background is done; its error, if there was one."""
        if self._loader is not None:
            self._loader.join()
        self.check_loading()

    def check_loading(self) -> None:
        """The background's error, if there was one, the first time it is asked for."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Stop the background and wait for its end, so that nothing is changed any more."""
        self._limit = NARROWEST
        loader = self._loader
        if loader is not None and loader is not threading.current_thread():
            loader.join()

    def _wants(self, width: Precision) -> Callable[[], bool]:
        return lambda: width <= self._limit

    def _load(self) -> None:
        try:
            while True:
                with self._changing:
                    width = next(iter(self.weights.missing(self._limit)), None)
                    if width is None:
                        return
                    self.weights.add(width, self.running, self._wants(width))
        except Exception as error:  # of any kind: nobody would see it in this thread
            with self.running:
                self._limit = min(self._limit, self.weights.loaded)  # what could not be read is not to come any more
            self._failure = error
