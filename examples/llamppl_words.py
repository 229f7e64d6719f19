"""A program on llamppl: continue a prompt in words of a few letters.

A probabilistic program of two lines: the next token is observed to be a short word, and sampled
from the model under that condition. Sequential Monte Carlo keeps the particles that the model
finds probable. Needs `pip install llamppl`.
"""

import argparse
import asyncio
import time

from llamppl import CachedCausalLM, LMContext, Model, smc_standard

PROMPT = "The weather today is expected to be"


class ShortWords(Model):
    def __init__(self, lm, max_letters, max_tokens):
        super().__init__()
        self.context = LMContext(lm, PROMPT)
        self.eos, self.left = lm.tokenizer.eos_token_id, max_tokens
        short = lm.masks.STARTS_NEW_WORD & lm.masks.token_length_mask(max=max_letters + 1)
        self.allowed = short | lm.masks.PUNCTUATION | lm.masks.EOS

    async def step(self):
        await self.observe(self.context.mask_dist(self.allowed), True)
        token = await self.sample(self.context.next_token())
        self.left -= 1
        if token.token_id == self.eos or self.left == 0:
            self.finish()

    def immutable_properties(self):
        return {"allowed"}


def load(model: str, particles: int) -> CachedCausalLM:
    lm = CachedCausalLM.from_pretrained(model, backend="hf")
    lm.batch_size = particles
    return lm


async def sample(lm, particles: int, max_tokens: int, max_letters: int = 5) -> dict[str, float]:
    found = await smc_standard(ShortWords(lm, max_letters, max_tokens), particles)
    return {str(particle.context): particle.weight for particle in found}


def main() -> None:
    parser = argparse.ArgumentParser(description="SMC within words of a few letters.")
    parser.add_argument("--model", default="smollm2", help="a name, or a local directory")
    parser.add_argument("--particles", type=int, default=20)
    parser.add_argument("--letters", type=int, default=5, help="of a word, at most")
    parser.add_argument("--tokens", type=int, default=20, help="of each particle, at most")
    options = parser.parse_args()
    lm = load(options.model, options.particles)
    start = time.perf_counter()
    weights = asyncio.run(sample(lm, options.particles, options.tokens, options.letters))
    for text, weight in sorted(weights.items(), key=lambda item: -item[1]):
        print(f"  {weight:7.2f}  {PROMPT}{text}")
    print(f"{options.particles} particles in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
