"""Whose turn it is: as many answers at a time as the engine has room for, a queue of limited length before them.

The queue is fair between clients, not between requests: the next seats go to the client that has the fewest, among
those with as few to the one that was served longest ago. Where the queue is full, the latest request of the client that
waits with the most makes room for a client that waits with fewer. So a client that asks for a hundred answers at
once delays itself. A request for more seats than are free waits for them, and lets those pass for whom there are
enough.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from otaro.serve.problems import Problem

RETRY_SECONDS = 2
"""When a client may try again that was turned away; most do so by themselves."""


def full() -> Problem:
    return Problem(
        429,
        "too many requests are waiting: try again soon",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


def stopping() -> Problem:
    return Problem(503, "the server is stopping", code="stopping", headers={"Retry-After": str(RETRY_SECONDS)})


@dataclass(eq=False)
class _Waiting:
    client: str
    seats: int
    turn: asyncio.Future[None]


class Queue:
    """`seats` answers run at a time, `limit` requests wait at most."""

    def __init__(self, seats: int, limit: int) -> None:
        self.seats, self.limit = seats, limit
        self._waiting: list[_Waiting] = []  # in the order they came
        self._taken: Counter[str] = Counter()
        self._served: dict[str, int] = {}  # when a client that holds seats or waits was last served
        self._turns = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Seats that are taken."""
        return self._taken.total()

    async def take(self, client: str, seats: int) -> None:
        """Wait for so many seats at once; 429 if the queue is full, 503 if the server stops."""
        if self._closed:
            raise stopping()
        if self.running + seats <= self.seats:  # whoever waits wants more seats than there are
            self._seat(client, seats)
            return
        if len(self._waiting) >= self.limit:
            self._make_room(client)
        place = _Waiting(client, seats, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        try:
            await place.turn
        except BaseException:
            if place in self._waiting:
                self._waiting.remove(place)
            elif place.turn.done() and not place.turn.cancelled() and place.turn.exception() is None:
                self.give_back(client, seats)  # the turn came in the moment in which the client went
            self._fill()
            raise

    def give_back(self, client: str, seats: int = 1) -> None:
        self._taken[client] -= seats
        if self._taken[client] <= 0:
            del self._taken[client]
        self._fill()

    def close(self) -> None:
        """Turn away all who wait, and all who come."""
        self._closed = True
        self._forget_gone()
        for place in self._waiting:
            place.turn.set_exception(stopping())
        self._waiting.clear()

    def _seat(self, client: str, seats: int) -> None:
        self._turns += 1
        self._taken[client] += seats
        self._served[client] = self._turns
        if len(self._served) > 2 * (len(self._taken) + len(self._waiting)) + 64:  # others have been forgotten long ago
            here = {*self._taken, *(place.client for place in self._waiting)}
            self._served = {name: turn for name, turn in self._served.items() if name in here}

    def _fill(self) -> None:
        """Seat those whose turn it is, as far as there are seats."""
        self._forget_gone()
        while fitting := [place for place in self._waiting if self.running + place.seats <= self.seats]:
            first = min(
                fitting, key=lambda place: (self._taken[place.client], self._served.get(place.client, 0))
            )  # the first of its client: min keeps the order
            self._waiting.remove(first)
            self._seat(first.client, first.seats)
            first.turn.set_result(None)

    def _forget_gone(self) -> None:
        """Those who have just left still stand in the queue until the loop comes round to them."""
        self._waiting = [place for place in self._waiting if not place.turn.done()]

    def _make_room(self, client: str) -> None:
        """Turn away the latest request of whoever waits with the most, if that is not this client itself."""
        self._forget_gone()
        if len(self._waiting) < self.limit:
            return
        counts = Counter(place.client for place in self._waiting)
        if not counts:
            raise full()
        busiest, most = counts.most_common(1)[0]
        if counts[client] + 1 >= most:
            raise full()
        latest = next(place for place in reversed(self._waiting) if place.client == busiest)
        self._waiting.remove(latest)
        latest.turn.set_exception(full())
