"""Builds a teacher and its student, and checks that they fit each other and what is learned."""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from bert_core.checks import NonNegativeInt, PositiveInt, PositiveShare, Range, check_fields
from bert_core.errors import ConfigError
from bert_core.model.variants import VARIANTS
from bert_core.tasks.digests import NO_ROWS, Digests
from pipelines.runtime.stage_config import INPUT
from pipelines.training.config import Dropout

if TYPE_CHECKING:
    from bert_core.bundle.format import Bundle
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.tasks.base import Task

LossWeight = Annotated[float, Range(least=0, below=math.inf)]

TEACHER = "teacher"
"""Initial weights of a student that takes layers of its teacher."""


@dataclass(frozen=True, kw_only=True)
class LossesConfig:
    """Weight of each part of the loss; 0 leaves it out. Defaults: DistilBERT (Sanh et al. 2019,
    section 2), with the weights of its authors' recipe."""

    soft: LossWeight = 5.0
    """The teacher's scores, at the temperature."""
    hard: LossWeight = 2.0
    """The true targets: masked words, or labels."""
    cosine: LossWeight = 1.0
    """1 - cosine of the last layer's vectors of every token."""
    embeddings: LossWeight = 0.0
    """Squared differences of the embeddings (TinyBERT, Jiao et al. 2019, equation 9)."""
    hidden: LossWeight = 0.0
    """Squared differences of the vectors of every layer (equation 8)."""
    attention: LossWeight = 0.0
    """Squared differences of the attention scores before softmax (equation 7)."""
    temperature: Annotated[float, Range(above=0, below=math.inf)] = 2.0
    """Divides scores before they are compared."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="losses.")
        if not any((self.soft, self.hard, self.cosine, self.hidden)):
            raise ConfigError(
                "losses: wanted a part that trains the last layer, got no weight for "
                "soft, hard, cosine or hidden: set one of them"
            )

    @property
    def weights(self) -> dict[str, float]:
        """Return the weights by the names of the parts."""
        return {
            part.name: getattr(self, part.name)
            for part in fields(self)
            if part.name != "temperature"
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
    """Extra rows with some words replaced, besides the rows read (TinyBERT, algorithm 1)."""

    copies: NonNegativeInt = 0
    """Extra rows per row; the paper uses 20 for small sets."""
    share: PositiveShare = 0.4
    """Probability of replacing a word."""
    candidates: PositiveInt = 15
    """Number of candidates that a replacement is drawn from."""
    model: str = field(default=TEACHER, metadata=INPUT)
    """A bundle for fill-mask that proposes candidates for words of one piece. `teacher` proposes
    the words with the nearest embeddings in the teacher's vocabulary instead."""
    seed: NonNegativeInt = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="augmentation.")


