"""Ask a running server with OpenAI's client and print the accept length.

Start a server in another terminal first: specray serve configs/eagle3.yaml
"""

import argparse
import os

from openai import APIConnectionError, OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=100)
    options = parser.parse_args()
    client = OpenAI(base_url=options.url, api_key=os.environ.get("OPENAI_API_KEY", "unused"))
    try:
        model = client.models.list().data[0].id
    except APIConnectionError:
        raise SystemExit(f"no server answers at {options.url}; start one: specray serve configs/eagle3.yaml") from None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three rivers."}],
        max_completion_tokens=options.max_tokens,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            speculation = (chunk.usage.model_extra or {})["speculative"]
            print(f"\n\n{chunk.usage.completion_tokens} tokens, accept length {speculation['accept_length']}")


if __name__ == "__main__":
    main()
