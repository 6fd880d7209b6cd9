"""Every value of every JSON file of a bundle, replaced by one of another kind: the bundle is read,
or refused by an error that names the file. Nothing else is raised."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.bundle.format import load_bundle
from bert_core.errors import FormatError
from bert_core.manifest import Manifest, Output, read_manifest, write_manifest
from bert_core.model.families import LAYOUTS
from bert_core.model.hf import encoder_config_from_huggingface, encoder_config_to_huggingface
from bert_core.tasks.base import Task
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.sparse_embedding import SparseEmbedding
from bert_core.tasks.text_classification import TextClassification
from tests import tiny

DEEP: Any = json.loads("[" * 900 + "]" * 900)
ODD: tuple[Any, ...] = (None, True, -1, 1.5, 10**400, "text", [], [[1]], {"a": []})


def replaced(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The value with one place in it changed to another kind, and that place."""

    def at(inner: Any, path: tuple[Any, ...], new: Any) -> Any:
        if not path:
            return new
        changed = inner.copy()
        changed[path[0]] = at(inner[path[0]], path[1:], new)
        return changed

    def places(inner: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if path:
            yield path
        if len(path) < 3 and isinstance(inner, dict | list):
            for step in inner if isinstance(inner, dict) else range(len(inner)):
                yield from places(inner[step], (*path, step))

    yield from (("all of it", odd) for odd in (*ODD, DEEP))
    for number, place in enumerate(places(value, ())):
        for odd in (*ODD, DEEP)[number % 2 :: 2]:  # every other, which halves the time
            yield f"{'.'.join(map(str, place))} = {json.dumps(odd)[:40]}", at(value, place, odd)


def survivors(path: Path, read: Callable[[], object], value: Any) -> list[str]:
    """What is raised besides errors that name the file, if its value is replaced."""
    odd = []
    for what, new in replaced(value):
        path.write_text(json.dumps(new))
        try:
            read()
        except FormatError as error:
            # Where a value fits, but not to other files, the folder is named.
            if str(path.parent) not in str(error) and path.name not in str(error):
                odd.append(f"{what}: does not name the file: {error}")
        except BaseException as error:
            odd.append(f"{what}: {type(error).__name__}: {error}"[:300])
    path.write_text(json.dumps(value))
    return odd


def bundle(folder: Path, task: Task) -> Path:
    """A bundle whose encoder has room for one token more than its tokenizer."""
    tokenizer = tiny.tokenizer()
    config = tiny.encoder_config(tokenizer.vocab_size + 1)
    return tiny.bundle(folder / "bundle", tokenizer, config, task=task)


def as_written_by_transformers(folder: Path) -> None:
    (folder / "raybert.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid", "version": "5"}}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "do_lower_case": True, "tokenizer_class": "BertTokenizer", "model_input_names": ["a"],
        "truncation_side": "left",
        "added_tokens_decoder": {"11": {"content": "[new]", "special": True}},
        "extra_special_tokens": {"image": "[image]"},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "added_tokens.json").write_text('{"[new]": 11}')
    special = json.loads((folder / "special_tokens_map.json").read_text())
    special |= {"cls_token": {"content": "[CLS]"}, "additional_special_tokens": ["[new]"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    about = {"prompts": {"query": "q"}, "default_prompt_name": None, "model_type": "CrossEncoder"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))


TASKS: dict[str, Task] = {
    "classes": TextClassification(["a", "b"]),
    "vectors": FeatureExtraction(options=FeatureExtraction.options(prompts={"query": "q"})),
    "sparse": SparseEmbedding(),
}


@pytest.mark.parametrize("task", ["classes", "vectors"])
def test_odd_values_in_a_record_are_refused_by_name(task: str, tmp_path: Path) -> None:
    folder = bundle(tmp_path, TASKS[task])
    path = folder / "raybert.json"
    record = json.loads(path.read_text())
    del record["digest"]
    record |= {"format_version": 1, "examples": [{"text": "a"}], "metrics": {"f1": 0.5}}
    record |= {"spent": {"wall_s": 1}, "runs": [{"engine": "torch", "precision": "fp32"}]}
    record["files"] = {name: record["files"][name] for name in ("config.json", "model.safetensors")}
    record["files"]["tokenizer.json"] = json.loads(path.read_text())["files"]["tokenizer.json"]
    assert survivors(path, lambda: load_bundle(folder), record) == []


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("classes", "config.json"),
        ("classes", "tokenizer_config.json"),
        ("classes", "special_tokens_map.json"),
        ("classes", "added_tokens.json"),
        ("classes", "config_sentence_transformers.json"),
        ("vectors", "modules.json"),
        ("vectors", "1_Pooling/config.json"),
        ("vectors", "sentence_bert_config.json"),
        ("vectors", "config_sentence_transformers.json"),
        ("sparse", "1_SpladePooling/config.json"),
    ],
)
def test_odd_values_in_a_folder_of_others_are_refused_by_name(
    task: str, name: str, tmp_path: Path
) -> None:
    folder = bundle(tmp_path, TASKS[task])
    as_written_by_transformers(folder)
    value = json.loads((folder / name).read_text())
    assert survivors(folder / name, lambda: load_bundle(folder), value) == []


