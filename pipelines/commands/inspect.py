"""`raybert inspect`: look inside a model, on one self-contained page.

Attention, candidates for masks, whether one text follows another, the nearest sentences, and how a
word's vector changes from layer to layer: whichever of these are requested, with a summary in the
terminal. The page, `inspect.html`, draws itself from the JSON that is inserted into it.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_core import files
from bert_core.checks import PositiveInt, check_fields
from bert_core.data.special_tokens import MASK, OTHER_NAMES
from bert_core.errors import ConfigError, FormatError, InputError
from bert_core.wording import shortened
from pipelines.runtime.progress import say

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor

ENCODER = "feature-extraction"
"""The task that needs no head."""
PAGE, DATA = Path(__file__).with_name("inspect.html"), "{{data}}"
MOST_TOKENS = 128
"""Limit of a text whose attention is drawn: the page grows with its square, for every head."""

Found = dict[str, Any]
"""The content of a section, as JSON."""
Heads = Callable[[str], "Predictor"]
"""Name of a task → the model with its head."""


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Which model to look into, and what to ask it."""

    model: str
    """Bundle, or folder in Hugging Face layout: a path, a URI, models:/name@alias, or owner/name of
    the Hugging Face hub."""
    text: str | None = None
    """Text whose attention is drawn, by layer and head; up to 128 tokens."""
    text_pair: str | None = None
    """Second text, after `text`."""
    next_sentence: bool = False
    """Predict whether `text_pair` follows `text`; needs a model trained for that."""
    masked: str | None = None
    """Text with [MASK] for each word to predict; needs a model trained for that."""
    top_k: PositiveInt = 5
    """Candidates per mask."""
    sentences: tuple[str, ...] = ()
    """Sentences to sort by how near their vectors are to that of `text`."""
    word: str | None = None
    """Word whose vectors are compared wherever it occurs in `word_sentences`."""
    word_sentences: tuple[str, ...] = ()
    """Sentences that contain the word."""
    output: str = "runs/inspect.html"
    """Path or URI of the page."""
    tracking_uri: str | None = None
    """MLflow store; by default the one in MLFLOW_TRACKING_URI, or else runs/mlflow.db."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.text, self.masked, self.word) == (None, None, None):
            raise ConfigError(
                'inspect: wanted something to look at, got nothing: give --text "…", --masked '
                '"… [MASK] …", or --word … with --word_sentences \'["…", "…"]\''
            )
        for name in ("text", "text_pair", "masked", "word", "sentences", "word_sentences"):
            value = getattr(self, name) or ()
            for text in (value,) if isinstance(value, str) else value:
                if not text.strip():
                    raise ConfigError(f"{name}: wanted text, got {text!r}: give some, or omit it")
        for name, other in (
            ("text_pair", "text"),
            ("next_sentence", "text_pair"),
            ("sentences", "text"),
            ("word", "word_sentences"),
            ("word_sentences", "word"),
        ):
            if getattr(self, name) and not getattr(self, other):
                raise ConfigError(f"{name}: wanted {other} with it, got none: give both")
        masks = (MASK, OTHER_NAMES[MASK])
        if self.masked is not None and not any(mask in self.masked for mask in masks):
            raise ConfigError(
                f"masked: wanted a text with {MASK} for each word to predict, got "
                f"{shortened(self.masked)!r}: put it where a word is missing"
            )


def run(config: InspectConfig) -> None:
    """Write the page, and print its summary."""
    sections = look(config)
    size_bytes = write_page(config.output, sections)
    for line in summary(sections):
        say(line)
    say(f"inspect: {config.output}, {size_bytes / 1e6:.1f} MB, opens in any browser")


def look(config: InspectConfig) -> dict[str, Found]:
    """Return the requested sections, by name.

    Raises: ConfigError if the model lacks a requested head; InputError if a text is too long, or
        lacks the word.
    """
    from bert_core.bundle.format import load_bundle
    from bert_core.inference.predictor import Predictor
    from tracking.models.references import Reference

    bundle = load_bundle(Reference.parse(config.model).fetch(uri=config.tracking_uri))
    heads = cache(lambda task: Predictor(bundle, task=task))
    return {
        name: section.find(config, heads)
        for name, section in SECTIONS.items()
        if getattr(config, section.field)
    }


def write_page(path: str, sections: dict[str, Found]) -> int:
    """Write the page atomically; return its size in bytes."""
    # No text may close the script element around it.
    data = json.dumps(sections, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = PAGE.read_text(encoding="utf-8").replace("{{style}}", style() + _shared("attention.css"))
    script = _shared("attention.js").replace("\nexport ", "\n")  # not a module
    page = page.replace("{{attention}}", script).replace(DATA, data)
    encoded = page.encode()
    files.write_bytes(path, encoded)
    return len(encoded)


def style() -> str:
    """Return the style sheet: the colours shared with the server's pages, and the report's own
    rules."""
    return _shared("palette.css") + PAGE.with_name("look.css").read_text(encoding="utf-8")


def _shared(name: str) -> str:
    """Read a file that the server's page uses too."""
    return (resources.files("tracking") / name).read_text(encoding="utf-8")


