"""What the data card says is what the shards and the texts say."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from bert_core.cache import Cache
from bert_core.data.documents import document_digest, document_fraction, split_sentences
from bert_core.data.masking import MaskingConfig
from bert_core.data.pairs import PairsConfig
from bert_core.data.quality import QualityConfig
from bert_core.data.shards import ShardSet
from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from pipelines import prepare, vocab
from pipelines.corpus import data_card
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.sources import list_corpus
from pipelines.prepare import PrepareConfig
from pipelines.vocab import VocabConfig

NAMES = ["Ann", "Ben", "Café", "Dora", "Emil", "Fritz", "Gull", "Hana", "Ida", "Jo"]
# 40 documents of 2 to 6 sentences, no two the same.
TEXTS = [
    "\n".join(
        f"{NAMES[n % 10]} went to the sea {n} times. It was {NAMES[(n + k) % 10]}'s boat, {k}!"
        for k in range(1 + n % 3)
    )
    for n in range(40)
]
OTHERS = [f"Of {name} there is little to say. But {name} likes it. So be it." for name in NAMES]
SHORT, ROW = "Hm. No.", "a row of an evaluation set that somebody has put into it"
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
PIECES = [*LETTERS, *(f"##{letter}" for letter in LETTERS), *"0123456789", *".,!'é", "the", "##é"]
VOCABULARY = [*SPECIAL_TOKENS, *PIECES]


def tokenizer_of(folder: Path, vocabulary: list[str], *, lowercase: bool = True) -> Tokenizer:
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=lowercase)
    tokenizer.save(folder)
    return tokenizer


def pieces_and_words(tokenizer: Tokenizer, texts: list[str]) -> tuple[int, int, int]:
    """Pieces, unknown ones and words, without what counts them for the card."""
    inner: Any = tokenizer.inner
    ids = [n for text in texts for n in inner.encode(text, add_special_tokens=False).ids]
    plain = [inner.normalizer.normalize_str(text) for text in texts]
    words = sum(len(inner.pre_tokenizer.pre_tokenize_str(text)) for text in plain)
    return len(ids), ids.count(tokenizer.unk_id), words


@dataclass(frozen=True)
class Made:
    """A preparation and its card."""

    config: PrepareConfig
    folder: Path

    @property
    def text(self) -> str:
        return (self.folder / "data_card.md").read_text()

    def rows(self, section: str) -> list[list[str]]:
        """Cells of the tables below a heading, without their heads."""
        [part] = re.findall(rf"^## {section}$(.*?)(?=^##|\Z)", self.text, re.MULTILINE | re.DOTALL)
        tables = re.findall(r"^\| -.*\n((?:\|.*\n)+)", part, re.MULTILINE)
        return [line[2:-2].split(" | ") for table in tables for line in table.splitlines()]

    def values(self, section: str) -> dict[str, str]:
        return {row[0]: row[1] for row in self.rows(section)}

    def counts(self) -> dict[str, Any]:
        return ShardSet.read(str(self.folder)).manifest.counts


@pytest.fixture(scope="module")
def no_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """No tokenizer of the hub is on this machine, whatever is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, no_cache: None) -> Made:
    folder = tmp_path_factory.mktemp("card")
    tokenizer_of(folder / "vocab", VOCABULARY)
    tokenizer_of(folder / "other", [*VOCABULARY, *map(str.lower, NAMES), "sea", "went", "to"])
    hub = folder / "hub"
    hub.mkdir()
    (hub / "README.md").write_text("---\nlicense: [cc-by-sa-4.0, gfdl]\n---\n")
    rows = [*TEXTS, *TEXTS[:3], "", SHORT, SHORT, f"Here is {ROW}. No more.", "Nul\0. " * 4]
    lines = [json.dumps({"text": text}) for text in rows]
    (hub / "train.jsonl").write_text("\n".join([*lines, "no JSON", '{"text": null}']))
    (folder / "plain.txt").write_text("\n\n".join(OTHERS))
    (folder / "empty.txt").touch()
    (folder / "dev.txt").write_text(f"1\t{ROW}\n2\tsomething that is not to be found there")
    config = PrepareConfig(
        output=str(folder / "shards"),
        tokenizer=str(folder / "vocab"),
        compare_with=str(folder / "other"),
        corpus=CorpusConfig(
            source=(str(hub), str(folder / "plain.txt"), str(folder / "empty.txt")),
            weights=(1.0, 0.5, 1.0),
            errors="skip",
            held_out_share=0.1,
        ),
        quality=QualityConfig(
            min_words=4,
            exact_duplicates=True,
            contamination=(str(folder / "dev.txt"),),
            on_contamination="drop",
        ),
        pairs=PairsConfig(max_length=64, dupe_factor=2),
        shard_bytes=1500,
        num_workers=0,
        tracking_uri=f"sqlite:///{folder}/mlflow.db",
    )
    prepare.run(config)
    return Made(config, folder / "shards")


