"""A teacher and its student: what they are built from, what is learned, and whether they fit."""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from bert_core.checks import NonNegativeInt, PositiveInt, PositiveShare, Range, check_fields
from bert_core.errors import ConfigError
from bert_core.model.variants import VARIANTS
from bert_core.tasks.digests import NO_ROWS, Digests
from pipelines.runtime.stage import INPUT

if TYPE_CHECKING:
    from bert_core.bundle.format import Bundle
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.tasks.base import Task

LossWeight = Annotated[float, Range(least=0, below=math.inf)]

TEACHER = "teacher"
"""Where a student begins that has layers of its teacher."""


@dataclass(frozen=True, kw_only=True)
class LossesConfig:
    """How much each part of the loss counts; 0 leaves it out. Defaults: DistilBERT (Sanh et al.
    2019, section 2), with the weights of its authors' recipe."""

    soft: LossWeight = 5.0
    """The teacher's scores, at the temperature."""
    hard: LossWeight = 2.0
    """What is right: masked words, or labels."""
    cosine: LossWeight = 1.0
    """1 - cosine of the last vectors of every token."""
    embeddings: LossWeight = 0.0
    """Squared differences of the embeddings (TinyBERT, Jiao et al. 2019, equation 9)."""
    hidden: LossWeight = 0.0
    """The same of the vectors of every layer (equation 8)."""
    attention: LossWeight = 0.0
    """The same of what attention's softmax is taken of (equation 7)."""
    temperature: Annotated[float, Range(above=0, below=math.inf)] = 2.0
    """What scores are divided by before they are compared."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="losses.")
        if not any((self.soft, self.hard, self.cosine, self.hidden)):
            raise ConfigError(
                "losses: wanted something that the last layer learns from, got no weight for "
                "soft, hard, cosine or hidden: give one of them"
            )

    @property
    def weights(self) -> dict[str, float]:
        """By the names of the parts."""
        return {
            one.name: getattr(self, one.name) for one in fields(self) if one.name != "temperature"
        }

    @property
    def of_answers(self) -> bool:
        """Whether the student learns to answer."""
        return bool(self.soft or self.hard)

    @property
    def of_layers(self) -> bool:
        """Whether layers are compared."""
        return bool(self.hidden or self.attention)

    @property
    def of_teacher(self) -> bool:
        """Whether there is anything to learn from a teacher."""
        return any(weight for name, weight in self.weights.items() if name != "hard")


@dataclass(frozen=True, kw_only=True)
class AugmentationConfig:
    """Rows with other words, beside those that were read (TinyBERT, algorithm 1)."""

    copies: NonNegativeInt = 0
    """New rows of each; the paper makes 20 of small sets."""
    share: PositiveShare = 0.4
    """Probability that a word is replaced."""
    candidates: PositiveInt = 15
    """Words that one is drawn from."""
    model: str = field(default=TEACHER, metadata=INPUT)
    """A bundle that fills masks, for words that are one piece. `teacher` takes the words whose
    embeddings are the nearest in the teacher's vocabulary instead."""
    seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="augmentation.")


