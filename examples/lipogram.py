"""Character-level constrained sampling: a text that does without some letters.

A particle asks the model for its next token and the trie for the probability of every prefix of
it, both awaited together with all other particles. Then it walks down the trie, byte by byte,
among the bytes that are allowed. The share of the probability that these had goes into its
weight. When a few particles have most of the weight, copies of them replace the others.
"""

import argparse
import asyncio
import copy

import numpy as np

from genlm_backend import AsyncTokenCharacterTrie, lm_trie_weights, load_model_by_name
from genlm_backend.resampling import effective_sample_size, log_mean, systematic


class Particle:
    def __init__(self, prompt: list[int]):
        self.prompt, self.tokens, self.text = prompt, [], b""
        self.log_weight, self.is_done = 0.0, False

    async def step(self, lm, trie, allowed: set[int], length: int, random) -> None:
        weights = await lm_trie_weights(lm, trie, self.prompt + self.tokens)
        children, node = trie.trie.children, trie.trie.root
        while children[node]:
            letters = [x for x in children[node] if isinstance(x, tuple) or x in allowed]
            masses = np.array([weights[children[node][x]] for x in letters], float)
            if not masses.sum() > 0:
                self.log_weight, self.is_done = -np.inf, True
                return
            whole = weights[node] if node != trie.trie.root else 1.0  # special tokens too
            self.log_weight += np.log(masses.sum() / whole)
            letter = letters[random.choice(len(letters), p=masses / masses.sum())]
            if letter == ord(" ") and len(self.text) >= length:
                self.is_done = True  # at the end of a word
                return
            node = children[node][letter]
            if isinstance(letter, tuple):  # (None, position): the token ends here
                self.tokens.append(trie.trie.decode[letter[1]].token_id)
            else:
                self.text += bytes([letter])


async def main() -> None:
    parser = argparse.ArgumentParser(description="Sample texts that do without some letters.")
    parser.add_argument("--model", default="smollm2", help="a name, or a local directory")
    parser.add_argument("--prompt", default="The sea is")
    parser.add_argument("--without", default="e", help="letters to do without")
    parser.add_argument("--length", type=int, default=50, help="bytes, then to the word's end")
    parser.add_argument("--particles", type=int, default=30)
    options = parser.parse_args()
    allowed = set(range(32, 127)) - set((options.without + options.without.upper()).encode())
    lm = load_model_by_name(options.model, llm_opts={"batch_size": options.particles})
    tokens = [token for token in lm.byte_vocab if token.token_id not in lm.special_ids]
    trie, random = AsyncTokenCharacterTrie.from_vocab(tokens), np.random.default_rng(0)
    particles = [Particle(lm.tokenizer.encode(options.prompt)) for _ in range(options.particles)]
    async with lm, trie:
        while active := [particle for particle in particles if not particle.is_done]:
            steps = (p.step(lm, trie, allowed, options.length, random) for p in active)
            await asyncio.gather(*steps)
            log_weights = np.array([particle.log_weight for particle in particles])
            if 0 < effective_sample_size(log_weights) < len(particles) / 2:
                chosen = systematic(log_weights, len(particles), random)
                particles = [copy.deepcopy(particles[i]) for i in chosen]
                for particle in particles:
                    particle.log_weight = log_mean(log_weights)
        for text in sorted({particle.text.decode() for particle in particles}):
            print(f"{options.prompt}{text}")
        sums, awaits = trie.statistics().sum, lm.statistics().num_awaits
        print(f"{awaits} awaits of the model in {lm.statistics().num_forwards} forward passes")
        print(f"{sums.num_submitted} awaits of the trie in {sums.num_batches} batches")


if __name__ == "__main__":
    asyncio.run(main())
