"""What is read off a model beside transformers, which shows the same of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_core.bundle.format import About
from bert_core.bundle.writing import save_bundle
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_tokenizer
from bert_core.errors import InputError
from bert_core.inference.inspection import Attention, attention, cosines, word_uses
from bert_core.objectives.base import ObjectiveModel
from tests import tiny

TAUGHT = "the a old man sat by bank of river and took money to on right is turn answer"
WORDS = TAUGHT.split()
TOKENIZER = tiny.tokenizer([*WORDS, ".", "-", "over", "##turn", "##ed", "##s"])
SENTENCES = ["The old man sat by the bank.", "A man overturned the BANK - the bank of money."]


def config_of(tokenizer: Tokenizer) -> Any:
    return tiny.encoder_config(
        tokenizer.vocab_size, num_hidden_layers=3, max_position_embeddings=24
    )


@pytest.fixture(scope="module")
def model() -> ObjectiveModel:
    return tiny.model(config_of(TOKENIZER)).eval()


@pytest.fixture(scope="module")
def theirs(model: ObjectiveModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The model and its tokenizer, as transformers loads them."""
    import transformers

    path = tmp_path_factory.mktemp("inspection") / "bundle"
    save_bundle(path, model, TOKENIZER, About())
    loaded = transformers.AutoModel.from_pretrained(path, attn_implementation="eager")
    return loaded.eval(), transformers.AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("text_pair", [None, SENTENCES[1]])
def test_attention_is_that_of_transformers_and_its_rows_add_up_to_1(
    text_pair: str | None, model: ObjectiveModel, theirs: tuple[Any, Any]
) -> None:
    seen = attention(model, TOKENIZER, SENTENCES[0], text_pair)
    peer, tokenizer = theirs
    inputs = tokenizer(SENTENCES[0], text_pair, return_tensors="pt")
    with torch.inference_mode():
        wanted = torch.cat(peer(**inputs, output_attentions=True).attentions).numpy()
    assert seen.weights.shape == wanted.shape
    np.testing.assert_allclose(seen.weights, wanted, atol=1e-5)
    np.testing.assert_allclose(seen.weights.sum(-1), 1, atol=1e-5)
    assert seen.tokens == tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    assert seen.special.tolist() == [token in ("[CLS]", "[SEP]") for token in seen.tokens]
    second = seen.tokens[seen.second_start :]
    assert second == ([] if text_pair is None else [*tokenizer.tokenize(text_pair), "[SEP]"])


def test_habits_are_means_over_tokens() -> None:
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(5), size=(2, 3, 5))
    special = np.array([True, False, False, False, True])
    habits = Attention(list("[abc]"), special, 5, weights).habits()
    for layer in range(2):
        for head in range(3):
            own = weights[layer, head]
            plain = {
                "the token itself": sum(own[place][place] for place in range(5)) / 5,
                "the token before": sum(own[place][place - 1] for place in range(1, 5)) / 4,
                "the token after": sum(own[place][place + 1] for place in range(4)) / 4,
                "special tokens": sum(row[0] + row[4] for row in own) / 5,
            }
            assert {name: shares[layer, head] for name, shares in habits.items()} == pytest.approx(
                plain
            )


def test_a_word_is_found_wherever_it_stands_and_is_the_mean_of_its_pieces(
    model: ObjectiveModel, theirs: tuple[Any, Any]
) -> None:
    peer, tokenizer = theirs
    for word, places, pieces in (
        ("bank", [(0, 23, [7]), (1, 21, [7]), (1, 32, [10])], ["bank"]),
        ("overturned", [(1, 6, [3, 4, 5])], ["over", "##turn", "##ed"]),
    ):
        sentences = sorted({number for number, *_ in places})
        seen = word_uses(model, TOKENIZER, word, [SENTENCES[number] for number in sentences])
        assert [(use.sentence, use.start) for use in seen.uses] == [
            (SENTENCES[number], start) for number, start, _ in places
        ]
        for use, (number, start, own), vectors in zip(
            seen.uses, places, seen.vectors.swapaxes(0, 1), strict=True
        ):
            assert use.sentence[use.start : use.end].lower() == word
            assert (use.pieces, use.end) == (pieces, start + len(word))
            inputs = tokenizer(SENTENCES[number], return_tensors="pt")
            assert tokenizer.convert_ids_to_tokens(inputs["input_ids"][0, own]) == pieces
            with torch.inference_mode():
                hidden = peer(**inputs, output_hidden_states=True).hidden_states
            wanted = torch.stack([each[0, own].mean(0) for each in hidden]).numpy()
            np.testing.assert_allclose(vectors, wanted, atol=1e-5)


def test_a_word_within_another_is_not_that_word(model: ObjectiveModel) -> None:
    seen = word_uses(model, TOKENIZER, "turn", ["A man overturned the bank. Turn right."])
    assert [(use.start, use.pieces) for use in seen.uses] == [(27, ["turn"])]


def test_a_word_is_found_between_letters_of_a_script_without_spaces() -> None:
    tokenizer = tiny.tokenizer("鍵を開く")
    model = tiny.model(config_of(tokenizer)).eval()
    seen = word_uses(model, tokenizer, "開く", ["鍵を開く"])
    assert [(use.start, use.end, use.pieces) for use in seen.uses] == [(2, 4, ["開", "く"])]


def test_a_word_of_a_byte_level_vocabulary_is_found_without_its_space(tmp_path: Path) -> None:
    texts = ["a naïve man sat by the bank", "the bank of the river"] * 3
    tokenizer = train_tokenizer("bpe", texts, vocab_size=320, lowercase=False)
    bpe = tiny.model(config_of(tokenizer)).eval()
    for word in ("naïve", "bank", "a"):
        seen = word_uses(bpe, tokenizer, word, [texts[0]])
        (use,) = seen.uses
        assert texts[0][use.start : use.end] == word
        assert "".join(use.pieces).lstrip("▁") == word
    assert attention(bpe, tokenizer, texts[0]).tokens[0] == "<s>"


def test_cosines_are_those_of_plain_arithmetic() -> None:
    vectors = np.random.default_rng(0).normal(size=(2, 4, 6))
    found = cosines(vectors)
    for depth in range(2):
        for first in range(4):
            for second in range(4):
                a, b = vectors[depth, first], vectors[depth, second]
                plain = sum(a * b) / (sum(a * a) ** 0.5 * sum(b * b) ** 0.5)
                assert found[depth, first, second] == pytest.approx(plain)


@pytest.mark.parametrize(
    ("word", "sentence", "message"),
    [
        ("river", "The bank.", r"word_sentences\[1\]: wanted a sentence with the word 'river'"),
        (" ", "The bank.", "word: wanted a word, got ' '"),
        ("bank", "bank " * 30, r"word_sentences\[1\]: wanted at most 24 tokens .* got 32: shorten"),
    ],
)
def test_a_word_that_cannot_be_compared_is_refused(
    word: str, sentence: str, message: str, model: ObjectiveModel
) -> None:
    with pytest.raises(InputError, match=message):
        word_uses(model, TOKENIZER, word, ["The bank of the river.", sentence])


def test_attention_over_a_text_longer_than_the_model_is_refused(model: ObjectiveModel) -> None:
    with pytest.raises(InputError, match=r"text: wanted at most 24 tokens .* got 27: shorten it"):
        attention(model, TOKENIZER, "bank " * 20, "river " * 4)
