"""The card of a registered version: what it answers, how well, and what it was made from.

In the form of Hugging Face's README.md for models. (The card for data, next to the shards, is in
`pipelines.corpus.data_card`.)
"""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bert_core.errors import InputError
from bert_core.manifest import Manifest
from bert_core.wording import some_of, table
from tracking.models.registry import Publication
from tracking.runs import metric_names as names
from tracking.runs.goodput import duration

if TYPE_CHECKING:
    from bert_core.bundle.format import Bundle
    from bert_core.inference.predictor import Predictor
    from bert_core.tasks.base import Task

REMARKS = ("rows_cut", "rows_with_empty_text", "broken_lines_left_out", "rows_left_out_as_bad")
"""Counts of an evaluation: rows that were changed or left out."""

_BARE_KEY = re.compile(r"[\w-]+", re.ASCII)
"""TOML keys that need no quotes."""

Classes = Mapping[str, Mapping[str, float]]

CALIBRATION = "expected_calibration_error"
SHOWN_LABELS, SHOWN_CLASSES = 20, 20


def model_card(
    publication: Publication,
    predictor: "Predictor",
    evaluation: Manifest,
    classes: Classes | None,
    example: Any,
    *,
    hub: str | None = None,
    licence: str | None = None,
) -> str:
    """Return the card as Markdown after YAML front matter that `huggingface_hub.ModelCard` reads.

    Args:
        publication: the bundle's publication; says why the alias points where it does.
        predictor: the bundle's predictor.
        evaluation: manifest of `raybert evaluate` for this bundle.
        classes: its metrics per class, if the task has classes.
        example: an input as a caller sends it; the card shows the answer to it.
        hub: `owner/name` on the Hugging Face hub, if the bundle is uploaded there.
        licence: of the weights, as the hub spells it; None leaves it open.
    """
    task, bundle, version = predictor.task, predictor.bundle, publication.version
    parts = [
        f"---\n{_front_matter(version.name, task, bundle, evaluation, licence)}\n---",
        f"# {version.name}, version {version.version}",
        _summary(predictor),
        "## Use",
        *([] if hub is None else [_use_of_hub(hub)]),
        _use(publication, predictor, example),
        "## Evaluation",
        _evaluated(evaluation),
        _metrics(evaluation.counts),
        *([] if classes is None else [_by_class(classes)]),
        "## Champion at publication",
        f"{publication.why[:1].upper()}{publication.why[1:]}.",
        "## What it was made from",
        _lineage(bundle),
        *(["## Time and cost", time_table(bundle.spent)] if bundle.spent else []),
        "## Recipe",
        *_recipes(bundle.lineage),
    ]
    return "\n\n".join(parts) + "\n"


def without_front_matter(card: str) -> str:
    """Return the card without its YAML front matter: the part for human readers."""
    return card.split("\n---\n", 1)[1].lstrip()


