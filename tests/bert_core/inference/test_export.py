"""Graphs beside torch: the same scores for every task, from a bundle that other tools run too."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bert_core
from bert_core.bundle.format import About, bundle_digest, load_bundle
from bert_core.bundle.layout import GRAPHS, Execution
from bert_core.bundle.weights import build_model
from bert_core.bundle.writing import Graph, save_bundle
from bert_core.errors import ConfigError, FormatError, ResourceError
from bert_core.inference import export, quantization
from bert_core.inference.engines.catalog import ENGINES
from bert_core.inference.export import TOLERANCE, export_graph, largest_difference
from bert_core.inference.predictor import Predictor
from bert_core.model.config import EncoderConfig, FeedForwardConfig
from bert_core.model.variants import VARIANTS
from bert_core.objectives.enhanced_mlm import EnhancedMaskedLanguageModeling
from bert_core.objectives.graph_scores import CLASSIFICATION
from bert_core.tasks.base import Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.feature_extraction import FeatureExtraction, FeatureExtractionOptions
from bert_core.tasks.fill_mask import FillMask, FillMaskOptions
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.token_classification import TokenClassification, TokenClassificationOptions
from tests import tiny

pytestmark = pytest.mark.usefixtures("unchecked")

TOKENIZER = tiny.tokenizer([*tiny.pieces(tiny.ALPHABET), ".", "?"])
CONFIG = tiny.encoder_config(
    TOKENIZER.vocab_size, max_position_embeddings=64, initializer_range=0.3
)
LABELS = ["B-sea", "I-sea", "O"]


def saved(
    folder: Path, task: Task, precision: str = "fp32", encoder: EncoderConfig = CONFIG
) -> Path:
    """A folder with `weights` and `graph`, bundles of one model with random weights."""
    model = tiny.model(task.encoder_config(encoder), task.build_objective).eval()
    about = About(task=task, metrics={"accuracy": 0.5}, lineage={"a": 1})
    save_bundle(folder / "weights", model, TOKENIZER, about)
    calibration = None
    if precision == "int8":
        predictor = Predictor(folder / "weights", device="cpu")
        windows = predictor.encode(predictor.rows(examples(task)))
        calibration = windows, TOKENIZER.pad_id
    write: Callable[[Path], None] = lambda path: export_graph(model, path, calibration)  # noqa: E731
    executions = [
        Execution(name, each) for name, engine in ENGINES.items() for each in engine.runs[precision]
    ]
    graph = Graph(name=GRAPHS[precision], write=write, executions=executions)
    save_bundle(folder / "graph", model, TOKENIZER, about, graph)
    return folder


def examples(task: Task) -> list[Any]:
    """Inputs of different lengths."""
    return [stretched(each, times) for times in (1, 3, 2) for each in task.examples]


def stretched(value: Any, times: int) -> Any:
    """An example with every text `times` as long; spans are marked only in its beginning."""
    if isinstance(value, str):
        return " ".join([value, *[re.sub(r"</?e[12]>", "", value)] * (times - 1)])
    if isinstance(value, dict):
        return {name: stretched(each, times) for name, each in value.items()}
    return [stretched(each, times) for each in value]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("classifier"), TextClassification(LABELS))


@pytest.fixture(
    scope="module",
    params=[
        TextClassification.name,
        *(
            pytest.param(name, marks=pytest.mark.drill)
            for name in TASKS
            if name != TextClassification.name
        ),
    ],
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == TextClassification.name:
        return request.getfixturevalue("classifier")
    kind = TASKS[request.param]
    rows = kind.kinds[0]
    task = kind.from_rows(rows.rows, kind.options_of(rows.options))
    return saved(tmp_path_factory.mktemp(request.param), task)


@pytest.mark.drill
def test_a_graph_answers_as_torch_does_in_batches_of_any_size_and_length(exported: Path) -> None:
    from bert_core.inference.engines.onnxruntime import OnnxRuntime

    torchs = Predictor(exported / "weights", device="cpu")
    graphs = Predictor(exported / "graph")
    assert isinstance(graphs.backend, OnnxRuntime)
    rows = torchs.rows(examples(torchs.task))
    windows = torchs.task.encode(rows, TOKENIZER, torchs.max_length)
    assert len({window.tokens for window in windows}) > 1
    for part in ([windows[0]], windows[:2], windows, [*windows * 9]):
        wanted, found = torchs.forward(part), graphs.forward(part)
        assert largest_difference(wanted, found) < TOLERANCE
        assert [each.dtype for each in found] == [np.float32] * len(part)
    answers = graphs.decode(rows, windows, graphs.forward(windows))
    assert len(answers) == len(rows)
    graphs.predict(graphs.task.examples)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 9), (2, 63), (2, 64)])
def test_a_graph_takes_any_number_of_rows_of_any_length(
    exported: Path, shape: tuple[int, int]
) -> None:
    """As other tools feed it, whose lengths are no multiples of ours."""
    from bert_core.inference.engines.onnxruntime import OnnxRuntime

    graphs = Predictor(exported / "graph").backend
    assert isinstance(graphs, OnnxRuntime)
    graph = export.Graph(Predictor(exported / "weights", device="cpu").model).eval()
    generator = torch.Generator().manual_seed(sum(shape))
    ids = torch.randint(5, TOKENIZER.vocab_size, shape, generator=generator)
    mask = (torch.arange(shape[1]) < torch.tensor([[shape[1]], [1], [5]])[: shape[0]]).long()
    given = [ids * mask, mask, torch.zeros_like(ids)]
    with torch.inference_mode():
        wanted = graph(*given)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    feed = dict(zip(names, (each.numpy() for each in given), strict=True))
    for mine, its in zip(wanted, graphs.run(feed, graph.outputs), strict=True):
        assert mine.shape == its.shape
        of_tokens = mine.ndim == 3 or len(graph.outputs) > 1
        scored = mask.bool().numpy() if of_tokens else ...
        np.testing.assert_allclose(its[scored], mine.numpy()[scored], atol=TOLERANCE)


@pytest.mark.drill
def test_the_graph_of_an_enhanced_mask_decoder_fills_masks_as_torch_does(tmp_path: Path) -> None:
    task = FillMask(options=FillMaskOptions(enhanced=True))
    config = VARIANTS["deberta-base"].config
    encoder = replace(
        config,
        hidden_size=32,
        num_hidden_layers=2,
        attention=replace(config.attention, num_heads=4),
        feed_forward=FeedForwardConfig(intermediate_size=48),
        initializer_range=0.3,
    ).adapted(vocab_size=TOKENIZER.vocab_size, pad_token_id=0)
    saved(tmp_path, task, encoder=encoder)
    torchs, graphs = Predictor(tmp_path / "weights", device="cpu"), Predictor(tmp_path / "graph")
    assert isinstance(graphs.model.objectives["mlm"], EnhancedMaskedLanguageModeling)
    windows = torchs.encode(torchs.rows(["the [MASK] is [MASK].", "a [MASK]", "[MASK]"]))
    assert largest_difference(torchs.forward(windows), graphs.forward(windows)) < TOLERANCE


def test_a_graph_keeps_the_precision_that_it_was_exported_with(exported: Path) -> None:
    message = r"wanted one of onnxruntime in fp32, .*, got backend auto and precision int8: leave"
    with pytest.raises(ConfigError, match=message):
        Predictor(exported / "graph", device="cpu", precision="int8")


def test_a_graph_is_valid_and_has_the_names_that_optimum_gives(exported: Path) -> None:
    import onnx

    path = exported / "graph" / "onnx" / "model.onnx"
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path)
    wanted = {
        "question-answering": ["start_logits", "end_logits"],
        "feature-extraction": ["last_hidden_state"],
        "sentence-similarity": ["last_hidden_state"],
        "sparse-embedding": ["sparse_embedding"],
    }
    task = Predictor(exported / "graph").task.name
    assert [one.name for one in model.graph.output] == wanted.get(task, ["logits"])
    assert [one.name for one in model.graph.input] == [
        "input_ids", "attention_mask", "token_type_ids",
    ]  # fmt: skip
    for each in model.graph.input:
        sizes = [size.dim_param for size in each.type.tensor_type.shape.dim]
        assert sizes == ["batch_size", "sequence_length"]


def test_a_graph_is_the_same_wherever_raybert_is_installed(exported: Path) -> None:
    graph = (exported / "graph" / "onnx" / "model.onnx").read_bytes()
    # torch 2.13.0 writes the stack of each node, with the paths of this machine's files.
    assert b"stack_trace" not in graph
    assert str(Path(bert_core.__file__).parent).encode() not in graph


def test_an_exported_bundle_has_all_but_the_weights(exported: Path) -> None:
    weights, graph = load_bundle(exported / "weights"), load_bundle(exported / "graph")
    assert graph.graph == "onnx/model.onnx"
    assert weights.task is not None
    assert graph.task is not None
    assert (graph.task.name, graph.task.record) == (weights.task.name, weights.task.record)
    assert (graph.metrics, graph.lineage) == (weights.metrics, weights.lineage)
    assert graph.digest == bundle_digest(exported / "graph") != weights.digest
    names = {path.name for path in (exported / "graph").rglob("*")}
    assert not names & {"model.safetensors", "objective.safetensors"}
    assert (exported / "graph" / "config.json").read_bytes() == (
        exported / "weights" / "config.json"
    ).read_bytes()


@pytest.mark.guard
def test_a_graph_in_8_bits_is_small_and_near(tmp_path: Path) -> None:
    import onnx

    saved(tmp_path, QuestionAnswering(), "int8")
    (path,) = (tmp_path / "graph" / "onnx").iterdir()
    assert path.name == "model_quantized.onnx"
    graph = onnx.load(path).graph
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in graph.node}
    whole = [onnx.numpy_helper.to_array(each) for each in graph.initializer]
    weights = [each for each in whole if each.dtype == np.int8 and each.ndim == 2]
    assert weights
    for each in weights:  # two products of a pair fit into 16 bits on any CPU
        assert 2 * 255 * np.abs(each.astype(int)).max() < 1 << 15
    torchs, graphs = Predictor(tmp_path / "weights", device="cpu"), Predictor(tmp_path / "graph")
    windows = torchs.encode(torchs.rows(torchs.task.examples))
    difference = largest_difference(torchs.forward(windows), graphs.forward(windows))
    assert TOLERANCE < difference < 0.3


@pytest.mark.parametrize("precision", GRAPHS)
@pytest.mark.guard
def test_weights_that_do_not_fit_into_the_file_lie_beside_it(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "MOST_BYTES", 0)
    saved(tmp_path, TextClassification(LABELS), precision)
    graph, beside = sorted((tmp_path / "graph" / "onnx").iterdir())
    assert beside.name == f"{graph.name}_data"
    assert beside.stat().st_size > 10_000
    torchs, graphs = (Predictor(tmp_path / name, device="cpu") for name in ("weights", "graph"))
    windows = torchs.encode(torchs.rows(torchs.task.examples))
    difference = largest_difference(torchs.forward(windows), graphs.forward(windows))
    assert difference < (TOLERANCE if precision == "fp32" else 0.3)
    beside.write_bytes(beside.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"onnx_data: wanted sha256"):
        Predictor(tmp_path / "graph")


def test_threads_are_as_many_as_asked_for(classifier: Path) -> None:
    from bert_core.inference.engines.onnxruntime import OnnxRuntime

    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            Predictor(classifier / "weights", device="cpu", threads=threads)
            assert torch.get_num_threads() == threads
            for asked in (1, 3, None):
                backend = Predictor(classifier / "graph", threads=asked).backend
                assert isinstance(backend, OnnxRuntime)
                options = backend.session.get_session_options()
                assert options.intra_op_num_threads == (asked or threads)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.drill
def test_a_layer_before_the_last_is_the_graph_s_last(tmp_path: Path) -> None:
    saved(tmp_path, FeatureExtraction(options=FeatureExtractionOptions(layer=1)))
    ours, graphs = (Predictor(tmp_path / name, device="cpu") for name in ("weights", "graph"))
    wanted, found = (each.predict(["a text"]) for each in (ours, graphs))
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    assert Predictor(tmp_path / "graph", options={"normalize": True}, task="feature-extraction")


def test_models_without_a_graph_form_are_refused_with_the_way_out(tmp_path: Path) -> None:
    task = TokenClassification(LABELS, TokenClassificationOptions(feature_based=True))
    message = (
        "wanted a head that has an ONNX graph, got feature_based_token_classification.*"
        "use the bundle as it is, or"
    )
    with pytest.raises(FormatError, match=message):
        saved(tmp_path, task)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_a_graph_for_another_task_is_refused(classifier: Path) -> None:
    with pytest.raises(FormatError, match=r"with the outputs last_hidden_state.*, got logits"):
        Predictor(classifier / "graph", task="feature-extraction")


def test_a_graph_is_not_for_a_gpu_and_not_to_be_trained(classifier: Path) -> None:
    with pytest.raises(ConfigError, match=r"device: wanted cpu for .*got cuda: leave it unset"):
        Predictor(classifier / "graph", device="cuda")
    with pytest.raises(FormatError, match=r"wanted a bundle with .*, got an exported one"):
        build_model(load_bundle(classifier / "graph"), [])


def test_a_graph_that_was_changed_or_is_invalid_is_refused(
    classifier: Path, tmp_path: Path
) -> None:
    from bert_core.inference.engines.onnxruntime import OnnxRuntime

    path = classifier / "graph" / "onnx" / "model.onnx"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-1])
        with pytest.raises(FormatError, match=r"model.onnx: wanted sha256"):
            Predictor(classifier / "graph")
    finally:
        path.write_bytes(whole)
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(FormatError, match=r"wanted a graph that onnxruntime .* can run.*: export"):
        OnnxRuntime(tmp_path / "model.onnx", CLASSIFICATION, 64, 1)


ANSWERING = """
import asyncio, json, sys
from pathlib import Path
from bert_core.inference.predictor import Predictor
from serve.model.model import Model

