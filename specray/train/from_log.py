"""Training data from logs of a server (`server.request_log`): the answers that the target gave to real prompts.

The target computes its hidden states again during training. A folder grows with the logs: the same command adds the
requests that are new.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from specray.engine.request_log import LoggedRequest, read_logs
from specray.errors import ConfigError
from specray.models.files import resolve_model
from specray.models.registry import load_config
from specray.train.answers import SHARD_TOKENS, aux_hidden_state_layers, only_one_at
from specray.train.run_files import replace_text
from specray.train.shards import DESCRIPTION, TokenSequence, read_description, write_shard, written_indexes

NUM_INDEXES = 2**62  # indexes are hashes of requests; all prompts are of clients (`num_asked`)


def add_logged(logs: Sequence[Path], folder: Path, model: str) -> None:
    """Write the requests of `logs` that are not in `folder` yet.

    ConfigError for a file that is no log or has texts of another model, or if `folder` has other answers. OSError if a
    file cannot be read.
    """
    config = load_config(resolve_model(model, None, "auto", progress=True))
    description = {
        "model": model,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "aux_hidden_state_layers": aux_hidden_state_layers(config.num_hidden_layers),
        "source": "server.request_log",
        "dtype": "auto",
        "hidden_states": "computed",
        "num_asked": NUM_INDEXES,
    }
    with only_one_at(folder):
        if not (folder / DESCRIPTION).exists():
            replace_text(folder / DESCRIPTION, json.dumps(description, indent=2) + "\n")
        elif read_description(folder) != description:
            raise ConfigError(f"{folder} has answers of another source or model; give another folder with --answers")
        known, num_new, num_left_out = written_indexes(folder), 0, 0
        sequences: list[TokenSequence] = []
        for logged in read_logs(logs):
            token_ids = logged.prompt_token_ids + logged.output_token_ids
            if logged.is_redacted or logged.is_lossy or len(logged.output_token_ids) < 2:
                num_left_out += 1
                continue
            if max(token_ids) >= config.vocab_size:
                raise ConfigError(
                    f"{logged.request_id} has the token {max(token_ids)}, and {model} has {config.vocab_size} of them; "
                    "name the model that answered with --model"
                )
            if (index := index_of(logged)) in known:
                continue
            known.add(index)
            num_new += 1
            sequences.append(TokenSequence(token_ids, len(logged.prompt_token_ids), None, index))
            if sum(len(sequence.token_ids) for sequence in sequences) >= SHARD_TOKENS:
                write_shard(folder, sequences)
                sequences = []
        if sequences:
            write_shard(folder, sequences)
        if not known:
            raise ConfigError(
                f"none of {num_left_out} logged requests has a text to learn from: redacted, lossy, or shorter than "
                "two tokens; name other files with --from-log"
            )
    print(f"{folder}: {num_new} new requests, {len(known)} in all; {num_left_out} without a text to learn from")


def index_of(logged: LoggedRequest) -> int:
    """A number that a request has in every log."""
    texts = (logged.request_id, logged.prompt_token_ids, logged.output_token_ids)
    return int.from_bytes(hashlib.sha256(json.dumps(texts).encode()).digest()[:8]) % NUM_INDEXES
