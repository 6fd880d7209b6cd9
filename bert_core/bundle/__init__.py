"""Bundles: models in folders, the contract between training, serving and Hugging Face.

`config.json`, `model.safetensors` and the tokenizer's files are in Hugging Face layout.
`raybert.json` adds what that layout has no place for: task, metrics, lineage, and the sha256 of
every other file. Heads unknown to transformers are in `objective.safetensors`, which transformers
ignores. Models that an objective trains besides the encoder are bundles in subfolders.
`trained_rows.npy` has the digests of the labelled rows that the weights were trained on. An
exported bundle holds an ONNX graph instead of weights, where optimum and transformers.js look for
it. A folder without `raybert.json`, as transformers writes it, is also a bundle, but unverified.
Folders are local; `tracking.models.references` fetches remote ones.
"""
