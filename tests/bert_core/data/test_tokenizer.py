"""The vocabulary is the same in every process; the ids are Google's and transformers'."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors

from bert_core import files
from bert_core.data.special_tokens import OTHER_NAMES, UNK
from bert_core.data.tokenizer import MANY_TEXTS, SPECIAL_TOKENS, Tokenizer
from bert_core.data.vocabulary import LEAST_ALPHABET, canonical_order, train_vocabulary
from bert_core.data.windows import with_special_tokens
from bert_core.errors import ConfigError, CorpusError, FormatError, InputError
from tests import tiny

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
OTHERS = [*"!,.'?()[]#-0123456789", "海", "洋", "é", "ß", "İ", "A", "Z"]
PIECES = ["the", "sea", "caf", "##fe", "##ing", "mask", "Sea", "un", "##known"]
VOCABULARY = [
    *SPECIAL_TOKENS,
    *(prefix + character for character in [*LETTERS, *OTHERS] for prefix in ("", "##")),
    *PIECES,
]
UNICODE = "aesAES éÉßİ海#'!.-\t\n\x00\u200b\u2028\u3000…🌊ﬁǅ"
TRICKY = [
    "The sea, the sea!",
    "Café CAFÉ cafe\u0301 naïve ß İstanbul",
    "海 海洋sea海 the海",
    "don't [MASK] the [SEP]sea [mask] [CLS]",
    "a\x00b\u200bc\ufffdd\u2028e\xa0f\u3000g\tx\r\ny",
    "it's (un-known)… “quoted” — 3.14 & $5 `x` ~",
    "🌊 the 🌊sea ﬁne Ⅳ ½",
    "x" * 101 + " " + "a" * 100,
    "##fe #sea # #",
    "",
    "   ",
]


def sample(seed: int = 0) -> list[str]:
    """Texts whose words often occur equally often: ties that a trainer has to break."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(LETTERS, rng.integers(2, 9))) for _ in range(300)]
    return [" ".join(rng.permutation(words)) + " Été, 海洋!" for _ in range(5)]


def train(texts: list[str], *, lowercase: bool = True, vocab_size: int = 400) -> list[str]:
    return train_vocabulary(texts, vocab_size=vocab_size, lowercase=lowercase)


TRAIN = """
import hashlib, json, sys
from bert_core.data.vocabulary import train_vocabulary
vocabulary = train_vocabulary(json.load(sys.stdin), vocab_size=400, lowercase=True)
print(hashlib.sha256("\\n".join(vocabulary).encode()).hexdigest())
"""


def test_fresh_processes_make_the_same_vocabulary() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN],
            env=os.environ | {"PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": parallel},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, parallel in [("1", "false"), ("2", "true")]
    ]
    answers = [process.communicate(json.dumps(sample()))[0].strip() for process in running]
    here = hashlib.sha256("\n".join(train(sample())).encode()).hexdigest()
    assert answers == [here, here]


def test_the_order_of_texts_does_not_matter() -> None:
    assert train(sample()) == train(sample()[::-1])


def test_a_vocabulary_stands_in_canonical_order() -> None:
    vocabulary = train(sample())
    assert len(vocabulary) == len(set(vocabulary)) == 400
    assert vocabulary[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    surfaces = [token.removeprefix("##") for token in vocabulary[5:]]
    singles = [surface for surface in surfaces if len(surface) == 1]
    assert surfaces[: len(singles)] == sorted(singles)
    assert surfaces[len(singles) :] == sorted(surfaces[len(singles) :])
    for token in set(vocabulary) & {f"##{token}" for token in vocabulary}:
        assert vocabulary.index(token.removeprefix("##")) == vocabulary.index(token) - 1
    assert canonical_order(vocabulary[::-1]) == vocabulary
    shuffled = ["##b", "##ab", "b", "a", "##a", "a", "[PAD]", "ab", "abc"]
    assert canonical_order(shuffled)[5:] == ["a", "##a", "b", "##b", "ab", "##ab", "abc"]


def test_every_character_of_the_corpus_is_known_and_frequent_words_are_whole() -> None:
    texts = ["the whale and the sea " * 50, "Ein süßes Café, 海!"]
    vocabulary = train(texts, lowercase=False, vocab_size=120)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=False)
    assert tokenizer.unk_id not in np.concatenate(tokenizer.encode(texts, 10_000))
    assert {"the", "whale", "and", "sea"} <= set(vocabulary)


