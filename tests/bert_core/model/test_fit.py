"""Weights that do not belong to their config are refused before anything of its size is made."""

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_core import files
from bert_core.bundle.format import load_bundle
from bert_core.bundle.layout import CONFIG, RECORD
from bert_core.errors import FormatError
from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoder
from bert_core.model.fit import LONGEST, check_fits
from bert_core.model.variants import VARIANTS
from tests import tiny

FAMILIES: dict[str, EncoderConfig] = {each.config.family: each.config for each in VARIANTS.values()}
HUGE = 10_000_000


def small(config: EncoderConfig) -> EncoderConfig:
    """A config of a family with three small layers."""
    sizes = tiny.encoder_config(100, num_hidden_layers=3, max_position_embeddings=40)
    pad_id = min(config.embeddings.pad_token_id, 99)
    return config.adapted(vocab_size=100, pad_token_id=pad_id, sizes_of=sizes)


def state_of(config: EncoderConfig) -> dict[str, Tensor]:
    torch.manual_seed(1)
    encoder = Encoder(config, pooler=False)
    return {f"encoder.{name}": value for name, value in encoder.state_dict().items()}


CHANGES: dict[str, Any] = {
    "layers": lambda config: replace(config, num_hidden_layers=HUGE),
    "width": lambda config: replace(config, hidden_size=config.hidden_size * HUGE),
    "vocabulary": lambda config: config.adapted(vocab_size=HUGE),
    "feed-forward": lambda config: replace(
        config, feed_forward=replace(config.feed_forward, intermediate_size=HUGE * 100)
    ),
    "positions": lambda config: replace(
        config, embeddings=replace(config.embeddings, max_position_embeddings=HUGE * 100)
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_every_family_fit_their_own_config(family: str) -> None:
    config = small(FAMILIES[family])
    check_fits(state_of(config), config)
    deeper = state_of(replace(config, num_hidden_layers=4))
    check_fits(deeper, config)  # as transformers, which leaves later layers out


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_other_sizes_costs_neither_memory_nor_time(family: str, change: str) -> None:
    config = small(FAMILIES[family])
    state, other = state_of(config), CHANGES[change](config)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match=rf"wanted .* got|{LONGEST}"):
        check_fits(state, other)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < 50 << 10


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "of another shape"])
def test_every_layer_is_compared(index: int, is_missing: bool) -> None:
    config = small(FAMILIES["bert"])
    state, name = state_of(config), f"encoder.layers.{index}.feed_forward.up.weight"
    taken = state.pop(name)
    if not is_missing:
        state[name] = taken[1:]
    with pytest.raises(FormatError, match=f"wanted {name} of shape"):
        check_fits(state, config)


def test_such_a_folder_is_refused_when_it_is_read(tmp_path: Path) -> None:
    config = tiny.encoder_config(200)
    folder = tiny.bundle(tmp_path / "bundle", tiny.tokenizer(), config)
    (folder / RECORD).unlink()
    entries = files.read_json(str(folder / CONFIG))
    files.write_json(str(folder / CONFIG), entries | {"num_hidden_layers": HUGE})
    with pytest.raises(FormatError, match=rf"wanted weights of {HUGE} layers .* config.json"):
        load_bundle(folder)
