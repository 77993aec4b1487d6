"""A drafter in a file of your own: it drafts what followed the last token where that token was seen before.

Run this file to compare its output with plain decoding. To serve it:

    PYTHONPATH=examples specray serve --speculative-algorithm custom_drafter:LastSeen
"""

import argparse
from collections.abc import Sequence

from specray.config import SpeculativeConfig
from specray.llm import LLM
from specray.sampling_params import SamplingParams
from specray.spec_decode.draft_tree import DraftTree, TreeLists
from specray.spec_decode.drafter import TargetView
from specray.spec_decode.propose_context import ProposeContext

PROMPT = "One fish, two fish, red fish, blue fish. One fish, two fish,"


class LastSeen:
    """Copies up to `max_draft_tokens` tokens from behind the last token's previous occurrence in the request."""

    aux_hidden_state_layers: tuple[int, ...] = ()  # it reads no hidden states
    reads_next_token = False  # it keeps no KV

    def __init__(self, config: SpeculativeConfig, target: TargetView) -> None:  # noqa: ARG002
        self.max_draft_tokens = (config.num_draft_tokens or 5) - 1  # without the root

    def propose(self, context: ProposeContext) -> DraftTree:
        trees = [self._chain(context.token_ids(request)) for request in context.requests]
        return DraftTree.from_lists(trees, context.table.device)

    def release(self, slots: Sequence[int]) -> None:
        """Requests in these slots have ended; this drafter has no state."""

    def _chain(self, known: list[int]) -> TreeLists:
        *past, root = known
        drafts: list[int] = []
        if root in past:
            start = len(past) - past[::-1].index(root)  # behind the last occurrence
            drafts = known[start : start + self.max_draft_tokens]
        return TreeLists([root, *drafts], [-1, *range(len(drafts))])  # each node's parent is the node before it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=24)
    drafter = SpeculativeConfig(algorithm="custom_drafter:LastSeen", num_draft_tokens=6)
    with LLM(model=options.model, dtype="float32") as plain, plain.with_speculative(drafter) as drafted:
        expected, seen = (llm.generate([PROMPT], params)[0].choices[0] for llm in (plain, drafted))
    assert seen.token_ids == expected.token_ids
    assert seen.usage is not None
    print(PROMPT + seen.text)
    accepted, generated = seen.usage.num_accepted, seen.usage.num_completion_tokens
    print(f"\nthe text of plain decoding; {accepted} of {generated} tokens were accepted drafts")


if __name__ == "__main__":
    main()
