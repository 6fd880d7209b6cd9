"""From a pretrained bundle to the registry: fine-tune, evaluate, publish, predict."""

import json
import math
import re
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from huggingface_hub import ModelCard, ModelCardData

from bert_core import files
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError, CorpusError
from bert_core.manifest import read_manifest
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.text_classification import TextClassification
from pipelines import evaluate, finetune, publish
from pipelines.corpus.labelled import LabelledConfig
from pipelines.finetune import FinetuneConfig, build_seed_model
from pipelines.publish import PublishConfig
from pipelines.training import seeds
from pipelines.training.labelled_sets import divided, read_parts, read_sets
from pipelines.training.records import read_records
from pipelines.training.selection import SelectionConfig
from tracking.models.references import Reference
from tracking.models.registry import champion
from tracking.store.server import connect

if TYPE_CHECKING:
    import torch

    from bert_core.objectives.base import ObjectiveModel


@pytest.fixture(scope="module")
def another(evaluated: Any, once: Any) -> Path:
    """A bundle that was fine-tuned on other rows of the same set."""

    def run(output: Path) -> None:
        finetune.run(replace(evaluated.finetune(output), seeds=(5,), epochs=0.5))

    made: Path = once.made("finetune-5", run)
    return made / "bundle"


def test_every_seed_is_measured_and_the_first_is_the_bundle(finetuned: Any) -> None:
    from bert_core.bundle.format import load_bundle

    counts = read_manifest(str(finetuned.folder / "finetune")).counts
    assert [seed["seed"] for seed in counts["seeds"]] == [0, 1]
    assert counts["train_rows"] == 32
    bundle = load_bundle(finetuned.folder / "finetune" / "bundle")
    assert bundle.task is not None
    assert bundle.task.labels == ["early", "late"]
    assert bundle.metrics["accuracy"] == counts["seeds"][0]["accuracy"]
    assert bundle.lineage["from_scratch"] is False
    rows = [json.loads(line) for line in Path(finetuned.rows.source).read_text().splitlines()]
    label_of = {row["text"]: row["label"] for row in rows}
    assert len(bundle.examples) == 3
    assert {label_of[text] for text in bundle.examples[:2]} == {"early", "late"}


