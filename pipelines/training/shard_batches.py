"""Shards as training batches: checks that their rows fit, and builds the batches."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from bert_core.data.shards import ShardRows, ShardSet
from bert_core.data.splits import HELD_OUT, TRAIN
from bert_core.errors import ConfigError
from bert_core.model.config import EncoderConfig
from bert_core.train.config import LoopConfig

if TYPE_CHECKING:
    from bert_core.batches import RankBatches
    from pipelines.training.worker import Place

CACHE = Path.home() / ".cache" / "raybert" / "shards"
"""Folder of downloaded shards, shared by all runs and workers."""


def check_rows(folder: str, shards: ShardSet, encoder: EncoderConfig, name: str) -> None:
    """Raises: ConfigError if rows are too long for the encoder, or a split is empty."""
    from bert_core.batches import PAD_MULTIPLE  # batches are padded to multiples of it

    longest = encoder.max_length // PAD_MULTIPLE * PAD_MULTIPLE
    if shards.max_length > longest:
        raise ConfigError(
            f"{folder}: wanted rows of at most {longest} tokens, the number of positions of "
            f"{name}, got rows of up to {shards.max_length}: "
            "prepare with a smaller pairs.max_length"
        )
    for split in (TRAIN, HELD_OUT):
        if not sum(info.rows for info in shards.split(split)):
            raise ConfigError(
                f"{folder}: wanted rows in the split {split}, there are none: prepare a "
                "larger corpus, or one with a larger corpus.held_out_share"
            )
    for info in shards.shards:
        shards.check_size(info)


def batches(
    shards: ShardSet,
    split: str,
    *,
    place: "Place",
    encoder: EncoderConfig,
    loop: LoopConfig,
    pad_id: int,
    global_batch_size: int,
    micro_batch_tokens: int,
    window_shards: int,
) -> "RankBatches":
    """A rank's batches of one split; shards are memory-mapped when their window is reached."""
    from bert_core.batches import RankBatches, ShardSource
    from bert_core.data.order import GlobalOrder
    from bert_core.model.attention import packing

    infos = shards.split(split)

    @lru_cache(maxsize=2 * window_shards)
    def open_shard(number: int) -> ShardRows:
        return shards.open(infos[number], CACHE)

    return RankBatches(
        source=ShardSource(
            open_shard,
            pad_id,
            shards.masker,
            loop.seed,
            packing(encoder, place.device, loop.precision),
        ),
        order=GlobalOrder([info.rows for info in infos], seed=loop.seed, window=window_shards),
        global_batch_size=global_batch_size,
        micro_batch_tokens=micro_batch_tokens,
        rank=place.rank,
        world_size=place.world_size,
    )