folder, *backends = sys.argv[1:]
texts = ["the sea", "a", "the tree is blue and so is the sea"]

async def served(backend: str) -> object:
    model = Model(
        "docs", Path(folder), device="cpu", threads=1, max_batch_tokens=256, max_wait_ms=1.0,
        backend=backend,
    )
    try:
        model.card()
        return await model.predict(texts, None)
    finally:
        await model.close()

predictors = {backend: Predictor(folder, backend=backend) for backend in backends}
print(json.dumps({backend: [predictor.predict(texts), asyncio.run(served(backend))]
                  for backend, predictor in predictors.items()}))
assert "torch" not in sys.modules
for predictor in predictors.values():
    assert predictor.model.encoder.config == predictor.bundle.encoder_config  # which imports it
assert "torch" in sys.modules
"""


def test_a_process_that_answers_from_a_graph_never_imports_torch(classifier: Path) -> None:
    """Which would take 120 MB of each replica."""
    folder = str(classifier / "graph")
    done = subprocess.run(
        [sys.executable, "-c", ANSWERING, folder, *ENGINES],
        capture_output=True,
        text=True,
        cwd=Path(bert_core.__file__).parents[1],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    texts = ["the sea", "a", "the tree is blue and so is the sea"]
    told = json.loads(done.stdout)
    assert list(told) == list(ENGINES)
    for backend in ENGINES:
        wanted = Predictor(folder, backend=backend).predict(texts)
        assert told[backend] == [wanted, wanted], backend


WITHOUT = """
import sys
sys.modules["onnxruntime"] = sys.modules["openvino"] = None
from bert_core.inference.predictor import Predictor
Predictor(sys.argv[1], backend=sys.argv[2])
"""


@pytest.mark.drill
@pytest.mark.parametrize("backend", ["onnxruntime", "auto"])
def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(
    classifier: Path, backend: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(classifier / "graph"), backend],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ResourceError" in done.stderr
    assert "is not installed: pip install" in done.stderr


def test_scores_that_differ_are_measured_and_those_that_are_missing_refused() -> None:
    ones = np.ones((2, 3), dtype=np.float32)
    gap = np.array([[1, -np.inf, 1], [1, 1, 1]], dtype=np.float32)
    assert largest_difference([ones, gap], [ones, gap + 0.25]) == 0.25
    assert largest_difference([4 * ones], [5 * ones]) == 0.25
    with pytest.raises(FormatError, match="in the same places"):
        largest_difference([ones], [gap])


@pytest.mark.drill
def test_a_graph_answers_every_task_that_shares_its_head(tmp_path: Path) -> None:
    from bert_core.inference.engines.onnxruntime import OnnxRuntime

    saved(tmp_path, TextClassification(["contradiction", "entailment", "neutral"]))
    torchs, graphs = Predictor(tmp_path / "weights", device="cpu"), Predictor(tmp_path / "graph")
    assert list(graphs.also) == list(torchs.also) == ["zero-shot-classification"]
    asked = Predictor(tmp_path / "graph", task="zero-shot-classification")
    assert isinstance(asked.backend, OnnxRuntime)
    for one in (graphs.also[asked.task.name], asked):
        (mine,), (wanted,) = (
            each.predict(asked.task.examples) for each in (one, torchs.also[asked.task.name])
        )
        for ours, theirs in zip(mine, wanted, strict=True):
            assert ours["label"] == theirs["label"]
            assert ours["score"] == pytest.approx(theirs["score"], abs=TOLERANCE)


@pytest.mark.drill
def test_a_graph_for_masked_words_is_not_used_for_sparse_vectors(tmp_path: Path) -> None:
    saved(tmp_path, FillMask())
    with pytest.raises(
        FormatError, match="wanted a bundle for sparse-embedding, this one is for f"
    ):
        Predictor(tmp_path / "graph", task="sparse-embedding")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A graph per precision that it is exported with, wide enough for the engines' kernels."""
    encoder = tiny.encoder_config(
        TOKENIZER.vocab_size,
        max_position_embeddings=128,
        hidden_size=128,
        intermediate_size=256,
        initializer_range=0.1,
    )
    return {
        precision: saved(
            tmp_path_factory.mktemp(precision), TextClassification(LABELS), precision, encoder
        )
        / "graph"
        for precision in GRAPHS
    }


