"""All tasks, by the name of Hugging Face's pipeline if there is one."""

from bert_core.tasks.base import Task
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.fill_mask import FillMask
from bert_core.tasks.minimal_pairs import MinimalPairs
from bert_core.tasks.multiple_choice import MultipleChoice
from bert_core.tasks.next_sentence import NextSentence
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.relation_classification import RelationClassification
from bert_core.tasks.sentence_similarity import SentenceSimilarity
from bert_core.tasks.span_classification import SpanClassification
from bert_core.tasks.sparse_embedding import SparseEmbedding
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.text_ranking import TextRanking
from bert_core.tasks.text_regression import TextRegression
from bert_core.tasks.token_classification import TokenClassification
from bert_core.tasks.zero_shot_classification import ZeroShotClassification

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        TextClassification,
        ZeroShotClassification,
        TextRegression,
        TextRanking,
        TokenClassification,
        SpanClassification,
        RelationClassification,
        QuestionAnswering,
        MultipleChoice,
        NextSentence,
        FillMask,
        MinimalPairs,
        FeatureExtraction,
        SentenceSimilarity,
        SparseEmbedding,
    )
}


def also(task: Task) -> list[Task]:
    """Return the other tasks that a model for `task` can answer with the same head and scores."""
    kinds = [kind for kind in TASKS.values() if task.name in kind.shares_head_with]
    return [made for made in (kind.from_head(task) for kind in kinds) if made is not None]
