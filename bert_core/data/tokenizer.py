"""Text to ids: BERT's and MPNet's WordPiece, RoBERTa's byte-level BPE, ALBERT's and XLM-RoBERTa's
Unigram, any `tokenizer.json`.

Training a vocabulary is left to `data.vocabulary`.
"""

import hashlib
import json
import string
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_core import files
from bert_core.containment import has_file
from bert_core.data.bounds import check_tokenizer
from bert_core.data.bulk import BulkEncoder, encode_whole, in_slices
from bert_core.data.byte_level import BulkByteLevel
from bert_core.data.unigram import BulkUnigram
from bert_core.data.wordpiece import BulkWordPiece
from bert_core.errors import FormatError, InputError
from bert_core.manifest import folder_with
from bert_core.typed import as_type, check_size, parse_json

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# The same five in RoBERTa's files; ALBERT's mix both, and MPNet's vocabulary has both.
OTHER_NAMES = {PAD: "<pad>", UNK: "<unk>", CLS: "<s>", SEP: "</s>", MASK: "<mask>"}
CONTINUATION = "##"
# Prefixes of tokens that begin a word: the space of byte-level BPE, and of Unigram.
BYTE_SPACE, SPACE = "Ġ", "▁"
MAX_CHARACTERS_PER_WORD = 100
TokenizerKind = Literal["wordpiece", "bpe", "unigram"]
# BERT's tokenizer makes each of them a word, so it finds no entry with one beside other characters.
PUNCTUATION = frozenset(string.punctuation)
MOST_UNREACHABLE = 0.25
"""Largest share of such entries in a `vocab.txt` of BERT's: published ones have some."""
# Classes of transformers, without `Tokenizer` and `Fast`, that read a `vocab.txt` as BERT does.
BERTS = {
    "Bert", "DistilBert", "Electra", "MPNet", "MobileBert", "ConvBert", "Funnel",
    "LayoutLM", "LayoutLMv2", "Lxmert", "RetriBert", "SqueezeBert", "Splinter", "DPRContextEncoder",
    "DPRQuestionEncoder", "DPRReader",
}  # fmt: skip
_MOST_TOKENS = 1 << 30
"""transformers writes a number of 31 digits where there is no limit."""
# Classes that put a space before every text where `add_prefix_space` says so, else nowhere,
# whatever `tokenizer.json` says.
WITH_PREFIX_SPACE = {"Roberta", "Deberta", "Longformer", "GPT2", "Bart", "LED"}
# Classes whose models have one segment.
WITHOUT_SEGMENTS = {"DistilBert", "MPNet", "Roberta", "XLMRoberta", "Longformer", "Bart"}
TOKENIZER, VOCABULARY = "tokenizer.json", "vocab.txt"
ADDED, SETTINGS = "added_tokens.json", "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
SEGMENTS = "token_type_ids"
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
"""Of an added token."""
# Vocabulary files of other layouts, which are not read → how to make what is.
_BY_TRANSFORMERS = (
    "with transformers, AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)
OTHER_FILES = {
    "vocab.json": _BY_TRANSFORMERS,
    "spm.model": 'as docs/guides/hub.md does of "a vocabulary of SentencePiece alone"',
    "spiece.model": _BY_TRANSFORMERS,
    "sentencepiece.bpe.model": _BY_TRANSFORMERS,
}


@dataclass(frozen=True, kw_only=True)
class _Token:
    """A token with its flags, as JSON."""

    content: str


# Entries that name a special token, the last of them first.
_ENTRIES = {
    PAD: ("pad_token",),
    UNK: ("unk_token",),
    CLS: ("bos_token", "cls_token"),
    SEP: ("eos_token", "sep_token"),
    MASK: ("mask_token",),
}
# Types of the entries that are read of the files beside a vocabulary.
_NAMED = str | _Token | None
_MORE = list[str | _Token] | dict[str, str | _Token] | None
_SPECIAL = {
    **{f"{name}_token": _NAMED for name in ("pad", "unk", "cls", "sep", "mask", "bos", "eos")},
    "additional_special_tokens": _MORE,
    "extra_special_tokens": _MORE,
}
_SETTINGS = _SPECIAL | {
    "tokenizer_class": str | None,
    "model_input_names": list[str] | None,
    "added_tokens_decoder": dict[str, _Token] | None,
    **dict.fromkeys(
        ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space"),
        bool | None,
    ),
}

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
        """
        Args:
            special: BERT's names of the special tokens → those that the files beside it state.
        """
        stated = {PAD: inner.padding["pad_token"]} if inner.padding else {}
        # Truncation and padding are arguments here, never state loaded from a file.
        inner.no_truncation()
        inner.no_padding()
        stated |= {**(special or {}), **_around(inner)}
        self.inner = inner
        ids = inner.get_vocab(with_added_tokens=True)
        self._special = _special_tokens(ids, stated, _flagged(inner))
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
        """BERT's WordPiece over `vocabulary`, whose order gives the ids; or MPNet's, with RoBERTa's
        special tokens and pairs, if the vocabulary has RoBERTa's names too.

        Args:
            special: BERT's names of the special tokens → those of this vocabulary, where they are
                others.
            strip_accents: None strips them if text is lower-cased.
            chinese_characters: whether each is a separate word.

        Raises: FormatError if a special token is missing or a token occurs twice.
        """
        ids = {token: index for index, token in enumerate(vocabulary)}
        others = {OTHER_NAMES[token] for token in (PAD, CLS, SEP, MASK)}
        special = _special_tokens(ids, special or {}, others if others <= ids.keys() else ())
        if len(ids) < len(vocabulary):
            twice = next(token for index, token in enumerate(vocabulary) if ids[token] != index)
            raise FormatError(
                f"tokenizer: wanted every token of the vocabulary once, {twice!r} occurs twice: "
                "give each a name of its own"
            )
        inner = tokenizers.Tokenizer(
            models.WordPiece(
                ids,
                unk_token=special[UNK],
                continuing_subword_prefix=CONTINUATION,
                max_input_chars_per_word=MAX_CHARACTERS_PER_WORD,
            )
        )
        inner.normalizer = bert_normalizer(lowercase, strip_accents, chinese_characters)
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece(prefix=CONTINUATION)
        if special[CLS] == OTHER_NAMES[CLS]:
            cls_, sep = ((special[name], ids[special[name]]) for name in (CLS, SEP))
            inner.post_processor = processors.RobertaProcessing(sep, cls_, add_prefix_space=False)
        inner.add_special_tokens(list(special.values()))
        return cls(inner, special)

    @classmethod
    def from_merges(
        cls, vocabulary: Sequence[str], merges: Sequence[tuple[str, str]], *, lowercase: bool
    ) -> "Tokenizer":
        """RoBERTa's byte-level BPE over `vocabulary`, whose order gives the ids."""
        ids = {token: index for index, token in enumerate(vocabulary)}
        special = _special_tokens(ids)
        inner = tokenizers.Tokenizer(models.BPE(ids, list(merges), unk_token=special[UNK]))
        if lowercase:
            inner.normalizer = normalizers.Lowercase()
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        cls_, sep = ((special[name], ids[special[name]]) for name in (CLS, SEP))
        inner.post_processor = processors.RobertaProcessing(sep, cls_, add_prefix_space=False)
        inner.add_special_tokens(list(special.values()))
        return cls(inner)

    @classmethod
    def from_pieces(cls, pieces: Sequence[tuple[str, float]], *, lowercase: bool) -> "Tokenizer":
        """ALBERT's Unigram over pieces with their log probabilities, in id order."""
        ids = {token: index for index, (token, _) in enumerate(pieces)}
        special = _special_tokens(ids)
        inner = tokenizers.Tokenizer(models.Unigram(list(pieces), ids[special[UNK]], False))
        inner.normalizer = unigram_normalizer(lowercase)
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, "always")]
        )
        inner.decoder = decoders.Metaspace(SPACE, "always")
        inner.add_special_tokens(list(special.values()))
        return cls(inner)

    @classmethod
    def load(cls, folder: str | Path, among: Collection[str] | None = None) -> "Tokenizer":
        """Read `tokenizer.json`, or else `vocab.txt`, at a path or a URI.

        In the output of a stage that makes a bundle, they are the bundle's. As in transformers,
        what `tokenizer_config.json` says of the casing and accents of BERT's WordPiece, and of the
        space before a text of RoBERTa's BPE, counts more than what `tokenizer.json` says; tokens
        that only the files beside it list are added.

        Args:
            among: the files of the folder that count; None for all.
        Raises: FormatError if there is neither or the file cannot be read.
        """
        folder = folder_with(str(folder), TOKENIZER, VOCABULARY) or str(folder)
        there = TokenizerFolder(folder, among)
        settings = there.settings
        if there.has(TOKENIZER):
            path = there.path(TOKENIZER)
            try:
                data = there.read(TOKENIZER)
                check_tokenizer(data, path)
                inner = tokenizers.Tokenizer.from_buffer(data)
                _override(inner, settings)
                whole = cls(inner, there.special_tokens)
                known = {token.content for token in inner.get_added_tokens_decoder().values()}
                listed = _added_tokens(there).items()
                whole._add({n: one for n, one in listed if one.content not in known}, path)
                whole._mark_special([one for one in _additional_tokens(there) if one not in known])
                whole._follow(settings, there.path(SETTINGS))
                return whole
            except FormatError:
                raise
            except Exception as error:  # NOTE: the library raises bare Exception
                raise FormatError(
                    f"{path}: wanted a tokenizers JSON file, it cannot be read ({error}): "
                    "copy it again, or train one with `raybert vocab`"
                ) from error
        if there.has(VOCABULARY):
            path = there.path(VOCABULARY)
            tokens = _each_once(_lines(there.read(VOCABULARY), path))
            _check_is_of_bert(path, settings)
            _check_reachable(path, tokens)
            whole = cls.from_vocabulary(
                tokens,
                lowercase=bool(settings.get("do_lower_case", True)),
                strip_accents=settings.get("strip_accents"),
                chinese_characters=bool(settings.get("tokenize_chinese_chars", True)),
                special=there.special_tokens,
            )
            whole._add(_added_tokens(there), path)
            whole._mark_special(_additional_tokens(there))
            whole._follow(settings, there.path(SETTINGS))
            return whole
        for name, way in OTHER_FILES.items():
            if there.has(name):
                raise FormatError(
                    f"{folder}: wanted tokenizer.json or vocab.txt, found only {name}: create the "
                    f"first {way}"
                )
        raise FormatError(
            f"{folder}: wanted tokenizer.json or vocab.txt, found neither: "
            "give a folder that `raybert vocab` wrote, or one in Hugging Face layout"
        )

    def _surround(self) -> None:
        """Have the library add the special tokens that `encode` adds: if it adds none, it gets
        BERT's template for one text and for two.

        Raises: FormatError if it adds others.
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
            present = self.inner.post_processor  # one that only sets offsets
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

    def _follow(self, settings: Mapping[str, Any], path: str) -> None:
        """Apply what `tokenizer_config.json` says about rows.

        Raises: FormatError if transformers puts other special tokens around a text.
        """
        usual = [] if _class_of(settings) in WITHOUT_SEGMENTS else [SEGMENTS]
        if SEGMENTS not in (settings.get("model_input_names") or usual):
            self.has_segments = False
        self.keeps_end = settings.get("truncation_side") == "left"
        self.longest = limit_in(settings.get("model_max_length"))
        for name, token in (("cls_token", CLS), ("sep_token", SEP)):
            chosen = _content(settings.get(name) or self._special[token])
            if chosen != self._special[token]:
                raise FormatError(
                    f"{path}: wanted {name} {self._special[token]!r}, got "
                    f"{chosen!r}: use another model, or correct the file if the model was trained "
                    "with the usual token"
                )

    def _mark_special(self, tokens: Sequence[str]) -> None:
        """Make these special tokens, which are never split; tokens that are not in the vocabulary
        are ignored."""
        known = [token for token in tokens if self.inner.token_to_id(token) is not None]
        self.inner.add_special_tokens(known)

    def _add(self, tokens: Mapping[int, tokenizers.AddedToken], source: str) -> None:
        """Raises: FormatError if a new token would not get its id."""
        for number, token in sorted(tokens.items()):
            self.inner.add_tokens([token])
            if self.inner.token_to_id(token.content) != number:
                raise FormatError(
                    f"{source}: wanted the added token {token.content!r} to have the next id, "
                    f"{self.inner.token_to_id(token.content)}, got {number}: correct its number in "
                    f"{ADDED} or {SETTINGS}"
                )

    def files(self, model_max_length: int = 512, *, segments: bool = True) -> dict[str, bytes]:
        """The files that transformers' AutoTokenizer reads, by name.

        Args:
            segments: whether the model distinguishes two segments.
        """
        names = {"pad": PAD, "unk": UNK, "cls": CLS, "sep": SEP, "mask": MASK}
        special = {f"{name}_token": self._special[one] for name, one in names.items()}
        settings: dict[str, Any] = {"model_max_length": model_max_length, **special}
        contents = {"tokenizer.json": self.inner.to_str(pretty=False).encode()}
        if self.keeps_end:
            settings["truncation_side"] = "left"
        if not segments:
            settings["model_input_names"] = ["input_ids", "attention_mask"]
        normalizer = self.inner.normalizer
        of_bert = self.kind == "wordpiece" and self._special[CLS] != OTHER_NAMES[CLS]
        if of_bert and isinstance(normalizer, normalizers.BertNormalizer):
            settings |= {
                "tokenizer_class": "BertTokenizer",
                "do_lower_case": normalizer.lowercase,
                "strip_accents": normalizer.strip_accents,
                "tokenize_chinese_chars": normalizer.handle_chinese_chars,
            }
        else:
            # This class uses `tokenizer.json` unchanged; others rebuild a tokenizer from its parts.
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            if segments:
                settings["model_input_names"] = ["input_ids", SEGMENTS, "attention_mask"]
        if self.kind == "wordpiece":
            contents["vocab.txt"] = "".join(f"{token}\n" for token in self.vocabulary).encode()
        return contents | {
            "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
            "special_tokens_map.json": json.dumps(special, indent=2).encode(),
        }

    def save(
        self, folder: str | Path, model_max_length: int = 512, *, segments: bool = True
    ) -> None:
        """Write `files` into a folder or at a URI."""
        for name, data in self.files(model_max_length, segments=segments).items():
            files.write_bytes(files.join(str(folder), name), data)

    def check_casing(self, source: str) -> None:
        """Check that the vocabulary has the casing of the text that is looked up in it.

        Raises: FormatError naming `source` if text is lower-cased but entries have capitals, which
            could never match, or text is not and no entry has one, though some have letters.
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
        ids = self.inner.get_vocab(with_added_tokens=True)
        return sorted(ids, key=ids.__getitem__)

    @cached_property
    def lowercase(self) -> bool:
        """Whether text is lower-cased first."""
        normalizer = self.inner.normalizer
        return normalizer is not None and normalizer.normalize_str("AB") == "ab"

    @cached_property
    def kind(self) -> TokenizerKind:
        """The algorithm that splits words."""
        name = type(self.inner.model).__name__.lower()
        if name not in get_args(TokenizerKind):
            raise FormatError(
                f"tokenizer: wanted a model of {', '.join(get_args(TokenizerKind))}, got {name}: "
                "convert the tokenizer, or train one with `raybert vocab`"
            )
        return cast("TokenizerKind", name)

    @cached_property
    def begins_word(self) -> np.ndarray:
        """For every id, whether its token begins a word; bool, (V,).

        In WordPiece every token except continuations, or every token if the tokenizer marks none;
        in the others those with a space.
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
        """sha256 of what determines the ids: for BERT's WordPiece its casing, its vocabulary in
        order and settings that are not BERT's."""
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
        """Those that WordPiece gives other ids than BERT's special tokens do; that the white space
        beside a token belongs to it makes no difference."""
        return [
            token
            for token in self.inner.get_added_tokens_decoder().values()
            if token.content not in self._special.values() or token.normalized or token.single_word
        ]

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

    @property
    def mask_token(self) -> str:
        """The mark for a word to predict: `[MASK]`, or `<mask>`."""
        return self._special[MASK]

    @cached_property
    def special_ids(self) -> np.ndarray:
        """Ids that are never masked and never drawn as a random replacement, ascending."""
        return np.array(sorted({self._id(token) for token in SPECIAL_TOKENS}))

    @property
    def id_type(self) -> pa.DataType:
        """The smallest Arrow type that holds every id."""
        return pa.uint16() if self.vocab_size <= 1 << 16 else pa.uint32()

    def _id(self, token: str) -> int:
        index = self.inner.token_to_id(self._special[token])
        assert index is not None  # checked in __init__
        return index

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
        """The library's encoding of each text: ids without special tokens or offsets."""
        texts = list(texts)
        try:
            return self.inner.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # NOTE: raised for a lone surrogate, which JSON can hold
            whole = [text.encode(errors="ignore").decode() for text in texts]
            return self.inner.encode_batch_fast(whole, add_special_tokens=False)

    def encode(self, texts: Sequence[str], max_length: int | None) -> list[np.ndarray]:
        """Ids of `[CLS] text [SEP]`, uint32, one array per text.

        Args:
            max_length: total ids that a text is cut to; None keeps it whole.
        """
        keep = None if max_length is None else max_length - 2
        encodings = self.encode_batch(texts)
        head, tail = [self.cls_id], [self.sep_id]
        return [np.array(head + e.ids[:keep] + tail, dtype=np.uint32) for e in encodings]

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text without special tokens, uint32. Safe to call from several threads."""
        if len(texts) >= MANY_TEXTS and self._bulk is not None:
            with suppress(UnicodeEncodeError):  # a lone surrogate
                column = pa.array(texts, pa.string())
                flat, counts = self._bulk.forgetful().encode(column)
                return np.split(flat, np.cumsum(counts)[:-1])
        return [np.array(e.ids, dtype=np.uint32) for e in self.encode_batch(texts)]

    def encode_column(self, texts: pa.Array | pa.ChunkedArray) -> pa.ListArray:
        """Ids without special tokens, one list per text. Nulls count as empty.

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


