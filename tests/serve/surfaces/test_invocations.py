"""MLflow's and SageMaker's requests against a live server."""

import json
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest

from bert_core.inference.predictor import Predictor
from bert_core.tasks.shapes import rows_of

TEXTS = ["Parse a string.", "Open a socket."]
NAME = "text-classification"
SPLIT = {"columns": ["text"], "data": [[text] for text in TEXTS], "index": [0, 1]}


@pytest.mark.parametrize("prefix", ["", f"/v1/models/{NAME}"])
@pytest.mark.parametrize(
    "body",
    [
        {"inputs": TEXTS},
        {"inputs": {"text": TEXTS}},
        {"instances": TEXTS},
        {"instances": [{"text": text} for text in TEXTS]},
        {"dataframe_split": SPLIT},
        {"dataframe_records": [{"text": text} for text in TEXTS]},
        {"dataframe_records": [{"text": text, "text_pair": None} for text in TEXTS]},
    ],
)
def test_every_form_of_the_same_rows_has_the_same_records(
    front: str, bundles: dict[str, Path], prefix: str, body: dict[str, Any]
) -> None:
    predictor = Predictor(bundles[NAME], device="cpu")
    wanted = [predictor.task.cells(answer) for answer in predictor.predict(TEXTS)]
    response = httpx.post(f"{front}{prefix}/invocations", json=body, timeout=30)
    records = response.json()["predictions"]
    assert [record["label"] for record in records] == [record["label"] for record in wanted]
    for record, expected in zip(records, wanted, strict=True):
        assert record["score"] == pytest.approx(expected["score"], abs=1e-6)


@pytest.mark.parametrize("prefix", ["", f"/v1/models/{NAME}"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_table_in_csv_is_answered_as_the_same_rows_are(front: str, prefix: str, end: str) -> None:
    """mlflow 3.17, `mlflow.pyfunc.scoring_server`: CONTENT_TYPE_CSV. Its pandas would read some of
    these cells as missing or as numbers."""
    cells = ["NA", "007", "1e5", 'a, "b"\nc', "null", "café"]
    table = pd.DataFrame({"text": cells, "text_pair": [None, *cells[:-1]]})
    text = table.to_csv(index=False, lineterminator=end)
    url, kind = f"{front}{prefix}/invocations", "text/csv; charset=utf-8"
    for body in (text.encode(), text.encode("utf-8-sig")):
        came = httpx.post(url, content=body, headers={"Content-Type": kind}, timeout=30)
        wanted = httpx.post(url, json={"dataframe_records": [
            {key: value for key, value in row.items() if isinstance(value, str)}
            for row in table.to_dict("records")
        ]}, timeout=30)  # fmt: skip
        assert (came.status_code, came.json()) == (200, wanted.json())
    empty = httpx.post(url, content=b"text\n", headers={"Content-Type": kind}, timeout=30)
    assert empty.json() == {"predictions": []}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "wanted a line with the names of columns, got nothing"),
        (b"text\na,b\n", "line 2: wanted 1 cells, as there are columns, got 2"),
        (b'\ntext\n"a\nb"\na,b\n', "line 5: wanted 1 cells"),
        (b"txt\na\n", "(did you mean text?)"),
        (b"text,text\na,b\n", "line 1: wanted different names, got 'text' 2 times"),
        (b"text,text_pair\n,b\n", "inputs[0]: wanted text"),
        (b"text\n\xff\n", "wanted CSV in UTF-8, it cannot be read"),
        (b'text\n"a\n', "wanted CSV in UTF-8, it cannot be read"),
    ],
)
def test_a_table_that_cannot_be_read_is_reported(front: str, body: bytes, message: str) -> None:
    url, headers = f"{front}/v1/models/{NAME}/invocations", {"Content-Type": "text/csv"}
    response = httpx.post(url, content=body, headers=headers, timeout=30)
    assert response.status_code == 400
    assert message in response.json()["message"]
    assert "dataframe_split" not in response.json()["message"]


MANY = 2_049
"""One row more than a request may have."""


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": [{"text": "a", "text_pair": "b"}] * MANY},
        {"inputs": {"text": ["a"] * MANY, "text_pair": ["b"] * MANY}},
        {"dataframe_records": [{"text": "a", "text_pair": "b"}] * MANY},
        {"dataframe_split": {"columns": ["text"], "data": [["a", "b"]] * MANY}},
        b"text,text\n" + b"a\n" * MANY,
    ],
    ids=["inputs", "columns", "dataframe_records", "dataframe_split", "csv"],
)
def test_too_many_rows_are_refused_before_any_of_them_is_looked_at(front: str, body: Any) -> None:
    """Each row here has another fault, which a look at it would report."""
    url, kind = f"{front}/v1/models/feature-extraction/invocations", "application/json"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "text/csv" if content is body else kind}
    response = httpx.post(url, content=content, headers=headers, timeout=30)
    assert response.status_code == 400
    message = f"inputs: wanted at most 2048 per request, got {MANY}: send several requests"
    assert response.json()["message"] == message