def chosen() -> list[str]:
    """The half of the second source that its weight picks."""
    return [t for t in OTHERS if document_fraction(document_digest(t), 0, "weight") < 0.5]


def test_sources_are_named_with_licence_weight_and_share(made: Made) -> None:
    hub, plain, empty = made.rows("Sources")
    tokenizer = Tokenizer.load(made.config.tokenizer)
    first, *_ = pieces_and_words(tokenizer, [*TEXTS, "Nul. " * 4])
    second, *_ = pieces_and_words(tokenizer, chosen())
    size_bytes = (made.folder.parent / "hub" / "train.jsonl").stat().st_size
    share = first / (first + second)
    source = made.config.corpus.sources
    assert hub == [
        f"`{source[0]}`", "cc-by-sa-4.0, gfdl", "1", f"{size_bytes:,}", "1", "41", f"{first:,}",
        f"{share:.2%}",
    ]  # fmt: skip
    assert plain[:2] == [f"`{source[1]}`", "not stated (`corpus.licenses`)"]
    assert plain[4:] == ["0.5", str(len(chosen())), f"{second:,}", f"{1 - share:.2%}"]
    assert empty[2:] == ["1", "0", "1", "0", "0", "0.00%"]
    assert f"Empty files: 1 (`{source[2]}`)." in made.text


def test_licences_that_are_given_count(made: Made, tmp_path: Path) -> None:
    corpus = replace(made.config.corpus, licenses=("MIT", "CC0", "GFDL"), weights=())
    rows = [
        line
        for part in data_card.describe_sources(list_corpus(corpus), {})
        for line in part.splitlines()[2:]
    ]
    assert [row.split(" | ")[1] for row in rows if " | " in row] == ["MIT", "CC0", "GFDL"]


def test_every_read_document_is_used_or_left_out_for_a_reason(made: Made) -> None:
    rows = {what: int(count.replace(",", "")) for what, count, _ in made.rows("Documents")}
    used = 40 + 1 + len(chosen())
    assert rows == {
        "read": 60,
        "left out: empty": 1,
        "left out: not UTF-8, not JSON, or not a row of its table": 1,
        "left out: without text in the column": 1,
        "left out: fewer words than quality.min_words": 2,
        "left out: the same text as another document": 3,
        "left out: holds a row of an evaluation set": 1,
        "left out: the weight of its source": 10 - len(chosen()),
        "used": used,
        "sentences": sum(len(split_sentences(text)) for text in [*TEXTS, "Nul. " * 4, *chosen()]),
        "held NUL characters, which were taken out": 1,
    }
    left_out = sum(count for what, count in rows.items() if what.startswith("left out"))
    assert rows["read"] == left_out + used
    assert ["used", f"{used}", f"{used / 60:.2%}"] in made.rows("Documents")
    [contaminated] = made.rows("Evaluation rows found in the corpus")
    path = f"{made.folder.parent}/dev.txt"
    assert contaminated == [f"`{path}`", "1"]
    named = json.loads((made.folder / "contamination.jsonl").read_text())
    assert named == {"source": path, "row": 1, "documents": 1}


def test_tokens_and_words_are_those_of_the_texts(made: Made) -> None:
    tokenizer = Tokenizer.load(made.config.tokenizer)
    tokens, unknown, words = pieces_and_words(tokenizer, [*TEXTS, "Nul. " * 4, *chosen()])
    values = made.values("Vocabulary")
    assert values["entries"] == str(len(VOCABULARY))
    assert values["cased"] == "no"
    assert values["tokens"] == f"{tokens:,}"
    assert values["words, including punctuation marks"] == f"{words:,}"
    assert values["fertility (tokens per word)"] == f"{tokens / words:.3f}"
    assert values["unknown tokens"] == f"{unknown / tokens:.2%}"


def test_the_vocabulary_stands_beside_another_one_on_the_same_texts(made: Made) -> None:
    compared = [row for row in made.rows("Vocabulary") if len(row) == 3]
    other = made.config.compare_with
    texts = [*TEXTS, *TEXTS[:3], SHORT, SHORT, f"Here is {ROW}. No more.", *OTHERS]
    texts.append("Nul. " * 4)
    assert other is not None
    wanted = []
    for name, folder in (("this one", made.config.tokenizer), (f"`{other}`", other)):
        tokens, unknown, words = pieces_and_words(Tokenizer.load(folder), texts)
        wanted.append([name, f"{tokens / words:.3f}", f"{unknown / tokens:.2%}"])
    assert compared == wanted
    assert float(compared[1][1]) < float(compared[0][1])
    # A sample of so few characters is the whole, cleaned.
    assert f"On a sample of {sum(len(text.strip()) for text in texts):,} characters." in made.text