class TokenizerFolder:
    """The files of a tokenizer in a folder, at a path or a URI."""

    def __init__(self, folder: str, among: Collection[str] | None) -> None:
        self.folder, self._among = folder, among
        self._local = files.local_path(folder)

    def path(self, name: str) -> str:
        return files.join(self.folder, name)

    def has(self, name: str) -> bool:
        if self._among is not None and name not in self._among:
            return False
        if self._local is not None:
            return has_file(self._local, name)
        return files.is_file(self.path(name))

    def read(self, name: str) -> bytes:
        check_size(files.size_bytes(self.path(name)), self.path(name))
        return files.read_bytes(self.path(name))

    def json(self, name: str, hint: Any) -> Any:
        """An object of the declared type; an empty one without the file. Raises: FormatError."""
        if not self.has(name):
            return {}
        return as_type(hint, parse_json(self.read(name), self.path(name)), self.path(name))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What `tokenizer_config.json` says."""
        entries: dict[str, Any] = self.json(SETTINGS, dict[str, Any])
        for name, hint in _SETTINGS.items():
            as_type(hint, entries.get(name), self.path(SETTINGS), key=name)
        return entries

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """BERT's names of the special tokens → those that the files beside the vocabulary state."""
        stated = {
            role: entries[name]
            for entries in (self.special, self.settings)
            for role, names in _ENTRIES.items()
            for name in names
            if entries.get(name)
        }
        return {role: _content(token) for role, token in stated.items()}

    @cached_property
    def special(self) -> dict[str, Any]:
        """What `special_tokens_map.json` says."""
        entries: dict[str, Any] = self.json(SPECIAL, dict[str, Any])
        for name, hint in _SPECIAL.items():
            as_type(hint, entries.get(name), self.path(SPECIAL), key=name)
        return entries


