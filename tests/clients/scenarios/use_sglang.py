"""SGLang's `bench_serving`: a short run, whose report has our accept length. The package's other parts need a GPU."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

from report import MODEL, TOKENIZER, URL, run, scenario


@scenario
def the_report_has_an_accept_length():
    program = distribution("sglang").locate_file("sglang/bench_serving.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.jsonl"
        options = ["--backend", "sglang-oai", "--base-url", URL, "--model", MODEL, "--tokenizer", TOKENIZER]
        options += ["--dataset-name", "random-ids", "--num-prompts", "4", "--output-file", str(out)]
        options += ["--random-input-len", "32", "--random-output-len", "24", "--random-range-ratio", "1"]
        ended = subprocess.run([sys.executable, program, *options], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        report = json.loads(out.read_text().splitlines()[-1])
        assert report["completed"] == 4, report
        assert report["accept_length"] >= 1, report["accept_length"]
        assert "Accept length:" in ended.stdout


run("sglang")
