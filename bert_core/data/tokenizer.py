"""WordPiece: train a vocabulary, load any `tokenizer.json`, encode columns of text.

The vocabulary is the same bytes in every process (`train_vocabulary` says how). Which documents it
is trained on is for `pipelines.vocab`.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bert_core import files
from bert_core.data.wordpiece import BulkWordPiece, supports
from bert_core.errors import ConfigError, CorpusError, FormatError

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUATION = "##"
MAX_CHARACTERS_PER_WORD = 100


class Tokenizer:
    """A `tokenizers.Tokenizer` with the names, files and digest that raybert's stages meet on."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Truncation and padding are arguments here, never state that a file brings along.
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        _check_special_tokens(inner.get_vocab(with_added_tokens=True))

    @classmethod
    def from_vocabulary(cls, vocabulary: Sequence[str], *, lowercase: bool) -> "Tokenizer":
        """BERT's WordPiece over `vocabulary`, whose order gives the ids.

        Raises: FormatError if a special token is missing or a token stands twice.
        """
        ids = {token: index for index, token in enumerate(vocabulary)}
        _check_special_tokens(ids)
        if len(ids) < len(vocabulary):
            twice = next(token for index, token in enumerate(vocabulary) if ids[token] != index)
            raise FormatError(
                f"tokenizer: wanted every token of the vocabulary once, {twice!r} stands there "
                "twice: take the later one out"
            )
        inner = tokenizers.Tokenizer(
            models.WordPiece(
                ids,
                unk_token=UNK,
                continuing_subword_prefix=CONTINUATION,
                max_input_chars_per_word=MAX_CHARACTERS_PER_WORD,
            )
        )
        inner.normalizer = _normalizer(lowercase)
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece(prefix=CONTINUATION)
        inner.post_processor = processors.TemplateProcessing(
            single=f"{CLS} $A {SEP}",
            pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
            special_tokens=[(CLS, ids[CLS]), (SEP, ids[SEP])],
        )
        inner.add_special_tokens(list(SPECIAL_TOKENS))
        return cls(inner)

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read `tokenizer.json`, or `vocab.txt` where that is all there is, at a path or a URI.

        Raises: FormatError if neither is there or the file cannot be read.
        """
        path = files.join(str(folder), "tokenizer.json")
        if files.exists(path):
            try:
                return cls(tokenizers.Tokenizer.from_buffer(files.read_bytes(path)))
            except FormatError:
                raise
            except Exception as error:  # NOTE: the library raises bare Exception
                raise FormatError(
                    f"{path}: wanted a tokenizers JSON file, it cannot be read ({error}): "
                    "copy it again, or train one with `raybert vocab`"
                ) from error
        vocabulary = files.join(str(folder), "vocab.txt")
        if files.exists(vocabulary):
            tokens = _lines(vocabulary)
            return cls.from_vocabulary(tokens, lowercase=_lowercase_setting(str(folder)))
        raise FormatError(
            f"{folder}: wanted tokenizer.json or vocab.txt, neither is there: "
            "give a folder that `raybert vocab` wrote, or one in Hugging Face layout"
        )

    def files(self, model_max_length: int = 512) -> dict[str, bytes]:
        """The four files that transformers' AutoTokenizer reads, by name."""
        names = {"pad": PAD, "unk": UNK, "cls": CLS, "sep": SEP, "mask": MASK}
        special = {f"{name}_token": token for name, token in names.items()}
        settings = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": self.lowercase,
            "strip_accents": None,
            "tokenize_chinese_chars": True,
            "model_max_length": model_max_length,
            **special,
        }
        return {
            "tokenizer.json": self.inner.to_str(pretty=False).encode(),
            "vocab.txt": "".join(f"{token}\n" for token in self.vocabulary).encode(),
            "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
            "special_tokens_map.json": json.dumps(special, indent=2).encode(),
        }

    def save(self, folder: str | Path, model_max_length: int = 512) -> None:
        """Write `files` into a folder or at a URI."""
        for name, data in self.files(model_max_length).items():
            files.write_bytes(files.join(str(folder), name), data)

    def check_casing(self, source: str) -> None:
        """See that the vocabulary has the casing that text will have when it is looked up.

        Raises: FormatError naming `source` if text is lower-cased and entries have capitals, which
            would never be found, or text is not and no entry has one, though some have letters.
        """
        entries = [token for token in self.vocabulary if token not in SPECIAL_TOKENS]
        letters = sum(token != token.upper() for token in entries)
        capitals = sum(token != token.lower() for token in entries)
        normalizer = self.inner.normalizer
        lowers = normalizer is not None and normalizer.normalize_str("AB") == "ab"
        way_out = (
            "set lowercase in its tokenizer.json (do_lower_case in tokenizer_config.json where "
            "there is a vocab.txt alone), or give a vocabulary of the other casing"
        )
        if lowers and capitals > max(10, 0.01 * len(entries)):
            raise FormatError(
                f"{source}: wanted a lower-case vocabulary, since this tokenizer lower-cases text, "
                f"{capitals:,} of {len(entries):,} entries have capitals: {way_out}"
            )
        if not lowers and letters > 100 and not capitals:
            raise FormatError(
                f"{source}: wanted a cased vocabulary, since this tokenizer keeps capitals, none "
                f"of {len(entries):,} entries has one, so every word with a capital would be "
                f"{UNK}: {way_out}"
            )

    @cached_property
    def vocabulary(self) -> list[str]:
        """The tokens in the order of their ids."""
        ids = self.inner.get_vocab(with_added_tokens=True)
        return sorted(ids, key=ids.__getitem__)

    @cached_property
    def lowercase(self) -> bool:
        """Whether text is lower-cased (and its accents stripped) first."""
        return bool(getattr(self.inner.normalizer, "lowercase", False))

    @cached_property
    def digest(self) -> str:
        """sha256 of what determines the ids: the vocabulary in order and the casing."""
        text = "\n".join([f"lowercase={self.lowercase}", *self.vocabulary])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def pad_id(self) -> int:
        return self._id(PAD)

    @property
    def unk_id(self) -> int:
        return self._id(UNK)

    @property
    def cls_id(self) -> int:
        return self._id(CLS)

    @property
    def sep_id(self) -> int:
        return self._id(SEP)

    @property
    def mask_id(self) -> int:
        return self._id(MASK)

    @cached_property
    def special_ids(self) -> np.ndarray:
        """Ids that are never masked and never drawn as a random replacement, ascending."""
        return np.array(sorted(self._id(token) for token in SPECIAL_TOKENS))

    @property
    def id_type(self) -> pa.DataType:
        """The smallest Arrow type that holds every id."""
        return pa.uint16() if self.vocab_size <= 1 << 16 else pa.uint32()

    def _id(self, token: str) -> int:
        index = self.inner.token_to_id(token)
        assert index is not None  # __init__ looked
        return index

    def _encode_batch(self, texts: list[str]) -> list[tokenizers.Encoding]:
        try:
            return self.inner.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # NOTE: so says the library of half a surrogate pair, which JSON can hold
            whole = [text.encode(errors="ignore").decode() for text in texts]
            return self.inner.encode_batch_fast(whole, add_special_tokens=False)

    def encode(self, texts: Sequence[str], max_length: int) -> list[np.ndarray]:
        """Ids of `[CLS] text [SEP]`, uint32, cut to `max_length` ids in all, one array a text."""
        keep = max_length - 2
        encodings = self._encode_batch(list(texts))
        head, tail = [self.cls_id], [self.sep_id]
        return [np.array(head + e.ids[:keep] + tail, dtype=np.uint32) for e in encodings]

    def encode_column(self, texts: pa.StringArray) -> pa.ListArray:
        """Ids without special tokens, a list a text. Nulls count as empty."""
        if self._bulk is not None:
            flat, counts = self._bulk.encode(texts)
        else:
            lists = [e.ids for e in self._encode_batch(texts.fill_null("").to_pylist())]
            flat = np.fromiter((i for ids in lists for i in ids), np.uint32)
            counts = np.array([len(ids) for ids in lists], dtype=np.int64)
        offsets = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=offsets[1:])
        values = pa.array(flat.astype(self.id_type.to_pandas_dtype()), self.id_type)
        return pa.ListArray.from_arrays(pa.array(offsets), values)

    @cached_property
    def _bulk(self) -> BulkWordPiece | None:
        return BulkWordPiece(self.inner) if supports(self.inner) else None


