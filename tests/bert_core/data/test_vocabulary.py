"""Vocabularies of every kind: the same in every process, in canonical order, at home elsewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from bert_core.data.docstrings import docstrings_of
from bert_core.data.subwords import SPACE, unigram_normalizer
from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer, TokenizerKind
from bert_core.data.vocabulary import (
    BPE_SPECIAL,
    LEAST_ALPHABET,
    LONGEST_PIECE,
    UNIGRAM_SPECIAL,
    train_tokenizer,
)
from bert_core.errors import ConfigError, CorpusError, FormatError

TEXTS = [docstrings_of(Path(json.__file__).parent.joinpath(name).read_bytes()) for name in
         ("__init__.py", "decoder.py", "encoder.py")]  # fmt: skip
TEXT = [text for texts in TEXTS for text in texts] * 3 + ["Café ``naïve'' déjà 海 vu, 漢字!"] * 3
HARD = [
    "Serialize ``obj`` to a JSON formatted ``str``!",
    " leading and  double  spaces ",
    "café naïve 海 漢字 🌊 x" + "y" * 200,
    "<s> [CLS] </s> [MASK] <mask> mask",
    "",
    "Tabs\tand\nlines\r\n",
    "ﬁne ½ Ⅳ",
]
SIZES: dict[TokenizerKind, int] = {"wordpiece": 400, "bpe": 400, "unigram": 300}
SPECIAL: dict[TokenizerKind, tuple[str, ...]] = {
    "wordpiece": SPECIAL_TOKENS,
    "bpe": BPE_SPECIAL,
    "unigram": UNIGRAM_SPECIAL,
}
KINDS = get_args(TokenizerKind)


def trained(kind: TokenizerKind, lowercase: bool = False) -> Tokenizer:
    return train_tokenizer(kind, TEXT, vocab_size=SIZES[kind], lowercase=lowercase)


@pytest.mark.drill
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_fresh_processes_give_the_same_files(kind: TokenizerKind, lowercase: bool) -> None:
    program = (
        "import json, sys, hashlib\n"
        "from bert_core.data.vocabulary import train_tokenizer\n"
        "texts, kind, size, lower = json.load(sys.stdin)\n"
        "made = train_tokenizer(kind, texts, vocab_size=size, lowercase=lower)\n"
        "data = b''.join(data for _, data in sorted(made.files().items()))\n"
        "print(hashlib.sha256(data).hexdigest())\n"
    )
    asked = json.dumps([TEXT, kind, SIZES[kind], lowercase])
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], input=asked, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(3)
    }
    assert len(digests) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_in_canonical_order(kind: TokenizerKind) -> None:
    tokenizer = trained(kind)
    special = SPECIAL[kind]
    assert tuple(tokenizer.vocabulary[:5]) == special
    assert tokenizer.special_ids.tolist() == [0, 1, 2, 3, 4]
    assert tokenizer.kind == kind
    rest = tokenizer.vocabulary[5:]
    if kind == "bpe":
        assert rest[:256] == sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = json.loads(tokenizer.inner.to_str())["model"]["merges"]
        assert rest[256:] == list(dict.fromkeys("".join(pair) for pair in merges))
    elif kind == "unigram":
        assert rest == sorted(rest, key=lambda piece: (len(piece) > 1, piece))
    assert len(tokenizer.vocabulary) == SIZES[kind]


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_ids(
    kind: TokenizerKind, lowercase: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = trained(kind, lowercase)
    tokenizer.save(tmp_path, 64)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.digest == tokenizer.digest
    assert again.lowercase == tokenizer.lowercase == lowercase
    assert theirs.model_max_length == 64
    for text in [*HARD, *TEXT[:40]]:
        [ids] = tokenizer.encode([text], 64)
        assert ids.tolist() == theirs(text, truncation=True)["input_ids"], text
        assert again.encode([text], 64)[0].tolist() == ids.tolist()
    columns = tokenizer.encode_column(pa.array(HARD)).to_pylist()
    wanted = [theirs(text, add_special_tokens=False)["input_ids"] for text in HARD]
    assert columns == wanted
    for name in ("pad", "unk", "cls", "sep", "mask"):
        assert getattr(theirs, f"{name}_token_id") == getattr(tokenizer, f"{name}_id")


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_begins_where_its_space_is(kind: TokenizerKind) -> None:
    tokenizer = trained(kind)
    [ids] = tokenizer.encode([" encoder decoding"], 32)
    begins = tokenizer.begins_word[ids[1:-1]]
    assert begins[0]
    # BPE and Unigram keep the space with the word; WordPiece marks what goes on.
    assert begins.sum() == 2
    assert tokenizer.reads_spaces == (kind == "bpe")


def test_scores_made_from_whole_numbers_split_text_as_well() -> None:
    """Tokens a text beside the scores that the trainer of `tokenizers` came to."""
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZES["unigram"],
        special_tokens=list(UNIGRAM_SPECIAL),
        unk_token="<unk>",
        max_piece_length=LONGEST_PIECE,
        show_progress=False,
    )
    theirs = tokenizers.Tokenizer(models.Unigram())
    theirs.normalizer = unigram_normalizer(False)
    theirs.pre_tokenizer = trained("unigram").inner.pre_tokenizer
    theirs.train_from_iterator(TEXT, trainer)
    ours = trained("unigram")
    assert set(ours.vocabulary) == set(theirs.get_vocab())
    counts = [
        sum(len(one.ids) for one in each.encode_batch(TEXT, add_special_tokens=False))
        for each in (ours.inner, theirs)
    ]
    assert counts[0] < 1.02 * counts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_without_text_or_room_is_refused(kind: TokenizerKind) -> None:
    with pytest.raises(CorpusError, match="wanted text to count words in"):
        train_tokenizer(kind, ["", "  "], vocab_size=500, lowercase=True)
    with pytest.raises(ConfigError, match=r"vocab_size: wanted at least \d+"):
        train_tokenizer(kind, TEXT, vocab_size=30, lowercase=True)


def test_a_tokenizer_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "<s>": 1}, []))
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(FormatError, match=r"\[PAD\], \[UNK\], \[SEP\], \[MASK\] is not in the voc"):
        Tokenizer.load(tmp_path)
    words = tokenizers.Tokenizer(
        models.WordLevel({token: n for n, token in enumerate(SPECIAL_TOKENS)}, unk_token="[UNK]")
    )
    with pytest.raises(FormatError, match="wanted a model of wordpiece, bpe, unigram, got wordl"):
        _ = Tokenizer(words).kind


@pytest.mark.parametrize("accents", [None, True, False])
@pytest.mark.parametrize("chinese", [True, False])
def test_text_preprocessing_is_recorded_in_every_file(
    accents: bool | None, chinese: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    words = [*SPECIAL_TOKENS, "uber", "über", "中文", "中", "文"]
    settings: dict[str, Any] = {
        "lowercase": True,
        "strip_accents": accents,
        "chinese_characters": chinese,
    }
    tokenizer = Tokenizer.from_vocabulary(words, **settings)
    tokenizer.save(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    alone = Tokenizer.load(tmp_path)  # vocab.txt and the settings
    assert alone.digest == tokenizer.digest
    usual = Tokenizer.from_vocabulary(words, lowercase=True)
    assert (usual.digest == tokenizer.digest) == (accents is None and chinese)
    for text in ("Über", "中文", "uber"):
        [ids] = tokenizer.encode([text], 16)
        assert ids.tolist() == theirs(text)["input_ids"] == alone.encode([text], 16)[0].tolist()
        assert tokenizer.encode_column(pa.array([text])).to_pylist() == [ids[1:-1].tolist()]


def test_rare_characters_do_not_fill_a_vocabulary_of_pieces() -> None:
    rare = [f"x{chr(0x4E00 + number)} word" for number in range(1500)]
    tokenizer = train_tokenizer("unigram", [*TEXT * 3, *rare], vocab_size=1300, lowercase=True)
    singles = [piece for piece in tokenizer.vocabulary if len(piece) == 1]
    assert len(singles) <= LEAST_ALPHABET
    assert {"a", "e", "▁"} <= set(singles)


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_text_without_spaces_has_the_characters_that_it_needs(kind: TokenizerKind) -> None:
    rng = np.random.default_rng(0)
    ranks = np.arange(1, 1501)
    shares = (1 / ranks) / (1 / ranks).sum()
    drawn = [rng.choice(ranks, size=60, p=shares) for _ in range(500)]
    texts = ["".join(chr(0x4E00 + rank) for rank in line) for line in drawn]
    tokenizer = train_tokenizer(kind, texts, vocab_size=5000, lowercase=True)
    assert len({piece for piece in tokenizer.vocabulary if len(piece) == 1}) > 1300
    ids = np.concatenate(tokenizer.encode_column(pa.array(texts)).to_pylist())
    assert (ids == tokenizer.unk_id).mean() < 0.002
    again = train_tokenizer(kind, texts[::-1], vocab_size=5000, lowercase=True)
    assert again.digest == tokenizer.digest, "whatever the order of the texts"

    small = train_tokenizer(kind, texts, vocab_size=1500, lowercase=True)
    alphabet = [piece for piece in small.vocabulary if len(piece) == 1 and piece != SPACE]
    assert LEAST_ALPHABET - 1 <= len(alphabet) <= LEAST_ALPHABET
    ids = np.concatenate(small.encode_column(pa.array(texts)).to_pylist())
    assert 0 < (ids == small.unk_id).mean() < 0.1


def test_a_word_is_cut_at_an_unknown_character() -> None:
    known = " ".join(chr(0x4E00 + number) for number in range(LEAST_ALPHABET - 7))
    words = ["begin海ending", "beginb海endingb", "beginne海endinge"] * 8
    tokenizer = train_tokenizer("unigram", [known] * 30 + words, vocab_size=1100, lowercase=True)
    assert "海" not in tokenizer.vocabulary
    assert {f"{SPACE}begin", "ending"} <= set(tokenizer.vocabulary)
    assert f"{SPACE}ending" not in tokenizer.vocabulary, "no word begins there"


def test_text_that_normalizes_to_nothing_is_not_text() -> None:
    with pytest.raises(CorpusError, match="wanted text to count words in"):
        train_tokenizer("unigram", ["\u0301"], vocab_size=300, lowercase=True)


def test_ids_with_a_gap_are_refused(tmp_path: Path) -> None:
    ids = {token: number for number, token in enumerate(SPECIAL_TOKENS)} | {"gap": 40}
    inner = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(FormatError, match="wanted ids without a gap, 6 tokens have ids up to 40"):
        Tokenizer.load(tmp_path)


def test_a_folder_with_other_files_says_how_to_make_ours(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_bytes(b"x")
    with pytest.raises(FormatError, match=r"found only vocab\.json: create the first with transfo"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_of_sentencepiece_becomes_ours_as_the_guide_does_it(tmp_path: Path) -> None:
    """With the replacements of SentencePiece 0.2.3, which transformers 5.23 leaves out."""
    import sentencepiece

    texts = [f"{line} … ﬁne Ｆｕｌｌ ①" for text in TEXTS[0] for line in text.split("\n")][:200]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=f"{tmp_path}/spm", vocab_size=300,
        character_coverage=1.0, hard_vocab_limit=False, minloglevel=2, pad_id=0, bos_id=1, eos_id=2,
        unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]",
    )  # fmt: skip
    (tmp_path / "config.json").write_text('{"model_type": "deberta-v2"}')
    settings = {"tokenizer_class": "DebertaV2Tokenizer", "do_lower_case": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(FormatError, match=r"create the first as docs/guides/hub\.md does of"):
        Tokenizer.load(tmp_path)
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "hub.md").read_text()
    [program] = re.findall(r"```python\n([^`]*sentencepiece_model_pb2.*?)```", guide, re.DOTALL)
    exec(program.replace('Path("deberta")', f"Path({str(tmp_path)!r})"), {})
    theirs = sentencepiece.SentencePieceProcessor(f"{tmp_path}/spm.model")
    ours = Tokenizer.load(tmp_path)
    for text in texts:
        ids = ours.inner.encode(text, add_special_tokens=False).ids
        assert sorted(ids) == sorted(theirs.encode(text))  # of equal cuts either may come
