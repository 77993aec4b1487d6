"""The kernels' tests again in other builds: with sanitizers, and for CPUs without this one's instructions."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from specray.ops.cpu.library import kernels
from specray.ops.cpu.processor import cpu_features
from tests.support.forked import call, run_pytest
from tests.support.kernel_builds import OLDEST, SANITIZED

ROOT = Path(__file__).parents[3]
TESTS = [
    "tests/unit/spec_decode/test_verifier.py",
    "tests/unit/ops/test_cpu_kernels.py",
    "tests/unit/ops/test_cpu_steps.py",
    "tests/unit/ops/test_attention.py",
    "tests/unit/ops/test_screen.py",
    "tests/unit/spec_decode/test_coarse_output.py",
    "tests/unit/train/test_loss.py",
    "tests/unit/models/test_gguf_blocks.py",
]
# Fused layers in every type: requests alone and in chunks, with and without trees.
LAYERS = [
    f"tests/lossless/test_every_type.py::test_output_does_not_depend_on_the_layout_of_steps[{kind}-chunks of 16]"
    for kind in ("bfloat16", "float16", "int8", "int4", "int4-float32", "KV in int8", "KV in fp8")
]
# Where threads part the work has nothing to do with instructions, but a sanitizer can find that they go too far.
THREADS = [layer.replace("chunks of 16", "two threads") for layer in LAYERS]
READ_ROWS = [f"tests/unit/worker/test_read_rows.py::test_a_{what}_computes_what_is_read" for what in ("pass", "head")]
TREES = [
    f"tests/unit/spec_decode/test_eagle.py::test_trees_equal_the_reference_with_and_without_a_cached_prefix[{head}]"
    for head in ("EAGLE3", "EAGLE3-deep", "EAGLE3-sliding", "EAGLE-map", "EAGLE-flat", "MTP", "PARALLEL-sliding")
]
IS_X86 = platform.machine() in ("x86_64", "AMD64")
# Counts of many draws show no more than tokens that equal torch's do, and neither Triton's interpreter nor torch's
# attention (and its grouping of requests) runs these kernels.
OTHERS = "not triton and not distribution and not is_detected and not [torch] and not grouping"
OF_KERNELS = [*TESTS, *LAYERS, *TREES, "-k", OTHERS]
# Torch's operations must give the same rows in batches, chunks and trees; the other checks are about drafters. Two of
# the sampled requests are greedy, and scheduling has the sampled requests in a batch too.
METHODS = [
    f"tests/lossless/test_conformance.py::test_every_method_passes_the_checks[{case}]"
    for case in (
        "EAGLE3-check_sampled_output",
        *(f"{method}-check_scheduling" for method in ("EAGLE3", "EAGLE", "PARALLEL", "NEXTN", "NGRAM")),
    )
]


# Not --capture=fd: a sanitizer ends the process, and its report would be lost with the captured output.
OPTIONS = ["-q", "-x", "--capture=sys", "-p", "no:cacheprovider"]


# The usual build sees a hundred random cases of each property. Here they only have to reach all code. Other builds skip
# tests of what they do not promise.
FEWER_CASES = {"SPECRAY_TEST_EXAMPLES": "12", "SPECRAY_NO_SKIPS": "0"}


def run_tests(tests: list[str], **environment: str) -> str:
    """Run tests in a process with these variables; returns pytest's output."""
    status, output = run_pytest([*OPTIONS, *tests], **FEWER_CASES, **environment)
    assert status == 0, output[-6000:]
    assert " passed" in output
    return output


def run_tests_with_library(library: str, tests: list[str], **environment: str) -> str:
    """The same with a library that is loaded before all others, so in a process that is not forked."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *tests],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": library, **FEWER_CASES, **environment},
        capture_output=True,
        text=True,
        timeout=1800,  # it took more than 600 s on two cores of a busy Zen 3
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[:6000]}"
    assert " passed" in result.stdout
    return result.stdout


@pytest.mark.slow
@pytest.mark.skipif(kernels() is None, reason="needs a C++ compiler")
@pytest.mark.skipif(not IS_X86, reason="these are flags for x86 CPUs")
@pytest.mark.parametrize("flags", ["-march=haswell -O2", OLDEST])
def test_kernels_for_other_cpus(flags: str) -> None:
    own = kernels()
    if "haswell" in flags and own is not None and own.target == "AVX2":
        pytest.skip("all other tests use these instructions on this CPU")
    assert "skipped" not in run_tests(OF_KERNELS, SPECRAY_KERNEL_FLAGS=flags)


@pytest.mark.slow
@pytest.mark.skipif(kernels() is None, reason="needs a C++ compiler")
@pytest.mark.skipif("avx512_vnni" not in cpu_features(), reason="needs a CPU with AVX-512 and VNNI")
def test_products_with_avx512_without_its_instructions_for_bfloat16() -> None:
    tests = ["tests/unit/ops/test_cpu_kernels.py", "tests/unit/ops/test_screen.py"]
    run_tests([*tests, "-k", OTHERS], SPECRAY_KERNEL_FLAGS="-march=cascadelake -O1")


@pytest.mark.slow
@pytest.mark.skipif(kernels() is None, reason="needs a C++ compiler")
def test_no_sanitizer_finds_anything() -> None:
    runtime = subprocess.run(
        [os.environ.get("CXX", "c++"), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip("the compiler has no sanitizers")
    options = "detect_leaks=0:print_legend=0"
    tests = [*THREADS, *READ_ROWS, *OF_KERNELS]
    shown = run_tests_with_library(runtime, tests, SPECRAY_KERNEL_FLAGS=SANITIZED, ASAN_OPTIONS=options)
    assert "skipped" not in shown


@pytest.mark.slow
def test_torchs_operations_take_the_kernels_place() -> None:
    tests = [
        "tests/unit/ops/test_quantization.py",
        "tests/unit/ops/test_sampling_distribution.py",
        "tests/unit/spec_decode/test_verifier.py",
    ]
    run_tests([*tests, *METHODS, "-k", "not detected and not follow and not joint"], SPECRAY_KERNELS="torch")


def load_twice() -> None:
    assert kernels() is None
    assert kernels() is None


@pytest.mark.parametrize("variable", ["SPECRAY_KERNELS=torch", "CXX=no-such-compiler"])
def test_one_line_says_what_is_lost_without_kernels(variable: str) -> None:
    name, value = variable.split("=")
    status, output = call("tests.unit.ops.test_kernel_builds:load_twice", **{name: value})
    assert status == 0, output
    [line] = output.splitlines()
    assert line.startswith("no CPU kernels, so torch's operations are used: slower")
