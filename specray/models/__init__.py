"""Models: finding and reading checkpoints, tokenizers, and the networks themselves.

What lives here: `files` (a name becomes a folder), `gguf_files`, `weights`, `tokenizer` and one module per
family of networks. Not here: how rows are batched (`specray.worker`) or drafted (`specray.spec_decode`).
"""
