#!/bin/sh
# peft: a folder of an adapter for SEQ_CLS has `classifier` or `score`, and no other module of the
# head. transformers draws all of a head at random if the base has none, so for DeBERTa (`pooler`)
# and ModernBERT (`head`) a part of what the adapter was trained with is lost: the loaded folder
# answers otherwise than the trained model, and otherwise each time. With these names in
# `modules_to_save` it answers alike.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet peft==0.21.2 torch==2.13.0 transformers==5.23.0
FOLDER=$folder "$folder/venv/bin/python" - <<'END'
import os
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification as Classifier

print("peft", peft.__version__, "transformers", transformers.__version__)
small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 64, "pad_token_id": 0}
ids = torch.arange(5, 15)[None]


def difference(config, target, *saved):
    """Between the answers of a model with an adapter and of the folder that it is saved in."""
    where = os.path.join(os.environ["FOLDER"], "-".join([config.model_type, *saved]))
    transformers.AutoModel.from_config(config).save_pretrained(where + "-base")
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=[target],
                      modules_to_save=list(saved) or None)
    model = get_peft_model(Classifier.from_pretrained(where + "-base"), lora).eval()
    model.save_pretrained(where)
    again = PeftModel.from_pretrained(Classifier.from_pretrained(where + "-base"), where).eval()
    return float((model(input_ids=ids).logits - again(input_ids=ids).logits).abs().max())


for config, target, part in (
    (transformers.BertConfig(**small), "query", "pooler"),
    (transformers.DebertaV2Config(**small), "query_proj", "pooler"),
    (transformers.ModernBertConfig(**small), "Wqkv", "head"),
):
    lost, kept = difference(config, target), difference(config, target, part)
    print(f"{config.model_type}: answers differ by {lost:.3g}, with {part} saved by {kept:.3g}")
    assert kept == 0 and (lost == 0) == (config.model_type == "bert"), "this has changed"
END