def _flagged(inner: tokenizers.Tokenizer) -> set[str]:
    """The tokens that a tokenizer treats as special ones."""
    names = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    return names | {getattr(inner.model, "unk_token", None) or ""}


def _around(inner: tokenizers.Tokenizer) -> dict[str, str]:
    """BERT's names → the special tokens by which a tokenizer surrounds a text."""
    bare, whole = (inner.encode("", add_special_tokens=special).tokens for special in (False, True))
    return {CLS: whole[0], SEP: whole[-1]} if len(whole) == len(bare) + 2 else {}


def _special_tokens(
    vocabulary: Mapping[str, int],
    stated: Mapping[str, str] = MappingProxyType({}),
    preferred: Collection[str] = (),
) -> dict[str, str]:
    """BERT's name → the name in this vocabulary, for the five special tokens: the stated one, or
    else BERT's or RoBERTa's; of these two that which is `preferred`, or BERT's.

    Raises: FormatError if the vocabulary has no such name of one of them, or one for two of them.
    """
    named: dict[str, str | None] = {}
    for token in SPECIAL_TOKENS:
        names = [name for name in (token, OTHER_NAMES[token]) if name in vocabulary]
        usual = min(names, key=lambda name: name not in preferred, default=None)
        named[token] = stated[token] if stated.get(token) in vocabulary else usual
    missing = [token for token, name in named.items() if name is None]
    if missing:
        raise FormatError(
            f"tokenizer: wanted the special tokens {', '.join(SPECIAL_TOKENS)} (or "
            f"{', '.join(OTHER_NAMES.values())}), {', '.join(missing)} is not in the vocabulary: "
            "train it with `raybert vocab`, or give the folder of an encoder's tokenizer, with "
            f"other names in its {SETTINGS}"
        )
    for around in (CLS, SEP):
        shared = [token for token in named if named[token] == named[around]]
        if len(shared) > 1:
            raise FormatError(
                f"tokenizer: wanted another token for each of {' and '.join(shared)}, got "
                f"{named[around]!r}: correct the names in {SETTINGS}, or use another model"
            )
    return {token: name for token, name in named.items() if name is not None}