def test_characters_that_are_rare_in_ordinary_text_are_unknown() -> None:
    letters = "".join(chr(0x4E00 + number) for number in range(LEAST_ALPHABET))
    vocabulary = train([*[letters] * 3, "海"], vocab_size=4000)
    assert set(vocabulary[5:]) == set(letters), "they cover the text, although there is room"
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    assert tokenizer.encode(["海"], 8)[0].tolist() == [
        tokenizer.cls_id,
        tokenizer.unk_id,
        tokenizer.sep_id,
    ]


@pytest.mark.parametrize("texts", [[], ["", "  \n"], ["\x00\u200b"]])
def test_a_corpus_without_words_makes_no_vocabulary(texts: list[str]) -> None:
    with pytest.raises(CorpusError, match="wanted text to count words in, the sample holds none"):
        train(texts)


def test_a_vocabulary_that_cannot_hold_the_alphabet_is_refused() -> None:
    # 5 special tokens, the characters a, b and c, and ##b and ##c, which continue a word.
    assert len(train(["abc"] * 9, vocab_size=10)) == 10
    with pytest.raises(ConfigError, match=r"vocab_size: wanted at least 10 .* got 9: raise"):
        train(["abc"] * 9, vocab_size=9)


@pytest.fixture(params=[True, False], ids=["lowercase", "cased"], scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_vocabulary(VOCABULARY, lowercase=request.param)


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(path)
    return path


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode([text], 10_000)[0].tolist()


@pytest.mark.parametrize("text", TRICKY)
def test_transformers_reads_our_folder_and_gives_our_ids(
    tokenizer: Tokenizer, folder: Path, text: str
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(text)["input_ids"] == ids_of(tokenizer, text)
    assert theirs.vocab_size == tokenizer.vocab_size
    names = ("pad", "unk", "cls", "sep", "mask")
    assert [getattr(theirs, f"{name}_token_id") for name in names] == [
        getattr(tokenizer, f"{name}_id") for name in names
    ]


# Text without special tokens: Google's own script knows them in the vocabulary only.
@given(st.lists(st.sampled_from([*UNICODE, *PIECES, "x" * 99]), max_size=30).map("".join))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_ids_are_those_of_googles_wordpiece_in_python(folder: Path, text: str) -> None:
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    tokenizer = Tokenizer.load(folder)
    google = BertTokenizerLegacy(str(folder / "vocab.txt"), do_lower_case=tokenizer.lowercase)
    expected = google.convert_tokens_to_ids(google.tokenize(text))
    assert ids_of(tokenizer, text)[1:-1] == expected


def test_a_column_has_the_ids_of_encode_without_special_tokens(tokenizer: Tokenizer) -> None:
    column = tokenizer.encode_column(pa.array(TRICKY))
    assert column.type == pa.list_(pa.uint16())
    assert column.to_pylist() == [ids_of(tokenizer, text)[1:-1] for text in TRICKY]
    assert tokenizer.encode_column(pa.array([], pa.string())).to_pylist() == []


def test_texts_are_cut_to_the_maximum_with_both_special_tokens_kept(tokenizer: Tokenizer) -> None:
    [ids] = tokenizer.encode(["the sea " * 50], max_length=6)
    the, sea = VOCABULARY.index("the"), VOCABULARY.index("sea")
    assert ids.tolist() == [tokenizer.cls_id, the, sea, the, sea, tokenizer.sep_id]
    assert ids.dtype == np.uint32
    assert tokenizer.encode([], max_length=6) == []


@pytest.mark.parametrize("count", [1, MANY_TEXTS - 1, MANY_TEXTS, 300])
def test_many_texts_have_the_ids_of_each_alone(tokenizer: Tokenizer, count: int) -> None:
    texts = [*TRICKY, *sample()] * (count // len(TRICKY) + 1)
    for some in (texts[:count], [*texts[: count - 1], "half of a \ud800 pair"]):
        alone = [encoding.ids for encoding in tokenizer.encode_batch(some)]
        assert [ids.tolist() for ids in tokenizer.ids(some)] == alone


def test_several_threads_may_encode_many_texts_at_once(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(2)
    batches = [
        ["".join(rng.choice(LETTERS, rng.integers(1, 9))) for _ in range(MANY_TEXTS)]
        for _ in range(40)
    ]
    alone = [[encoding.ids for encoding in tokenizer.encode_batch(batch)] for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(tokenizer.ids, batches))
    assert [[ids.tolist() for ids in batch] for batch in together] == alone


def test_half_a_surrogate_pair_is_skipped(tokenizer: Tokenizer) -> None:
    assert ids_of(tokenizer, "the \ud83d sea\udc00") == ids_of(tokenizer, "the sea")


def test_a_tokenizer_comes_back_from_its_folder(tokenizer: Tokenizer, folder: Path) -> None:
    loaded = Tokenizer.load(folder)
    assert loaded.digest == tokenizer.digest
    assert loaded.vocabulary == VOCABULARY
    assert loaded.lowercase == tokenizer.lowercase
    assert loaded.files() == tokenizer.files()


def test_a_folder_may_hold_a_vocabulary_alone(
    tokenizer: Tokenizer, folder: Path, tmp_path: Path
) -> None:
    for name in ("vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    loaded = Tokenizer.load(tmp_path)
    assert loaded.digest == tokenizer.digest
    assert [ids_of(loaded, text) for text in TRICKY] == [ids_of(tokenizer, text) for text in TRICKY]


def test_a_tokenizer_is_saved_and_loaded_at_a_uri(tokenizer: Tokenizer, object_store: str) -> None:
    tokenizer.save(f"{object_store}/vocab")
    assert Tokenizer.load(f"{object_store}/vocab").digest == tokenizer.digest


def test_a_vocabulary_file_is_cut_at_line_feeds_alone(tmp_path: Path) -> None:
    tokens = [*SPECIAL_TOKENS, "a", "\u2028", "\x85", "b"]
    (tmp_path / "vocab.txt").write_bytes("\r\n".join(tokens).encode())
    assert Tokenizer.load(tmp_path).vocabulary == tokens


def test_truncation_and_padding_that_a_file_asks_for_are_left_to_us(tmp_path: Path) -> None:
    inner = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True).inner
    inner.enable_truncation(3)
    inner.enable_padding(length=20)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(ids_of(Tokenizer.load(tmp_path), "the sea the sea the sea")) == 8


def test_the_digest_distinguishes_vocabularies_and_casing() -> None:
    changed = [*VOCABULARY[:-2], VOCABULARY[-1], VOCABULARY[-2]]
    digests = {
        Tokenizer.from_vocabulary(vocabulary, lowercase=lowercase).digest
        for vocabulary in (VOCABULARY, changed, VOCABULARY[:-1])
        for lowercase in (True, False)
    }
    assert len(digests) == 6


@pytest.mark.parametrize("alone", [True, False], ids=["vocab.txt", "tokenizer.json"])
def test_the_name_in_use_of_a_special_token_counts(alone: bool, tmp_path: Path) -> None:
    """MPNet's vocabulary has BERT's special tokens too, as ordinary ones."""
    from transformers import AutoTokenizer

    theirs = tiny.mpnet_tokenizer()
    if alone:
        (tmp_path / "vocab.txt").write_text("".join(f"{one}\n" for one in tiny.mpnet_vocabulary()))
    else:
        theirs.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for name in ("pad", "unk", "cls", "sep", "mask"):
        assert getattr(tokenizer, f"{name}_id") == getattr(theirs, f"{name}_token_id"), name
    assert theirs.convert_ids_to_tokens(tokenizer.special_ids.tolist()) == [
        "<s>", "<pad>", "</s>", "[UNK]", "<mask>",
    ]  # fmt: skip
    for text in ("the <mask> is", "A Sea [CLS] the ü"):
        assert ids_of(tokenizer, text) == theirs(text)["input_ids"]
    tokenizer.save(tmp_path / "again", segments=False)
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again("the <mask>", "sea") == theirs("the <mask>", "sea")
    assert Tokenizer.load(tmp_path / "again").digest == tokenizer.digest


def test_special_ids_are_the_five_special_tokens_wherever_they_stand() -> None:
    tokenizer = Tokenizer.from_vocabulary([*VOCABULARY[5:], *SPECIAL_TOKENS], lowercase=True)
    expected = [len(VOCABULARY) - 5 + index for index in range(5)]
    assert tokenizer.special_ids.tolist() == expected
    assert ids_of(tokenizer, "the")[0] == tokenizer.cls_id == expected[2]


@pytest.mark.parametrize(("size", "id_type"), [(1 << 16, pa.uint16()), (65_537, pa.uint32())])
def test_ids_take_two_bytes_where_the_vocabulary_fits(size: int, id_type: pa.DataType) -> None:
    vocabulary = [*SPECIAL_TOKENS, *(f"x{number}" for number in range(size - 5))]
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    assert tokenizer.id_type == id_type
    assert tokenizer.encode_column(pa.array([vocabulary[-1]])).values.type == id_type


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (None, b"", "wanted tokenizer.json or vocab.txt, found neither: give a folder that"),
        ("tokenizer.json", b'{"version": ', "tokenizer.json: wanted JSON, it cannot be read"),
        ("tokenizer.json", b"\xff", "tokenizer.json: wanted JSON, it cannot be read"),
        ("tokenizer.json", b"{}", "cannot be read (.*): copy it again, or train one with"),
        (
            "vocab.txt",
            b"[PAD]\n\xff\n",
            "vocab.txt: wanted UTF-8 with one token per line, byte 6 is",
        ),
        (
            "vocab.txt",
            b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n",
            "wanted the special tokens [PAD], [UNK], [CLS], [SEP], [MASK] (or <pad>, <unk>, <s>, "
            "</s>, <mask>), [MASK] is not in the vocabulary: train it with `raybert vocab`",
        ),
        ("vocab.txt", b"a\n", "[PAD], [UNK], [CLS], [SEP], [MASK] is not in the vocabulary"),
    ],
)
def test_a_folder_that_holds_no_tokenizer_says_why(
    tmp_path: Path, name: str | None, data: bytes, message: str
) -> None:
    if name:
        (tmp_path / name).write_bytes(data)
    pattern = re.escape(message).replace(r"\(\.\*\)", r"\(.*\)")
    with pytest.raises(FormatError, match=pattern):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_without_special_tokens_is_refused(tmp_path: Path) -> None:
    model = tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(files.join(str(tmp_path), "tokenizer.json"))
    with pytest.raises(FormatError, match=r"\[PAD\], \[CLS\], \[SEP\], \[MASK\] is not in the"):
        Tokenizer.load(tmp_path)


CASES = [f"{first}{second}" for first in LETTERS for second in LETTERS]
UNCASED = [*VOCABULARY[:57], *CASES, "海", "##1", "[unused1]"]
CASED = [*UNCASED, *(entry.capitalize() for entry in CASES)]


@pytest.mark.parametrize(
    ("vocabulary", "lowercase", "message"),
    [
        (CASED, True, "vocab: wanted a lower-case vocabulary, since this tokenizer lower-cases "
         "text, 676 of 1,407 entries have capitals: set lowercase in its tokenizer.json (do_lower"),
        (UNCASED, False, "vocab: wanted a cased vocabulary, since this tokenizer keeps capitals, "
         "none of 731 entries has one, so every word with a capital would be [UNK]: set lowercase"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("of_bert", [True, False])
def test_a_vocabulary_of_the_other_casing_is_refused(
    vocabulary: list[str], lowercase: bool, message: str, of_bert: bool
) -> None:
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=lowercase)
    if not of_bert:  # others make text lower-case in steps of their own, or have none at all
        steps = [normalizers.NFD(), normalizers.Lowercase()]
        tokenizer.inner.normalizer = normalizers.Sequence(steps if lowercase else [])
    with pytest.raises(FormatError, match=f"^{re.escape(message)}"):
        tokenizer.check_casing("vocab")


@pytest.mark.parametrize(
    ("vocabulary", "lowercase"),
    [
        (UNCASED, True),
        (CASED, False),
        ([*UNCASED, *CASED[-7:]], True),  # a few that nobody cleaned away
        ([*UNCASED, "A"], False),
        ([*SPECIAL_TOKENS, "a", "B"], True),
        ([*SPECIAL_TOKENS, "a", "b"], False),
        ([*SPECIAL_TOKENS, *map(chr, range(0x4E00, 0x4F00))], False),
    ],
)
def test_a_vocabulary_with_the_models_casing_is_accepted(
    vocabulary: list[str], lowercase: bool
) -> None:
    Tokenizer.from_vocabulary(vocabulary, lowercase=lowercase).check_casing("vocab")


def test_a_vocabulary_whose_entries_bert_would_split_is_refused_alone(tmp_path: Path) -> None:
    """Such as one of chemical formulas; a few such entries are in published vocabularies, too."""
    atoms = ["[nH]", ">>", "[C@H]", "C", "c"]
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{token}\n" for token in (*SPECIAL_TOKENS, "[unused1]", *atoms)))
    message = (
        r"got 3 of 11 with one beside other .* such as '\[nH\]': .* in a tokenizer.json beside"
    )
    with pytest.raises(FormatError, match=message):
        Tokenizer.load(tmp_path)
    names = [*SPECIAL_TOKENS, *OTHER_NAMES.values(), "[unused1]"]
    path.write_text("".join(f"{token}\n" for token in (*names, *atoms[:3], "##...", "##a")))
    assert Tokenizer.load(tmp_path).vocabulary[-1] == "##a"


def written(folder: Path, tokenizer: Tokenizer | None = None, **settings: Any) -> Path:
    """A folder with `vocab.txt` or a `tokenizer.json`, and `tokenizer_config.json`."""
    folder.mkdir()
    if tokenizer is None:
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY))
    else:
        tokenizer.inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def assert_equal_to_transformers(folder: Path, texts: list[str]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = [e.ids for e in Tokenizer.load(folder).encode_batch(texts)]
    assert ours == [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.mark.parametrize("name", ["BertTokenizer", "DistilBertTokenizerFast", None])
@pytest.mark.parametrize("lowercase", [True, False])
def test_the_settings_beside_a_tokenizer_count_as_in_transformers(
    name: str | None, *, lowercase: bool, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_vocabulary(VOCABULARY, lowercase=lowercase)
    named = {} if name is None else {"tokenizer_class": name}
    for number, beside in enumerate(
        (
            {"do_lower_case": True},
            {"do_lower_case": False},
            {"do_lower_case": True, "strip_accents": False},
            {"do_lower_case": False, "tokenize_chinese_chars": False},
        )
    ):
        folder = written(tmp_path / str(number), tokenizer, **named, **beside)
        assert_equal_to_transformers(folder, TRICKY)


def test_a_fast_tokenizer_is_read_as_it_is_whatever_files_are_beside_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)
    other = {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}
    folder = written(tmp_path / "fast", tokenizer, **other)
    assert_equal_to_transformers(folder, TRICKY)
    assert Tokenizer.load(folder).digest == tokenizer.digest


@pytest.mark.parametrize("kept", ["added_tokens.json", "decoder", "decoder, normalized"])
def test_tokens_that_were_added_to_a_vocabulary_are_read(kept: str, tmp_path: Path) -> None:
    count, words = len(VOCABULARY), ["[E1]", "XY"]
    decoder = {
        str(count + n): {"content": word, "normalized": "normalized" in kept, "special": n == 0}
        for n, word in enumerate(words)
    }
    settings: dict[str, Any] = {"added_tokens_decoder": decoder} if "decoder" in kept else {}
    folder = written(tmp_path / "vocabulary", tokenizer_class="BertTokenizer", **settings)
    if not settings:
        listed = {word: count + n for n, word in enumerate(words)}
        (folder / "added_tokens.json").write_text(json.dumps(listed))
    assert_equal_to_transformers(folder, ["a [E1] b", "a [e1] b", "aXY b xy", "xy[E1]", "[E1]s"])
    assert Tokenizer.load(folder).vocab_size == count + 2


@pytest.mark.parametrize("kept", ["special_tokens_map.json", "tokenizer_config.json"])
def test_more_special_tokens_than_the_usual_are_read_as_such(kept: str, tmp_path: Path) -> None:
    word = next(token for token in VOCABULARY if token.isalpha() and len(token) > 1)
    folder = written(tmp_path / "vocabulary", tokenizer_class="BertTokenizer")
    special = {"additional_special_tokens": [word]}
    settings = json.loads((folder / kept).read_text()) if (folder / kept).exists() else {}
    (folder / kept).write_text(json.dumps(settings | special))
    assert_equal_to_transformers(folder, [f"x{word}x", word.upper(), f"a {word} b"])
    assert Tokenizer.load(folder).vocab_size == len(VOCABULARY)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("added_tokens.json", {"[E1]": len(VOCABULARY)}),
        ("tokenizer_config.json", {"added_tokens_decoder": {len(VOCABULARY): {"content": "[E1]"}}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["sea"]}),
        ("special_tokens_map.json", {"additional_special_tokens": ["sea"]}),
    ],
)
def test_tokens_beside_a_tokenizer_json_are_read_too(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)
    folder = written(tmp_path / "whole", tokenizer, tokenizer_class="BertTokenizer")
    before = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(before | settings))
    assert_equal_to_transformers(folder, ["a [E1] b", "xsea SEA", "the sea", "un[E1]known"])


@pytest.mark.parametrize("beside", [{"add_prefix_space": True}, {"add_prefix_space": False}, {}])
@pytest.mark.parametrize("name", ["RobertaTokenizer", "DebertaTokenizerFast"])
@pytest.mark.parametrize("leading", [True, False])
def test_the_space_before_a_text_of_byte_level_bpe_is_as_in_transformers(
    name: str, beside: dict[str, Any], leading: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = ["<s>", "<pad>", "</s>", "<unk>", *alphabet, "Ġs", "<mask>"]
    tokenizer = Tokenizer.from_merges(vocabulary, [("Ġ", "s")], lowercase=False)
    tokenizer.inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=leading)
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": name}
    path.write_text(json.dumps(settings | beside))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    for text in ("s", "sea s", " s", ""):
        assert ours.encode([text], None)[0].tolist() == theirs(text).input_ids


@pytest.mark.parametrize("segments", [True, False])
def test_a_pair_has_segments_if_the_model_is_to_get_them(tmp_path: Path, *, segments: bool) -> None:
    from transformers import AutoTokenizer

    names = ["input_ids", "attention_mask", *(["token_type_ids"] if segments else [])]
    settings: dict[str, Any] = {"tokenizer_class": "BertTokenizer", "model_input_names": names}
    folder = written(tmp_path / "vocabulary", **settings)
    theirs = AutoTokenizer.from_pretrained(folder)("a", "b")
    ours = Tokenizer.load(folder)
    one, other = (np.array(each.ids, dtype=np.uint32) for each in ours.encode_batch(["a", "b"]))
    row = with_special_tokens(ours, one, other)
    assert row.ids.tolist() == theirs["input_ids"]
    start = theirs["token_type_ids"].index(1) if segments else len(row.ids)
    assert row.segment_b_start == start
    ours.save(tmp_path / "again", segments=ours.has_segments)
    assert Tokenizer.load(tmp_path / "again").has_segments is segments


def test_a_class_without_segments_gives_pairs_none(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)
    folder = written(tmp_path / "whole", tokenizer, tokenizer_class="DistilBertTokenizer")
    assert "token_type_ids" not in AutoTokenizer.from_pretrained(folder)("a", "b")
    assert not Tokenizer.load(folder).has_segments


@pytest.mark.parametrize("name", ["BertTokenizer", "PreTrainedTokenizerFast"])
def test_a_template_for_one_text_alone_gives_pairs_as_in_transformers_or_none(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)
    tokenizer.inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = written(tmp_path / "whole", tokenizer, tokenizer_class=name)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert ours.encode(["the sea"], None)[0].tolist() == theirs("the sea").input_ids
    one, other = ours.ids(["the", "sea"])
    if name == "BertTokenizer":
        row = with_special_tokens(ours, one, other)
        assert row.ids.tolist() == theirs("the", "sea").input_ids
        assert row.segment_b_start == theirs("the", "sea").token_type_ids.index(1)
    else:
        assert theirs("the", "sea").input_ids == [*one, *other]
        with pytest.raises(InputError, match=r"wanted no second text, .* the ids \[\] \(wanted"):
            with_special_tokens(ours, one, other)


def test_other_special_tokens_around_a_text_are_refused(tmp_path: Path) -> None:
    for number, tokenizer in enumerate(
        (None, Tokenizer.from_vocabulary(VOCABULARY, lowercase=True))
    ):
        for name, chosen in (("cls_token", "[PAD]"), ("sep_token", {"content": "[PAD]"})):
            folder = written(tmp_path / f"{number}-{name}", tokenizer, **{name: chosen})
            message = rf"wanted ({name} '\[.*|another token for each of .*), got '\[PAD\]'"
            with pytest.raises(FormatError, match=message):
                Tokenizer.load(folder)


@pytest.mark.parametrize("present", [None, processors.ByteLevel()], ids=["none", "offsets-only"])
def test_a_file_without_special_tokens_around_a_text_gets_those_of_bert(
    present: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    inner = _words()
    if present:
        inner.post_processor = present
    inner.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path)
    ours.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs("a b").input_ids == [2, 5, 6, 3] == ours.encode(["a b"], None)[0].tolist()
    assert theirs("a", "b").input_ids == [2, 5, 3, 6, 3]
    assert theirs("a", "b").token_type_ids == [0, 0, 0, 1, 1]
    again = Tokenizer.load(tmp_path / "saved")
    assert again.digest == ours.digest
    assert again.has_segments


def test_a_template_with_other_special_tokens_is_refused(tmp_path: Path) -> None:
    inner = _words()
    inner.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=[("[SEP]", 3)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        FormatError, match=r"wanted a post_processor .* the ids \[3\] \(wanted \[2, 3\]"
    ):
        Tokenizer.load(tmp_path)


def _words() -> tokenizers.Tokenizer:
    """A tokenizer of five special tokens and two words, without a post-processor."""
    ids = {word: number for number, word in enumerate([*SPECIAL_TOKENS, "a", "b"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token=UNK))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return inner


def test_an_added_token_with_an_id_that_it_cannot_have_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "vocabulary")
    (folder / "added_tokens.json").write_text(json.dumps({"[E1]": len(VOCABULARY) + 7}))
    with pytest.raises(FormatError, match=r"wanted the added token '\[E1\]' to have the next id"):
        Tokenizer.load(folder)


def test_a_vocabulary_of_another_class_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "japanese", tokenizer_class="BertJapaneseTokenizer")
    with pytest.raises(FormatError, match=r"wanted BERT's WordPiece.*BertJapaneseTokenizer"):
        Tokenizer.load(folder)


