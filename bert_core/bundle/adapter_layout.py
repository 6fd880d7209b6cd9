"""Names in the folders of adapters, as peft 0.21 has them."""

ADAPTER = "adapter"
"""The folder of an adapter in a bundle that has it merged."""
CONFIG, WEIGHTS, PICKLE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
BASE, BASE_VERSION = "base.json", 1
"""What this project adds to peft's files, and the version of its form."""
TASK_TYPES = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}
"""peft's task type → the end of the name of the class in transformers."""