def _front_matter(
    name: str, task: "Task", bundle: "Bundle", evaluation: Manifest, licence: str | None
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    counts = evaluation.counts
    pipeline = task.pipeline_tag or task.name
    source = dataset_name(str(counts.get("source", "held-out rows")))
    measured = [
        EvalResult(
            task_type=pipeline,
            dataset_type=source,
            dataset_name=source,
            dataset_revision=evaluation.inputs.get("held_out"),
            metric_type=metric,
            metric_name=f"{metric}, 95 % interval {_interval(counts, metric)}",
            metric_value=counts[metric],
        )
        for metric in _measured(counts)
    ]
    data = ModelCardData(
        model_name=name,
        license=licence,
        base_model=_base_model(bundle),
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["raybert", bundle.encoder_config.family, task.name],
        metrics=_measured(counts),
        eval_results=measured,
    )
    return data.to_yaml()


def _base_model(bundle: "Bundle") -> str | None:
    """Return the nearest ancestor that is a model of the hub; None if no ancestor is."""
    for _, lineage in reversed(chain(bundle.digest, bundle.lineage)[:-1]):
        if "hub" in lineage:
            return lineage["hub"].partition("@")[0]
    return None


def dataset_name(source: str) -> str:
    """Return the id of a data set of the hub, or the file name of any other source.

    Metadata on the hub should not say where files are on this machine.
    """
    if source.startswith("hf://datasets/"):
        return "/".join(source.removeprefix("hf://datasets/").split("/")[:2])
    if "://" in source:
        source = source.partition("?")[0]  # the query string may hold a secret
    return source.rstrip("/").rpartition("/")[2] or source


def _summary(predictor: "Predictor") -> str:
    task = predictor.task
    millions = sum(weight.numel() for weight in predictor.model.parameters()) / 1e6
    sentence = (
        f"Answers `{task.name}`: an encoder of the family "
        f"{predictor.bundle.encoder_config.family} with its head, {millions:,.1f} M parameters."
    )
    if not task.labels:
        return sentence
    notes = "".join(f" {note[:1].upper()}{note[1:]}." for note in task.notes)
    names = some_of([*map(code_span, task.labels)], SHOWN_LABELS)
    return f"{sentence} Its labels: {names}.{notes}"


def _use(publication: Publication, predictor: "Predictor", example: Any) -> str:
    from bert_core.model.hf import architecture

    version = publication.version
    config, graph = predictor.bundle.encoder_config, predictor.bundle.graph
    kind = architecture(config, predictor.model.in_transformers)
    loads = (
        f"`transformers.{kind}` loads"
        if graph is None
        else f"onnxruntime or OpenVINO runs `{graph}` in"
    )
    task = predictor.task
    try:
        [answer], cut = predictor.predict([example]), ""
    except InputError:  # the example is too long
        [answer], cut = predictor.predict([example], task.parameters.cutting()), _cut(task)
    best = json.dumps(task.cells(answer), ensure_ascii=False)
    call = f"[{example!r}]" if isinstance(example, str) else f"pd.DataFrame([{dict(example)!r}])"
    imports = (
        "import mlflow\n" if isinstance(example, str) else "import mlflow\nimport pandas as pd\n"
    )
    return (
        "With raybert installed, and MLflow's tracking URI set to this registry:\n\n"
        f"```python\n{imports}\n"
        f'model = mlflow.pyfunc.load_model("models:/{version.name}/{version.version}")\n'
        f"model.predict({call}{cut})\n```\n\n"
        f"The answer, on the machine that measured it:\n\n```json\n{best}\n```\n\n"
        f"`raybert serve` serves it over HTTP; {loads} the folder of this file."
    )


def _use_of_hub(hub: str) -> str:
    name = hub.rpartition("/")[2]  # valid as a server's model name, unlike any name in a registry
    return (
        "From the Hugging Face hub, over HTTP or on files of rows:\n\n"
        f"```bash\nraybert serve --models {name}={hub}\n"
        f"raybert predict --model {hub} --source rows.jsonl --output answers\n```"
    )


def _cut(task: "Task") -> str:
    """Return the argument of `predict` that has long texts cut."""
    return f", params={ {task.parameters.cut_by: True} }"


def _evaluated(evaluation: Manifest) -> str:
    counts, digest = evaluation.counts, evaluation.inputs.get("held_out", "")
    source = code_span(counts["source"]) if "source" in counts else "a file"
    seen = counts.get("rows_seen_in_training", 0)
    warning = f" **{seen:,} of them trained or selected it**, which favours it." if seen else ""
    odd = [f"{n:,} {name.replace('_', ' ')}" for name in REMARKS if (n := counts.get(name, 0))]
    warning += f" Of note: {', '.join(odd)}." if odd else ""
    return (
        f"Measured on {counts['rows']:,} rows of {source} (sha256 "
        f"`{digest}`).{warning} Intervals are 95 % intervals, by bootstrap over these rows; the "
        "baseline is the best answer that ignores the input. The metric that decides is "
        f"{counts['primary_metric']}."
    )


def _metrics(counts: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            _number(counts[name]),
            _interval(counts, name),
            _number(counts.get(f"baseline_{name}")),
        )
        for name in _measured(counts)
    ]
    rows += [
        (name.replace("_", " "), _number(counts[name]), "–", "–")
        for name in (CALIBRATION, f"{CALIBRATION}_before", "brier_score")
        if name in counts
    ]
    return table(("metric", "value", "interval", "baseline"), rows)


def _measured(counts: Mapping[str, Any]) -> list[str]:
    """Return the names of the task's metrics: those that have a confidence interval."""
    return [name for name in counts if f"{name}_low" in counts]


def _interval(counts: Mapping[str, Any], name: str) -> str:
    return f"{_number(counts[f'{name}_low'])} to {_number(counts[f'{name}_high'])}"


