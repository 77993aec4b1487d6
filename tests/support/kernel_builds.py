"""Other builds of the CPU kernels, which test_kernel_builds runs: with sanitizers, and without newer instructions.

`python -m tests.support.kernel_builds` compiles them ahead of time, which takes minutes: `.ci/run` does it while
packages are installed, so it needs no package but torch.
"""

import os

from specray.ops.cpu.build import BuildError, build

SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=all -O1"
OLDEST = "-march=x86-64 -O1"


def main() -> None:
    for flags in ("", SANITIZED, OLDEST):
        os.environ["SPECRAY_KERNEL_FLAGS"] = flags
        try:
            build()
        except BuildError as error:  # its test says so or skips
            print(f"not compiled: {error}")


if __name__ == "__main__":
    main()
