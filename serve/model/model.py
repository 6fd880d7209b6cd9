"""One model that serves many clients: `Predictor`s of one bundle whose passes a `Batcher` fills."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from bert_core.bundle.layout import Execution
from bert_core.data.cuts import CutPlace, places_of
from bert_core.data.windows import PAD_MULTIPLE, Window
from bert_core.errors import FormatError, InputError
from bert_core.inference.predictor import Predictor
from bert_core.scores import TorchBackend
from bert_core.tasks.base import Parameters
from bert_core.tasks.shapes import Row
from serve.model.answer_cache import AnswerCache, CachedAnswer, keys_of, unpacked
from serve.model.answers import MOST_CUT, NOTHING, Answered, Computed, entries_of
from serve.model.batching import Batcher
from serve.model.card import Card
from serve.model.changes import VECTORS_NOTE, gives_vectors
from serve.model.lineage import ancestors
from serve.model.shared_encoders import share
from serve.model.sizes import FEW_BYTES, FEW_SCORES, is_small, masks_of, padded_length, real_length
from serve.observe.records import NO_RECORDER, Recorder, trace_of
from serve.request.errors import (
    DeadlineError,
    FailedError,
    NotReadyError,
    OutOfMemoryError,
    OverloadedError,
    RequestError,
    WrongTaskError,
)
from serve.request.limits import (
    Limits,
    check_candidates,
    check_count,
    check_lists,
    check_numbers,
    check_tokens,
)
from tracking.models.hub import origin

logger = logging.getLogger("ray.serve")

LONGEST_PASS_S = 120.0
"""A pass that runs for longer hangs."""

FAILURES = 3
"""Requests in a row that must fail before the model itself is considered at fault."""

ALLOCATORS = ("DefaultCPUAllocator", "Failed to allocate memory", "bad_alloc", "bad allocation")
"""What messages of torch's and the engines' RuntimeErrors contain if there is no memory left."""

RANGES_OF_BATCH = (
    "The 8 bits of this model take their range from each batch, so that an answer depends a little "
    "on what is asked at the same time: run `raybert export` again, which fixes the ranges."
)

Result = TypeVar("Result")


Verdict = Literal["untried", "sound", "failing"]
"""`untried` until the model has answered a request, `failing` while it fails at every one."""


@dataclass(frozen=True)
class Pass:
    """A window's scores, with the times at which its pass began and ended."""

    scores: np.ndarray
    began_s: float
    ended_s: float


WindowByModel = dict["Model", Window]
"""What a pass computes for one sequence of ids: its window for each model that reads it. The models
have the same `Backend.encoder_key`, and the first computes."""

Passes = Callable[["Model", Sequence[Window]], Awaitable[Sequence[Pass]]]
"""How windows get their passes."""


