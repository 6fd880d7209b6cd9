"""Vectors beside transformers' own, losses beside their formulas, other libraries' files."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bert_core.batches import collate
from bert_core.bundle.format import load_bundle
from bert_core.bundle.record import write_record
from bert_core.errors import ConfigError, CorpusError, FormatError, InputError
from bert_core.inference.predictor import Predictor
from bert_core.model.hf import encoder_config_from_huggingface
from bert_core.tasks.feature_extraction import (
    FeatureExtraction,
    FeatureExtractionOptions,
    FeatureExtractionParameters,
)
from bert_core.tasks.shapes import labelled
from bert_core.tasks.text_classification import TextClassification
from tests import tiny

WORDS = ["the", "sea", "is", "blue", "tree", "a", "green", "deep"]
TOKENIZER = tiny.tokenizer(WORDS)
SIZES = tiny.entries(
    TOKENIZER.vocab_size,
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=3,
    max_position_embeddings=24,
    initializer_range=0.5,
)
CONFIG = encoder_config_from_huggingface(SIZES)
TEXTS = ["the sea is blue", "a tree", "", "the deep sea is green and a tree is not"]
PAIRS: list[dict[str, Any]] = [
    {"text": "the sea", "text_pair": "blue", "negatives": ["tree", "green"]},
    {"text": "a tree", "text_pair": "green tree"},
    {"text": "deep", "text_pair": "the deep blue sea"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that transformers wrote, without a head."""
    from transformers import BertConfig, BertModel

    path = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).save_pretrained(path)
    TOKENIZER.save(path, 24)
    return path


