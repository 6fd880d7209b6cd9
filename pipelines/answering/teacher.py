"""A ranker's scores of the passages of rows, from which vectors learn as from a column of rows."""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_core import files
from bert_core.errors import ConfigError, CorpusError
from pipelines.answering.predictors import predictor_of
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.progress import counted, meter
from pipelines.runtime.stage_config import StageConfig

if TYPE_CHECKING:
    from bert_core.tasks.base import Task

PAIRS_PER_PART = 512
Pair = tuple[str, str]


@dataclass(frozen=True)
class Teacher:
    """A model for text ranking."""

    name: str
    """The user's reference, for messages."""
    folder: Path
    digest: str
    """Of the bundle."""
    keep: str
    """Folder or URI where its scores are kept, so that a resumed run reads the same."""

    def check(self, task: "type[Task]", threads: int) -> None:
        """Check that its scores can train a task. Raises: ConfigError if it is no ranker, or if the
        task does not learn from scores of passages."""
        from bert_core.tasks.compared_texts import OtherPassages

        if not issubclass(task.target, OtherPassages):
            raise ConfigError(
                f"teacher: wanted none for {task.name}, which does not learn from scores of "
                f"passages, got {self.name}: leave it out, or use `raybert distill`"
            )
        predictor_of.cache_clear()  # an earlier run in this process may have read other contents
        ranker = predictor_of(self.folder.absolute(), threads).task
        if ranker.name != "text-ranking":
            raise ConfigError(
                f"teacher: wanted a model for text-ranking, got {self.name}, which is for "
                f"{ranker.name}: give another, or use `raybert distill` for a teacher of the same "
                "task"
            )

    def taught(
        self, rows: Sequence[dict[str, Any]], source: str, config: StageConfig
    ) -> list[dict[str, Any]]:
        """Return the rows with its scores of `text_pair` and of each of the `negatives`, before the
        sigmoid.

        Raises: CorpusError if a row has no negatives, or has scores.
        """
        _check_rows(rows, source, self.name)
        asked = [
            [(row["text"], passage) for passage in (row["text_pair"], *row["negatives"])]
            for row in rows
        ]
        place_of = {pair: place for place, pair in enumerate(dict.fromkeys(chain(*asked)))}
        scores = self._scores([*place_of], config)
        return [
            {**row, "scores": [float(scores[place_of[pair]]) for pair in pairs]}
            for row, pairs in zip(rows, asked, strict=True)
        ]

    def _scores(self, pairs: Sequence[Pair], config: StageConfig) -> np.ndarray:
        """Return the score of each pair, (pairs,) fp64."""
        key = hashlib.sha256(json.dumps([self.digest, *pairs]).encode()).hexdigest()
        kept = files.join(self.keep, f"teacher-{key[:16]}.npy")
        if files.exists(kept):
            return np.load(io.BytesIO(files.read_bytes(kept)))
        starts = range(0, len(pairs), PAIRS_PER_PART)
        parts = [pairs[start : start + PAIRS_PER_PART] for start in starts]
        work = partial(score_part, self.folder.absolute(), config.threads_per_worker)
        scores = np.empty(len(pairs))
        with meter("scoring", len(pairs), "pairs") as progress:
            for index, part in run_tasks(work, parts, config, use_gpu=True):
                scores[starts[index] : starts[index] + len(part)] = part
                progress.add(len(part))
        stored = io.BytesIO()
        np.save(stored, scores)
        files.write_bytes(kept, stored.getvalue())
        return scores


def score_part(folder: Path, threads: int, pairs: Sequence[Pair]) -> list[float]:
    """Return a ranker's scores of pairs of texts, before the sigmoid; texts are cut at its
    length."""
    ranker = predictor_of(folder, threads)
    parameters: Any = ranker.task.parameters
    rows = [{"text": text, "text_pair": passage} for text, passage in pairs]
    answers = ranker.predict(rows, parameters(truncation=True, raw_scores=True))
    return [float(ranker.task.cells(answer)["score"]) for answer in answers]


def _check_rows(rows: Sequence[dict[str, Any]], source: str, name: str) -> None:
    scored = sum(row.get("scores") is not None for row in rows)
    if scored:
        raise CorpusError(
            f"{source}: wanted rows without scores, since the teacher {name} gives them, got "
            f"{counted(scored, 'row')} with scores: leave the teacher out, or remove the column"
        )
    alone = [number for number, row in enumerate(rows, 1) if not row.get("negatives")]
    if alone:
        raise CorpusError(
            f"{source}: wanted negatives in every row, which the teacher {name} compares with the "
            f"text_pair, got {counted(len(alone), 'row')} without, the first of them row "
            f"{alone[0]}: find some with `raybert mine`, or leave the teacher out"
        )