@pytest.mark.drill
@pytest.mark.parametrize(
    ("kind", "engine", "precision"),
    [
        (kind, name, precision)
        for name, engine in ENGINES.items()
        for kind, precisions in engine.runs.items()
        for precision in precisions
    ],
)
def test_a_text_gets_the_same_numbers_alone_and_in_any_batch(
    kind: str, engine: str, precision: str, both: dict[str, Path]
) -> None:
    predictor = predictor_of(both[kind], engine, precision)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(list(tiny.ALPHABET), rng.integers(1, 120))) for _ in range(200)]
    windows = predictor.encode(predictor.rows(texts))
    alone = np.stack([predictor.forward([window])[0] for window in windows])
    assert np.ptp(alone, axis=0).min() > 0.01  # texts have scores of their own
    for size in (2, 5, 32, 200):
        order = rng.permutation(len(windows))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            found = predictor.forward([windows[place] for place in chosen])
            np.testing.assert_array_equal(np.stack(found), alone[chosen])


def predictor_of(bundle: Path, engine: str, precision: str) -> Predictor:
    try:
        return Predictor(bundle, backend=engine, precision=precision)
    except ResourceError as error:  # only where OpenVINO says that this CPU has no bfloat16
        if "bf16" not in precision:
            raise
        pytest.skip(str(error))