def _lines(data: bytes, path: str) -> list[str]:
    # NOTE: str.splitlines would split at U+2028 and other characters that may be tokens.
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: wanted UTF-8 with one token per line, byte {error.start:,} is not: copy it "
            "again"
        ) from error
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def _each_once(tokens: Sequence[str]) -> list[str]:
    """The lines of a `vocab.txt`, in which a token may occur twice: as in transformers its last
    line counts, and no id moves. Those before it get names that no text can contain."""
    last = {token: index for index, token in enumerate(tokens)}
    return [
        token if last[token] == index else f"{token} (line {index + 1})"
        for index, token in enumerate(tokens)
    ]


def _check_reachable(path: str, tokens: Sequence[str]) -> None:
    """Check that BERT's tokenizer, which a `vocab.txt` alone stands for, can give its entries.

    Raises: FormatError if too many have a punctuation mark beside other characters.
    """
    bodies = {token: token.removeprefix(CONTINUATION) for token in tokens}
    split = [
        token
        for token, body in bodies.items()
        if len(body) > 1
        and not PUNCTUATION.isdisjoint(body)
        and token not in (*SPECIAL_TOKENS, *OTHER_NAMES.values())
        and not body.startswith("[unused")
    ]
    if len(split) > MOST_UNREACHABLE * len(tokens):
        raise FormatError(
            f"{path}: wanted entries of BERT's WordPiece, with each punctuation mark alone, got "
            f"{len(split):,} of {len(tokens):,} with one beside other characters, such as "
            f"{split[0]!r}: another tokenizer reads them; describe it in a tokenizer.json beside "
            "the file (docs/guides/hub.md)"
        )


