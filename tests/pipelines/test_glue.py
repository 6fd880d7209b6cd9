"""GLUE's test sets through models: a zip of eleven files that says what the models say."""

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_core import files
from bert_core.errors import ConfigError, CorpusError
from bert_core.manifest import Manifest, write_manifest
from bert_core.metrics.glue import SETS
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.text_regression import TextRegression
from pipelines import cli, glue
from pipelines.glue import GlueConfig

TEXTS = [("the sea is", "a tree"), ("the tree", "blue"), ("a", "the sea is blue"), ("sea", "sea")]
HEADERS = {"mrpc": "#1 String\t#2 String", "qqp": "question1\tquestion2"} | {
    "qnli": "question\tsentence", "cola": "sentence", "sst2": "sentence"
}  # fmt: skip


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model of random weights for every set but those that MNLI's answers."""
    from tests import tiny

    folder, words = tmp_path_factory.mktemp("bundles"), tiny.tokenizer()
    encoder = tiny.encoder_config(words.vocab_size, initializer_range=0.5)
    found = {}
    for seed, (name, test_set) in enumerate(SETS.items()):
        if test_set.task is None:
            task = (
                TextClassification(sorted(test_set.labels)) if test_set.labels else TextRegression()
            )
            found[name] = str(tiny.bundle(folder / name, words, encoder, task=task, seed=seed))
    return found


