"""Models of the hub by their ids, through the hub's own client and a hub on loopback."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, hf_hub_download
from safetensors.torch import load_file, save_file

from bert_core.bundle.format import bundle_digest, load_bundle
from bert_core.errors import ConfigError, FormatError, ResourceError
from bert_core.tasks.feature_extraction import FeatureExtraction, FeatureExtractionOptions
from tests import tiny
from tests.hub import OWNER, STRANGER, Hub, Repository, contents
from tests.waiting import wait_until
from tracking.models.hub import HubModel, on_this_machine, parse
from tracking.models.references import Reference

NAME = "somebody/encoder"
OTHER_LIBRARIES = {
    "tf_model.h5": b"tensorflow",
    "flax_model.msgpack": b"flax",
    "rust_model.ot": b"rust",
    "onnx/model.onnx": b"onnx",
    "pytorch_model.bin": b"torch",
    "README.md": b"# A model",
    ".gitattributes": b"",
}


def bundle_at(reference: str) -> Path:
    return Reference.parse(reference).fetch()


def pinned(reference: str) -> str:
    return str(Reference.parse(reference).pinned())


def foreign(bundle: Path) -> dict[str, bytes]:
    """A bundle's files as transformers would have written them."""
    return {name: data for name, data in contents(bundle).items() if name != "raybert.json"}


@pytest.fixture
def model(hub: Hub, bundles: list[Path]) -> Repository:
    """A model of transformers at `NAME`, with copies for other libraries."""
    hub.models[NAME] = Repository()
    hub.models[NAME].commit(foreign(bundles[0]) | OTHER_LIBRARIES)
    return hub.models[NAME]


@pytest.mark.parametrize(
    ("reference", "name", "revision"),
    [
        ("google-bert/bert-base-uncased", "google-bert/bert-base-uncased", None),
        ("bert-base-uncased", "bert-base-uncased", None),
        ("hf://BAAI/bge-m3@main", "BAAI/bge-m3", "main"),
        ("owner/name@refs/pr/4", "owner/name", "refs/pr/4"),
        ("google/bert_uncased_L-2_H-128_A-2@v1.0", "google/bert_uncased_L-2_H-128_A-2", "v1.0"),
    ],
)
def test_a_reference_of_the_hub_has_an_id_and_maybe_a_revision(
    reference: str, name: str, revision: str | None
) -> None:
    assert parse(reference) == HubModel(name, revision)


@pytest.mark.parametrize(
    "reference",
    [
        "", "runs/books/sst2", "./bert", "../bert", "~/bert", "/bert", "bert/", "a//b", "owner/.b",
        "owner/name@", "owner/a--b", "owner/a..b", "owner/name.git", "owner/name-", "a b/c",
        "models:/name@champion", "s3://bucket/bundle", "hf://datasets/owner/name",
    ],
)  # fmt: skip
def test_invalid_hub_ids_are_not_references_to_the_hub(reference: str) -> None:
    assert parse(reference) is None


def test_an_id_is_the_bundle_that_a_clone_would_be_and_only_its_files_are_fetched(
    hub: Hub, model: Repository, bundles: list[Path], tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    for name, data in model.files().items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes(data)
    folder = bundle_at(NAME)
    assert bundle_digest(folder) == bundle_digest(clone)
    assert load_bundle(folder).task is not None
    assert hub.fetched() == sorted(foreign(bundles[0]))
    hub.requests.clear()
    assert bundle_at(NAME) == folder
    assert hub.fetched() == []


@pytest.mark.parametrize("reference", ["hf://somebody/encoder", "somebody/encoder@main", "bare"])
def test_every_way_to_write_an_id_finds_the_model(
    hub: Hub, model: Repository, reference: str
) -> None:
    hub.models["bare"] = model
    assert (bundle_at(reference) / "model.safetensors").is_file()


def test_a_folder_that_exists_wins_over_a_model_of_the_hub(
    model: Repository, bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "somebody").mkdir()
    (tmp_path / NAME).symlink_to(bundles[1])
    assert bundle_digest(bundle_at(NAME)) == bundle_digest(bundles[1])
    assert pinned(NAME) == NAME
    assert (bundle_at(f"hf://{NAME}") / "tokenizer.json").is_file()


def test_a_pinned_reference_stays_what_it_is_when_the_branch_moves(
    model: Repository, bundles: list[Path]
) -> None:
    first = model.branches["main"]
    reference = pinned(NAME)
    assert reference == f"{NAME}@{first}"
    before = bundle_digest(bundle_at(NAME))
    second = model.commit(foreign(bundles[1]))
    assert pinned(NAME) == f"{NAME}@{second}"
    assert (
        bundle_digest(bundle_at(reference))
        == before
        == bundle_digest(bundle_at(f"hf://{reference}"))
    )
    assert bundle_digest(bundle_at(NAME)) != before


def test_a_branch_and_a_tag_are_revisions(model: Repository, bundles: list[Path]) -> None:
    commit = model.commit(foreign(bundles[1]), branch="refs/pr/4")
    assert pinned(f"{NAME}@refs/pr/4") == f"{NAME}@{commit}"
    assert bundle_digest(bundle_at(f"{NAME}@refs/pr/4")) != bundle_digest(bundle_at(NAME))


def in_a_process(hub: Hub, stderr: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    """Resolve the model in a fresh process, whose variables set what the fixture sets here."""
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": constants.HF_HUB_CACHE,
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "",
    }
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from tracking.models.references import Reference; Reference.parse({NAME!r}).fetch()",
        ],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


