"""Start one rank of the target from its configuration: weights, KV pool, drafter and CUDA graphs."""

import logging
from functools import partial

import torch

from specray.config import MAX_TREE_NODES, EngineConfig
from specray.cores import num_cores
from specray.engine.executor import Capacity
from specray.errors import ConfigError
from specray.layers.parallel import RankGroup
from specray.models.compilation import compile_layers
from specray.models.files import target_folder
from specray.models.fused_forward import FusedForward
from specray.models.target_model import TargetModel
from specray.models.tokenizer import eos_token_ids, load_tokenizer
from specray.ops.cpu.processor import cpu_identity, num_threads
from specray.ops.device_ops import ops_on
from specray.ops.graphs import make_graphs
from specray.ops.linear import fixed_order
from specray.spec_decode import drafts_on_every_rank, make_drafter
from specray.spec_decode.drafter import Drafter, DraftSource, composite_of, device_drafter
from specray.spec_decode.inline_drafts import InlineDrafts
from specray.spec_decode.no_drafts import NoDrafts
from specray.spec_decode.node_sampler import NodeSampler
from specray.spec_decode.request_table import RequestTable
from specray.spec_decode.verifier import is_padded, make_sampler
from specray.structured_output.compilation import make_tools
from specray.structured_output.matchers import GrammarTable
from specray.worker.broadcast import share_sizes
from specray.worker.buckets import buckets
from specray.worker.decode_graphs import DecodeGraphs
from specray.worker.draft_graphs import graphs_of_members
from specray.worker.graph_backend import GraphBackend
from specray.worker.kernel_backend import KernelBackend
from specray.worker.loading import LoadedTarget, choose_device, ring_limits
from specray.worker.memory_plan import one_shot_bytes
from specray.worker.model_runner import ModelRunner
from specray.worker.rank_worker import RankWorker
from specray.worker.remote_drafter.handshake import DraftEndpoint, DraftPlacement
from specray.worker.remote_drafter.source import RemoteDrafts
from specray.worker.step_backend import StepBackend
from specray.worker.torch_backend import TorchBackend
from specray.worker.worker import Worker

MIXED_PREFILL_TOKENS_ON_CPU = 64
WALKS = "rejection sampling and accept thresholds walk trees by depth, on the host"

logger = logging.getLogger(__name__)
MAX_REQUESTS = 32  # SGLang's default for torch_compile_max_bs
NODES_OF_UNKNOWN_TREES = 16  # of a drafter that connects later and whose configuration names no number


