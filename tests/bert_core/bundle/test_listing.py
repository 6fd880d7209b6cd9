"""Which files of a hub repository are fetched, over listings of well-known ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bert_core.bundle.format import bundle_digest, load_bundle
from bert_core.bundle.listing import check_family, needed_files, needed_of_tokenizer
from bert_core.errors import FormatError
from tests import tiny

# Names as the hub lists them.
BERT_BASE_UNCASED = """
    .gitattributes LICENSE README.md config.json flax_model.msgpack model.onnx model.safetensors
    pytorch_model.bin rust_model.ot tf_model.h5 tokenizer.json tokenizer_config.json vocab.txt
    coreml/fill-mask/float32_model.mlpackage/Data/com.apple.CoreML/model.mlmodel
""".split()  # noqa: SIM905
ALL_MINILM = """
    .gitattributes 1_Pooling/config.json README.md config.json config_sentence_transformers.json
    data_config.json model.safetensors modules.json onnx/model.onnx onnx/model_O1.onnx
    onnx/model_qint8_avx512.onnx openvino/openvino_model.bin openvino/openvino_model.xml
    pytorch_model.bin rust_model.ot sentence_bert_config.json special_tokens_map.json tf_model.h5
    tokenizer.json tokenizer_config.json train_script.py vocab.txt
""".split()  # noqa: SIM905
BGE_M3 = """
    .gitattributes 1_Pooling/config.json README.md colbert_linear.pt config.json
    config_sentence_transformers.json imgs/bm25.jpg long.jpg modules.json onnx/model.onnx
    onnx/model.onnx_data onnx/sentencepiece.bpe.model onnx/tokenizer.json pytorch_model.bin
    sentence_bert_config.json sentencepiece.bpe.model sparse_linear.pt special_tokens_map.json
    tokenizer.json tokenizer_config.json
""".split()  # noqa: SIM905
CROSS_ENCODER = """
    .gitattributes README.md config.json flax_model.msgpack model.safetensors onnx/model.onnx
    openvino/openvino_model.bin pytorch_model.bin special_tokens_map.json tokenizer.json
    tokenizer_config.json vocab.txt
""".split()  # noqa: SIM905
PARTS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
OLD_PARTS = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
SMALL = ["config.json", "vocab.txt"]


def index(parts: list[str]) -> dict[str, Any]:
    names = {"a.weight": parts[0], "b.weight": parts[1], "b.bias": parts[1]}
    return {"metadata": {"total_size": 3}, "weight_map": names}


@pytest.mark.parametrize(
    ("names", "contents", "needed"),
    [
        pytest.param(
            BERT_BASE_UNCASED,
            {},
            "config.json model.safetensors tokenizer.json tokenizer_config.json vocab.txt",
            id="bert-base-uncased",
        ),
        pytest.param(
            ALL_MINILM,
            {},
            "1_Pooling/config.json config.json config_sentence_transformers.json "
            "model.safetensors modules.json "
            "sentence_bert_config.json special_tokens_map.json tokenizer.json "
            "tokenizer_config.json vocab.txt",
            id="all-MiniLM-L6-v2",
        ),
        pytest.param(
            BGE_M3,
            {},
            "1_Pooling/config.json config.json config_sentence_transformers.json modules.json "
            "pytorch_model.bin "
            "sentence_bert_config.json special_tokens_map.json tokenizer.json "
            "tokenizer_config.json",
            id="bge-m3",
        ),
        pytest.param(
            CROSS_ENCODER,
            {},
            "config.json model.safetensors special_tokens_map.json tokenizer.json "
            "tokenizer_config.json vocab.txt",
            id="ms-marco-cross-encoder",
        ),
        pytest.param(
            [*SMALL, "model.safetensors.index.json", *PARTS, "pytorch_model.bin", "model.onnx"],
            {"model.safetensors.index.json": index(PARTS)},
            f"config.json {' '.join(PARTS)} model.safetensors.index.json vocab.txt",
            id="parts",
        ),
        pytest.param(
            [*SMALL, "pytorch_model.bin.index.json", *OLD_PARTS, "tf_model.h5"],
            {"pytorch_model.bin.index.json": index(OLD_PARTS)},
            f"config.json {' '.join(OLD_PARTS)} pytorch_model.bin.index.json vocab.txt",
            id="parts-by-torch",
        ),
        pytest.param(
            [*SMALL, "README.md", "raybert.json", "onnx/model.onnx", "old.safetensors"],
            {
                "raybert.json": {
                    "files": {"config.json": "", "vocab.txt": "", "onnx/model.onnx": ""}
                }
            },
            "config.json onnx/model.onnx raybert.json vocab.txt",
            id="ours",
        ),
    ],
)
def test_only_one_copy_of_a_repositorys_model_is_needed(
    names: list[str], contents: Mapping[str, Any], needed: str
) -> None:
    assert needed_files(names, lambda name: contents[name]) == needed.split()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([*SMALL, "tf_model.h5", "model.onnx"], "got model.onnx, tf_model.h5: convert them with"),
        ([*SMALL, "tf_model.h5"], r"Class.from_pretrained\(folder, from_tf=True\).save_pretrained"),
        ([*SMALL, "flax_model.msgpack"], r"\(folder, from_flax=True\)\.save_pretrained\(folder\)"),
        ([*SMALL, "model.onnx"], "got model.onnx: give a folder or a repository that has one"),
        (SMALL, "or pytorch_model.bin, got none"),
        (["config.json", "model.safetensors", "spm.model"], "or vocab.txt, got spm.model: create"),
        (["config.json", "model.safetensors"], "or vocab.txt, got neither"),
    ],
)
def test_missing_files_are_named_with_the_existing_ones(names: list[str], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        needed_files(names)


def test_only_a_tokenizers_own_files_are_needed() -> None:
    wanted = ["tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    assert needed_of_tokenizer(BERT_BASE_UNCASED) == wanted


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "gpt2"}, "got model_type gpt2$"),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder = True: wanted False"),
        ({"architecture": "resnet50"}, "without model_type"),
        (None, "a repository without config.json"),
    ],
)
def test_a_config_that_is_not_an_encoders_is_refused(entries: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        check_family([], entries)


def test_a_config_as_old_as_bert_needs_no_family() -> None:
    check_family([], tiny.entries(10))


def test_weights_in_parts_by_torch_are_read_like_those_in_one_file(tmp_path: Path) -> None:
    whole = tiny.bundle(tmp_path / "whole", tiny.tokenizer())
    (whole / "raybert.json").unlink()
    state = load_file(whole / "model.safetensors")
    (whole / "model.safetensors").unlink()
    names = sorted(state)
    parts = dict(zip(OLD_PARTS, (names[::2], names[1::2]), strict=True))
    weight_map = {name: part for part, its in parts.items() for name in its}
    its_index = tmp_path / "whole" / "pytorch_model.bin.index.json"
    its_index.write_text(json.dumps({"weight_map": weight_map}))
    for part, its in parts.items():
        torch.save({name: state[name] for name in its}, whole / part)
    digest = bundle_digest(whole)
    read = load_bundle(whole)
    torch.save(state, whole / "pytorch_model.bin")
    assert bundle_digest(whole) != digest
    one = load_bundle(whole).state
    assert read.state.keys() == one.keys()
    assert all(torch.equal(read.state[name], one[name]) for name in one)
    (whole / "pytorch_model.bin").unlink()
    (whole / OLD_PARTS[1]).unlink()
    with pytest.raises(FormatError, match=r"pytorch_model-00002-of-00002.bin: wanted this file"):
        bundle_digest(whole)
