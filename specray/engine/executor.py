"""Interface between the engine and the ranks, implemented by `specray.worker.local` and `cluster.engine.executor`."""

from typing import NamedTuple, Protocol

from specray.step import StepPlan, StepResult


class Capacity(NamedTuple):
    """Limits and properties of the loaded ranks; they do not change."""

    num_blocks: int  # KV blocks, the reserved null block 0 included
    max_draft_tokens: int  # tree nodes beside the root that the drafter may propose; 0: none
    context_length: int  # longest prompt + output
    vocab_size: int
    eos_token_ids: list[int]
    reads_next_token: bool = False  # the draft KV of a block also depends on the token after it
    dtype: str = "float32"  # type of the target's weights and KV
    hardware: str = ""  # device of the target; equal where steps take equally long
    # A seed gives one text in any batch, tree or prompt chunk: logits have the same bits, or, in float32, differ by so
    # little that tests have found no text that changed.
    has_one_text: bool = True
    has_graphs: bool = False  # decode steps replay CUDA graphs; see `StepResult.bucket_seconds`
    without_graphs: tuple[str, ...] = ()  # what has no CUDA graphs on a GPU though they are wanted, and why
    sums_over_ranks: str = ""  # what adds the parts of several ranks on GPUs, and why it is not the one-shot kernel
    lacks_cpu_kernels: bool = False  # computes on a CPU with torch's operations, which is several times slower
    mixed_prefill_tokens: int = 1024  # prompt tokens of a step in which other requests decode
    num_stored_states: int | None = None  # rows of the state pools for the prefix cache; None: the model has no states
    max_plans: int = 1  # submitted and not collected; with 2, the ranks never wait for the next plan
    learns_budget: bool = False  # speculative.budget: null is auto, where drafts do not change the text


class Executor(Protocol):
    """Runs plans in order. `submit` returns at once; `collect` waits for the oldest plan's result.

    Both raise EngineDeadError if a rank has died.
    """

    @property
    def capacity(self) -> Capacity: ...

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...