def test_transformers_loads_the_bundle_and_gives_equal_logits(finetuned: Any) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from bert_core.inference.predictor import Predictor

    folder = finetuned.folder / "finetune" / "bundle"
    texts = ["Return the number of bytes.", "Open a file, and close it again."]
    predictor = Predictor(folder, device="cpu")
    ours = np.stack(predictor.forward(predictor.encode(predictor.rows(texts))))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    theirs = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.detach().numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_optimizer_moves_the_words_alone_that_rows_have(
    finetuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bert_core.bundle.format import load_bundle
    from bert_core.train.optim import build_optimizer
    from pipelines.training import worker

    moved: list[int] = []

    def watched(model: "ObjectiveModel", *settings: Any) -> "torch.optim.Optimizer":
        moved.append(len(model.encoder.embeddings.word_embeddings.weight))
        return build_optimizer(model, *settings)

    monkeypatch.setattr(worker, "build_optimizer", watched)
    config = replace(finetuned.finetune(tmp_path / "out"), seeds=(0,))
    finetune.run(config)
    bundle = load_bundle(config.model)
    rows = map(json.loads, Path(finetuned.rows.source).read_text().splitlines())
    read = {word for row in rows for word in bundle.tokenizer.inner.encode(row["text"]).ids}
    # Padding and the witness beside those of 32 rows, cut to 32 tokens.
    assert moved[0] <= len(read) + 2 < bundle.encoder_config.embeddings.vocab_size


@pytest.fixture(scope="module")
def selecting(pretrained: Any, tmp_path_factory: pytest.TempPathFactory) -> FinetuneConfig:
    """A run that has no rest until it has found nothing better twice."""
    return replace(
        pretrained.finetune(tmp_path_factory.mktemp("selecting") / "out"),
        selection=SelectionConfig(share=0.25, every_epochs=1 / 3, patience=2),
        epochs=30.0,
        layer_decay=0.9,
    )


def test_the_weights_that_do_best_on_training_rows_kept_out_are_taken(
    selecting: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> Any:
        raise RuntimeError("killed before the bundle")

    with monkeypatch.context() as patch:
        patch.setattr(seeds, "write_bundle", killed)
        with pytest.raises(RuntimeError, match="killed"):
            finetune.run(selecting)
    folder = Path(selecting.output)
    written = sorted(path.stat().st_mtime_ns for path in folder.glob("checkpoints/*/*/*"))
    counts = finetune.run(selecting).counts
    again = sorted(path.stat().st_mtime_ns for path in folder.glob("checkpoints/*/*/*"))
    assert again == written, "what had stopped early was trained on"
    assert (counts["train_rows"], counts["selection_rows"]) == (24, 8)
    records = read_records(folder)
    slots = counts["steps"] + 2
    for index, seed in enumerate(counts["seeds"]):
        measured = {
            step - index * slots: numbers["selection/task/accuracy"]
            for step, numbers in records.items()
            if step // slots == index and "selection/task/accuracy" in numbers
        }
        best = max(measured.values())
        assert seed["selection_accuracy"] == best
        assert seed["steps"] == min(step for step, value in measured.items() if value == best)
        assert max(measured) == seed["steps"] + 2, "it went on after two that were no better"
    scored = [step for step, numbers in records.items() if "held_out/loss" in numbers]
    assert scored == [slots - 1, 2 * slots - 1], "published rows are scored once a seed"


def test_selection_rows_are_not_trained_on_and_are_the_same_for_every_seed(
    selecting: FinetuneConfig,
) -> None:
    rows = [{"text": str(number)} for number in range(40)]
    groups = TextClassification.groups(rows)
    parts = divided(rows, groups, selecting.selection)
    assert len(parts["selection"]) == 10
    texts = {name: {row["text"] for row in part} for name, part in parts.items()}
    assert not texts["train"] & texts["selection"]
    assert divided(rows, groups, selecting.selection) == parts
    assert divided(rows, groups, replace(selecting.selection, seed=1)) != parts
    assert divided(rows, groups, SelectionConfig()) == {"train": rows}


def test_rows_of_one_passage_are_all_trained_on_or_all_select() -> None:
    rows = [{"question": str(n), "context": str(n % 9), "answers": []} for n in range(45)]
    for seed in range(5):
        selection = SelectionConfig(share=0.25, seed=seed)
        parts = divided(rows, QuestionAnswering.groups(rows), selection)
        passages = {name: {row["context"] for row in part} for name, part in parts.items()}
        assert not passages["train"] & passages["selection"]
        assert len(parts["selection"]) == 10, "as many whole passages as a quarter holds"
        assert sum(map(len, parts.values())) == 45
    one_passage = QuestionAnswering.groups([row | {"context": "one"} for row in rows])
    with pytest.raises(ConfigError, match=r"share: .* room for a group .* smallest group has 45"):
        divided(rows, one_passage, SelectionConfig(share=0.25))


@pytest.mark.usefixtures("forked")
def test_two_workers_select_and_score_as_one_process_does(
    selecting: FinetuneConfig, tmp_path: Path
) -> None:
    """Without dropout, which is drawn by rank."""
    from bert_core.bundle.format import About, load_bundle
    from bert_core.bundle.weights import build_model
    from bert_core.bundle.writing import save_bundle

    teacher = load_bundle(selecting.model)
    encoder = teacher.encoder_config.adapted(hidden_dropout_prob=0.0, attention_dropout=0.0)
    model = build_model(replace(teacher, encoder_config=encoder), [])
    save_bundle(tmp_path / "dry", model, teacher.tokenizer, About())
    alone = replace(selecting, output=str(tmp_path / "0"), model=str(tmp_path / "dry"), seeds=(0,))
    two = replace(alone, output=str(tmp_path / "2"), num_workers=2)
    counts = [finetune.run(config).counts for config in (alone, two)]
    for each in counts:
        assert each["seeds"][0]["steps"] < each["steps"]
    curves = [
        [numbers["loss"] for numbers in read_records(tmp_path / name).values() if "loss" in numbers]
        for name in ("0", "2")
    ]
    assert curves[0][:4] == pytest.approx(curves[1][:4], rel=1e-4)
    assert counts[0]["accuracy_mean"] == pytest.approx(counts[1]["accuracy_mean"], abs=0.1)
    examples = [load_bundle(f"{config.output}/bundle").examples for config in (alone, two)]
    assert examples[0] == examples[1] != ()


def test_a_metric_that_cannot_select_is_named_before_training(selecting: FinetuneConfig) -> None:
    config = replace(selecting, selection=replace(selecting.selection, metric="bleu"))
    with pytest.raises(ConfigError, match=r"selection.metric: wanted one of loss, accuracy.*bleu"):
        read_parts(config, TextClassification, None)


def test_a_head_is_taken_over_with_its_labels_or_not_at_all(finetuned: Any, tmp_path: Path) -> None:
    import torch

    from bert_core.bundle.format import About, load_bundle
    from bert_core.bundle.weights import build_model
    from bert_core.bundle.writing import save_bundle
    from bert_core.model.sharing import plain_state

    config = finetuned.finetune(tmp_path / "out")
    made = load_bundle(finetuned.folder / "finetune" / "bundle")
    prefix = f"objectives.{TextClassification.objective}."
    head = next(name for name in made.state if name.startswith(prefix) and name.endswith("weight"))
    assert made.task is not None

    def started_from(labels: list[str]) -> "tuple[list[str], torch.Tensor]":
        folder = tmp_path / "-".join(labels)
        given = TextClassification(labels)
        model = build_model(made, [given.build_objective(made.encoder_config)], require_heads=True)
        save_bundle(folder, model, made.tokenizer, About(task=given))
        task, _ = read_sets(config, load_bundle(folder))
        started = build_seed_model(folder, task, config.dropout, from_scratch=False, seed=0)
        return task.labels, plain_state(started)[head]

    labels = made.task.labels
    backwards = labels[::-1]
    assert labels != backwards
    found, weight = started_from(backwards)
    assert found == backwards, "the rows' labels take the head's order"
    assert torch.equal(weight, made.state[head])
    found, weight = started_from([f"LABEL_{number}" for number in range(len(labels))])
    assert found == labels
    assert not torch.equal(weight, made.state[head])


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_without_held_out_rows_nothing_is_scored_on_them(
    finetuned: Any, tmp_path: Path, share: float
) -> None:
    from bert_core.bundle.format import load_bundle
    from bert_core.inference.predictor import Predictor

    config = replace(finetuned.finetune(tmp_path / "out"), held_out=None, epochs=0.5)
    done = finetune.run(replace(config, selection=SelectionConfig(share=share)))
    assert done.inputs.keys() == {"model", "train"}
    assert not {"held_out_rows", "accuracy_mean", "baseline_accuracy"} & done.counts.keys()
    assert ("selection_accuracy_mean" in done.counts) == bool(share)
    assert not any("held_out/loss" in each for each in read_records(tmp_path / "out").values())
    bundle = load_bundle(tmp_path / "out" / "bundle")
    assert len(bundle.examples) == (3 if share else 0), "of selection rows, never of training rows"
    assert Predictor(bundle, device="cpu").predict(["Open a file."])


def test_a_model_that_learnt_little_is_told_to_learn_more(
    pretrained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    still = replace(pretrained.finetune(tmp_path / "still"), lr=1e-9, seeds=(0,), epochs=0.5)
    finetune.run(still)
    told = capsys.readouterr().out
    assert re.search(
        r"finetune: \S+ is complete\. .* accuracy \d+\.\d\s% on \d+ held-out rows", told
    )
    assert "an answer that ignores the input has accuracy" in told
    assert "try more epochs than 0.5, or a higher lr than 1e-09 (small encoders take 0.001)" in told


def test_a_model_that_learnt_is_not_told_to_learn_more(
    pretrained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(pretrained.finetune(tmp_path / "learnt"), lr=2e-3, seeds=(0,), epochs=12.0)
    finetune.run(config)
    assert "try more epochs" not in capsys.readouterr().out


def test_from_scratch_takes_fresh_weights_and_dropout_is_as_configured(
    finetuned: Any, tmp_path: Path
) -> None:
    from bert_core.bundle.format import load_bundle

    config = replace(finetuned.finetune(tmp_path / "scratch"), from_scratch=True, epochs=0.5)
    dropout = {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.0}
    finetune.run(replace(config, examples=0, **dropout))
    encoder = load_bundle(tmp_path / "scratch" / "bundle").encoder_config
    assert (encoder.hidden_dropout_prob, encoder.attention.dropout) == (0.25, 0.0)
    words = "encoder.embeddings.word_embeddings.weight"
    scratch = load_bundle(tmp_path / "scratch" / "bundle").state[words]
    pretrained = load_bundle(finetuned.folder / "pretrain" / "bundle").state[words]
    assert "examples" not in files.read_json(str(tmp_path / "scratch" / "bundle" / "raybert.json"))
    assert np.corrcoef(scratch.flatten(), pretrained.flatten())[0, 1] < 0.1


def test_evaluation_has_every_row_once_and_in_order_and_its_accuracy_is_theirs(
    evaluated: Any,
) -> None:
    folder = evaluated.folder / "evaluate"
    rows = [json.loads(line) for line in Path(evaluated.rows.source).read_text().splitlines()]
    table = pq.read_table(folder / "predictions.parquet").to_pylist()
    assert [row["text"] for row in table] == [row["text"] for row in rows]
    right = np.mean([row["predicted_label"] == row["label"] for row in table])
    counts = read_manifest(str(folder)).counts
    assert counts["accuracy"] == pytest.approx(right)
    assert (folder / "answers.png").stat().st_size > 1000


def test_an_evaluation_lists_the_worst_errors(evaluated: Any, tmp_path: Path) -> None:
    folder = evaluated.folder / "evaluate"
    table = pq.read_table(folder / "predictions.parquet").to_pylist()
    counts = read_manifest(str(folder)).counts
    wrong = [row for row in table if row["predicted_label"] != row["label"]]
    lines = [json.loads(line) for line in (folder / "worst.jsonl").read_text().splitlines()]
    assert counts["wrong_rows"] == len(wrong)
    assert len(lines) == min(50, len(wrong))
    surest = sorted((row["predicted_score"] for row in wrong), reverse=True)
    assert [line["confidence"] for line in lines] == surest[: len(lines)]
    for line in lines:
        row = table[line["row"] - 1]
        assert line["fault"] == 1
        assert (line["input"], line["wanted"]) == ({"text": row["text"]}, {"label": row["label"]})
        assert line["answer"] == {"label": row["predicted_label"], "score": row["predicted_score"]}
    classes = json.loads((folder / "classes.json").read_text())
    assert {label: figures["support"] for label, figures in classes.items()} == Counter(
        row["label"] for row in table
    )
    usual = max(figures["support"] for figures in classes.values())
    assert counts["baseline_accuracy"] == pytest.approx(usual / len(table))
    few = replace(evaluated.evaluate(tmp_path / "few"), worst=3)
    evaluate.run(few)
    assert (tmp_path / "few" / "worst.jsonl").read_text().splitlines() == [
        json.dumps(line, ensure_ascii=False) for line in lines[:3]
    ]


@pytest.mark.usefixtures("forked")
def test_evaluation_on_workers_is_the_same(evaluated: Any, tmp_path: Path) -> None:
    evaluate.run(replace(evaluated.evaluate(tmp_path / "two"), num_workers=2))
    two, none = (
        pq.read_table(folder / "predictions.parquet").to_pylist()
        for folder in (tmp_path / "two", evaluated.folder / "evaluate")
    )
    assert [r["predicted_label"] for r in two] == [r["predicted_label"] for r in none]
    ours, theirs = ([r["predicted_score"] for r in each] for each in (two, none))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.guard
def test_the_champion_predicts_from_a_process_that_has_only_the_package(
    evaluated: Any, tmp_path: Path
) -> None:
    from bert_core.inference.predictor import Predictor

    config = PublishConfig(
        output=str(tmp_path / "publish"),
        model=str(evaluated.folder / "finetune" / "bundle"),
        evaluation=str(evaluated.folder / "evaluate"),
        name="early-or-late",
        num_workers=0,
        tracking_uri=evaluated.tracking_uri,
    )
    counts = publish.run(config).counts
    assert counts["is_champion"]
    code = """
import mlflow, sys
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/early-or-late@champion")
print(model.predict(["Return the number of bytes."]).to_dict("records")[0]["label"])
"""
    command = [sys.executable, "-c", code, evaluated.tracking_uri]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    predictor = Predictor(evaluated.folder / "finetune" / "bundle", device="cpu")
    best = predictor.predict(["Return the number of bytes."])[0][0]
    assert done.stdout.strip().splitlines()[-1] == best["label"]


def test_a_version_carries_the_card_of_its_model(evaluated: Any, tmp_path: Path) -> None:
    from bert_core.bundle.format import load_bundle

    bundle, folder = evaluated.folder / "finetune" / "bundle", evaluated.folder / "evaluate"
    config = PublishConfig(
        output=str(tmp_path / "publish"), model=str(bundle), evaluation=str(folder),
        name="carded", num_workers=0, tracking_uri=evaluated.tracking_uri,
    )  # fmt: skip
    why = publish.run(config).counts["why"]
    text = (
        Reference.parse("models:/carded@champion").fetch(uri=evaluated.tracking_uri) / "README.md"
    ).read_text()
    assert text == (tmp_path / "publish" / "model_card.md").read_text()
    version = connect(evaluated.tracking_uri).get_model_version("carded", "1")
    described = version.description or ""
    assert repr(load_bundle(bundle).examples[0]) in text
    assert described.startswith("# carded, version 1\n")
    assert "| computing: steps that were kept |" in described
    assert described[:4000] in text
    data = ModelCardData(**ModelCard(text).data.to_dict())
    counts = read_manifest(str(folder)).counts
    assert {each.metric_type: each.metric_value for each in data.eval_results or []} == {
        name: counts[name]
        for name in ("accuracy", "macro_f1", "matthews", "f1_of_early", "f1_of_late")
    }
    row = (
        f"| accuracy | {counts['accuracy']:.4g} | {counts['accuracy_low']:.4g} to "
        f"{counts['accuracy_high']:.4g} | {counts['baseline_accuracy']:.4g} |"
    )
    assert row in text
    assert f"{why[0].upper()}{why[1:]}." in text
    assert counts["rows_seen_in_training"] >= 32, "they were drawn from these rows"
    assert f"**{counts['rows_seen_in_training']:,} of them trained or selected it**" in text
    shards = read_manifest(str(evaluated.folder / "shards"))
    made_of = [
        ("corpus", shards.inputs["corpus"], f"{shards.counts['documents']:,} documents"),
        ("vocabulary", Tokenizer.load(str(evaluated.folder / "vocab")).digest, "1,000 tokens"),
        ("shards", shards.digest, f"{shards.counts['rows']:,} rows"),
        ("train", files.sha256_of(evaluated.rows.source), "32 rows"),
        ("model", load_bundle(bundle).lineage["parent"], "made by `raybert pretrain`"),
        ("**this model**", load_bundle(bundle).digest, "made by `raybert finetune`"),
    ]
    for name, digest, fact in made_of:
        (line,) = {line for line in text.splitlines() if line.startswith(f"| {name} | `{digest}`")}
        assert fact in line
    recipes = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    tuned, first = (tomllib.loads(recipe) for recipe in recipes)
    assert tuned["lr"] == 1e-3
    assert tuned["seeds"] == [0, 1]
    assert first["variant"] == "bert-tiny"


def test_a_champion_of_another_task_stays_and_is_not_compared(
    evaluated: Any, tmp_path: Path
) -> None:
    config = PublishConfig(
        output=str(tmp_path / "publish"), model=str(evaluated.folder / "finetune" / "bundle"),
        evaluation=str(evaluated.folder / "evaluate"), name="of-two-tasks", num_workers=0,
        tracking_uri=evaluated.tracking_uri,
    )  # fmt: skip
    publish.run(config)
    told = {"out_of_scope": "late"}
    other = replace(evaluated.finetune(tmp_path / "other"), options=told, seeds=(0,), epochs=0.5)
    finetune.run(other)
    measured = replace(evaluated.evaluate(tmp_path / "evaluate"), model=f"{other.output}/bundle")
    evaluate.run(measured)
    second = replace(
        config, output=str(tmp_path / "second"), model=measured.model, evaluation=measured.output
    )
    counts = publish.run(second).counts
    assert not counts["is_champion"]
    assert counts["why"] == (
        "version 1 stays the champion: it is for text-classification "
        '{"pairs": false, "multi_label": false, "out_of_scope": null}, this bundle for '
        'text-classification {"pairs": false, "multi_label": false, "out_of_scope": "late"}, so '
        "they are not compared; --force makes version 2 the champion anyway"
    )
    assert counts["why"][1:] in (tmp_path / "second" / "model_card.md").read_text()


def test_a_model_is_compared_on_rows_that_trained_neither(
    evaluated: Any, another: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bert_core.bundle.format import load_bundle

    config = PublishConfig(
        output=str(tmp_path / "publish"), model=str(evaluated.folder / "finetune" / "bundle"),
        evaluation=str(evaluated.folder / "evaluate"), name="of-its-own-rows", num_workers=0,
        tracking_uri=evaluated.tracking_uri,
    )  # fmt: skip
    assert publish.run(config).counts["is_champion"], "there is none to compare it with"
    lines = Path(evaluated.rows.source).read_text().splitlines()
    bundle = load_bundle(config.model)
    task = TextClassification(["early", "late"])
    seen = bundle.has_seen(task, [json.loads(line) for line in lines])
    unseen = [line for line, out in zip(lines, seen, strict=True) if not out]
    assert len(lines) / 2 < len(unseen) < len(lines)

    def second(name: str, lines: list[str]) -> str:
        """Why the other one is the champion or not, by these rows in another file and order."""
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in reversed(lines)))
        measured = replace(
            evaluated.evaluate(tmp_path / f"evaluate-{name}"),
            model=str(another),
            held_out=LabelledConfig(source=str(path)),
        )
        counts = evaluate.run(measured).counts
        assert counts["rows_seen_in_training"] == len(lines) - sum(x in unseen for x in lines)
        return str(
            publish.run(
                replace(
                    config, output=str(tmp_path / f"publish-{name}"), model=measured.model,
                    evaluation=measured.output,
                )
            ).counts["why"]
        )  # fmt: skip

    known = [line for line, out in zip(lines, seen, strict=True) if out]
    mixed = [*known, *unseen[: len(known) - 1]]
    told = f"it was trained on {len(known)} of the evaluation's {len(mixed)} rows, which favour it"
    assert told in second("seen", mixed)
    capsys.readouterr()
    why = second("all", lines)
    assert f"by paired bootstrap on {len(unseen)} rows" in why
    told = f"{len(lines) - len(unseen)} of the evaluation's {len(lines)} rows are left out, since"
    assert told in why
    assert told in " ".join(capsys.readouterr().out.split())
    assert told in (tmp_path / "publish-all" / "model_card.md").read_text()


def test_held_out_rows_that_were_trained_on_are_counted(evaluated: Any) -> None:
    from bert_core.bundle.format import load_bundle

    config = evaluated.finetune(evaluated.folder / "finetune")
    counts = read_manifest(config.output).counts
    lines = Path(evaluated.rows.source).read_text().splitlines()
    bundle = load_bundle(f"{config.output}/bundle")
    seen = bundle.has_seen(TextClassification([]), [json.loads(line) for line in lines])
    assert counts["held_out_rows_seen_in_training"] == seen.sum() >= 32


def test_an_evaluation_of_another_task_than_the_registered_one_is_refused(
    evaluated: Any, tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"text": "an axis", "text_pair": f"axis {n}", "score": n % 5} for n in range(8)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = replace(
        evaluated.evaluate(tmp_path / "evaluate"),
        task="feature-extraction",
        held_out=LabelledConfig(source=str(pairs)),
    )
    evaluate.run(measured)
    config = PublishConfig(
        output=str(tmp_path / "publish"), model=measured.model, evaluation=measured.output,
        name="vectors", num_workers=0, tracking_uri=evaluated.tracking_uri,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"got one of feature-extraction .* without --task"):
        publish.run(config)
    assert champion("vectors", uri=evaluated.tracking_uri) is None


def test_an_evaluation_of_another_bundle_is_refused(
    evaluated: Any, another: Path, tmp_path: Path
) -> None:
    config = PublishConfig(
        output=str(tmp_path / "publish"),
        model=str(another),
        evaluation=str(evaluated.folder / "evaluate"),
        name="early-or-late",
        num_workers=0,
        tracking_uri=evaluated.tracking_uri,
    )
    with pytest.raises(ConfigError, match="wanted an evaluation of bundle"):
        publish.run(config)


def test_settings_out_of_range_are_refused(small: Any) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"epochs": 0.0}, "epochs: wanted above 0 and finite, got 0"),
        ({"epochs": math.inf}, "epochs: wanted above 0 and finite, got inf"),
        ({"seeds": (1, 1)}, "seeds: wanted different numbers"),
        ({"lr": -1.0}, "lr: wanted above 0, got -1"),
        ({"warmup_share": 2.0}, "warmup_share: wanted at least 0 and below 1, got 2"),
        ({"rows_per_class": 0}, "rows_per_class: wanted at least 1, got 0"),
        ({"max_length": 4}, "max_length: wanted at least 8, got 4"),
        ({"batch_size": 0}, "batch_size: wanted at least 1, got 0"),
        ({"batch_size": 2, "num_workers": 4}, "batch_size: wanted at least a row for each of 4"),
        ({"layer_decay": 1.5}, "layer_decay: wanted above 0 and at most 1, got 1.5"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob: wanted at least 0 and below 1, got 1"),
        ({"examples": 21}, "examples: wanted 0 to 20, got 21"),
    ]
    for change, message in refused:
        with pytest.raises(ConfigError, match=message):
            replace(small.finetune(Path("x")), **change)


def test_an_invalid_selection_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"share": 1.0}, "selection.share: wanted at least 0 and below 1, got 1"),
        ({"every_epochs": math.inf}, "selection.every_epochs: wanted above 0 and finite, got inf"),
        ({"share": 0.1, "patience": -1}, "selection.patience: wanted at least 0, got -1"),
        ({"patience": 2}, "patience: wanted 0 without rows to measure on, got 2: set selection"),
    ]
    for given, message in refused:
        with pytest.raises(ConfigError, match=message):
            SelectionConfig(**given)


