"""Searches over HTTP: what they find, which vectors are compared, and what is refused."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from bert_core.bundle.format import load_bundle
from bert_core.errors import ConfigError, FormatError
from bert_core.indexes.building import build_table
from bert_core.indexes.record import ID, VECTOR, Effort, IndexRecord, read_record, write_record
from bert_core.indexes.table import Index
from bert_core.inference.predictor import Predictor
from bert_core.inference.vector_spaces import source_of
from bert_core.manifest import Manifest, Output, write_manifest
from bert_core.metrics.vector_forms import unit
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.text_ranking import TextRanking
from serve.config import ServeConfig
from serve.http.app import LocalModel, create_front_app
from serve.http.routes.index_shapes import Found, IndexAnswer, IndexSearch
from serve.http.routes.indexes import _dumped, _searched
from serve.request import auth
from serve.request.auth import Keys
from serve.request.errors import DeadlineError
from serve.request.limits import Limits
from serve.versions.plan import find
from serve.versions.slot import Slot
from tests import tiny
from tests.serve import live

pytest.importorskip("lancedb", reason="indexes need the extra `search`")

ROWS = [
    {"text": text, "kind": kind, "year": year}
    for text, kind, year in (
        ("Return the sorted values of an array along an axis.", "numpy", 2020),
        ("Open a socket and listen on a port for requests.", "socket", 2021),
        ("Parse a string as JSON and return the object.", "json", 2022),
        ("Return the values of an object as a string.", "json", None),
        ("The quick brown fox jumps over the lazy dog.", "none", 2019),
        ("Listen for requests and return an object.", "socket", 2018),
    )
]
TEXTS = ["Parse a string.", "requests on a port"]
OPTIONS = FeatureExtraction.options(
    prompts={"query": "Open a socket. ", "document": "The lazy dog. "}
)
SEARCH = "/v1/indexes/docs/search"


def embedded(folder: Path, texts: list[str], prompt: str) -> np.ndarray:
    predictor = Predictor(folder, device="cpu")
    asked = predictor.task.parameters(prompt_name=prompt)  # type: ignore[call-arg]
    return unit(np.array(predictor.predict(texts, asked))).astype(np.float32)


def index_of(folder: Path, model: Path) -> Path:
    """An index of the rows with vectors by a model."""
    vectors = embedded(model, [str(row["text"]) for row in ROWS], "document")
    flat = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    table = pa.Table.from_pylist(ROWS).add_column(0, ID, pa.array(range(len(ROWS)), pa.int64()))
    table = table.append_column(VECTOR, flat)
    folder.mkdir()
    build_table(str(folder), table.schema, iter(table.to_batches()), "text", "english")
    source = source_of(Predictor(model, device="cpu"), None)
    assert source is not None
    record = IndexRecord(
        rows=len(ROWS), kind="exact", effort=Effort(), recall=1.0, recall_at=10, recall_queries=0,
        columns=[*ROWS[0]], text="text", language="english", vectors=source,
    )  # fmt: skip
    paths = [write_record(str(folder), record)]
    paths += [str(path) for path in (folder / "rows.lance").rglob("*") if path.is_file()]
    outputs = {str(Path(path).relative_to(folder)): Output.of(path) for path in paths}
    manifest = Manifest(stage="index", digest=folder.name, config={}, outputs=outputs)
    write_manifest(str(folder), manifest)
    return folder


@dataclass
class Served:
    """Two versions of a model of vectors, an index of each, and a ranker."""

    models: list[Path]
    indexes: list[Path]
    ranker: Path


@pytest.fixture(scope="module")
def made(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    loaded, folder = load_bundle(bundle), tmp_path_factory.mktemp("indexes")
    models = [
        tiny.bundle(
            folder / f"vectors-{seed}",
            loaded.tokenizer,
            loaded.encoder_config,
            task=FeatureExtraction(options=OPTIONS),
            seed=seed,
        )
        for seed in (81, 82)
    ]
    ranker = tiny.bundle(
        folder / "ranker", loaded.tokenizer, loaded.encoder_config, task=TextRanking(), seed=83
    )
    indexes = [index_of(folder / f"index-{n}", model) for n, model in enumerate(models)]
    return Served(models, indexes, ranker)


@pytest.fixture(scope="module")
def slot(made: Served) -> Slot:
    return Slot(live.loaded("vectors", made.models[0]))


@pytest.fixture(scope="module")
def client(made: Served, slot: Slot) -> Iterator[httpx.Client]:
    """A front with both versions of the index, and the first of the model."""
    models = {
        "vectors": LocalModel(slot),
        "ranker": LocalModel(Slot(live.loaded("ranker", made.ranker))),
    }
    indexes = {
        "docs": [Index(each) for each in made.indexes],
        "old": [Index(made.indexes[1])],
    }
    app = create_front_app(
        models, Limits(max_inputs=8, max_top_k=10, max_candidates=30), indexes=indexes
    )
    with live.running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def found(response: httpx.Response) -> list[list[dict[str, Any]]]:
    assert response.status_code == 200, response.text
    return response.json()["results"]


def test_no_search_begins_after_the_deadline(made: Served) -> None:
    index, asked = Index(made.indexes[0]), IndexSearch(texts=TEXTS, top_k=1)
    vectors = np.eye(2, index.record.vectors.space.dimensions, dtype=np.float32)
    assert len(_searched(index, asked, vectors, time.monotonic() + 60)) == 2
    with pytest.raises(DeadlineError, match="before the deadline, 0 of 2 searches are done: send"):
        _searched(index, asked, vectors, time.monotonic())


def test_values_that_json_has_no_form_for_are_texts() -> None:
    row = {"bytes": b"\xff\x00", "date": date(2026, 1, 2), "part": Decimal("1.50"), "no": np.nan}
    found = Found(id=0, score=1.0, cosine=1.0, bm25=None, row=row)
    answer = json.loads(_dumped(IndexAnswer(index="docs", space="0", results=[[found]])))
    assert answer["results"][0][0]["row"] == {
        "bytes": "/wA=", "date": "2026-01-02", "part": "1.50", "no": None,
    }  # fmt: skip


def cosines(model: Path, texts: list[str]) -> np.ndarray:
    documents = embedded(model, [str(row["text"]) for row in ROWS], "document")
    return embedded(model, texts, "query") @ documents.T


def test_texts_find_the_rows_that_the_models_own_vectors_find(
    client: httpx.Client, made: Served
) -> None:
    response = client.post(SEARCH, json={"texts": TEXTS, "top_k": 3})
    index = Index(made.indexes[0])
    assert response.headers["X-Vector-Space"] == response.json()["space"] == index.space
    assert response.headers["X-Index-Digest"] == "index-0"
    assert response.headers["Server-Timing"].startswith("embed;dur=")
    for scores, rows in zip(cosines(made.models[0], TEXTS), found(response), strict=True):
        assert [row["id"] for row in rows] == np.argsort(-scores)[:3].tolist()
        assert [row["score"] for row in rows] == pytest.approx(np.sort(scores)[::-1][:3], abs=1e-5)
        assert [row["row"] for row in rows] == [ROWS[row["id"]] for row in rows]
        assert all(row["bm25"] is None and row["cosine"] == row["score"] for row in rows)


def test_vectors_of_the_models_route_find_the_same_rows(client: httpx.Client) -> None:
    asked = {"inputs": TEXTS, "parameters": {"prompt_name": "query"}}
    embedded = client.post("/v1/models/vectors", json=asked)
    body = {"vectors": embedded.json(), "space": embedded.headers["X-Vector-Space"], "top_k": 4}
    by_vectors = found(client.post(SEARCH, json=body))
    by_texts = found(client.post(SEARCH, json={"texts": TEXTS, "top_k": 4}))
    for some, same in zip(by_vectors, by_texts, strict=True):
        assert [row["id"] for row in some] == [row["id"] for row in same]
        assert [row["score"] for row in some] == pytest.approx([row["score"] for row in same])


def test_filters_columns_and_words_are_used(client: httpx.Client) -> None:
    body = {"texts": TEXTS, "filter": {"year": {"at_least": 2019}}, "columns": ["year"]}
    for rows in found(client.post(SEARCH, json={**body, "top_k": 5})):
        assert {row["row"]["year"] for row in rows} == {2019, 2020, 2021, 2022}
    [rows] = found(client.post(SEARCH, json={"texts": ["socket"], "hybrid": True, "top_k": 5}))
    of_words = [row for row in rows if row["bm25"] is not None]
    assert [row["id"] for row in of_words] == [1], "the only text with the word"
    assert rows[0]["id"] == 1 or rows[0]["score"] >= of_words[0]["score"]


def test_a_ranker_orders_the_rows_by_its_own_scores(client: httpx.Client, made: Served) -> None:
    body = {"texts": TEXTS, "rerank": "ranker", "rerank_rows": 4, "top_k": 2}
    response = client.post(SEARCH, json=body)
    assert "rerank;dur=" in response.headers["Server-Timing"]
    ranker, near = Predictor(made.ranker, device="cpu"), cosines(made.models[0], TEXTS)
    for text, scores, rows in zip(TEXTS, near, found(response), strict=True):
        read = np.argsort(-scores)[:4].tolist()
        pairs = [{"text": text, "text_pair": ROWS[number]["text"]} for number in read]
        ranked = {
            number: answer["score"]
            for number, answer in zip(read, ranker.predict(pairs), strict=True)
        }
        wanted = sorted(ranked, key=lambda number: -ranked[number])[:2]
        assert [row["id"] for row in rows] == wanted
        assert [row["score"] for row in rows] == pytest.approx([ranked[n] for n in wanted])


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (SEARCH, {}, 422, "the body: wanted one of texts and vectors, got neither"),
        (SEARCH, {"texts": ["a"], "vectors": [[1.0]]}, 422, "texts and vectors, got both"),
        (SEARCH, {"vectors": [[1.0]]}, 422, "space: wanted what made the vectors, got none"),
        (SEARCH, {"vectors": [[1.0]], "space": "0"}, 422, "space: wanted that of this index, "),
        (SEARCH, {"vectors": [[1.0]], "space": "0", "hybrid": True}, 422, "hybrid: wanted none w"),
        (SEARCH, {"texts": ["a"], "filter": {"kid": 1}}, 422, "filter.kid: wanted one of the col"),
        (SEARCH, {"texts": ["a"], "columns": ["kid"]}, 422, "columns: wanted some of text, kind"),
        (SEARCH, {"texts": ["a"], "top_k": 11}, 413, "top_k: wanted at most 10, got 11"),
        (SEARCH, {"texts": ["a"] * 9}, 413, "inputs: wanted at most 8 per request, got 9"),
        (
            SEARCH,
            {"texts": ["a", "b", "c", "d"], "top_k": 8},
            413,
            "top_k: wanted at most 30 rows of all searches, got 8 for each of 4: ask for fewer, or",
        ),
        (
            SEARCH,
            {"texts": ["a", "b", "c"], "rerank": "ranker", "rerank_rows": 2, "top_k": 3},
            413,
            "rerank_rows: wanted at most 8 rows of all texts, got 3 for each of 3: ask for fewer",
        ),
        (
            SEARCH,
            {"texts": ["a"], "rerank": "none", "rerank_rows": 2, "top_k": 2},
            404,
            'there is no model "none"',
        ),
        (
            SEARCH,
            {"texts": ["a"], "prompt_name": "none"},
            422,
            "vectors: prompt_name: wanted one of the model's prompts (query, document), got 'none'",
        ),
        (
            SEARCH,
            {"texts": ["a"], "rerank": "vectors", "rerank_rows": 2, "top_k": 2},
            422,
            "rerank: wanted a model for text-ranking, got vectors, which is for feature-extraction",
        ),
        ("/v1/indexes/none/search", {"texts": ["a"]}, 404, "there is no index 'none': there are"),
        (
            "/v1/indexes/old/search",
            {"texts": ["a"]},
            503,
            "old: wanted the model that made its vectors, ",
        ),
    ],
)
def test_a_search_that_does_not_fit_is_refused(
    client: httpx.Client, path: str, body: Any, status: int, message: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]


def test_indexes_are_listed_and_described(client: httpx.Client, made: Served) -> None:
    listed = client.get("/v1/indexes").json()["data"]
    assert [(each["id"], each["digest"]) for each in listed] == [
        ("docs", "index-0"), ("docs", "index-1"), ("old", "index-1"),
    ]  # fmt: skip
    assert listed[0]["columns"] == [*ROWS[0]]
    assert listed[0]["model_digest"] == load_bundle(made.models[0]).digest
    described = client.get("/openapi.json").json()["paths"]["/v1/indexes/{name}/search"]["post"]
    assert described["parameters"][0]["schema"] == {"enum": ["docs", "old"]}
    assert {"200", "422", "503"} <= described["responses"].keys()


def test_the_index_of_the_version_that_answers_is_searched(
    client: httpx.Client, slot: Slot, made: Served
) -> None:
    before = client.post(SEARCH, json={"texts": TEXTS, "top_k": 2})
    other = live.loaded("vectors", made.models[1])
    former = slot.switch(other)
    try:
        after = client.post(SEARCH, json={"texts": TEXTS, "top_k": 2})
        scores = cosines(made.models[1], TEXTS)
        wanted = [np.argsort(-row)[:2].tolist() for row in scores]
        assert [[row["id"] for row in rows] for rows in found(after)] == wanted
        digests = [each.headers["X-Index-Digest"] for each in (before, after)]
        assert digests == ["index-0", "index-1"]
        found(client.post("/v1/indexes/old/search", json={"texts": TEXTS}))
    finally:
        slot.switch(former)
        other.retire()


def test_a_search_needs_the_key_of_its_model(made: Served, tmp_path: Path) -> None:
    (able, key), (unable, other) = (
        auth.create("able", models=["vectors"]), auth.create("other", models=["ranker"]),
    )  # fmt: skip
    keys = Keys([key, other])
    models = {
        "vectors": LocalModel(Slot(live.loaded("vectors", made.models[0])), keys),
        "ranker": LocalModel(Slot(live.loaded("ranker", made.ranker)), keys),
    }
    app = create_front_app(models, keys=keys, indexes={"docs": [Index(made.indexes[0])]})
    space = Index(made.indexes[0]).space
    size = Index(made.indexes[0]).record.vectors.space.dimensions
    by_vectors = {"vectors": [[1.0] * size], "space": space}
    with live.running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        for presented, status in ((None, 401), (able, 200), (unable, 403)):
            headers = {} if presented is None else {"Authorization": f"Bearer {presented}"}
            for body in ({"texts": TEXTS}, by_vectors):
                assert client.post(SEARCH, json=body, headers=headers).status_code == status
        reranked = {"texts": TEXTS, "rerank": "ranker", "filter": {"none": 1}}
        headers = {"Authorization": f"Bearer {able}"}
        refused = client.post(SEARCH, json=reranked, headers=headers)
        assert refused.status_code == 403, "before anything is searched for"
        assert "wanted a model that it may use (vectors), got ranker" in refused.json()["error"]


def test_a_config_names_indexes_with_their_models(made: Served, tmp_path: Path) -> None:
    index, other = (str(each) for each in made.indexes)
    config = ServeConfig(
        models={"vectors": str(made.models[0])}, indexes=f"docs={index},docs={other}"
    )
    assert config.served_indexes == {"docs": [index, other]}
    tables = ServeConfig(models={"a": "b"}, indexes={"docs": index, "both": [index, other]})
    assert tables.served_indexes == {"docs": [index], "both": [index, other]}
    (found_model,) = find(config).values()
    assert {*found_model.plan.indexed} == {load_bundle(each).digest for each in made.models}
    for indexes, message in (
        ({"docs": 3}, "indexes.docs: wanted a folder, or a list of folders, .* got a number"),
        ("docs", "indexes: wanted name=folder, as in docs=runs/index, .*, got 'docs'"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServeConfig(models={"a": "b"}, indexes=indexes)
    for folders, message in (
        ([other], "indexes.docs: wanted vectors by a model that is served .vectors .*, got those"),
        ([index, index], "indexes.docs: wanted versions by different models, got several of one"),
        (["s3://bucket/index"], "indexes.docs: wanted a folder of this machine, got s3://bucket"),
    ):
        with pytest.raises(ConfigError, match=message):
            find(ServeConfig(models={"vectors": str(made.models[0])}, indexes={"docs": folders}))
    entries = json.loads((made.indexes[0] / "index.json").read_bytes())
    assert entries["vectors"]["query_prompt"] == "query"
    odd = tmp_path / "odd"
    odd.mkdir()
    record = read_record(index)
    space = replace(record.vectors.space, how={**record.vectors.space.how, "pooling": "max"})
    write_record(str(odd), replace(record, vectors=replace(record.vectors, space=space)))
    with pytest.raises(
        ConfigError, match=r"indexes.docs: wanted vectors as vectors makes them .*, got those of f"
    ):
        find(ServeConfig(models={"vectors": str(made.models[0])}, indexes={"docs": str(odd)}))
    damaged = Path(shutil.copytree(index, tmp_path / "damaged"))
    [data] = (damaged / "rows.lance" / "data").iterdir()
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(FormatError, match="wanted the file that the index was written with, got o"):
        find(ServeConfig(models={"vectors": str(made.models[0])}, indexes={"docs": str(damaged)}))
    split = {"model": str(made.models[1]), "mode": "split"}
    models = {"vectors": {"model": str(made.models[0]), "candidate": split}}
    with pytest.raises(
        ConfigError, match=r"models.vectors.candidate: wanted a candidate whose vec"
    ):
        find(ServeConfig(models=models, indexes={"docs": index}))
    find(ServeConfig(models=models, indexes={"docs": [index, other]}))


def test_a_model_waits_for_an_index_of_its_vectors(made: Served) -> None:
    digests = [load_bundle(each).digest for each in made.models]

    def plan(place: int, *indexed: str) -> Any:
        return live.plan_of(made.models[place], indexed=indexed)

    with live.hosted(plan(0, digests[0])) as (model, url):
        model.change(plan(1, digests[0]))
        live.eventually(lambda: "and waits" in (httpx.get(url).json()["problem"] or ""))
        card = httpx.get(url).json()
        assert (card["state"], card["digest"]) == ("problem", digests[0])
        assert f"none with those of {digests[1][:12]}: serve one beside it" in card["problem"]
        answer = httpx.post(url, json={"inputs": TEXTS}, timeout=30)
        assert answer.headers["X-Model-Digest"] == digests[0]
        model.change(plan(1, *digests))
        live.eventually(lambda: httpx.get(url).json()["digest"] == digests[1])
        live.eventually(lambda: httpx.get(url).json()["problem"] is None)
        model.change(plan(0))  # without an index nothing is waited for
        live.eventually(lambda: httpx.get(url).json()["digest"] == digests[0])
