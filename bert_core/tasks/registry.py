"""The tasks there are, under Hugging Face's names of pipelines."""

from bert_core.tasks.base import Task
from bert_core.tasks.text_classification import TextClassification

TASKS: dict[str, type[Task]] = {TextClassification.name: TextClassification}
