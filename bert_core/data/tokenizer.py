"""Text to ids: BERT's and MPNet's WordPiece, RoBERTa's byte-level BPE, ALBERT's and XLM-RoBERTa's
Unigram, any `tokenizer.json`.

Tokenizer files are read and written by `data.tokenizer_files`; the algorithms are in
`data.subwords`; a vocabulary is trained by `data.vocabulary`.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import pre_tokenizers, processors

from bert_core import files
from bert_core.checks import TokenizerKind
from bert_core.data.bulk import BulkEncoder, encode_whole, in_slices
from bert_core.data.byte_level import BulkByteLevel
from bert_core.data.special_tokens import (
    CLS,
    MASK,
    PAD,
    SEP,
    SPECIAL_TOKENS,
    UNK,
    around,
    flagged,
    special_tokens,
)
from bert_core.data.subwords import (
    BYTE_SPACE,
    CONTINUATION,
    MAX_CHARACTERS_PER_WORD,
    SPACE,
    bert_normalizer,
    byte_level_bpe,
    kind_of,
    unigram,
    vocabulary_of,
    wordpiece,
)
from bert_core.data.tokenizer_files import TokenizerFolder, contents_of, limit_in
from bert_core.data.unigram import BulkUnigram
from bert_core.data.wordpiece import BulkWordPiece
from bert_core.errors import FormatError, InputError

__all__ = ["MANY_TEXTS", "SPECIAL_TOKENS", "Tokenizer", "TokenizerKind"]

MANY_TEXTS = 64
"""Texts from which `Tokenizer.ids` encodes word by word, each word once: 256 sentences take a third
of the time."""


class Tokenizer:
    """A `tokenizers.Tokenizer` with the names, files and digest that raybert's stages share."""

    keeps_end: bool = False
    """Whether texts that are too long lose their beginning rather than their end."""
    longest: int | None = None
    """Tokens at which transformers cuts texts, special ones included; None if no file says so."""

    def __init__(
        self, inner: tokenizers.Tokenizer, special: Mapping[str, str] | None = None
    ) -> None:
        """Wrap a tokenizer of the library. Changes it in place: truncation and padding are turned
        off, and BERT's template is set if it adds no special tokens.
        Args:
            special: BERT's names of the special tokens → those that the tokenizer's other files
                give.
        """
        stated = {PAD: inner.padding["pad_token"]} if inner.padding else {}
        # Truncation and padding are arguments here, never state loaded from a file.
        inner.no_truncation()
        inner.no_padding()
        stated |= {**(special or {}), **around(inner)}
        self.inner = inner
        ids = inner.get_vocab(with_added_tokens=True)
        self._special = special_tokens(ids, stated, flagged(inner))
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            ids[self._special[token]] for token in SPECIAL_TOKENS
        )
        if max(ids.values()) >= len(ids):
            raise FormatError(
                f"tokenizer: wanted ids without a gap, {len(ids):,} tokens have ids up to "
                f"{max(ids.values()):,}: add tokens for the unused ids to its tokenizer.json"
            )
        self._surround()

    @classmethod
    def from_vocabulary(
        cls,
        vocabulary: Sequence[str],
        *,
        lowercase: bool,
        strip_accents: bool | None = None,
        chinese_characters: bool = True,
        special: Mapping[str, str] | None = None,
    ) -> "Tokenizer":
        """Make BERT's or MPNet's tokenizer; arguments and errors are those of
        `subwords.wordpiece`."""
        inner, special = wordpiece(
            vocabulary,
            lowercase=lowercase,
            strip_accents=strip_accents,
            chinese_characters=chinese_characters,
            special=special,
        )
        return cls(inner, special)

    @classmethod
    def from_merges(
        cls, vocabulary: Sequence[str], merges: Sequence[tuple[str, str]], *, lowercase: bool
    ) -> "Tokenizer":
        """Make RoBERTa's byte-level BPE over `vocabulary`, whose order gives the ids."""
        return cls(byte_level_bpe(vocabulary, merges, lowercase=lowercase))

    @classmethod
    def from_pieces(cls, pieces: Sequence[tuple[str, float]], *, lowercase: bool) -> "Tokenizer":
        """Make ALBERT's Unigram over pieces with their log probabilities, in id order."""
        return cls(unigram(pieces, lowercase=lowercase))

    @classmethod
    def load(cls, folder: str | Path, among: Collection[str] | None = None) -> "Tokenizer":
        """Read `tokenizer.json`, or else `vocab.txt`, at a path or a URI.

        If the folder is the output of a stage that makes a bundle, the bundle's files are read. As
        in transformers, `tokenizer_config.json` overrides `tokenizer.json` on the casing and
        accents of BERT's WordPiece and on the space before a text of RoBERTa's BPE; and tokens that
        only the other files list are added.

        Args:
            among: names of the folder's files to consider; None for all.
        Raises: FormatError if there is neither file, or it cannot be read.
        """
        there = TokenizerFolder.of(folder, among)
        with there.reading():
            whole = cls(*there.inner())
            there.add_tokens(whole.inner)
            there.check_names(whole._special)
            whole.keeps_end = there.settings.get("truncation_side") == "left"
            whole.longest = limit_in(there.settings.get("model_max_length"))
            if not there.has_segments:
                whole.has_segments = False
        return whole

    def _surround(self) -> None:
        """Make the library add the same special tokens as `encode`: if it adds none, set BERT's
        template for one text and for two.

        Raises: FormatError if it adds other tokens.
        """
        bare, whole = (
            self.inner.encode("", add_special_tokens=special).ids for special in (False, True)
        )
        cls_, sep = (self._special[name] for name in (CLS, SEP))
        if whole == bare:
            template = processors.TemplateProcessing(
                single=f"{cls_} $A {sep}",
                pair=f"{cls_} $A {sep} $B:1 {sep}:1",
                special_tokens=[(cls_, self.cls_id), (sep, self.sep_id)],
            )
            present = self.inner.post_processor  # it only sets offsets
            self.inner.post_processor = (
                processors.Sequence([present, template]) if present else template
            )
        elif whole != [self.cls_id, *bare, self.sep_id]:
            raise FormatError(
                f"tokenizer: wanted a post_processor that puts {cls_} before a text and {sep} "
                f"after it, got one that gives an empty text the ids {whole} (wanted "
                f"{[self.cls_id, self.sep_id]}): correct it in tokenizer.json, or use another "
                "model if this one was trained so"
            )

    def files(self, model_max_length: int = 512, *, segments: bool = True) -> dict[str, bytes]:
        """Return the contents of the files that transformers' AutoTokenizer reads, by name.

        Args:
            segments: whether the model distinguishes two segments.
        """
        return contents_of(
            self.inner,
            self._special,
            model_max_length=model_max_length,
            segments=segments,
            keeps_end=self.keeps_end,
        )

    def save(
        self, folder: str | Path, model_max_length: int = 512, *, segments: bool = True
    ) -> None:
        """Write `files` into a folder or at a URI."""
        for name, data in self.files(model_max_length, segments=segments).items():
            files.write_bytes(files.join(str(folder), name), data)

    def check_casing(self, source: str) -> None:
        """Check that the casing of the vocabulary fits that of the text looked up in it.

        Raises: FormatError naming `source` if text is lower-cased but entries have capitals, which
            could never match; or if text is not lower-cased and no entry has a capital, though
            some have letters.
        """
        if self.kind == "bpe":
            return  # its alphabet of bytes has capitals whatever the text
        entries = [token for token in self.vocabulary if token not in self._special.values()]
        letters = sum(token != token.upper() for token in entries)
        capitals = sum(token != token.lower() for token in entries)
        lowers = self.lowercase
        way_out = (
            "set lowercase in its tokenizer.json (do_lower_case in tokenizer_config.json if there "
            "is only a vocab.txt), or give a vocabulary of the other casing"
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
                f"{self._special[UNK]}: {way_out}"
            )

    @cached_property
    def vocabulary(self) -> list[str]:
        """The tokens in the order of their ids."""
        return vocabulary_of(self.inner)

    @cached_property
    def lowercase(self) -> bool:
        """Whether text is lower-cased first."""
        normalizer = self.inner.normalizer
        return normalizer is not None and normalizer.normalize_str("AB") == "ab"

    @cached_property
    def kind(self) -> TokenizerKind:
        """The algorithm that splits words."""
        return kind_of(self.inner)

    @cached_property
    def begins_word(self) -> np.ndarray:
        """For every id, whether its token begins a word; bool, (V,).

        In WordPiece these are all tokens but continuations, or all tokens if the tokenizer does
        not mark continuations; in the other algorithms, tokens that begin with a space.
        """
        if self.kind == "wordpiece":
            mark = self.inner.model.continuing_subword_prefix
            return np.array([not (mark and token.startswith(mark)) for token in self.vocabulary])
        return np.array([token.startswith((BYTE_SPACE, SPACE)) for token in self.vocabulary])

    @property
    def reads_spaces(self) -> bool:
        """Whether a word's ids depend on the space before it (byte-level BPE, as RoBERTa's)."""
        splits = self.inner.pre_tokenizer
        return bool(splits) and [one for one, _ in splits.pre_tokenize_str("a")] != [
            one for one, _ in splits.pre_tokenize_str(" a")
        ]

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that determines the ids: for BERT's WordPiece, its casing, its
        vocabulary in order, and settings that differ from BERT's; for others, the whole
        `tokenizer.json`."""
        splits = self.inner.pre_tokenizer
        if self.kind != "wordpiece" or not isinstance(splits, pre_tokenizers.BertPreTokenizer):
            return hashlib.sha256(self.inner.to_str().encode()).hexdigest()
        settings = [f"lowercase={self.lowercase}"]
        normalizer = self.inner.normalizer
        if str(normalizer) != str(bert_normalizer(self.lowercase)):
            settings.append(str(normalizer))
        model = self.inner.model
        limits = (model.continuing_subword_prefix, model.max_input_chars_per_word)
        if limits != (CONTINUATION, MAX_CHARACTERS_PER_WORD):
            settings.append(str(limits))
        settings += [
            str((token.content, token.normalized, token.single_word))
            for token in self._unusual_added_tokens()
        ]
        text = "\n".join([*settings, *self.vocabulary])
        return hashlib.sha256(text.encode()).hexdigest()

    def _unusual_added_tokens(self) -> list[tokenizers.AddedToken]:
        """Return the added tokens that change ids, unlike BERT's special tokens. Flags about white
        space beside a token make no difference to that."""
        return [
            token
            for token in self.inner.get_added_tokens_decoder().values()
            if token.content not in self._special.values() or token.normalized or token.single_word
        ]

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def mask_token(self) -> str:
        """The token that stands for a word to predict: `[MASK]`, or `<mask>`."""
        return self._special[MASK]

    @cached_property
    def special_ids(self) -> np.ndarray:
        """Ids that are never masked and never drawn as a random replacement, ascending."""
        return np.array(sorted({self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id}))

    @property
    def id_type(self) -> pa.DataType:
        """The smallest Arrow type that holds every id."""
        return pa.uint16() if self.vocab_size <= 1 << 16 else pa.uint32()

    @cached_property
    def separators(self) -> int:
        """Separators between the two texts of a pair: one in BERT, two in RoBERTa.

        Raises: InputError if the tokenizer puts other special tokens around a pair.
        """
        separators = max(1, self.inner.num_special_tokens_to_add(is_pair=True) - 2)
        text, pair = (self.inner.encode("", *more).ids for more in ((), ("",)))
        between = [self.sep_id] * separators
        if pair != [*text[:-1], *between, *text[1:]]:
            raise InputError(
                "text_pair: wanted no second text, since the post_processor in the model's "
                f"tokenizer.json gives two empty texts the ids {pair} (wanted "
                f"{[self.cls_id, *between, self.sep_id]}): leave it out, or correct the file if "
                "the model was trained on pairs in the usual form"
            )
        return separators

    @cached_property
    def has_segments(self) -> bool:
        """Whether the second text of a pair is segment 1."""
        return 1 in self.inner.encode("a", "a").type_ids

    def encode_batch(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """Return the library's encoding of each text: ids without special tokens, no offsets."""
        texts = list(texts)
        try:
            return self.inner.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # NOTE: raised for a lone surrogate, which JSON can hold
            whole = [text.encode(errors="ignore").decode() for text in texts]
            return self.inner.encode_batch_fast(whole, add_special_tokens=False)

    def encode(self, texts: Sequence[str], max_length: int | None) -> list[np.ndarray]:
        """Return the ids of `[CLS] text [SEP]`, uint32, one array per text.

        Args:
            max_length: number of ids to which a text is cut, special tokens included; None keeps it
                whole.
        """
        keep = None if max_length is None else max_length - 2
        encodings = self.encode_batch(texts)
        head, tail = [self.cls_id], [self.sep_id]
        return [np.array(head + e.ids[:keep] + tail, dtype=np.uint32) for e in encodings]

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text without special tokens, uint32. Safe to call from several
        threads."""
        if len(texts) >= MANY_TEXTS and self._bulk is not None:
            with suppress(UnicodeEncodeError):  # a lone surrogate
                column = pa.array(texts, pa.string())
                flat, counts = self._bulk.forgetful().encode(column)
                return np.split(flat, np.cumsum(counts)[:-1])
        return [np.array(e.ids, dtype=np.uint32) for e in self.encode_batch(texts)]

    def encode_column(self, texts: pa.Array | pa.ChunkedArray) -> pa.ListArray:
        """Return the ids without special tokens, one list per text. Nulls count as empty.

        Raises: TypeError for an Arrow type other than `pa.string()`, and for a chunked array.
        """
        if not isinstance(texts, pa.StringArray):
            raise TypeError(
                f"texts: wanted a pyarrow array of strings, got {type(texts).__name__} of "
                f"{texts.type}: cast it to pyarrow.string(), or give its chunks one by one"
            )
        if self._bulk is not None:
            flat, counts = self._bulk.encode(texts)
        else:
            flat, counts = in_slices(texts, partial(encode_whole, self.inner))
        offsets = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=offsets[1:])
        values = pa.array(flat.astype(self.id_type.to_pandas_dtype()), self.id_type)
        return pa.ListArray.from_arrays(pa.array(offsets), values)

    @cached_property
    def _bulk(self) -> BulkEncoder | None:
        kinds = (BulkWordPiece, BulkByteLevel, BulkUnigram)
        return next((kind(self.inner) for kind in kinds if kind.supports(self.inner)), None)
