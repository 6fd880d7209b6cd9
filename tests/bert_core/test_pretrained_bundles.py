"""Bundles of what transformers has not whole: a decoder of positions, a generator beside."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bert_core.bundle.format import About, load_bundle
from bert_core.bundle.layout import names_in
from bert_core.bundle.weights import build_model
from bert_core.bundle.writing import save_bundle
from bert_core.errors import FormatError
from bert_core.inference.predictor import Predictor
from bert_core.model.config import EncoderConfig, FeedForwardConfig
from bert_core.model.heads import DetectionHead
from bert_core.model.hf import encoder_config_to_huggingface
from bert_core.model.sharing import plain_state
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.objectives.enhanced_mlm import EnhancedMaskedLanguageModeling
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.rtd import ReplacedTokenDetection
from tests import tiny

TOKENIZER = tiny.tokenizer(map(chr, range(48, 90)), lowercase=False)


def config_of(variant: str) -> EncoderConfig:
    config = replace(
        VARIANTS[variant].config,
        hidden_size=16,
        initializer_range=0.2,
        feed_forward=FeedForwardConfig(intermediate_size=24),
    )
    return config.adapted(vocab_size=TOKENIZER.vocab_size, pad_token_id=TOKENIZER.pad_id)


def saved(folder: Path, variant: str, objective: tiny.Build) -> ObjectiveModel:
    model = tiny.model(config_of(variant), objective, noise=0.1)
    save_bundle(folder, model, TOKENIZER, About(metrics={"loss": 1.0}, lineage={"of": "all"}))
    return model.eval()


def batch_of() -> Batch:
    mask = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    ids = torch.randint(5, 40, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    return {
        "input_ids": ids,
        "token_type_ids": torch.zeros_like(ids),
        "attention_mask": mask,
        "mlm_positions": torch.tensor([1, 5, 14, 18]),
    }


def theirs(name: str, folder: Path, batch: Batch) -> Any:
    """What transformers' class gives, after it agreed that every tensor was there and no other."""
    import transformers

    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()(**{key: batch[key] for key in ("input_ids", "attention_mask")})


def close(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("variant", "title"), [("deberta-v3-tiny", "DebertaV2"), ("electra-small", "Electra")]
)
def test_a_discriminator_is_saved_whole_with_its_generator_beside_it(
    variant: str, title: str, tmp_path: Path
) -> None:
    import transformers

    folder = tmp_path / "bundle"
    model, batch = saved(folder, variant, ReplacedTokenDetection), batch_of()
    real = batch["attention_mask"].bool()
    if title == "Electra":  # the only family with a class for this head
        output = theirs("ElectraForPreTraining", folder, batch)
        close(model.logits(batch)["rtd"][:, 0], output.logits[real])
        assert not (folder / "objective.safetensors").exists()
        encoder = transformers.ElectraModel.from_pretrained(folder).eval()
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        hidden = encoder(**inputs).last_hidden_state
    else:
        hidden = theirs(f"{title}Model", folder, batch).last_hidden_state
        heads = load_file(folder / "objective.safetensors")
        assert {name.split(".")[2] for name in heads} == {"head"}
    close(model.encode(batch).hidden[real], hidden[real])
    objective = model.objectives["rtd"]
    assert isinstance(objective, ReplacedTokenDetection)
    generator = objective.generator
    scores = theirs(f"{title}ForMaskedLM", folder / "generator", batch).logits.flatten(0, 1)
    close(generator.logits(batch)["mlm"], scores[batch["mlm_positions"]])
    assert {"generator/model.safetensors", "generator/raybert.json"} <= set(names_in(folder))


