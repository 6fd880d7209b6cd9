"""API keys: the file, the command, and a live server that asks for them."""

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient

from bert_core.errors import ConfigError, FormatError
from pipelines import cli
from serve.config import ServeConfig
from serve.http.app import LocalModel, create_front_app, create_model_app
from serve.request import auth
from serve.request.auth import Key, Keys
from serve.request.errors import (
    ForbiddenError,
    NotReadyError,
    OverloadedError,
    UnauthorizedError,
)
from serve.versions.slot import Slot
from tests.serve import live


def day(days: int) -> str:
    return (datetime.now(UTC) + timedelta(days=days)).date().isoformat()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def raybert(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "keys", *arguments])
    out = capsys.readouterr()
    assert ended.value.code == 0, out.err
    return out.out


def test_a_key_is_made_shown_once_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    made = raybert(
        capsys, "create", "alice", f"--keys={file}", "--models=docs, names", f"--expires={day(30)}",
        "--requests_per_minute=60",
    )  # fmt: skip
    key = made.splitlines()[-1]
    assert key not in file.read_text()
    assert hashlib.sha256(key.split("-", 2)[2].encode()).hexdigest() in file.read_text()
    raybert(capsys, "create", "bob", f"--keys={file}")
    listed = raybert(capsys, "list", f"--keys={file}").splitlines()
    assert listed == [
        f"alice: docs, names; 60 requests per minute; until {day(30)}",
        "bob: all models; no end",
    ]
    keys = Keys(auth.read_keys(str(file)))
    for model in ("docs", "names"):
        assert keys.admit(bearer(key), model).key.name == "alice"
    raybert(capsys, "revoke", "alice", f"--keys={file}")
    with pytest.raises(UnauthorizedError, match="not known here"):
        Keys(auth.read_keys(str(file))).admit(bearer(key), "docs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create"], "name: wanted a name to create"),
        (["list", "bob"], "name: wanted no name to list keys, got bob"),
        (["create", "a-b"], "name: wanted letters, digits, dots and underscores"),
        (["create", "alice"], "there is a key of 'alice' already"),
        (["revoke", "bob"], "there is no key of 'bob', there are: alice"),
        (["create", "bob", "--expires=tomorrow"], "expires: wanted a date such as 2027-01-31"),
        (["create", "bob", "--tokens_per_minute=0"], "tokens_per_minute: wanted at least 1"),
        (["create", "bob", f"--expires={day(-1)}"], "expires: wanted today or a later day, in UTC"),
        (["create", "bob", "--models="], "models: wanted names of models, comma-separated"),
        (["create", "bob", "--models=docs,,names"], "models: wanted names of models"),
        (["create", "bob", '--models=["docs"]'], "models: wanted names of models"),
        (["make", "bob"], "what"),
    ],
)
def test_impossible_key_operations_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    file = tmp_path / "keys.json"
    raybert(capsys, "create", "alice", f"--keys={file}")
    before = file.read_bytes()
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "keys", *arguments, f"--keys={file}"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "keys": []}',
        '{"version": 1, "keys": [{"a": 1}]}',
        '{"version": 1, "keys": [{"name": "a", "sha256": "0", "models": "docs-internal"}]}',
        '{"version": 1, "keys": [{"name": "a", "sha256": "0", "requests_per_minute": "many"}]}',
        '{"version": 1, "keys": [{"name": "a", "sha256": "0", "request_per_minute": 5}]}',
        '{"version": 1, "keys": [{"name": "a", "sha256": "0", "expires": "never"}]}',
    ],
)
def test_a_file_that_holds_no_keys_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(FormatError, match="wanted"):
        auth.read_keys(str(file))
    with pytest.raises(FormatError, match=r"got something else \(a folder\)"):
        auth.read_keys(str(tmp_path))
    with pytest.raises(FormatError, match=r"got something else \(a folder\)"):
        auth.change_keys(str(tmp_path), lambda keys: keys)
    with pytest.raises(ConfigError, match="raybert serve keys create NAME"):
        auth.read_keys(str(tmp_path / "none.json"))


