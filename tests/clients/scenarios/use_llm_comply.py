"""llm-comply: published schemas of OpenAI's chat, Open Responses and Anthropic's messages, against our replies.

Each of its checks is a scenario. Those in REFUSED ask for what SpecRay does not have; they must fail with a 400, or, as
the last one says, they must not fail.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version

from report import BASE_URL, KEY, MODEL, TIMEOUT_S

FORMATS = ("openai-chat", "open-responses", "anthropic")
IMAGE = "images are refused with a 400"
NO_MODEL = "a request without a model is accepted, as by vLLM and SGLang"
REFUSED = {
    "chat-image-input": IMAGE,
    "image-input": IMAGE,
    "anth-image-input": IMAGE,
    "chat-error-handling": NO_MODEL,
    "error-handling": NO_MODEL,
}


def results(api_format: str) -> list[dict]:
    command = [os.path.join(os.path.dirname(sys.executable), "llm-comply"), "--json", "--format", api_format]
    ended = subprocess.run(
        [*command, "--base-url", BASE_URL, "--api-key", KEY, "--model", MODEL, "--timeout", TIMEOUT_S],
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(ended.stdout)["results"]


def error_of(result: dict) -> str | None:
    """What does not hold; None if all does."""
    problems = "; ".join(result.get("errors") or [])
    reason = REFUSED.get(result["id"])
    if reason is None:
        return problems or ("it failed" if result["status"] == "failed" else None)
    if reason is IMAGE:
        return None if "HTTP 400" in problems else f"{reason}, but: {problems or 'it passed'}"
    return None if result["status"] == "failed" else f"{reason}, but it passed; take it off the list"


print(json.dumps({"version": version("llm-comply")}), flush=True)
for name in FORMATS:
    for each in results(name):
        if each["status"] != "skipped":  # of models that reason
            print(json.dumps({"scenario": each["id"], "error": error_of(each)}), flush=True)
