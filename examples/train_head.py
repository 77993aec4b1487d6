"""Train an EAGLE-3 head on the target's own answers, then decode with it.

The defaults take a few minutes on two cores and give a head that is far from trained: docs/training.md says how long
a useful one takes. The same command with a larger --tokens continues the training.
"""

import argparse
import json
from pathlib import Path

from specray.cli.main import main as specray
from specray.llm import LLM
from specray.sampling_params import SamplingParams

PROMPTS = [
    "Name three rivers.",
    "Why is the sky blue?",
    "Write a short letter to a friend.",
    "How do I boil an egg?",
    "Explain what a prime number is.",
    "Tell me a story about a fox.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--folder", type=Path, default=Path("work/example"), help="answers, checkpoint and head")
    parser.add_argument("--tokens", type=int, default=20_000, help="positions to train on")
    parser.add_argument("--draft-vocab-size", type=int, default=8192, help="most frequent tokens, which it drafts")
    options = parser.parse_args()
    run, prompts = options.folder / "run", options.folder / "prompts.jsonl"
    options.folder.mkdir(parents=True, exist_ok=True)
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    # `specray train eagle3 --help` describes these flags.
    status = specray(
        [
            *["train", "eagle3", "--model", options.model],
            *["--prompts", str(prompts), "--answer-tokens", "64"],  # four answers to each prompt
            *["--answers", str(options.folder / "answers"), "--run", str(run)],
            *["--tokens", str(options.tokens), "--draft-vocab-size", str(options.draft_vocab_size)],
        ]
    )
    if status:
        raise SystemExit(status)
    head = {"algorithm": "EAGLE3", "draft_model_path": str(run / "head")}
    with LLM(model=options.model, speculative=head) as llm:
        [generation] = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=40))
    choice = generation.choices[0]
    assert choice.usage is not None
    accept_length = 1 + choice.usage.num_accepted / choice.usage.num_verify_steps
    print(f"{choice.text!r}\naccept length {accept_length:.2f} with the head in {run / 'head'}")


if __name__ == "__main__":
    main()
