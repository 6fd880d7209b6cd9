"""Of a data set in the hub's layout the wanted split is read, and the files around it are not."""

import bz2
import gzip
import json
import re
from pathlib import Path

import pytest

from bert_core.errors import ConfigError, CorpusError, RaybertError
from bert_core.tasks.text_classification import OneLabel
from bert_core.tasks.texts import TextInput
from bert_core.tasks.token_classification import TokenClassification
from pipelines.corpus.blocks import plan_blocks, read_block
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.hub import data_files, license_of
from pipelines.corpus.labelled import (
    LabelledConfig,
    Split,
    labelled_files,
    labelled_input,
    labelled_rows,
)
from pipelines.corpus.sources import list_corpus

NAMES = [
    "README.md",
    ".gitattributes",
    "LICENSE",
    "data.py",
    "data/train-00000-of-00002.jsonl",
    "data/train-00001-of-00002.jsonl.gz",
    "data/test-00000-of-00001.jsonl",
    "german/train.parquet",
    "german/validation.parquet",
]
TRAIN = NAMES[4:6]


def data_set(folder: Path, card: str, names: list[str]) -> str:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        data = f"<page>{name}</page>".encode()
        if name.endswith(".gz"):
            data = gzip.compress(data)
        elif name.endswith(".bz2"):
            data = bz2.compress(data)
        (folder / name).write_bytes(data)
    (folder / "README.md").write_text(card)
    return str(folder)


def card(*lines: str) -> str:
    return "\n".join(["---", *lines, "---", "# A data set", "---", "Words."])


def found(folder: Path, lines: tuple[str, ...], names: list[str] = NAMES) -> list[str]:
    source = data_set(folder, card(*lines), names)
    files = data_files(source)
    assert files is not None
    assert [file.path for file in list_corpus(CorpusConfig(source=source)).files] == files
    return [file.removeprefix(f"{source}/") for file in files]


