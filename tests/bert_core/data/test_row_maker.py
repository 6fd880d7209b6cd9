"""Rows of a shard: what was counted is there, and nothing depends on how much is made at once."""

import hashlib
from collections import Counter
from typing import Any, get_args

import numpy as np
import pytest
import tokenizers

from bert_core.data import row_maker as module
from bert_core.data.masking import STRATEGIES, MaskingConfig, Strategy
from bert_core.data.pairs import LABELS, Documents, PairsConfig, PairsKind
from bert_core.data.ragged import offsets_of
from bert_core.data.row_maker import RowMaker
from bert_core.data.shards import ShardRows
from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer

KINDS: tuple[PairsKind, ...] = get_args(PairsKind)
PIECES = [f"{'##' * (n % 3 == 2)}{letter}{n}" for n, letter in enumerate("abcdefgh" * 12)]
TOKENIZER = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *PIECES], lowercase=True)
ARRAYS = ("input_ids", "offsets", "segment_b_start", "masked_positions", "masked_labels")


def documents_of(count: int = 16, seed: int = 0) -> Documents:
    rng = np.random.default_rng(seed)
    sentences = rng.integers(1, 9, count)
    lengths = rng.integers(1, 30, sentences.sum())
    return Documents(
        input_ids=rng.integers(5, TOKENIZER.vocab_size, lengths.sum()).astype(np.uint16),
        sentence_offsets=offsets_of(lengths),
        document_offsets=offsets_of(sentences),
        digests=[hashlib.sha256(bytes([n])).digest() for n in range(count)],
        num_own=count,
    )


def made(
    kind: PairsKind = "nsp",
    documents: Documents | None = None,
    seed: int = 0,
    shard: int = 0,
    **masking: Any,
) -> tuple[ShardRows, Counter[str]]:
    pairs = PairsConfig(kind=kind, max_length=64, dupe_factor=2)
    maker = RowMaker(TOKENIZER, pairs, MaskingConfig(max_predictions_per_seq=9, **masking))
    return maker(documents or documents_of(), seed, shard)


def columns(rows: ShardRows) -> dict[str, list]:
    """Every column of the rows."""
    found = {name: getattr(rows, name).tolist() for name in (*ARRAYS, "masked_offsets")}
    found |= {name: column.tolist() for name, column in rows.labels.items()}
    return found | {"begins": [] if rows.begins_word is None else rows.begins_word.tolist()}


def unmasked(rows: ShardRows) -> list[list[int]]:
    found = []
    for row in map(rows.row, range(len(rows))):
        ids = row.input_ids.copy()
        ids[row.masked_positions] = row.masked_labels
        found.append(ids.tolist())
    return found


@pytest.mark.drill
@pytest.mark.parametrize("slice_tokens", [1, 500])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_how_many_are_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
    kind: PairsKind,
    strategy: Strategy,
    dynamic: bool,
    slice_tokens: int,
) -> None:
    rows, counts = made(kind, strategy=strategy, dynamic=dynamic)
    assert len(rows.input_ids) > 1500
    monkeypatch.setattr(module, "SLICE_TOKENS", slice_tokens)
    again, counts_again = made(kind, strategy=strategy, dynamic=dynamic)
    assert columns(again) == columns(rows)
    assert counts_again == counts


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_what_the_rows_hold(kind: PairsKind, strategy: Strategy) -> None:
    rows, counts = made(kind, strategy=strategy)
    seen: Counter[str] = Counter()
    for row in map(rows.row, range(len(rows))):
        ids = row.input_ids[row.masked_positions]
        assert 1 <= len(row.input_ids) <= 64
        assert len(ids) <= 9
        assert (np.diff(row.masked_positions) > 0).all()
        assert not np.isin(row.masked_labels, TOKENIZER.special_ids).any()
        seen.update(
            rows=1,
            row_tokens=len(row.input_ids),
            masked_tokens=len(ids),
            masked_as_mask=int((ids == TOKENIZER.mask_id).sum()),
            masked_as_they_are=int((ids == row.masked_labels).sum()),
            **{f"{name}_1": label for name, label in row.labels.items()},
        )
    assert counts == seen
    assert counts["masked_as_mask"] > counts["masked_as_they_are"] > 0
    label = LABELS[kind]
    assert list(rows.labels) == ([label] if label else [])
    assert rows.masked_offsets[-1] == len(rows.masked_positions) == len(rows.masked_labels)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_masks_come_later_have_word_starts_and_no_masks(
    kind: PairsKind, strategy: Strategy
) -> None:
    rows, counts = made(kind, strategy=strategy, dynamic=True)
    starts = TOKENIZER.begins_word
    for row in map(rows.row, range(len(rows))):
        assert row.begins_word is not None
        assert row.begins_word.tolist() == starts[row.input_ids].tolist()
        assert len(row.masked_positions) == len(row.masked_labels) == 0
    assert not np.isin(rows.input_ids, TOKENIZER.mask_id).any()
    assert not [name for name in counts if name.startswith("masked")]
    # Pairs and their order do not depend on masks.
    static, _ = made(kind, strategy=strategy)
    assert static.begins_word is None
    assert unmasked(static) == unmasked(rows)
    assert static.segment_b_start.tolist() == rows.segment_b_start.tolist()


def test_words_begin_where_no_sign_of_continuation_is() -> None:
    wanted = [not token.startswith("##") for token in TOKENIZER.vocabulary]
    assert TOKENIZER.begins_word.tolist() == wanted
    assert wanted.count(False) == 32
    written = TOKENIZER.inner.to_str()
    other, none = (
        Tokenizer(tokenizers.Tokenizer.from_str(written.replace("##", sign))) for sign in ("@@", "")
    )
    assert other.begins_word.tolist() == wanted
    assert none.begins_word.all(), "nothing says which tokens continue a word"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_laid_out_with_special_tokens_and_one_length(kind: PairsKind) -> None:
    rows, _ = made(kind, dynamic=True)
    cls_id, sep_id = TOKENIZER.cls_id, TOKENIZER.sep_id
    for row in map(rows.row, range(len(rows))):
        ids = row.input_ids.tolist()
        assert (ids[0], ids[-1], ids.count(cls_id)) == (cls_id, sep_id, 1)
        assert ids[row.segment_b_start - 1] == sep_id
        if LABELS[kind]:
            assert ids.count(sep_id) == 2
            assert 3 <= row.segment_b_start < len(ids) - 1
        else:
            assert row.segment_b_start == len(ids)


@pytest.mark.parametrize("kind", ["full_sentences", "doc_sentences"])
def test_every_id_is_in_as_many_rows_as_there_are_duplicates(kind: PairsKind) -> None:
    documents = documents_of()
    rows, _ = made(kind, documents)
    seen = Counter(n for ids in unmasked(rows) for n in ids if n not in TOKENIZER.special_ids)
    assert seen == {n: 2 * count for n, count in Counter(documents.input_ids.tolist()).items()}


def test_seed_and_shard_say_what_is_drawn() -> None:
    first, second, third = (
        made(seed=seed, shard=shard)[0] for seed, shard in ((0, 0), (0, 1), (1, 0))
    )
    assert columns(made()[0]) == columns(first)
    different = [unmasked(rows) for rows in (first, second, third)]
    assert different[0] != different[1] != different[2] != different[0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_documents_make_no_rows(kind: PairsKind, dynamic: bool) -> None:
    rows, counts = made(kind, documents_of(0), dynamic=dynamic)
    assert len(rows) == 0
    assert rows.offsets.tolist() == [0]
    assert not +counts
    assert {"rows", "row_tokens"} <= counts.keys()
