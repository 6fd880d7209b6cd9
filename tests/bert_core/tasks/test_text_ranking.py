"""Scores of query and passage beside CrossEncoder's own, both ways."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from bert_core.batches import collate
from bert_core.bundle.format import load_bundle
from bert_core.errors import ConfigError, CorpusError, FormatError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.shapes import labelled
from bert_core.tasks.text_ranking import TextRanking, TextRankingOptions, TextRankingParameters
from bert_core.tasks.text_regression import TextRegression
from bert_core.tasks.texts import TextOptions
from tests import tiny

TOKENIZER = tiny.tokenizer()
SIZES = tiny.entries(TOKENIZER.vocab_size, initializer_range=0.5)
CONFIG = tiny.encoder_config(TOKENIZER.vocab_size, initializer_range=0.5)
PAIRS = [
    ("the sea", "is blue"),
    ("the sea", "a tree"),
    ("a tree", "the tree is blue " * 20),
    ("sea the tree " * 20, "blue"),
    ("", "the sea"),
]
INPUTS = [{"text": first, "text_pair": second} for first, second in PAIRS]
CUT = TextRankingParameters(truncation=True)
ROWS: list[dict[str, Any]] = [
    {"text": "the sea", "text_pair": "is blue", "score": 3.0},
    {"text": "the sea", "text_pair": "a tree", "score": 0.0},
    {"text": "a tree", "text_pair": "blue", "score": 1.5},
]


def classifier(folder: Path, outputs: int = 1, **entries: Any) -> Path:
    """A model with a head as transformers writes it, and more entries in its config.json."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(**SIZES | {"num_labels": outputs})
    BertForSequenceClassification(config).save_pretrained(folder)
    TOKENIZER.save(folder, 32)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return folder


def scores(predictor: Predictor, parameters: TextRankingParameters = CUT) -> list[float]:
    return [answer["score"] for answer in predictor.predict(INPUTS, parameters)]


IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"
ENTRIES = {
    "version-4": {"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}},
    "version-4-sigmoid": {"sentence_transformers": {"activation_fn": SIGMOID}},
    "version-4-default": {"sentence_transformers": {"version": "4.1.0"}},
    "version-3": {"sbert_ce_default_activation_function": IDENTITY},
    "code-of-others": {"sbert_ce_default_activation_function": "mine.Doubled"},
}


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_an_older_cross_encoder_gives_its_scores(
    entries: dict[str, Any], tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    folder = classifier(tmp_path / "model", **entries)
    theirs = CrossEncoder(str(folder), device="cpu").predict(PAIRS)
    predictor = Predictor(folder, device="cpu")
    assert predictor.task.name == "text-ranking"
    np.testing.assert_allclose(scores(predictor), theirs, atol=1e-5)


@pytest.mark.parametrize("max_length", [None, 12])
@pytest.mark.parametrize("activation", [torch.nn.Sigmoid, torch.nn.Identity])
@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_cross_encoder_saves_gives_its_scores_cut_where_it_cuts(
    activation: type[torch.nn.Module], max_length: int | None, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    peer = CrossEncoder(
        str(classifier(tmp_path / "model")), device="cpu", max_length=max_length,
        activation_fn=activation(),
    )  # fmt: skip
    peer.save_pretrained(str(tmp_path / "saved"))
    predictor = Predictor(tmp_path / "saved", device="cpu")
    assert predictor.task.name == "text-ranking"
    np.testing.assert_allclose(scores(predictor), peer.predict(PAIRS), atol=1e-5)
    raw = scores(predictor, TextRankingParameters(truncation=True, raw_scores=True))
    outputs = peer.predict(PAIRS, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(raw, outputs, atol=1e-5)


@pytest.mark.parametrize("max_length", [None, 12])
@pytest.mark.parametrize("activation", ["sigmoid", "identity"])
@pytest.mark.filterwarnings("ignore")
def test_cross_encoder_loads_a_bundle_and_what_is_written_for_it_is_read_again(
    activation: Any, max_length: int | None, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    task = TextRanking(options=TextRankingOptions(activation=activation, max_length=max_length))
    folder = tiny.bundle(tmp_path / "bundle", TOKENIZER, CONFIG, task=task)
    ours = scores(Predictor(folder, device="cpu"))
    peer = CrossEncoder(str(folder), device="cpu")
    np.testing.assert_allclose(ours, peer.predict(PAIRS), atol=1e-5)
    (folder / "raybert.json").unlink()
    again = Predictor(folder, device="cpu")
    assert again.task.name == "text-ranking"
    assert scores(again) == ours


@pytest.mark.parametrize(
    ("outputs", "entries", "name"),
    [
        (1, {}, "text-regression"),
        (3, ENTRIES["version-4"], "text-classification"),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "text-regression"),
    ],
)
def test_other_heads_do_not_rank(
    outputs: int, entries: dict[str, Any], name: str, tmp_path: Path
) -> None:
    task = load_bundle(classifier(tmp_path, outputs, **entries)).task
    assert task is not None
    assert task.name == name


def test_a_cross_encoder_with_another_activation_gives_numbers_but_does_not_rank(
    tmp_path: Path,
) -> None:
    from sentence_transformers import CrossEncoder

    tanh = "torch.nn.modules.activation.Tanh"
    entries: dict[str, Any] = {"sentence_transformers": {"activation_fn": tanh}}
    folder = classifier(tmp_path / "model", **entries)
    with pytest.raises(FormatError, match="wanted a bundle for text-ranking, this one is for text"):
        Predictor(folder, device="cpu", task="text-ranking")
    predictor = Predictor(folder, device="cpu")
    assert predictor.also == {}
    peer = CrossEncoder(str(folder), device="cpu")
    numbers = scores(predictor, predictor.task.parameters(truncation=True))  # type: ignore[arg-type, call-arg]
    np.testing.assert_allclose(np.tanh(numbers), peer.predict(PAIRS), atol=1e-5)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.filterwarnings("ignore")
def test_a_cross_encoder_that_reads_pairs_in_another_way_is_refused(
    outputs: int, tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    prompts, model = {"query": "find: "}, str(classifier(tmp_path / "model", outputs))
    for default in ("query", None):
        peer = CrossEncoder(model, device="cpu", prompts=prompts, default_prompt_name=default)
        folder = tmp_path / f"default-{default}"
        peer.save_pretrained(str(folder))
        if default is not None:
            with pytest.raises(FormatError, match=r"wanted no default_prompt_name, .*got 'query'"):
                load_bundle(folder)
        elif outputs == 1:
            wanted = peer.predict(PAIRS)
            np.testing.assert_allclose(scores(Predictor(folder, "cpu")), wanted, atol=1e-5)
        else:
            assert load_bundle(folder).task is not None
    settings = folder / "sentence_bert_config.json"
    changed = json.loads(settings.read_text()) | {"processing_kwargs": {"text": {"max_length": 6}}}
    settings.write_text(json.dumps(changed))
    with pytest.raises(FormatError, match=r"got processing_kwargs, which changes how it reads"):
        load_bundle(folder)


@pytest.mark.drill
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_gives_pairs_a_number_ranks_them_as_cross_encoder_does(
    tmp_path: Path,
) -> None:
    from sentence_transformers import CrossEncoder

    folder = classifier(tmp_path)
    predictor = Predictor(folder, device="cpu")
    ranking = predictor.also["text-ranking"]
    assert ranking.backend is predictor.backend
    wanted = CrossEncoder(str(folder), device="cpu").predict(PAIRS)
    np.testing.assert_allclose(scores(ranking), wanted, atol=1e-5)
    plain = Predictor(folder, "cpu", task="text-ranking", options={"activation": "identity"})
    numbers = predictor.predict(INPUTS, predictor.task.parameters(truncation=True))  # type: ignore[call-arg]
    assert plain.predict(INPUTS, CUT) == numbers
    back = Predictor(tiny.bundle(tmp_path / "own", TOKENIZER, CONFIG, task=TextRanking()))
    assert list(back.also) == ["text-regression"]
    assert back.also["text-regression"].predict(INPUTS[:2]) == back.predict(
        INPUTS[:2], TextRankingParameters(raw_scores=True)
    )
    single = TextRegression(options=TextOptions(pairs=False))
    folder = tiny.bundle(tmp_path / "single", TOKENIZER, CONFIG, task=single)
    assert Predictor(folder, device="cpu").also == {}
    with pytest.raises(FormatError, match="wanted a bundle for text-ranking, this one is for text"):
        Predictor(folder, task="text-ranking")
    with pytest.raises(ConfigError, match="options: wanted none, since a model for text-regressio"):
        Predictor(folder, options={"pairs": True})


def test_the_loss_is_binary_cross_entropy_against_shares_of_the_highest_score() -> None:
    task = TextRanking.from_rows(ROWS)
    assert task.chosen.highest_score == 3.0
    model = tiny.model(CONFIG, task.build_objective).eval()
    batch = collate(task.encode(ROWS, TOKENIZER, 32, labelled=True), TOKENIZER.pad_id)
    logits = model.logits(batch)["classification"][:, 0]
    part = model(batch)["classification"]
    wanted = functional.binary_cross_entropy_with_logits(
        logits, torch.tensor([1.0, 0.0, 0.5]), reduction="sum"
    )
    torch.testing.assert_close(part.sum, wanted)
    assert part.count == 3
    assert int(part.correct) == int(((logits > 0) == torch.tensor([True, False, False])).sum())


def test_scores_from_0_to_1_are_taken_as_they_are() -> None:
    rows = [row | {"score": row["score"] / 4} for row in ROWS]
    assert TextRanking.from_rows(rows).chosen.highest_score == 1.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ([-1.0, 0.0], "row 1: wanted a score of at least 0, which means not relevant, got -1"),
        ([1.0, 1.0], "training rows: wanted at least two different scores, found 2 rows"),
    ],
)
def test_rows_that_nothing_can_be_learned_from_are_refused(
    changed: list[float], message: str
) -> None:
    rows = [ROWS[0] | {"score": score} for score in changed]
    with pytest.raises(CorpusError, match=message):
        TextRanking.from_rows(labelled(rows, TextRanking.shapes(), {}, "rows"))


def test_a_score_above_the_maximum_is_refused() -> None:
    task = TextRanking.from_rows(ROWS)
    with pytest.raises(CorpusError, match="row 1: wanted a score of at most 3, the highest that"):
        task.encode([ROWS[0] | {"score": 4.0}], TOKENIZER, 32, labelled=True)


def test_rows_of_a_query_stay_together() -> None:
    groups = TextRanking.groups(ROWS)
    assert groups[0] == groups[1] != groups[2]
    assert len(set(TextRanking.digests(ROWS))) == 3


def test_a_rows_fault_is_its_share_of_misordered_passages() -> None:
    rows = [
        {"text": query, "text_pair": f"{place}", "score": score}
        for query, score in (("q", 2.0), ("q", 1.0), ("q", 0.0), ("r", 1.0))
        for place in [score]
    ]
    task = TextRanking()
    answers = [{"score": score} for score in (0.1, 0.9, 0.1, 0.0)]
    columns = task.compare(rows, answers)
    assert task.faults(columns).tolist() == [0.75, 0.5, 0.25, 0.0]
    wrong = task.wrong(columns)
    assert wrong is not None
    assert wrong.tolist() == [True, True, True, False]


@pytest.mark.parametrize("loss", ["listnet", "lambda"])
def test_the_passages_of_a_query_are_learnt_together(loss: Any) -> None:
    rows = [
        {"text": "q", "text_pair": "a", "score": 3.0},
        {"text": "r", "text_pair": "b", "score": 0.0},
        {"text": "q", "text_pair": "c", "score": 0.0},
    ]
    task = TextRanking.from_rows(rows, TextRanking.options(loss=loss))
    assert (task.joint, task.kept_together) == (True, "queries")
    windows = task.encode(rows, tiny.tokenizer(), 24, labelled=True)
    labels = [{name: value.tolist() for name, value in one.labels.items()} for one in windows]
    assert labels == [
        {"labels": [[3.0]], "queries": [0], "query_shares": [0.5]},
        {"labels": [[0.0]], "queries": [1], "query_shares": [1.0]},
        {"labels": [[0.0]], "queries": [0], "query_shares": [0.5]},
    ]
    with pytest.raises(ConfigError, match="highest_score: wanted none with the loss"):
        TextRanking.from_rows(rows, TextRanking.options(loss=loss, highest_score=3.0))
    with pytest.raises(CorpusError, match="wanted a query with passages of different scores"):
        TextRanking.from_rows(rows[:2], TextRanking.options(loss=loss))


def test_grades_whose_gain_is_too_large_for_numbers_are_refused() -> None:
    rows = [{"text": "q", "text_pair": f"{n}", "score": 100.0 * n} for n in range(2)]
    with pytest.raises(CorpusError, match="scores of at most 60 for the loss lambda, whose gain"):
        TextRanking.from_rows(rows, TextRanking.options(loss="lambda"))
