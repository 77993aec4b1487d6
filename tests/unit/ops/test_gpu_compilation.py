"""Every Triton kernel compiles for the GPUs that it is made for, and keeps its values in registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
KERNELS = {
    *("attend_tiles", "merge_chunks", "rotate_head", "norm_rows", "silu_block", "grouped_products", "multiply_rows"),
    *("join_rows", "gather_angles", "gather_cells", "load_trees", "build_trees", "commit_tokens"),
    *("build_extend", "take_trees", "put_trees", "add_noise"),
    *("position_keys", "choose_in_blocks", "choose_among_blocks", "find_lowest", "walk_tree", "compact_path"),
}
SHARED_BYTES = 99 * 1024  # of a program, on the smallest of these GPUs


@pytest.mark.slow
def test_kernels_compile_without_spills() -> None:
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
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(usage["kernel"], usage["sm"]) for usage in found} == {
        *((kernel, sm) for kernel in KERNELS for sm in (80, 90)),
        ("quantise_row", 90),  # earlier GPUs have no such float8
    }
    assert [usage for usage in found if usage["spilled"] or usage["shared"] > SHARED_BYTES] == []