def bert_normalizer(
    lowercase: bool, strip_accents: bool | None = None, chinese_characters: bool = True
) -> normalizers.Normalizer:
    """BERT's: clean text, CJK characters set apart, lower-cased without accents or neither."""
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=chinese_characters,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )


def unigram_normalizer(lowercase: bool) -> normalizers.Normalizer:
    """ALBERT's: plain quotes, compatibility forms, no accents, lower-cased or not."""
    steps = [
        normalizers.Replace("``", '"'),
        normalizers.Replace("''", '"'),
        normalizers.NFKD(),
        normalizers.StripAccents(),
    ]
    return normalizers.Sequence([*steps, normalizers.Lowercase()] if lowercase else steps)


def limit_in(value: Any) -> int | None:
    """The number of tokens that a setting limits texts to; None if it sets no limit."""
    is_limit = isinstance(value, int) and not isinstance(value, bool) and value < _MOST_TOKENS
    return value if is_limit else None


def _is_of_bert(settings: Mapping[str, Any]) -> bool:
    """Whether transformers reads the tokenizer by a class for BERT's WordPiece."""
    return (_class_of(settings) or "Bert") in BERTS


def _class_of(settings: Mapping[str, Any]) -> str:
    """The class by which transformers reads the tokenizer, without `Tokenizer` and `Fast`; empty if
    the file does not say."""
    name = str(settings.get("tokenizer_class") or "")
    return name.removesuffix("Fast").removesuffix("Tokenizer")