@pytest.mark.parametrize(
    "body",
    [
        {"dataframe_split": {"columns": ["text"], "data": []}},
        {"dataframe_split": {"columns": ["inputs"], "data": []}},
        {"inputs": {"text": [], "text_pair": []}},
    ],
)
def test_a_frame_without_rows_has_no_predictions(front: str, body: dict[str, Any]) -> None:
    response = httpx.post(f"{front}/v1/models/{NAME}/invocations", json=body, timeout=30)
    assert (response.status_code, response.json()) == (200, {"predictions": []})


def test_columns_of_lists_are_rows_of_lists(front: str, bundles: dict[str, Path]) -> None:
    words = [["Grace", "lives", "here"], ["Parse"]]
    task = Predictor(bundles["token-classification"], device="cpu").task
    assert rows_of(task.inputs, {"tokens": words}) == [{"tokens": each} for each in words]
    assert rows_of(task.inputs, {"tokens": words[0]}) == [{"tokens": words[0]}]
    url = f"{front}/v1/models/token-classification/invocations"
    for inputs, count in (({"tokens": words}, 2), ({"tokens": words[0]}, 1)):
        response = httpx.post(url, json={"inputs": inputs}, timeout=30)
        assert len(response.json()["predictions"]) == count, response.text


def test_params_reach_the_task(front: str) -> None:
    body = {"inputs": TEXTS, "params": {"top_k": 2}}
    response = httpx.post(f"{front}/invocations", json=body, timeout=30)
    assert [len(each["answers"]) for each in response.json()["predictions"]] == [2, 2]


def test_ping_answers(front: str) -> None:
    for prefix in ("", f"/v1/models/{NAME}"):
        assert httpx.get(f"{front}{prefix}/ping", timeout=30).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "wanted one of inputs, instances, dataframe_split, dataframe_records, got none"),
        ({"inputs": TEXTS, "instances": TEXTS}, "got inputs, instances"),
        ({"inputs": []}, "inputs: wanted a list of at least one row"),
        ({"dataframe_split": {"columns": ["text"], "data": [[]]}}, "wanted 1 cells"),
        (
            {"inputs": {"text": ["a"], "text_pair": []}},
            'columns of the same length, got {"text": 1, "text_pair": 0}',
        ),
        ({"inputs": {"txt": []}}, 'wanted columns text, text_pair, got text ("txt") (did you mean'),
        ({"dataframe_split": {"columns": [], "data": []}}, "wanted a list of at least one row"),
        ({"dataframe_records": []}, "dataframe_records: wanted a list of at least one row"),
        (
            {"dataframe_split": {"columns": ["text", "text"], "data": [["a", "b"]]}},
            "dataframe_split.columns: wanted different names, got 'text' 2 times",
        ),
        ({"inputs": TEXTS, "params": {"topk": 1}}, "did you mean top_k"),
    ],
)
def test_a_wrong_body_is_an_error_in_mlflows_shape(
    front: str, body: dict[str, Any], message: str
) -> None:
    response = httpx.post(f"{front}/invocations", json=body, timeout=30)
    assert response.status_code == 400
    told = response.json()
    assert told["error_code"] == "INVALID_PARAMETER_VALUE"
    assert message in told["message"]


@pytest.mark.parametrize("name", ["feature-extraction", "sparse-embedding"])
def test_a_row_with_several_vectors_is_refused_as_a_record_has_one(front: str, name: str) -> None:
    url = f"{front}/v1/models/{name}/invocations"
    pair = {"inputs": ["a", {"text": "a", "text_pair": "b"}]}
    refused: dict[str, dict[str, Any]] = {"inputs[1]: wanted one text": pair}
    if name == "feature-extraction":
        refused["per_token: wanted none"] = {"inputs": ["a"], "params": {"per_token": True}}
    for message, body in refused.items():
        response = httpx.post(url, json=body, timeout=30)
        assert response.status_code == 400
        assert message in response.json()["message"]
    single = {"inputs": ["a", {"text": "a", "text_pair": None}]}
    assert len(httpx.post(url, json=single, timeout=30).json()["predictions"]) == 2
