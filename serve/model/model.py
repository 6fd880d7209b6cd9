"""One model that serves many clients: the `Predictor`s of a bundle, whose passes a `Batcher`
fills."""

import asyncio
import logging
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakMethod

from bert_core.bundle.layout import Execution
from bert_core.data.windows import Window
from bert_core.errors import FormatError, InputError
from bert_core.inference.predictor import Predictor
from bert_core.inference.vector_spaces import source_of
from bert_core.tasks.base import Parameters
from serve.model.answer_cache import AnswerCache
from serve.model.answers import MOST_CUT, NOTHING, Answered, Computed
from serve.model.batching import Batcher
from serve.model.card import Card
from serve.model.changes import VECTORS_NOTE, gives_vectors
from serve.model.lineage import ancestors
from serve.model.sizes import FEW_BYTES, padded_length, real_length
from serve.model.work import Lookup, Pass, Work
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
from serve.request.limits import Limits
from tracking.models.hub import origin

logger = logging.getLogger("ray.serve")

LONGEST_PASS_S = 120.0
"""A pass that runs for longer hangs."""

FAILURES = 3
"""Requests in a row that must fail before the model itself is considered at fault."""

ALLOCATORS = ("DefaultCPUAllocator", "Failed to allocate memory", "bad_alloc", "bad allocation")
"""Parts of the RuntimeErrors that torch and the engines raise if no memory is left."""

RANGES_OF_BATCH = (
    "The 8 bits of this model take their range from each batch, so that an answer depends a little "
    "on what is asked at the same time: run `raybert export` again, which fixes the ranges."
)

Result = TypeVar("Result")

Verdict = Literal["untried", "sound", "failing"]
"""`untried` until the model has answered a request, `failing` while it fails at every one."""

WindowByModel = dict["Model", Window]
"""A sequence of ids as each model that reads it has it. A pass computes it once: the models have
the same `Backend.encoder_key`, and the first of them computes."""

