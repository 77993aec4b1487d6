"""The toy model with a tokenizer that can spell JSON."""

import json
from pathlib import Path

import jsonschema
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.toy import VOCAB_SIZE, write_toy

_SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
_TEXT = '{}[]":,-.0123456789abcdefghijklmnopqrstuvwxyz AB'
_MERGES = [
    ("{", '"'),
    ('"', ":"),
    ('":', "Ġ"),
    (",", "Ġ"),
    ("t", "r"),
    ("u", "e"),
    ("tr", "ue"),
    ("a", "l"),
    ("n", "u"),
]
_MERGES += [("l", "l"), ("nu", "ll"), ("a", "g")]

BYTES_END = 256


def write_json_toy(folder: Path) -> Path:
    """A toy model with this tokenizer."""
    write_toy(folder)
    write_json_tokenizer(folder)
    return folder


def write_json_tokenizer(folder: Path) -> None:
    """JSON's characters and some pairs, so that one text has several tokenizations."""
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [*_SPECIALS, *(char.replace(" ", "Ġ") for char in _TEXT), *("".join(pair) for pair in _MERGES)]
    assert len(set(pieces)) == len(pieces) == VOCAB_SIZE, len(pieces)
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=_MERGES))
    backend.pre_tokenizer = bytewise
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, so that every text can be spelt, and the end token BYTES_END."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", normalized=False, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")  # type: ignore[no-untyped-call]


def require_valid(text: str, schema: object) -> None:
    """JSON that matches the schema."""
    jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