@pytest.mark.guard
def test_a_download_whose_connection_breaks_resumes_where_it_stopped(
    hub: Hub, model: Repository, bundles: list[Path], tmp_path: Path
) -> None:
    name, large = "model.safetensors", tmp_path / "large.safetensors"
    # The client keeps what it has in parts of 10 MB; heads that are unknown are ignored.
    padding = {"unknown_head.weight": torch.zeros(8_000_000)}
    save_file(load_file(bundles[0] / name) | padding, large, metadata={"format": "pt"})
    model.commit(foreign(bundles[0]) | {name: large.read_bytes()})
    hub.break_off_after = 25_000_000
    assert (bundle_at(NAME) / name).read_bytes() == large.read_bytes()
    assert hub.sent_bytes[name] < large.stat().st_size + 25_000_000 - 10_000_000


@pytest.mark.guard
def test_after_a_kill_only_what_is_missing_is_fetched(
    hub: Hub, model: Repository, bundles: list[Path]
) -> None:
    hub.stall_after = 10_000  # only the weights are larger
    process = in_a_process(hub)
    try:
        names = sorted(foreign(bundles[0]))
        wait = partial(wait_until, timeout_s=60, every_s=0.05)
        wait("all files are asked for", lambda: hub.fetched() == names)
        wait("all but one are there", lambda: len(cached_files()) == len(names) - 1)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    hub.stall_after = None
    hub.requests.clear()
    assert load_bundle(bundle_at(NAME)).task is not None
    assert hub.fetched() == ["model.safetensors"]


def cached_files() -> list[Path]:
    return [path for path in Path(constants.HF_HUB_CACHE).rglob("snapshots/*/*") if path.is_file()]


