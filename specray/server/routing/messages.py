"""Messages between an ingress and a router, which Ray Serve pickles. All are plain data."""

from typing import NamedTuple

from specray.config import SpeculativeConfig
from specray.errors import Overflow
from specray.outputs import RequestOutput


class RouterInfo(NamedTuple):
    """A router's model and limits: the first item of every stream, sent again when it changes."""

    model: str
    context_length: int
    vocab_size: int
    num_kv_tokens: int
    max_draft_tokens: int
    eos_token_ids: list[int]
    dtype: str  # type of the target's weights and KV
    has_one_text: bool  # see Capacity
    rank_nodes: tuple[str, ...]  # address of each rank's node
    node_id: str = ""  # the router's node; empty outside of Ray
    without_graphs: tuple[str, ...] = ()  # see Capacity

    def summary(self) -> str:
        """One line for the log."""
        nodes = ", ".join(dict.fromkeys(self.rank_nodes))
        return (
            f"{self.model}, {self.dtype}, {len(self.rank_nodes)} ranks on {nodes}, context of {self.context_length} "
            f"tokens, KV cache of {self.num_kv_tokens} tokens, at most {self.max_draft_tokens} draft tokens"
        )


class DesiredDrafter(NamedTuple):
    """The drafter that an operator wants all engines to use. The one set last wins."""

    set_at: int  # nanoseconds since 1970; 0 for the configured drafter
    speculative: SpeculativeConfig
    made_from: int | None = None  # `set_at` of the one that this is a change of; None: a whole new one


class Refusal(NamedTuple):
    """Why a call was refused. An exception would cross Ray with its traceback."""

    status: int  # HTTP status of the reply
    message: str
    param: str | None  # the option at fault, if any
    retry_after_s: int | None = None
    code: str | None = None
    overflow: Overflow | None = None  # set where the prompt is too long


class RouterHeartbeat(NamedTuple):
    """A router's load and state, sent every half second and whenever its queue becomes full or has space again."""

    kv_usage: float  # share of KV blocks held by running requests, 0 to 1
    acceptance_length: float | None  # tokens per verify step, bonus token included; None until measured
    since_token_s: float  # time since the engine last generated a token; idle engines generate one for a probe
    desired: DesiredDrafter | None = None  # the drafter last applied; None if drafters cannot be replaced
    is_draining: bool = False  # the application is about to stop, and no ingress accepts requests
    refusal: Refusal | None = None  # the reply to another request while the queue is full
    drafter_absence: str = ""  # why the engine decodes without its drafter at present; empty if it does not
    num_others: int = 0  # unfinished requests of other ingresses than the receiver


class ConnectionEnd(NamedTuple):
    """Why a router ends a connection; the last item of its stream."""

    reason: str
    # The receiver's requests that the engine computed when it ended, one of which may be the cause. None: not known.
    request_ids: list[str] | None
    was_alone: bool = False  # the engine computed a single request, which it had isolated: it is the cause


Item = RouterInfo | RouterHeartbeat | list[RequestOutput] | ConnectionEnd
