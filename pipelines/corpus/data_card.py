"""Writes the data card of a preparation: what went in, what was left out and why, what came out.

The card is Markdown with plots, in the run's folder and in MLflow; everything in it is also in the
manifest's counts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from bert_core import files
from bert_core.data.documents import clean
from bert_core.data.masking import MaskingConfig
from bert_core.data.pairs import LABELS, PairsConfig
from bert_core.data.tokenizer import Tokenizer
from bert_core.wording import table, without_secrets
from pipelines.corpus import hub
from pipelines.corpus.blocks import read_block
from pipelines.corpus.config import DOCSTRINGS, CorpusConfig
from pipelines.corpus.readers.base import Block
from pipelines.corpus.screen import REASONS, dropped_documents
from pipelines.corpus.sources import Corpus
from pipelines.runtime.description import DATA_CARD, VOCABULARY_CARD
from tracking.models.references import Reference

SAMPLE_BLOCKS, SAMPLE_CHARACTERS = 8, 1 << 17
HUB_NAMES = {True: "google-bert/bert-base-uncased", False: "google-bert/bert-base-cased"}


def write(
    folder: Path,
    *,
    output: str,
    corpus: Corpus,
    blocks: Sequence[Block],
    tokenizer: Tokenizer,
    compare_with: str | None,
    pairs: PairsConfig,
    masking: MaskingConfig,
    counts: Mapping[str, Any],
    lengths: Mapping[int, int],
    overlaps: Sequence[Mapping[str, Any]],
) -> list[Path]:
    """Write the card of `output`, and its plots, into a folder on this machine.

    Args:
        compare_with: tokenizer to compare with, as `reference` takes it.
        lengths: tokens per row → number of rows.
        overlaps: from `pop_overlaps`.
    """
    from tracking.runs.plots import plot_lengths

    documents = {
        int(name.rpartition("_")[2]): count
        for name, count in counts.items()
        if name.startswith("tokens_up_to_")
    }
    pictures = [
        plot_lengths(dict(lengths), folder / "lengths.png", "tokens of a row", "rows"),
        plot_lengths(
            documents, folder / "documents.png", "tokens of a document", "documents", powers=True
        ),
    ]
    text = "\n\n".join(
        [
            f"# Data card of `{output}`",
            *describe_sources(corpus, counts),
            *_documents(counts),
            *_contamination(overlaps),
            *_vocabulary(compare_with, blocks, tokenizer, counts),
            *_rows(pairs, masking, counts),
            *(f"![{picture.stem}]({picture.name})" for picture in pictures),
        ]
    )
    files.write_bytes(str(folder / DATA_CARD), f"{text}\n".encode())
    return [folder / DATA_CARD, *pictures]


def write_of_vocabulary(
    folder: Path,
    *,
    output: str,
    tokenizer: Tokenizer,
    compare_with: str | None,
    texts: Sequence[str],
) -> Path:
    """Write the card of a vocabulary: its fertility on the first texts it was made from."""
    path = folder / VOCABULARY_CARD
    parts = [
        f"# Vocabulary `{output}`",
        table(
            ["what", "value"],
            [
                ("entries", tokenizer.vocab_size),
                ("cased", "no" if tokenizer.lowercase else "yes"),
                ("documents it was made from", len(texts)),
            ],
        ),
        *_fertility(compare_with, tokenizer, _head(texts)),
    ]
    text = "\n\n".join(parts)
    files.write_bytes(str(path), f"{text}\n".encode())
    return path


def _head(texts: Iterable[str]) -> list[str]:
    """Return the first texts, up to the size of a sample."""
    head: list[str] = []
    characters = 0
    for text in texts:
        if characters >= SAMPLE_BLOCKS * SAMPLE_CHARACTERS:
            break
        head.append(text[:SAMPLE_CHARACTERS])
        characters += len(head[-1])
    return head


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.2%}" if whole else "–"


def describe_sources(corpus: Corpus, counts: Mapping[str, Any]) -> list[str]:
    config = corpus.config
    tokens = [counts.get(f"source_{number}_tokens", 0) for number in range(len(config.sources))]
    rows = []
    for number, source in enumerate(config.sources):
        source_files = [file for file in corpus.files if file.source == number]
        rows.append(
            (
                f"`{without_secrets(source)}`",
                _license(config, number),
                len(source_files),
                sum(file.size_bytes for file in source_files),
                f"{config.weight(number):g}",
                counts.get(f"source_{number}_documents", 0),
                tokens[number],
                _share(tokens[number], sum(tokens)),
            )
        )
    columns = ["source", "licence", "files", "bytes", "weight", "documents", "tokens", "share"]
    parts = ["## Sources", table(columns, rows)]
    if empty := [without_secrets(file.path) for file in corpus.files if not file.size_bytes]:
        parts.append(f"Empty files: {len(empty)} ({', '.join(f'`{path}`' for path in empty[:5])}).")
    return parts


def _license(corpus: CorpusConfig, number: int) -> str:
    source = corpus.sources[number]
    if corpus.licenses:
        return corpus.licenses[number]
    if source == DOCSTRINGS:
        return "those of Python and of the libraries"
    return hub.license_of(source) or "not stated (`corpus.licenses`)"


def _documents(counts: Mapping[str, Any]) -> list[str]:
    read = counts.get("documents_read", 0)
    rows = [("read", read, "")]
    rows += [
        (f"left out: {REASONS[reason]}", count, _share(count, read))
        for reason, count in dropped_documents(counts).items()
    ]
    rows += [
        ("used", counts["documents"], _share(counts["documents"], read)),
        ("sentences", counts["sentences"], ""),
    ]
    if counts.get("documents_with_nul"):
        rows.append(("held NUL characters, which were taken out", counts["documents_with_nul"], ""))
    return ["## Documents", table(["what", "count", "share"], rows)]


def _contamination(overlaps: Sequence[Mapping[str, Any]]) -> list[str]:
    if not overlaps:
        return []
    rows = Counter(overlap["source"] for overlap in overlaps)
    return [
        "## Evaluation rows found in the corpus",
        table(["evaluation set", "rows"], ((f"`{name}`", n) for name, n in sorted(rows.items()))),
        "Each is listed in `contamination.jsonl`, with the number of documents that contain it.",
    ]


def _vocabulary(
    compare_with: str | None,
    blocks: Sequence[Block],
    tokenizer: Tokenizer,
    counts: Mapping[str, Any],
) -> list[str]:
    tokens, words = counts["tokens"], counts["words"]
    rows = [
        ("entries", tokenizer.vocab_size),
        ("cased", "no" if tokenizer.lowercase else "yes"),
        ("tokens", tokens),
        ("words, including punctuation marks", words),
        ("fertility (tokens per word)", f"{tokens / max(words, 1):.3f}"),
        ("unknown tokens", _share(counts["unknown_tokens"], tokens)),
    ]
    return [
        "## Vocabulary",
        table(["what", "value"], rows),
        *_fertility(compare_with, tokenizer, sample(blocks)),
    ]


def _fertility(compare_with: str | None, tokenizer: Tokenizer, texts: Iterable[str]) -> list[str]:
    """Return a table that compares this vocabulary with another on the same texts."""
    reference_name, other = reference(compare_with, tokenizer)
    tokenizers = [("this one", tokenizer)] + ([(f"`{reference_name}`", other)] if other else [])
    texts = list(texts)
    rows = []
    for name, measured in tokenizers:
        tokens, unknown = fertility(measured, texts)
        rows.append((name, f"{tokens:.3f}", f"{unknown:.2%}"))
    return [
        table(["vocabulary", "tokens per word", "unknown tokens"], rows),
        f"On a sample of {sum(map(len, texts)):,} characters.",
    ]


def reference(folder: str | None, tokenizer: Tokenizer) -> tuple[str, Tokenizer | None]:
    """Return the name of the tokenizer to compare with, and the tokenizer: `folder`, or BERT's if
    it is in this machine's cache; else an empty name and None."""
    if folder is not None:
        return folder, Reference.parse(folder).tokenizer()
    from huggingface_hub import try_to_load_from_cache

    for name in (HUB_NAMES[tokenizer.lowercase], HUB_NAMES[tokenizer.lowercase].partition("/")[2]):
        for file in ("tokenizer.json", "vocab.txt"):
            path = try_to_load_from_cache(name, file)
            if isinstance(path, str):
                return name, Tokenizer.load(str(Path(path).parent))
    return "", None


