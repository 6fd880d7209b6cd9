"""The token-budget batcher, without a model: an item is its own number of tokens."""

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.model.batching import Batcher, widest_slice

Batches = list[list[int]]


class Recorder:
    """Answers an item with its square, and keeps the batches that it saw."""

    def __init__(self, pass_s: float = 0.0) -> None:
        self.batches: Batches = []
        self.pass_s = pass_s
        self.threads: set[int] = set()

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.threads.add(threading.get_ident())
        time.sleep(self.pass_s)
        if -1 in items:
            raise ValueError("this batch is spoilt")
        return [item * item for item in items]


def run_with(
    recorder: Recorder,
    scenario: Callable[[Batcher[int, int]], Coroutine[Any, Any, Any]],
    *,
    max_batch_tokens: int = 100,
    max_wait_ms: float = 5.0,
) -> Any:
    async def main() -> Any:
        batcher = Batcher(
            recorder,
            length_of=abs,
            max_batch_tokens=max_batch_tokens,
            max_wait_ms=max_wait_ms,
        )
        try:
            return await scenario(batcher)
        finally:
            await batcher.close()

    return asyncio.run(main())


async def submit_all(batcher: Batcher[int, int], items: list[int]) -> list[Any]:
    return await asyncio.gather(*map(batcher.submit, items), return_exceptions=True)


def test_one_event_loop_after_another_may_ask(caplog: pytest.LogCaptureFixture) -> None:
    batcher: Batcher[int, int] = Batcher(
        Recorder(), length_of=abs, max_batch_tokens=100, max_wait_ms=5.0
    )

    async def scenario() -> int:
        answer = await batcher.submit(3)
        await asyncio.sleep(0.02)  # it waits for the next item
        return answer

    assert [asyncio.run(scenario()) for _ in range(2)] == [9, 9]
    del batcher
    gc.collect()  # tells what a forgotten task has failed with
    assert not caplog.records


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lengths, st.data(), st.integers(1, 200))
def test_a_slice_holds_its_start_and_fits_the_budget_with_padding(
    values: list[int], data: st.DataObject, budget_tokens: int
) -> None:
    values.sort()
    start = data.draw(st.integers(0, len(values) - 1))
    first, end = widest_slice(values, start, budget_tokens)
    assert first <= start < end
    assert end - first == 1 or (end - first) * values[end - 1] <= budget_tokens
    # Nothing more would fit on either side.
    assert first == 0 or (end - first + 1) * values[end - 1] > budget_tokens
    assert end == len(values) or (end - first + 1) * values[end] > budget_tokens


@given(lengths, st.integers(20, 200))
def test_everyone_gets_their_own_answer_and_no_batch_exceeds_the_budget(
    items: list[int], budget_tokens: int
) -> None:
    recorder = Recorder()
    answers = run_with(
        recorder, lambda b: submit_all(b, items), max_batch_tokens=budget_tokens, max_wait_ms=0.1
    )
    assert answers == [item * item for item in items]
    assert sorted(itertools.chain(*recorder.batches)) == sorted(items)
    for batch in recorder.batches:
        assert len(batch) == 1 or len(batch) * max(batch) <= budget_tokens


def test_similar_lengths_go_together() -> None:
    recorder = Recorder()
    run_with(recorder, lambda b: submit_all(b, [50, 2, 51, 3, 49, 1]), max_batch_tokens=160)
    spreads = [max(batch) - min(batch) for batch in recorder.batches]
    assert max(spreads) <= 2


def test_the_longest_waiting_is_in_every_batch_so_that_none_starves() -> None:
    async def scenario(batcher: Batcher[int, int]) -> list[int]:
        first = asyncio.create_task(batcher.submit(1))
        await asyncio.sleep(0.005)  # its pass is running
        long = asyncio.create_task(batcher.submit(90))
        flood = [asyncio.create_task(batcher.submit(10)) for _ in range(200)]
        await asyncio.gather(first, long)
        answered = sum(task.done() for task in flood)
        await asyncio.gather(*flood)
        return [answered]

    recorder = Recorder(pass_s=0.02)
    (answered_before_it,) = run_with(recorder, scenario)
    assert recorder.batches[1] == [90]
    assert answered_before_it == 0


def test_an_item_beyond_the_budget_goes_alone() -> None:
    recorder = Recorder()
    answers = run_with(recorder, lambda b: submit_all(b, [500, 10, 10]))
    assert answers == [250_000, 100, 100]
    assert [500] in recorder.batches


