"""Models for the examples of docs/serving/clients.md: each learns a few lines, in seconds.

    .venv/bin/python -m tests.serve.example_models FOLDER

writes a bundle per task, and `serve.toml`, which serves them in one process. The models are far too
small for anything but examples: they know the words of their lines, and what lines have in common.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bert_core.batches import collate
from bert_core.bundle.format import About
from bert_core.bundle.writing import save_bundle
from bert_core.data.tokenizer import Tokenizer
from bert_core.objectives.base import ObjectiveModel
from bert_core.tasks.base import Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.feature_extraction import FeatureExtractionOptions
from bert_core.tasks.minimal_pairs import MinimalPairs
from bert_core.tasks.shapes import Row
from bert_core.tasks.sparse_embedding import SparseEmbedding
from tests import tiny

STEPS, LEARNING_RATE = 120, 3e-3
WIDTH_OF_VECTORS = 8
"""Few enough numbers to show them all."""


def sentiment() -> list[Row]:
    ways = {"positive": ["love", "enjoyed", "recommend"], "negative": ["hate", "regret", "skipped"]}
    return [
        {"text": f"I {verb} this {thing}.", "label": label}
        for label, verbs in ways.items()
        for verb, thing in product(verbs, ["film", "book", "song", "meal"])
    ]


def stars() -> list[Row]:
    words = ["awful", "poor", "fair", "good", "superb"]
    return [
        {"text": f"The {thing} was {word}.", "score": float(number)}
        for thing in ("film", "book", "song", "meal")
        for number, word in enumerate(words, 1)
    ]


PEOPLE = ["Ada", "Alan", "Grace", "Kurt"]
TOWNS = ["London", "Paris", "Vienna", "New York"]


def names() -> list[Row]:
    rows: list[Row] = []
    for person, town in product(PEOPLE, TOWNS):
        words = town.split()
        place = ["B-place", *["I-place"] * (len(words) - 1)]
        rows += [
            {"tokens": [person, "lives", "in", *words, "."],
             "tags": ["B-person", "O", "O", *place, "O"]},
            {"tokens": ["In", *words, "I", "met", person, "."],
             "tags": ["O", *place, "O", "O", "B-person", "O"]},
        ]  # fmt: skip
    return rows


def questions() -> list[Row]:
    rows: list[Row] = []
    for person, town in product(PEOPLE, TOWNS):
        context = f"{person} lives in {town}."
        for question, answer in (("Who lives there?", person), (f"Where is {person}?", town)):
            answers = [{"text": answer, "answer_start": context.index(answer)}]
            rows.append({"question": question, "context": context, "answers": answers})
    return rows


CAPITALS = {"France": "Paris", "Austria": "Vienna", "England": "London", "Italy": "Rome"}


def capitals() -> list[Row]:
    rows: list[Row] = []
    for country, capital in CAPITALS.items():
        for way in ("The capital of {} is {}.", "{1} is the capital of {0}."):
            rows += [
                {"text": way.format(country, "[MASK]"), "words": [capital]},
                {"text": way.format("[MASK]", capital), "words": [country]},
            ]
    return rows


TOPICS = {
    "sport": ["The team won the match.", "She ran the race.", "He scored a goal."],
    "food": ["The soup is hot.", "He baked some bread.", "She ate an apple."],
    "money": ["The bank raised its rates.", "He sold his shares.", "Prices fell today."],
}


def likeness() -> list[Row]:
    texts = [(topic, text) for topic, topic_texts in TOPICS.items() for text in topic_texts]
    return [
        {"text": first, "text_pair": second, "score": float(topic == other)}
        for (topic, first), (other, second) in product(texts, texts)
    ]


def inference() -> list[Row]:
    return [
        {
            "text": text,
            "text_pair": f"This example is {label}.",
            "label": "entailment" if label == topic else "contradiction",
        }
        for topic, texts in TOPICS.items()
        for text, label in product(texts, TOPICS)
    ]


QUERIES = {
    "how do I open a file": "Use open to read a file.",
    "how do I sort a list": "Call sorted on the list.",
    "how do I parse a string": "The json module reads a string.",
}


def relevance() -> list[Row]:
    return [
        {"text": query, "text_pair": passage, "score": float(passage == QUERIES[query])}
        for query, passage in product(QUERIES, QUERIES.values())
    ]


def endings() -> list[Row]:
    reasons = {
        "She opened the umbrella because": "it rained.",
        "He closed the window because": "it was cold.",
        "They ate the soup because": "it was good.",
    }
    return [
        {"text": text, "choices": [right, wrong] if first else [wrong, right],
         "label": 0 if first else 1}
        for text, right in reasons.items()
        for wrong in ["it was a fish.", *reasons.values()]
        for first in (True, False)
        if wrong != right
    ]  # fmt: skip


def stories() -> list[Row]:
    texts = {
        "The ship left the port.": "It sailed to the west.",
        "He opened the book.": "It told of the sea.",
        "The soup is hot.": "Wait until you eat it.",
    }
    return [
        {"text": first, "text_pair": second, "label": "IsNext" if right == second else "NotNext"}
        for (first, right), second in product(texts.items(), texts.values())
    ]


def nested() -> list[Row]:
    """Banks that are named after countries, in words that other rows have."""
    rows: list[Row] = []
    for country in CAPITALS:
        text = f"The bank of {country} raised its rates."
        spans = [
            {"start": 4, "end": 12 + len(country), "label": "bank"},
            {"start": 12, "end": 12 + len(country), "label": "place"},
        ]
        rows.append({"text": text, "spans": spans})
        text = f"He sold his shares in {country}."
        spans = [{"start": 22, "end": 22 + len(country), "label": "place"}]
        rows.append({"text": text, "spans": spans})
    return rows


def relations() -> list[Row]:
    """Who lives where, and what is the capital of what, in words that other rows have."""
    lives: list[Row] = [
        {"text": f"<e1>{person}</e1> lives in <e2>{town}</e2>.", "label": "lives"}
        for person, town in product(PEOPLE, TOWNS)
    ]
    capital: list[Row] = [
        {"text": f"The capital of <e1>{country}</e1> is <e2>{town}</e2>.", "label": "capital"}
        for country, town in CAPITALS.items()
    ]
    return lives + capital


MODELS: Mapping[str, tuple[str, Callable[[], list[Row]], Any]] = {
    "sentiment": ("text-classification", sentiment, None),
    "stars": ("text-regression", stars, None),
    "names": ("token-classification", names, None),
    "questions": ("question-answering", questions, None),
    "capitals": ("fill-mask", capitals, None),
    "vectors": ("feature-extraction", likeness, FeatureExtractionOptions(normalize=True)),
    "nli": ("text-classification", inference, None),
    "ranking": ("text-ranking", relevance, None),
    "choices": ("multiple-choice", endings, None),
    "stories": ("next-sentence-prediction", stories, None),
    "nested": ("span-classification", nested, None),
    "relations": ("relation-classification", relations, None),
}
"""Name → its task, the lines that it learns, and the task's options."""

