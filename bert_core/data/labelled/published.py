"""Sets with shapes of their own: SQuAD and CLINC150 (JSON), and SWAG (CSV)."""

from typing import Any

from bert_core.data.json_rows import Unread
from bert_core.data.labelled.lines import Line, Reader, Record, json_of
from bert_core.data.tables import table_rows
from bert_core.errors import CorpusError
from bert_core.wording import shown

ENDINGS = 10
"""Most endings of a row of SWAG's format, to be found by their columns; SWAG has 4."""


def squad(data: bytes, source: str) -> list[Line]:
    """Read the questions of SQuAD 1.1 or 2.0 with their passages, in the order of the file."""
    records: list[Line] = []
    articles = json_of(data, source, "squad")
    if not isinstance(articles, dict):
        do = "correct it"
        if isinstance(articles, list):
            do = "leave the format out if each is a row with question, context and answers"
        raise CorpusError(
            f"{source}: wanted an object as SQuAD publishes it, with data → paragraphs → qas, "
            f"got {shown(articles)}: {do}"
        )
    try:
        for article in articles["data"]:
            for paragraph in article["paragraphs"]:
                context = paragraph["context"] if paragraph["qas"] else ""
                for question in paragraph["qas"]:
                    records.append(_question(question, context, f"question {len(records) + 1:,}"))
    except KeyError as error:
        raise CorpusError(
            f"{source}: wanted SQuAD's data → paragraphs → qas, at question {len(records) + 1} "
            f"there is no {error}: give a file as published by SQuAD"
        ) from error
    except (TypeError, AttributeError) as error:
        raise CorpusError(
            f"{source}: wanted SQuAD's data → paragraphs → qas, got something else at question "
            f"{len(records) + 1} ({error}): give a file as published by SQuAD"
        ) from error
    return records


def _question(question: Any, context: Any, place: str) -> Record | Unread:
    if not isinstance(question, dict) or "question" not in question:
        return Unread(
            f"{place}: wanted an object with a question, as SQuAD publishes it, got "
            f"{shown(question)}: correct or remove it"
        )
    # Without the key it is unknown whether there is an answer: a test set.
    answers = question.get("answers", [] if question.get("is_impossible") else None)
    return {
        "id": question.get("id"),
        "question": question["question"],
        "context": context,
        "answers": answers,
    }


def clinc(split: str) -> Reader:
    """Return a reader of one split of CLINC150's file, with its out-of-scope rows (`oos`)."""

    def read(data: bytes, source: str) -> list[Line]:
        splits = json_of(data, source, f"clinc_{split}")
        if not isinstance(splits, dict) or split not in splits:
            raise CorpusError(
                f"{source}: wanted CLINC150's splits, found no {split!r}: give its data_full.json"
            )
        pairs: list[Any] = []
        for name in (split, f"oos_{split}"):
            of_split = splits.get(name, [])
            if not isinstance(of_split, list):
                raise CorpusError(
                    f"{source}: wanted a list of pairs as CLINC150's split {name!r}, got "
                    f"{shown(of_split)}: give its data_full.json"
                )
            pairs += of_split
        return [
            {"text": pair[0], "intent": pair[1]}
            if isinstance(pair, list) and len(pair) == 2
            else Unread(
                f"pair {number:,} of {split}: wanted a list of text and intent, got {shown(pair)}: "
                "correct or remove it"
            )
            for number, pair in enumerate(pairs, 1)
        ]

    return read


def swag(data: bytes, source: str) -> list[Line]:
    """Read SWAG's situations: `sent1` is the context, and `sent2`, which begins the next sentence,
    is part of every choice, with `ending0`, `ending1`, …; `startphrase` is both sentences.

    Its authors' test file has no labels.
    """
    lines: list[Line] = []
    for number, row in enumerate(table_rows(data, source, keep=True), 1):
        if isinstance(row, Unread):
            lines.append(row)
            continue
        endings = [row.get(f"ending{place}") for place in range(ENDINGS) if f"ending{place}" in row]
        if "sent1" not in row or "sent2" not in row or len(endings) < 2:
            raise CorpusError(
                f"{source}: wanted SWAG's columns sent1, sent2, ending0 to ending3 and label, got "
                f"{', '.join(row)}: give a file as published by SWAG, such as train.csv"
            )
        label = row.get("label")
        if label not in (None, "", *map(str, range(len(endings)))):
            lines.append(
                Unread(
                    f"row {number:,}: wanted a label from 0 to {len(endings) - 1}, the number of "
                    f"an ending, got {label!r}: correct or remove it"
                )
            )
            continue
        record = {
            "text": row["sent1"],
            "choices": [f"{row['sent2']} {ending}".strip() for ending in endings],
        }
        lines.append(record | ({"label": int(label)} if label else {}))
    return lines
