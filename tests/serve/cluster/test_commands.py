import asyncio

import pytest

from bert_core.errors import ResourceError
from serve.cluster.commands import coming
from serve.cluster.model_table import AbsentModel
from serve.http.routes.listing import list_models


def test_applying_ends_at_once_if_a_model_that_was_added_cannot_be_loaded() -> None:
    added = {"a": AbsentModel("a", "runs/a is not served: no such folder")}
    loading = added | {"b": AbsentModel("b", None)}
    assert coming(asyncio.run(list_models(loading)).data) == {"b": "down"}
    told = "not everything was applied: a: runs/a is not served: no such folder$"
    with pytest.raises(ResourceError, match=told):
        coming(asyncio.run(list_models(added)).data)