def test_rows_and_masks_are_those_of_the_shards(made: Made) -> None:
    shards = ShardSet.read(str(made.folder))
    tokenizer = Tokenizer.load(made.config.tokenizer)
    seen: Counter[str] = Counter()
    for info in shards.shards:
        rows = shards.open(info, Cache(made.folder.parent / "copies"))
        for row in map(rows.row, range(len(rows))):
            ids = row.input_ids[row.masked_positions]
            seen.update(
                rows=1,
                tokens=len(row.input_ids),
                random=row.labels["next_sentence_label"],
                masked=len(ids),
                mask=int((ids == tokenizer.mask_id).sum()),
                kept=int((ids == row.masked_labels).sum()),
            )
    changed = seen["masked"] - seen["mask"] - seen["kept"]
    assert made.values("Rows") == {
        "rows": f"{seen['rows']:,}",
        "kind": "nsp",
        "tokens, including special ones": f"{seen['tokens']:,}",
        "tokens per row": f"{seen['tokens'] / seen['rows']:.1f} of 64",
        "random next sentence": f"{seen['random'] / seen['rows']:.2%}",
        "masking": "token",
        "predicted tokens": f"{seen['masked'] / seen['tokens']:.2%}",
        "of these [MASK]": f"{seen['mask'] / seen['masked']:.2%}",
        "of these random": f"{changed / seen['masked']:.2%}",
        "of these unchanged": f"{seen['kept'] / seen['masked']:.2%}",
    }
    assert made.counts()["rows"] == seen["rows"]


def test_pictures_stand_beside_the_card(made: Made) -> None:
    from matplotlib.image import imread

    names = re.findall(r"!\[(\w+)\]\((\w+\.png)\)", made.text)
    assert names == [("lengths", "lengths.png"), ("documents", "documents.png")]
    for _, name in names:
        assert (made.folder / name).read_bytes().startswith(b"\x89PNG")
        assert np.std(imread(made.folder / name)[..., :3]) > 0.01


def test_masks_drawn_at_training_time_are_not_in_the_card(
    made: Made, tmp_path: Path, no_cache: None
) -> None:
    config = replace(
        made.config,
        output=str(tmp_path / "shards"),
        compare_with=None,
        corpus=CorpusConfig(source=f"{made.folder.parent}/plain.txt", held_out_share=0.0),
        quality=QualityConfig(),
        pairs=PairsConfig(kind="full_sentences", dupe_factor=1, max_length=64),
        masking=MaskingConfig(dynamic=True, strategy="whole_word"),
    )
    prepare.run(config)
    again = Made(config, tmp_path / "shards")
    values = again.values("Rows")
    assert list(values)[-2:] == ["masking", "masks"]
    assert values["kind"] == "full_sentences"
    assert (values["masking"], values["masks"]) == ("whole_word", "drawn at training time")
    assert "Evaluation rows" not in again.text
    assert [row[0] for row in again.rows("Documents")] == ["read", "used", "sentences"]
    assert [row[0] for row in again.rows("Vocabulary") if len(row) == 3] == ["this one"]


def test_a_vocabulary_has_a_card_too(made: Made, tmp_path: Path) -> None:
    config = VocabConfig(
        output=str(tmp_path / "vocab"),
        corpus=replace(made.config.corpus, weights=(), held_out_share=0.0),
        vocab_size=120,
        compare_with=made.config.compare_with,
        num_workers=0,
        tracking_uri=made.config.tracking_uri,
    )
    vocab.run(config)
    text = (tmp_path / "vocab" / "vocabulary_card.md").read_text()
    tokenizer = Tokenizer.load(config.output)
    assert f"| entries | {tokenizer.vocab_size} |" in text
    assert "| cased | no |" in text
    assert "| documents it was made from | 57 |" in text
    assert f"| `{config.compare_with}` | " in text


Save = Callable[[Tokenizer, Path], None]
FILES: dict[str, tuple[str, ...]] = {
    "fast": ("tokenizer.json",),
    "slow": ("vocab.txt", "tokenizer_config.json"),
    "both": ("tokenizer.json", "vocab.txt", "tokenizer_config.json"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    ("name", "lowercase"),
    [
        ("google-bert/bert-base-uncased", True),
        ("bert-base-uncased", True),
        ("google-bert/bert-base-cased", False),
    ],
)
def test_berts_vocabulary_is_compared_with_where_this_machine_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lowercase: bool, kind: str
) -> None:
    # As the hub's client lays it out: a snapshot's files are links to what they hold.
    model = tmp_path / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / ("4" * 40)
    for folder in ("blobs", "refs", f"snapshots/{'4' * 40}"):
        (model / folder).mkdir(parents=True)
    (model / "refs" / "main").write_text("4" * 40)
    theirs = Tokenizer.from_vocabulary(VOCABULARY, lowercase=lowercase)
    for number, file in enumerate(FILES[kind]):
        (model / "blobs" / str(number)).write_bytes(theirs.files()[file])
        (snapshot / file).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    ours = [
        Tokenizer.from_vocabulary([*VOCABULARY, "ours"], lowercase=each) for each in (True, False)
    ]
    found = [data_card.reference(None, each) for each in ours]
    there, absent = found if lowercase else found[::-1]
    assert there[0] == name
    assert there[1] is not None
    assert there[1].digest == theirs.digest
    assert absent == ("", None)
