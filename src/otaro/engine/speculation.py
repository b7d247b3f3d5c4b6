"""Guesses at how a text goes on, for the wanted width to check several at a time.

Two sources, the free one first. Text repeats itself: where its last few tokens have come before, what followed them
then is the guess, and costs nothing. Else a narrow width drafts; it looks at the front of the vocabulary only, where
the frequent tokens are, and stops where two tokens are close to each other. Where its drafts do not pay it rests for a
while, longer and longer.

A guess never decides anything: each token is picked from the wanted width's logits as ever, and a guess that is the
token picked saves running it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_GUESSES = 7
"""One token and these are eight, as many as one reading of the weights serves best."""
MOST_DRAFTS = 3
MARGIN = 2.5
"""Drafting goes on while the likeliest token is this far ahead of the next, in logits."""
VOCABULARY_PART = 3
"""A draft looks at the first 1/3 of the vocabulary."""
LENGTHS = (4, 3, 2)
"""Tokens that must have come before, in this order."""
FEWEST_REPEATED = 2
DRAFT_COST, CHECK_COST = 0.55, 0.07
"""Of drafting a token and of checking one more, where running a token alone costs 1."""
MEMORY = 0.95
"""What the gains so far still count after another check."""
LARGEST_LOSS = 2.0
"""In tokens, before a rest."""
SHORTEST_REST, LONGEST_REST = 4, 32


@dataclass
class Counts:
    """How speculation went: checks, and guesses made and found right, by where they came from."""

    checks: int = 0
    repeated: int = 0
    repeated_right: int = 0
    drafted: int = 0
    drafted_right: int = 0

    @property
    def acceptance(self) -> float:
        """The share of guesses that were right."""
        return (self.repeated_right + self.drafted_right) / max(1, self.repeated + self.drafted)


class Repetition:
    """What followed the last few tokens when they came before; guesses grow longer while they hold."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._seen = 0
        self._length = FEWEST_REPEATED

    def guess(self, text: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow; `text` is that of the last call, perhaps longer."""
        for place in range(self._seen, len(text)):
            for length in LENGTHS:
                if length <= place:
                    self._next[tuple(text[place - length : place])] = place
        self._seen = len(text)
        for length in LENGTHS:
            last = self._next.get(tuple(text[-length:]))
            if last is not None:
                period = len(text) - last
                return [text[last + number % period] for number in range(min(self._length, most))]
        return []

    def learn(self, guesses: int, right: int) -> None:
        """Take note of how many of the last guesses were right."""
        self._length = min(2 * self._length + 1, MOST_GUESSES) if right == guesses else max(FEWEST_REPEATED, right + 1)


class Rests:
    """Whether to draft: not for a number of checks after drafts have cost more than they gained."""

    def __init__(self) -> None:
        self._balance = 0.0
        self._length = SHORTEST_REST
        self._left = 0

    def over(self) -> bool:
        """Whether the next check may be drafted for; called once for each."""
        if self._left:
            self._left -= 1
            return False
        return True

    def learn(self, guesses: int, right: int) -> None:
        """Take note of how many tokens of a draft were right."""
        self._balance = MEMORY * self._balance + right - (DRAFT_COST + CHECK_COST) * guesses
        if self._balance < -LARGEST_LOSS:
            self._left, self._length = self._length, min(2 * self._length, LONGEST_REST)
            self._balance = 0.0
        elif self._balance > 0:
            self._length = SHORTEST_REST
