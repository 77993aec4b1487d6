"""Load a published EAGLE-3 head and its target from the Hugging Face hub, or from local folders.

The default pair needs internet access, 17 GB of disk and memory, and no token.
"""

import argparse

from specray.errors import ConfigError
from specray.llm import LLM
from specray.sampling_params import SamplingParams

TARGET = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
HEAD = "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=TARGET, help="hub name or local folder (default: %(default)s)")
    parser.add_argument("--head", default=HEAD, help="hub name or local folder (default: %(default)s)")
    options = parser.parse_args()
    try:
        llm = LLM(
            model=options.model,
            max_running_requests=1,
            max_total_tokens=2048,
            progress=True,
            speculative={"algorithm": "EAGLE3", "draft_model_path": options.head},
        )
    except ConfigError as error:
        raise SystemExit(
            f"error: {error}\n\nThis example needs the target {options.model} and the head {options.head}. With "
            "internet access they are downloaded. Without it, copy both folders to this machine and name them: "
            "--model FOLDER --head FOLDER"
        ) from None
    with llm:
        [generation] = llm.generate(["The three longest rivers are"], SamplingParams(temperature=0, max_tokens=60))
    choice = generation.choices[0]
    assert choice.usage is not None
    steps = choice.usage.num_verify_steps
    print(choice.text)
    print(f"\naccept length {1 + choice.usage.num_accepted / steps:.2f} over {steps} steps")


if __name__ == "__main__":
    main()
