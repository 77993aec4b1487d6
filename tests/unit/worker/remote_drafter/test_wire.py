"""A reply's report on several drafters crosses the socket, and a malformed one is no reply."""

from typing import Any

import msgpack
import pytest
import torch

from specray.config import MAX_DRAFTERS
from specray.spec_decode.draft_tree import DraftTree
from specray.step import DrafterUse
from specray.worker.remote_drafter.wire import Reply, pack, unpack_reply

REPLY = Reply.of(1, 0.5, DraftTree.chains(torch.tensor([[9, 3]])))
USE = DrafterUse("head", 0.1, 0.2, 3, 4, 5, 0)


def test_uses_cross_the_socket() -> None:
    assert unpack_reply(pack(REPLY._replace(uses=[USE, USE]))).uses == [USE, USE]
    assert unpack_reply(pack(REPLY)).uses == []


@pytest.mark.parametrize(
    "uses",
    [
        3,
        "uses",
        [3],
        [["head"]],
        [[*USE, 1]],
        [[7, *USE[1:]]],
        [["head", "soon", *USE[2:]]],
        [["head", -1.0, *USE[2:]]],
        [["head", float("nan"), *USE[2:]]],
        [["head", True, *USE[2:]]],
        [list(USE)] * (MAX_DRAFTERS + 1),
    ],
)
def test_malformed_uses_are_no_reply(uses: Any) -> None:
    with pytest.raises(ValueError, match="not a reply"):
        unpack_reply(msgpack.packb([*REPLY[:-1], uses]))