def sample(blocks: Sequence[Block]) -> Iterable[str]:
    """Yield the first documents of some blocks; deterministic for a given corpus and blocks."""
    for block in blocks[:: -(-len(blocks) // SAMPLE_BLOCKS)]:
        characters = 0
        for document in read_block(block):
            text = clean(document.text)[:SAMPLE_CHARACTERS]
            characters += len(text)
            if text:
                yield text
            if characters >= SAMPLE_CHARACTERS:
                break


def fertility(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[float, float]:
    """Return the tokens per word and the share of unknown tokens; a punctuation mark counts as a
    word."""
    ids = tokenizer.encode_column(pa.array(texts, pa.string())).values.to_numpy()
    words = max(int(tokenizer.begins_word[ids].sum()), 1)
    return len(ids) / words, float((ids == tokenizer.unk_id).mean()) if len(ids) else 0.0


def _rows(pairs: PairsConfig, masking: MaskingConfig, counts: Mapping[str, Any]) -> list[str]:
    label = LABELS[pairs.kind]
    tokens, masked = counts["row_tokens"], counts.get("masked_tokens", 0)
    rows = [
        ("rows", counts["rows"]),
        ("kind", pairs.kind),
        ("tokens, including special ones", tokens),
        ("tokens per row", f"{tokens / max(counts['rows'], 1):.1f} of {pairs.max_length}"),
    ]
    if label:
        what = {"nsp": "random next sentence", "sop": "swapped sentences"}[pairs.kind]
        rows.append((what, _share(counts[f"{label}_1"], counts["rows"])))
    rows.append(("masking", masking.strategy))
    if masking.dynamic:
        rows.append(("masks", "drawn at training time"))
    else:
        mask, unchanged = counts.get("masked_as_mask", 0), counts.get("masked_as_they_are", 0)
        rows += [
            ("predicted tokens", _share(masked, tokens)),
            ("of these [MASK]", _share(mask, masked)),
            ("of these random", _share(masked - mask - unchanged, masked)),
            ("of these unchanged", _share(unchanged, masked)),
        ]
    return ["## Rows", table(["what", "value"], rows)]
