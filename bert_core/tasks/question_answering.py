"""The span of a passage that answers a question, or none (Devlin et al. 2018, sections 4.2, 4.3).

A passage longer than `max_length` is read in overlapping windows. The answers from all
windows compete by score; a span that occurs in several windows gets its best score. The score of
"no answer" is that of the first token, the minimum over the windows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypedDict

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from bert_core.checks import NonNegativeInt, PositiveInt, Range, check_fields
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import (
    Cut,
    Window,
    first_ids_of,
    pieces_of,
    slices,
    with_special_tokens,
)
from bert_core.data.words import parts_of
from bert_core.errors import InputError
from bert_core.metrics.squad import exact_match, squad_metrics, token_f1
from bert_core.model.config import EncoderConfig
from bert_core.objectives.graph_scores import SPAN
from bert_core.tasks.base import Kind, Options, Parameters, Remarks, Task, numbered
from bert_core.tasks.evaluation import Columns, Evaluated
from bert_core.tasks.shapes import Row

if TYPE_CHECKING:
    from bert_core.objectives.span import Span

NO_ANSWER = -1
"""With an empty text, an `answer_start` that means that the passage has no answer."""
BEST_ENDS = 20
"""How many starts, and how many ends, are combined with each other per window."""


@dataclass(frozen=True, kw_only=True)
class QuestionInput:
    """A question about a passage."""

    question: str
    """The question."""
    context: str
    """The passage, of any length."""


class Answer(TypedDict):
    """One right answer."""

    text: str
    answer_start: int


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The expected answers to a question, in SQuAD's form."""

    answers: list[Answer]
    """`{"text": …, "answer_start": …}` for each accepted answer; empty if there is none."""
    id: str | None = None
    """The question's id."""

    def __post_init__(self) -> None:
        for answer in self.answers:
            text, start = answer.get("text"), answer.get("answer_start")
            whole = isinstance(start, int) and not isinstance(start, bool)
            if not (isinstance(text, str) and whole and (text or start == NO_ANSWER)):
                raise InputError(
                    "wanted answers with a text and its answer_start, a whole number, got "
                    f"{answer}: correct the row, or remove it"
                )


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringOptions(Options):
    """Options of question answering."""

    free_names: ClassVar = frozenset(
        {"doc_stride", "max_length", "max_question_length", "no_answer"}
    )
    own_names: ClassVar = frozenset({"max_length"})

    doc_stride: NonNegativeInt = 128
    """Tokens shared by neighbouring windows of a long passage, at most half a window; as in
    transformers, not the distance between windows as in google-research/bert."""
    max_length: Annotated[int, Range(least=8)] | None = None
    """Maximum tokens of a window, special ones included; by default as many as in training, else
    the model's positions."""
    max_question_length: PositiveInt = 64
    """Maximum tokens of a question; longer ones are cut."""
    no_answer: bool = False
    """Whether a passage may contain no answer (SQuAD 2.0)."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringParameters(Parameters):
    """Hugging Face's parameters for question answering."""

    top_k: PositiveInt = 1
    """Number of answers, best first."""
    max_answer_len: PositiveInt = 30
    """Maximum tokens of an answer."""
    handle_impossible_answer: bool | None = None
    """Whether "no answer" competes too, as an empty answer; None does as the model was trained."""
    align_to_words: bool = True
    """Extend answers to whole words, or their parts between punctuation marks, as transformers 4
    did; in scripts without spaces they stay as they are."""
    doc_stride: NonNegativeInt | None = None
    """Tokens shared by neighbouring windows; None takes the model's option."""
    max_question_len: PositiveInt | None = None
    """Maximum tokens of a question; None takes the model's option."""
    max_seq_len: Annotated[int, Range(least=8)] | None = None
    """Maximum tokens of a window, special ones included, if lower than the model's positions; None
    takes the model's option."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


class QuestionAnswering(Task):
    """Rows are SQuAD's: question, context and answers."""

    name = "question-answering"
    objective = "span"
    graph_scores = SPAN
    inputs = QuestionInput
    target = Answers
    kinds = (
        Kind(
            name="answerable",
            rows=(
                {
                    "question": "Where is the tower?",
                    "context": "The tower stands in Paris.",
                    "answers": [{"text": "Paris", "answer_start": 20}],
                    "id": "tower-1",
                },
                {
                    "question": "What is closed?",
                    "context": "The file is closed.",
                    "answers": [{"text": "The file", "answer_start": 0}],
                    "id": "file-1",
                },
            ),
        ),
        Kind(
            name="some-unanswerable",
            rows=(
                {
                    "question": "Who built the tower?",
                    "context": "The tower stands in Paris.",
                    "answers": [],
                    "id": "tower-2",
                },
                {
                    "question": "What is closed?",
                    "context": "The file is closed.",
                    "answers": [{"text": "The file", "answer_start": 0}],
                    "id": "file-1",
                },
            ),
            options={"no_answer": True},
        ),
    )
    primary_metric = "f1"
    single_is_bare = True
    parameters = QuestionAnsweringParameters
    options = QuestionAnsweringOptions
    shared = ("context",)
    examples = (
        {"question": "Where is the tower?", "context": "The Eiffel Tower stands in Paris."},
    )
    cell_types: Mapping[str, pa.DataType] = {
        "answer": pa.string(), "score": pa.float64(), "start": pa.int64(), "end": pa.int64(),
    }  # fmt: skip

    chosen: QuestionAnsweringOptions

    @classmethod
    def from_huggingface(
        cls, entries: Mapping[str, Any], labels: list[str]
    ) -> "QuestionAnswering | None":
        return cls()

    @classmethod
    def checked_row(cls, row: Row, options: Any = None, *, learned: bool = True) -> Row:
        answers = [answer for answer in row["answers"] if answer["text"]]
        if learned and answers and answers[0]["text"] not in row["context"]:
            raise InputError(
                f"wanted an answer that is in the passage, got {answers[0]['text'][:80]!r}: "
                "correct the row, or remove it"
            )
        return {**row, "answers": answers}

    def check_trained(self, row: Row) -> None:
        if not row["answers"] and not self.chosen.no_answer:
            raise InputError(
                "wanted an answer, got none: set options.no_answer if passages may contain none "
                "(SQuAD 2.0), or remove the row"
            )

    def to_learn(self, rows: Sequence[Row], max_length: int) -> "QuestionAnswering":
        max_length = min(max_length, self.chosen.max_length or max_length)
        return QuestionAnswering(options=replace(self.chosen, max_length=max_length))

    @property
    def max_length(self) -> int | None:
        return self.chosen.max_length

    def is_comparable(self, other: Evaluated) -> bool:
        """Whether both tasks allow "no answer", or both do not; their windows may differ."""
        return (
            isinstance(other, QuestionAnswering) and self.chosen.no_answer == other.chosen.no_answer
        )

    def build_objective(self, config: EncoderConfig) -> "Span":
        from bert_core.objectives.span import Span

        return Span(config)

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: QuestionAnsweringParameters | None = None,
    ) -> list[Window]:
        parameters = parameters or self.parameters()
        wanted = parameters.max_seq_len or self.chosen.max_length
        max_length = min(max_length, wanted or max_length)
        max_question = parameters.max_question_len or self.chosen.max_question_length
        doc_stride = parameters.doc_stride
        if doc_stride is None:
            doc_stride = self.chosen.doc_stride
        longest = min(max_question, max_length)
        questions = first_ids_of(tokenizer, [row["question"] for row in rows], longest)
        contexts = _shared_pieces(tokenizer, [row["context"] for row in rows])
        windows = []
        for number, (row, question, context) in enumerate(
            zip(rows, questions, contexts, strict=True)
        ):
            overhead = 2 + tokenizer.separators
            most = min(max_question, (max_length - overhead) // 2)
            cut_question = question[:most]
            cuts: tuple[Cut, ...] = ()
            if len(cut_question) < len(question):
                cuts = (Cut(row["question"], len(cut_question), "question"),)
            room = max_length - overhead - len(cut_question)
            stride = min(doc_stride, room // 2)
            characters = context.offsets
            if parameters.align_to_words:
                characters = _whole_words(row["context"], context.offsets)
            answer = _first_answer(row, number + 1) if labelled else None
            pieces = None if answer is None else _pieces_of(answer, context.offsets)
            parts = slices(len(context.ids), room, stride)
            missed = answer is not None and not (
                pieces and any(part.holds(*pieces) for part in parts)
            )
            for part in parts:
                sequence = with_special_tokens(
                    tokenizer, cut_question, context.ids[part.first : part.end]
                )
                offsets = characters[part.first : part.end]
                labels = {}
                if labelled:
                    begin, end = 0, 0
                    if pieces and part.holds(*pieces):
                        begin, end = (at - part.first + sequence.second_start for at in pieces)
                    labels = {
                        "start_positions": np.array([begin], dtype=np.int64),
                        "end_positions": np.array([end], dtype=np.int64),
                    }
                windows.append(
                    Window(
                        row=number,
                        ids=(sequence.ids,),
                        segment_b_start=(sequence.segment_b_start,),
                        labels=labels,
                        origin=(sequence.second_start, offsets),
                        cuts=cuts,
                        lacks_answer=missed,
                    )
                )
        return windows

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "_ 2"]],
        parameters: QuestionAnsweringParameters | None = None,
    ) -> list[Any]:
        """Return one answer per row, or a list of `top_k` answers if that is above 1."""
        parameters = parameters or self.parameters()
        with_none = parameters.handle_impossible_answer
        with_none = self.chosen.no_answer if with_none is None else with_none
        scored = zip(windows, scores, strict=True)
        by_row = groupby(scored, key=lambda pair: pair[0].row)
        answers = []
        for row, (_, of_row) in zip(rows, by_row, strict=True):
            spans: dict[tuple[int, int], float] = {}
            none = np.inf
            for window, logits in of_row:
                none = min(none, float(logits[0].astype(np.float64).sum()))
                for span, score in _spans(window, logits, parameters.max_answer_len).items():
                    spans[span] = max(spans.get(span, -np.inf), score)
            answers.append(
                self._answer(row, spans, none, with_none=with_none, top_k=parameters.top_k)
            )
        return answers

    def _answer(
        self,
        row: Row,
        spans: dict[tuple[int, int], float],
        none: float,
        *,
        with_none: bool,
        top_k: int,
    ) -> Any:
        """Return the answer to a row, or a list of `top_k` answers if that is above 1. Scores are
        probabilities over the row's spans, and over "no answer" if it competes.

        Args:
            spans: characters of each span → its score.
            none: the score of "no answer".
            with_none: whether "no answer" competes.
        """
        candidates = sorted(spans.items(), key=lambda item: -item[1])
        values = [score for _, score in candidates]
        if with_none or not candidates:
            candidates.append(((0, 0), none))
            values.append(none)
        highest = max(values)
        total = sum(np.exp(score - highest) for score in values)
        candidates.sort(key=lambda item: -item[1])
        answers = [
            {
                "score": float(np.exp(score - highest) / total),
                "start": start,
                "end": end,
                "answer": row["context"][start:end],
            }
            for (start, end), score in candidates[:top_k]
        ]
        if self.chosen.no_answer and spans:
            best, score = max(spans.items(), key=lambda item: item[1])
            answers[0] |= {
                "best_span": row["context"][best[0] : best[1]],
                "advantage": float(score - none),
            }
        return answers[0] if top_k == 1 else answers

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        columns: dict[str, list[float]] = {"exact_match": [], "f1": [], "has_answer": []}
        if self.chosen.no_answer:
            columns |= {"answered_exact_match": [], "answered_f1": [], "advantage": []}
        rules = {"no_answer": self.chosen.no_answer}
        for row, answer in zip(rows, answers, strict=True):
            truths = [truth["text"] for truth in row["answers"]]
            columns["exact_match"].append(exact_match(answer["answer"], truths, **rules))
            columns["f1"].append(token_f1(answer["answer"], truths, **rules))
            columns["has_answer"].append(float(bool(truths)))
            if self.chosen.no_answer:
                best = answer.get("best_span", answer["answer"])
                columns["answered_exact_match"].append(exact_match(best, truths, **rules))
                columns["answered_f1"].append(token_f1(best, truths, **rules))
                columns["advantage"].append(answer.get("advantage", 0.0))
        return {name: np.array(values) for name, values in columns.items()}

    def constant(self, rows: Sequence[Row]) -> Columns:
        return self.compare(rows, [{"answer": ""} for _ in rows])

    def cells(self, answer: Any) -> dict[str, Any]:
        best = answer if isinstance(answer, dict) else answer[0]
        return {name: best[name] for name in ("answer", "score", "start", "end")}

    def metrics(self, columns: Columns) -> dict[str, float]:
        return squad_metrics(columns)

    def confidence(self, answers: Sequence[Any]) -> Float[np.ndarray, "rows"]:
        return np.array([answer["score"] for answer in answers])

    def remarks(self, rows: Sequence[Row]) -> Remarks:
        misplaced = sum(
            not _stands(row["context"], answer) for row in rows for answer in row["answers"]
        )
        return {**super().remarks(rows), "answers_not_where_they_are_said_to_be": misplaced}


