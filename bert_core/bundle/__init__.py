"""A bundle: a model in a folder, the contract between training, serving and Hugging Face.

`config.json`, `model.safetensors` and the tokenizer's files are Hugging Face's layout under its own
names; `raybert.json` adds what it has no place for: task, metrics, lineage, and the sha256 of every
other file. Heads that transformers does not know are in `objective.safetensors`, which it ignores,
and models that an objective trains beside the encoder are bundles themselves, in folders of it.
`trained_rows.npy` has the digests of the labelled rows that the weights have seen.
An exported bundle holds an ONNX graph instead of weights, where optimum and transformers.js look.
A folder without `raybert.json`, as transformers writes it, is a bundle too, unverified. Folders are
local: fetching one from elsewhere is for `tracking.resolve`.
"""
