"""A vocabulary with more tokens: what stays, what the new rows are, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_core.bundle.format import About, load_bundle
from bert_core.bundle.new_words import widened, with_new_tokens
from bert_core.bundle.writing import save_bundle
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError
from bert_core.objectives.mlm import MaskedLanguageModeling
from tests import tiny

LETTERS = tiny.pieces("abcdefghijklmnopqrstuvwxyz")


def wordpiece(lowercase: bool = True) -> Tokenizer:
    return tiny.tokenizer(dict.fromkeys([*tiny.WORDS, *LETTERS]), lowercase=lowercase)


def test_new_words_follow_the_others_and_all_else_is_cut_as_before(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    before = wordpiece()
    after = with_new_tokens(before, ["Troponin", "ecmo"])
    assert after.vocabulary == [*before.vocabulary, "troponin", "ecmo"]
    texts = ["the sea is blue", "Troponin, and ecmo.", "troponins"]
    old, new = ([ids.tolist() for ids in each.ids(texts)] for each in (before, after))
    first = before.vocab_size
    assert new[0] == old[0]
    assert new[1].count(first) == new[1].count(first + 1) == 1
    assert len(new[1]) < len(old[1])
    assert new[2] == [first, before.vocabulary.index("##s")]
    assert (after.kind, after.lowercase, after.digest) != (before.kind, True, before.digest)
    after.save(tmp_path)
    assert Tokenizer.load(tmp_path).digest == after.digest
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert [theirs(text, add_special_tokens=False)["input_ids"] for text in texts] == new


def test_other_kinds_of_vocabularies_get_whole_words(tmp_path: Path) -> None:
    inner = tiny.xlm_roberta_tokenizer()
    inner.save_pretrained(tmp_path / "unigram")
    before = Tokenizer.load(tmp_path / "unigram")
    after = with_new_tokens(before, ["troponin"])
    first = before.vocab_size
    texts = ["sea troponin blue", "troponins"]
    ids = [ids.tolist() for ids in after.ids(texts)]
    assert ids[0].count(first) == 1
    assert first not in ids[1]
    after.save(tmp_path / "wider")
    assert [each.tolist() for each in Tokenizer.load(tmp_path / "wider").ids(texts)] == ids


def test_a_new_row_is_the_mean_of_the_pieces_that_it_replaces(tmp_path: Path) -> None:
    before = wordpiece()
    config = tiny.encoder_config(before.vocab_size, dropout=0.0)
    model = tiny.model(config, MaskedLanguageModeling, noise=0.1)
    save_bundle(tmp_path / "old", model, before, About())
    bundle = load_bundle(tmp_path / "old")
    after = with_new_tokens(before, ["troponin"])
    wider = widened(bundle, after).eval()
    pieces = torch.as_tensor(before.ids(["troponin"])[0].astype("int64"))
    count = before.vocab_size
    assert len(pieces) == 8
    torch.testing.assert_close(wider.word_embeddings[count], model.word_embeddings[pieces].mean(0))
    heads: Any = [each.objectives["mlm"].head for each in (wider, model)]
    torch.testing.assert_close(heads[0].bias[count], heads[1].bias[pieces].mean())
    ids = torch.tensor([[2, 7, 4, 9, 3]])
    batch = {
        "input_ids": ids,
        "token_type_ids": torch.zeros_like(ids),
        "mlm_positions": torch.tensor([2]),
    }
    scores = wider.logits(batch)["mlm"]
    torch.testing.assert_close(scores[:, :count], model.eval().logits(batch)["mlm"])
    save_bundle(tmp_path / "new", wider, after, About())
    again = load_bundle(tmp_path / "new")
    assert again.encoder_config == replace(config, embeddings=again.encoder_config.embeddings)
    assert again.tokenizer.digest == after.digest


def test_rows_that_a_model_has_for_no_token_are_used_first(tmp_path: Path) -> None:
    before = wordpiece()
    config = tiny.encoder_config(before.vocab_size + 8)
    save_bundle(tmp_path / "old", tiny.model(config, MaskedLanguageModeling), before, About())
    bundle = load_bundle(tmp_path / "old")
    wider = widened(bundle, with_new_tokens(before, ["troponin"]))
    assert wider.encoder.config == config
    pieces = torch.as_tensor(before.ids(["troponin"])[0].astype("int64"))
    own = wider.word_embeddings
    torch.testing.assert_close(own[before.vocab_size], own[pieces].mean(0))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            ["sea"],
            "add_tokens: wanted tokens that the vocabulary lacks, it has 'sea': leave it out",
        ),
        (["Sea"], "it has 'sea'"),
        (["ecmo", "ECMO"], "add_tokens: wanted each token once, got 'ecmo' twice"),
        (
            ["heart attack"],
            "wanted single words, .* got 'heart attack': give its parts",
        ),
        (["covid-19"], "add_tokens: wanted single words"),
        ([" "], "add_tokens: wanted single words"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(tokens: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_new_tokens(wordpiece(), tokens)