def test_a_wordpiece_with_settings_that_change_ids_has_another_digest() -> None:
    def digest(change: Callable[[dict[str, Any]], object]) -> str:
        contents = json.loads(Tokenizer.from_vocabulary(VOCABULARY, lowercase=True).inner.to_str())
        change(contents)
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(contents))).digest

    word = {"id": 5, "content": VOCABULARY[5], "special": False, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip
    digests = [
        digest(lambda _: None),
        digest(lambda its: its["normalizer"].update(clean_text=False)),
        digest(lambda its: its["model"].update(max_input_chars_per_word=2)),
        digest(lambda its: its["model"].update(continuing_subword_prefix="@@")),
        digest(lambda its: its["added_tokens"].append(word)),
        digest(lambda its: its["added_tokens"].append(word | {"single_word": True})),
    ]
    assert digests[0] == Tokenizer.from_vocabulary(VOCABULARY, lowercase=True).digest
    assert len(set(digests)) == len(digests)
    in_mpnets_file = digest(lambda its: its["added_tokens"][4].update(lstrip=True))
    assert in_mpnets_file == digests[0], "white space separates words anyway"


def test_a_wordpiece_that_splits_texts_by_other_rules_has_another_digest() -> None:
    def digest(pattern: str) -> str:
        inner = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True).inner
        inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        return Tokenizer(inner).digest

    usual = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True).digest
    assert len({digest("[a-z]"), digest("[a-z]{2}"), usual}) == 3
    assert digest("[a-z]") == digest("[a-z]")