@dataclass(frozen=True, kw_only=True)
class TeacherStudent:
    """The configs and weights from which every rank builds teacher and student."""

    names: dict[str, str]
    """The user's references for the bundles of `teacher` and `model`, for messages."""
    teacher: Path
    student: Path | None
    """None is the teacher."""
    task: "Task | None" = None
    """The task as the student has it; None if the student has no head."""
    variant: str | None
    layers: tuple[int, ...]
    layer_map: tuple[int, ...]
    losses: LossesConfig
    from_scratch: bool
    dropout: Dropout
    """The student's."""

    def build(self, seed: int) -> "ObjectiveModel":
        """Build the student, combined with its teacher if any loss needs one.

        Raises: ConfigError if they do not fit each other.
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
        from bert_core.bundle.weights import require_weights
        from tracking.models.hub import load_bundle

        return require_weights(load_bundle(self.teacher))

    def build_teacher(self, teacher: "Bundle", *, scored: bool) -> "ObjectiveModel":
        """Build the teacher.

        Args:
            scored: whether to include its head.
        """
        from bert_core.bundle.weights import build_model

        if self.task is None:
            return build_model(teacher, [])
        task, encoder = self.task.adapted(teacher.state), teacher.encoder_config
        if teacher.task is not None and teacher.task.name == task.name:
            encoder = teacher.task.encoder_config(encoder)
        if scored and not _answers(teacher, task):
            known = "only pretrained" if teacher.task is None else f"for {teacher.task.name}"
            raise ConfigError(
                f"{self.names['teacher']}: wanted a teacher for {task.name}, since its scores are "
                f"used (losses.soft = {self.losses.soft:g}), this one is {known}: fine-tune it "
                "first with `raybert finetune`, or set losses.soft = 0"
            )
        objectives = [task.build_objective(encoder)] if scored else []
        return build_model(replace(teacher, encoder_config=encoder), objectives, require_heads=True)

    def build_student(self, seed: int, teacher: "Bundle") -> "ObjectiveModel":
        """Build the student with its initial weights; weights that it lacks are drawn with the
        seed."""
        import torch

        from bert_core.bundle.weights import build_model
        from bert_core.objectives.base import ObjectiveModel

        bundle = self.load_student(teacher)
        torch.manual_seed(seed)
        encoder, objectives = bundle.encoder_config, []
        if self.task is not None:
            encoder = self.task.encoder_config(encoder)
            objectives = [self.task.build_objective(encoder)]
        if self.from_scratch or not bundle.state:
            return ObjectiveModel(encoder, objectives)
        return build_model(replace(bundle, encoder_config=encoder), objectives, task=self.task)

    def load_student(self, teacher: "Bundle") -> "Bundle":
        """Load the bundle that the student starts from; it has no weights if they are to be random.

        Raises: ConfigError if its vocabulary is not the teacher's.
        """
        start = self._start(teacher)
        return replace(start, encoder_config=start.encoder_config.adapted(**self.dropout))

    def _start(self, teacher: "Bundle") -> "Bundle":
        """Load the bundle that the student starts from, with the dropout stored in it."""
        from bert_core.bundle.weights import require_weights
        from bert_core.objectives.distillation import with_layers
        from tracking.models.hub import load_bundle

        if self.variant is not None:
            encoder = VARIANTS[self.variant].config.adapted(
                vocab_size=teacher.encoder_config.vocab_size, pad_token_id=teacher.tokenizer.pad_id
            )
            return replace(teacher, encoder_config=encoder, state={}, task=None)
        bundle = teacher if self.student is None else require_weights(load_bundle(self.student))
        expected = (teacher.tokenizer.digest, teacher.encoder_config.vocab_size)
        got = (bundle.tokenizer.digest, bundle.encoder_config.vocab_size)
        if got != expected:
            raise ConfigError(
                f"{self.names['model']}: wanted a student with the vocabulary of its teacher, "
                f"{expected[0][:6]} with {expected[1]:,} embeddings, got {got[0][:6]} with "
                f"{got[1]:,}: use layers of the teacher, a variant, or a teacher with the "
                "student's vocabulary"
            )
        layers = self.layers
        if not layers and self.student is None:
            layers = tuple(range(0, bundle.encoder_config.num_hidden_layers, 2))
        if not layers:
            return bundle
        encoder, state = with_layers(bundle.encoder_config, bundle.state, layers)
        return replace(bundle, encoder_config=encoder, state=state)

    def sizes(self, teacher: "Bundle") -> dict[str, int]:
        """Return the numbers of parameters of teacher and student, heads included."""
        models = {
            "teacher": self.build_teacher(teacher, scored=self.losses.soft > 0),
            "student": self.build_student(0, teacher),
        }
        return {
            f"{name}_parameters": sum(tensor.numel() for tensor in model.parameters())
            for name, model in models.items()
        }

    def lineage(self, teacher: "Bundle", start: "Bundle") -> dict[str, Any]:
        """Return the student's teacher and starting bundle; `start` is the result of
        `load_student`."""
        lineage: dict[str, Any] = {"stage": "distill", "from_scratch": self.from_scratch}
        if start.state:
            lineage |= {"parent": start.digest, "parent_lineage": start.lineage}
        if self.losses.of_teacher:
            lineage |= {"teacher": teacher.digest, "teacher_lineage": teacher.lineage}
        return lineage

    def trained_rows(self, teacher: "Bundle", start: "Bundle") -> Digests:
        """Return the digests of the rows that either has seen before."""
        has_weights = start.state and not self.from_scratch
        return np.union1d(
            start.trained_rows if has_weights else NO_ROWS,
            teacher.trained_rows if self.losses.of_teacher else NO_ROWS,
        )


def _answers(teacher: "Bundle", task: "Task") -> bool:
    """Whether a bundle has the head for a task."""
    if teacher.task is not None and not task.headless:
        return teacher.task.name == task.name
    part = f"objectives.{task.objective}."
    return task.headless or (
        task.pretrained and any(name.startswith(part) for name in teacher.state)
    )
