"""A tokenizer from a stranger costs no more than one that is published, or is refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bert_core.bundle.layout import read_json
from bert_core.bundle.memory import MOST_HEADER_BYTES
from bert_core.bundle.tensors import read_tensors
from bert_core.data.bounds import MOST_ADDED, MOST_STEPS, check_tokenizer
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import FormatError
from bert_core.typed import MOST_BYTES
from tests import tiny

LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "growth": ({"normalizer": {"type": "Sequence", "normalizers": [LONGER] * 20}}, "64 times as"),
    "content": ({"normalizer": LONGER | {"content": "b" * 100}}, "got 100 times"),
    "prepend": ({"normalizer": {"type": "Prepend", "prepend": "b" * 100}}, "got 100 times"),
    "steps": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * MOST_STEPS}},
        "at most 100 steps",
    ),
    "word": (
        {"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9, "vocab": {}}},
        "max_input_chars_per_word of at most 1,000",
    ),
    "added": ({"added_tokens": [{}] * (MOST_ADDED + 1)}, "at most 100,000 added tokens"),
}
# Matching these can take exponential time in the length of the text.
EXPLODING = [
    r"(a+)+b",
    r"(?:a|a)*b",
    r"((a*)b?)*c",
    r"(?:a{2,}){2,}b",
    r"(x|(?:a|b))+",
    r"(a+){200}",
]
# Of GPT-2, cl100k and BLOOM (their tokenizer.json), and of DeBERTa's and Gemma's normalizers.
PUBLISHED = [
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r" {2,}",
    r"[\n\r\t]",
    r"\(+\)+[+*]+",
]


@pytest.mark.parametrize("name", ODD)
def test_settings_that_cost_without_bound_are_refused_before_they_are_used(
    name: str, tmp_path: Path
) -> None:
    changes, message = ODD[name]
    contents = json.loads(tiny.tokenizer().inner.to_str()) | changes
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(FormatError, match=rf"tokenizer\.json: wanted .*{message}"):
        Tokenizer.load(tmp_path)


def split_by(pattern: str) -> bytes:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return json.dumps(
        json.loads(tiny.tokenizer().inner.to_str()) | {"pre_tokenizer": split}
    ).encode()


@pytest.mark.parametrize("pattern", EXPLODING)
def test_a_pattern_that_repeats_a_choice_or_a_repetition_is_refused(pattern: str) -> None:
    with pytest.raises(FormatError, match="wanted patterns that repeat no choice and no repetit"):
        check_tokenizer(split_by(pattern), "tokenizer.json")


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_pass(pattern: str) -> None:
    check_tokenizer(split_by(pattern), "tokenizer.json")


@pytest.mark.parametrize("length", [{"Fixed": 10**12}, "BatchLongest"])
def test_padding_in_the_file_costs_nothing(length: Any, tmp_path: Path) -> None:
    contents = json.loads(tiny.tokenizer().inner.to_str())
    contents["padding"] = {
        "strategy": length, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "[PAD]",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    assert Tokenizer.load(tmp_path).ids(["the sea"])[0].tolist() == [5, 6]


def test_a_large_header_of_tensors_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    one = torch.zeros(1)
    save_file({"a": one}, path, metadata={"note": "x" * MOST_HEADER_BYTES})
    with pytest.raises(
        FormatError, match=r"model\.safetensors: wanted a header of at most 2,097,1"
    ):
        read_tensors(path)
    save_file({"a": one}, path)
    assert read_tensors(path) == {"a": one}


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer_config.json"])
def test_a_huge_file_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    tiny.tokenizer().save(tmp_path)
    if name == "vocab.txt":
        (tmp_path / "tokenizer.json").unlink()
    os.truncate(tmp_path / name, MOST_BYTES + 1)  # takes no room on the disk
    with pytest.raises(FormatError, match=rf"{name}: wanted at most 134,217,728 bytes"):
        Tokenizer.load(tmp_path)
    if name.endswith(".json"):
        with pytest.raises(FormatError, match=rf"{name}: wanted at most 134,217,728 bytes"):
            read_json(tmp_path / name)