def theirs(folder: Path, text: str) -> list[Tensor]:
    """transformers' vectors of every token, before the first layer and after each."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder).eval()
    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.inference_mode():
        output = model(**inputs, output_hidden_states=True)
    return [hidden[0] for hidden in output.hidden_states]


def close(ours: Any, wanted: Tensor) -> None:
    np.testing.assert_allclose(np.array(ours), wanted.numpy(), atol=1e-5)


def test_an_encoder_without_a_head_gives_the_mean_of_its_tokens_at_once(folder: Path) -> None:
    predictor = Predictor(folder, device="cpu")
    assert predictor.task.name == "feature-extraction"
    unit = FeatureExtractionParameters(normalize=True)
    for text, ours, scaled in zip(
        TEXTS, predictor.predict(TEXTS), predictor.predict(TEXTS, unit), strict=True
    ):
        mean = theirs(folder, text)[-1].mean(0)
        close(ours, mean)
        close(scaled, mean / mean.norm())


@pytest.mark.parametrize("layer", [1, 2, None])
def test_the_first_token_and_any_layer_can_be_asked_for(folder: Path, layer: int | None) -> None:
    options = {"pooling": "cls", "layer": layer, "normalize": True}
    predictor = Predictor(folder, device="cpu", task="feature-extraction", options=options)
    for text, ours in zip(TEXTS, predictor.predict(TEXTS), strict=True):
        vector = theirs(folder, text)[layer or 3][0]
        close(ours, vector / vector.norm())


def test_every_token_has_a_vector_where_that_is_asked_for(folder: Path) -> None:
    predictor = Predictor(folder, device="cpu")
    answers = predictor.predict(TEXTS, FeatureExtractionParameters(per_token=True))
    for text, ours in zip(TEXTS, answers, strict=True):
        close(ours, theirs(folder, text)[-1])
    with pytest.raises(InputError, match=r"inputs\[1\]: wanted one text, since per_token is set"):
        predictor.predict(
            ["a", {"text": "a", "text_pair": "b"}], FeatureExtractionParameters(per_token=True)
        )


def test_vectors_and_tokens_of_many_rows_go_through_the_model_together(folder: Path) -> None:
    """As in a server, where requests with other parameters meet."""
    predictor = Predictor(folder, device="cpu")
    each = FeatureExtractionParameters(per_token=True)
    rows = predictor.rows([*TEXTS, {"text": TEXTS[0], "text_pair": TEXTS[1]}])
    windows = [*predictor.encode(rows), *predictor.encode(rows[:2], each)]
    scores = predictor.forward(windows)
    alone = predictor.predict(TEXTS)
    close([one[0] for one in scores[:4]], torch.tensor(alone))
    close(scores[4], torch.tensor(alone[:2]))
    close(scores[5], theirs(folder, TEXTS[0])[-1])


def test_a_long_text_is_refused_or_cut_at_either_end(folder: Path) -> None:
    predictor = Predictor(folder, device="cpu")
    long = " ".join(["sea"] * 22 + ["tree"] * 22)
    with pytest.raises(InputError, match="set the parameter truncate to have it cut, or"):
        predictor.predict([long])
    for side, word in (("right", "sea"), ("left", "tree")):
        cut = FeatureExtractionParameters(truncate=True, truncation_direction=side)  # type: ignore[arg-type]
        close(predictor.predict([long], cut), torch.tensor(predictor.predict([f"{word} " * 22])))


def test_an_encoder_without_a_head_cuts_texts_where_its_tokenizer_does(
    folder: Path, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    shutil.copytree(folder, tmp_path / "short")
    TOKENIZER.save(tmp_path / "short", 8)
    texts = [*TEXTS, "the deep sea " * 9]
    wanted = SentenceTransformer(str(tmp_path / "short"), device="cpu").encode(texts)
    cut = FeatureExtractionParameters(truncate=True)
    close(Predictor(tmp_path / "short", "cpu").predict(texts, cut), torch.from_numpy(wanted))


def test_a_model_of_another_task_gives_vectors_too(tmp_path: Path) -> None:
    task = TextClassification(["ham", "spam"])
    tiny.bundle(tmp_path / "bundle", TOKENIZER, CONFIG, task=task)
    predictor = Predictor(tmp_path / "bundle", device="cpu", task="feature-extraction")
    [vector] = predictor.predict(["the sea"])
    close(vector, theirs(tmp_path / "bundle", "the sea")[-1].mean(0))
    with pytest.raises(ConfigError, match="options: wanted none, since a model for text-class"):
        Predictor(tmp_path / "bundle", options={"pooling": "cls"})


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [False, True])
def test_sentence_transformers_loads_a_bundle_and_what_is_written_for_it_is_read_again(
    pooling: Any, normalize: bool, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    options = FeatureExtractionOptions(pooling=pooling, normalize=normalize, max_length=8, layer=2)
    task = FeatureExtraction(options=options)
    path = tiny.bundle(tmp_path / "bundle", TOKENIZER, CONFIG, task=task)
    modules = json.loads((path / "modules.json").read_text())
    assert [one["path"] for one in modules] == ["", "1_Pooling", "2_Normalize"][: 2 + normalize]
    says = json.loads((path / "1_Pooling" / "config.json").read_text())
    assert says["word_embedding_dimension"] == 24
    assert [name for name, chosen in says.items() if chosen is True] == [
        f"pooling_mode_{'mean_tokens' if pooling == 'mean' else 'cls_token'}"
    ]
    ours = Predictor(path, device="cpu")
    assert ours.task.record == task.record
    assert "1_Pooling/config.json" in json.loads((path / "raybert.json").read_text())["files"]
    theirs = SentenceTransformer(str(path), device="cpu").encode(TEXTS)
    cut = FeatureExtractionParameters(truncate=True)
    close(ours.predict(TEXTS, cut), torch.from_numpy(theirs))
    (path / "raybert.json").unlink()  # as a folder that sentence-transformers wrote
    again = Predictor(path, device="cpu")
    assert again.predict(TEXTS[:2]) == ours.predict(TEXTS[:2])
    assert again.predict(["sea " * 30], cut) == again.predict(["sea " * 6])
    digest = again.bundle.digest
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    assert load_bundle(path).task is None, "another pooling is not ours"
    assert load_bundle(path).digest != digest
    (path / "modules.json").write_text("{}")
    with pytest.raises(FormatError, match=r"modules\.json: wanted a list, got an object"):
        load_bundle(path)


def test_invalid_options_are_refused(folder: Path) -> None:
    for options, message in (
        ({"pooling": "max"}, r"options.pooling: wanted one of mean, cls, got text \(\"max\"\)"),
        ({"layer": 0}, "layer: wanted at least 1, got 0"),
        ({"layer": 4}, "options.layer: wanted at most 3, the number of layers of the model, got 4"),
        ({"dimensions": [0]}, r"dimensions: wanted lengths of at least 1, got \[0\]"),
        ({"dimensions": [8, 25]}, "options.dimensions: wanted at most 24, the length of the"),
        ({"temperature": 0.0}, "temperature: wanted above 0, got 0.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Predictor(folder, task="feature-extraction", options=options)


def test_a_bundle_says_to_which_lengths_its_vectors_may_be_cut(tmp_path: Path) -> None:
    task = FeatureExtraction.from_rows(PAIRS, FeatureExtractionOptions(dimensions=[16, 8]))
    folder = tiny.bundle(tmp_path / "bundle", TOKENIZER, CONFIG, task=task)
    assert json.loads((folder / "config.json").read_text())["matryoshka_dimensions"] == [16, 8]
    (folder / "raybert.json").unlink()  # as a folder that sentence-transformers wrote
    read = load_bundle(folder).task
    assert isinstance(read, FeatureExtraction)
    assert read.chosen.dimensions == [16, 8]
    assert "matryoshka_dimensions" not in FeatureExtraction().config_entries()


@pytest.mark.parametrize("scored", [False, True])
def test_every_length_is_measured_as_vectors_that_are_so_long(scored: bool) -> None:
    rows = [
        {"text": f"{n}", "text_pair": f"{n} b", **({"score": n} if scored else {})}
        for n in range(9)
    ]
    answers = np.random.default_rng(0).normal(size=(9, 2, 12)).tolist()
    measured = FeatureExtraction(options=FeatureExtractionOptions(dimensions=[12, 5, 2]))
    found = measured.metrics(measured.compare(rows, answers))
    plain = FeatureExtraction()
    for length, ending in ((12, ""), (5, "_dim_5"), (2, "_dim_2")):
        cut = [[text[:length] for text in row] for row in answers]
        for name, value in plain.metrics(plain.compare(rows, cut)).items():
            assert found[f"{name}{ending}"] == pytest.approx(value, nan_ok=True)
    assert scored or "mrr_dim_5" in measured.baseline(rows), "a metric that can select"
    assert len(found) == 3 * len(plain.metrics(plain.compare(rows, answers)))


def test_an_option_that_is_gone_says_what_to_do_and_older_bundles_are_read(tmp_path: Path) -> None:
    message = "options.group_size: wanted none, since it is no longer an option: a row's"
    with pytest.raises(ConfigError, match=message):
        FeatureExtraction.options.check_given({"group_size": 32})
    task = FeatureExtraction.from_rows(PAIRS)
    folder = tiny.bundle(tmp_path / "bundle", TOKENIZER, CONFIG, task=task)
    record = json.loads((folder / "raybert.json").read_text())
    options = record["options"] | {"group_size": 16}
    names = list(record.pop("files"))
    write_record(folder, record | {"options": options}, names)
    bundle = load_bundle(folder)
    assert bundle.task is not None
    assert bundle.task.record == task.record


def loss_of(task: FeatureExtraction, rows: list[dict]) -> tuple[Any, Any]:
    """The part, and the vectors of each row's texts, scaled to length 1."""
    model = tiny.model(CONFIG, task.build_objective).double().eval()
    windows = task.encode(rows, TOKENIZER, 24, labelled=True)
    batch = collate(windows, TOKENIZER.pad_id)
    vectors = model.logits(batch)["embedding"].detach()
    unit = (vectors / vectors.norm(dim=1, keepdim=True)).split([len(one.ids) for one in windows])
    return model(batch)["embedding"], unit