def start_worker(
    config: EngineConfig,
    rank: int = 0,
    world_size: int = 1,
    init_method: str | None = None,
    progress: bool = False,
    drafter: Drafter | None = None,
    model: TargetModel | None = None,
    colocate: DraftEndpoint | None = None,
) -> Worker:
    """Rank `rank` of `world_size`; call it in every rank at once.

    `drafter` replaces the configured one (tests). With `colocate`, drafters connect from their own processes.
    `model` is a target that is already loaded and whose weights are shared. `warm_up` the worker before its first step.
    """
    device = choose_device(config, rank)
    if device.type == "cpu":
        ops_on(device).use_threads(config.num_threads or max(1, num_cores() // world_size))
    folder = target_folder(config, progress=progress)
    group = RankGroup(rank, world_size, init_method, device, config.deterministic)
    placement: DraftPlacement = "inline" if colocate is None else colocate.placement
    uses_cuda_ipc = colocate is not None and colocate.uses_cuda_ipc
    target = LoadedTarget(config, folder, group, device, progress, model, placement, uses_cuda_ipc)
    sums_over_ranks = ""
    if config.disable_custom_all_reduce and group.size > 1:
        sums_over_ranks = "NCCL: disable_custom_all_reduce is set"
    elif group.size > 1 and device.type == "cuda" and ops_on(device).records_graphs:
        shape, dtype = target.model.shape, target.model.embedding.weight.dtype
        sums_over_ranks = group.start_one_shot(one_shot_bytes(config, shape, dtype, group.size), device)
    vocab_size = target.model.shape.vocab_size
    max_tokens = target.context_length + MAX_TREE_NODES + config.page_size
    table = RequestTable(config.max_running_requests, max_tokens, config.page_size, vocab_size, device)
    tokenizer = load_tokenizer(folder)
    eos_ids = eos_token_ids(folder, tokenizer)
    drafts: DraftSource
    on_every_rank = colocate is None and drafts_on_every_rank(config.speculative)
    if colocate is not None and group.leads:
        drafter, drafts = None, RemoteDrafts(colocate, ring_limits(config, target.model), table)
    else:
        if drafter is None and (on_every_rank or (colocate is None and group.leads)):
            with fixed_order(config.deterministic):
                view = target.view(eos_ids, group if on_every_rank else RankGroup())
                drafter = make_drafter(config.speculative, view)
        num_slots = config.max_running_requests
        if drafter is None:
            drafts = NoDrafts(num_slots, device)
        else:
            drafts = InlineDrafts(drafter, num_slots, vocab_size, device)
    sampler = make_sampler(config.speculative)
    shares_trees = group.size > 1 and not (on_every_rank and _compute_alike(group, device))
    if shares_trees:
        share_sizes(group, drafts)
    compile_target(config, target, drafts.max_draft_tokens, progress)
    eager = _make_backend(target.runner, table, group, sampler)
    goes_on = not (shares_trees and on_every_rank)
    graphs, without_graphs = _make_graphs(config, target.runner, table, drafts, drafter, sampler, goes_on)
    if uses_cuda_ipc and graphs is None and config.speculative.budget == "auto":
        reasons = "; ".join(without_graphs) or "on this device"
        raise ConfigError(
            f"without CUDA graphs ({reasons}), speculative.budget=auto cuts trees by scores, which draft.cuda_ipc does "
            "not exchange; set budget: static, or cuda_ipc: false"
        )
    backend: StepBackend = eager if graphs is None else GraphBackend(graphs, eager, table, sampler)
    capacity = Capacity(
        num_blocks=target.num_blocks,
        max_draft_tokens=drafts.max_draft_tokens,
        context_length=target.context_length,
        vocab_size=vocab_size,
        eos_token_ids=eos_ids,
        reads_next_token=drafts.reads_next_token,
        dtype=str(target.model.embedding.weight.dtype).removeprefix("torch."),
        hardware=_hardware(device),
        has_one_text=target.has_one_text,
        has_graphs=graphs is not None,
        without_graphs=tuple(without_graphs),
        lacks_cpu_kernels=device.type == "cpu" and ops_on(device).name != "cpu",
        sums_over_ranks=sums_over_ranks,
        num_stored_states=target.num_stored_states,
        mixed_prefill_tokens=mixed_prefill_tokens(config, is_gpu=device.type == "cuda"),
    )
    kind = RankWorker if group.size > 1 else Worker
    return kind(
        group=group,
        backend=backend,
        table=table,
        drafts=drafts,
        grammars=GrammarTable(partial(make_tools, tokenizer, vocab_size, eos_ids)),
        shares_trees=shares_trees,
        capacity=capacity,
    )


def _make_backend(runner: ModelRunner, table: RequestTable, group: RankGroup, sampler: NodeSampler) -> TorchBackend:
    """The backend without CUDA graphs."""
    if isinstance(runner.forward, FusedForward):
        return KernelBackend(runner, runner.forward, table, group, sampler)
    return TorchBackend(runner, table, group, sampler)


def _compute_alike(group: RankGroup, device: torch.device) -> bool:
    """Whether the ranks' processors give the same bits, so that their trees are equal."""
    own = _hardware(device)
    first = group.broadcast_bytes(own.encode() if group.leads else None).decode()
    return group.smallest(int(own == first)) == 1


def _hardware(device: torch.device) -> str:
    """What the speed of `device` depends on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{num_threads()} threads; {cpu_identity()}"


def mixed_prefill_tokens(config: EngineConfig, is_gpu: bool) -> int:
    """Prompt tokens of a step in which other requests decode.

    On a CPU the time of a step grows with its tokens, and prompts in chunks of 64 tokens are only 5 to 12 % slower than
    in chunks of 512.
    """
    default = 2 * config.chunked_prefill_size if is_gpu else MIXED_PREFILL_TOKENS_ON_CPU
    return config.mixed_prefill_tokens or default


@torch.inference_mode()
def _make_graphs(
    config: EngineConfig,
    runner: ModelRunner,
    table: RequestTable,
    drafts: DraftSource,
    drafter: Drafter | None,
    sampler: NodeSampler,
    goes_on: bool,
) -> tuple[DecodeGraphs | None, list[str]]:
    """(the graphs of decode steps, None where there are none; what runs without graphs, and why).

    `drafter` is that of `drafts`, if it runs in this process. The graphs of several drafters are captured here, those
    of the target by `warm_up`, once the sizes of the trees are known.
    """
    graphs = None if config.disable_cuda_graph else make_graphs(table.device, config.attention_backend)
    if graphs is None:
        return None, []
    if (reason := runner.reason_without_graphs) is not None:
        return None, _logged([f"decode steps: {reason}"])
    rows = min(config.cuda_graph_max_bs or config.max_running_requests, config.max_running_requests)
    recorded, without = None, []
    if not is_padded(sampler):
        drafter, without = None, [f"verification and drafts: {WALKS}"]
    elif config.speculative.merged_draft_tokens is not None:
        drafter, without = None, ["drafts: the host merges trees with n-grams (merged_draft_tokens)"]
    composite = composite_of(drafter)
    if drafter is not None and composite is None:
        found = device_drafter(drafter)
        recorded, without = (None, [f"drafts: {found}"]) if isinstance(found, str) else (found, [])
    decode_graphs = DecodeGraphs(graphs, runner, table, drafts, rows, recorded, sampler, goes_on)
    if composite is not None:
        model = runner.model
        without = graphs_of_members(
            graphs, composite, table, model.shape.hidden_size, model.embedding.weight.dtype, rows
        )
    return decode_graphs, _logged(without)


def _logged(without: list[str]) -> list[str]:
    for each in without:
        logger.warning("without CUDA graphs: %s", each)
    return without


def compile_target(config: EngineConfig, target: LoadedTarget, max_draft_tokens: int, progress: bool) -> None:
    """Compile the target's layers for decode steps, if the configuration asks for it and it changes anything.

    Graphs of decode steps are captured after this, so that they contain what was compiled. ConfigError without a
    compiler.
    """
    if config.enable_torch_compile:
        compile_layers(target.model, compiled_sizes(config, max_draft_tokens), target.has_fused_attention, progress)


def compiled_sizes(config: EngineConfig, max_draft_tokens: int) -> list[int]:
    """Numbers of tokens of a step, those of `buckets`; `max_draft_tokens` is 0 for a drafter that connects later."""
    rows = min(config.torch_compile_max_bs or MAX_REQUESTS, config.max_running_requests)
    nodes = 1 + max_draft_tokens
    if config.speculative.algorithm is not None and max_draft_tokens == 0:
        nodes = config.speculative.num_nodes or NODES_OF_UNKNOWN_TREES
    return sorted({bucket.tokens for bucket in buckets(rows, nodes)})
