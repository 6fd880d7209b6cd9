"""What stages came to, in words."""

import pytest

from tracking.runs.story import amount, figure, result, sentence, short_number


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(
    ("number", "told"), [(950, "950"), (9_999, "9,999"), (12_345, "12.3 k"), (24.4e6, "24.4 M")]
)
def test_large_counts_are_rounded(number: float, told: str) -> None:
    assert amount(number) == told


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (0, "0"),
        (0.00054, "5.4e-4"),
        (0.0005, "5e-4"),
        (0.5, "0.5"),
        (999.4, "999"),
        (999.6, "1k"),
        (999_999, "1M"),
    ],
)
def test_short_numbers_have_three_digits_at_most(number: float, told: str) -> None:
    assert short_number(number) == told


@pytest.mark.parametrize(
    ("stage", "counts", "told"),
    [
        ("vocab", {"vocab_size": 4000, "words": 1.1e6}, "4,000 word pieces from 1.1 M words"),
        ("prepare", {"tokens": 7.4e6, "rows": 143_695}, "7.4 M tokens, 143,695 rows"),
        (
            "pretrain",
            {"mlm_loss_before": 8.31, "mlm_loss_after": 5.08, "mlm_accuracy_after": 0.202},
            "held-out MLM loss 8.31 → 5.08, 20.2 % of masked words right",
        ),
        (
            "finetune",
            {"primary_metric": "f1", "seeds": [1, 2], "f1_mean": 0.5, "f1_std": 0.01},
            "F1 50.0 % ± 1.0 %, 2 seeds",
        ),
        (
            "finetune",
            {"primary_metric": "mrr", "seeds": [1], "selection_mrr_mean": 0.5,
             "selection_mrr_std": 0.0},
            "mean reciprocal rank 0.5 on the selection rows",
        ),
        (
            "tune",
            {"trials": 4, "parameters": {"lr": 1e-3}, "selection_accuracy": 0.9},
            "best of 4: accuracy 90.0 %, lr 0.001",
        ),
        (
            "distill",
            {"primary_metric": "f1", "seeds": [1], "f1_mean": 0.5, "f1_std": 0.0},
            "F1 50.0 %",
        ),
        ("distill", {"loss_before": 2.307, "loss_after": 0.1473}, "held-out loss 2.31 → 0.147"),
        ("publish", {"version": "3", "is_champion": False}, "version 3"),
        ("predict", {"rows": 1200}, "1,200 rows"),
        ("pretrain", {"of": "another version"}, ""),
    ],
)  # fmt: skip
def test_a_line_says_what_came_out(stage: str, counts: dict[str, object], told: str) -> None:
    assert plain(result(stage, counts)) == told


@pytest.mark.parametrize(
    ("name", "told"),
    [("accuracy", "42.3 %"), ("f1_of_loss", "42.3 %"), ("mse", "0.423"), ("spearman", "0.423")],
)
def test_only_a_share_is_told_in_percent(name: str, told: str) -> None:
    assert plain(figure(name, 0.423)) == told


def test_a_sentence_holds_a_score_against_its_baseline() -> None:
    counts = {"primary_metric": "accuracy", "accuracy_mean": 0.8, "baseline_accuracy": 0.2}
    counts |= {"seeds": [0], "train_rows": 2700, "held_out_rows": 2463}
    told = "Fine-tuned on 2,700 labelled rows, it reaches accuracy 80.0 % on 2,463 rows it has not "
    assert plain(sentence("finetune", counts)) == (
        f"{told}seen (without reading the text: 20.0 %)."
    )
    counts |= {"teacher_parameters": 9, "augmented_rows": 1700}
    told = "Distilled from its teacher on 1,000 labelled rows, it reaches accuracy 80.0 % on 2,463 "
    assert plain(sentence("distill", counts)) == (
        f"{told}rows it has not seen (without reading the text: 20.0 %)."
    )


@pytest.mark.parametrize(
    ("stage", "counts", "told"),
    [
        (
            "vocab",
            {"vocab_size": 4000, "words": 1.1e6, "documents": 1114},
            "The vocabulary has 4,000 word pieces, learnt from 1.1 M words of 1,114 documents.",
        ),
        (
            "tune",
            {"trials": 4, "best": 2, "parameters": {"lr": 1e-3}, "selection_accuracy": 0.9},
            "Trial 2 is the best of 4: accuracy 90.0 %, lr 0.001.",
        ),
        (
            "export",
            {"size_bytes": 24_600_000, "largest_difference": 3.1e-6},
            "The exported graph is 24.6 MB; its scores differ from the model's by 3.1e-06 at most.",
        ),
        ("predict", {"rows": 1200}, "The model answered 1,200 rows."),
        ("search", {"queries": 3, "rows": 1200}, "3 queries were compared with 1,200 rows."),
        ("extract", {"rows": 7}, "Fields were extracted from 7 documents."),
        ("predict", {"of": "another version"}, ""),
    ],
)
def test_a_sentence_sums_up_what_a_stage_made(
    stage: str, counts: dict[str, object], told: str
) -> None:
    assert plain(sentence(stage, counts)) == told
    assert sentence("predict", {}) == ""