Passes = Callable[["Model", Sequence[Window]], Awaitable[Sequence[Pass]]]
"""Gets a model's windows their passes."""


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
            max_ongoing_requests: the most requests at once, as shown at `/info`.
            digest: digest that the bundle must have; None accepts any.
            version: the bundle's version in the registry, if it has one.
            recorder: is told of every pass.
        Raises: FormatError if the bundle is damaged, answers no task, or has another digest.
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
        self.encoder_digest = None
        if self.predictor.bundle.graph is None:
            from serve.model.shared_encoders import check_weights, share  # they import torch

            check_weights(folder, self.predictor.model)
            self.encoder_digest = share(self.predictor.model.encoder)
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
        self._spaces: dict[tuple[str, int | None, bool], str | None] = {}
        """What `_space_of` has found: a few, since a request's parameters are checked."""
        self._cache: AnswerCache | None = None
        self.size_cache(cache_mib)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_progress, self._is_retired = 0, False
        self._closing: asyncio.Task[None] | None = None
        self.verdict: Verdict = "untried"
        """How its requests have gone; readiness checks do not count."""
        self.when_judged: Callable[[], None] = lambda: None
        """Called on the event loop when the verdict changes."""
        self._failures = 0
        self._texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="texts")
        self._long_texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-texts")
        # NOTE: a weak reference, since Serve freezes garbage collection: a cycle of the model, with
        # all weights, and its batcher would never be freed.
        self._batcher: Batcher[WindowByModel, dict[Model, Pass]] = Batcher(
            partial(_forward, WeakMethod(self._forward)),
            length_of=lambda windows: padded_length(next(iter(windows.values()))),
            max_batch_tokens=max_batch_tokens,
            max_wait_ms=max_wait_ms,
        )

    @property
    def version_label(self) -> str:
        """The label of its weights in metrics and logs: the version in the registry, or else the
        first 12 digits of the digest."""
        return self.version or self.digest[:12]

    @property
    def waiting_tokens(self) -> int:
        """Tokens in the queue, padding included."""
        return self._batcher.waiting_tokens

    def predictor_for(self, task: str) -> Predictor:
        """Return the predictor for a task. Raises: WrongTaskError if the model does not do it."""
        if task not in self.predictors:
            raise WrongTaskError(
                f"{self.name}: wanted a model for {task}, this one is for "
                f"{', '.join(self.predictors)}: ask another model, /v1/models lists them"
            )
        return self.predictors[task]

    def usual(self, kind: type[Parameters]) -> dict[str, Any]:
        """Return the parameters of a request that gives none, as far as they differ from the task's
        defaults."""
        return {kind.cut_by: True} if self.truncate and kind.cut_by is not None else {}

    async def predict(
        self, inputs: Sequence[Any], parameters: Parameters | None, task: str | None = None
    ) -> list[Any]:
        """Return only the answers that `answer` gives."""
        return (await self.answer(inputs, parameters, task)).answers

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model open inside this context, even if it is retired meanwhile."""
        self._loop = asyncio.get_running_loop()
        self._in_progress += 1
        try:
            yield
        finally:
            self._in_progress -= 1
            self._close_if_idle()

    @property
    def is_retired(self) -> bool:
        """Whether the model is closed, or will be once it is idle."""
        return self._is_retired

    def retire(self) -> None:
        """Close the model once no request uses it; may be called from any thread."""
        self._is_retired = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._is_retired and not self._in_progress and self._loop is not None:
            self._closing = self._loop.create_task(self.close())

    def size_cache(self, size_mib: int) -> None:
        """Limit the cache of answers to `size_mib` MiB, from the next request on; 0 turns it
        off."""
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
        """Return one answer per input, as from `Predictor.predict`.

        Args:
            task: None for the model's own.
            deadline_s: seconds within which the answers must be ready; None means the server's
                deadline. Work that is late is dropped from the queue.
            are_long: whether the inputs may take seconds to tokenize.
            passes: None for the model's own.
        Raises: InputError; TooLargeError, OverloadedError or DeadlineError beyond a limit;
            OutOfMemoryError; FailedError if the model fails.
        """
        work = Work(
            predictor=self.predictor if task is None else self.predictor_for(task),
            inputs=inputs,
            parameters=parameters,
            limits=self.limits,
            compute=self.own_passes if passes is None else partial(passes, self),
            are_long=are_long,
        )
        try:
            answered = await self._in_time(work, deadline_s, self._cache)
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
        space = self._space_of(work)
        return answered if space is None else replace(answered, space=space)

    def _space_of(self, work: Work) -> str | None:
        """Return the digest of the space of the vectors that a request gets; None for other
        answers."""
        asked = work.parameters
        which = (
            work.predictor.task.name,
            getattr(asked, "dimensions", None),
            getattr(asked, "per_token", False),
        )
        if which not in self._spaces:
            source = source_of(work.predictor, asked)
            self._spaces[which] = None if source is None else source.space.digest
        return self._spaces[which]

    def _judge(self, *, failed: bool) -> None:
        """Update the verdict on the model after a request. Lack of memory and the caller's mistakes
        do not count."""
        self._failures = self._failures + 1 if failed else 0
        before = self.verdict
        if not failed:
            self.verdict = "sound"
        elif self._failures >= FAILURES:
            self.verdict = "failing"
        if self.verdict != before:
            self.when_judged()

    async def _in_time(
        self, work: Work, deadline_s: float | None, cache: AnswerCache | None
    ) -> Answered:
        work.check_inputs()
        self._check_queue(0)  # before tokenizing inputs that will be refused
        limit_s = self.limits.deadline_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit_s):
                with self.in_use():
                    if cache is not None:
                        return await self._recall(work, cache)
                    return (await self._compute(work)).answered
        except TimeoutError as error:
            raise DeadlineError(
                f"wanted an answer within {limit_s:g} s, the request has waited longer: send fewer "
                "texts at once, allow more time, or serve more replicas"
            ) from error

    async def _recall(self, work: Work, cache: AnswerCache) -> Answered:
        """Answer as `_compute` does, but take answers from the cache, and compute equal rows only
        once."""
        began_s = time.perf_counter()
        found = await self.run(Lookup.of, work, self.digest, cache, here=work.is_small)
        label, misses = self.version_label, len(found.missing)
        self._recorder.recalled(self.name, label, hits=found.hits, misses=misses)
        looked_s = time.perf_counter() - began_s
        computed = NOTHING
        if found.missing:
            try:
                computed = await self._compute(replace(work, inputs=list(found.missing.values())))
            except InputError:
                if not found.hits:
                    raise
                # The error has the input's place among the missing rows. Computing all rows raises
                # it again, with the place in the request.
                return (await self._compute(work)).answered
        is_light = found.size_bytes + sum(each.nbytes for each in computed.scores) <= FEW_BYTES
        answers, cut, tokens = await self.run(found.answers, computed, cache, here=is_light)
        return replace(
            computed.answered,
            answers=answers,
            tokens=tokens,
            cut=cut[:MOST_CUT],
            tokenize_s=looked_s + computed.answered.tokenize_s,
            hits=found.hits,
        )

    async def _compute(self, work: Work) -> Computed:
        began_s = time.perf_counter()
        are_long = work.are_long
        encoded = await self.run(work.encode, here=work.is_small, is_long=are_long)
        windows = encoded.windows
        encoded_s = time.perf_counter()
        work.check_windows(windows)
        self._check_queue(sum(map(padded_length, windows)))
        passes = await work.compute(windows)
        scores = [each.scores for each in passes]
        here = work.has_few(scores)
        decoded = await self.run(work.decode, encoded, scores, here=here, is_long=are_long)
        last_began_s = max((each.began_s for each in passes), default=encoded_s)
        answered = Answered(
            answers=decoded.answers,
            tokens=sum(map(real_length, windows)),
            cut=decoded.cut,
            tokenize_s=encoded_s - began_s,
            queue_s=max(0.0, last_began_s - encoded_s),
            compute_s=max((each.ended_s for each in passes), default=encoded_s) - last_began_s,
        )
        return Computed(answered, windows, scores, decoded.numbers)

    def _check_queue(self, tokens: int) -> None:
        """Check that these tokens fit the queue; an empty queue accepts any request.
        Raises: OverloadedError.
        """
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
        """Return the pass for one sequence of ids. Cancelling this removes the sequence from the
        queue."""
        return await self._batcher.submit(windows)

    async def own_passes(self, windows: Sequence[Window]) -> Sequence[Pass]:
        """Return the passes of this model's windows, computed for this model only."""
        done = await asyncio.gather(*(self.submit({self: window}) for window in windows))
        return [each[self] for each in done]

    async def off_loop(
        self, function: Callable[..., Result], *arguments: Any, is_long: bool = False
    ) -> Result:
        """Run a function that may take over a millisecond on the thread for texts. A function that
        may take seconds runs on another thread, where only other long work waits for it."""
        loop = asyncio.get_running_loop()
        executor = self._long_texts if is_long else self._texts
        return await loop.run_in_executor(executor, function, *arguments)

    async def run(
        self, function: Callable[..., Result], *arguments: Any, here: bool, is_long: bool = False
    ) -> Result:
        """Run a function on the event loop, or as `off_loop`.

        Args:
            here: whether it takes less than a millisecond.
        """
        if here:
            return function(*arguments)
        return await self.off_loop(function, *arguments, is_long=is_long)

    async def check_ready(self) -> None:
        """Answer the task's examples by a real pass. Raises: whatever that raises."""
        work = Work(
            predictor=self.predictor,
            inputs=list(self.task.examples),
            parameters=None,
            limits=self.limits,
            compute=self.own_passes,
        )
        await self._in_time(work, None, None)

    async def check_health(self) -> None:
        """Find out whether this process can still compute; costs nothing while passes succeed.

        Raises: as `check_progress`; whatever a pass of the task's examples raises, if the last pass
            failed.
        """
        self.check_progress()
        if self._batcher.last_failed:  # perhaps the last request was the cause
            await self.check_ready()

    def check_progress(self) -> None:
        """Check that the current pass does not hang. Raises: NotReadyError."""
        running_s = self._batcher.running_s
        if running_s > LONGEST_PASS_S:
            raise NotReadyError(
                f"{self.name}: wanted a pass within {LONGEST_PASS_S:g} s, it has run for "
                f"{running_s:.0f} s: the process is to be replaced"
            )

    def _notes(self) -> Iterator[str]:
        """Yield advice on the model's answers."""
        if self.predictor.bundle.ranges_of_batch:
            yield RANGES_OF_BATCH
        if gives_vectors(self):
            yield VECTORS_NOTE
        yield from self.task.notes

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
            spaces={
                name: source.space.digest
                for name, predictor in self.predictors.items()
                if (source := source_of(predictor, None)) is not None
            },
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
        """Compute a pass for each set of models that read the same windows."""
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


def _forward(
    of_model: "WeakMethod[Callable[[list[WindowByModel]], Sequence[dict[Model, Pass]]]]",
    batch: list[WindowByModel],
) -> Sequence[dict[Model, Pass]]:
    forward = of_model()
    assert forward is not None, "a model is gone only once no request uses it"
    return forward(batch)


def _lacks_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # None where only graphs have answered
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ALLOCATORS)