@pytest.mark.parametrize(
    "data_files",
    [
        ("data_files: data/train-*",),
        ("data_files:", "  - data/train-00000*", "  - data/train-00001*"),
        ("data_files:", "  - {split: test, path: data/test-*}",
         "  - {split: train, path: data/train-*}"),
        ("data_files:", "  - split: train",
         "    path: [data/train-00000*, data/train-00001-of-00002.jsonl.gz]"),
        ("data_files:", "  - path: data/train-*"),
        ("data_files: '**/train-*'", "default: true"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["default", "english", None])
def test_the_card_names_the_files_of_the_training_split(
    tmp_path: Path, data_files: tuple[str, ...], name: str | None
) -> None:
    config = [f"config_name: {name}", *data_files] if name else list(data_files)
    lines = ["license: mit", "configs:", f"- {config[0]}", *(f"  {line}" for line in config[1:])]
    assert found(tmp_path, tuple(lines)) == TRAIN


GERMAN = ("- config_name: german", "  data_files: german/train*")
ENGLISH = ("- config_name: english", "  data_files: data/train-*")


@pytest.mark.parametrize(
    "lines",
    [
        ("configs:", *GERMAN, *ENGLISH, "  default: true"),
        ("configs:", *GERMAN, "- config_name: default", "  data_files: data/train-*"),
        ("configs:", "- config_name: without files", *ENGLISH),
    ],
)
def test_the_default_of_several_configs_counts(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert found(tmp_path, lines) == TRAIN


@pytest.mark.parametrize("lines", [(), ("license: mit",), ("configs: []",), ("configs:",)])
def test_without_configs_file_names_decide(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert found(tmp_path, lines) == [*TRAIN, "german/train.parquet"]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["training.txt", "testing.txt", "evaluation.txt"], ["training.txt"]),
        (["train/a.txt", "dev/a.txt", "trainers.txt"], ["train/a.txt"]),
        (["A_Train.jsonl", "A_VALID.jsonl"], ["A_Train.jsonl"]),
        (["contest.txt", "strain.jsonl", "a.xml.bz2", "b.md", "c.json"],
         ["a.xml.bz2", "contest.txt", "strain.jsonl"]),
    ],
)  # fmt: skip
def test_a_split_is_a_word_of_its_own_in_a_path(
    tmp_path: Path, names: list[str], wanted: list[str]
) -> None:
    assert found(tmp_path, (), names) == wanted


@pytest.mark.parametrize(
    ("lines", "names", "message"),
    [
        (("configs:", *GERMAN, *ENGLISH), NAMES, ": wanted one config, this data set has german, "
         "english: give the files of the one you want as a folder or a glob below it"),
        (("configs:", "- config_name: a", "  data_files:", "  - {split: test, path: b}"), NAMES,
         ": wanted a split train, its card lists test: name one of them, or give the files as a"),
        ((), ["test.jsonl", "dev.jsonl"], ": wanted a split train in Parquet, JSON, CSV, TSV or "
         "text, its files are named after validation, test: give the files as a glob"),
        ((), ["data.npy"], ": wanted a split train in Parquet, JSON, CSV, TSV or text, this data"),
        (("configs:", "- data_files: data.npy"), ["data.npy"], ", its card lists "),
        (("configs:", "- data_files: gone/*"), NAMES, "/gone/*: wanted a file, a folder or a glob"),
        (("configs:", "- data_files: 3"), NAMES, "/README.md: wanted configs with data_files in the"
         " hub's format, got another format (TypeError"),
        (("configs: all",), NAMES, "/README.md: wanted configs with data_files in the hub's for"),
        (("license: [mit",), NAMES, "/README.md: wanted YAML between its first two lines of ---, it"
         " cannot be read ("),
        (("license: \udcff",), NAMES, "/README.md: wanted YAML between its first two lines of ---"),
    ],
)  # fmt: skip
def test_a_data_set_without_a_known_training_split_is_refused(
    tmp_path: Path, lines: tuple[str, ...], names: list[str], message: str
) -> None:
    data_set(tmp_path, "", names)
    (tmp_path / "README.md").write_bytes(card(*lines).encode(errors="surrogateescape"))
    with pytest.raises(CorpusError, match=f"^{re.escape(str(tmp_path))}.*{re.escape(message)}"):
        data_files(str(tmp_path))


@pytest.mark.parametrize("text", ["# Just words\n", "---\nlicense: mit\n", "---\n- a list\n---\n"])
def test_a_folder_whose_readme_is_not_a_card_is_a_plain_folder(tmp_path: Path, text: str) -> None:
    source = data_set(tmp_path, text, ["test.txt"])
    assert data_files(source) is None
    assert license_of(source) is None
    found = [Path(file.path).name for file in list_corpus(CorpusConfig(source=source)).files]
    assert found == ["test.txt"]  # it describes the folder, as a card does


LABELLED = ["data/train-0.csv", "data/train-1.csv", "data/dev.csv", "data/test.csv", "data/a.json"]
SPLITS = (
    "configs:", "- config_name: a", "  data_files:",
    "  - {split: train, path: data/train-*}", "  - {split: validation, path: data/dev.csv}",
    "  - {split: unsupervised, path: data/test.csv}",
)  # fmt: skip


def labelled_paths(
    source: str, role: Split, split: str | None = None, written_as: str | None = None
) -> list[str]:
    config = LabelledConfig(source=source, split=split, format=written_as)
    labelled_input("rows", config, role)
    return [path.removeprefix(f"{source}/data/") for path in labelled_files(config, role)]


@pytest.mark.parametrize(
    ("text", "held_out"),
    [
        (card(*SPLITS), "dev.csv"),  # the card tells, whatever files are called
        (card("license: mit"), "test.csv"),
        ("# A folder of files", "test.csv"),
    ],
)
def test_labelled_rows_of_a_data_set_are_of_the_split_that_they_are_for(
    tmp_path: Path, text: str, held_out: str
) -> None:
    source = data_set(tmp_path, text, LABELLED)
    assert labelled_paths(source, "train") == ["train-0.csv", "train-1.csv"]
    assert labelled_paths(source, "held_out") == [held_out]
    assert labelled_paths(source, "held_out", split="validation") == ["dev.csv"]
    assert labelled_paths(source, "train", split="validation") == ["dev.csv"]
    source = data_set(tmp_path / "untested", text.replace("test.csv", "dev.csv"), LABELLED[:3])
    assert labelled_paths(source, "held_out") == ["dev.csv"]


def test_a_split_has_the_name_that_its_card_gives(tmp_path: Path) -> None:
    lines = [line.replace("unsupervised", "validation_mismatched") for line in SPLITS]
    source = data_set(tmp_path / "one", card(*lines), LABELLED)
    assert labelled_paths(source, "held_out") == ["dev.csv"]
    assert labelled_paths(source, "held_out", split="validation_mismatched") == ["test.csv"]
    lines = [line.replace("split: validation,", "split: dev_matched,") for line in lines]
    source = data_set(tmp_path / "several", card(*lines), LABELLED)
    message = "wanted one split validation, its card lists dev_matched, validation_mismatched: name"
    with pytest.raises(CorpusError, match=message):
        labelled_paths(source, "held_out")
    assert labelled_paths(source, "held_out", split="dev_matched") == ["dev.csv"]
    with pytest.raises(CorpusError, match="wanted a split all, its card lists train, dev_matc"):
        labelled_paths(source, "held_out", split="all")


@pytest.mark.parametrize(("split", "asked"), [("2024", "2024"), ("null", None)])
def test_a_split_of_a_card_may_be_a_number_and_one_without_a_name_is_for_training(
    tmp_path: Path, split: str, asked: str | None
) -> None:
    lines = [line.replace("split: train,", f"split: {split},") for line in SPLITS]
    source = data_set(tmp_path, card(*lines), LABELLED)
    assert labelled_paths(source, "train", split=asked) == ["train-0.csv", "train-1.csv"]


def test_files_that_are_named_are_read_whatever_their_names(tmp_path: Path) -> None:
    source = data_set(tmp_path, card("license: mit"), LABELLED)
    assert labelled_paths(f"{source}/data/test.csv", "train")[0].endswith("/test.csv")
    assert len(labelled_paths(f"{source}/data/*.csv", "train")) == 4
    for named in (f"{source}/data/test.csv", f"{source}/data/*.csv"):
        with pytest.raises(ConfigError, match="split: wanted a folder or data set with several"):
            labelled_paths(named, "train", split="train")


def test_markdown_is_read_where_there_is_nothing_else(tmp_path: Path) -> None:
    source = data_set(tmp_path, card("title: Notes"), ["a.md", "b/README.md", "b/c.md"])
    files = [file.path for file in list_corpus(CorpusConfig(source=source)).files]
    assert files == [f"{source}/a.md", f"{source}/b/c.md"]
    data_set(tmp_path, card("title: Notes"), ["d.txt"])
    assert data_files(source) == [f"{source}/d.txt"]


@pytest.mark.parametrize("slashes", ["", "/", "//"])
def test_a_folder_may_end_in_slashes(tmp_path: Path, slashes: str) -> None:
    source = data_set(tmp_path, "words", ["train.csv", "test.csv"])
    config = LabelledConfig(source=f"{source}{slashes}")
    assert labelled_files(config, "train") == [f"{source}/train.csv"]
    assert labelled_files(config, "held_out") == [f"{source}/test.csv"]


def test_a_folder_whose_files_name_no_split_is_read_whole(tmp_path: Path) -> None:
    source = data_set(tmp_path, "words", ["data/a.csv", "data/test-b.csv"])
    assert labelled_paths(source, "train") == ["a.csv", "test-b.csv"]
    assert labelled_paths(source, "held_out") == ["a.csv", "test-b.csv"]
    assert labelled_paths(source, "held_out", split="test") == ["test-b.csv"]
    with pytest.raises(CorpusError, match="wanted a split train in Parquet, JSON, CSV or TSV, i"):
        labelled_paths(source, "train", split="train")


def test_files_of_a_format_have_any_ending(tmp_path: Path) -> None:
    names = ["data/train.conll", "data/test.conll"]
    source = data_set(tmp_path, card("license: mit"), names)
    assert labelled_paths(source, "train", written_as="conll") == ["train.conll"]
    with pytest.raises(CorpusError, match=r"wanted a split train in Parquet, JSON, CSV or TSV"):
        labelled_paths(source, "train")


def test_a_folder_a_file_and_a_glob_without_a_card_are_no_data_set(tmp_path: Path) -> None:
    source = data_set(tmp_path / "whole", card("license: mit"), ["train.txt", "test.txt"])
    (tmp_path / "plain").mkdir()
    sources = [f"{source}/test.txt", f"{source}/*.txt", f"{tmp_path}/plain", "http://127.0.0.1:1/a"]
    assert [data_files(each) for each in [*sources, "docstrings"]] == [None] * 5
    [file] = list_corpus(CorpusConfig(source=f"{source}/test.txt")).files
    assert file.path == f"{source}/test.txt"


NAMES_OF_CLASSES = {str(n): name for n, name in enumerate(["neg", "pos", *"cdefghijk"])}
NAMED = f"{{class_label: {{names: {json.dumps(NAMES_OF_CLASSES, sort_keys=True)}}}}}"


@pytest.mark.parametrize(
    ("info", "label"),
    [
        (("dataset_info:", "  features:", "  - {name: text, dtype: string}",
          f"  - {{name: label, dtype: {NAMED}}}"), "pos"),
        (("dataset_info:", "- config_name: one", "  features:", "  - name: label",
          "    dtype: {class_label: {names: [neg, pos]}}"), "pos"),
        (("dataset_info:", f"- features: [{{name: label, dtype: {NAMED}}}]",
          "- features: [{name: label, dtype: {class_label: {names: [a, b]}}}]"), "1"),
        (("dataset_info: {features: [{name: label, dtype: int64}]}",), "1"),
        (("dataset_info: {features: [label]}",), "1"),
        (("dataset_info: all",), "1"),
        (("license: mit",), "1"),
    ],
    ids=["one config", "of a list", "two that differ", "numbers", "no feature", "no info", "none"],
)  # fmt: skip
@pytest.mark.parametrize("cell", ["1", 1, "pos"])
def test_classes_have_the_names_from_the_card(
    tmp_path: Path, info: tuple[str, ...], label: str, cell: str | int
) -> None:
    source = data_set(tmp_path, card(*info), ["train.csv"])
    (tmp_path / "train.csv").write_text("text,label\nx,1\n")
    if cell != "1":
        (tmp_path / "train.csv").unlink()
        (tmp_path / "train.jsonl").write_text(json.dumps({"text": "x", "label": cell}))
    [row] = labelled_rows(LabelledConfig(source=source), "train", (TextInput, OneLabel)).rows
    assert row["label"] == ("pos" if cell == "pos" else label)


def test_the_names_of_classes_are_part_of_the_digest(tmp_path: Path) -> None:
    digests = []
    for folder, names in (("one", "neg, pos"), ("other", "pos, neg"), ("again", "neg, pos")):
        feature = f"{{name: label, dtype: {{class_label: {{names: [{names}]}}}}}}"
        text = card(f"dataset_info: {{features: [{feature}]}}")
        source = data_set(tmp_path / folder, text, ["train.csv"])
        digests.append(labelled_input("train", LabelledConfig(source=source), "train").digest)
    assert digests[0] == digests[2] != digests[1]


def test_a_column_that_is_empty_in_one_of_several_files_is_empty_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,text_pair,label\nx,,1\n")
    (tmp_path / "b.csv").write_text("text,text_pair,label\ny,z,0\nw,,1\n")
    config = LabelledConfig(source=f"{tmp_path}/*.csv")
    rows = labelled_rows(config, "train", (TextInput, OneLabel)).rows
    assert [row["text_pair"] for row in rows] == ["", "z", ""]
    (tmp_path / "b.csv").write_text("text,text_pair,label\ny,,0\n")
    rows = labelled_rows(config, "train", (TextInput, OneLabel)).rows
    assert [row.keys() for row in rows] == [{"text", "label"}] * 2


@pytest.mark.parametrize("kind", ["sequence", "list"])
def test_tags_have_the_names_from_the_card(tmp_path: Path, kind: str) -> None:
    info = ("dataset_info:", f"  features: [{{name: tags, {kind}: {NAMED}}}]")
    source = data_set(tmp_path, card(*info), ["train.jsonl"])
    (tmp_path / "train.jsonl").write_text('{"tokens": ["x", "y", "z"], "tags": [1, 0, 11]}')
    shapes = TokenClassification.shapes()
    with pytest.raises(CorpusError, match="row 1: wanted a list of texts in the column 'tags', go"):
        labelled_rows(LabelledConfig(source=source), "train", shapes)  # there is no class 11
    (tmp_path / "train.jsonl").write_text('{"tokens": ["x", "y", "z"], "tags": [1, 0, 10]}')
    [row] = labelled_rows(LabelledConfig(source=source), "train", shapes).rows
    assert row["tags"] == ["pos", "neg", "k"]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("license: cc-by-sa-4.0", "cc-by-sa-4.0"),
        ("license: [cc-by-sa-3.0, gfdl]", "cc-by-sa-3.0, gfdl"),
        ("license: 1.0", "1.0"),
        ("license:", None),
        ("language: en", None),
    ],
)
def test_the_card_names_the_licence(tmp_path: Path, line: str, wanted: str | None) -> None:
    assert license_of(data_set(tmp_path, card(line), [])) == wanted


def test_the_files_read_are_those_the_card_names(tmp_path: Path) -> None:
    lines = ("configs:", "- config_name: a", "  data_files: 'deep/*.txt'")
    source = data_set(tmp_path, card(*lines).replace("\n", "\r\n"), ["deep/b.txt", "deep/a.txt"])
    blocks = plan_blocks(list_corpus(CorpusConfig(source=source)), 1000)
    texts = [document.text for block in blocks for document in read_block(block)]
    assert texts == ["<page>deep/a.txt</page>", "<page>deep/b.txt</page>"]


def test_the_hub_is_asked_and_an_error_names_the_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    source = "hf://datasets/nobody/nothing"
    with pytest.raises(RaybertError, match=rf"^{source}/README.md: could not be read \("):
        list_corpus(CorpusConfig(source=source))
