"""Models that others trained, read from their own files (`make checkpoints`), give what the
libraries of their authors give; and are fine-tuned and exported."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import checkpoints
from benchmarks.checkpoints import (
    MINILM,
    MPNET,
    REACTION_ATOMS,
    REACTION_CLASSES,
    REACTION_VECTORS,
    REACTIONS,
    SPLADE,
    checkpoint,
)
from bert_core.batches import pack, pad
from bert_core.bundle.format import About, Bundle, load_bundle
from bert_core.bundle.tensors import read_weights
from bert_core.bundle.weights import build_model
from bert_core.bundle.writing import save_bundle
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import FormatError
from bert_core.inference.export import TOLERANCE, largest_difference
from bert_core.inference.predictor import Predictor
from bert_core.model.config import EncoderConfig
from bert_core.model.families import LAYOUTS
from bert_core.model.hf import encoder_config_to_huggingface
from bert_core.model.hf_weights import to_huggingface
from bert_core.objectives.base import Batch, Objective, ObjectiveModel
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.sentence_pairs import NextSentencePrediction
from bert_core.tasks.sparse_embedding import SparseEmbedding, SparseEmbeddingParameters
from bert_core.tasks.text_classification import TextClassification
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.loop import training_steps
from bert_core.train.optim import build_optimizer
from pipelines import export
from pipelines.export import ExportConfig

pytestmark = [
    pytest.mark.drill,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("unchecked"),  # graphs are traced
]

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GIVEN = re.compile(r'^folder, pattern = Path\("reactions"\), r"(.*)"$', re.MULTILINE)
Folder = Callable[[str], Path]
"""Name → folder of a model; skips if it is not there."""
STEPS, ROWS = 3, 4
LENGTHS = {MINILM: 256, MPNET: 384}
SENTENCES = [
    "The cat sat on the mat.",
    "A feline rested upon the rug!",
    "Gradients of 1e-4, naïve café 海.",
    "word " * 400,
    "x",
]
# The text in which words are masked, and the second of a pair.
ENGLISH = ("The cat sat on the mat, as cats do when it rains.", "It purred, and fell asleep there.")
SUZUKI = ("Brc1ccccc1.OB(O)c1ccccc1.[Na+].[OH-]>>c1ccc(-c2ccccc2)cc1", "C[C@H](O)Br.[nH]>>CC=O")


@dataclass(frozen=True)
class Published:
    """What transformers makes of a folder."""

    title: str
    """Name of the class."""
    heads: dict[str, str] = field(default_factory=dict)
    """Our objective → the scores of its head, in the output of the class."""


PUBLISHED = {
    MINILM: Published("BertModel"),
    MPNET: Published("MPNetModel"),
    SPLADE: Published("BertForMaskedLM", {"mlm": "logits"}),
    REACTIONS: Published(
        "BertForPreTraining", {"mlm": "prediction_logits", "nsp": "seq_relationship_logits"}
    ),
    REACTION_VECTORS: Published("BertModel"),
    REACTION_CLASSES: Published("BertForSequenceClassification", {"classification": "logits"}),
    REACTION_ATOMS: Published("AlbertForMaskedLM", {"mlm": "logits"}),
}
# Where the packages of the models for reactions say what their tokenizer finds in a text.
PATTERNS = {
    REACTIONS: "rxnfp/tokenization.py",
    REACTION_VECTORS: "rxnfp/tokenization.py",
    REACTION_CLASSES: "rxnfp/tokenization.py",
    REACTION_ATOMS: "rxnmapper/smiles_utils.py",
}


def pattern_of(name: str) -> str:
    code = (checkpoints.root() / PATTERNS[name]).read_text(encoding="utf-8")
    found = re.search(r'^SMI_REGEX_PATTERN = +r"(.*)"$', code, re.MULTILINE)
    assert found is not None
    return found[1]


def describe(folder: Path, pattern: str) -> str:
    """Write `tokenizer.json` as the guide shows it; the guide's own pattern."""
    program, *_ = FENCE.findall((ROOT / "docs" / "guides" / "hub.md").read_text(encoding="utf-8"))
    rest, [shown] = GIVEN.sub("", program), GIVEN.findall(program)
    exec(compile(rest, "hub.md", "exec"), {"folder": folder, "pattern": pattern})
    return str(shown)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Those for reactions are copies with a `tokenizer.json`."""
    copies = tmp_path_factory.mktemp("described")

    def folder_of(name: str) -> Path:
        folder = checkpoint(name)
        if folder is None:
            pytest.skip(checkpoints.ABSENT)
        if name not in PATTERNS:
            return folder
        if not (copies / name).exists():
            shutil.copytree(folder, copies / name)
            describe(copies / name, pattern_of(name))
        return copies / name

    return folder_of


def batch_of(name: str, tokenizer: Tokenizer) -> tuple[Batch, Batch]:
    """A pair and a text with a masked word each, padded and packed."""
    one, other = tokenizer.ids(SUZUKI if name in PATTERNS else ENGLISH)
    ends, separator = [tokenizer.cls_id], [tokenizer.sep_id]
    one[4] = tokenizer.mask_id
    pair = [*ends, *one, *separator * tokenizer.separators, *other, *separator]
    rows = [np.array(pair), np.array([*ends, *one, *separator])]
    splits = np.array([len(one) + 2, len(rows[1])]) if tokenizer.has_segments else None
    padded, packed = pad(rows, tokenizer.pad_id, splits), pack(rows, splits)
    padded["mlm_positions"] = torch.tensor([5, padded["input_ids"].shape[1] + 5])
    packed["mlm_positions"] = torch.tensor([5, len(rows[0]) + 5])
    return padded, packed


def asked(batch: Batch, config: EncoderConfig) -> dict[str, Tensor]:
    """What transformers' class takes of a batch."""
    names = ["input_ids", "attention_mask"]
    names += ["token_type_ids"] if config.embeddings.type_vocab_size else []
    return {name: batch[name] for name in names}