def test_offline_the_cached_commit_is_used(
    hub: Hub, model: Repository, bundles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = bundle_at(NAME), pinned(NAME)
    model.commit(foreign(bundles[1]))
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (bundle_at(NAME), pinned(NAME)) == (folder, reference)
    assert hub.requests == []
    with pytest.raises(ResourceError, match=r"HF_HUB_OFFLINE is set, with no complete copy of"):
        bundle_at("somebody/else")


def test_offline_what_another_program_fetched_is_used_if_it_is_complete(
    model: Repository, bundles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in foreign(bundles[0]):
        if name != "model.safetensors":
            hf_hub_download(NAME, name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ResourceError, match=r"HF_HUB_OFFLINE is set, with no complete copy of"):
        bundle_at(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hf_hub_download(NAME, "model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_bundle(bundle_at(NAME)).task is not None


def test_a_hub_that_does_not_answer_is_reported_unless_the_cache_has_the_model(
    hub: Hub, model: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bundle_at(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert bundle_at(NAME) == folder
    with pytest.raises(
        ResourceError,
        match=r"somebody/else: there is no folder somebody/else, and http://127.0.0.1:9 does not",
    ):
        bundle_at("somebody/else")


def test_missing_models_and_revisions_are_distinguished_from_missing_folders(
    hub: Hub, model: Repository
) -> None:
    with pytest.raises(
        ConfigError, match=r"^runs/bert: there is no folder runs/bert, and the hub has no model run"
    ):
        bundle_at("runs/bert")
    with pytest.raises(ConfigError, match=r"^no/one: the hub has no model no/one: .*set HF_TOKEN"):
        bundle_at("hf://no/one")
    with pytest.raises(
        ConfigError, match=r"encoder@v9: wanted a branch, tag or commit of somebody/encoder, the"
    ):
        bundle_at(f"{NAME}@v9")
    hub.requests.clear()
    for path in ("runs/books/sst2", "./bert", "~/bert"):
        with pytest.raises(ConfigError, match="wanted the folder of a bundle, got nothing there"):
            bundle_at(path)
    assert hub.requests == []


def test_gated_and_private_models_say_what_to_do_and_open_to_a_token(
    hub: Hub, model: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.gated = True
    accept = rf"got a gated one: accept its terms at {hub.url}/{NAME}, and set HF_TOKEN, or run"
    with pytest.raises(ConfigError, match=accept):
        bundle_at(NAME)
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    with pytest.raises(ConfigError, match="and set HF_TOKEN to a token that may"):
        bundle_at(NAME)
    model.gated, model.private = False, True
    with pytest.raises(ConfigError, match="the hub has no model somebody/encoder that this token"):
        bundle_at(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match=r"the hub refused the token \(401\)"):
        bundle_at(NAME)
    monkeypatch.setenv("HF_TOKEN", OWNER)
    assert load_bundle(bundle_at(NAME)).task is not None


@pytest.mark.parametrize(
    ("files", "library", "message"),
    [
        (
            {"config.json": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}},
            "transformers",
            r"families bert, .*got model_type gpt2 \(GPT2LMHeadModel\); the hub says it is for tra",
        ),
        (
            {"config.json": {"model_type": "t5"}, "tf_model.h5": {}},
            "transformers",
            "got model_type t5",
        ),
        ({"model_index.json": {}}, "diffusers", "got a pipeline of diffusers; .* for diffusers"),
        ({"adapter_config.json": {}}, "peft", "got an adapter, without the model"),
        ({"config.json": {"architecture": "resnet50"}}, "timm", "without model_type, of another"),
        ({"model.gguf": {}}, None, "got a repository without config.json$"),
    ],
)
def test_a_model_that_is_no_encoder_is_refused_before_its_weights_are_fetched(
    hub: Hub, files: dict[str, dict[str, object]], library: str | None, message: str
) -> None:
    hub.models[NAME] = Repository(library=library)
    weights = {"model.safetensors": b"weights", "pytorch_model.bin": b"weights"}
    hub.models[NAME].commit({name: json.dumps(it).encode() for name, it in files.items()} | weights)
    with pytest.raises(FormatError, match=message):
        bundle_at(NAME)
    assert set(hub.fetched()) <= {"config.json"}


def test_a_bundle_of_ours_is_fetched_and_verified_by_its_record(
    hub: Hub, bundles: list[Path]
) -> None:
    hub.models[NAME] = Repository()
    hub.models[NAME].commit(contents(bundles[0]) | OTHER_LIBRARIES)
    assert bundle_digest(bundle_at(NAME)) == bundle_digest(bundles[0])
    assert hub.fetched() == sorted(contents(bundles[0]))
    hub.models[NAME].commit(contents(bundles[0]) | {"vocab.txt": b"changed"})
    with pytest.raises(FormatError, match=r"vocab.txt: wanted sha256"):
        bundle_at(NAME)


def test_a_model_of_sentence_transformers_comes_with_its_subfolder(
    hub: Hub, tmp_path: Path
) -> None:
    task = FeatureExtraction(options=FeatureExtraction.options(pooling="cls"))
    bundle = tiny.bundle(tmp_path / "bundle", tiny.tokenizer(), task=task)
    hub.models[NAME] = Repository(library="sentence-transformers")
    hub.models[NAME].commit(foreign(bundle) | OTHER_LIBRARIES)
    folder = bundle_at(NAME)
    assert "1_Pooling/config.json" in hub.fetched()
    found = load_bundle(folder).task
    assert found is not None
    assert isinstance(found.chosen, FeatureExtractionOptions)
    assert found.chosen.pooling == "cls"


def test_only_a_tokenizers_own_files_are_fetched_whatever_the_model(
    hub: Hub, model: Repository, bundles: list[Path]
) -> None:
    model.commit(foreign(bundles[0]) | {"config.json": b'{"model_type": "gpt2"}'})
    digest = Reference.parse(str(bundles[0])).tokenizer().digest
    assert Reference.parse(NAME).tokenizer().digest == digest
    assert hub.fetched() == ["tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    with pytest.raises(FormatError, match="got model_type gpt2"):
        bundle_at(NAME)


def test_a_machine_without_the_files_fetches_the_same_commit(
    hub: Hub, model: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bundle_at(NAME)
    assert on_this_machine(folder) == folder
    model.commit({"config.json": b"{}"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    folder.parents[2].rename(tmp_path / "gone")
    there = on_this_machine(folder)
    assert there != folder
    assert there.name == folder.name
    assert load_bundle(there).task is not None
    assert on_this_machine(tmp_path / "nothing") == tmp_path / "nothing"


@pytest.mark.drill
def test_a_download_shows_its_progress_on_a_terminal(hub: Hub, model: Repository) -> None:
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    process = in_a_process(hub, stderr=terminal)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # how a terminal's end reads on Linux
        while part := os.read(controller, 4096):
            shown += part
    os.close(controller)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"Fetching 6 files" in shown


@pytest.mark.drill
def test_a_download_prints_nothing_in_a_log(hub: Hub, model: Repository) -> None:
    process = in_a_process(hub)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
