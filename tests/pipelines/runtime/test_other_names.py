"""What others call an option is told in our words."""

import dataclasses

import pytest

from bert_core.errors import ConfigError
from pipelines.configure import STAGES, config_class, parse
from pipelines.runtime.config_errors import _hint
from pipelines.runtime.other_names import ELSEWHERE, TRAINER

NEEDED = {
    "finetune": ["--output", "o", "--model", "m"],
    "pretrain": ["--output", "o", "--shards", "s", "--tokenizer", "t"],
}


def told(stage: str, flag: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(stage, [*NEEDED[stage], f"--{flag}", "1"])
    return str(error.value)


def test_every_option_of_the_trainer_is_in_the_table() -> None:
    """transformers 5.23."""
    from transformers import TrainingArguments

    assert {field.name for field in dataclasses.fields(TrainingArguments)} == set(TRAINER)


def test_names_in_the_table_are_options_of_a_stage() -> None:
    named = {flag for ours in ELSEWHERE.values() for flag in ours.flags}
    kinds = [config_class(word) for word in STAGES]
    assert [flag for flag in named if all(_hint(kind, flag) is None for kind in kinds)] == []
    assert [name for name, ours in ELSEWHERE.items() if not ours.flags and not ours.note] == []


@pytest.mark.parametrize("stage", NEEDED)
def test_no_option_of_others_is_answered_with_a_wrong_one(stage: str) -> None:
    kind = config_class(stage)
    for name, ours in ELSEWHERE.items():
        if _hint(kind, name) is None:
            flag = next((flag for flag in ours.flags if _hint(kind, flag) is not None), None)
            wanted = f"(here it is --{flag}" if flag else f"({ours.note})" if ours.note else ""
            assert wanted in told(stage, name), name


@pytest.mark.parametrize(
    ("stage", "flag", "hint"),
    [
        ("finetune", "learning_rate", "(here it is --lr)"),
        ("finetune", "learning-rate", "(here it is --lr)"),
        ("pretrain", "learning_rate", "(here it is --optimizer.lr)"),
        ("pretrain", "batch_size", "(here it is --global_batch_size)"),
        ("finetune", "early_stopping_patience", "(here it is --selection.patience)"),
        ("finetune", "fp16", "(here it is --precision: bf16 or fp32; there is no fp16)"),
        ("finetune", "class_weights", "(here it is --classes.weights)"),
        ("finetune", "freeze_encoder", "(here it is --freeze: encoder, to train the head alone)"),
        ("finetune", "lora_r", "(here it is --adapter.rank)"),
        ("finetune", "validation_file", "(here it is --held_out.source: "),
        ("finetune", "epoch", "(did you mean epochs?)"),
        ("finetune", "forc", "there is none with that name; `raybert"),
        ("finetune", "forse", "there is none with that name; `raybert"),
        ("finetune", "froce", "there is none with that name; `raybert"),
    ],
)
def test_a_name_from_other_tools_is_answered_with_ours(stage: str, flag: str, hint: str) -> None:
    assert hint in told(stage, flag)
