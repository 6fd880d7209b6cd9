"""What a finished stage came to, in words: one line for a table, a sentence for a report."""

from collections.abc import Mapping
from typing import Any

from tracking.runs import metric_names as names

Counts = Mapping[str, Any]
NO_SHARES = ("loss", "mrr", "spearman", "pearson", "matthews", "ndcg", "mse")
"""Parts of the names of metrics that are not shares, even with values from 0 to 1."""
F1_OF = "f1_of_"
"""Before the label, in the name of its F1."""
_WORDS = {"mrr": "mean reciprocal rank", "f1": "F1", "mlm": "MLM", "nsp": "NSP"}


def result(stage: str, counts: Counts) -> str:
    """One line for a person, from the counts of a manifest; empty if nothing is known."""
    line_of = _RESULTS.get(stage, _rows)
    try:
        return line_of(counts)
    except (KeyError, TypeError, ValueError):
        return ""  # another version wrote other counts


def amount(number: float) -> str:
    """`950`, `24.4 M`: what a person wants to know of a large count."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= max(unit, 1e4):
            return f"{number / unit:,.1f} {name}"
    return f"{number:,.0f}"


def short_number(value: float, digits: int = 3) -> str:
    """`12000` → `12k`, `0.0005` → `5e-4`: at most so many digits, one less for a tiny number."""
    if value and abs(value) < 0.01:
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    value = float(f"{value:.{digits}g}")  # which may give it another unit: 999.6 is 1k
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.{digits}g}{name}"
    return f"{value:.{digits}g}"


def score(name: str, value: float) -> str:
    """`accuracy 42.3 %`; of a metric that is no share of anything, the plain number."""
    return f"{words(name)} {figure(name, value)}"


def figure(name: str, value: float) -> str:
    """A share as `42.3 %`, any other metric as a number."""
    what, _, _ = name.partition(F1_OF)  # a label may be called anything
    is_share = 0 <= value <= 1 and not any(part in what for part in NO_SHARES)
    if is_share:
        return percent(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:,.3g}"


def words(name: str) -> str:
    """`macro_f1` → `macro F1`; `f1_of_spam` → `F1 of spam`."""
    name, of, label = name.partition(F1_OF)
    for short, long in _WORDS.items():
        name = name.replace(short, long)
    return f"{name.replace('_', ' ')}{'F1 of ' if of else ''}{label}"


def _docstrings(counts: Counts) -> str:
    return f"{amount(counts['characters'])} characters in {counts['modules']:,} modules"


def _vocab(counts: Counts) -> str:
    return f"{counts['vocab_size']:,} word pieces from {amount(counts['words'])} words"


def _prepare(counts: Counts) -> str:
    return f"{amount(counts['tokens'])} tokens, {counts['rows']:,} rows"


def _pretrain(counts: Counts) -> str:
    before, after = counts[names.before(names.MLM_LOSS)], counts[names.after(names.MLM_LOSS)]
    parts = [f"held-out MLM loss {before:.2f} → {after:.2f}"]
    if (right := counts.get(names.after(names.MLM_ACCURACY))) is not None:
        parts.append(f"{percent(right)} of masked words right")
    return ", ".join(parts)


def _finetune(counts: Counts) -> str:
    main, seeds = counts["primary_metric"], counts["seeds"]
    held_out = f"{main}_mean"
    key = held_out if held_out in counts else f"selection_{main}_mean"
    spread = f" ± {figure(main, counts[key.replace('_mean', '_std')])}"
    main_score = score(main, counts[key])
    rows = "" if key == held_out else " on the selection rows"
    return f"{main_score}{spread if len(seeds) > 1 else ''}{rows}" + (
        f", {len(seeds)} seeds" if len(seeds) > 1 else ""
    )


def _distill(counts: Counts) -> str:
    if "primary_metric" in counts:
        return _finetune(counts)
    before, after = counts[names.before(names.LOSS)], counts[names.after(names.LOSS)]
    return f"held-out loss {before:.3g} → {after:.3g}"


def _tune(counts: Counts) -> str:
    [metric] = [key for key in counts if key.startswith("selection_")][:1]
    chosen = ", ".join(f"{key} {value:g}" for key, value in counts["parameters"].items())
    best = score(metric.removeprefix("selection_"), counts[metric])
    return f"best of {counts['trials']}: {best}, {chosen}"


def _evaluate(counts: Counts) -> str:
    main = counts["primary_metric"]
    low, high = counts[f"{main}_low"], counts[f"{main}_high"]
    interval = f"{figure(main, low)} to {figure(main, high)}"
    return f"{score(main, counts[main])} ({interval}), {counts['rows']:,} rows"


def _publish(counts: Counts) -> str:
    return f"version {counts['version']}{', the champion' if counts['is_champion'] else ''}"


def _rows(counts: Counts) -> str:
    return ", ".join(
        f"{counts[key]:,} {key}" for key in ("queries", "rows", "records") if key in counts
    )


_RESULTS = {
    "docstrings": _docstrings,
    "vocab": _vocab,
    "prepare": _prepare,
    "pretrain": _pretrain,
    "finetune": _finetune,
    "distill": _distill,
    "tune": _tune,
    "evaluate": _evaluate,
    "publish": _publish,
}


def sentence(stage: str, counts: Counts) -> str:
    """What was learnt, for a reader who knows neither the stage nor its figures."""
    try:
        return _SENTENCES[stage](counts) if stage in _SENTENCES else ""
    except (KeyError, TypeError, ValueError):
        return ""


def percent(share: float) -> str:
    """`42.3 %`, in one piece at the end of a line."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def _corpus_sentence(counts: Counts) -> str:
    return (
        f"The text is {amount(counts['characters'])} characters of prose from "
        f"{counts['modules']:,} modules, {counts['held_out_modules']:,} of which no training sees."
    )