def _stands(context: str, answer: Mapping[str, Any]) -> bool:
    start, text = answer["answer_start"], answer["text"]
    return start >= 0 and context[start : start + len(text)] == text


def _first_answer(row: Row, number: int) -> tuple[int, int] | None:
    """Return the characters (start, end) of the first answer, None if there are no answers. If the
    answer is not at `answer_start`, those of its nearest occurrence.

    Args:
        number: number of the row, from 1, for the message.
    Raises: CorpusError if the passage does not contain the answer.
    """
    if not row["answers"]:
        return None
    answer = row["answers"][0]
    context, text, start = row["context"], answer["text"], answer["answer_start"]
    if not _stands(context, answer):
        with numbered(number):
            QuestionAnswering.checked_row(row)
        places = [place for place in range(len(context)) if context.startswith(text, place)]
        start = min(places, key=lambda place: abs(place - start))
    return start, start + len(text)


def _whole_words(context: str, offsets: Int[np.ndarray, "pieces 2"]) -> Int[np.ndarray, "pieces 2"]:
    """Return the characters of each piece, extended to the whole parts of words that it touches."""
    parts = parts_of(context)
    if not len(parts):
        return offsets
    first = np.searchsorted(parts[:, 1], offsets[:, 0], side="right")
    last = np.searchsorted(parts[:, 0], offsets[:, 1], side="left") - 1
    within = (first <= last)[:, None]  # white space and marks that modify nothing are in no part
    bounds = [np.clip(side, 0, len(parts) - 1) for side in (first, last)]
    whole = np.stack([parts[bounds[0], 0], parts[bounds[1], 1]], axis=1)
    return np.where(within, whole, offsets)