@pytest.mark.parametrize("name", PUBLISHED)
def test_hidden_states_and_heads_are_those_of_transformers(name: str, folder_of: Folder) -> None:
    import transformers

    folder, published = folder_of(name), PUBLISHED[name]
    bundle = load_bundle(folder)
    config = bundle.encoder_config
    model, info = getattr(transformers, published.title).from_pretrained(
        folder, output_loading_info=True
    )
    assert not info["missing_keys"], info
    theirs = model.eval()
    heads = [objective_of(bundle, head) for head in published.heads]
    ours = build_model(bundle, heads, require_heads=True).eval()
    padded, packed = batch_of(name, bundle.tokenizer)
    real = padded["attention_mask"].bool()
    with torch.inference_mode():
        output = theirs(**asked(padded, config), output_hidden_states=True)
        for batch, select in ((padded, real), (packed, slice(None))):
            close(ours.encode(batch).hidden[select], output.hidden_states[-1][real])
            scores = ours.logits(batch)
            assert scores.keys() == published.heads.keys()
            for head, known_as in published.heads.items():
                wanted = output[known_as]
                if head == "mlm":
                    wanted = wanted.flatten(0, 1)[padded["mlm_positions"]]
                close(scores[head], wanted)


def objective_of(bundle: Bundle, name: str) -> Objective:
    if name == "mlm":
        return MaskedLanguageModeling(bundle.encoder_config)
    if name == "nsp":
        return NextSentencePrediction(bundle.encoder_config)
    assert bundle.task is not None
    return bundle.task.build_objective(bundle.encoder_config)