def test_odd_values_in_an_index_of_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = bundle(tmp_path, TASKS["classes"])
    as_written_by_transformers(folder)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    path = folder / "model.safetensors.index.json"
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": "part.safetensors"}}
    assert survivors(path, lambda: load_bundle(folder), index) == []


def test_odd_values_in_a_manifest_are_refused_by_name(tmp_path: Path) -> None:
    manifest = Manifest(
        stage="prepare",
        digest="ab",
        config={"seed": 0},
        inputs={"corpus": "cd"},
        hub={"model": "owner/name@commit"},
        outputs={"a.arrow": Output(size_bytes=3, sha256="ef")},
        counts={"rows": 3, "special_ids": [0, 1], "vocab_size": 9},
    )
    write_manifest(str(tmp_path), manifest)
    path = tmp_path / "manifest.json"
    entries = json.loads(path.read_text())
    assert survivors(path, lambda: read_manifest(str(tmp_path)), entries) == []
    for what, new in replaced(entries):
        path.write_text(json.dumps(new))
        if new != entries:
            with pytest.raises(FormatError, match=r"manifest\.json: wanted"):
                pytest.fail(f"{what}: {read_manifest(str(tmp_path))}")


@pytest.mark.parametrize(
    "rows",
    [
        np.array([1, "a", None], dtype=object),
        np.zeros(3, dtype=np.float32),
        np.zeros((2, 2), dtype=np.uint64),
        np.uint64(3),
        b"",
        b"\x93NUMPY\x01\x00v\x00{'descr': '<u8', 'fortran_order': False, 'shape': (1000000000000,)}"
        + b" " * 47
        + b"\n",
        b"PK\x03\x04",
        b"\x93NUMPY\x01\x00\xff\xff",
    ],
)
def test_odd_digests_of_rows_are_refused_by_name(rows: Any, tmp_path: Path) -> None:
    folder = tiny.bundle(tmp_path / "bundle", tiny.tokenizer(), task=TASKS["classes"])
    (folder / "raybert.json").unlink()
    path = folder / "trained_rows.npy"
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    else:
        np.save(path, rows)
    with pytest.raises(FormatError, match=r"trained_rows\.npy: wanted digests of rows"):
        load_bundle(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("family", LAYOUTS)
def test_odd_values_in_a_config_are_refused_for_every_family(family: str) -> None:
    entries = encoder_config_to_huggingface(LAYOUTS[family].defaults) | {
        "architectures": ["A"], "conv_kernel_size": 3, "conv_act": "tanh", "position_buckets": 3,
        "layer_types": ["full_attention"], "rope_scaling": {"rope_type": "default"},
        "rope_parameters": {"full_attention": {"rope_theta": 1.0, "rope_type": "default"}},
    }  # fmt: skip
    for _, new in replaced(entries):
        if isinstance(new, dict):
            with suppress(FormatError):
                encoder_config_from_huggingface(new)
