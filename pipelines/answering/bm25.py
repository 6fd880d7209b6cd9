"""BM25 (Robertson and Zaragoza 2009), the search by words that a model's vectors are measured
beside."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

Language = Literal[
    "dutch", "english", "french", "german", "italian", "norwegian", "portuguese", "russian",
    "spanish", "swedish",
]  # fmt: skip
"""Languages with a stemmer (Snowball) and a list of words that are left out."""
_STOPWORDS: Mapping[Language, str] = {
    "dutch": "nl", "english": "en", "french": "fr", "german": "de", "italian": "it",
    "norwegian": "no", "portuguese": "pt", "russian": "ru", "spanish": "es", "swedish": "sv",
}  # fmt: skip
NAME = "BM25"
K1, B = 1.5, 0.75


def bm25_scores(
    documents: Sequence[str], queries: Sequence[str], language: Language
) -> Callable[[int], Float[np.ndarray, "documents"]]:
    """Index the documents; return a function from the index of a query to its score with every
    document, fp32.

    Lucene's variant with k1 = 1.5 and b = 0.75, as in MTEB's results for bm25s.
    """
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer(language)

    def words(texts: Sequence[str]) -> list[list[str]]:
        return bm25s.tokenize(
            list(texts),
            stopwords=_STOPWORDS[language],
            stemmer=stemmer,
            return_ids=False,
            show_progress=False,
        )

    index = bm25s.BM25(method="lucene", k1=K1, b=B)
    index.index(words(documents), show_progress=False)
    of_queries = words(queries)

    def scores(query: int) -> Float[np.ndarray, "documents"]:
        if not of_queries[query]:
            return np.zeros(len(documents), dtype=np.float32)
        return np.asarray(index.get_scores(of_queries[query]), dtype=np.float32)

    return scores