def _check_is_of_bert(path: str, settings: Mapping[str, Any]) -> None:
    """Raises: FormatError if another class than BERT's cuts words in its own way first."""
    if not _is_of_bert(settings):
        raise FormatError(
            f"{path}: wanted BERT's WordPiece, its {SETTINGS} names {settings['tokenizer_class']}, "
            "which splits text in another way: use another model, or save the tokenizer with "
            "transformers as a tokenizer.json, if it has that form"
        )


def _override(inner: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Change what transformers' class sets up itself, whatever `tokenizer.json` says."""
    normalizer, splits, name = inner.normalizer, inner.pre_tokenizer, _class_of(settings)
    if isinstance(normalizer, normalizers.BertNormalizer) and _is_of_bert(settings):
        inner.normalizer = _with_settings(normalizer, settings)
    if isinstance(splits, pre_tokenizers.ByteLevel) and name in WITH_PREFIX_SPACE:
        splits.add_prefix_space = bool(settings.get("add_prefix_space", False))
        inner.pre_tokenizer = splits
    if not inner.num_special_tokens_to_add(is_pair=True) and name in BERTS - {"MPNet"}:
        inner.post_processor = None  # gets BERT's


def _with_settings(normalizer: Any, settings: Mapping[str, Any]) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=normalizer.clean_text,
        handle_chinese_chars=settings.get(
            "tokenize_chinese_chars", normalizer.handle_chinese_chars
        ),
        strip_accents=settings.get("strip_accents", normalizer.strip_accents),
        lowercase=settings.get("do_lower_case", normalizer.lowercase),
    )