def _vocab_sentence(counts: Counts) -> str:
    return (
        f"The vocabulary has {counts['vocab_size']:,} word pieces, learnt from "
        f"{amount(counts['words'])} words of {counts['documents']:,} documents."
    )


def _prepare_sentence(counts: Counts) -> str:
    return (
        f"{counts['documents']:,} documents with {amount(counts['tokens'])} tokens were cut into "
        f"{counts['rows']:,} rows of up to {counts['max_length']} tokens."
    )


def _pretrain_sentence(counts: Counts) -> str:
    before, after = counts[names.before(names.MLM_LOSS)], counts[names.after(names.MLM_LOSS)]
    lowered = (
        f"Pretraining lowered the loss on masked words of held-out text from {before:.2f} to "
        f"{after:.2f} nats"
    )
    accuracy = counts.get(names.after(names.MLM_ACCURACY))
    if accuracy is None:
        return f"{lowered}."
    base = counts.get(names.UNIGRAM_ACCURACY)
    than = "" if base is None else f" ({percent(base)} for always guessing the most frequent word)"
    return f"{lowered}: the model now predicts {percent(accuracy)} of them correctly{than}."


def _finetune_sentence(counts: Counts) -> str:
    main = counts["primary_metric"]
    value = counts.get(f"{main}_mean")
    if value is None:
        return ""
    seeds, base = len(counts["seeds"]), counts.get(f"baseline_{main}")
    spread = f" ± {figure(main, counts[f'{main}_std'])} over {seeds} seeds" if seeds > 1 else ""
    than = "" if base is None else f" (without reading the text: {figure(main, base)})"
    rows = counts["train_rows"] - counts.get("augmented_rows", 0)
    how = "Distilled from its teacher" if "teacher_parameters" in counts else "Fine-tuned"
    return (
        f"{how} on {rows:,} labelled rows, it reaches {words(main)} "
        f"{figure(main, value)}{spread} on {counts['held_out_rows']:,} rows it has not seen{than}."
    )


def _tune_sentence(counts: Counts) -> str:
    return f"Trial {counts['best']} is the {_tune(counts)}."


def _evaluate_sentence(counts: Counts) -> str:
    main = counts["primary_metric"]
    low, high = counts[f"{main}_low"], counts[f"{main}_high"]
    return (
        f"Measured on {counts['rows']:,} rows, the model has {words(main)} "
        f"{figure(main, counts[main])}; the 95 % interval is {figure(main, low)} to "
        f"{figure(main, high)}."
    )


def _publish_sentence(counts: Counts) -> str:
    return f"In the registry, {counts['why']}."


def _export_sentence(counts: Counts) -> str:
    return (
        f"The exported graph is {counts['size_bytes'] / 1e6:,.1f} MB; its scores differ from the "
        f"model's by {counts['largest_difference']:.2g} at most."
    )


def _predict_sentence(counts: Counts) -> str:
    return f"The model answered {counts['rows']:,} rows."


def _search_sentence(counts: Counts) -> str:
    return f"{counts['queries']:,} queries were compared with {counts['rows']:,} rows."


def _extract_sentence(counts: Counts) -> str:
    return f"Fields were extracted from {counts['rows']:,} documents."


_SENTENCES = {
    "docstrings": _corpus_sentence,
    "vocab": _vocab_sentence,
    "prepare": _prepare_sentence,
    "pretrain": _pretrain_sentence,
    "finetune": _finetune_sentence,
    "distill": _finetune_sentence,
    "tune": _tune_sentence,
    "evaluate": _evaluate_sentence,
    "publish": _publish_sentence,
    "export": _export_sentence,
    "predict": _predict_sentence,
    "search": _search_sentence,
    "extract": _extract_sentence,
}
