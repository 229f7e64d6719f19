"""Score many texts at once: the log-probability of each, and its perplexity per byte.

Every text is one await; texts that begin alike share what they have in common.
"""

import argparse
import asyncio
import math

from genlm_backend import AsyncLM, load_model_by_name, surprisal

TEXTS = [
    "The capital of France is Paris.",
    "The capital of France is Lyon.",
    "The capital of France is a banana.",
    "The cat sat on the mat.",
    "The mat sat on the cat.",
    "Mat the on sat cat the.",
]


async def score(lm: AsyncLM, text: str) -> tuple[float, float]:
    """Return the log-probability of a text, in nats, and its bits per byte."""
    total = (await surprisal(lm, text, by="token")).log_likelihood
    return total, -total / math.log(2) / len(text.encode())


async def main() -> None:
    parser = argparse.ArgumentParser(description="Score many texts at once.")
    parser.add_argument("texts", nargs="*", default=TEXTS)
    parser.add_argument("--model", default="smollm2", help="a name, or a local directory")
    options = parser.parse_args()
    async with load_model_by_name(options.model) as lm:
        scores = await asyncio.gather(*(score(lm, text) for text in options.texts))
        for (total, bits), text in sorted(zip(scores, options.texts, strict=True), reverse=True):
            print(f"{total:9.2f} nats  {bits:5.2f} bits per byte  {text}")
        counts = lm.statistics()
        print(
            f"{counts.num_awaits} awaits, {counts.tokens_computed} tokens computed, "
            f"{counts.num_forwards} forward passes"
        )


if __name__ == "__main__":
    asyncio.run(main())
