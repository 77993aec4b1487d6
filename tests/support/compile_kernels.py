"""Compiles the Triton kernels for GPUs that are not there: `python -m tests.support.compile_kernels` prints what each
takes, one JSON object a line. Triton's wheel carries the assembler and a tool that reads its output.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specray.ops.gpu import (
    all_reduce_kernels,
    attention_kernels,
    experts,
    few_row_kernels,
    few_rows,
    layer_kernels,
    matrix,
    matrix_kernels,
    noise_kernels,
    sampling,
    sampling_kernels,
    state_kernels,
    states,
    step_kernels,
    tree_kernels,
)
from specray.ops.gpu.all_reduce import TRIAL_POLLS
from specray.ops.gpu.attention import num_warps
from specray.ops.quantised_weight import E2M1, E4M3, INT4, INT8

CAPABILITIES = (80, 90)
HEADS = [(4, 8, 128), (8, 1, 128), (7, 4, 128)]  # group, KV heads, head dim: Llama 8B, a rank of 70B, Qwen2.5 7B
WAYS = (  # in which a layer attends: the default, and all at once
    {"WINDOW": 0, "CAPPED": False, "HAS_SINKS": False},
    {"WINDOW": 128, "CAPPED": True, "HAS_SINKS": True},
)
POINTERS = {
    "out": "*bf16",
    "partial_mixed": "*fp32",
    "partial_sums": "*fp32",
    "tiles": "*i32",
    "kv_slots": "*i64",
    "paths": "*i64",
    "path_lengths": "*i64",
    "prefix_lens": "*i64",
    "rows": "*i64",
    "cos": "*fp32",
    "sin": "*fp32",
    "slot_mapping": "*i64",
    "block_experts": "*i32",
    "block_pairs": "*i32",
    **dict.fromkeys(("sinks", "temperature", "lowest", "top_p", "min_p"), "*fp32"),
    **dict.fromkeys(("mask", "keys", "best", "best_ids", "scores"), "*i32"),
    **dict.fromkeys(("trees", "lens", "num_nodes", "seeds", "lengths", "parents", "drafts", "starts"), "*i64"),
    **dict.fromkeys(("tokens", "path", "chosen", "top_k", "nodes", "counts"), "*i64"),
    "is_finite": "*i8",
    "quantised": "*fp8e4nv",
    "column_ids": "*i64",
    "buffer": "*i32",
    **dict.fromkeys(("addresses", "turns"), "*i64"),
    **dict.fromkeys(("cos_table", "sin_table"), "*fp32"),
    **dict.fromkeys(("token_ids", "positions", "slots", "kept", "outcome", "places", "ends", "last", "roots"), "*i64"),
    **dict.fromkeys(("new_slots", "new_num_nodes", "new_tokens", "new_parents", "report", "most"), "*i64"),
    **dict.fromkeys(("pending_tokens", "pending_parents", "pending_nodes"), "*i64"),
    **dict.fromkeys(("pending_scores", "node_scores", "least"), "*fp32"),
}
SCALARS = {"scale": "fp32", "eps": "fp32", "smallest": "fp32", "largest": "fp32", "cap": "fp32"}
MMA_WARPS = re.compile(r"mma<\{[^}]*warpsPerCTA = \[([^\]]*)\]")
REDUCED = re.compile(r'"tt.reduce".*?\}\) : \(tensor<[^>]*?(#blocked\d*)', re.DOTALL)
INTEGERS = ("outs", "ins", "first_id", "max_depth", "max_nodes", "count", "padding_slot", "padding_kv_slot", "rank")


class Case(NamedTuple):
    kernel: Any
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    dtype: str = "bf16"  # of the pointers that have no type of their own
    types: dict[str, str] = {}  # noqa: RUF012 - where they differ from POINTERS
    capabilities: tuple[int, ...] = CAPABILITIES


def cases() -> Iterator[Case]:
    for group, kv_heads, dim in HEADS:
        shape = {"DIM": dim, "DIM_PADDED": triton.next_power_of_2(dim)}
        blocks = {"KEYS": attention_kernels.KEYS, "CHUNK": attention_kernels.CHUNK}
        # Rows, whether programs share tiles, whether sizes are fixed, and how many nodes a tile has.
        tiles = [(16, True, True, 1), (16, True, False, 0), (32, False, False, 0), (32, True, True, 2)]
        tiles += [(32, False, True, 2), (32, True, False, 2), (32, False, False, 2)]
        for (rows, splits, padded, paths), ways in product(tiles, WAYS if group == HEADS[0][0] else WAYS[:1]):
            heads = {"QUERIES": rows // group, "GROUP": group, "KV_HEADS": kv_heads, "ROWS": rows}
            heads |= {"SPLIT": splits, "PADDED": padded, "PATHS": paths}
            warps = num_warps(rows, torch.bfloat16)
            own_type = {"MANTISSA": 0, "CONVERTS": False}
            yield Case(attention_kernels.attend_tiles, shape | blocks | heads | ways | own_type, warps)
        yield Case(attention_kernels.tile_rows, {"QUERIES": 32 // group}, num_warps=1)
        num_heads = group * kv_heads
        heads = {"HEADS": num_heads, "HEADS_PADDED": triton.next_power_of_2(num_heads)}
        yield Case(
            attention_kernels.merge_chunks,
            shape
            | heads
            | {"CHUNK": attention_kernels.CHUNK, "WINDOW": 128, "HAS_SINKS": True}
            | {"PADDED": True, "PATHS": 2, "QUERIES": 32 // group},
        )
        rotated = {"Q_HEADS": num_heads, "KV_HEADS": kv_heads, "DIM": dim, "HALF_PADDED": dim // 2, "HAS_NORM": True}
        yield Case(layer_kernels.rotate_head, rotated | {"MANTISSA": 0}, num_warps=1)
    for adds in (False, True):
        yield Case(layer_kernels.norm_rows, {"SIZE": 4096, "PADDED": 4096, "ADDS": adds}, num_warps=16)
    for ranks, (norms, polls) in product((2, 8), ((False, 0), (True, 0), (False, TRIAL_POLLS))):
        constants = {"SIZE": 4096, "PADDED": 4096, "NORMS": norms, "RANKS": ranks, "FLAG_BYTES": 4096}
        constants["MOST_POLLS"] = polls
        yield Case(all_reduce_kernels.sum_over_ranks, constants, num_warps=16)
    yield Case(layer_kernels.silu_block, {"BLOCK": 1024})
    width = {"SIZE": 14336, "WIDTH": 14336, "PADDED": 16384}
    yield Case(layer_kernels.quantise_row, width, num_warps=16, capabilities=(90,))
    numbers = {"CODE": matrix.CODES[None].value, "HAS_ZEROS": False}
    sizes = {"ROWS": experts.ROWS, "COLUMNS": experts.COLUMNS, "INPUTS": matrix.INPUT_BYTES // 2}
    for share, has_bias in product((8, 1), (False, True)):
        yield Case(matrix_kernels.multiply_pairs, numbers | {"SHARE": share, "HAS_BIAS": has_bias} | sizes)
    types = (("bf16", 2), ("fp16", 2), ("fp32", 4))
    for (row, (dtype, size)), (column, columns) in product(enumerate(types), enumerate(matrix.COLUMNS)):
        tile = {"ROWS": matrix.MANY_ROWS, "COLUMNS": columns, "INPUTS": matrix.INPUT_BYTES // size}
        has_bias = (row + column) % 2 == 1  # so each type and each width occurs with and without
        yield Case(matrix_kernels.multiply_rows, numbers | {"HAS_BIAS": has_bias} | tile, dtype=dtype)
    yield from cases_of_few_rows()
    yield from cases_of_codes()
    yield from cases_of_float8()
    size = {"SIZE": 4096, "PADDED": 4096}
    for keeps in (False, True):
        yield Case(layer_kernels.join_rows, size | {"KEEPS": keeps}, num_warps=16)
    yield Case(layer_kernels.gather_angles, {"DIM": 128, "PADDED": 128}, num_warps=1)
    yield from cases_of_verification()
    yield from cases_of_steps()
    yield from cases_of_states()


def cases_of_float8() -> Iterator[Case]:
    """Pools in float8, and GPUs with and without an instruction that converts e4m3."""
    group, kv_heads, dim = HEADS[0]
    types = {"pool": "*u8"}
    for mantissa, rows, dtype in product((2, 3), (16, 32), ("bf16", "fp16")):
        heads = {"QUERIES": rows // group, "GROUP": group, "KV_HEADS": kv_heads, "DIM": dim, "DIM_PADDED": dim}
        blocks = {"KEYS": attention_kernels.KEYS, "CHUNK": attention_kernels.CHUNK}
        kind = {"ROWS": rows, "SPLIT": rows == 16, "PADDED": True, "PATHS": rows // 16, "MANTISSA": mantissa} | WAYS[0]
        warps = num_warps(rows, torch.bfloat16)
        for sm in CAPABILITIES:
            constants = heads | blocks | kind | {"CONVERTS": sm > 80}
            yield Case(attention_kernels.attend_tiles, constants, warps, 3, dtype, types, (sm,))
    for mantissa in (2, 3):
        heads = {"Q_HEADS": group * kv_heads, "KV_HEADS": kv_heads, "DIM": dim, "HALF_PADDED": dim // 2}
        kind = {"HAS_NORM": True, "MANTISSA": mantissa}
        yield Case(layer_kernels.rotate_head, heads | kind, num_warps=1, types=types)


def cases_of_few_rows() -> Iterator[Case]:
    for tile, gated, adds in product((few_rows.WIDE, few_rows.DEEP, few_rows.NARROW), (False, True), (False, True)):
        if gated and (adds or tile != few_rows.WIDE):
            continue
        sizes = {"ROWS": few_rows.MOST_ROWS, "COLUMNS": tile.columns, "INPUTS": tile.inputs}
        near = {"NEAR_BYTES": few_rows.NEAR_BYTES, "THREAD_BYTES": few_rows.thread_bytes(tile)}
        kind = {"GATED": gated, "HAS_BIAS": False, "ADDS": adds}
        options = tile.num_warps, few_rows.NUM_STAGES
        yield Case(few_row_kernels.multiply_few_rows, kind | sizes | near, *options, capabilities=(90,))


def cases_of_codes() -> Iterator[Case]:
    """Scales as published: float32 of fp8, bytes of MXFP4, 16 bits of integers."""
    scales = {E4M3: "*fp32", E2M1: "*u8", INT8: "*bf16", INT4: "*fp16"}
    for code, dtype in scales.items():
        types = {"weight": "*u8", "zeros": "*u8", "scales": dtype}
        inputs = 32 if code == E2M1 else matrix.INPUT_BYTES // 2
        kind = {"CODE": matrix.CODES[code].value, "HAS_ZEROS": code.zero is not None, "HAS_BIAS": True}
        sizes = {"COLUMNS": matrix.COLUMNS[1], "INPUTS": inputs}
        for rows in (matrix.FEW_ROWS, matrix.MANY_ROWS):
            warps = 8 if rows == matrix.MANY_ROWS else 4
            yield Case(matrix_kernels.multiply_rows, kind | sizes | {"ROWS": rows}, warps, types=types)
        yield Case(matrix_kernels.multiply_pairs, kind | sizes | {"SHARE": 8, "ROWS": experts.ROWS}, types=types)


def cases_of_verification() -> Iterator[Case]:
    for nodes, depths in ((1, 1), (8, 8), (128, 32)):
        yield Case(noise_kernels.position_keys, {"WIDTH": nodes, "PADDED": nodes}, num_warps=1)
        yield Case(tree_kernels.walk_tree, {"NODES_PADDED": nodes, "DEPTHS_PADDED": depths}, num_warps=1)
    filters = {"PIVOTS": sampling.PIVOTS, "BLOCK": sampling.FILTER_BLOCK, "BLOCKS_PADDED": 32}
    for masks, logits in product((False, True), ("*bf16", "*fp32")):
        has_mask, has_trees, types = {"HAS_MASK": masks}, {"HAS_TREES": masks}, {"logits": logits}
        for samples in (False, True):
            has_ids = masks ^ samples ^ (logits == "*fp32")  # so any three options occur in all combinations
            block = {"SAMPLES": samples, "FILTERS": not has_ids, "HAS_IDS": has_ids, "BLOCK": sampling.BLOCK}
            yield Case(sampling_kernels.choose_in_blocks, has_mask | has_trees | block, num_warps=8, types=types)
        for has_ids in (False, True):
            blocks = {"HAS_IDS": has_ids, "BLOCKS_PADDED": 32}
            yield Case(sampling_kernels.choose_among_blocks, has_mask | blocks, num_warps=1, types=types)
        filtered = has_mask | has_trees | filters
        yield Case(sampling_kernels.find_lowest, filtered, num_warps=sampling.FILTER_WARPS, types=types)
    for has_ids, logits in product((False, True), ("*bf16", "*fp32")):
        noisy = {"HAS_IDS": has_ids, "BLOCK": sampling.BLOCK}
        yield Case(sampling_kernels.add_noise, noisy, num_warps=8, types={"out": "*fp32", "logits": logits})
    yield Case(tree_kernels.compact_path, {"SIZE": 2048, "BLOCK": 2048})


def cases_of_steps() -> Iterator[Case]:
    yield Case(step_kernels.gather_cells, {"BLOCK": 128})
    types = dict.fromkeys(("found", "in_time", "flag"), "*i64")
    types |= dict.fromkeys(("number", "microseconds", "num_trees", "stride", "most"), "i32")
    yield Case(tree_kernels.release_trees, {}, num_warps=1, types=types)
    yield Case(tree_kernels.await_trees, {"BLOCK": 128}, num_warps=1, types=types)
    for nodes in (1, 8, 128):
        for kernel in (step_kernels.build_trees, step_kernels.commit_tokens, step_kernels.build_extend):
            yield Case(kernel, {"WIDTH": nodes, "PADDED": nodes}, num_warps=1)
        size = {"WIDTH": nodes, "PADDED": nodes}
        for has_scores in (False, True):
            types = {"report": "*fp32"} if has_scores else {}
            yield Case(step_kernels.take_trees, size | {"CUTS": has_scores}, num_warps=1, types=types)
            keeps = {"KEEPS_SCORES": True, "HAS_SCORES": has_scores}
            yield Case(step_kernels.put_trees, size | keeps, num_warps=1)
        yield Case(step_kernels.load_trees, {"PADDED": nodes}, num_warps=1)


def cases_of_states() -> Iterator[Case]:
    """Qwen3.5's sizes, and LFM2's convolution over three tokens."""
    numbers = ("requests", "is_fresh", "rows", "restarts", "copies", "num_known", "targets", "firsts")
    floats = ("weights", "weight", "bias", "seen", "pool", "rates", "dt_bias")
    types = dict.fromkeys(numbers, "*i64") | dict.fromkeys(floats, "*fp32")
    for width, has_silu, has_bias in ((4, True, False), (3, False, True)):
        sizes = {"WIDTH": width, "BLOCK": states.CHANNELS}
        kinds = {"HAS_BIAS": has_bias, "HAS_SILU": has_silu}
        yield Case(state_kernels.convolve_rows, sizes | kinds, types=types | {"pool": "*bf16"})
        yield Case(state_kernels.keep_windows, sizes, types=types | {"pool": "*bf16"})
    for dim, block in ((128, states.COLUMNS), (96, states.COLUMNS)):
        heads = {"HEADS": 32, "K_HEADS": 16, "K_DIM": dim, "V_DIM": dim, "K_PADDED": 128, "BLOCK": block}
        yield Case(state_kernels.run_delta_rule, heads, types=types | {"beta_scale": "fp32"})
        yield Case(state_kernels.norm_and_gate, {"SIZE": dim, "PADDED": 128}, num_warps=1, types=types)


def compiled(case: Case, capability: int) -> dict[str, Any]:
    """Registers and bytes of local memory (spills) of a thread, shared memory of a program, and how its warps share a
    product on tensor cores: the numbers of them along rows and columns."""
    names, is_early = case.kernel.arg_names, capability >= 90
    if "EARLY" in names:
        case = case._replace(constants=case.constants | {"EARLY": is_early})
    signature = {name: case.types.get(name) or _type(name, case.dtype) for name in names}
    signature |= dict.fromkeys(case.constants, "constexpr")
    # What the launcher finds out about arguments: aligned pointers, and strides that are multiples of 16.
    aligned = [
        name
        for name, kind in signature.items()
        if kind.startswith("*") or name in ("q_stride", "slot_stride", "outs", "ins", "region_size")
    ]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "launch_pdl": is_early}
    binary = triton.compile(source, target=target, options=options)
    usage = _usage(binary.asm["cubin"])
    return {
        "kernel": case.kernel.__name__,
        "sm": capability,
        "shared": binary.metadata.shared,
        "sum_layouts": sorted(set(_sum_layouts(binary.asm["ttgir"]))),
        "product_warps": sorted(set(MMA_WARPS.findall(binary.asm["ttgir"]))),
        **usage,
        **case.constants,
    }


def _sum_layouts(ttgir: str) -> Iterator[str]:
    """How the threads of a program share what it sums."""
    layouts = dict(line.split(" = ", 1) for line in ttgir.splitlines() if line.startswith("#blocked"))
    return (layouts[name] for name in REDUCED.findall(ttgir))


def _type(name: str, dtype: str) -> str:
    if name in SCALARS or name in POINTERS:
        return SCALARS.get(name) or POINTERS[name]
    is_integer = name.endswith(("stride", "width", "size", "column")) or name.startswith("num_") or name in INTEGERS
    return "i32" if is_integer else f"*{dtype}"


def _usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    fields = dict(field.split(":") for field in shown.split() if ":" in field)
    return {"registers": int(fields["REG"]), "spilled": int(fields["STACK"]) + int(fields["LOCAL"])}


if __name__ == "__main__":
    for capability in CAPABILITIES:
        for case in cases():
            if capability in case.capabilities:
                print(json.dumps(compiled(case, capability)), flush=True)