def test_the_contrastive_loss_is_that_of_its_definition() -> None:
    task = FeatureExtraction.from_rows(PAIRS)
    part, vectors = loss_of(task, PAIRS)
    candidates = torch.cat([texts[1:] for texts in vectors])
    wanted, right, place = torch.zeros(()), 0, 0
    for texts in vectors:
        scores = candidates @ texts[0] / 0.05
        wanted = wanted - scores.log_softmax(0)[place]
        right += int(scores.argmax() == place)
        place += len(texts) - 1
    torch.testing.assert_close(part.sum, wanted.double())
    assert (part.count, int(part.correct)) == (3, right)


def test_a_rows_right_answers_are_not_its_negatives() -> None:
    rows: list[dict[str, Any]] = [
        {"text": "the sea", "text_pair": "blue"},
        {"text": "deep", "text_pair": "blue"},  # the same text is right
        {"text": "the sea", "text_pair": "green"},  # another is right for the same text
        {"text": "tree", "text_pair": "the sea"},  # the text itself
    ]
    part, vectors = loss_of(FeatureExtraction.from_rows(rows), rows)
    # The right one first, then those that it is told from.
    told_from = [[0], [1, 2, 3], [2], [3, 0, 1, 2]]
    wanted = torch.zeros(()).double()
    for row, places in enumerate(told_from):
        scores = torch.stack([vectors[place][1] for place in places]) @ vectors[row][0] / 0.05
        wanted = wanted - scores.log_softmax(0)[0]
    torch.testing.assert_close(part.sum, wanted)


