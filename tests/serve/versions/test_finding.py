"""The models to deploy are found in a process that ends, as they would be in this one."""

from pathlib import Path

import psutil
import pytest

from bert_core.errors import ConfigError, ResourceError
from serve.config import ServeConfig
from serve.versions import finding
from serve.versions.finding import find_in_child
from serve.versions.plan import find


@pytest.mark.guard
def test_models_are_found_as_in_this_process_by_one_that_ends(bundle: Path) -> None:
    config, told = ServeConfig(models=[f"docs={bundle}", f"other={bundle}"]), list[str]()
    before = {each.pid for each in psutil.Process().children()}
    models = find_in_child(config, told.append)
    assert models == find(config)
    assert told == list(models) == ["docs", "other"]
    assert {each.pid for each in psutil.Process().children()} <= before


def test_an_error_about_a_model_is_raised_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in the working directory."""
    (tmp_path / "serve.py").write_text("raise SystemExit('a user has this name too')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="nowhere: wanted") as error:
        find_in_child(ServeConfig(models=["docs=./nowhere"]))
    with pytest.raises(ConfigError) as other:
        find(ServeConfig(models=["docs=./nowhere"]))
    assert str(error.value) == str(other.value)


def test_a_process_that_ends_without_an_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "PROGRAM", "raise SystemExit(3)")
    with pytest.raises(ResourceError, match=r"models: wanted each to be loaded .* ended with 3"):
        find_in_child(ServeConfig(models=["docs=runs/bundle"]))