@dataclass(frozen=True, kw_only=True)
class TeacherStudent:
    """Where teacher and student come from; every rank builds them from here."""

    names: dict[str, str]
    """What the user calls the bundles of `teacher` and `model`, for messages."""
    teacher: Path
    student: Path | None
    """None is the teacher."""
    task: "Task | None" = None
    """What the student answers, as it does; None where it has no head."""
    variant: str | None
    layers: tuple[int, ...]
    layer_map: tuple[int, ...]
    losses: LossesConfig
    from_scratch: bool

    def build(self, seed: int) -> "ObjectiveModel":
        """The student with its teacher, where there is anything to learn from one.

        Raises: ConfigError if one does not fit the other.
        """
        from bert_core.objectives.distillation import Distillation

        teacher = self.load_teacher()
        student = self.build_student(seed, teacher)
        if not self.losses.of_teacher:
            return student
        return Distillation(
            student,
            self.build_teacher(teacher, scored=self.losses.soft > 0),
            self.losses.weights,
            temperature=self.losses.temperature,
            layer_map=self.layer_map,
        )

    def load_teacher(self) -> "Bundle":
        from bert_core.bundle.format import load_bundle
        from bert_core.bundle.weights import require_weights

        return require_weights(load_bundle(self.teacher))

    def build_teacher(self, teacher: "Bundle", *, scored: bool) -> "ObjectiveModel":
        """`scored`: with the head that it answers with."""
        from bert_core.bundle.weights import build_model

        if self.task is None:
            return build_model(teacher, [])
        task = self.task.adapted(teacher.state)
        encoder = task.encoder_config(teacher.encoder_config)
        if scored and not _answers(teacher, task):
            known = "only pretrained" if teacher.task is None else f"for {teacher.task.name}"
            raise ConfigError(
                f"{self.names['teacher']}: wanted a teacher for {task.name}, whose scores count "
                f"(losses.soft = {self.losses.soft:g}), this one is {known}: fine-tune it "
                "first with `raybert finetune`, or set losses.soft = 0"
            )
        objectives = [task.build_objective(encoder)] if scored else []
        return build_model(replace(teacher, encoder_config=encoder), objectives, require_heads=True)

    def build_student(self, seed: int, teacher: "Bundle") -> "ObjectiveModel":
        """With the weights that it begins with, and those of the seed where it has none."""
        import torch

        from bert_core.bundle.weights import build_model
        from bert_core.objectives.base import ObjectiveModel

        own = self.load_student(teacher)
        torch.manual_seed(seed)
        encoder, objectives = own.encoder_config, []
        if self.task is not None:
            encoder = self.task.encoder_config(encoder)
            objectives = [self.task.build_objective(encoder)]
        if self.from_scratch or not own.state:
            return ObjectiveModel(encoder, objectives)
        return build_model(replace(own, encoder_config=encoder), objectives)

    def load_student(self, teacher: "Bundle") -> "Bundle":
        """What the student begins with; without weights where they are to be fresh.

        Raises: ConfigError if it has other words than the teacher.
        """
        from bert_core.bundle.format import load_bundle
        from bert_core.bundle.weights import require_weights
        from bert_core.objectives.distillation import with_layers

        if self.variant is not None:
            encoder = VARIANTS[self.variant].config.adapted(
                vocab_size=teacher.encoder_config.vocab_size, pad_token_id=teacher.tokenizer.pad_id
            )
            return replace(teacher, encoder_config=encoder, state={}, task=None)
        own = teacher if self.student is None else require_weights(load_bundle(self.student))
        theirs = (teacher.tokenizer.digest, teacher.encoder_config.vocab_size)
        if (own.tokenizer.digest, own.encoder_config.vocab_size) != theirs:
            raise ConfigError(
                f"{self.names['model']}: wanted a student with the vocabulary of its teacher, "
                f"{theirs[0][:6]} in {theirs[1]:,} embeddings, it has {own.tokenizer.digest[:6]} "
                f"in {own.encoder_config.vocab_size:,}: take layers of the teacher, a variant, or "
                "a teacher of the student's vocabulary"
            )
        layers = self.layers
        if not layers and self.student is None:
            layers = tuple(range(0, own.encoder_config.num_hidden_layers, 2))
        if not layers:
            return own
        encoder, state = with_layers(own.encoder_config, own.state, layers)
        return replace(own, encoder_config=encoder, state=state)

    def sizes(self, teacher: "Bundle") -> dict[str, int]:
        """Parameters of both, with the heads that they answer with."""
        models = {
            "teacher": self.build_teacher(teacher, scored=self.losses.soft > 0),
            "student": self.build_student(0, teacher),
        }
        return {
            f"{name}_parameters": sum(each.numel() for each in model.parameters())
            for name, model in models.items()
        }

    def lineage(self, teacher: "Bundle", own: "Bundle") -> dict[str, Any]:
        """What the student learns from, and what it begins with: `own`, of `load_student`."""
        lineage: dict[str, Any] = {"stage": "distill", "from_scratch": self.from_scratch}
        if own.state:
            lineage |= {"parent": own.digest, "parent_lineage": own.lineage}
        if self.losses.of_teacher:
            lineage |= {"teacher": teacher.digest, "teacher_lineage": teacher.lineage}
        return lineage

    def trained_rows(self, teacher: "Bundle", own: "Bundle") -> Digests:
        """Of the rows that they have seen before."""
        begun = own.state and not self.from_scratch
        return np.union1d(
            own.trained_rows if begun else NO_ROWS,
            teacher.trained_rows if self.losses.of_teacher else NO_ROWS,
        )


def _answers(teacher: "Bundle", task: "Task") -> bool:
    """Whether a bundle has the head of a task."""
    if teacher.task is not None and not task.headless:
        return teacher.task.name == task.name
    part = f"objectives.{task.objective}."
    return task.headless or (
        task.pretrained and any(name.startswith(part) for name in teacher.state)
    )
