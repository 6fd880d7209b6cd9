"""What a run learns: objectives that its rows teach, with fresh weights or another bundle's."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from benchmarks.recipes import RECIPES, Recipe, stage
from bert_core.errors import ConfigError
from bert_core.manifest import Manifest
from bert_core.model.variants import VARIANTS
from bert_core.train.checkpoint import latest_checkpoint
from pipelines import prepare, pretrain, vocab
from pipelines.configure import parse
from pipelines.pretrain import PretrainConfig
from pipelines.training.objectives import NEEDS
from pipelines.training.records import CHECKPOINTS, read_records

CONFIGS = Path(__file__).parents[3] / "configs"


def prepared_as(
    prepared: Any, output: Path, *, kind: str, strategy: str, dynamic: bool = False
) -> str:
    config = prepared.prepare(output)
    pairs = replace(config.pairs, kind=kind, dupe_factor=1)
    masking = replace(config.masking, strategy=strategy, dynamic=dynamic)
    prepare.run(replace(config, pairs=pairs, masking=masking))
    return str(config.output)


@pytest.fixture(scope="module")
def spans(prepared: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of one segment each, with masked spans."""
    folder = tmp_path_factory.mktemp("spans") / "shards"
    return prepared_as(prepared, folder, kind="doc_sentences", strategy="span")