def test_keys_created_and_revoked_concurrently_are_all_stored(
    tmp_path: Path,
) -> None:
    file = str(tmp_path / "keys.json")
    made = [auth.create(f"caller{number}")[1] for number in range(8)]
    auth.change_keys(file, lambda keys: made[:4])

    def change(number: int) -> None:
        if number < 4:
            auth.change_keys(file, lambda keys: auth.without(keys, f"caller{number}"))
        else:
            auth.change_keys(file, lambda keys: auth.added(keys, made[number]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(change, range(8)))
    assert {key.name for key in auth.read_keys(file)} == {f"caller{n}" for n in range(4, 8)}


def test_refused_keys_are_explained() -> None:
    key, stored = auth.create("alice", models=["docs"], expires=day(1))
    old, expired = auth.create("old", expires=day(-1))
    keys = Keys([stored, expired])
    for headers in ({}, {"authorization": "Basic x"}, {"authorization": "Bearer "}):
        with pytest.raises(UnauthorizedError, match="wanted an API key, got none"):
            keys.admit(headers, "docs")
    for wrong in ("x", "rb-alice-", key[:-1], f"{key}x", key.replace("alice", "bob"), "ключ"):
        with pytest.raises(UnauthorizedError, match="is not known here"):
            keys.admit(bearer(wrong), "docs")
    with pytest.raises(UnauthorizedError, match="expired on"):
        keys.admit(bearer(old), "docs")
    with pytest.raises(ForbiddenError, match=r"may use \(docs\), got other"):
        keys.admit(bearer(key), "other")
    for headers in (bearer(key), {"x-api-key": key}, {"api-key": key}):
        assert keys.admit(headers, "docs").key.name == "alice"
    today, last_day = auth.create("today", expires=day(0))
    assert Keys([last_day]).admit(bearer(today), "docs").key.name == "today"


def test_requests_and_tokens_are_limited_per_key() -> None:
    one, first = auth.create("one", requests_per_minute=3)
    two, second = auth.create("two", tokens_per_minute=600)
    keys = Keys([first, second])
    for _ in range(3):
        keys.admit(bearer(one), "docs")
    with pytest.raises(OverloadedError, match="at most 3 requests per minute") as refused:
        keys.admit(bearer(one), "docs")
    assert 1 <= (refused.value.retry_after_s or 0) <= 20
    keys.admit(bearer(two), "docs").charge(610)
    with pytest.raises(OverloadedError, match="at most 600 tokens per minute") as spent:
        keys.admit(bearer(two), "docs")
    assert 1 <= (spent.value.retry_after_s or 0) <= 2
    keys.admit(bearer(one), None)  # asking about the server is not counted


def test_a_replica_takes_what_changes_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "REREAD_S", 0.01)
    file = str(tmp_path / "keys.json")
    one, first = auth.create("one")
    two, second = auth.create("two")
    auth.change_keys(file, lambda _: [first])

    async def scenario() -> None:
        keys = Keys([first], file)
        auth.change_keys(file, lambda _: [second])
        deadline_s = time.monotonic() + 10
        while True:
            await asyncio.sleep(0.02)
            assert time.monotonic() < deadline_s
            try:
                keys.admit(bearer(two), "docs")
                break
            except UnauthorizedError:
                continue
        with pytest.raises(UnauthorizedError):
            keys.admit(bearer(one), "docs")

    asyncio.run(scenario())


