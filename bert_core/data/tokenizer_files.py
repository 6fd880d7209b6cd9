"""Reads the files of a tokenizer, combined as transformers combines them, and writes them."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from bert_core import files
from bert_core.containment import has_file
from bert_core.data import vocab_txt
from bert_core.data.bounds import check_tokenizer
from bert_core.data.special_tokens import CLS, MASK, OTHER_NAMES, PAD, SEP, UNK
from bert_core.data.subwords import kind_of, vocabulary_of, wordpiece
from bert_core.errors import FormatError, RaybertError
from bert_core.manifest import folder_with
from bert_core.typed import as_type, check_size, parse_json

# Classes of transformers, without `Tokenizer` and `Fast`, that read a `vocab.txt` as BERT does.
BERTS = {
    "Bert", "DistilBert", "Electra", "MPNet", "MobileBert", "ConvBert", "Funnel",
    "LayoutLM", "LayoutLMv2", "Lxmert", "RetriBert", "SqueezeBert", "Splinter", "DPRContextEncoder",
    "DPRQuestionEncoder", "DPRReader",
}  # fmt: skip
_MOST_TOKENS = 1 << 30
"""transformers writes a number of 31 digits where there is no limit."""
# Classes that put a space before every text if and only if `add_prefix_space` is set, whatever
# `tokenizer.json` says.
WITH_PREFIX_SPACE = {"Roberta", "Deberta", "Longformer", "GPT2", "Bart", "LED"}
# Classes whose models have one segment.
WITHOUT_SEGMENTS = {"DistilBert", "MPNet", "Roberta", "XLMRoberta", "Longformer", "Bart"}
TOKENIZER, VOCABULARY = "tokenizer.json", "vocab.txt"
ADDED, SETTINGS = "added_tokens.json", "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
SEGMENTS = "token_type_ids"
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
"""Flags of an added token."""
# Vocabulary files of other layouts, which are not read → how to make a `tokenizer.json`.
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


# Entries that name a special token; the last of them takes precedence.
_ENTRIES = {
    PAD: ("pad_token",),
    UNK: ("unk_token",),
    CLS: ("bos_token", "cls_token"),
    SEP: ("eos_token", "sep_token"),
    MASK: ("mask_token",),
}
# Types of the entries that are read from the files beside a vocabulary.
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


class TokenizerFolder:
    """The files of a tokenizer in a folder, at a path or a URI."""

    def __init__(self, folder: str, among: Collection[str] | None) -> None:
        self.folder, self._among = folder, among
        self._local = files.local_path(folder)

    @classmethod
    def of(cls, folder: str | Path, among: Collection[str] | None) -> "TokenizerFolder":
        """Return the tokenizer's files in `folder`; if it is the output of a stage that makes a
        bundle, those of the bundle.

        Args:
            among: names of the folder's files to consider; None for all.
        """
        return cls(folder_with(str(folder), TOKENIZER, VOCABULARY) or str(folder), among)

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
        """Read a JSON object of the type `hint`; empty if there is no such file.

        Raises: FormatError if it is of another type.
        """
        if not self.has(name):
            return {}
        return as_type(hint, parse_json(self.read(name), self.path(name)), self.path(name))

    @cached_property
    def source(self) -> str:
        """The name of the file that holds the vocabulary. Raises: FormatError if there is no
        supported one."""
        for name in (TOKENIZER, VOCABULARY):
            if self.has(name):
                return name
        for name, way in OTHER_FILES.items():
            if self.has(name):
                raise FormatError(
                    f"{self.folder}: wanted tokenizer.json or vocab.txt, found only {name}: create "
                    f"the first {way}"
                )
        raise FormatError(
            f"{self.folder}: wanted tokenizer.json or vocab.txt, found neither: "
            "give a folder that `raybert vocab` wrote, or one in Hugging Face layout"
        )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn errors of the library into a FormatError that names the `tokenizer.json`."""
        try:
            yield
        except RaybertError:
            raise
        except Exception as error:  # NOTE: the library raises bare Exception
            if self.source != TOKENIZER:
                raise
            raise FormatError(
                f"{self.path(TOKENIZER)}: wanted a tokenizers JSON file, it cannot be read "
                f"({error}): copy it again, or train one with `raybert vocab`"
            ) from error

    def inner(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """Return the library's tokenizer, without tokens that only the files beside it list, and
        BERT's names of the special tokens → the names in these files."""
        settings, path = self.settings, self.path(self.source)
        data = self.read(self.source)
        if self.source == TOKENIZER:
            check_tokenizer(data, path)
            inner = tokenizers.Tokenizer.from_buffer(data)
            _override(inner, settings)
            return inner, self.special_tokens
        _check_is_of_bert(path, settings)
        return wordpiece(
            vocab_txt.tokens_in(data, path),
            lowercase=bool(settings.get("do_lower_case", True)),
            strip_accents=settings.get("strip_accents"),
            chinese_characters=bool(settings.get("tokenize_chinese_chars", True)),
            special=self.special_tokens,
        )

    def add_tokens(self, inner: tokenizers.Tokenizer) -> None:
        """Add the tokens that only the files beside the vocabulary list to `inner`, in place. Mark
        their special tokens as special, so that they are never split; special tokens that are not
        in the vocabulary are ignored.

        Raises: FormatError if a new token would not get the id that its file gives.
        """
        known = set[str]()
        if self.source == TOKENIZER:
            known = {token.content for token in inner.get_added_tokens_decoder().values()}
        for number, token in sorted(_added_tokens(self).items()):
            if token.content in known:
                continue
            inner.add_tokens([token])
            if inner.token_to_id(token.content) != number:
                raise FormatError(
                    f"{self.path(self.source)}: wanted the added token {token.content!r} to have "
                    f"the next id, {inner.token_to_id(token.content)}, got {number}: correct its "
                    f"number in {ADDED} or {SETTINGS}"
                )
        special = [token for token in _additional_tokens(self) if token not in known]
        inner.add_special_tokens(
            [token for token in special if inner.token_to_id(token) is not None]
        )

    def check_names(self, special: Mapping[str, str]) -> None:
        """Check that transformers puts these [CLS] and [SEP] around a text.

        Raises: FormatError if the settings name other tokens.
        """
        for name, token in (("cls_token", CLS), ("sep_token", SEP)):
            chosen = _content(self.settings.get(name) or special[token])
            if chosen != special[token]:
                raise FormatError(
                    f"{self.path(SETTINGS)}: wanted {name} {special[token]!r}, got "
                    f"{chosen!r}: use another model, or correct the file if the model was trained "
                    "with the usual token"
                )

    @property
    def has_segments(self) -> bool:
        """Whether the model may distinguish two segments."""
        usual = [] if _class_of(self.settings) in WITHOUT_SEGMENTS else [SEGMENTS]
        return SEGMENTS in (self.settings.get("model_input_names") or usual)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The entries of `tokenizer_config.json`."""
        entries: dict[str, Any] = self.json(SETTINGS, dict[str, Any])
        for name, hint in _SETTINGS.items():
            as_type(hint, entries.get(name), self.path(SETTINGS), key=name)
        return entries

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """BERT's names of the special tokens → the names in the files beside the vocabulary."""
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
        """The entries of `special_tokens_map.json`."""
        entries: dict[str, Any] = self.json(SPECIAL, dict[str, Any])
        for name, hint in _SPECIAL.items():
            as_type(hint, entries.get(name), self.path(SPECIAL), key=name)
        return entries


def contents_of(
    inner: tokenizers.Tokenizer,
    special: Mapping[str, str],
    *,
    model_max_length: int,
    segments: bool,
    keeps_end: bool,
) -> dict[str, bytes]:
    """Return the contents of the files that transformers' AutoTokenizer reads, by name.

    Args:
        special: BERT's names of the special tokens → those of this vocabulary.
        segments: whether the model distinguishes two segments.
        keeps_end: whether texts that are too long lose their beginning.
    """
    names = {"pad": PAD, "unk": UNK, "cls": CLS, "sep": SEP, "mask": MASK}
    written = {f"{name}_token": special[token] for name, token in names.items()}
    settings: dict[str, Any] = {"model_max_length": model_max_length, **written}
    contents = {TOKENIZER: inner.to_str(pretty=False).encode()}
    if keeps_end:
        settings["truncation_side"] = "left"
    if not segments:
        settings["model_input_names"] = ["input_ids", "attention_mask"]
    normalizer, is_wordpiece = inner.normalizer, kind_of(inner) == "wordpiece"
    of_bert = is_wordpiece and special[CLS] != OTHER_NAMES[CLS]
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
    if is_wordpiece:
        contents[VOCABULARY] = "".join(f"{token}\n" for token in vocabulary_of(inner)).encode()
    return contents | {
        SETTINGS: json.dumps(settings, indent=2).encode(),
        SPECIAL: json.dumps(written, indent=2).encode(),
    }


def limit_in(value: Any) -> int | None:
    """Return the number of tokens to which a setting limits texts; None if it sets no limit."""
    is_limit = isinstance(value, int) and not isinstance(value, bool) and value < _MOST_TOKENS
    return value if is_limit else None


def _is_of_bert(settings: Mapping[str, Any]) -> bool:
    """Whether transformers reads the tokenizer with a class for BERT's WordPiece."""
    return (_class_of(settings) or "Bert") in BERTS


def _class_of(settings: Mapping[str, Any]) -> str:
    """Return the class with which transformers reads the tokenizer, without `Tokenizer` and `Fast`;
    empty if the settings do not name it."""
    name = str(settings.get("tokenizer_class") or "")
    return name.removesuffix("Fast").removesuffix("Tokenizer")


def _check_is_of_bert(path: str, settings: Mapping[str, Any]) -> None:
    """Check that the settings name no class but BERT's: others first split text in their own way.

    Raises: FormatError if they do.
    """
    if not _is_of_bert(settings):
        raise FormatError(
            f"{path}: wanted BERT's WordPiece, its {SETTINGS} names {settings['tokenizer_class']}, "
            "which splits text in another way: use another model, or save the tokenizer with "
            "transformers as a tokenizer.json, if it has that form"
        )


def _override(inner: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Apply to `inner`, in place, the settings that transformers' class applies itself, whatever
    `tokenizer.json` says."""
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
    """Return the text of a special token, which files give with flags or as bare text."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _additional_tokens(there: TokenizerFolder) -> list[str]:
    """Return the special tokens besides the five usual ones, from every entry in which a version
    of transformers keeps them."""
    names = ("additional_special_tokens", "extra_special_tokens")
    listed = [each.get(name) or [] for each in (there.settings, there.special) for name in names]
    return [
        _content(token)
        for tokens in listed
        for token in (tokens.values() if isinstance(tokens, Mapping) else tokens)
    ]


def _added_tokens(there: TokenizerFolder) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens besides those of `vocab.txt` by id, from every place in which a version of
    transformers keeps them."""
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
