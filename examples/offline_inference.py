"""Generate text in this process, without a server and without Ray: EAGLE-3 against plain decoding."""

import argparse
from time import perf_counter

from specray.config import SpeculativeConfig
from specray.llm import LLM
from specray.sampling_params import SamplingParams

PROMPTS = ["The capital of France is", "def fibonacci(n):"]
EAGLE3 = SpeculativeConfig(algorithm="EAGLE3", draft_model_path="smollm2-135m-instruct-eagle3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=40)
    options = parser.parse_args()
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=options.max_tokens)
    # With the CPU kernels both texts are equal, token by token, in every type.
    with LLM(model="smollm2-135m-instruct") as plain, plain.with_speculative(EAGLE3) as drafted:
        for name, llm in (("plain decoding", plain), ("EAGLE-3", drafted)):
            start = perf_counter()
            choices = [generation.choices[0] for generation in llm.generate(PROMPTS, params)]
            seconds = perf_counter() - start
            usages = [choice.usage for choice in choices if choice.usage]
            num_steps = sum(usage.num_verify_steps for usage in usages)
            accept_length = 1 + sum(usage.num_accepted for usage in usages) / num_steps
            print(f"\n{name}: {seconds:.1f} s, accept length {accept_length:.2f}")
            for prompt, choice in zip(PROMPTS, choices, strict=True):
                print(f"  {prompt!r} -> {choice.text!r}")


if __name__ == "__main__":
    main()