def train_vocabulary(
    texts: Sequence[str],
    *,
    vocab_size: int,
    lowercase: bool,
    min_frequency: int = 2,
    limit_alphabet: int = 1000,
) -> list[str]:
    """The tokens of a WordPiece vocabulary, in canonical order.

    The order is: special tokens, then single characters by code point (each before its `##` form),
    then all other tokens by code points. The same texts give the same list in every process.

    Args:
        texts: what to count words in; read twice.
        vocab_size: most tokens, specials included. A small corpus gives fewer.
        min_frequency: a pair of pieces seen less often is not merged.
        limit_alphabet: most characters kept, the most frequent ones; words with others are unknown.
    Raises: CorpusError if there is no text; ConfigError if `vocab_size` cannot hold the alphabet.
    Source: Schuster and Nakajima 2012, as in `tokenizers`' WordPieceTrainer, which merges by count.
    """
    normalizer = _normalizer(lowercase)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    chunks: Counter[str] = Counter()
    for text in texts:
        chunks.update(normalizer.normalize_str(text).split())
    singles: Counter[str] = Counter()
    continuations: set[str] = set()
    for chunk, count in chunks.items():
        for word, _ in pre_tokenizer.pre_tokenize_str(chunk):
            singles.update(dict.fromkeys(word, count))
            continuations.update(word[1:])
    if not singles:
        raise CorpusError(
            "vocabulary: wanted text to count words in, the sample holds none: "
            "check the corpus and its text column"
        )
    by_count = sorted(sorted(singles), key=singles.__getitem__, reverse=True)
    alphabet = sorted(by_count[:limit_alphabet])
    pieces = [CONTINUATION + character for character in alphabet if character in continuations]
    needed = len(SPECIAL_TOKENS) + len(alphabet) + len(pieces)
    if vocab_size < needed:
        raise ConfigError(
            f"vocab_size: wanted at least {needed} (special tokens and the characters of this "
            f"corpus), got {vocab_size}: raise vocab_size, or lower limit_alphabet"
        )
    # NOTE: the trainer numbers `##c` pieces in the order of a randomly seeded hash map and breaks
    # ties between equally frequent pairs by those numbers. Given here as special tokens they are
    # numbered by us, so the merges too are the same in every process.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[*SPECIAL_TOKENS, *pieces],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    trained = tokenizers.Tokenizer(models.WordPiece(unk_token=UNK))
    trained.normalizer, trained.pre_tokenizer = normalizer, pre_tokenizer
    trained.train_from_iterator(texts, trainer)
    return canonical_order(trained.get_vocab())


