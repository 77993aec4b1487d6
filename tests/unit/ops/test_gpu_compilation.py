"""Every Triton kernel compiles for the GPUs that it is made for, and keeps its values in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from specray.ops.gpu import few_rows

ROOT = Path(__file__).parents[3]
KERNELS = {
    *("attend_tiles", "merge_chunks", "rotate_head", "norm_rows", "silu_block", "multiply_rows", "multiply_pairs"),
    *("tile_rows", "join_rows", "gather_angles", "gather_cells", "load_trees", "build_trees", "commit_tokens"),
    *("build_extend", "take_trees", "put_trees", "add_noise"),
    *("convolve_rows", "keep_windows", "run_delta_rule", "norm_and_gate"),
    *("position_keys", "choose_in_blocks", "choose_among_blocks", "find_lowest", "walk_tree", "compact_path"),
    *("release_trees", "await_trees", "sum_over_ranks"),
}
FEW_ROWS = "multiply_few_rows"  # not launched on GPUs that have less shared memory than it takes
SPILLED_BYTES = 24  # of a thread: tiles of several nodes over KV in e4m3, which sm_80 converts by arithmetic
SHARED_BYTES = 99 * 1024  # of a program, on the smallest of these GPUs


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_kernels_compile_without_spills(found: list[dict[str, Any]]) -> None:
    assert {(usage["kernel"], usage["sm"]) for usage in found} == {
        *((kernel, sm) for kernel in KERNELS for sm in (80, 90)),
        ("quantise_row", 90),  # earlier GPUs have no such float8
        (FEW_ROWS, 90),
    }
    assert [usage for usage in found if usage["spilled"] > SPILLED_BYTES] == []
    assert [usage for usage in found if usage["shared"] > SHARED_BYTES and usage["kernel"] != FEW_ROWS] == []
    assert max(usage["shared"] for usage in found if usage["kernel"] == FEW_ROWS) <= few_rows.SHARED_BYTES


@pytest.mark.slow
def test_a_norm_behind_a_sum_over_ranks_adds_in_the_order_of_one_without(found: list[dict[str, Any]]) -> None:
    for sm in (80, 90):
        norms = [usage for usage in found if usage["sm"] == sm and (usage.get("ADDS") or usage.get("NORMS"))]
        layouts = {str(usage["sum_layouts"]) for usage in norms if usage["kernel"] in ("norm_rows", "sum_over_ranks")}
        assert len(layouts) == 1
        assert "sizePerThread" in str(layouts)


@pytest.mark.slow
def test_tiles_of_all_heights_add_weights_in_one_order(found: list[dict[str, Any]]) -> None:
    """On an H100, tiles of 16 rows with 4 warps and of 32 with 8 gave one bit in 100,000 another value."""
    layouts: dict[tuple[int, ...], set[str]] = {}
    for usage in found:
        if usage["kernel"] == "attend_tiles":
            shape = (usage["sm"], usage["GROUP"], usage["KV_HEADS"], usage["DIM"])
            layouts.setdefault(shape, set()).add(str(usage["product_warps"]))
    assert len(layouts) > 2
    assert {shape: seen for shape, seen in layouts.items() if len(seen) > 1 or "['" not in str(seen)} == {}
