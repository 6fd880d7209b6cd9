"""Thresholds and abstention of a bundle decide on every surface, and the card tells them."""

from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest

from bert_core.inference.predictor import Predictor
from bert_core.tasks.text_classification import TextClassification, TextClassificationOptions
from pipelines.answering.columns import answer_columns
from tests import tiny
from tests.serve import live
from tracking.models.pyfunc import BundleModel

TEXT = "the sea is blue"


def saved(folder: Path, **options: Any) -> Path:
    task = TextClassification(["ham", "spam"], TextClassificationOptions(**options))
    return tiny.bundle(folder, tiny.tokenizer(), task=task)


@pytest.mark.parametrize("decided", ["ham", "spam"])
def test_the_same_label_is_decided_on_every_surface(decided: str, tmp_path: Path) -> None:
    share = {
        each["label"]: each["score"]
        for each in Predictor(saved(tmp_path / "usual"), device="cpu").predict([TEXT])[0]
    }
    sure = share[decided] / 2  # the other label is less than sure, whatever its score is
    folder = saved(
        tmp_path / "decided", thresholds={decided: sure}, abstain_below=share[decided] + 1e-6
    )
    predictor = Predictor(folder, device="cpu")
    [answer] = predictor.predict([TEXT])
    assert (answer[0]["label"], answer[0]["assigned"]) == (decided, False)
    assert answer[0]["score"] == pytest.approx(share[decided])
    cells = {"label": decided, "score": answer[0]["score"], "abstained": True}
    registered = BundleModel()
    registered.predictor = predictor
    assert registered.predict(None, pd.DataFrame({"text": [TEXT]})).to_dict("records") == [cells]
    columns = answer_columns(predictor.task, [answer])
    assert columns["predicted_label"].to_pylist() == [decided]
    assert columns["predicted_abstained"].to_pylist() == [True]
    with live.served(folder) as url:
        [ours] = httpx.post(url, json={"inputs": [TEXT]}).json()
        theirs = httpx.post(f"{url}/predict", json={"inputs": TEXT}).json()
        assert ours == theirs == answer
        [record] = httpx.post(f"{url}/invocations", json={"inputs": [TEXT]}).json()["predictions"]
        assert record == pytest.approx(cells)
        card = httpx.get(f"{url}/").json()
        assert f"from its threshold on: {decided} {sure:.3g}" in card["note"]
        assert "it abstains where the best score is below" in card["note"]


def test_several_labels_are_assigned_by_their_thresholds(tmp_path: Path) -> None:
    folder = saved(tmp_path / "all", multi_label=True, thresholds={"ham": 0.0, "spam": 1.0})
    with live.served(folder) as url:
        [answer] = httpx.post(url, json={"inputs": [TEXT]}).json()
        assert {each["label"]: each["assigned"] for each in answer} == {"ham": True, "spam": False}
        [record] = httpx.post(f"{url}/invocations", json={"inputs": [TEXT]}).json()["predictions"]
        assert record["labels"] == ["ham"]
