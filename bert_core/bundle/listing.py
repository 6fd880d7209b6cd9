"""Decides which files of a repository make a bundle, before any of them is fetched.

Repositories on the Hugging Face hub hold the same weights several times, for other libraries too;
`bert_core.bundle.format` reads one copy.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from bert_core.bundle.foreign import FOREIGN_FILES, WEIGHT_FORMS, weights_among
from bert_core.bundle.layout import CONFIG, RECORD, recorded_files
from bert_core.data.tokenizer_files import OTHER_FILES
from bert_core.errors import FormatError
from bert_core.model.families import LAYOUTS
from bert_core.model.hf import encoder_config_from_huggingface

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "added_tokens.json")
"""The files that `Tokenizer.load` reads."""
# A config without a family, as in the oldest checkpoints, counts as BERT's if it has these.
_SIZES = {"hidden_size", "num_hidden_layers", "vocab_size"}
# Models of other libraries, recognized by a file that only they have.
_OTHERS = {
    "model_index.json": "a pipeline of diffusers",
    "adapter_config.json": "an adapter, without the model that it adapts,",
    "params.json": "a model in its authors' own layout",
    "saved_model.pb": "a model of TensorFlow",
}


def needed_files(
    names: Collection[str], read: Callable[[str], Mapping[str, Any]] = lambda name: {}
) -> list[str]:
    """Return the files of a bundle among those of a repository, sorted.

    For a bundle of ours, these are the files in its record. For a folder written by transformers or
    sentence-transformers, they are the files that a `Bundle` is read from, with the weights in the
    first available form of `WEIGHT_FORMS`. So a clone of the whole repository is a bundle with the
    same digest.

    Args:
        names: relative paths of all files.
        read: returns the JSON object in one of the files; called only for the record or an index of
            weights.
    Raises: FormatError if no weights or no vocabulary have a supported format.
    """
    if RECORD in names:
        recorded = {RECORD, *recorded_files(read(RECORD))}
        return sorted(recorded & set(names))
    weights = weights_among(names, read)
    if not weights:
        raise FormatError(
            f"wanted weights in {' or '.join(WEIGHT_FORMS[::2])}, got {_alike(names)}: "
            f"{_to_convert(names)}"
        )
    needed = {CONFIG, *FOREIGN_FILES} - set(WEIGHT_FORMS) | {*weights, *needed_of_tokenizer(names)}
    return sorted(needed & set(names))


def needed_of_tokenizer(names: Collection[str]) -> list[str]:
    """Return the files of a tokenizer among those of a repository, sorted.

    Raises: FormatError if no vocabulary has a supported format.
    """
    if not {"tokenizer.json", "vocab.txt"} & set(names):
        present = [name for name in OTHER_FILES if name in names] or ["neither"]
        way = OTHER_FILES.get(present[0], OTHER_FILES["vocab.json"])
        raise FormatError(
            f"wanted tokenizer.json or vocab.txt, got {', '.join(present)}: create the first {way}"
            ", in a folder that has it next to the model's files"
        )
    return sorted({*TOKENIZER_FILES} & set(names))


def check_family(names: Collection[str], entries: Mapping[str, Any] | None) -> None:
    """Check that a repository's model is an encoder of a supported family.

    Args:
        names: the repository's files.
        entries: of its `config.json`; None if it has none.
    Raises: FormatError, which says what the model is instead.
    """
    known = f"an encoder of the families {', '.join(LAYOUTS)}"
    if entries is None:
        kinds = [kind for name, kind in _OTHERS.items() if name in names]
        what = kinds[0] if kinds else f"a repository without {CONFIG}"
        raise FormatError(f"wanted {known}, got {what}")
    family = entries.get("model_type")
    if family is None and not entries.keys() >= _SIZES:
        raise FormatError(f"wanted {known}, got a {CONFIG} without model_type, of another library")
    if family is not None and family not in LAYOUTS:
        classes = entries.get("architectures")
        shown = f" ({', '.join(map(str, classes))})" if isinstance(classes, list) else ""
        raise FormatError(f"wanted {known}, got model_type {family}{shown}")
    encoder_config_from_huggingface(entries)


def _to_convert(names: Collection[str]) -> str:
    """Say how to convert weights of other libraries.

    Source: transformers 4.46.3 converts them with their head, by the class that the config names;
        5.23 reads neither, and AutoModel has no head.
    """
    option = next(
        (option for ending, option in _READ_BY_4.items() if any(n.endswith(ending) for n in names)),
        None,
    )
    if option is None:
        return "give a folder or a repository that has one of them"
    return (
        "convert them with transformers 4, the last to read them, and the class that config.json "
        f"names in architectures: Class.from_pretrained(folder, {option}=True)"
        ".save_pretrained(folder)"
    )


_READ_BY_4 = {".msgpack": "from_flax", ".h5": "from_tf"}


def _alike(names: Collection[str]) -> str:
    """List the first few files that hold weights for other libraries, or `none`."""
    endings = (".h5", ".msgpack", ".onnx", ".ot", ".gguf", ".bin", ".safetensors", ".pt", ".ckpt")
    others = sorted(name for name in names if name.endswith(endings))
    return ", ".join(others[:3]) or "none"
