"""Sequential Monte Carlo under a JSON schema: every particle keeps to it, the heavy ones survive.

A particle holds a constraint of its own. Its weight is the probability that the model gave to what
the schema allowed, the end too, so that the posterior is the model's own, given a valid text.
"""

import argparse
import asyncio
import json

import numpy as np

from genlm_backend import AsyncLM, Constraint, load_model_by_name

PROMPT = """Rome: {"city": "Rome", "country": "Italy", "capital": true, "rivers": ["Tiber"]}
Paris: """
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "capital": {"type": "boolean"},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["city", "country", "capital", "rivers"],
    "additionalProperties": False,
}


class Particle:
    def __init__(self, constraint: Constraint, log_weight: float = 0.0):
        self.constraint, self.log_weight = constraint, log_weight

    async def step(self, lm: AsyncLM, prompt: list[int], mask, random) -> None:
        ids = prompt + self.constraint.token_ids
        draw = await lm.draw_next_token(ids, allowed=mask, generator=random, impossible="return")
        self.log_weight += draw.logprob - draw.log_proposal
        if draw.token_id >= 0:  # or it dies, by a weight of zero
            self.constraint.advance(draw.token_id)


async def smc(lm: AsyncLM, prompt: list[int], constraint: Constraint, count: int, max_tokens: int):
    random = np.random.default_rng(0)
    particles = [Particle(constraint.fork()) for _ in range(count)]
    for _ in range(max_tokens):
        active = [p for p in particles if not p.constraint.is_ended and p.log_weight > -np.inf]
        if not active:  # they have ended, or died
            break
        masks = await asyncio.to_thread(Constraint.masks, [p.constraint for p in active])
        pairs = zip(active, masks, strict=True)
        await asyncio.gather(*(p.step(lm, prompt, mask, random) for p, mask in pairs))
        log_weights = np.array([particle.log_weight for particle in particles])
        total = np.logaddexp.reduce(log_weights)
        weights = np.exp(log_weights - total)
        if 1 / np.square(weights).sum() < count / 2:  # effective sample size
            chosen, mean = random.choice(count, count, p=weights), float(total - np.log(count))
            particles = [Particle(particles[i].constraint.fork(), mean) for i in chosen]
    return particles


def main() -> None:
    parser = argparse.ArgumentParser(description="SMC under a JSON schema.")
    parser.add_argument("--particles", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=80, help="tokens of each particle, at most")
    options = parser.parse_args()
    with load_model_by_name("smollm2", llm_opts={"batch_size": options.particles}) as lm:
        prompt, constraint = lm.tokenizer.encode(PROMPT), Constraint.from_json_schema(lm, SCHEMA)
        particles = asyncio.run(smc(lm, prompt, constraint, options.particles, options.tokens))
        for particle in sorted(particles, key=lambda p: -p.log_weight):
            is_whole = particle.constraint.is_ended  # or of no weight: cut off, or dead
            ids = particle.constraint.token_ids[: -1 if is_whole else None]
            text = b"".join(lm.byte_vocab[i].byte_string for i in ids).decode(errors="replace")
            print(f"{particle.log_weight:8.2f}  {json.loads(text) if is_whole else text + ' …'}")


if __name__ == "__main__":
    main()