def canonical_order(tokens: Iterable[str]) -> list[str]:
    """Special tokens, single characters (plain before `##`), the rest; each by code points."""

    def key(token: str) -> tuple[int, str, bool]:
        surface = token.removeprefix(CONTINUATION) or token
        return (len(surface) > 1, surface, token != surface)

    return [*SPECIAL_TOKENS, *sorted(set(tokens) - set(SPECIAL_TOKENS), key=key)]


def _check_special_tokens(vocabulary: Mapping[str, int]) -> None:
    missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
    if missing:
        raise FormatError(
            f"tokenizer: wanted the special tokens {', '.join(SPECIAL_TOKENS)}, "
            f"{', '.join(missing)} is not in the vocabulary: train it with `raybert vocab`, "
            "or give the folder of a BERT tokenizer"
        )


def _lines(path: str) -> list[str]:
    # NOTE: str.splitlines would cut at U+2028 and other characters that a token may be.
    try:
        text = files.read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: wanted UTF-8 with a token a line, byte {error.start:,} is not: copy it again"
        ) from error
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def _normalizer(lowercase: bool) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lowercase
    )


def _lowercase_setting(folder: str) -> bool:
    settings = files.join(folder, "tokenizer_config.json")
    return not files.exists(settings) or bool(files.read_json(settings).get("do_lower_case", True))
