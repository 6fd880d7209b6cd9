#!/usr/bin/env bash
# Guess: a DeBERTa v3 tokenizer that transformers builds from `spm.model` reads texts as
# SentencePiece does with that file, since the file holds the replacements of its normalization,
# and a `tokenizer.json` that holds them too is read as it is.
# What happens: transformers 5.23.0 builds the tokenizer without the file's replacements, so that
# "ﬁ", "…" and full-width letters are unknown; and it builds it so again from a `tokenizer.json`
# that has them. For ALBERT's `spiece.model` the replacements are kept.
set -euo pipefail
cd "$(mktemp -d)"
trap 'rm -rf "$PWD"' EXIT
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.23.0 tokenizers==0.23.3 sentencepiece==0.2.3 protobuf==7.36.2
cat > try.py <<'PYTHON'
import json
import os
import shutil
import sys

import sentencepiece
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import normalizers
from transformers import AutoTokenizer

TEXT = "a ﬁle … Ｆｕｌｌ"
lines = [f"the {word} of a file and its full name ... {TEXT}" for word in ("end", "size", "list")]
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines * 20), model_prefix="spm", vocab_size=60, hard_vocab_limit=False,
    character_coverage=1.0, minloglevel=2, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
    pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]",
)
stored = sentencepiece.SentencePieceProcessor("spm.model")
print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__,
      "sentencepiece", sentencepiece.__version__)
print("SentencePiece:          ", stored.encode(TEXT, out_type=str))


def unknown(folder, what):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    print(f"{what:24}", tokenizer.convert_ids_to_tokens(ids))
    return ids.count(tokenizer.unk_token_id)


def folder_of(model_type, kind, name):
    os.makedirs(model_type)
    shutil.copy("spm.model", f"{model_type}/{name}")
    with open(f"{model_type}/config.json", "w") as file:
        json.dump({"model_type": model_type}, file)
    with open(f"{model_type}/tokenizer_config.json", "w") as file:
        json.dump({"tokenizer_class": kind, "do_lower_case": False, "unk_token": "[UNK]"}, file)
    return model_type


deberta = folder_of("deberta-v2", "DebertaV2Tokenizer", "spm.model")
albert = folder_of("albert", "AlbertTokenizer", "spiece.model")
seen = [unknown(deberta, "DeBERTa v3, spm.model:"), unknown(albert, "ALBERT, spiece.model:")]

tokenizer = AutoTokenizer.from_pretrained(deberta)
with open("spm.model", "rb") as file:
    model = sentencepiece_model_pb2.ModelProto.FromString(file.read())
rules = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
    [rules, tokenizer.backend_tokenizer.normalizer]
)
tokenizer.save_pretrained("whole")
whole = tokenizers.Tokenizer.from_file("whole/tokenizer.json")
print(f"{'tokenizer.json, tokenizers:':24}", whole.encode(TEXT, add_special_tokens=False).tokens)
seen.append(unknown("whole", "tokenizer.json, again:"))
print("unknown pieces:", seen)
sys.exit(seen[0] == 0 or seen[1] > 0 or seen[2] == 0)
PYTHON
venv/bin/python try.py
