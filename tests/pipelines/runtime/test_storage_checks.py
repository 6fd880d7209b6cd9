"""A folder or bucket is tried by doing in it what stages do, and nothing is left there."""

from pathlib import Path

import pytest

from bert_core import files
from bert_core.errors import RaybertError
from pipelines.runtime.storage_checks import check_storage, marker


def test_a_folder_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    told = "; ".join(check_storage(f"{tmp_path}/out"))
    assert "a file is written; read and listed; written by conditional put" in told
    assert "17 MB in parts: " in told
    assert told.endswith("; deleted")
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_passes_and_is_left_as_it_was(object_store: str) -> None:
    assert len(list(check_storage(f"{object_store}/out"))) == 5
    assert files.list_names(f"{object_store}/out") == []


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(RaybertError, match=f"{tmp_path}/out: write: .*: .*give another"):
        next(check_storage(f"{tmp_path}/out"))


@pytest.mark.parametrize("missing", ["no-such-bucket-1", "no-such-bucket-1/deep/out"])
def test_a_bucket_that_is_missing_is_named(object_store: str, missing: str) -> None:
    with pytest.raises(RaybertError, match=rf"s3://{missing}: write: .*there is no bucket"):
        next(check_storage(f"s3://{missing}"))


def test_a_read_only_bucket_is_reported(guarded: str) -> None:
    with pytest.raises(RaybertError, match=rf"{guarded}/out: write: .*may not write to it: grant"):
        next(check_storage(f"{guarded}/out"))


def test_wrong_credentials_are_reported(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONGWRONGWRONG1")
    with (
        pytest.raises(RaybertError, match=rf"{guarded}/out: write: .*credentials are wrong or"),
        marker(f"{guarded}/out"),
    ):
        pytest.fail("it was written")