class Model:
    """A bundle behind a queue. Tokenizing, passes and decoding all run off the event loop."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        device: str,
        threads: int,
        max_batch_tokens: int,
        max_wait_ms: float,
        backend: str = "auto",
        precision: str | None = None,
        prefer: Execution | None = None,
        limits: Limits | None = None,
        truncate: bool = False,
        max_ongoing_requests: int = 256,
        digest: str | None = None,
        version: str | None = None,
        recorder: Recorder = NO_RECORDER,
        cache_mib: int = 0,
    ) -> None:
        """Load the bundle and run it once, to make sure that it answers.

        Args:
            backend, precision, prefer: see `Predictor`.
            cache_mib: see `size_cache`.
            truncate: whether texts are cut unless a request says otherwise.
            max_ongoing_requests: how many come here at once, as `/info` says.
            digest: what the bundle must have; None takes any.
            version: the bundle's version in the registry, if it has one.
            recorder: is told of every pass.
        Raises: FormatError if the bundle is damaged, answers no task, or is another one.
        """
        self.predictor = Predictor(
            folder,
            device=device,
            threads=threads,
            precision=precision,
            backend=backend,
            prefer=prefer,
        )
        self.digest = self.predictor.bundle.digest
        if digest not in (None, self.digest):
            raise FormatError(
                f"{folder}: wanted the bundle {digest[:12]}, with which {name} was deployed, got "
                f"{self.digest[:12]}: deploy it again, so that all replicas have the same weights"
            )
        _check_weights(folder, self.predictor)
        has_weights = isinstance(self.predictor.backend, TorchBackend)
        self.encoder_digest = share(self.predictor.model.encoder) if has_weights else None
        self.predictor.predict(self.predictor.task.examples)
        self.name, self.version = name, version
        self._recorder = recorder
        self.created_s = int(time.time())
        self._lineage = self.predictor.bundle.lineage | origin(folder)
        self.max_batch_tokens = max_batch_tokens
        self.task = self.predictor.task
        self.predictors: Mapping[str, Predictor] = {
            self.task.name: self.predictor,
            **self.predictor.also,
        }
        self.limits = limits or Limits()
        self.truncate, self.max_ongoing_requests = truncate, max_ongoing_requests
        self._cache: AnswerCache | None = None
        self.size_cache(cache_mib)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_progress, self._is_retired = 0, False
        self._closing: asyncio.Task[None] | None = None
        self.verdict: Verdict = "untried"
        """What requests have shown it to be; readiness checks do not count."""
        self.when_judged: Callable[[], None] = lambda: None
        """Called on the event loop when the verdict changes."""
        self._failures = 0
        self._texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="texts")
        self._long_texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-texts")
        self._batcher: Batcher[WindowByModel, dict[Model, Pass]] = Batcher(
            self._forward,
            length_of=lambda windows: padded_length(next(iter(windows.values()))),
            max_batch_tokens=max_batch_tokens,
            max_wait_ms=max_wait_ms,
        )

    @property
    def version_label(self) -> str:
        """What tells its weights apart in metrics and logs: the version in the registry, or else
        the first 12 digits of the digest."""
        return self.version or self.digest[:12]

    @property
    def waiting_tokens(self) -> int:
        """Tokens in the queue, padding included."""
        return self._batcher.waiting_tokens

    def predictor_for(self, task: str) -> Predictor:
        """The predictor for a task. Raises: WrongTaskError if the model does not do it."""
        if task not in self.predictors:
            raise WrongTaskError(
                f"{self.name}: wanted a model for {task}, this one is for "
                f"{', '.join(self.predictors)}: ask another model, /v1/models lists them"
            )
        return self.predictors[task]

    def usual(self, kind: type[Parameters]) -> dict[str, Any]:
        """The parameters of a request that says nothing, where they are not the task's defaults."""
        return {kind.cut_by: True} if self.truncate and kind.cut_by is not None else {}

    async def predict(
        self, inputs: Sequence[Any], parameters: Parameters | None, task: str | None = None
    ) -> list[Any]:
        """The answers of `answer` alone."""
        return (await self.answer(inputs, parameters, task)).answers

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, it is not closed, even if it is retired."""
        self._loop = asyncio.get_running_loop()
        self._in_progress += 1
        try:
            yield
        finally:
            self._in_progress -= 1
            self._close_if_idle()

    @property
    def is_retired(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._is_retired

    def retire(self) -> None:
        """Close it once nobody uses it; may be called from any thread."""
        self._is_retired = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._is_retired and not self._in_progress and self._loop is not None:
            self._closing = self._loop.create_task(self.close())

    def size_cache(self, size_mib: int) -> None:
        """Keep answers of at most so many MiB, from the next request on; 0 keeps none."""
        if not size_mib:
            self._cache = None
        elif self._cache is None:
            self._cache = AnswerCache(size_mib << 20)
        else:
            self._cache.resize(size_mib << 20)

    async def answer(
        self,
        inputs: Sequence[Any],
        parameters: Parameters | None,
        task: str | None = None,
        deadline_s: float | None = None,
        *,
        are_long: bool = False,
        passes: Passes | None = None,
    ) -> Answered:
        """One answer per input, as from `Predictor.predict`.

        Args:
            task: None for the model's own.
            deadline_s: within which it must be ready; None takes the server's. Work that is late
                is dropped from the queue.
            are_long: whether the inputs may take seconds to tokenize.
            passes: None for the model's own.
        Raises: InputError; TooLargeError, OverloadedError or DeadlineError beyond a limit;
            OutOfMemoryError; FailedError if the model fails.
        """
        predictor = self.predictor if task is None else self.predictor_for(task)
        try:
            answered = await self._in_time(
                predictor, inputs, parameters, deadline_s, are_long, self._cache, passes
            )
        except (RequestError, InputError):
            raise
        except Exception as error:
            if _lacks_memory(error):
                logger.warning("%s %s: too little memory", self.name, self.version_label)
                raise OutOfMemoryError(
                    f"wanted more memory for this request than {self.name} can have: try again, "
                    "send fewer or shorter texts at once, or give the server more memory"
                ) from error
            self._judge(failed=True)
            logger.error("%s %s failed: %s", self.name, self.version_label, trace_of(error))
            raise FailedError(
                f"{self.name} failed at this request: try again, its log says why"
            ) from error
        self._judge(failed=False)
        return answered

    def _judge(self, *, failed: bool) -> None:
        """Learn from a request. What lacks memory, or is the caller's fault, says nothing."""
        self._failures = self._failures + 1 if failed else 0
        before = self.verdict
        if not failed:
            self.verdict = "sound"
        elif self._failures >= FAILURES:
            self.verdict = "failing"
        if self.verdict != before:
            self.when_judged()

    async def _in_time(
        self,
        predictor: Predictor,
        inputs: Sequence[Any],
        parameters: Parameters | None,
        deadline_s: float | None,
        are_long: bool,
        cache: AnswerCache | None,
        passes: Passes | None = None,
    ) -> Answered:
        check_count(inputs, self.limits)
        check_lists(inputs, parameters, self.limits)
        self._check_queue(0)  # before tokenizing what will be refused
        limit_s = self.limits.deadline_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit_s):
                with self.in_use():
                    arguments = (predictor, inputs, parameters, are_long, passes)
                    if cache is not None:
                        return await self._recall(cache, *arguments)
                    return (await self._answer(*arguments)).answered
        except TimeoutError as error:
            raise DeadlineError(
                f"wanted an answer within {limit_s:g} s, the request has waited longer: send fewer "
                "texts at once, allow more time, or serve more replicas"
            ) from error

    async def _recall(
        self,
        cache: AnswerCache,
        predictor: Predictor,
        inputs: Sequence[Any],
        parameters: Parameters | None,
        are_long: bool,
        passes: Passes | None,
    ) -> Answered:
        """As `_answer`, but cached answers are not computed again, and equal rows are only once."""
        began_s = time.perf_counter()
        parameters = parameters or predictor.task.parameters()

        def look_up() -> tuple[list[Row], list[bytes], dict[bytes, CachedAnswer]]:
            rows = predictor.rows(list(inputs))
            keys = keys_of(self.digest, predictor.task.name, parameters, rows)
            return rows, keys, cache.find(keys)

        small = _is_small(inputs, parameters)
        rows, keys, cached = look_up() if small else await self.off_loop(look_up)
        missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in cached}
        hits = len(keys) - len(missing)
        self._recorder.recalled(self.name, self.version_label, hits=hits, misses=len(missing))
        looked_s = time.perf_counter() - began_s
        computed = NOTHING
        if missing:
            try:
                left = list(missing.values())
                computed = await self._answer(predictor, left, parameters, are_long, passes)
            except InputError:
                if not hits:
                    raise
                # It named an input by its place among the missing ones: now by that in the request.
                again = await self._answer(predictor, inputs, parameters, are_long, passes)
                return again.answered

        def assemble() -> tuple[list[CachedAnswer], list[Any], list[CutPlace]]:
            new = dict(zip(missing, entries_of(computed), strict=True))
            cache.keep({key: entry for key, entry in new.items() if entry.has_all_cuts})
            entries = [cached.get(key) or new[key] for key in keys]
            # What a request may ask for does not depend on what the cache happens to have.
            check_tokens(sum(entry.padded_tokens for entry in entries), self.limits)
            check_candidates(sum(entry.masks for entry in entries), parameters, self.limits)
            check_numbers(sum(entry.numbers for entry in entries), self.limits)
            return entries, *unpacked(entries)

        size = sum(cached[key].size_bytes for key in keys if key in cached)
        size += sum(each.nbytes for each in computed.scores)
        light = size <= FEW_BYTES
        entries, answers, cut = assemble() if light else await self.off_loop(assemble)
        return replace(
            computed.answered,
            answers=answers,
            tokens=sum(entry.tokens for entry in entries),
            cut=cut[:MOST_CUT],
            tokenize_s=looked_s + computed.answered.tokenize_s,
            hits=hits,
        )

    async def _answer(
        self,
        predictor: Predictor,
        inputs: Sequence[Any],
        parameters: Parameters | None,
        are_long: bool,
        get_passes: Passes | None,
    ) -> Computed:
        began_s = time.perf_counter()

        def encode() -> tuple[list[Any], list[Window]]:
            rows = predictor.rows(list(inputs))
            # Before windows take their time and memory.
            least = PAD_MULTIPLE * predictor.task.least_windows(rows, parameters)
            check_tokens(least, self.limits, at_least=True)
            return rows, predictor.encode(rows, parameters)

        small = _is_small(inputs, parameters)
        rows, windows = encode() if small else await self.off_loop(encode, is_long=are_long)
        encoded_s = time.perf_counter()
        tokens = sum(map(padded_length, windows))
        check_tokens(tokens, self.limits)
        masks = sum(map(masks_of, windows))
        check_candidates(masks, parameters or predictor.task.parameters(), self.limits)
        hidden_size = predictor.bundle.encoder_config.hidden_size
        check_numbers(sum(predictor.task.numbers(windows, hidden_size)), self.limits)
        self._check_queue(tokens)
        passes = await (get_passes or Model.own_passes)(self, windows)
        scores = [each.scores for each in passes]

        def decode() -> tuple[list[Any], list[CutPlace], list[int]]:
            numbers = predictor.task.numbers(windows, hidden_size, scores, parameters)
            check_numbers(sum(numbers), self.limits)  # before the answers take their memory
            answers = predictor.decode(rows, windows, scores, parameters)
            return answers, places_of(predictor.bundle.tokenizer, windows, MOST_CUT), numbers

        light = small and sum(each.size for each in scores) <= FEW_SCORES
        answers, cut, numbers = decode() if light else await self.off_loop(decode, is_long=are_long)
        last_began_s = max((each.began_s for each in passes), default=encoded_s)
        answered = Answered(
            answers=answers,
            tokens=sum(map(real_length, windows)),
            cut=cut,
            tokenize_s=encoded_s - began_s,
            queue_s=max(0.0, last_began_s - encoded_s),
            compute_s=max((each.ended_s for each in passes), default=encoded_s) - last_began_s,
        )
        return Computed(answered, windows, scores, numbers)

    def _check_queue(self, tokens: int) -> None:
        """Raises: OverloadedError if these tokens do not fit the queue. An empty queue takes any
        request."""
        waiting = self.waiting_tokens
        if waiting and waiting + tokens > self.limits.max_queue_tokens:
            rate = self._batcher.tokens_per_s
            wait_s = max(1, math.ceil(waiting / rate)) if rate else 1
            raise OverloadedError(
                f"wanted at most {self.limits.max_queue_tokens} tokens in the queue of "
                f"{self.name}, {waiting} wait: try again in {wait_s} s, or serve more replicas",
                wait_s,
            )

    async def submit(self, windows: WindowByModel) -> dict["Model", Pass]:
        """The pass for one sequence of ids. Cancelling this removes it from the queue."""
        return await self._batcher.submit(windows)

    async def own_passes(self, windows: Sequence[Window]) -> Sequence[Pass]:
        """Passes of this model alone."""
        done = await asyncio.gather(*(self.submit({self: window}) for window in windows))
        return [each[self] for each in done]

    async def off_loop(
        self, function: Callable[..., Result], *arguments: Any, is_long: bool = False
    ) -> Result:
        """Run what may take over a millisecond on the thread for texts, or what may take seconds on
        another, where only its like waits for it."""
        loop = asyncio.get_running_loop()
        executor = self._long_texts if is_long else self._texts
        return await loop.run_in_executor(executor, function, *arguments)

    async def check_ready(self) -> None:
        """Answer the task's examples by a real pass. Raises: whatever that raises."""
        examples = list(self.task.examples)
        await self._in_time(self.predictor, examples, None, None, are_long=False, cache=None)

    async def check_health(self) -> None:
        """Find out whether this process can still compute; costs nothing while passes succeed.

        Raises: as `check_progress`; whatever a pass of the task's examples raises, if the last pass
            failed.
        """
        self.check_progress()
        if self._batcher.last_failed:  # perhaps only because of what it was asked
            await self.check_ready()

    def check_progress(self) -> None:
        """Raises: NotReadyError if a pass does not end."""
        running_s = self._batcher.running_s
        if running_s > LONGEST_PASS_S:
            raise NotReadyError(
                f"{self.name}: wanted a pass within {LONGEST_PASS_S:g} s, it has run for "
                f"{running_s:.0f} s: the process is to be replaced"
            )

    def _notes(self) -> Iterator[str]:
        """What to know about its answers."""
        if self.predictor.bundle.ranges_of_batch:
            yield RANGES_OF_BATCH
        if gives_vectors(self):
            yield VECTORS_NOTE

    def card(self) -> Card:
        return Card(
            id=self.name,
            created=self.created_s,
            version=self.version,
            task=self.task.name,
            also=[name for name in self.predictors if name != self.task.name],
            labels=self.task.labels,
            examples=list(self.predictor.examples),
            metrics=self.predictor.bundle.metrics,
            digest=self.digest,
            encoder_digest=self.encoder_digest,
            backend=self.predictor.execution.engine,
            precision=self.predictor.execution.precision,
            note="; ".join(self._notes()) or None,
            lineage=ancestors(self.digest, self._lineage),
            max_tokens=self.predictor.max_length,
            limits=self.limits,
        )

    async def close(self) -> None:
        """End the threads; requests in progress are cancelled."""
        await self._batcher.close()
        self._texts.shutdown(wait=False)
        self._long_texts.shutdown(wait=False)

    def _forward(self, batch: list[WindowByModel]) -> Sequence[dict["Model", Pass]]:
        """A pass for each set of models that read the same windows."""
        groups: dict[tuple[Model, ...], list[int]] = {}
        for place, item in enumerate(batch):
            groups.setdefault(tuple(item), []).append(place)
        done: dict[int, dict[Model, Pass]] = {}
        for models, places in groups.items():
            done |= zip(places, self._pass(models, [batch[place] for place in places]), strict=True)
        return [done[place] for place in range(len(batch))]

    def _pass(
        self, models: Sequence["Model"], batch: Sequence[WindowByModel]
    ) -> list[dict["Model", Pass]]:
        began_s = time.perf_counter()
        windows = [[item[model] for item in batch] for model in models]
        if len(models) == 1:
            scores = [self.predictor.forward(windows[0])]
        else:
            backends = [model.predictor.backend for model in models]
            pad_id = self.predictor.bundle.tokenizer.pad_id
            scores = backends[0].joint_scores(backends, windows, pad_id)
        ended_s = time.perf_counter()
        read = windows[0]
        self._recorder.passed(
            self.name,
            self.version_label,
            tokens=sum(map(real_length, read)),
            computed=self.predictor.backend.computed_tokens(read),
            fill=len(read) * max(map(padded_length, read)) / self.max_batch_tokens,
        )
        passes = ([Pass(each, began_s, ended_s) for each in its] for its in scores)
        return [dict(zip(models, its, strict=True)) for its in zip(*passes, strict=True)]


def _is_small(inputs: Sequence[Any], parameters: Parameters | None) -> bool:
    """Whether the event loop may tokenize the inputs itself. Parameters count once per input, with
    which each of their labels is read."""
    asked = {} if parameters is None else vars(parameters)
    return is_small(inputs) and is_small([asked] * len(inputs))


def _check_weights(folder: Path, predictor: Predictor) -> None:
    """Raises: FormatError if a weight is NaN, also one that the examples do not use."""
    for name, parameter in predictor.model.named_parameters():
        # Those of a graph are in the graph.
        if parameter.device.type != "meta" and bool(torch.isnan(parameter).any()):
            raise FormatError(
                f"{folder}: wanted numbers as weights, there is NaN in {name}: train the model "
                "again, with a lower learning rate"
            )


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ALLOCATORS)