def test_storage_that_is_slow_has_one_thread_wait_for_it_and_undoes_no_later_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thread per interval, none would be left for other work within half a minute."""
    monkeypatch.setattr(auth, "REREAD_S", 0.02)
    file, key, stored = str(tmp_path / "keys.json"), *auth.create("one")
    auth.change_keys(file, lambda _: [stored])
    keys, read_keys = Keys(path=file), auth.read_keys
    reads: list[int] = []
    waits, goes_on = threading.Event(), threading.Event()

    def read_slowly(path: str) -> list[Key]:
        content = read_keys(path)
        if threading.current_thread() is not threading.main_thread() and not waits.is_set():
            waits.set()
            assert goes_on.wait(30)
        reads.append(len(content))
        return content

    async def admits() -> bool:
        await asyncio.sleep(0.01)
        try:
            return keys.admit(bearer(key), "docs").key.name == "one"
        except UnauthorizedError:
            return False

    async def scenario() -> None:
        while not waits.is_set():
            assert await admits()
        auth.change_keys(file, lambda _: [])
        reads.clear()
        try:
            assert all([await admits() for _ in range(20)])  # not known to be revoked yet
            assert not reads
        finally:
            goes_on.set()
        while await admits():
            pass
        assert not any([await admits() for _ in range(20)])

    monkeypatch.setattr(auth, "read_keys", read_slowly)
    asyncio.run(scenario())


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def _no_file(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _of_a_newer_version(file: Path) -> None:
    file.write_text('{"version": 99, "keys": []}')


UNREADABLE = [_cut_short, _no_file, _of_a_newer_version]


@pytest.mark.parametrize("damage", UNREADABLE)
def test_a_revoked_key_stays_revoked_while_the_file_cannot_be_read(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    file = tmp_path / "keys.json"
    one, first = auth.create("one")
    two, second = auth.create("two")
    auth.change_keys(str(file), lambda _: [first, second])
    deployed = Keys(path=str(file))
    auth.change_keys(str(file), lambda _: [second])
    deployed.reread()
    damage(file)
    deployed.reread()
    # A process that starts now knows what the other one has read.
    for keys in (deployed, Keys(path=str(file))):
        assert keys.admit(bearer(two), "docs").key.name == "two"
        with pytest.raises(UnauthorizedError):
            keys.admit(bearer(one), "docs")


@pytest.mark.parametrize("damage", UNREADABLE)
def test_nobody_is_admitted_while_the_valid_keys_are_unknown(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.json"
    key, stored = auth.create("one")
    auth.change_keys(str(file), lambda _: [stored])
    sound = file.read_bytes()
    damage(file)
    keys = Keys(path=str(file))
    for headers in (bearer(key), {}):
        with pytest.raises(NotReadyError, match="cannot read its API keys"):
            keys.admit(headers, "docs")
    assert str(file) in caplog.text
    if file.is_dir():
        file.rmdir()
    file.write_bytes(sound)
    keys.reread()
    assert keys.admit(bearer(key), "docs").key.name == "one"


def test_while_the_first_keys_are_taken_none_is_called_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are taken on a thread, beside requests."""
    key, stored = auth.create("alice")
    (tmp_path / "keys.json").write_text("damaged")
    keys = Keys(path=str(tmp_path / "keys.json"))

    class Looked(auth.Caller):
        def __init__(self, taken: Key) -> None:
            with pytest.raises(NotReadyError):
                keys.admit(bearer(key))
            super().__init__(taken)

    monkeypatch.setattr(auth, "Caller", Looked)
    keys.take([stored])
    assert keys.admit(bearer(key)).key == stored


def test_a_file_that_is_deleted_revokes_every_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key, stored = auth.create("one")
    auth.change_keys(str(file), lambda _: [stored])
    running = Keys(path=str(file))
    assert running.admit(bearer(key), "docs")
    file.unlink()
    running.reread()
    for keys in (running, Keys(path=str(file))):
        with pytest.raises(UnauthorizedError):
            keys.admit(bearer(key), "docs")


def test_a_server_is_deployed_without_its_keys(tmp_path: Path) -> None:
    """What is deployed stays as it was, while keys are revoked."""
    from serve.cluster.applications import access

    _, stored = auth.create("one")
    auth.change_keys(str(tmp_path / "keys.json"), lambda _: [stored])
    assert stored.sha256 not in repr(access(str(tmp_path / "keys.json")))


@pytest.fixture(scope="module")
def secured(bundles: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """URL of a server that asks for keys, and a key for one of its models."""
    key, stored = auth.create("alice", models=["feature-extraction"])
    keys = Keys([stored])
    names = ("feature-extraction", "text-classification")
    models = {name: LocalModel(Slot(live.loaded(name, bundles[name])), keys) for name in names}
    with live.running(create_front_app(models, keys=keys)) as url:
        yield url, key


@pytest.mark.guard
def test_every_path_but_probes_and_pages_asks_for_a_key(secured: tuple[str, str]) -> None:
    url, _ = secured
    spec = httpx.get(f"{url}/openapi.json", timeout=30).json()
    opened = {"/", "/healthz", "/readyz", "/health", "/ping", "/v2/health/live", "/v2/health/ready"}
    checked = 0
    for path, methods in spec["paths"].items():
        parts = path.split("/")
        model = parts[3] if path.startswith("/v1/models/f") else "text-classification"
        place = path.replace("{model}", model).replace("{name}", "x")
        for method in methods:
            response = httpx.request(method.upper(), f"{url}{place}", json={}, timeout=30)
            ending = path.removeprefix(f"/v1/models/{model}")
            described = methods[method]["responses"]
            if method == "get" and (ending in opened - {"/"} or path == "/"):
                assert response.status_code == 200, path
                assert not {"401", "403"} & described.keys()
            else:
                assert response.status_code == 401, (method, path)
                assert {"401", "403"} <= described.keys()
                assert response.headers["WWW-Authenticate"] == "Bearer"
                checked += 1
    assert checked > 20


def test_clients_send_their_key_and_are_refused_other_models(secured: tuple[str, str]) -> None:
    import openai

    url, key = secured
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        assert client.embeddings.create(input="a", model="feature-extraction").data
        assert [model.id for model in client.models.list()] == ["feature-extraction"]
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="is not known here"),
    ):
        client.embeddings.create(input="a", model="feature-extraction")
    hub = InferenceClient(provider="hf-inference", token=key)
    model = f"{url}/v1/models/feature-extraction"
    assert hub.feature_extraction("a", model=model).shape[0] == 1
    other = f"{url}/v1/models/text-classification"
    for refused in (
        httpx.post(other, json={"inputs": "a"}, headers={"X-API-Key": key}, timeout=30),
        httpx.get(other, headers={"X-API-Key": key}, timeout=30),
    ):
        assert refused.status_code == 403
        assert refused.json()["error_type"] == "forbidden"
    card = httpx.get(f"{url}/v1/models/feature-extraction", headers={"X-API-Key": key}, timeout=30)
    assert card.json()["id"] == "feature-extraction"


