"""All tasks, by Hugging Face's name of the pipeline where there is one."""

from bert_core.tasks.base import Task
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.fill_mask import FillMask
from bert_core.tasks.multiple_choice import MultipleChoice
from bert_core.tasks.next_sentence import NextSentence
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.text_regression import TextRegression
from bert_core.tasks.token_classification import TokenClassification

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        TextClassification,
        TextRegression,
        TokenClassification,
        QuestionAnswering,
        MultipleChoice,
        NextSentence,
        FillMask,
        FeatureExtraction,
    )
}