def test_the_loss_of_scores_is_the_squared_error_of_the_cosine() -> None:
    rows: list[dict[str, Any]] = [
        {"text": "the sea", "text_pair": "blue", "score": 5.0},
        {"text": "a tree", "text_pair": "sea", "score": 1.0},
    ]
    task = FeatureExtraction.from_rows(rows)
    assert (task.chosen.loss, task.chosen.highest_score, task.joint) == ("cosine", 5.0, False)
    part, vectors = loss_of(task, rows)
    cosines = [float(each[0] @ each[1]) for each in vectors]
    assert float(part.sum.detach()) == pytest.approx(
        (cosines[0] - 1) ** 2 + (cosines[1] - 0.2) ** 2
    )
    assert (part.count, part.correct) == (2, None)


def test_ranks_are_among_all_texts_that_rows_are_compared_with() -> None:
    task = FeatureExtraction()
    rows: list[dict[str, Any]] = [
        {"text": "q", "text_pair": "north", "negatives": ["south"]},
        {"text": "r", "text_pair": "east"},
        {"text": "q", "text_pair": "east"},
    ]
    north, south, east = [0.0, 1.0], [0.0, -1.0], [2.0, 0.0]
    answers = [[[1.0, 3.0], north, south], [[-1.0, 2.0], east], [[1.0, 3.0], east]]
    columns = task.compare(rows, answers)
    # For q: north before east before south; for r: north, then east (−0.4), then south.
    assert columns["rank"].tolist() == [1, 2, 2]
    found = task.metrics(columns)
    assert (found["mrr"], found["recall_at_1"]) == pytest.approx(((1 + 1 / 2) / 2, 1 / 4))
    baseline = task.constant(rows)
    assert baseline is not None
    assert baseline["rank"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}], "row 1: wanted a text_pair"),
        (
            [PAIRS[1], PAIRS[1] | {"score": 1.0}],
            "row 2: wanted a score in every row or in none, row 1 has none",
        ),
        ([PAIRS[0] | {"score": 1.0}], "row 1: wanted a score or negatives, got both"),
        ([PAIRS[1] | {"score": -1.0}], "wanted a score above 0, the highest is -1"),
        (
            [PAIRS[0] | {"negatives": ["tree", "blue"]}],
            r'row 1: wanted negatives other than the text_pair, got text \("blue"\) as both',
        ),
        ([PAIRS[1] | {"scores": [1.0]}], "wanted negatives with scores, a teacher's, got none"),
        ([PAIRS[0] | {"scores": [1.0, 2.0]}], "wanted 3 scores, of the text_pair and then of each"),
        (
            [PAIRS[0] | {"scores": [1.0, 2.0, 3.0]}, PAIRS[0]],
            "row 2: wanted a teacher's scores in every row or in none, row 1 has a teacher's",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: list[dict], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        FeatureExtraction.from_rows(labelled(rows, FeatureExtraction.shapes(), {}, "rows"))


@pytest.mark.parametrize(("given", "loss"), [(None, "kl"), ("kl", "kl"), ("margin_mse",) * 2])
def test_a_teachers_scores_are_learnt_as_lists_or_by_their_margins(given: Any, loss: str) -> None:
    rows = [PAIRS[0] | {"scores": [9.0, 2.0, -1.0]}]
    task = FeatureExtraction.from_rows(rows, FeatureExtractionOptions(loss=given))
    assert (task.chosen.loss, task.joint) == (loss, False)
    [window] = task.encode(rows, TOKENIZER, 24, labelled=True)
    assert window.labels["similarities"].tolist() == [1.0, 9.0, 2.0, -1.0]
    with pytest.raises(CorpusError, match="have a teacher's scores, which are for kl or margin_m"):
        FeatureExtraction.from_rows(rows, FeatureExtractionOptions(loss="cosine"))


def test_queries_and_passages_have_prompts_of_their_own() -> None:
    options = FeatureExtractionOptions(
        prompts={"query": "the ", "passage": "a deep "},
        query_prompt="query",
        passage_prompt="passage",
    )
    task = FeatureExtraction(options=options)
    with_prompts = [
        {
            "text": f"the {row['text']}",
            "text_pair": f"a deep {row['text_pair']}",
            "negatives": [f"a deep {text}" for text in row.get("negatives", ())],
        }
        for row in PAIRS
    ]
    plain = FeatureExtraction().encode(with_prompts, TOKENIZER, 24)
    for ours, wanted in zip(task.encode(PAIRS, TOKENIZER, 24, labelled=True), plain, strict=True):
        assert [each.tolist() for each in ours.ids] == [each.tolist() for each in wanted.ids]
    by_name = FeatureExtractionParameters(prompt_name="passage")
    [alone] = task.encode([{"text": "sea"}], TOKENIZER, 24)
    [named] = task.encode([{"text": "sea"}], TOKENIZER, 24, parameters=by_name)
    assert alone.ids[0].tolist() == plain_ids("sea")
    assert named.ids[0].tolist() == plain_ids("a deep sea")
    with pytest.raises(
        InputError, match=r"query_prompt: wanted one of the option prompts \(none\)"
    ):
        FeatureExtractionOptions(query_prompt="query")


def plain_ids(text: str) -> list[int]:
    [window] = FeatureExtraction().encode([{"text": text}], TOKENIZER, 24)
    return window.ids[0].tolist()


def test_negatives_that_are_right_in_other_rows_are_counted() -> None:
    rows = [
        {"text": "q", "text_pair": "a", "negatives": ["b", "c"]},
        {"text": "q", "text_pair": "b", "negatives": ["c"]},
        {"text": "r", "text_pair": "c", "negatives": ["a"]},
    ]
    remarks = FeatureExtraction().remarks(rows)
    assert remarks["rows_with_negatives_that_are_right_elsewhere"] == 1


def test_rows_for_another_loss_than_the_one_named_are_refused() -> None:
    options = FeatureExtractionOptions(loss="cosine")
    with pytest.raises(CorpusError, match="rows that have no score, which are for contrastive"):
        FeatureExtraction.from_rows(PAIRS, options)
