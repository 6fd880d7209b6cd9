"""`benchmarks.squad` trains and scores both sides, on a machine without Ray and MLflow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bert_core.bundle.format import load_bundle
from tests import tiny

BARE = (
    "import sys; sys.modules['ray'] = sys.modules['mlflow'] = sys.modules['jsonargparse'] = None; "
    "from benchmarks.squad import main; main()"
)


def article(number: int) -> dict[str, object]:
    """Two questions about one passage."""
    context = "the sea is blue a tree is blue"
    questions = {"is the sea blue": "blue", "is blue": "a tree"}
    return {
        "title": str(number),
        "paragraphs": [
            {
                "context": context,
                "qas": [
                    {
                        "id": f"{number} {question}",
                        "question": question,
                        "answers": [{"text": answer, "answer_start": context.index(answer)}],
                    }
                    for question, answer in questions.items()
                ],
            }
        ],
    }


def test_no_article_is_on_both_sides_of_the_split() -> None:
    from benchmarks.squad import split_articles

    train, held_out = split_articles({"data": [article(number) for number in range(20)]}, None)
    articles = [{row["id"].split()[0] for row in rows} for rows in (train, held_out)]
    assert [len(each) for each in articles] == [18, 2]
    assert not articles[0] & articles[1]
    few, same = split_articles({"data": [article(number) for number in range(20)]}, 5)
    assert len(few) == 5
    assert same == held_out
    assert all(row in train for row in few)


def arguments(folder: Path) -> list[str]:
    model, data = folder / "model", folder / "train.json"
    tokenizer = tiny.tokenizer()
    tiny.bundle(model, tokenizer, tiny.encoder_config(tokenizer.vocab_size))
    data.write_text(json.dumps({"data": [article(number) for number in range(20)]}))
    output = ["--output", str(folder), "--json", str(folder / "result.json")]
    return ["--model", str(model), "--data", str(data), *output, "--seeds", "0", "1"]


@pytest.mark.drill
def test_it_runs_without_ray_and_mlflow(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", BARE, *arguments(tmp_path)], check=True, timeout=240)
    assert len(json.loads((tmp_path / "result.json").read_text())["results"]) == 4


def test_both_sides_are_scored_on_articles_that_neither_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.squad import main

    monkeypatch.setattr(sys, "argv", ["squad", *arguments(tmp_path)])
    main()
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["questions"], result["held_out_questions"]) == (36, 4)
    sides = [(each["side"], each["seed"]) for each in result["results"]]
    assert sides == [("ours", 0), ("trainer", 0), ("ours", 1), ("trainer", 1)]
    assert all(0 <= each["exact_match"] <= each["f1"] <= 1 for each in result["results"])
    bundle = load_bundle(tmp_path / "ours-1" / "bundle")
    assert bundle.task is not None
    assert len(bundle.trained_rows) == 2  # all articles ask the same two questions