def _content(token: Any) -> str:
    """The text of a special token, which is written with its flags or without."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _additional_tokens(there: TokenizerFolder) -> list[str]:
    """Special tokens beside the five usual ones, wherever transformers' version keeps them."""
    names = ("additional_special_tokens", "extra_special_tokens")
    listed = [each.get(name) or [] for each in (there.settings, there.special) for name in names]
    return [
        _content(token)
        for tokens in listed
        for token in (tokens.values() if isinstance(tokens, Mapping) else tokens)
    ]


def _added_tokens(there: TokenizerFolder) -> dict[int, tokenizers.AddedToken]:
    """Tokens beside those of `vocab.txt` by id, wherever transformers' version keeps them."""
    listed = there.json(ADDED, dict[str, int])
    tokens = {number: tokenizers.AddedToken(content) for content, number in listed.items()}
    for number, entry in (there.settings.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(value) for name, value in entry.items() if name in FLAGS}
        tokens[_id_of(number, there)] = tokenizers.AddedToken(entry["content"], **flags)
    return tokens


def _id_of(number: str, there: TokenizerFolder) -> int:
    try:
        return int(number)
    except ValueError as error:
        raise FormatError(
            f"{there.path(SETTINGS)}: added_tokens_decoder: wanted tokens by their id, got "
            f"{number!r}: correct it, or copy it again"
        ) from error
