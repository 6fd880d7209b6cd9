"""Data sets of the hub through its own client and HTTP, as far as it is asked to read files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bert_core.manifest import read_manifest
from bert_core.tasks.text_classification import TextClassification
from tests.labelled_rows import rows_of, write
from tests.web_server import WebServer
from tests.with_ray import run_with_ray

pytestmark = [pytest.mark.ray, pytest.mark.drill]

NAME = "somebody/rows"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
license: cc0-1.0
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
---
# Rows
"""


class Hub(WebServer):
    """One data set in a folder, by the few routes of the hub's API that reading files takes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.requests = folder, list[str]()
        app = web.Application(middlewares=[self._noting])
        app.router.add_get(f"/api/datasets/{NAME}", self._info)
        app.router.add_get(f"/api/datasets/{NAME}/revision/{{revision}}", self._info)
        app.router.add_get(f"/api/datasets/{NAME}/tree/{{revision}}", self._tree)
        app.router.add_get(f"/api/datasets/{NAME}/tree/{{revision}}/{{path:.*}}", self._tree)
        app.router.add_post(f"/api/datasets/{NAME}/paths-info/{{revision}}", self._paths)
        app.router.add_get(f"/datasets/{NAME}/resolve/{{revision}}/{{path:.*}}", self._file)
        super().__init__(app)

    @web.middleware
    async def _noting(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        return await handler(request)

    def _entry(self, path: Path) -> dict[str, Any]:
        name, size = path.relative_to(self.folder).as_posix(), path.stat().st_size
        kind = "directory" if path.is_dir() else "file"
        return {"type": kind, "path": name, "oid": "0" * 40, "size": 0 if path.is_dir() else size}

    async def _info(self, request: web.Request) -> web.Response:
        siblings = [{"rfilename": self._entry(path)["path"]} for path in self.folder.rglob("*")]
        return web.json_response({"id": NAME, "sha": COMMIT, "siblings": siblings, "tags": []})

    async def _tree(self, request: web.Request) -> web.Response:
        below = self.folder / request.match_info.get("path", "")
        deep = request.query.get("recursive", "").lower() in ("1", "true")
        paths = sorted(below.rglob("*") if deep else below.glob("*"))
        return web.json_response([self._entry(path) for path in paths])

    async def _paths(self, request: web.Request) -> web.Response:
        if request.content_type == "application/json":
            names = (await request.json())["paths"]
        else:
            names = [str(path) for path in (await request.post()).getall("paths")]
        paths = [self.folder / name for name in names]
        return web.json_response([self._entry(path) for path in paths if path.exists()])

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = self.folder / request.match_info["path"]
        if not path.is_file():
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        return web.FileResponse(path, headers={"X-Repo-Commit": COMMIT, "ETag": f'"{path.name}"'})


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "hub"
    [single, *_] = TextClassification.kinds
    write(folder / "data" / "train-00000-of-00001.jsonl", rows_of(single, 32))
    write(folder / "data" / "test-00000-of-00001.jsonl", rows_of(single, 8, start=32))
    (folder / "README.md").write_text(CARD)
    with Hub(folder) as hub:
        yield hub


def test_rows_and_texts_of_the_hub_are_read_by_workers(
    hub: Hub, pretrained: Any, tmp_path: Path
) -> None:
    source, shared = f"hf://datasets/{NAME}", ["--num_workers=1"]
    shared.append(f"--tracking_uri={pretrained.tracking_uri}")
    commands = {
        "finetune": [
            f"--model={pretrained.folder / 'pretrain' / 'bundle'}", f"--train.source={source}",
            f"--held_out.source={source}", "--max_length=48", "--precision=fp32",
        ],
        "evaluate": [f"--model={tmp_path}/finetune/bundle", f"--held_out.source={source}"],
        "predict": [f"--model={tmp_path}/finetune/bundle", f"--source={source}"],
        "vocab": [f"--corpus.source={source}", "--vocab_size=200"],
    }  # fmt: skip
    run_with_ray(
        [
            [word, f"--output={tmp_path / word}", *arguments, *shared]
            for word, arguments in commands.items()
        ],
        tmp_path,
        HF_ENDPOINT=hub.url,
        HF_HOME=str(tmp_path / "home"),
        HF_TOKEN="",
        HF_HUB_DISABLE_XET="1",
        RAY_ADDRESS="local",
    )
    counts = read_manifest(str(tmp_path / "finetune")).counts
    assert (counts["train_rows"], counts["held_out_rows"]) == (32, 8)
    assert read_manifest(str(tmp_path / "evaluate")).counts["rows"] == 8
    # A prediction reads the split that a corpus is read from.
    assert read_manifest(str(tmp_path / "predict")).counts["rows"] == 32
    assert any("/resolve/" in request and "train-" in request for request in hub.requests)