def test_electras_discriminator_and_generator_are_read(tmp_path: Path) -> None:
    import transformers

    entries = encoder_config_to_huggingface(config_of("electra-small"))
    config, batch = transformers.ElectraConfig(**entries), batch_of()
    real = batch["attention_mask"].bool()
    torch.manual_seed(0)
    models: dict[str, transformers.PreTrainedModel] = {
        "rtd": transformers.ElectraForPreTraining(config).eval(),
        "mlm": transformers.ElectraForMaskedLM(config).eval(),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        TOKENIZER.save(tmp_path / name)
        scores = model(**{key: batch[key] for key in ("input_ids", "attention_mask")}).logits
        bundle = load_bundle(tmp_path / name)
        if name == "mlm":
            head = MaskedLanguageModeling(bundle.encoder_config)
            ours = build_model(bundle, [head], require_heads=True).eval()
            close(ours.logits(batch)["mlm"], scores.flatten(0, 1)[batch["mlm_positions"]])
            continue
        assert bundle.task is None
        encoder = build_model(bundle, []).eval()
        detect = DetectionHead(bundle.encoder_config)
        prefix = "objectives.rtd.head."
        weights = {key: value for key, value in bundle.state.items() if key.startswith(prefix)}
        detect.load_state_dict({key.removeprefix(prefix): weights[key] for key in weights})
        close(detect(encoder.encode(batch).hidden)[..., 0][real], scores[real])


@pytest.mark.parametrize("variant", ["deberta-v3-tiny", "electra-small"])
def test_replaced_token_detection_continues_from_a_bundle(variant: str, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    model = saved(folder, variant, ReplacedTokenDetection)
    bundle = load_bundle(folder)
    assert bundle.task is None
    objective = ReplacedTokenDetection(bundle.encoder_config)
    again = build_model(bundle, [objective], require_heads=True)
    for name, tensor in model.state_dict().items():  # the difference too, but for its last digits
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=1e-6, atol=1e-6)
    words = "encoder.embeddings.word_embeddings.weight"
    alone = build_model(
        replace(bundle, submodels={}), [ReplacedTokenDetection(bundle.encoder_config)]
    )
    close(plain_state(alone)[words], plain_state(model)[words])


def test_filling_masks_with_a_discriminator_points_to_the_generator(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    saved(folder, "deberta-v3-tiny", ReplacedTokenDetection)
    for task in (None, "fill-mask"):
        with pytest.raises(FormatError, match=rf"only pretrained.*, or give {folder}/generator$"):
            Predictor(folder, task=task)
    assert len(Predictor(folder / "generator").predict(["[MASK]"])[0]) == 5
    with pytest.raises(
        FormatError, match=r"wanted a bundle for next-sentence-.*ask for feature-extr.*$"
    ):
        Predictor(folder, task="next-sentence-prediction")


def test_a_generator_that_was_changed_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    saved(folder, "deberta-v3-tiny", ReplacedTokenDetection)
    weights = folder / "generator" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(FormatError, match=r"generator/model.safetensors: wanted sha256"):
        load_bundle(folder)


@pytest.mark.parametrize(
    ("variant", "name"),
    [("deberta-tiny", "DebertaForMaskedLM"), ("deberta-v3-tiny", "DebertaV2ForMaskedLM")],
)
def test_a_decoder_of_positions_is_beside_the_head_that_transformers_has(
    variant: str, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    model, batch = saved(folder, variant, EnhancedMaskedLanguageModeling), batch_of()
    scores = theirs(name, folder, batch).logits.flatten(0, 1)[batch["mlm_positions"]]
    bundle = load_bundle(folder)
    config = bundle.encoder_config
    plain = build_model(bundle, [MaskedLanguageModeling(config)], require_heads=True).eval()
    close(plain.logits(batch)["mlm"], scores)
    assert list(load_file(folder / "objective.safetensors")) == ["objectives.mlm.positions.weight"]
    again = build_model(bundle, [EnhancedMaskedLanguageModeling(config)], require_heads=True)
    close(again.eval().logits(batch)["mlm"], model.logits(batch)["mlm"])
    assert (model.logits(batch)["mlm"] - scores).abs().max() > 1e-2, "or nothing was decoded"