def close(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_is_read_and_written_bit_for_bit(name: str, folder_of: Folder) -> None:
    folder = folder_of(name)
    bundle = load_bundle(folder)
    # Not every class that was saved with a pooler has one today.
    state = {key: tensor for key, tensor in bundle.state.items() if ".pooler." not in key}
    again = to_huggingface(state, bundle.encoder_config)
    theirs = {
        key.replace(".gamma", ".weight").replace(".beta", ".bias"): tensor
        for key, tensor in read_weights(folder).items()
    }
    prefix = LAYOUTS[bundle.encoder_config.family].prefix
    if not any(key.startswith(prefix) for key in theirs):
        theirs = {prefix + key: tensor for key, tensor in theirs.items()}
    # A decoder is the word embeddings', and positions are counted.
    derived = ("position_ids", "predictions.decoder.weight", "predictions.decoder.bias")
    wanted = {key for key in theirs if not key.endswith(derived) and ".pooler." not in key}
    assert again.keys() == wanted
    for key in wanted:
        assert torch.equal(again[key], theirs[key]), key


@pytest.mark.parametrize("name", LENGTHS)
def test_sentence_vectors_are_those_of_sentence_transformers(name: str, folder_of: Folder) -> None:
    from sentence_transformers import SentenceTransformer

    folder, length = folder_of(name), LENGTHS[name]
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert theirs.max_seq_length == length
    vectors = theirs.encode(SENTENCES, batch_size=1, normalize_embeddings=True)
    bundle = load_bundle(folder)
    encoder = build_model(bundle, []).eval().encoder
    ids = bundle.tokenizer.encode(SENTENCES, length)
    batch = pack(ids)
    with torch.inference_mode():
        hidden = encoder(
            batch["input_ids"], batch["token_type_ids"], offsets=batch["offsets"]
        ).hidden
        means = torch.stack([row.mean(0) for row in hidden.split([len(row) for row in ids])])
    ours = means / means.norm(dim=1, keepdim=True)
    torch.testing.assert_close(ours, torch.from_numpy(vectors), atol=1e-5, rtol=0)


def test_sparse_vectors_are_those_of_sentence_transformers(folder_of: Folder) -> None:
    from sentence_transformers import SparseEncoder

    folder = folder_of(SPLADE)
    theirs = SparseEncoder(str(folder), device="cpu")
    wanted = theirs.encode(SENTENCES, convert_to_sparse_tensor=False).numpy()
    predictor = Predictor(folder, device="cpu", task=SparseEmbedding.name)
    answers = predictor.predict(SENTENCES, SparseEmbeddingParameters(truncate=True))
    ours = np.zeros_like(wanted)
    for vector, answer in zip(ours, answers, strict=True):
        vector[[entry["index"] for entry in answer]] = [entry["value"] for entry in answer]
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
    assert 0 < (ours > 0).mean() < 0.01, "few entries of a vector are not 0"


def test_a_sparse_model_finds_what_a_text_is_about(folder_of: Folder) -> None:
    predictor = Predictor(folder_of(SPLADE), device="cpu", task=SparseEmbedding.name)
    task = predictor.task
    rows = [
        {"text": "where do cats sleep", "text_pair": SENTENCES[0]},
        {"text": "how large is a gradient", "text_pair": SENTENCES[2]},
    ]
    windows = task.encode(rows, predictor.bundle.tokenizer, predictor.max_length)
    answers = task.decode(rows, windows, predictor.forward(windows))
    assert task.metrics(task.compare(rows, answers))["mrr"] == 1.0


@pytest.mark.parametrize("name", PATTERNS)
def test_a_described_tokenizer_finds_what_its_pattern_finds(name: str, folder_of: Folder) -> None:
    tokenizer = Tokenizer.load(folder_of(name))
    texts = [*SUZUKI, "C[NotThere]C %12 é$!", "[13CH3]Cl>>CBr"]
    for text, ids in zip(texts, tokenizer.ids(texts), strict=True):
        found = re.findall(pattern_of(name), text)
        wanted = [token if token in tokenizer.vocabulary else "[UNK]" for token in found]
        assert [tokenizer.vocabulary[index] for index in ids] == wanted
    assert tokenizer.unk_id in tokenizer.ids(texts)[2]


def test_the_pattern_of_the_guide_finds_the_same(folder_of: Folder, tmp_path: Path) -> None:
    shutil.copy(folder_of(REACTION_ATOMS) / "vocab.txt", tmp_path)
    pattern = pattern_of(REACTION_ATOMS)
    shown = describe(tmp_path, pattern)
    for text in SUZUKI:
        assert re.findall(shown, text) == re.findall(pattern, text)


def test_a_vocabulary_of_another_tokenizer_is_refused_alone(folder_of: Folder) -> None:
    folder_of(REACTIONS)
    with pytest.raises(FormatError, match=r"such as '>>': another tokenizer reads them; d"):
        load_bundle(checkpoint(REACTIONS) or "")


def test_masked_atoms_and_the_class_of_a_reaction_are_predicted(folder_of: Folder) -> None:
    masked = "CC(=O)O.OCC>>CC(=O)[MASK]CC"
    answer = Predictor(folder_of(REACTION_ATOMS), device="cpu").predict([masked])[0][0]
    assert (answer["token_str"], answer["sequence"]) == ("O", "CC(=O)O.OCC>>CC(=O)OCC")
    assert answer["score"] > 0.8
    predictor = Predictor(folder_of(REACTION_CLASSES), device="cpu")
    assert predictor.task.labels == [f"LABEL_{number}" for number in range(50)]
    first, second, other = (
        answer[0]
        for answer in predictor.predict(
            ["CC(=O)Cl.NCC>>CC(=O)NCC", "CCC(=O)Cl.NC>>CCC(=O)NC", SUZUKI[0]]
        )
    )
    assert first["label"] == second["label"] != other["label"]


def reactions() -> list[dict[str, str]]:
    """Esters and amides of short chains."""
    rows = []
    for acid in ("C", "CC", "CCC"):
        for other in ("C", "CC", "C(C)C"):
            rows += [
                {"text": f"{acid}C(=O)O.O{other}>>{acid}C(=O)O{other}", "label": "ester"},
                {"text": f"{acid}C(=O)Cl.N{other}>>{acid}C(=O)N{other}", "label": "amide"},
            ]
    return rows


@dataclass(frozen=True)
class Tuned:
    """A model after a few steps, as a classifier."""

    name: str
    folder: Path
    losses: list[float]
    of_transformers: list[float]
    """The losses of its class with torch's AdamW, from the same weights on the same rows."""


SLOW = (MPNET, REACTIONS)
"""Exported with `--whole`: half of the time of all tests here."""
TASK = TextClassification(["amide", "ester"])
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.0)