def test_a_vocabulary_of_real_text_knows_its_words(data_dir: Path) -> None:
    text = (data_dir / "wikitext2" / "valid.txt").read_text(encoding="utf-8")[:200_000]
    vocabulary = train([text], vocab_size=2000)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    [ids] = tokenizer.encode([text], 1_000_000)
    assert tokenizer.vocab_size == 2000
    assert tokenizer.unk_id not in ids
    assert len(ids) < 1.6 * len(text.split())  # pieces a word
    assert {"the", "lobster", "##ing", "##s"} <= set(vocabulary)


RENAMED = {
    "gemma": ("<pad>", "<unk>", "<bos>", "<eos>", "<mask>"),
    "crossed": ("<s>", "[PAD]", "<pad>", "[UNK]", "</s>"),
    "own": ("⟨0⟩", "⟨?⟩", "⟨a⟩", "⟨z⟩", "⟨_⟩"),
}
"""The five special tokens in the order of `SPECIAL_TOKENS`."""


def renamed(kind: str, names: Sequence[str], folder: Path) -> Path:
    """A folder of a tokenizer of a kind, whose special tokens have other names, and whose
    vocabulary has the usual ones as well, as words."""
    _, unk, cls_, sep, _ = names
    usual = [*SPECIAL_TOKENS, *OTHER_NAMES.values()]
    words = [token for token in dict.fromkeys([*usual, *tiny.WORDS]) if token not in names]
    vocabulary = [*names, *words]
    ids = {token: index for index, token in enumerate(vocabulary)}
    special = dict(zip(("pad", "unk", "cls", "sep", "mask"), names, strict=True))
    entries = {f"{name}_token": token for name, token in special.items()}
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    if kind == "vocab.txt":
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary))
        entries["tokenizer_class"] = "BertTokenizer"
    else:
        model = {
            "wordpiece": tokenizers.models.WordPiece(ids, unk_token=unk),
            "bpe": tokenizers.models.BPE(ids, [], unk_token=unk),
            "unigram": tokenizers.models.Unigram([(token, -1.0) for token in vocabulary], 1),
        }[kind]
        inner = tokenizers.Tokenizer(model)
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        inner.add_special_tokens(list(names))
        inner.post_processor = processors.TemplateProcessing(
            single=f"{cls_} $A {sep}",
            pair=f"{cls_} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls_, 2), (sep, 3)],
        )
        inner.save(str(folder / "tokenizer.json"))
        entries["tokenizer_class"] = "PreTrainedTokenizerFast"
        entries["bos_token"], entries["eos_token"] = (
            entries.pop("cls_token"),
            entries.pop("sep_token"),
        )
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize("names", RENAMED)
@pytest.mark.parametrize("kind", ["vocab.txt", "wordpiece", "bpe", "unigram"])
def test_special_tokens_have_the_names_that_the_folder_states(
    kind: str, names: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    folder = renamed(kind, RENAMED[names], tmp_path / "renamed")
    ours = Tokenizer.load(folder)
    assert ours.special_ids.tolist() == [0, 1, 2, 3, 4]
    assert [ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id] == [0, 1, 2, 3, 4]
    assert ours.mask_token == RENAMED[names][4]
    ours.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert again.digest == ours.digest
    texts = ["the sea", f"the {ours.mask_token} sea", "nowhere"]
    for place in (folder, tmp_path / "saved"):
        theirs = AutoTokenizer.from_pretrained(place)
        assert [ids.tolist() for ids in ours.encode(texts, None)] == theirs(texts).input_ids
        one, other = ours.ids(["the", "sea"])
        row = with_special_tokens(ours, one, other)
        assert row.ids.tolist() == theirs("the", "sea").input_ids
        assert (theirs.pad_token_id, theirs.mask_token_id) == (0, 4)


def test_the_later_of_two_lines_of_a_token_counts_as_in_transformers(
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    lines = [*SPECIAL_TOKENS, "hello", "the", "[MASK]", "sea", "hello", "blue", "##s", "the"]
    folder = written(tmp_path / "twice")
    (folder / "vocab.txt").write_text("".join(f"{line}\n" for line in lines))
    texts = ["hello the sea blue", "hellos [MASK] the", "hello (line 6)"]
    ours = Tokenizer.load(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert [ids.tolist() for ids in ours.encode(texts, None)] == theirs(texts).input_ids
    assert ours.vocab_size == len(lines)
    ours.save(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved(texts).input_ids == theirs(texts).input_ids


def test_a_gap_among_the_ids_is_filled_as_the_message_says(tmp_path: Path) -> None:
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)} | {"a": 7}
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token=UNK))
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    with pytest.raises(FormatError, match="add tokens for the unused ids to its tokenizer"):
        Tokenizer.load(tmp_path)
    contents = json.loads(path.read_text())
    contents["model"]["vocab"] |= {"[unused5]": 5, "[unused6]": 6}
    path.write_text(json.dumps(contents))
    assert Tokenizer.load(tmp_path).ids(["a"])[0].tolist() == [7]
