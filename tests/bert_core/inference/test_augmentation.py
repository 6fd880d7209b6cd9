"""Words that may stand for others, as a plain model finds them, and rows that are made of them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from bert_core.bundle.format import load_bundle
from bert_core.errors import FormatError
from bert_core.inference.augmentation import Candidates, Word, augmented, varied
from bert_core.objectives.mlm import MaskedLanguageModeling
from tests import tiny

WORDS = ["the", "sea", "is", "blue", "tree", "green", "ship", "un", "##known", "##s", "7", ",", "."]
TOKENIZER = tiny.tokenizer(WORDS)
LETTERS = {"the", "sea", "is", "blue", "tree", "green", "ship", "un"}
TEXT = "The sea, 7 unknown ships."


@pytest.fixture(scope="module", params=[True, False])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that fills masks, or does not."""
    folder = tmp_path_factory.mktemp("bundle") / str(request.param)
    objectives = [MaskedLanguageModeling] if request.param else []
    return tiny.bundle(folder, TOKENIZER, objectives=objectives)


def nearest(folder: Path, pieces: list[str], count: int) -> list[str]:
    """By the cosine with the mean of unit vectors, one at a time."""
    table = load_bundle(folder).state["encoder.embeddings.word_embeddings.weight"]
    unit = [functional.normalize(row, dim=0) for row in table]
    ids = {word: index for index, word in enumerate(TOKENIZER.vocabulary)}
    mean = torch.stack([unit[ids[piece]] for piece in pieces]).mean(0)
    others = [word for word in LETTERS if word not in pieces]
    return sorted(others, key=lambda word: -float(unit[ids[word]] @ mean))[:count]


def test_candidates_are_those_of_a_plain_model(bundle: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    fills = bundle.name == "True"
    (words,) = Candidates(bundle, count=3, fill_masks=fills).words([TEXT])
    assert [TEXT[word.start : word.end] for word in words] == ["The", "sea", "unknown", "ships"]
    assert list(words[2].candidates) == nearest(bundle, ["un", "##known"], 3)
    assert list(words[3].candidates) == nearest(bundle, ["ship", "##s"], 3)
    if not fills:
        assert list(words[1].candidates) == nearest(bundle, ["sea"], 3)
        return
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    model = AutoModelForMaskedLM.from_pretrained(bundle).eval()
    masked = tokenizer("The [MASK], 7 unknown ships.", return_tensors="pt")
    (place,) = (masked["input_ids"][0] == tokenizer.mask_token_id).nonzero()[:, 0]
    with torch.no_grad():
        scores = model(**masked).logits[0, place]
    order = tokenizer.convert_ids_to_tokens(scores.argsort(descending=True))
    assert list(words[1].candidates) == [word for word in order if word in LETTERS][:3]


def test_a_bundle_that_fills_no_masks_is_named(bundle: Path) -> None:
    if bundle.name == "False":
        with pytest.raises(FormatError, match="wanted a bundle for fill-mask"):
            Candidates(bundle, count=3, fill_masks=True)


def test_new_rows_keep_what_is_right_and_are_the_same_again(bundle: Path) -> None:
    source = Candidates(bundle, count=3, fill_masks=bundle.name == "True")
    rows = [
        {"text": TEXT, "label": "a"},
        {"text": "the tree", "text_pair": "the green sea", "label": "b"},
        {"text": "7, 7.", "label": "a"},
    ]

    def made(seed: int = 0) -> list[dict]:
        fields = ("text", "text_pair")
        return augmented(rows, fields, source, copies=5, share=0.6, seed=seed)

    new = made()
    assert made() == new != made(seed=1)
    assert [row["label"] for row in new] == ["a"] * 5 + ["b"] * 5 + ["a"] * 5
    assert {row["text"] for row in new[10:]} == {"7, 7."}
    assert len({row["text"] for row in new[:5]}) > 1
    assert len({row["text_pair"] for row in new[5:10]}) > 1
    for row in new[:5]:
        left, _, right = row["text"].partition(", 7 ")
        assert len(left.split()) == len(right.removesuffix(".").split()) == 2


def test_a_word_is_replaced_with_the_given_probability_by_each_candidate_alike() -> None:
    words = [Word(0, 1, (0,), ("b", "c")), Word(2, 3, (1,), ()), Word(4, 5, (2,), ("d",))]
    rng, draws = np.random.default_rng(0), 4000
    texts = [varied("a x a", words, 0.4, rng) for _ in range(draws)]
    for place, letter, share in ((0, "b", 0.2), (0, "c", 0.2), (4, "d", 0.4), (2, "x", 1.0)):
        seen = sum(text[place] == letter for text in texts)
        spread = (draws * share * (1 - share)) ** 0.5
        assert abs(seen - draws * share) <= 4 * spread