@pytest.fixture(scope="module")
def later_spans(prepared: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same, drawn at training time."""
    folder = tmp_path_factory.mktemp("later_spans") / "shards"
    return prepared_as(prepared, folder, kind="doc_sentences", strategy="span", dynamic=True)


def test_every_objective_says_what_its_rows_need() -> None:
    from bert_core.objectives.catalog import PRETRAINING

    assert NEEDS.keys() == PRETRAINING.keys()


@pytest.mark.drill
@pytest.mark.parametrize("rows", ["spans", "later_spans"])
def test_words_of_spans_are_learned_by_what_stands_beside_them(
    prepared: Any, tmp_path: Path, rows: str, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForMaskedLM

    config = replace(
        prepared.pretrain(tmp_path / "out"),
        shards=request.getfixturevalue(rows),
        objectives=("mlm", "span_boundary"),
    )
    counts = pretrain.run(config).counts
    for name in ("mlm", "span_boundary"):
        assert 4.0 < counts[f"{name}_loss_after"] < counts[f"{name}_loss_before"] < 8.0
    assert not [name for name in counts if name.startswith("nsp")]
    bundle = tmp_path / "out" / "bundle"
    heads = load_file(bundle / "objective.safetensors")
    assert {name.split(".")[1] for name in heads} == {"span_boundary"}
    _, info = AutoModelForMaskedLM.from_pretrained(bundle, output_loading_info=True)
    assert not [name for kind in ("missing_keys", "unexpected_keys") for name in info[kind]]


@pytest.mark.drill
def test_an_objective_is_left_out_where_others_are_named(prepared: Any, tmp_path: Path) -> None:
    counts = pretrain.run(replace(prepared.pretrain(tmp_path / "out"), objectives=("mlm",))).counts
    assert "mlm_loss_after" in counts
    assert "nsp_loss_after" not in counts


@pytest.mark.parametrize(
    ("rows", "objective", "message"),
    [
        ("pairs", "span_boundary", r"masking\.strategy = span, .* was prepared with token"),
        ("pairs", "sop", r"pairs\.kind = sop, .* was prepared with nsp"),
        ("spans", "nsp", r"pairs\.kind = nsp, .* was prepared with doc_sentences"),
    ],
)
def test_an_objective_that_the_rows_cannot_train_is_refused_with_the_way_out(
    prepared: Any, tmp_path: Path, spans: str, rows: str, objective: str, message: str
) -> None:
    config = prepared.pretrain(tmp_path / "out")
    shards = spans if rows == "spans" else config.shards
    config = replace(config, shards=shards, objectives=("mlm", objective))
    wanted = (
        f"objectives: {objective} wants rows prepared with {message}: "
        f"run `raybert prepare` with --.* into another folder, or leave {objective} out"
    )
    with pytest.raises(ConfigError, match=wanted):
        pretrain.run(config)
    assert not (tmp_path / "out").exists()


def test_an_objective_that_an_encoder_cannot_learn_is_refused_before_training(
    prepared: Any, tmp_path: Path
) -> None:
    config = replace(prepared.pretrain(tmp_path / "out"), objectives=("emd_mlm",))
    with pytest.raises(ConfigError, match="wanted for emd_mlm an encoder with disentangled"):
        pretrain.run(config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [("mlm", "rtd"), ("mlm", "mlm"), ("nsp",), ()])
def test_unknown_objectives_are_refused(small: Any, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="objectives: wanted"):
        replace(small.pretrain(Path("x")), objectives=names)


def test_permuted_words_leave_no_boundaries_of_spans(small: Any) -> None:
    with pytest.raises(ConfigError, match="permuted_mlm without span_boundary, whose tokens besid"):
        replace(small.pretrain(Path("x")), objectives=("permuted_mlm", "span_boundary"))


def going_on(pretrained: Any, output: Path) -> PretrainConfig:
    """From the bundle of `pretrained`, on the same rows."""
    config = pretrained.pretrain(output, steps=8)
    return replace(config, variant=None, model=str(pretrained.folder / "pretrain" / "bundle"))


@pytest.mark.drill
def test_training_goes_on_from_where_a_bundle_ended(pretrained: Any, tmp_path: Path) -> None:
    from bert_core.bundle.format import load_bundle

    config = going_on(pretrained, tmp_path / "out")
    done = pretrain.run(config)
    parent = load_bundle(str(config.model))
    for name in ("mlm_loss", "nsp_loss"):
        assert done.counts[f"{name}_before"] == pytest.approx(parent.metrics[name], rel=1e-5)
    assert done.counts["mlm_loss_after"] < done.counts["mlm_loss_before"]
    assert done.counts["fresh_parts"] == []
    assert done.inputs["model"] == parent.digest
    made = load_bundle(tmp_path / "out" / "bundle")
    assert made.lineage["parent"] == parent.digest
    assert made.lineage["parent_lineage"] == parent.lineage
    assert made.encoder_config == parent.encoder_config
    other = shutil.copytree(tmp_path / "out" / "bundle", tmp_path / "other")
    with pytest.raises(ConfigError, match="finished `pretrain` made with another model"):
        pretrain.run(replace(config, model=str(other)))


@pytest.mark.drill
def test_the_optimizer_goes_on_where_it_is_carried_and_begins_afresh_elsewhere(
    pretrained: Any, tmp_path: Path
) -> None:
    steps = {}
    source = str(pretrained.folder / "pretrain")
    for name, place in (("fresh", None), ("carried", source)):
        config = replace(going_on(pretrained, tmp_path / name), optimizer_from=place)
        pretrain.run(config)
        checkpoint = latest_checkpoint(str(tmp_path / name / CHECKPOINTS))
        assert checkpoint is not None
        state = load_file(Path(checkpoint.folder) / "optimizer.safetensors")
        steps[name] = int(state["0.step"])
    assert steps["carried"] == steps["fresh"] + 12  # those of the run that it goes on from


def test_an_optimizer_of_another_run_or_kind_is_refused(
    pretrained: Any, untrained: Any, tmp_path: Path
) -> None:
    source = str(pretrained.folder / "pretrain")
    config = replace(going_on(pretrained, tmp_path / "out"), optimizer_from=source)
    with pytest.raises(ConfigError, match="optimizer_from: wanted model with it, the bundle that"):
        replace(config, model=None)
    nothing = replace(config, optimizer_from=str(tmp_path))
    with pytest.raises(ConfigError, match="wanted the output of a finished `raybert pretrain` wit"):
        pretrain.run(nothing)
    lamb = replace(config, optimizer=replace(config.optimizer, name="lamb"))
    with pytest.raises(ConfigError, match=r"wanted lamb that trained mlm, nsp, that .* is adamw"):
        pretrain.run(lamb)
    alone = replace(config, objectives=("mlm",))
    with pytest.raises(ConfigError, match=r"wanted adamw that trained mlm, that of .* mlm, nsp: "):
        pretrain.run(alone)
    with pytest.raises(ConfigError, match=r"wanted the run that made .*, .* made another bundle"):
        pretrain.run(replace(config, model=str(untrained.encoder)))


@pytest.mark.drill
def test_heads_that_a_bundle_lacks_start_fresh_and_are_reported(
    pretrained: Any, tmp_path: Path, spans: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(
        going_on(pretrained, tmp_path / "out"), shards=spans, objectives=("mlm", "span_boundary")
    )
    done = pretrain.run(config)
    assert done.counts["fresh_parts"] == ["span_boundary"]
    assert "it lacks, and starts fresh: span_boundary" in " ".join(capsys.readouterr().out.split())
    words = done.counts["span_boundary_loss_before"], done.counts["mlm_loss_before"]
    assert words[0] > words[1]


@pytest.mark.drill
def test_a_bundle_of_another_vocabulary_is_refused_with_both(
    pretrained: Any, tmp_path: Path
) -> None:
    vocab.run(replace(pretrained.vocab(tmp_path / "vocab"), vocab_size=900))
    other = replace(pretrained.prepare(tmp_path / "shards"), tokenizer=str(tmp_path / "vocab"))
    prepare.run(other)
    config = replace(
        going_on(pretrained, tmp_path / "out"),
        tokenizer=str(tmp_path / "vocab"),
        shards=str(other.output),
    )
    message = r"bundle has vocabulary [0-9a-f]{6}, .*vocab has [0-9a-f]{6}: run `raybert prepare`"
    with pytest.raises(ConfigError, match=message):
        pretrain.run(config)


@pytest.mark.parametrize("name", ["variant", "sizes_of"])
def test_an_encoder_beside_a_bundle_is_refused(small: Any, name: str) -> None:
    config = replace(small.pretrain(Path("x")), variant=None, model="somewhere/bundle")
    with pytest.raises(ConfigError, match=f"{name}: wanted none with model = 'somewhere/bundle'"):
        replace(config, **{name: "bert-tiny"})


PARTS = {
    "roberta_base": {"mlm"},
    "albert_base": {"mlm", "sop"},
    "spanbert_base": {"mlm", "span_boundary"},
    "deberta_base": {"mlm"},
    "deberta_v3_base": {"mlm", "rtd"},
    "scibert": {"mlm", "nsp"},
    "electra_base": {"mlm", "rtd"},
    "mpnet_base": {"mlm"},
    "xlmr_base": {"mlm"},
    "modernbert_base": {"mlm"},
    "biobert": {"mlm", "nsp"},
}


def rows_and_training(recipe: Recipe, folder: Path, text: Path, tokenizer: Path) -> Manifest:
    """Smaller than WikiText-2's configs make it."""
    corpus = ["--corpus.source", str(text), "--tokenizer", str(tokenizer)]
    stage("prepare", recipe.prepare, folder / "prepare", *corpus, "--num_workers", "0")
    places = ["--shards", str(folder / "prepare"), "--tokenizer", str(tokenizer)]
    shorter = ["--loop.max_steps", "30", "--schedule.warmup_steps", "5", "--num_workers", "0"]
    shorter += ["--global_batch_size", "16"]
    more = [*places, *shorter, "--loop.precision", "fp32", *recipe.more]
    return stage("pretrain", recipe.pretrain, folder / "pretrain", *more)


def check_fall(done: Manifest, recipe: str, folder: Path) -> None:
    counts = done.counts
    parts = {name.removesuffix("_loss_after") for name in counts if name.endswith("_loss_after")}
    assert parts == PARTS[recipe]
    assert counts["loss_after"] < counts["loss_before"]
    assert counts["mlm_loss_after"] < counts["mlm_loss_before"] - 0.1
    assert max(read_records(folder / "pretrain")) >= 30


@pytest.fixture(scope="module")
def articles(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginning of WikiText-2's training text."""
    path = tmp_path_factory.mktemp("wikitext2") / "text.txt"
    text = (data_dir / "wikitext2" / "train.txt").read_text(encoding="utf-8")
    path.write_text(text[:600_000], encoding="utf-8")
    return path


@pytest.mark.drill
@pytest.mark.parametrize(
    "recipe", [each for each in RECIPES if each.parent is None], ids=lambda recipe: recipe.name
)
def test_a_recipe_made_small_learns_on_real_text(
    recipe: Recipe, articles: Path, tmp_path: Path
) -> None:
    from bert_core.bundle.format import load_bundle

    size = ["--vocab_size", "2000", "--corpus.source", str(articles), "--num_workers", "0"]
    stage("vocab", recipe.vocab, tmp_path / "vocab", *size)
    done = rows_and_training(recipe, tmp_path, articles, tmp_path / "vocab")
    check_fall(done, recipe.name, tmp_path)
    bundle = load_bundle(tmp_path / "pretrain" / "bundle")
    variant = parse("pretrain", ["--config", str(CONFIGS / f"pretrain/{recipe.name}.toml")])
    published = VARIANTS[variant.variant].config
    assert bundle.encoder_config.family == published.family
    assert bundle.encoder_config.shared_layers == published.shared_layers


@pytest.mark.drill
def test_a_small_biobert_continues_in_the_words_of_another_domain(
    pretrained: Any, articles: Path, tmp_path: Path
) -> None:
    """From docstrings to articles."""
    parent = pretrained.folder / "pretrain" / "bundle"
    [recipe] = [each for each in RECIPES if each.parent is not None]
    recipe = replace(recipe, more=(*recipe.more, "--model", str(parent)))
    done = rows_and_training(recipe, tmp_path, articles, parent)
    check_fall(done, "biobert", tmp_path)
    assert done.counts["fresh_parts"] == []
