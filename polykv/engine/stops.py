"""Stop strings over a stream of text pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream exactly before the first stop string, whatever pieces it arrives in.

    Only a suffix that is a proper prefix of some stop string is held back, so text is never delayed needlessly and no
    part of a stop string ever leaks.

    Args:
        stops: non-empty strings.

    Attributes:
        stopped: whether a stop string has come.
        found: which.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """Takes a piece and returns what is certain now. After a stop was found it returns nothing more."""
        if self.stopped:
            return ""
        text = self._held + piece
        if not self._stops:
            return text
        # of several stops the one that is complete first counts, as if the text had come letter by letter
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            end, start = min(found)
            self.found = text[start:end]
            return text[:start]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix that may still become a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0

    def flush(self) -> str:
        """What was held back, once the stream has ended without a stop."""
        held, self._held = self._held, ""
        return held
