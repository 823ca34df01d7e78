"""How many prompt rows may ride on a step, so that answers in progress do not stall behind a long prompt."""

from __future__ import annotations

MAX_STRETCH = 2.5
"""A step with prompt rows may take this many times as long as one that only decodes. Three is the promise."""
MIN_ROWS = 4
"""Prompts advance by so many rows in any step: they must end some day."""
CHEAP_CONTEXT = 256
"""Tokens before a row below which attention to them is taken as free."""
SMOOTHING = 0.3
"""Weight of the newest measurement."""


class Pacer:
    """Learns the time of a decode step and of a prompt row, and divides a step's time between the two.

    Chunked prefill mixed with decode is Sarathi-Serve's (arXiv 2403.02310), with a budget in time instead of one in tokens:
    the same number of rows takes very different times on different machines and at different context lengths.

    Args:
        token_budget: rows of one forward at most.
    """

    def __init__(self, token_budget: int) -> None:
        self._budget = token_budget
        self._decode_s: float | None = None
        self._decoding = 0  # how many decoded when that was measured
        self._row_s: float | None = None
        self._context = 0  # tokens before the rows that were timed

    def prompt_rows(self, decoding: int, context: int = 0) -> int:
        """Prompt rows of the next step.

        Args:
            decoding: requests that take one decode row each.
            context: the most tokens that come before a prompt's next row.

        Returns:
            At least 0. It is 0 when a step must be measured without any: at first, and when the number of decoding requests has
            changed much since.
        """
        if decoding == 0:
            return self._budget
        most = max(1, self._budget - decoding)
        if self._row_s is None:  # no prompt row has been timed yet, so every request is at its start
            return most
        if self._decode_s is None or not 0.75 <= decoding / self._decoding <= 1.33:
            return 0
        # A row's attention grows with what comes before it. Taken as if it were all of the row's cost until the first step there
        # has been timed, so that a jump to a long context begins with few rows.
        jump = (context + CHEAP_CONTEXT) / (self._context + CHEAP_CONTEXT)
        rows = int((MAX_STRETCH - 1) * self._decode_s / (self._row_s * max(1.0, jump)))
        return min(max(MIN_ROWS, rows), most)

    def observe(self, decoding: int, prompt_rows: int, seconds: float, context: int = 0) -> None:
        """Learns from a step that has been run; arguments as for :meth:`prompt_rows`."""
        if prompt_rows == 0:
            similar = self._decode_s is not None and 0.75 <= decoding / self._decoding <= 1.33
            self._decode_s = self._blend(self._decode_s if similar else None, seconds)
            self._decoding = decoding
            return
        decode_s = (self._decode_s or 0.0) if decoding else 0.0
        # a step has a cost of its own besides its rows: taken as the rows', small chunks look dear, and so stay small enough
        row_s = max(seconds - decode_s, 1e-6) / prompt_rows
        near = abs(context - self._context) <= CHEAP_CONTEXT
        self._row_s = self._blend(self._row_s if near else None, row_s)
        self._context = context

    @staticmethod
    def _blend(known: float | None, new: float) -> float:
        return new if known is None else (1 - SMOOTHING) * known + SMOOTHING * new


def share_rows(wanted: list[int], budget: int) -> list[int]:
    """Divides rows fairly: the smallest wishes are met in full, the others share the rest evenly (max-min fairness).

    Args:
        wanted: rows that each could use.
        budget: rows there are.

    Returns:
        Rows for each, at most what it wanted, in all ``min(budget, sum(wanted))``. Of an uneven rest the smaller wishes, and of
        equal ones the earlier, get one row more.
    """
    shares = [0] * len(wanted)
    left = max(0, budget)
    for place, index in enumerate(sorted(range(len(wanted)), key=lambda i: (wanted[i], i))):
        remaining = len(wanted) - place
        shares[index] = min(wanted[index], -(-left // remaining))
        left -= shares[index]
    return shares
