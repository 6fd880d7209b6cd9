import shutil
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import InputError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.text_classification import TextClassificationParameters
from tracking.models.registry import Release, publish
from tracking.store.server import as_default, connect

NAME = "served-by-pyfunc"
TEXTS = ["abc", "fed cab", "a", "bad " * 8]


@pytest.fixture(scope="module")
def model(store: str, bundles: list[Path]) -> Any:
    import mlflow

    publish(Release(bundle=bundles[0], name=NAME, metrics={}, input_example=TEXTS[:2]), uri=store)
    with as_default(store):
        return mlflow.pyfunc.load_model(f"models:/{NAME}@champion")


def test_answers_are_the_predictors(model: Any, bundles: list[Path]) -> None:
    import numpy as np
    import pandas as pd

    answers = Predictor(bundles[0]).predict(TEXTS)
    wanted = pd.DataFrame([answer[0] for answer in answers])
    frames = [
        TEXTS,
        pd.Series(TEXTS),
        pd.DataFrame({"inputs": TEXTS}),
        pd.DataFrame({"text": TEXTS, "label": TEXTS}),
        {"text": np.array(TEXTS)},
        {"text": TEXTS},
        {"inputs": TEXTS},
        [{"text": text} for text in TEXTS],
    ]
    for frame in frames:
        pd.testing.assert_frame_equal(model.predict(frame), wanted)
    assert list(wanted.columns) == ["label", "score"]


def test_a_version_that_raybert_0_2_registered_loads(
    model: Any, store: str, tmp_path: Path
) -> None:
    import mlflow

    uri = connect(store).get_model_version_download_uri(NAME, "1")
    version = tmp_path / "version"
    shutil.copytree(uri.removeprefix("file://"), version)
    code = version / "pyfunc.py"
    code.write_text(
        code.read_text().replace("bert_core.inference.predictor", "bert_core.predictor")
    )
    assert mlflow.pyfunc.load_model(str(version)).predict(TEXTS).equals(model.predict(TEXTS))


def test_a_frame_without_rows_has_an_answer_without_rows(model: Any) -> None:
    import pandas as pd

    named = pd.DataFrame({"text": TEXTS})[:0]
    empties: list[Any] = [named, named.rename(columns={"text": "inputs"}), {"text": []}]
    for empty in empties:
        answer, some = model.predict(empty), model.predict(TEXTS)
        assert len(answer) == 0
        assert answer.dtypes.to_dict() == some.dtypes.to_dict()
        assert list(model.predict(empty, params={"top_k": 2}).columns) == ["answers"]
    with pytest.raises(InputError, match="found 'label'"):
        model.predict(named.rename(columns={"text": "label"}))


def test_the_tasks_parameters_are_the_models(model: Any, bundles: list[Path]) -> None:
    predictor = Predictor(bundles[0])
    parameters = TextClassificationParameters(top_k=2, function_to_apply="none")
    answers = model.predict(TEXTS, params={"top_k": 2, "function_to_apply": "none"})
    assert answers["answers"].tolist() == predictor.predict(TEXTS, parameters)
    long = ["bad " * 100]
    with pytest.raises(InputError, match=r"inputs\[0\]: wanted at most 32 tokens"):
        model.predict(long)
    cut = TextClassificationParameters(truncation=True)
    [answer] = predictor.predict(long, cut)
    assert model.predict(long, params={"truncation": True})["label"][0] == answer[0]["label"]
    with pytest.raises(InputError, match="top_k: wanted at least 1, got 0"):
        model.predict(TEXTS, params={"top_k": 0})


def test_a_column_that_holds_something_else_is_refused_not_answered(model: Any) -> None:
    import pandas as pd

    with pytest.raises(InputError, match="called inputs or text or text_pair, found 'label'"):
        model.predict(pd.DataFrame({"label": ["x"], "text": ["abc"]}))


@pytest.mark.parametrize("kind", ["None", "nan", "NA", "NaT"])
def test_a_cell_that_is_missing_is_no_text(model: Any, kind: str) -> None:
    import pandas as pd

    missing = {"None": None, "nan": float("nan"), "NA": pd.NA, "NaT": pd.NaT}[kind]
    for frame in (
        pd.DataFrame({"text": ["abc", missing]}, dtype=object),
        pd.DataFrame({"text": ["abc", missing], "text_pair": ["a", "b"]}, dtype=object),
    ):
        with pytest.raises(InputError, match=r"inputs\[1\]: wanted text .*, text is missing"):
            model.predict(frame)
    with pytest.raises(InputError, match=r"inputs\[1\]: wanted text, got nothing"):
        model.predict(pd.DataFrame({"inputs": ["abc", missing]}, dtype=object))
    alone = model.predict(pd.DataFrame({"text": ["abc", "fed cab"]}))
    pair = pd.DataFrame({"text": ["abc", "fed cab"], "text_pair": [missing, missing]}, dtype=object)
    pd.testing.assert_frame_equal(model.predict(pair), alone)
    strings = pd.DataFrame({"text": pd.array(["abc", "fed cab"], dtype="string")})
    pd.testing.assert_frame_equal(model.predict(strings), alone)