def test_a_client_alone_never_waits() -> None:
    async def scenario(batcher: Batcher[int, int]) -> float:
        start_s = time.monotonic()
        for _ in range(5):
            await batcher.submit(1)
        return time.monotonic() - start_s

    recorder = Recorder()
    took_s = run_with(recorder, scenario, max_wait_ms=1000.0)
    assert recorder.batches == [[1]] * 5
    assert took_s < 1


def test_a_batch_waits_for_as_many_as_last_time_but_no_longer_than_allowed() -> None:
    async def scenario(batcher: Batcher[int, int]) -> float:
        await submit_all(batcher, [1] * 8)
        start_s = time.monotonic()
        late = [asyncio.create_task(batcher.submit(1)) for _ in range(3)]
        await asyncio.sleep(0.02)
        late.append(asyncio.create_task(batcher.submit(1)))
        await asyncio.gather(*late)
        return time.monotonic() - start_s

    recorder = Recorder()
    took_s = run_with(recorder, scenario, max_wait_ms=100.0)
    assert [len(batch) for batch in recorder.batches] == [8, 4]
    assert 0.05 < took_s < 1


def test_enough_tokens_for_a_full_batch_end_the_wait() -> None:
    async def scenario(batcher: Batcher[int, int]) -> float:
        await submit_all(batcher, [1] * 50)
        start_s = time.monotonic()
        await submit_all(batcher, [50, 50])
        return time.monotonic() - start_s

    assert run_with(Recorder(), scenario, max_wait_ms=2000.0) < 1


def test_an_error_affects_only_its_item() -> None:
    async def scenario(batcher: Batcher[int, int]) -> list[Any]:
        together = await submit_all(batcher, [-1, 2])
        failed = batcher.last_failed
        return [*together, failed, await batcher.submit(3), batcher.last_failed]

    recorder = Recorder()
    spoilt, beside, failed, later, still = run_with(recorder, scenario)
    assert isinstance(spoilt, ValueError)
    assert (beside, failed, later, still) == (4, True, 9, False)
    assert recorder.batches == [[-1, 2], [-1], [2], [3]]


def test_a_wrong_number_of_answers_is_an_error_of_the_batch() -> None:
    async def scenario() -> None:
        batcher: Batcher[int, int] = Batcher(
            lambda items: [], length_of=abs, max_batch_tokens=10, max_wait_ms=1.0
        )
        with pytest.raises(ValueError, match="shorter"):
            await batcher.submit(1)
        await batcher.close()

    asyncio.run(scenario())


def test_a_cancelled_request_is_dropped() -> None:
    async def scenario(batcher: Batcher[int, int]) -> int:
        running = asyncio.create_task(batcher.submit(1))
        await asyncio.sleep(0.005)
        dropped = asyncio.create_task(batcher.submit(2))
        kept = asyncio.create_task(batcher.submit(3))
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.gather(running, dropped, return_exceptions=True)
        return await kept

    recorder = Recorder(pass_s=0.05)
    assert run_with(recorder, scenario) == 9
    assert recorder.batches == [[1], [3]]


def test_the_event_loop_stays_free_during_a_pass() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Waiting(Recorder):
        """Its pass ends when the event loop has run on meanwhile."""

        def __call__(self, items: list[int]) -> list[int]:
            begun.set()
            assert goes_on.wait(60), "the event loop stood still"
            return super().__call__(items)

    async def scenario(batcher: Batcher[int, int]) -> int:
        answer = asyncio.create_task(batcher.submit(2))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        goes_on.set()
        return await answer

    recorder = Waiting()
    assert run_with(recorder, scenario) == 4
    assert threading.get_ident() not in recorder.threads


def test_all_passes_share_one_thread() -> None:
    async def scenario(batcher: Batcher[int, int]) -> None:
        await submit_all(batcher, list(range(1, 60)))

    recorder = Recorder()
    run_with(recorder, scenario)
    assert len(recorder.threads) == 1


def test_closing_cancels_waiting_and_running_work() -> None:
    async def scenario(batcher: Batcher[int, int]) -> list[Any]:
        tasks = [asyncio.create_task(batcher.submit(60)) for _ in range(3)]
        await asyncio.sleep(0.01)
        await batcher.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = run_with(Recorder(pass_s=0.05), scenario)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)


def test_a_closed_batcher_refuses_items_at_once() -> None:
    async def scenario(batcher: Batcher[int, int]) -> None:
        assert await batcher.submit(2) == 4
        await batcher.close()
        with pytest.raises(RuntimeError, match="the batcher is closed"):
            await asyncio.wait_for(batcher.submit(2), 1)

    run_with(Recorder(), scenario)
