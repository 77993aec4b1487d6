"""Why no token can be sampled for a request: its own options, or the model's output."""

import torch
from torch import Tensor

from specray.grammar import NO_TOKEN_LEFT
from specray.models.target_model import TargetModel
from specray.ops.torch_ops import allowed_by_bits
from specray.spec_decode.request_state import RequestState
from specray.structured_output.matchers import GrammarTable

NOT_A_NUMBER = "the model's output for this request is NaN or infinite, so no token can be sampled"


def why_no_token(state: RequestState, grammars: GrammarTable, model: TargetModel) -> str:
    """The error of a request whose step sampled no token."""
    if (error := grammars.error(state.slot)) is not None:
        return error
    sampling, allowed = state.sampling, _allowed_by_grammar(state.slot, grammars, model.shape.vocab_size)
    if sampling.is_allowed is not None:
        allowed &= sampling.is_allowed.cpu()
    allowed[sampling.banned_tokens()] = False
    if sampling.masks_end_tokens:
        allowed[sampling.options.eos_token_ids] = False
    return NOT_A_NUMBER if allowed.any() else NO_TOKEN_LEFT


def _allowed_by_grammar(slot: int, grammars: GrammarTable, vocab_size: int) -> Tensor:
    """bool [V]: the tokens that a request's grammar allows next; all without one, or after its end."""
    grammar = grammars.slots.get(slot)
    if grammar is None or grammar.matcher is None or grammar.matcher.has_ended:
        return torch.ones(vocab_size, dtype=torch.bool)
    bits = torch.zeros(1, grammars.compilation.tools.compiler.num_words, dtype=torch.int32)
    grammar.matcher.fill(bits[0])
    return allowed_by_bits(bits, vocab_size)[0]