def test_cards_are_of_the_models_that_a_key_names_and_count_as_no_request(bundle: Path) -> None:
    key, stored = auth.create("alice", models=["docs"], requests_per_minute=1)
    slots = {name: Slot(live.loaded(name, bundle)) for name in ("docs", "other")}
    keys = Keys([stored])
    for name, status in (("docs", 200), ("other", 403)):
        with live.running(create_model_app(slots[name], alone=True, keys=keys)) as url:
            for path in ("/", f"/v1/models/{name}"):
                for _ in range(2):
                    card = httpx.get(f"{url}{path}", headers=bearer(key), timeout=30)
                    assert card.status_code == status
            listing = httpx.get(f"{url}/v1/models", headers=bearer(key), timeout=30).json()
            assert [entry["id"] for entry in listing["data"]] == ["docs"] * (status == 200)


def test_a_key_that_names_its_models_asks_the_first_of_these_and_learns_of_no_others(
    bundle: Path,
) -> None:
    one, of_one = auth.create("one", models=["mine"])
    none, of_none = auth.create("none", models=["nothing"])
    keys = Keys([of_one, of_none])
    models = {name: LocalModel(Slot(live.loaded(name, bundle)), keys) for name in ("its", "mine")}

    def ask(path: str, key: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{url}{path}", json=body, headers=bearer(key), timeout=30)

    with live.running(create_front_app(models, None, keys)) as url:
        for path in ("/predict", "/invocations"):
            answered = ask(path, one, inputs=["a"])
            assert (answered.status_code, answered.headers["X-Model"]) == (200, "mine")
        assert ask("/predict", one, inputs="a", model="its").status_code == 403
        missing = 'there is no model "x": '
        for path, named in (
            ("/v1/models/x/embed", {}),
            ("/predict", {"model": "x", "inputs": "a"}),
            ("/v1/predict", {"models": ["x"], "inputs": "a"}),
        ):
            for key, known in (
                (one, "those that you may use are mine"),
                (none, "your key may use none"),
            ):
                assert ask(path, key, **named).json()["error"] == missing + known
        wrong_task = ask("/embed", one, inputs="a").json()["error"]
        assert "there are mine (text-classification)" in wrong_task
        refused = ask("/predict", none, inputs="a")
        assert refused.status_code == 403
        wanted = "wanted a model that it may use (nothing), got a server that has none of them"
        assert wanted in refused.json()["error"]


def test_models_are_not_listed_without_a_key(secured: tuple[str, str]) -> None:
    url, _ = secured
    for path in ("/v1/models/nothing", "/v1/models/nothing/embed", "/v2/models/nothing/infer"):
        response = httpx.post(f"{url}{path}", json={}, timeout=30)
        assert response.status_code == 401
        assert "text-classification" not in response.text


def test_a_server_reachable_by_others_requires_keys_or_no_auth() -> None:
    usual: dict[str, Any] = {"models": "a=x"}
    with pytest.raises(ConfigError, match="keys: wanted a file of API keys to listen on 0"):
        ServeConfig(host="0.0.0.0", **usual)
    assert ServeConfig(host="0.0.0.0", no_auth=True, **usual).no_auth
    assert ServeConfig(host="0.0.0.0", keys="keys.json", **usual).keys
    assert ServeConfig(**usual).keys is None


def test_keys_survive_the_file(tmp_path: Path) -> None:
    _, stored = auth.create("a", models=["x"], expires=day(3), tokens_per_minute=5)
    auth.change_keys(str(tmp_path / "k.json"), lambda _: [stored])
    assert auth.read_keys(str(tmp_path / "k.json")) == [stored]
    assert isinstance(json.loads((tmp_path / "k.json").read_text())["keys"][0], dict)
    assert Key(**json.loads((tmp_path / "k.json").read_text())["keys"][0]) == stored