def _shared_pieces(tokenizer: Tokenizer, contexts: Sequence[str]) -> list[Any]:
    """Return the pieces of each passage. A passage shared by many questions is tokenized once."""
    different = list(dict.fromkeys(contexts))
    pieces = dict(zip(different, pieces_of(tokenizer, different), strict=True))
    return [pieces[context] for context in contexts]


def _pieces_of(
    answer: tuple[int, int], offsets: Int[np.ndarray, "pieces 2"]
) -> tuple[int, int] | None:
    """Return the first and the last piece that cover characters of an answer; None if no piece
    does."""
    start, end = answer
    inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def _spans(
    window: Window, logits: Float[np.ndarray, "seq 2"], most_tokens: int
) -> dict[tuple[int, int], float]:
    """Return character spans of the window's best answers → their scores."""
    second_start, offsets = window.origin
    wide = logits[second_start : second_start + len(offsets)].astype(np.float64)
    begins, ends = (np.argsort(-wide[:, side], kind="stable")[:BEST_ENDS] for side in (0, 1))
    first, last = (grid.ravel() for grid in np.meshgrid(begins, ends, indexing="ij"))
    possible = (first <= last) & (last - first < most_tokens)
    first, last = first[possible], last[possible]
    values = wide[first, 0] + wide[last, 1]
    starts, stops = offsets[first, 0].tolist(), offsets[last, 1].tolist()
    scores: dict[tuple[int, int], float] = {}
    for start, stop, value in zip(starts, stops, values.tolist(), strict=True):
        scores[start, stop] = max(scores.get((start, stop), -np.inf), value)
    return scores