def _by_class(classes: Classes) -> str:
    shown = sorted(classes, key=lambda label: (-classes[label]["support"], label))
    kinds = {"accuracy": "accuracy", "precision": "precision", "recall": "recall", "f1": "F1"}
    kinds = {name: title for name, title in kinds.items() if name in classes[shown[0]]}
    rows = [
        (code_span(label), *(_number(figures[name]) for name in kinds), f"{figures['support']:,}")
        for label in shown[:SHOWN_CLASSES]
        for figures in [classes[label]]
    ]
    text = table(("class", *kinds.values(), "rows or items"), rows)
    if len(shown) > SHOWN_CLASSES:
        text += f"\n\n{len(shown) - SHOWN_CLASSES} more are in the evaluation's `classes.json`."
    return text


def _lineage(bundle: "Bundle") -> str:
    rows = []
    shown = set()  # data such as the vocabulary is often shared with the parent model
    for digest, lineage in chain(bundle.digest, bundle.lineage):
        for data in lineage.get("data", ()):
            if (data["name"], data["digest"]) in shown:
                continue
            shown.add((data["name"], data["digest"]))
            facts = [code_span(data["source"])] if "source" in data else []
            facts += [f"{v:,} {k}" for k, v in data.items() if isinstance(v, int)]
            rows.append((data["name"], f"`{data['digest']}`", ", ".join(facts)))
        stage = lineage.get("stage")
        how = "not made by raybert" if stage is None else f"made by `raybert {stage}`"
        if lineage.get("from_scratch"):
            how += ", from random weights: only shape and vocabulary come from the model above"
        if "teacher" in lineage:
            how += f", from the teacher `{lineage['teacher']}`"
        if "code_version" in lineage:
            how += f" ({lineage['code_version']})"
        if "hub" in lineage:
            how += f", `{lineage['hub']}` on the Hugging Face hub"
        name = "**this model**" if digest == bundle.digest else "model"
        rows.append((name, f"`{digest}`", how))
    return table(("what", "digest", "details"), rows)


def time_table(spent: Mapping[str, float]) -> str:
    """Return a table of where the time of a run went, from `Goodput.numbers`."""
    wall_s = spent[names.WALL_S]
    rows = [
        (f"{activity.replace('_', ' ')}: {meaning}", duration(seconds), f"{seconds / wall_s:.1%}")
        for activity, meaning in names.ACTIVITIES.items()
        if (seconds := spent.get(names.time_of(activity)))
    ]
    rows.append(("**wall time**", duration(wall_s), "100.0%"))
    times = table(("what the time went into", "time", "share"), rows)
    goodput = f"{spent[names.GOODPUT]:.1%}"
    sentences = [f"Goodput, the share that went into steps that were kept: {goodput}."]
    if again := spent.get(names.RECOMPUTED_STEPS):
        sentences.append(f"Steps that were done again: {again:,.0f}.")
    if (cost := spent.get(names.COST_USD)) is not None:
        sentences.append(f"Cost: {cost:,.2f} USD.")
    return f"{times}\n\n{' '.join(sentences)}"


def chain(digest: str, lineage: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return digest and lineage of every model, from the first ancestor to this model."""
    parent = lineage.get("parent")
    before = [] if parent is None else chain(parent, lineage.get("parent_lineage", {}))
    return [*before, (digest, lineage)]


def _recipes(lineage: Mapping[str, Any]) -> list[str]:
    """Return the config of each stage, last stage first."""
    parts = []
    for _, made_by in reversed(chain("", lineage)):
        if "config" in made_by:
            fields = "\n".join(_toml(made_by["config"]))
            parts.append(f"`raybert {made_by['stage']}`:\n\n```toml\n{fields}\n```")
    return parts or ["Unknown."]


def _toml(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return one line of TOML per field; TOML has no null, so unset fields are left out."""
    lines = []
    for name, value in config.items():
        key = prefix + (name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False))
        if isinstance(value, Mapping):
            lines.extend(_toml(value, f"{key}."))
        elif value is not None:
            lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def code_span(text: str) -> str:
    """Return the text as a Markdown code span; line breaks and backticks in it are safe."""
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    space = " " * (shown.startswith("`") or shown.endswith("`"))
    return f"{fence}{space}{shown}{space}{fence}"
