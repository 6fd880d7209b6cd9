"""Every stage as a function of the fields of its config.

`stages.pyi` has their signatures, for type checkers and editors; `python -m site_builder.stubs`
writes it from the configs.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bert_core.manifest import Manifest
from pipelines.configure import STAGES, config_class
from raybert.fields import configured
from raybert.signatures import described


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finished stage. Wherever a stage or `load` wants its folder, this will do."""

    folder: str
    """The folder or URI that it wrote."""
    manifest: Manifest
    """The record that it left there."""

    @property
    def metrics(self) -> dict[str, float]:
        """Return the figures of the result by name; those of a seed or a class are among them."""
        counts = self.manifest.counts
        return {name: count for name, count in counts.items() if isinstance(count, int | float)}

    def __fspath__(self) -> str:
        return self.folder

    def __str__(self) -> str:
        return f"{self.folder}: {self.manifest.sentence}"


def _stage(word: str) -> Callable[..., Outcome]:
    def run(*, config: str | os.PathLike[str] | None = None, **fields: Any) -> Outcome:
        from pipelines.launch import launch

        parsed = configured(word, config, fields)
        return Outcome(folder=parsed.output, manifest=launch(word, parsed))

    return described(run, word, STAGES[word].summary, config_class(word))


vocab = _stage("vocab")
prepare = _stage("prepare")
pretrain = _stage("pretrain")
finetune = _stage("finetune")
tune = _stage("tune")
distill = _stage("distill")
evaluate = _stage("evaluate")
publish = _stage("publish")
export = _stage("export")
predict = _stage("predict")
mine = _stage("mine")
index = _stage("index")
search = _stage("search")
extract = _stage("extract")
glue = _stage("glue")
