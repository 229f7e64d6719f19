"""A program on genlm-control: opinions of a language model that match a regular expression.

Adaptive weighted rejection sampling draws tokens that keep the text within the automaton, and
sequential Monte Carlo keeps the texts that the model finds probable. Needs
`pip install genlm-control`.
"""

import argparse
import asyncio
import time

from genlm.control import AWRS, BoolFSA, PromptedLLM

PROMPT = "Here is my honest opinion:"
PATTERN = r" (The|Our) (weather|food|sea) (here )?is (always|often|very) (good|cold|quiet)\."


def load(model: str, particles: int) -> PromptedLLM:
    llm = PromptedLLM.from_name(model, backend="hf", batch_size=particles)
    llm.set_prompt_from_str(PROMPT)
    return llm


async def sample(llm: PromptedLLM, particles: int, max_tokens: int) -> dict[str, float]:
    automaton = BoolFSA.from_regex(PATTERN).coerce(llm, f=b"".join)
    sampler = AWRS(llm, automaton)
    sequences = await sampler.smc(particles, ess_threshold=0.5, max_tokens=max_tokens)
    await sampler.cleanup()
    return sequences.decoded_posterior


def main() -> None:
    parser = argparse.ArgumentParser(description="SMC within a regular expression.")
    parser.add_argument("--model", default="smollm2", help="a name, or a local directory")
    parser.add_argument("--particles", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=25, help="of each particle, at most")
    options = parser.parse_args()
    llm = load(options.model, options.particles)
    start = time.perf_counter()
    posterior = asyncio.run(sample(llm, options.particles, options.tokens))
    for text, probability in sorted(posterior.items(), key=lambda item: -item[1]):
        print(f"  {probability:.3f}  {PROMPT}{text}")
    print(f"{options.particles} particles in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