@pytest.mark.drill
def test_every_run_of_a_bundle_gives_nearly_the_same_scores(both: dict[str, Path]) -> None:
    for folder in both.values():
        executions = load_bundle(folder).executions
        texts = ["a b c d", "e f g"]
        found = [predictor_of(folder, *how).predict(texts) for how in executions]
        scores = [
            [{each["label"]: each["score"] for each in answer} for answer in answers]
            for answers in found
        ]
        for other in scores[1:]:
            for mine, theirs in zip(scores[0], other, strict=True):
                assert mine == pytest.approx(theirs, abs=0.05)


@pytest.mark.drill
def test_the_engine_is_chosen_among_those_the_bundle_permits(both: dict[str, Path]) -> None:
    assert not load_bundle(both["int8"]).ranges_of_batch
    executions = load_bundle(both["int8"]).executions
    first, second = executions[:2]
    assert first == Execution("onnxruntime", "int8") == Predictor(both["int8"]).execution
    assert Predictor(both["int8"], backend="auto").execution in executions
    assert Predictor(both["int8"], backend="auto", prefer=second).execution == second
    elsewhere = Execution("torch", "fp32")  # as after an alias has moved from weights to a graph
    assert Predictor(both["int8"], backend="auto", prefer=elsewhere).execution == first
    weights = both["fp32"].parent / "weights"
    assert Predictor(weights, device="cpu", backend="auto").execution == elsewhere
    with pytest.raises(ConfigError, match=r"torch in bf16 for .* holds model.*got backend openvin"):
        Predictor(weights, backend="openvino")
    with pytest.raises(ConfigError, match=r"holds onnx/model_quantized.onnx, got backend torch: l"):
        Predictor(both["int8"], backend="torch")


def test_8_bits_of_before_run_as_then_and_say_that_they_take_ranges_from_batches(
    classifier: Path, tmp_path: Path
) -> None:
    """What is read of them is in the record and the name of the graph, here one in fp32."""
    folder = tmp_path / "older"
    shutil.copytree(classifier / "graph", folder)
    (folder / GRAPHS["fp32"]).rename(folder / GRAPHS["int8"])
    record = json.loads((folder / "raybert.json").read_text())
    record["format_version"], record["digest"] = 1, ""
    record["files"][GRAPHS["int8"]] = record["files"].pop(GRAPHS["fp32"])
    (folder / "raybert.json").write_text(json.dumps(record))
    assert not load_bundle(folder).ranges_of_batch
    del record["runs"]
    (folder / "raybert.json").write_text(json.dumps(record))
    bundle = load_bundle(folder)
    assert bundle.executions == (Execution("onnxruntime", "int8"),)
    assert bundle.ranges_of_batch
    assert Predictor(folder, backend="auto").execution == bundle.executions[0]
    with pytest.raises(ConfigError, match=r"wanted one of onnxruntime in int8 for .*: leave both"):
        Predictor(folder, backend="openvino")
