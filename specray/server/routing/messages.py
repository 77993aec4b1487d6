"""Messages between an ingress and a router, which Ray Serve pickles. All are plain data."""

from math import isclose
from typing import Any, NamedTuple

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
    sums_over_ranks: str = ""  # see Capacity
    mps: str = "off"  # whether the engine has an MPS daemon, or why not

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


HeartbeatChanges = dict[str, Any]  # fields of a RouterHeartbeat; none if all are as they were
AGE_TOLERANCE_S = 0.05


class RouterHeartbeat(NamedTuple):
    """A router's load and state, sent every half second and whenever its queue becomes full or has space again.

    The first one of a stream is whole; later ones are sent as `changes_since` it.
    """

    kv_usage: float  # share of KV blocks held by running requests, 0 to 1
    acceptance_length: float | None  # tokens per verify step, bonus token included; None until measured
    since_token_s: float  # time since the engine last generated a token; idle engines generate one for a probe
    desired: DesiredDrafter | None = None  # the drafter last applied; None if drafters cannot be replaced
    is_draining: bool = False  # the application is about to stop, and no ingress accepts requests
    refusal: Refusal | None = None  # the reply to another request while the queue is full
    drafter_absence: str = ""  # why the engine decodes without its drafter at present; empty if it does not
    num_others: int = 0  # unfinished requests of other ingresses than the receiver

    def later(self, seconds: float) -> "RouterHeartbeat":
        """What its receiver assumes so much later, if nothing has arrived."""
        return self._replace(since_token_s=self.since_token_s + seconds)

    def changes_since(self, assumed: "RouterHeartbeat") -> HeartbeatChanges:
        """The fields that differ from those that the receiver assumes."""
        changes = {name: new for name, new, old in zip(self._fields, self, assumed, strict=True) if new != old}
        if isclose(self.since_token_s, assumed.since_token_s, rel_tol=0.0, abs_tol=AGE_TOLERANCE_S):
            changes.pop("since_token_s", None)
        return changes


class ConnectionEnd(NamedTuple):
    """Why a router ends a connection; the last item of its stream."""

    reason: str
    # The receiver's requests that the engine computed when it ended, one of which may be the cause. None: not known.
    request_ids: list[str] | None
    was_alone: bool = False  # the engine computed a single request, which it had isolated: it is the cause


Item = RouterInfo | RouterHeartbeat | HeartbeatChanges | list[RequestOutput] | ConnectionEnd
