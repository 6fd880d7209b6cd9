"""SQuAD's scores worked by hand, and the best threshold beside trying every one."""

import numpy as np
import pytest

from bert_core.metrics.squad import exact_match, normalized, squad_metrics, token_f1


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("an apple, a day", "apple day"),
        ("theatre", "theatre"),
        ("U.S.-led", "usled"),
        ("the", ""),
    ],
)
def test_answers_are_compared_without_articles_and_punctuation(text: str, bare: str) -> None:
    assert normalized(text) == bare


@pytest.mark.parametrize(
    ("answer", "wanted", "exact", "f1"),
    [  # by the rules of 1.1, whose script gives no F1 where nothing is left of either
        ("the cat", ["A cat."], 1.0, 1.0),
        ("black cat", ["cat", "white cat"], 0.0, 2 / 3),  # of one in three words; one in four
        ("cat cat", ["cat"], 0.0, 2 / 3),
        ("dog", ["cat"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("dog", [], 0.0, 0.0),
        ("", ["cat"], 0.0, 0.0),
        ("the", ["a"], 1.0, 0.0),
    ],
)
def test_scores_are_those_of_the_best_of_the_answers(
    answer: str, wanted: list[str], exact: float, f1: float
) -> None:
    assert exact_match(answer, wanted) == exact
    assert token_f1(answer, wanted) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("answer", "wanted", "right"),
    [
        ("the", ["a"], 1.0),  # none was wanted, as none of the words is left
        ("", ["a", "cat"], 0.0),
        ("cat", ["a", "cat"], 1.0),
        ("", [], 1.0),
        ("dog", [], 0.0),
    ],
)
def test_unanswerable_questions_follow_the_rules_of_squad_2(
    answer: str, wanted: list[str], right: float
) -> None:
    assert exact_match(answer, wanted, no_answer=True) == right
    assert token_f1(answer, wanted, no_answer=True) == right


def test_the_best_threshold_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for rows in (1, 2, 7, 60):
        has = rng.random(rows) < 0.6
        has[0] = False
        f1 = np.where(has, rng.random(rows).round(1), 0.0)
        advantage = rng.normal(size=rows).round(1)  # with ties
        tried = [
            np.where(advantage > threshold, f1, ~has).mean()
            for threshold in (-np.inf, *advantage.tolist())
        ]
        columns = {
            "exact_match": f1, "f1": f1, "has_answer": has.astype(float),
            "answered_exact_match": f1, "answered_f1": f1, "advantage": advantage,
        }  # fmt: skip
        assert squad_metrics(columns)["best_f1"] == pytest.approx(max(tried))


def test_questions_with_and_without_an_answer_are_scored_apart() -> None:
    ones = np.ones(4)
    columns = {
        "exact_match": np.array([1.0, 0, 1, 0]),
        "f1": np.array([1.0, 0.5, 1, 0]),
        "has_answer": np.array([1.0, 1, 0, 0]),
        "answered_exact_match": ones,
        "answered_f1": ones,
        "advantage": ones,
    }
    found = squad_metrics(columns)
    assert (found["exact_match"], found["f1"]) == (0.5, 0.625)
    assert (found["answer_f1"], found["no_answer_f1"]) == (0.75, 0.5)
    assert squad_metrics({k: v[:2] for k, v in columns.items()}).keys() == {"exact_match", "f1"}
    none = squad_metrics({k: v[2:] for k, v in columns.items()})
    assert none["no_answer_f1"] == 0.5
    assert "answer_f1" not in none, "of no rows there is none"
