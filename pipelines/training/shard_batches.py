"""Turns shards into training batches, after checking that their rows fit the encoder."""

from functools import lru_cache
from typing import TYPE_CHECKING

from bert_core import files
from bert_core.cache import FOLDER, LIMIT, Cache
from bert_core.data.shards import ShardInfo, ShardRows, ShardSet
from bert_core.data.splits import HELD_OUT, TRAIN
from bert_core.errors import ConfigError, ResourceError
from bert_core.model.config import EncoderConfig
from bert_core.train.config import LoopConfig
from tracking.cache import local_cache

if TYPE_CHECKING:
    from bert_core.batches import RankBatches
    from pipelines.training.worker import RankPlace


def check_rows(folder: str, shards: ShardSet, encoder: EncoderConfig, name: str) -> None:
    """Raise ConfigError if rows are too long for the encoder, or a split is empty."""
    from bert_core.collation import longest_row

    longest = longest_row(encoder.max_length)
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
    place: "RankPlace",
    encoder: EncoderConfig,
    loop: LoopConfig,
    pad_id: int,
    global_batch_size: int,
    micro_batch_tokens: int,
    window_shards: int,
) -> "RankBatches":
    """Return a rank's batches of one split; shards are memory-mapped when their window is
    reached."""
    from bert_core.batches import RankBatches, ShardSource
    from bert_core.data.order import GlobalOrder
    from bert_core.model.attention import packing

    infos, cache = shards.split(split), local_cache()
    _check_room(shards, infos, cache, 2 * window_shards)

    @lru_cache(maxsize=2 * window_shards)
    def open_shard(number: int) -> ShardRows:
        return shards.open(infos[number], cache)

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


def _check_room(shards: ShardSet, infos: list[ShardInfo], cache: Cache, count: int) -> None:
    """Raise ResourceError if the cache cannot hold `count` shards that are fetched into it."""
    if files.local_path(shards.folder) is not None:
        return
    wanted_bytes = sum(sorted((info.size_bytes for info in infos), reverse=True)[:count])
    if wanted_bytes > cache.most_bytes:
        raise ResourceError(
            f"{cache.folder}: wanted room for {wanted_bytes:,} bytes, the {min(count, len(infos))} "
            f"shards of {shards.folder} that are open at a time, the cache may take "
            f"{cache.most_bytes:,}: set {LIMIT} to at least {wanted_bytes / 1e9:.3g} GB, "
            f"{FOLDER} to a folder on a larger disk, or lower window_shards"
        )