def summary(sections: dict[str, Found]) -> list[str]:
    """Summarize the page in a few lines per section."""
    return [
        line for name, section in sections.items() for line in SECTIONS[name].summarize(section)
    ]


def _model(config: InspectConfig, heads: Heads) -> Found:
    bundle = heads(ENCODER).bundle
    shape, task = bundle.encoder_config, bundle.task
    return {
        "name": config.model,
        "family": shape.family,
        "task": None if task is None else task.name,
        "layers": shape.num_hidden_layers,
        "heads": shape.attention.num_heads,
        "hidden_size": shape.hidden_size,
        "digest": bundle.digest[:12],
    }


def _attention(config: InspectConfig, heads: Heads) -> Found:
    from bert_core.inference.inspection import attention

    assert config.text is not None
    encoder = heads(ENCODER)
    seen = attention(encoder.model, encoder.bundle.tokenizer, config.text, config.text_pair)
    if len(seen.tokens) > MOST_TOKENS:
        raise InputError(
            f"text: wanted at most {MOST_TOKENS} tokens with the special ones, so that attention "
            f"fits on a page, got {len(seen.tokens)}: shorten it"
        )
    layers, count = seen.weights.shape[:2]
    return {
        "tokens": seen.tokens,
        "second_start": seen.second_start,
        # Thousandths: more digits would not be visible, and would make up most of the page.
        "weights": np.rint(1000 * seen.weights).astype(int).reshape(layers, count, -1).tolist(),
        "habits": {name: _rounded(shares) for name, shares in seen.habits().items()},
    }


def _next_sentence(config: InspectConfig, heads: Heads) -> Found:
    predictor = _with_head(config, heads, "next_sentence", "next-sentence-prediction")
    asked = {"text": config.text, "text_pair": config.text_pair}
    return {**asked, "answer": _ask(predictor, asked, "text_pair")}


def _masks(config: InspectConfig, heads: Heads) -> Found:
    from bert_core.tasks.fill_mask import FillMaskParameters, by_mask

    predictor = _with_head(config, heads, "masked", "fill-mask")
    answer = _ask(predictor, config.masked, "masked", FillMaskParameters(top_k=config.top_k))
    return {"text": config.masked, "masks": by_mask(answer)}


def _nearest(config: InspectConfig, heads: Heads) -> Found:
    from bert_core.inference.inspection import cosines

    texts = {"text": config.text}
    texts |= {f"sentences[{place}]": text for place, text in enumerate(config.sentences)}
    vectors = [_ask(heads(ENCODER), text, field) for field, text in texts.items()]
    similarities = cosines(np.array(vectors))[0, 1:]
    return {
        "text": config.text,
        "sentences": [
            {"text": config.sentences[place], "score": round(float(similarities[place]), 3)}
            for place in np.argsort(-similarities, kind="stable")
        ],
    }


def _word(config: InspectConfig, heads: Heads) -> Found:
    from bert_core.inference.inspection import cosines, word_uses

    assert config.word is not None
    encoder = heads(ENCODER)
    sentences = list(config.word_sentences)
    seen = word_uses(encoder.model, encoder.bundle.tokenizer, config.word, sentences)
    if len(seen.uses) < 2:
        raise InputError(
            f"word_sentences: wanted {config.word!r} at least twice, since its vectors are "
            "compared, got it once: give another sentence with it"
        )
    return {
        "word": config.word,
        "uses": [asdict(use) for use in seen.uses],
        "cosines": _rounded(cosines(seen.vectors)),
    }


