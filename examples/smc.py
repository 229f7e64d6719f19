"""Sequential Monte Carlo over a language model: continue a prompt in short words only.

Each particle is a coroutine that asks "what comes next here?" and chooses among the tokens that
keep every word short. Its weight is the probability that the model gave to what was allowed.
Every few tokens the light particles are replaced by copies of the heavy ones.
"""

import argparse
import asyncio
import time

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

from genlm_backend import AsyncLM, load_model_by_name


class Particle:
    def __init__(self, prompt: list[int]):
        self.prompt, self.tokens, self.log_weight, self.is_done = prompt, [], 0.0, False

    def copy(self, log_weight: float) -> "Particle":
        twin = Particle(self.prompt)
        twin.tokens, twin.is_done, twin.log_weight = list(self.tokens), self.is_done, log_weight
        return twin

    async def step(self, lm: AsyncLM, allowed: np.ndarray, eos: int, random: np.random.Generator):
        logprobs = (await lm.next_token_logprobs(self.prompt + self.tokens)).numpy()
        logprobs[~allowed] = -np.inf
        total = np.logaddexp.reduce(logprobs)
        self.log_weight += float(total)
        token = int(np.searchsorted(np.cumsum(np.exp(logprobs - total)), random.random()))
        self.is_done = token == eos
        self.tokens += [] if self.is_done else [token]


def normalized(particles: list[Particle]) -> np.ndarray:
    log_weights = np.array([particle.log_weight for particle in particles])
    return np.exp(log_weights - np.logaddexp.reduce(log_weights))


def resample(particles: list[Particle], random: np.random.Generator) -> list[Particle]:
    mean = np.logaddexp.reduce([p.log_weight for p in particles]) - np.log(len(particles))
    chosen = random.choice(len(particles), size=len(particles), p=normalized(particles))
    return [particles[i].copy(float(mean)) for i in chosen]


async def smc(lm: AsyncLM, prompt: list[int], count: int, max_tokens: int, max_bytes: int, tick):
    eos, random = lm.tokenizer.eos_token_id, np.random.default_rng(0)
    allowed = np.array([len(t.strip()) <= max_bytes and t.isascii() for t in lm.byte_vocab])
    allowed[list(lm.special_ids)], allowed[eos] = False, True
    particles = [Particle(prompt) for _ in range(count)]
    for _ in range(max_tokens):
        active = [particle for particle in particles if not particle.is_done]
        await asyncio.gather(*(particle.step(lm, allowed, eos, random) for particle in active))
        if 1 / np.square(normalized(particles)).sum() < count / 2:  # effective sample size
            particles = resample(particles, random)
        tick()
    return particles


def main() -> None:
    parser = argparse.ArgumentParser(description="SMC over a language model, in short words only.")
    parser.add_argument("--model", default="smollm2", help="a name, or a local directory")
    parser.add_argument("--prompt", default="The sea is")
    parser.add_argument("--particles", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=20, help="tokens of each particle, at most")
    parser.add_argument("--bytes", type=int, default=4, help="bytes of a token, at most")
    options = parser.parse_args()
    console = Console()
    console.print(f"Loading {options.model} …")
    lm = load_model_by_name(options.model, llm_opts={"batch_size": options.particles})
    columns = [SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn()]
    start = time.perf_counter()
    with lm, Progress(*columns, console=console) as progress:
        task = progress.add_task("Sampling", total=options.tokens)
        prompt = lm.tokenizer.encode(options.prompt)
        sizes = (options.particles, options.tokens, options.bytes)
        particles = asyncio.run(smc(lm, prompt, *sizes, lambda: progress.advance(task)))
        seconds, statistics = time.perf_counter() - start, lm.statistics()
    weights: dict[str, float] = {}
    for particle, weight in zip(particles, normalized(particles), strict=True):
        text = b"".join(lm.byte_vocab[token] for token in particle.tokens).decode(errors="replace")
        weights[text] = weights.get(text, 0) + weight
    table = Table("weight", f"{options.prompt} …", title="Posterior, heaviest first")
    for text, weight in sorted(weights.items(), key=lambda item: -item[1])[:10]:
        table.add_row(f"{weight:.3f}", repr(text)[1:-1])
    console.print(table)
    console.print(
        f"{statistics.num_awaits} awaits in {statistics.num_forwards} forward passes "
        f"(mean batch {statistics.mean_batch_size:.1f}); {statistics.tokens_computed} tokens "
        f"computed, {statistics.tokens_reused} reused; {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
