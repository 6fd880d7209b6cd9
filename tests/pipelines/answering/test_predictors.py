"""The model of a process, by its folder, task and options."""

from pathlib import Path

from pipelines.answering.predictors import options_text, predictor_of


def test_options_may_be_tables_and_lists_and_in_any_order(tmp_path: Path) -> None:
    from tests import tiny

    folder = tiny.bundle(tmp_path / "bundle", tiny.tokenizer())
    options = {"prompts": {"query": "the sea "}, "default_prompt": "query", "dimensions": [8]}
    predictor = predictor_of(folder, 1, "feature-extraction", options_text(options))
    chosen = predictor.task.chosen
    assert {name: getattr(chosen, name) for name in options} == options
    reversed_ = options_text(dict(reversed(options.items())))
    assert predictor_of(folder, 1, "feature-extraction", reversed_) is predictor
