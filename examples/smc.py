"""Sequential Monte Carlo: continue a prompt in short words only.

A particle's weight is the probability that the model gave to short tokens. Where few have most of
the weight, copies replace the light ones. Bars show the effective sample size, step by step.
"""

import argparse
import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from rich.progress import track

from genlm_backend import AsyncLM, load_model_by_name


@dataclass
class Particle:
    tokens: list[int] = field(default_factory=list)
    log_weight: float = 0.0
    is_done: bool = False

    async def step(self, lm: AsyncLM, prompt, allowed, random) -> None:
        draw = await lm.draw_next_token(
            prompt + self.tokens, allowed=allowed, generator=random, impossible="return"
        )
        self.log_weight += draw.logprob - draw.log_proposal
        self.is_done = draw.token_id in {-1, *lm.eos_token_ids}  # -1 where none was possible
        self.tokens = [*self.tokens, draw.token_id] if draw.token_id >= 0 else self.tokens


async def smc(lm: AsyncLM, prompt: list[int], count: int, max_tokens: int, max_bytes: int):
    random, particles, sizes = np.random.default_rng(0), [Particle() for _ in range(count)], []
    allowed = np.array([len(t.strip()) <= max_bytes and t.isascii() for t in lm.byte_vocab])
    allowed[list(lm.special_ids)], allowed[list(lm.eos_token_ids)] = False, True
    for _ in track(range(max_tokens), "Sampling"):
        steps = (p.step(lm, prompt, allowed, random) for p in particles if not p.is_done)
        await asyncio.gather(*steps)
        log_weights = np.array([particle.log_weight for particle in particles])
        total = np.logaddexp.reduce(log_weights)
        weights = np.exp(log_weights - total)
        sizes.append(1 / np.square(weights).sum())  # effective sample size
        if sizes[-1] < count / 2:
            chosen, mean = random.choice(count, count, p=weights), total - np.log(count)
            particles = [Particle(particles[i].tokens, mean, particles[i].is_done) for i in chosen]
    return particles, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description="SMC over a language model, in short words only.")
    parser.add_argument("--model", default="smollm2", help="a name, or a local directory")
    parser.add_argument("--prompt", default="The sea is")
    parser.add_argument("--particles", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=20, help="of each particle, at most")
    parser.add_argument("--bytes", type=int, default=4, help="of a token, at most")
    options = parser.parse_args()
    print(f"Loading {options.model} …")
    with load_model_by_name(options.model, llm_opts={"batch_size": options.particles}) as lm:
        prompt, count = lm.tokenizer.encode(options.prompt), options.particles
        particles, ess = asyncio.run(smc(lm, prompt, count, options.tokens, options.bytes))
    bars = "".join("▁▂▃▄▅▆▇█"[int(7.99 * size / count)] for size in ess)
    print(f"Effective sample size  {bars}  of {count}\nPosterior, heaviest first")
    weights, total = Counter(), np.logaddexp.reduce([p.log_weight for p in particles])
    for particle in particles:
        text = b"".join(lm.byte_vocab[token] for token in particle.tokens).decode()
        weights[text] += np.exp(particle.log_weight - total)
    for text, weight in weights.most_common(10):
        print(f"  {weight:.3f}  {options.prompt}{text!r}")
    counts = lm.statistics()
    print(f"{counts.num_awaits} awaits in {counts.num_forwards} forward passes ", end="")
    print(f"(mean batch {counts.mean_batch_size:.1f}); {counts.tokens_computed} tokens ", end="")
    print(f"computed, {counts.tokens_reused} reused")


if __name__ == "__main__":
    main()
