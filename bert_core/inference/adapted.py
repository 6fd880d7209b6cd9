"""Answers inputs of many adapters of one base: its encoder is in memory once, and rows of any of
them pass through it together."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from bert_core.batches import tensors
from bert_core.bundle.adapters import factors_of, merged, read_adapter
from bert_core.bundle.format import Bundle, load_bundle
from bert_core.bundle.weights import build_model
from bert_core.collation import buckets, collate
from bert_core.data.windows import Window
from bert_core.determinism import fix_products
from bert_core.errors import FormatError, InputError
from bert_core.inference.predictor import Predictor
from bert_core.model.layout import Packed
from bert_core.model.mixed import (
    Group,
    adapted_by,
    check_mixable,
    make_mixed,
    mixed_layers,
    set_adapter,
)
from bert_core.objectives.base import Batch
from bert_core.torch_scores import TorchBackend
from bert_core.wording import nearest, one_of


class AdaptedPredictors:
    """A base and the adapters of it that answer, by name.

    An answer is that of the base with the adapter merged, up to rounding, and on a CPU the same to
    the bit whatever else is in the pass (`determinism` says on which). On the CPU, in fp32.
    """

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        """Load the base.

        Args:
            folder: its bundle.
            threads: CPU threads of the whole process; None leaves them unchanged.
        Raises: FormatError if the bundle is damaged or has no weights; ConfigError if its family's
            adapters cannot share passes.
        """
        fix_products()
        self._folder, self._threads = Path(folder), threads
        base = load_bundle(folder)
        check_mixable(base.encoder_config)
        self._tokenizer, self._config = base.tokenizer, base.encoder_config
        self._encoder = build_model(base, []).eval().encoder
        make_mixed(self._encoder)
        self._predictors: dict[str, Predictor] = {}

    @property
    def names(self) -> list[str]:
        """Return the names of the adapters, in the order in which they were added."""
        return list(self._predictors)

    def add(self, name: str, folder: str | Path) -> str:
        """Add an adapter, or replace the one of that name; return its digest, with its base.

        Args:
            folder: of an adapter with a task: written by raybert, or by peft with a head.
        Raises: FormatError if it cannot be read or belongs to another base, or changes more than
            the weights of linear layers.
        """
        base = load_bundle(self._folder)
        bundle = merged(base, folder)
        outputs = {
            f"encoder.{layer}": len(part.base.get_parameter("weight"))
            for layer, part in mixed_layers(self._encoder).items()
        }
        _check_rest(base, bundle, outputs, folder)
        predictor = Predictor(bundle, device="cpu", threads=self._threads)
        changes = factors_of(read_adapter(folder), outputs, self._config)
        for child, part in self._encoder.named_children():
            if child != "pooler":  # in place of the merged weights, which are given up
                setattr(predictor.model.encoder, child, part)
        set_adapter(
            self._encoder,
            name,
            {layer.removeprefix("encoder."): factors for layer, factors in changes.items()},
        )
        self._predictors[name] = predictor
        return predictor.bundle.digest

    def drop(self, name: str) -> None:
        """Forget an adapter. Raises: InputError if there is none of that name."""
        self._predictor(name)
        set_adapter(self._encoder, name, {})
        del self._predictors[name]

    def predict(self, inputs: Sequence[tuple[str, Any]]) -> list[Any]:
        """Answer each input by the adapter that it comes with, in order.

        Args:
            inputs: pairs of an adapter's name and an input of its task.
        Raises: InputError, as `Predictor.predict` does, or if there is no adapter of a name.
        """
        places: dict[str, list[int]] = {}
        for place, (name, _) in enumerate(inputs):
            places.setdefault(name, []).append(place)
        rows = {
            name: self._predictor(name).rows([inputs[place][1] for place in own])
            for name, own in places.items()
        }
        windows = {name: self._predictors[name].encode(own) for name, own in rows.items()}
        scores = self._scores(windows)
        answers: list[Any] = [None] * len(inputs)
        for name, own in places.items():
            decoded = self._predictors[name].decode(rows[name], windows[name], scores[name])
            for place, answer in zip(own, decoded, strict=True):
                answers[place] = answer
        return answers

    def _predictor(self, name: str) -> Predictor:
        if name not in self._predictors:
            raise InputError(
                f"adapter: wanted {one_of(self.names)}, got {name!r}{nearest(name, self.names)}"
            )
        return self._predictors[name]

    def _backend(self, name: str) -> TorchBackend:
        return cast("TorchBackend", self._predictors[name].backend)

    def _scores(self, windows: Mapping[str, Sequence[Window]]) -> dict[str, list[np.ndarray]]:
        """Return the scores of each window; windows of like length share a pass."""
        every = [(name, place) for name, own in windows.items() for place in range(len(own))]
        lengths = np.array([windows[name][place].tokens for name, place in every], dtype=np.int64)
        scores = {name: [np.empty(0)] * len(own) for name, own in windows.items()}
        budget = min((self._backend(name).budget_tokens for name in windows), default=1)
        for bucket in buckets(lengths, budget):
            chosen: dict[str, list[int]] = {}
            for item in bucket:
                name, place = every[item]
                chosen.setdefault(name, []).append(place)
            parts = {name: [windows[name][place] for place in own] for name, own in chosen.items()}
            for name, logits in self._logits(parts).items():
                found = self._backend(name).parts_of(logits, parts[name])
                for place, one in zip(chosen[name], found, strict=True):
                    scores[name][place] = one
        return scores

    def _logits(self, windows: Mapping[str, Sequence[Window]]) -> dict[str, np.ndarray]:
        """Return the scores of windows that pass through the encoder together."""
        pad_id = self._tokenizer.pad_id
        batches = {
            name: tensors(collate(own, pad_id, packed_from=0.0)) for name, own in windows.items()
        }
        groups, start = [], 0
        for name, batch in batches.items():
            groups.append(Group(name, start, start + len(batch["input_ids"])))
            start = groups[-1].end
        with torch.inference_mode(), adapted_by(groups):
            hidden = self._encoder(**_joined(list(batches.values()))).hidden
            return {
                group.adapter: self._read(group, hidden, batches[group.adapter]) for group in groups
            }

    def _read(self, group: Group, hidden: torch.Tensor, batch: Batch) -> np.ndarray:
        """Return the scores of an adapter's head for its tokens."""
        backend = self._backend(group.adapter)
        model, head = backend.model, backend.objective
        rows = Packed(batch["input_ids"], batch["offsets"], self._config.max_length)
        own = hidden[group.start : group.end]
        encoded = model.encoder.output_of(own, rows, head.places(batch))
        return head.logits(encoded, batch, model.word_embeddings).float().numpy()


def _check_rest(
    base: Bundle, merged_with: Bundle, layers: Collection[str], folder: str | Path
) -> None:
    """Raise FormatError if an adapter changes anything of the encoder, apart from its pooler, but
    the weights of these layers."""
    for name, tensor in base.state.items():
        is_shared = name.startswith("encoder.") and not name.startswith("encoder.pooler.")
        if (
            is_shared
            and name.removesuffix(".weight") not in layers
            and not torch.equal(tensor, merged_with.state[name])
        ):
            raise FormatError(
                f"{folder}: wanted changes of linear layers' weights, and of the head, got another "
                f"{name}: merge the adapter into its base with raybert export --adapter, and use "
                "the whole model"
            )


def _joined(batches: Sequence[Batch]) -> Batch:
    """Return the inputs of packed batches as one."""
    lengths = torch.cat([batch["offsets"].diff() for batch in batches])
    ends = lengths.cumsum(0)
    return {
        "input_ids": torch.cat([batch["input_ids"] for batch in batches]),
        "token_type_ids": torch.cat([batch["token_type_ids"] for batch in batches]),
        "offsets": torch.cat([ends.new_zeros(1), ends]),
    }