@pytest.fixture(scope="module", params=[SPLADE, MINILM, REACTIONS, REACTION_ATOMS, MPNET])
def tuned(
    request: pytest.FixtureRequest, folder_of: Folder, tmp_path_factory: pytest.TempPathFactory
) -> Tuned:
    import transformers

    bundle = load_bundle(folder_of(request.param))
    config = bundle.encoder_config.adapted(hidden_dropout_prob=0.0, attention_dropout=0.0)
    config = replace(config, head=replace(config.head, classifier_dropout=0.0))
    torch.manual_seed(0)
    ours = build_model(replace(bundle, encoder_config=config), [TASK.build_objective(config)])
    entries = encoder_config_to_huggingface(config) | {"num_labels": len(TASK.labels)}
    kind = getattr(transformers, f"{LAYOUTS[config.family].title}ForSequenceClassification")
    theirs = kind(transformers.AutoConfig.for_model(**entries))
    differ = theirs.load_state_dict(to_huggingface(ours.state_dict(), config), strict=False)
    assert not differ.unexpected_keys
    assert all(key.endswith("_ids") for key in differ.missing_keys), differ
    rows = reactions()[: STEPS * ROWS]
    batches = []
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        ids = bundle.tokenizer.encode([row["text"] for row in some], None)
        labels = torch.tensor([TASK.labels.index(row["label"]) for row in some])
        batches.append(pad(ids, bundle.tokenizer.pad_id) | {"labels": labels})
    folder = tmp_path_factory.mktemp("tuned") / "bundle"
    losses = losses_of_ours(ours, batches)
    save_bundle(folder, ours, bundle.tokenizer, About(task=TASK))
    return Tuned(request.param, folder, losses, losses_of_transformers(theirs, batches, config))


def losses_of_ours(model: ObjectiveModel, batches: list[Batch]) -> list[float]:
    steps = training_steps(
        model,
        [[batch] for batch in batches],
        build_optimizer(model, OPTIMIZER),
        lambda step: OPTIMIZER.lr,
        LoopConfig(max_steps=len(batches), precision="fp32"),
        max_grad_norm=OPTIMIZER.max_grad_norm,
    )
    name = "classification"
    return [float(step.loss_sums[name]) / step.counts[name] for step in steps]


def losses_of_transformers(
    model: nn.Module, batches: list[Batch], config: EncoderConfig
) -> list[float]:
    model.train()
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.lr,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    losses = []
    for batch in batches:
        loss = model(**asked(batch, config), labels=batch["labels"]).loss
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        adam.step()
        losses.append(loss.item())
    return losses


def test_fine_tuning_gives_the_losses_of_transformers(tuned: Tuned) -> None:
    np.testing.assert_allclose(tuned.losses, tuned.of_transformers, atol=1e-4, rtol=0)
    assert len(tuned.losses) == STEPS
    assert abs(tuned.losses[0] - tuned.losses[-1]) > 1e-3, "the steps change something"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where exports are recorded."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


def test_a_fine_tuned_model_is_exported_and_answers_as_in_transformers(
    tuned: Tuned, store: str, tmp_path: Path, whole: bool
) -> None:
    import transformers

    predictor = Predictor(tuned.folder, device="cpu")
    texts = [row["text"] for row in reactions()]
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tuned.folder).eval()
    encode = transformers.AutoTokenizer.from_pretrained(tuned.folder)
    with torch.inference_mode():
        logits = theirs(**encode(texts, padding=True, return_tensors="pt")).logits
    close(torch.from_numpy(np.stack(scores_of(predictor, texts))), logits)
    if tuned.name in SLOW and not whole:
        return
    output = tmp_path / "export"
    export.run(
        ExportConfig(output=str(output), model=str(tuned.folder), num_workers=0, tracking_uri=store)
    )
    graphs = Predictor(output / "bundle")
    assert graphs.bundle.graph is not None
    wanted, scores = scores_of(predictor, texts), scores_of(graphs, texts)
    assert largest_difference(wanted, scores) < TOLERANCE
    for answer, other in zip(graphs.predict(texts), predictor.predict(texts), strict=True):
        assert [one["label"] for one in answer] == [one["label"] for one in other]


def scores_of(predictor: Predictor, texts: list[str]) -> list[np.ndarray]:
    return predictor.forward(predictor.encode(predictor.rows(texts)))
