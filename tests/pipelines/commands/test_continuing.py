"""`raybert continue`: a model goes on with more words, and says what cannot be added."""

from pathlib import Path
from typing import Any

import pytest

from bert_core.bundle.format import load_bundle
from bert_core.errors import ConfigError
from bert_core.manifest import read_manifest
from pipelines.commands import continuing
from pipelines.commands.continuing import ContinueConfig
from pipelines.corpus.config import CorpusConfig


def config_of(small: Any, model: Path, output: Path, **changes: Any) -> ContinueConfig:
    given: dict[str, Any] = {
        "model": str(model),
        "corpus": CorpusConfig(source=str(small.text)),
        "output": str(output),
        "epochs": 0.02,
        "max_length": 32,
        "held_out_rows": 8,
        "precision": "fp32",
        "num_workers": 0,
        "tracking_uri": f"sqlite:///{output.parent}/mlflow.db",
    }
    return ContinueConfig(**given | changes)


@pytest.mark.drill
def test_a_model_goes_on_with_more_words_and_again_with_others_only_elsewhere(
    prepared: Any, untrained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(prepared, untrained.encoder, tmp_path / "out", add_tokens=("kubernetes",))
    continuing.run(config)
    told = " ".join(capsys.readouterr().out.split())
    assert "has 1 new token, which were" in told
    before, start, after = (
        load_bundle(folder)
        for folder in (
            untrained.encoder,
            tmp_path / "out" / "start",
            tmp_path / "out" / "pretrain" / "bundle",
        )
    )
    assert after.tokenizer.vocabulary == [*before.tokenizer.vocabulary, "kubernetes"]
    assert after.lineage["parent"] == start.digest
    assert after.lineage["parent_lineage"]["parent"] == before.digest
    masking = read_manifest(str(tmp_path / "out" / "shards")).config["masking"]
    assert masking["dynamic"]
    continuing.run(config)  # everything is there
    other = config_of(prepared, untrained.encoder, tmp_path / "out", add_tokens=("postgresql",))
    with pytest.raises(ConfigError, match="start: wanted the model with the tokens in add_tokens"):
        continuing.run(other)


def test_new_tokens_are_checked_before_anything_is_written(
    prepared: Any, untrained: Any, tmp_path: Path
) -> None:
    known = next(word for word in load_bundle(untrained.encoder).tokenizer.vocabulary[99:])
    config = config_of(prepared, untrained.encoder, tmp_path / "out", add_tokens=(known,))
    with pytest.raises(ConfigError, match="add_tokens: wanted"):
        continuing.run(config)
    bucket = config_of(prepared, untrained.encoder, tmp_path / "out", add_tokens=("kubernetes",))
    object.__setattr__(bucket, "output", "s3://bucket/out")
    with pytest.raises(ConfigError, match="output: wanted a folder with add_tokens, got"):
        continuing.run(bucket)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="optimizer: wanted fresh with add_tokens, for whose row"):
        config_of(
            prepared, untrained.encoder, tmp_path / "out", add_tokens=("a",), optimizer="carried"
        )
