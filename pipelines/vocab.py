"""Corpus → vocabulary, from a deterministic sample of the documents."""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from bert_core import files
from bert_core.checks import NonNegativeInt, PositiveInt, Range, TokenizerKind
from bert_core.data.documents import clean, document_digest, document_fraction
from bert_core.data.vocabulary import train_tokenizer
from bert_core.errors import CorpusError
from bert_core.manifest import Manifest, Output
from pipelines.corpus import data_card
from pipelines.corpus.blocks import plan_blocks, read_block
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.digest import corpus_input
from pipelines.corpus.readers.base import Block
from pipelines.corpus.sources import Corpus, corpus_size_bytes, list_corpus
from pipelines.runtime.description import CARD_OF_VOCABULARY
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.progress import counted, meter, say
from pipelines.runtime.result import Counts, Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import REMARK, StageConfig
from tracking.models.references import Reference
from tracking.runs.story import amount

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class VocabConfig(StageConfig):
    """Train a vocabulary."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """The text to train on."""
    kind: TokenizerKind = "wordpiece"
    """How words are split: `wordpiece` (BERT), `bpe` (bytes, RoBERTa) or `unigram` (ALBERT)."""
    vocab_size: Annotated[int, Range(least=100)] = 30_522
    """Maximum number of tokens, including special ones (Devlin et al. 2019: 30,000)."""
    lowercase: bool = True
    """Lower-case the text; `wordpiece` then strips accents too, as BERT's uncased models do,
    `unigram` always does and `bpe` never."""
    min_frequency: PositiveInt = 2
    """Pairs of pieces that occur less often are not merged."""
    compare_with: str | None = field(default=None, metadata=REMARK)
    """A tokenizer whose fertility the data card shows for comparison: a folder, or owner/name of
    the Hugging Face hub; by default bert-base-uncased, or -cased, if this machine's Hugging Face
    cache has it."""
    sample_bytes: PositiveInt = 256 << 20
    """Maximum bytes of text to count pairs in; documents are drawn by their hash."""
    seed: NonNegativeInt = 0
    """Seed of the sample."""


@dataclass(frozen=True, kw_only=True)
class VocabCounts(Counts):
    vocab_size: int
    tokenizer_digest: str
    documents: int
    """Documents of the sample."""
    words: int
    words_per_s: float
    corpus_bytes: int

    @property
    def line(self) -> str:
        return f"{self.vocab_size:,} word pieces from {amount(self.words)} words"

    @property
    def sentence(self) -> str:
        return (
            f"The vocabulary has {self.vocab_size:,} word pieces, learnt from "
            f"{amount(self.words)} words of {counted(self.documents, 'document')}."
        )


def run(config: VocabConfig) -> Manifest:
    """Train the vocabulary and write it as a tokenizer in Hugging Face layout."""
    if config.compare_with is not None:
        Reference.parse(config.compare_with).tokenizer()  # finds a mistake in it early
    corpus = list_corpus(config.corpus, config.output)
    size_bytes = corpus_size_bytes(corpus)
    corpus, documents = corpus_input(corpus, config)
    return run_stage("vocab", config, [documents], lambda _: _train(config, corpus, size_bytes))


def _train(config: VocabConfig, corpus: Corpus, size_bytes: int) -> Result:
    began = time.monotonic()
    blocks = plan_blocks(corpus, BLOCK_BYTES)
    share = min(1.0, config.sample_bytes / size_bytes)
    draw = partial(_draw, corpus.config, config.seed, share)
    drawn: list[tuple[float, str]] = []
    with meter("drawing a sample", len(blocks), "blocks") as progress:
        for _, documents in run_tasks(draw, blocks, config):
            drawn.extend((fraction, text) for fraction, text in documents)
            progress.add()
    drawn.sort()
    texts: list[str] = []
    used_bytes = 0
    for _, text in drawn:
        used_bytes += len(text.encode("utf-8", errors="surrogatepass"))
        if texts and used_bytes > config.sample_bytes:
            break
        texts.append(text)
    if not texts:
        raise CorpusError(
            f"{corpus.name}: wanted text to count words in, got only empty documents: check the "
            "corpus and corpus.text_column"
        )
    say(f"vocab: counting pairs of pieces in {counted(len(texts), 'document')}")
    tokenizer = train_tokenizer(
        config.kind,
        texts,
        vocab_size=config.vocab_size,
        lowercase=config.lowercase,
        min_frequency=config.min_frequency,
    )
    words = sum(len(text.split()) for text in texts)
    tokenizer.save(config.output)
    counts = VocabCounts(
        vocab_size=tokenizer.vocab_size,
        tokenizer_digest=tokenizer.digest,
        documents=len(texts),
        words=words,
        words_per_s=words / (time.monotonic() - began),
        corpus_bytes=size_bytes,
    )
    outputs = {name: Output.of(files.join(config.output, name)) for name in tokenizer.files()}
    path = data_card.write_of_vocabulary(
        config.local_folder,
        output=config.output,
        tokenizer=tokenizer,
        compare_with=config.compare_with,
        texts=texts,
    )
    return Result(outputs=outputs, counts=counts, artifacts=[path], cards=CARD_OF_VOCABULARY)


def _draw(corpus: CorpusConfig, seed: int, share: float, block: Block) -> list[tuple[float, str]]:
    """Return the documents of a block that fall into the sample.

    Documents that their source marks as held out are never drawn. Documents that `held_out_share`
    will later keep out of training may be.
    """
    drawn = []
    for document in read_block(block):
        # A source with twice the weight is drawn from twice as often.
        weight = corpus.weight(document.source)
        text = clean(document.text)
        digest = document_digest(text)
        fraction = document_fraction(digest, seed, "vocab") / weight
        if text and fraction < share and document.split != "held_out":
            drawn.append((fraction, text))
    return drawn
