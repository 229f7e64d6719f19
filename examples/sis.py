"""Sequential importance sampling in ten lines: particles that only know how to ask.

Each particle samples from the model, restricted to ASCII tokens; its weight is the probability
that the model gave to those. Nothing here knows of batches, caches or the other particles.
"""

import argparse
import asyncio

import numpy as np

from genlm_backend import AsyncLM, load_model_by_name


async def particle(lm: AsyncLM, prompt: list[int], num_tokens: int, allowed, seed: int):
    random, tokens, log_weight = np.random.default_rng(seed), [], 0.0
    for _ in range(num_tokens):
        draw = await lm.draw_next_token(
            prompt + tokens, allowed=allowed, generator=random, impossible="return"
        )
        log_weight += draw.logprob - draw.log_proposal
        if draw.token_id < 0:  # no allowed token is possible: the particle dies, and no other
            break
        tokens.append(draw.token_id)
    return log_weight, b"".join(lm.byte_vocab[token] for token in tokens).decode()


async def main() -> None:
    parser = argparse.ArgumentParser(description="Sequential importance sampling.")
    parser.add_argument("--model", default="smollm2", help="a name, or a local directory")
    parser.add_argument("--prompt", default="The sea is")
    parser.add_argument("--particles", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=12)
    options = parser.parse_args()
    async with load_model_by_name(options.model, llm_opts={"batch_size": options.particles}) as lm:
        allowed = np.array([len(token) > 0 and token.isascii() for token in lm.byte_vocab])
        allowed[list(lm.special_ids)] = False
        prompt = lm.tokenizer.encode(options.prompt)
        found = await asyncio.gather(
            *(particle(lm, prompt, options.tokens, allowed, i) for i in range(options.particles))
        )
        for log_weight, text in sorted(found, reverse=True):
            print(f"{log_weight:8.2f}  {options.prompt}{text!r}")
        print(f"{lm.statistics().num_awaits} awaits in {lm.statistics().num_forwards} passes")


if __name__ == "__main__":
    asyncio.run(main())