def test_a_row_that_the_task_cannot_use_is_named_with_its_file(
    small: Any, untrained: Any, tmp_path: Path
) -> None:
    rows = LabelledConfig(source=str(tmp_path / "dev.jsonl"))
    Path(rows.source).write_text(
        '{"text": "a", "label": "late"}\n{"text": "b", "label": "never"}\n'
    )
    unknown = r"row 2: its label 'never' is not one of the model's, which are early, late:"
    config = replace(
        small.finetune(tmp_path / "finetune"), model=str(untrained.encoder), held_out=rows
    )
    with pytest.raises(CorpusError, match=rf"dev\.jsonl, {unknown}"):
        finetune.run(config)
    with pytest.raises(CorpusError, match=rf"dev\.jsonl, {unknown}"):
        evaluate.run(
            replace(
                small.evaluate(tmp_path / "evaluate"),
                model=str(untrained.classifier),
                held_out=rows,
            )
        )
    Path(rows.source).write_text('{"text": "a", "label": "late"}\n' * 2)
    with pytest.raises(CorpusError, match=r"dev\.jsonl, training rows: wanted at least two labels"):
        finetune.run(replace(config, train=rows))


def test_rows_that_are_missing_or_too_few_are_refused(
    small: Any, untrained: Any, tmp_path: Path
) -> None:
    config = replace(small.finetune(tmp_path / "out"), model=str(untrained.encoder))
    nowhere = LabelledConfig(source=str(tmp_path / "no.jsonl"))
    with pytest.raises(CorpusError, match=r"no.jsonl: wanted a file, a folder or a glob"):
        finetune.run(replace(config, train=nowhere))
    with pytest.raises(
        CorpusError, match="wanted at least batch_size = 64 rows to train on, got 32"
    ):
        finetune.run(replace(config, batch_size=64))
    with pytest.raises(ConfigError, match="max_length: wanted at most 512"):
        finetune.run(replace(config, max_length=1024, output=str(tmp_path / "long")))
    with pytest.raises(ConfigError, match=r"task: wanted one of .*, got 'magic'"):
        finetune.run(replace(config, task="magic"))
