"""The Hugging Face hub on loopback: models with commits, access, downloads in ranges and uploads.

As far as `huggingface_hub` asks for them; the requests that came are in `Hub.requests`.
"""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from huggingface_hub import constants

from tests.web_server import WebServer

OWNER, STRANGER = "hf_owner", "hf_stranger"
"""Tokens: of the user who may read and write everything, and of one who may read what is public."""
_ID = "{id:[^/]+(?:/[^/]+)?}"
_LARGE = re.compile(r"\.(safetensors|bin|onnx|npy|h5)$")


@dataclass
class Repository:
    """A model: the files of its commits."""

    private: bool = False
    gated: bool = False
    library: str | None = "transformers"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], branch: str = "main", message: str = "") -> str:
        """Make `files` all that there is on a branch; returns the commit."""
        named = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items())
        text = json.dumps([named, message, len(self.commits)])
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits[commit], self.branches[branch] = dict(files), commit
        self.messages[commit] = message
        return commit

    def at(self, revision: str) -> str | None:
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits.get(self.branches.get(branch, ""), {})


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder, for `Repository.commit`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def object_id(name: str, data: bytes) -> str:
    """What identifies a file's content: sha256 where it is large, else git's."""
    if _LARGE.search(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub(WebServer):
    """The hub; a context manager that starts and stops it."""

    def __init__(self) -> None:
        self.models: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.sent_bytes: dict[str, int] = {}
        """How much of every file went out."""
        self.stall_after: int | None = None
        """Bytes of a file after which nothing more is sent; None sends files whole."""
        self.break_off_after: int | None = None
        """Bytes of a file after which its connection ends, once."""
        self.fail_commits = self.fail_large_files = False
        self._large: dict[str, bytes] = {}
        app = web.Application(middlewares=[self._noting], client_max_size=1 << 28)
        app.router.add_get(f"/api/models/{_ID}", self._info)
        app.router.add_get(f"/api/models/{_ID}/revision/{{revision}}", self._info)
        app.router.add_get(f"/api/models/{_ID}/tree/{{revision}}", self._tree)
        app.router.add_get(f"/{_ID}/resolve/{{revision}}/{{path:.+}}", self._file)
        app.router.add_post("/api/repos/create", self._create)
        app.router.add_post("/api/validate-yaml", self._validate)
        app.router.add_post(f"/api/models/{_ID}/preupload/{{revision}}", self._preupload)
        app.router.add_post(f"/{_ID}.git/info/lfs/objects/batch", self._batch)
        app.router.add_put("/large/{oid}", self._put)
        app.router.add_post(f"/api/models/{_ID}/commit/{{revision}}", self._commit)
        super().__init__(app)

    def fetched(self) -> list[str]:
        """The names of the files whose content was asked for, sorted."""
        gets = (request for request in self.requests if request.startswith("GET "))
        paths = (request.partition("/resolve/")[2] for request in gets)
        return sorted({path.partition("/")[2] for path in paths if path})

    @web.middleware
    async def _noting(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        try:
            return await handler(request)
        except RefusedError as refused:
            headers = {"X-Error-Message": refused.message}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            return web.json_response(
                {"error": refused.message}, status=refused.status, headers=headers
            )

    def _token(self, request: web.Request) -> str | None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ") or None
        if token not in (None, OWNER, STRANGER):
            raise RefusedError(401, "", "Invalid credentials in Authorization header")
        return token

    def _repository(self, request: web.Request, *, contents: bool = False) -> Repository:
        """The model asked for; whoever may not see it is told that there is none."""
        token, repository = self._token(request), self.models.get(request.match_info["id"])
        if repository is None or (repository.private and token != OWNER):
            status = 401 if token is None else 404
            raise RefusedError(status, "RepoNotFound", "Repository not found")
        if contents and repository.gated and token != OWNER:
            status = 401 if token is None else 403
            raise RefusedError(status, "GatedRepo", "Access to this model is restricted")
        return repository

    def _at(self, repository: Repository, request: web.Request) -> str:
        revision = request.match_info.get("revision", "main")
        commit = repository.at(revision)
        if commit is None:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    async def _info(self, request: web.Request) -> web.Response:
        repository = self._repository(request)
        commit = self._at(repository, request)
        return web.json_response(
            {
                "id": request.match_info["id"],
                "sha": commit,
                "private": repository.private,
                "gated": "auto" if repository.gated else False,
                "library_name": repository.library,
                "siblings": [{"rfilename": name} for name in repository.commits[commit]],
                "tags": [],
            }
        )

    async def _tree(self, request: web.Request) -> web.Response:
        repository = self._repository(request)
        entries = []
        for name, data in repository.commits[self._at(repository, request)].items():
            oid = object_id(name, data)
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": oid}
            if _LARGE.search(name):
                entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 134}
            entries.append(entry)
        return web.json_response(entries)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        repository = self._repository(request, contents=True)
        commit, name = self._at(repository, request), request.match_info["path"]
        data = repository.commits[commit].get(name)
        if data is None:
            raise RefusedError(404, "EntryNotFound", "Entry not found")
        start = int(re.sub(r"bytes=(\d+)-", r"\1", request.headers.get("Range", "bytes=0-")))
        headers = {
            "ETag": f'"{object_id(name, data)}"',
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(len(data)),
            "Content-Length": str(len(data) - start),
        }
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        response = web.StreamResponse(status=206 if start else 200, headers=headers)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        end = len(data) if self.stall_after is None else start + self.stall_after
        broken = self.break_off_after is not None and start + self.break_off_after < end
        if broken:
            end, self.break_off_after = start + (self.break_off_after or 0), None
        self.sent_bytes[name] = self.sent_bytes.get(name, 0) + len(data[start:end])
        with suppress(ConnectionError):  # whoever asked was killed
            await response.write(data[start:end])
        while not broken and end < len(data) and request.transport is not None:
            await asyncio.sleep(0.05)
        if broken and request.transport is not None:
            request.transport.close()
        return response

    def _writer(self, request: web.Request) -> None:
        if self._token(request) != OWNER:
            raise RefusedError(403, "", "You don't have the rights to create a model here")

    async def _create(self, request: web.Request) -> web.Response:
        self._writer(request)
        body = await request.json()
        name = f"{body['organization']}/{body['name']}"
        if name in self.models:
            error = {"error": "You already created this model", "url": f"{self.url}/{name}"}
            return web.json_response(error, status=409)
        self.models[name] = Repository(private=body.get("visibility") == "private")
        self.models[name].commit({".gitattributes": b"*.safetensors filter=lfs"})
        return web.json_response({"url": f"{self.url}/{name}"})

    async def _validate(self, request: web.Request) -> web.Response:
        content = (await request.json())["content"]
        valid = re.match(r"---\n.+?\n---\n", content, re.DOTALL)
        errors = [] if valid else [{"message": "no metadata"}]
        status = 400 if errors else 200
        return web.json_response({"warnings": [], "errors": errors}, status=status)

    async def _preupload(self, request: web.Request) -> web.Response:
        self._writer(request)
        present = self._repository(request).files()
        files = [
            {
                "path": name,
                "uploadMode": "lfs" if _LARGE.search(name) else "regular",
                "shouldIgnore": False,
                "oid": object_id(name, present[name]) if name in present else None,
            }
            for file in (await request.json())["files"]
            for name in [file["path"]]
        ]
        return web.json_response({"files": files})

    async def _batch(self, request: web.Request) -> web.Response:
        self._writer(request)
        objects = []
        for file in (await request.json())["objects"]:
            entry = {"oid": file["oid"], "size": file["size"]}
            if entry["oid"] not in self._large:
                entry["actions"] = {"upload": {"href": f"{self.url}/large/{entry['oid']}"}}
            objects.append(entry)
        return web.json_response({"transfer": "basic", "objects": objects})

    async def _put(self, request: web.Request) -> web.Response:
        data = await request.read()
        if self.fail_large_files:
            raise RefusedError(403, "", "The link has expired")
        assert hashlib.sha256(data).hexdigest() == request.match_info["oid"]
        self._large[request.match_info["oid"]] = data
        return web.Response()

    async def _commit(self, request: web.Request) -> web.Response:
        self._writer(request)
        repository, message = self._repository(request), ""
        if self.fail_commits:
            raise RefusedError(400, "", "The commit failed")
        files = dict(repository.files())
        for line in (await request.read()).splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self._large[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        commit = repository.commit(files, message=message)
        url = f"{self.url}/{request.match_info['id']}/commit/{commit}"
        return web.json_response({"commitUrl": url, "commitOid": commit})


@contextmanager
def running_hub(home: Path) -> Iterator[Hub]:
    """A hub that this process's client asks, with its cache below `home` and no token."""
    with Hub() as hub, pytest.MonkeyPatch.context() as patch:
        # What variables set, which the client reads when it is imported.
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.delenv("HF_TOKEN", raising=False)
        patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        yield hub


class RefusedError(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