def _with_head(config: InspectConfig, heads: Heads, field: str, task: str) -> "Predictor":
    """Return the predictor for `task`. Raises: ConfigError naming `field` if the model has no head
    for it."""
    try:
        return heads(task)
    except FormatError as error:  # the bundle has loaded, so only the head can be missing
        raise ConfigError(
            f"{field}: wanted a model with a head for {task}, which pretraining trains, got "
            f"{config.model}, which has none: give such a model, or leave {field} out"
        ) from error


def _ask(predictor: "Predictor", request: Any, field: str, parameters: Any = None) -> Any:
    """Return the model's answer. Raises: InputError naming the field if its text is longer than the
    model's positions."""
    parameters = parameters or predictor.task.parameters()
    rows = predictor.rows([request])
    windows = predictor.task.encode(
        rows, predictor.bundle.tokenizer, predictor.max_length, parameters=parameters
    )
    longest = max(len(ids) for window in windows for ids in window.ids)
    if longest > predictor.max_length:
        raise InputError(
            f"{field}: wanted at most {predictor.max_length} tokens with the special ones, as many "
            f"as the model has positions, got {longest}: shorten it"
        )
    return predictor.decode(rows, windows, predictor.forward(windows), parameters)[0]


def _rounded(numbers: np.ndarray) -> Any:
    return np.round(numbers.astype(np.float64), 3).tolist()


def _model_lines(model: Found) -> list[str]:
    return [
        f"{model['name']}: {model['family']}, {model['layers']} layers of {model['heads']} heads, "
        f"hidden size {model['hidden_size']}, "
        f"{'pretrained only' if model['task'] is None else model['task']}"
    ]


def _attention_lines(seen: Found) -> list[str]:
    lines = [f"attention over {len(seen['tokens'])} tokens; the head that attends most to"]
    for name, shares in seen["habits"].items():
        layer, head = np.unravel_index(np.argmax(shares), np.shape(shares))
        share = shares[layer][head]
        lines.append(f"  {name:<16} {share:4.0%}  layer {layer + 1}, head {head + 1}")
    return lines


def _next_sentence_lines(seen: Found) -> list[str]:
    best = seen["answer"][0]
    verb = "follows" if best["label"] == "IsNext" else "does not follow"
    return [f"next sentence: {shortened(seen['text_pair'])!r} {verb}, {best['score']:.1%}"]


def _masks_lines(seen: Found) -> list[str]:
    return [f"masks of {shortened(seen['text'])!r}"] + [
        "  " + ", ".join(f"{token['token_str']} {token['score']:.1%}" for token in candidates)
        for candidates in seen["masks"]
    ]


def _nearest_lines(seen: Found) -> list[str]:
    return [f"nearest to {shortened(seen['text'])!r}, by cosine"] + [
        f"  {near['score']:6.3f}  {shortened(near['text'])}" for near in seen["sentences"][:4]
    ]


def _word_lines(seen: Found) -> list[str]:
    """Summarize a word's uses: the pair most alike after the last layer and the pair least alike,
    with their cosines by layer."""
    matrices, uses = np.array(seen["cosines"]), seen["uses"]
    pairs = sorted(combinations(range(len(uses)), 2), key=lambda pair: -matrices[-1][pair])
    lines = [f"{seen['word']!r} in {len(uses)} places, cosines by layer from its embedding on"]
    for pair in dict.fromkeys((pairs[0], pairs[-1])):
        by_layer = " ".join(f"{cosine:.2f}" for cosine in matrices[(slice(None), *pair)])
        lines += [f"  {by_layer}"]
        lines += [f"    {shortened(uses[place]['sentence'])}" for place in pair]
    return lines


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    field: str
    """Field of `InspectConfig` that requests it."""
    find: Callable[[InspectConfig, Heads], Found]
    summarize: Callable[[Found], list[str]]
    """The lines of its summary."""


SECTIONS = {
    "model": Section("model", _model, _model_lines),
    "attention": Section("text", _attention, _attention_lines),
    "next_sentence": Section("next_sentence", _next_sentence, _next_sentence_lines),
    "masks": Section("masked", _masks, _masks_lines),
    "nearest": Section("sentences", _nearest, _nearest_lines),
    "word": Section("word", _word, _word_lines),
}