SAME_HEAD = {"sparse-embedding": "sparse", "minimal-pairs": "likelier"}
"""Tasks for which the weights of `capitals` serve → the name of that model."""


def vocabulary() -> Tokenizer:
    """Every word of all lines, and the letters."""
    texts: list[str] = []

    def gather(value: Any) -> None:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                gather(item)

    for _, rows, _ in MODELS.values():
        gather(rows())
    splits = tiny.tokenizer().inner
    words: dict[str, None] = dict.fromkeys(tiny.pieces(tiny.ALPHABET))
    for text in texts:
        normal = splits.normalizer.normalize_str(re.sub(r"\[MASK\]|</?e[12]>", " ", text))
        words |= dict.fromkeys(word for word, _ in splits.pre_tokenizer.pre_tokenize_str(normal))
    return tiny.tokenizer(words)


def trained(task: Task, rows: Sequence[Row], tokenizer: Tokenizer) -> ObjectiveModel:
    """A model that has learned all rows, as one batch in every step."""
    config = tiny.encoder_config(
        tokenizer.vocab_size,
        dropout=0.0,
        hidden_size=WIDTH_OF_VECTORS if task.name == "feature-extraction" else 32,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    model = tiny.model(config, task.build_objective)
    windows = task.encode(rows, tokenizer, 64, labelled=True)
    batch = collate(windows, tokenizer.pad_id)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    model.train()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (STEPS - step) / (STEPS / 2))
        parts = model(batch).values()
        loss = sum(part.sum / part.count for part in parts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def write(folder: Path) -> dict[str, Path]:
    """A bundle per model. Returns: their folders by name."""
    tokenizer, folders = vocabulary(), {}

    def save(name: str, model: ObjectiveModel, task: Task) -> None:
        folders[name] = folder / name
        save_bundle(folders[name], model, tokenizer, About(task=task))

    for name, (task_name, make_rows, options) in MODELS.items():
        rows = make_rows()
        task = TASKS[task_name].from_rows(rows, options)
        model = trained(task, rows, tokenizer)
        save(name, model, task)
        if name == "capitals":
            for same_head in (SparseEmbedding(), MinimalPairs()):
                other = tiny.model(model.encoder.config, same_head.build_objective)
                other.load_state_dict(model.state_dict())
                save(SAME_HEAD[same_head.name], other, same_head)
    models = "".join(f'  "{name}={path}",\n' for name, path in folders.items())
    (folder / "serve.toml").write_text(
        f"together = true\nnum_cpus = 1.0\nmodels = [\n{models}]\n", encoding="utf-8"
    )
    return folders


if __name__ == "__main__":
    write(Path(sys.argv[1]))