@pytest.fixture
def config(bundles: dict[str, str], tmp_path: Path) -> GlueConfig:
    tests = {}
    for name in SETS:
        header = HEADERS.get(name, "sentence1\tsentence2")
        single = "\t" not in header
        lines = [a if single else f"{a}\t{b}" for a, b in TEXTS]
        first = "id" if name == "qqp" else "index"
        text = "\n".join([f"{first}\t{header}", *(f"{n}\t{row}" for n, row in enumerate(lines))])
        (tmp_path / f"{name}.tsv").write_text(f"{text}\n")
        tests[name] = str(tmp_path / f"{name}.tsv")
    return GlueConfig(
        output=str(tmp_path / "out"),
        models=bundles,
        tests=tests,
        num_workers=0,
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
    )


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLUE whose sets have as many rows as the files here."""
    monkeypatch.setattr(
        glue, "SETS", {name: replace(one, rows=len(TEXTS)) for name, one in SETS.items()}
    )


def files_of(config: GlueConfig) -> dict[str, list[str]]:
    with zipfile.ZipFile(Path(config.output, "submission.zip")) as archive:
        return {name: archive.read(name).decode().splitlines() for name in archive.namelist()}


@pytest.mark.usefixtures("short")
def test_a_submission_has_the_models_answers_in_the_order_of_the_rows(
    config: GlueConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    from bert_core.inference.predictor import Predictor

    counts = glue.run(config).counts
    assert ", ready for gluebenchmark.com\n" in capsys.readouterr().out
    assert counts["rows"] == 11 * len(TEXTS)
    found = files_of(config)
    assert sorted(found) == sorted(test_set.file for test_set in SETS.values())
    for name, test_set in SETS.items():
        inputs: list[Any] = [{"text": a, "text_pair": b} for a, b in TEXTS]
        if name in ("cola", "sst2"):
            inputs = [a for a, _ in TEXTS]
        predictor = Predictor(config.models.get(name, config.models["mnli"]), device="cpu")
        lines = ["index\tprediction"]
        for number, answer in enumerate(predictor.predict(inputs)):
            best = predictor.task.cells(answer)
            shown = best.get("label") or f"{min(max(best['score'], 0), 5):.3f}"
            lines.append(f"{number}\t{shown}")
        assert found[test_set.file] == lines, name
    first = files.sha256_of(f"{config.output}/submission.zip")
    assert glue.run(replace(config, force=True)).outputs["submission.zip"].sha256 == first


def test_missing_labels_are_named_or_filled_with_the_default(
    config: GlueConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ("cola", "stsb", "mnli")
    lacking = {name: config.models[name] for name in sets}
    with pytest.raises(ConfigError, match=r"models: wanted all .* none for sst2, mrpc, qqp, q"):
        replace(config, models=lacking)
    with pytest.raises(ConfigError, match=r"tests: wanted all of GLUE's sets, .* none for qqp, ax"):
        replace(config, tests={k: v for k, v in config.tests.items() if k not in ("qqp", "ax")})
    with pytest.raises(ConfigError, match=r"models: wanted sets among cola, .*, got sst3"):
        replace(config, models=config.models | {"sst3": "x"})
    with pytest.raises(
        CorpusError, match=r"tests.cola: wanted the 1,063 rows .* got 4 in .*: its server"
    ):
        glue.run(config)
    some = replace(config, models=lacking, allow_incomplete=True, output=f"{config.output}-some")
    counts = glue.run(some).counts
    assert counts["rows"] == 5 * len(TEXTS)  # MNLI's two sets and the diagnostic one
    assert counts["filled_rows"] == 1821 + 1725 + 390_965 + 5463 + 3000 + 146
    found = files_of(some)
    assert set(found["WNLI.tsv"][1:]) == {f"{number}\t0" for number in range(146)}
    assert len(found["CoLA.tsv"]) == 1 + len(TEXTS)
    told = " ".join(capsys.readouterr().out.split())
    assert "WNLI.tsv is filled with '0'" in told
    assert "wanted the 1,063 rows that GLUE publishes" in told
    unanswered = "cola, sst2, mrpc, stsb, qqp, mnli, mnli_mismatched, qnli, rte, wnli, ax"
    # No file here has all rows.
    assert f"not ready for gluebenchmark.com until a model answers all of {unanswered}" in (told)


@pytest.mark.usefixtures("short")
def test_models_of_another_task_or_with_other_labels_are_refused(config: GlueConfig) -> None:
    models = config.models
    with pytest.raises(ConfigError, match=r"models.stsb: wanted a bundle for text-regression"):
        glue.run(replace(config, models=models | {"stsb": models["cola"]}))
    other = replace(config, models=models | {"rte": models["wnli"]})
    with pytest.raises(
        ConfigError, match=r"models.rte: wanted the labels .* got 0, 1 from .* labels"
    ):
        glue.run(other)
    named = replace(other, labels={"rte": ["not_entailment", "entailment"]})
    glue.run(named)
    found = files_of(named)
    answers = {"0": "not_entailment", "1": "entailment"}
    wanted = [f"{n}\t{answers[line.split()[1]]}" for n, line in enumerate(found["WNLI.tsv"][1:])]
    assert found["RTE.tsv"][1:] == wanted


@pytest.mark.usefixtures("short")
def test_evaluations_combine_to_a_score(config: GlueConfig, tmp_path: Path) -> None:
    evaluations = {}
    for name, test_set in SETS.items():
        if test_set.metrics:
            counts = {"primary_metric": test_set.metrics[0]} | dict.fromkeys(test_set.metrics, 0.5)
            folder = str(tmp_path / f"evaluate-{name}")
            manifest = Manifest(stage="evaluate", digest=name, config={}, counts=counts)
            write_manifest(folder, manifest)
            evaluations[name] = folder
    counts = glue.run(replace(config, evaluations=evaluations)).counts
    assert counts["glue_score"] == counts["mnli_score"] == 0.5
    del evaluations["mnli_mismatched"]
    some = replace(config, evaluations=evaluations, output=f"{config.output}-some")
    counts = glue.run(some).counts
    assert counts["mean_of_some_tasks"] == 0.5
    assert not {"glue_score", "mnli_score"} & counts.keys()


@pytest.mark.matrix
@pytest.mark.usefixtures("unchecked")
def test_all_published_rows_of_all_sets_become_a_submission(
    config: GlueConfig, bundles: dict[str, str], tmp_path: Path
) -> None:
    """426,309 rows, as many as GLUE publishes, by the command line."""
    for name, one in SETS.items():
        header, *lines = Path(config.tests[name]).read_text().splitlines()
        texts = [line.partition("\t")[2] for line in lines]
        rows = [f"{number}\t{texts[number % len(texts)]}" for number in range(one.rows)]
        (tmp_path / f"{name}.tsv").write_text("\n".join([header, *rows]) + "\n")
    arguments = [f"--models.{name}={bundle}" for name, bundle in bundles.items()]
    arguments += [f"--tests.{name}={tmp_path / f'{name}.tsv'}" for name in SETS]
    arguments += [f"--output={config.output}", "--num_workers=0"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["glue", *arguments, f"--tracking_uri={config.tracking_uri}"])
    assert ended.value.code == 0
    found = files_of(config)
    assert {one.file: one.rows + 1 for one in SETS.values()} == {
        name: len(lines) for name, lines in found.items()
    }
    assert sum(map(len, found.values())) == 426_309 + len(SETS)
