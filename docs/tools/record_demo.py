"""Record a real run of `make demo` as an SVG picture: `python docs/tools/record_demo.py docs/images/demo.svg`.

The demo runs under a pseudo-terminal, so it prints what a user in a terminal sees. rich renders the final screen.
Arguments after the file name are passed to the demo.
"""

import os
import pty
import re
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 104
COMMAND = "make demo"


def main() -> int:
    target, *arguments = sys.argv[1:]
    output = bytearray()

    def keep(descriptor: int) -> bytes:
        chunk = os.read(descriptor, 4096)
        output.extend(chunk)
        return chunk

    status = pty.spawn([sys.executable, "-m", "benchmarks.demo", *arguments], keep)
    if os.waitstatus_to_exitcode(status) != 0:
        print("the demo failed; no picture was written", file=sys.stderr)
        return 1
    Path(target).write_text(svg(output.decode(errors="replace")), encoding="utf-8")
    return 0


def svg(output: str) -> str:
    """The terminal's final contents. A carriage return starts the line again, as a terminal would."""
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in output.replace("\r\n", "\n").strip().split("\n")]
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text(f"$ {COMMAND}", style="bold"))
    console.print(Text.from_ansi("\n".join(lines)))
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=COMMAND), flags=re.DOTALL)  # no web fonts


if __name__ == "__main__":
    sys.exit(main())
