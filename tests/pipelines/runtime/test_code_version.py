"""The version of the code: a commit if git names it in time."""

from pathlib import Path

import pytest

from pipelines.runtime import code_version


def test_a_slow_git_leaves_the_commit_out_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(code_version, "GIT_TIMEOUT_S", 0.1)
    assert "+" not in code_version.code_version()
