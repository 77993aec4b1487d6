"""AIPerf: a short profile, whose report has the drafts of each request."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import KEY, MODEL, TIMEOUT_S, TOKENIZER, URL, run, scenario

NUM_REQUESTS = 4


@scenario
def the_report_has_the_figures_of_drafts():
    with tempfile.TemporaryDirectory() as folder:
        options = ["--model", MODEL, "--url", URL, "--api-key", KEY, "--endpoint-type", "chat", "--streaming"]
        options += ["--tokenizer", TOKENIZER, "--request-count", str(NUM_REQUESTS), "--concurrency", "1"]
        options += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "24", "--random-seed", "1"]
        options += ["--artifact-dir", folder, "--ui", "none", "--workers-max", "1", "--record-processors", "1"]
        # Its services are processes, which a busy machine starts late.
        waits = {f"AIPERF_SERVICE_{name}_TIMEOUT": TIMEOUT_S for name in ("REGISTRATION", "START", "PROFILE_START")}
        environment = os.environ | waits | {"AIPERF_SERVICE_REGISTRATION_MAX_ATTEMPTS": "300"}
        command = [Path(sys.executable).with_name("aiperf"), "profile", *options]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        [path] = Path(folder).rglob("profile_export_aiperf.json")
        report = json.loads(path.read_text())
        assert report["request_count"]["avg"] == NUM_REQUESTS, report["request_count"]
        assert sum(report["pooled_spec_decode_acceptance_histogram"].values()) > 0
        assert "Token-Weighted Acceptance Length" in ended.stdout, ended.stdout[-2000:]


run("aiperf")
