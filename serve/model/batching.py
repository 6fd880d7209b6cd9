"""Turns many small requests into few well-filled forward passes, within a budget of tokens.

`ray.serve.batch` counts requests, or sizes with `batch_size_fn`; then an item that does not fit
goes to the back of the queue, where long texts starve, and one above the budget raises. Here every
batch includes the request that has waited longest, so that none waits for more passes than there
were requests before it. What a pass computes is up to the caller; nothing here depends on Ray.
"""

import asyncio
import contextlib
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

RATE_WEIGHT = 0.2
"""Weight of the newest pass in the measured rate."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(order=True)
class _Waiting(Generic[Item, Answer]):
    """An item in the queue, ordered by length, then by arrival."""

    length: int
    turn: int
    arrived_s: float = field(compare=False)
    item: Item = field(compare=False)
    answer: asyncio.Future[Answer] = field(compare=False)
    queued: bool = field(default=True, compare=False)


def widest_slice(lengths: Sequence[int], start: int, budget_tokens: int) -> tuple[int, int]:
    """Return the slice of ascending `lengths` around `start` that fits a padded batch of
    `budget_tokens`.

    It grows by the neighbour nearer in length, since less padding leaves more room for text. The
    length at `start` is always included, even if it exceeds the budget alone.
    Returns: first index, and the index after the last.
    """
    first, end = start, start + 1
    while True:
        fits_below = first > 0 and (end - first + 1) * lengths[end - 1] <= budget_tokens
        fits_above = end < len(lengths) and (end - first + 1) * lengths[end] <= budget_tokens
        if not (fits_below or fits_above):
            return first, end
        below = lengths[start] - lengths[first - 1] if fits_below else None
        above = lengths[end] - lengths[start] if fits_above else None
        if above is None or (below is not None and below <= above):
            first -= 1
        else:
            end += 1


class Batcher(Generic[Item, Answer]):
    """Collects items of one event loop and answers them in batches, on one dedicated thread.

    A batch starts as soon as the thread is free and one of these holds: enough tokens wait to
    fill it; as many items wait as the last batch had (so a lone client never waits for others);
    the oldest item has waited for `max_wait_ms`; no batch has run for that long.
    """

    def __init__(
        self,
        run: Callable[[list[Item]], Sequence[Answer]],
        *,
        length_of: Callable[[Item], int],
        max_batch_tokens: int,
        max_wait_ms: float,
    ) -> None:
        """Store the settings; the first `submit` starts the thread.

        Args:
            run: returns one answer per item, in order; called on the batcher's thread, never
                concurrently.
            length_of: tokens of an item, without padding.
            max_batch_tokens: maximum tokens in a batch, with padding; a longer item gets its own.
            max_wait_ms: maximum wait of a batch for more items while the thread is free.
        """
        self._run = run
        self._length_of = length_of
        self._max_batch_tokens = max_batch_tokens
        self._max_wait_s = max_wait_ms / 1000
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch")
        self._by_length: list[_Waiting[Item, Answer]] = []
        self._by_age: deque[_Waiting[Item, Answer]] = deque()  # may still include removed items
        self._waiting_tokens = 0
        self._arrival = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._is_closed = False
        self._turns = 0
        self._last_size = 1
        self._last_end_s = 0.0
        self.tokens_per_s: float | None = None
        """Rate of recent passes; None before the first."""
        self.last_failed = False
        """Whether anything of the last batch failed."""
        self._began_s: float | None = None

    @property
    def running_s(self) -> float:
        """Time for which the current batch has been running; 0 if none is."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    @property
    def waiting_tokens(self) -> int:
        """Tokens of all items in the queue."""
        return self._waiting_tokens

    async def submit(self, item: Item) -> Answer:
        """Wait for the answer to one item. Cancelling this removes the item from the queue.

        Raises: whatever `run` raised for the item; RuntimeError once the batcher is closed.
        """
        if self._is_closed:
            raise RuntimeError("the batcher is closed")
        loop = asyncio.get_running_loop()
        if self._worker is None or self._worker.done():
            self._arrival = asyncio.Event()  # belongs to this event loop
            self._worker = loop.create_task(self._work())
        self._turns += 1
        waiting: _Waiting[Item, Answer] = _Waiting(
            length=self._length_of(item),
            turn=self._turns,
            arrived_s=time.monotonic(),
            item=item,
            answer=loop.create_future(),
        )
        insort(self._by_length, waiting)
        self._by_age.append(waiting)
        self._waiting_tokens += waiting.length
        self._arrival.set()
        try:
            return await waiting.answer
        finally:
            if waiting.queued:  # cancelled before its turn came
                place = bisect_left(self._by_length, waiting)
                self._remove(place, place + 1)

    async def close(self) -> None:
        """Cancel waiting and running items, and take no more; the thread ends after its current
        pass."""
        self._is_closed = True
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None
        for waiting in self._remove(0, len(self._by_length)):
            waiting.answer.cancel()
        self._executor.shutdown(wait=False)

    async def _work(self) -> None:
        while True:
            # NOTE: a batch and its answers are not kept while waiting for the next one.
            await self._compute(await self._next_batch())

    async def _compute(self, batch: list[_Waiting[Item, Answer]]) -> None:
        loop, items = asyncio.get_running_loop(), [waiting.item for waiting in batch]
        began_s = self._began_s = time.monotonic()
        try:
            outcomes = await loop.run_in_executor(self._executor, self._outcomes, items)
        except asyncio.CancelledError:
            for waiting in batch:
                waiting.answer.cancel()
            raise
        self.last_failed = any(isinstance(outcome, Exception) for outcome in outcomes)
        for waiting, outcome in zip(batch, outcomes, strict=True):
            if waiting.answer.done():
                continue
            if isinstance(outcome, Exception):
                waiting.answer.set_exception(outcome)
            else:
                waiting.answer.set_result(outcome)
        self._last_size = len(batch)
        self._last_end_s, self._began_s = time.monotonic(), None
        self._measure(sum(waiting.length for waiting in batch), self._last_end_s - began_s)

    def _outcomes(self, items: list[Item]) -> list[Answer | Exception]:
        """Return the answer to each item, or the exception that took its place.

        If a batch fails, each item is run by itself: another item may have been the cause, or the
        batch may have been too large.
        """
        try:
            return [answer for _, answer in zip(items, self._run(items), strict=True)]
        except Exception as error:
            if len(items) == 1:
                return [error]
        return [outcome for item in items for outcome in self._outcomes([item])]

    def _measure(self, tokens: int, seconds: float) -> None:
        rate = tokens / max(seconds, 1e-6)
        before = rate if self.tokens_per_s is None else self.tokens_per_s
        self.tokens_per_s = before + RATE_WEIGHT * (rate - before)

    async def _next_batch(self) -> list[_Waiting[Item, Answer]]:
        """Wait as the class describes, then remove the oldest item and those of similar length."""
        while (oldest := self._oldest()) is None or (left_s := self._left_s(oldest)) > 0:
            self._arrival.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), None if oldest is None else left_s)
        start = bisect_left(self._by_length, oldest)
        lengths = [waiting.length for waiting in self._by_length]
        return self._remove(*widest_slice(lengths, start, self._max_batch_tokens))

    def _left_s(self, oldest: _Waiting[Item, Answer]) -> float:
        """Return the seconds that the next batch may still wait for more items; 0 or less if it
        starts now."""
        full = self._waiting_tokens >= self._max_batch_tokens
        if full or len(self._by_length) >= self._last_size:
            return 0.0
        return min(oldest.arrived_s, self._last_end_s) + self._max_wait_s - time.monotonic()

    def _oldest(self) -> _Waiting[Item, Answer] | None:
        while self._by_age and not self._by_age[0].queued:
            self._by_age.popleft()
        return self._by_age[0] if self._by_age else None

    def _remove(self, first: int, end: int) -> list[_Waiting[Item, Answer]]:
        """Remove a slice of the queue, which is ordered by length, and return it."""
        removed = self._by_length[first:end]
        del self._by_length[first:end]
        for waiting in removed:
            waiting.queued = False
        self._waiting_tokens -= sum(waiting.length for waiting in removed)
        return removed
