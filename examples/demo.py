"""The demo: sequential Monte Carlo continues a prompt in short words only.

The same draws without weights come first, for contrast. Bars show the effective sample size, step
by step; the loop is `smc.py`'s.
"""

import argparse
import asyncio
from collections import Counter

import numpy as np
from smc import smc

from genlm_backend import load_model_by_name


def main() -> None:
    parser = argparse.ArgumentParser(description="SMC over a language model, in short words only.")
    parser.add_argument("--model", default="smollm2", help="a name, or a local directory")
    parser.add_argument("--prompt", default="The sea is")
    parser.add_argument("--particles", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=20, help="of each particle, at most")
    parser.add_argument("--bytes", type=int, default=4, help="of a token, at most")
    parser.add_argument("--repeats", type=int, default=3, help="runs, for the error of log Z")
    options = parser.parse_args()
    print(f"Loading {options.model} …", flush=True)
    with load_model_by_name(options.model, llm_opts={"batch_size": options.particles}) as lm:
        prompt, count = lm.tokenizer.encode(options.prompt), options.particles
        short = [len(t.strip()) <= options.bytes and t.isascii() for t in lm.byte_vocab]
        allowed = np.array(short)
        allowed[list(lm.special_ids)], allowed[list(lm.eos_token_ids)] = False, True
        print(f"Sampling {count} texts, {1 + options.repeats} times …", flush=True)
        given = {"particles": count, "max_tokens": options.tokens, "allowed": allowed}
        unweighted, _, ess = asyncio.run(smc(lm, prompt, **given, seed=0, ess_threshold=0))
        runs = [
            asyncio.run(smc(lm, prompt, **given, seed=seed, progress=True))
            for seed in range(options.repeats)
        ]
        counts = lm.statistics()

    def text(particle):
        return repr(options.prompt + b"".join(lm.byte_vocab[i] for i in particle.ids).decode())

    print(f"Question: how does the model continue {options.prompt!r}, given that each of its next")
    print(f"{options.tokens} tokens has at most {options.bytes} ASCII characters, blanks aside?")
    print(f"\nWithout weights: {count} texts of allowed tokens, never weighted or resampled,")
    print(f"are worth {ess[-1]:.1f} draws from the answer. Some of them:")
    for particle in unweighted[:5]:
        print(f"  {1 / count:.3f}  {text(particle)}")
    particles, _, ess = runs[0]
    bars = "".join("▁▂▃▄▅▆▇█"[int(7.99 * size / count)] for size in ess)
    print(f"\nSequential Monte Carlo: {count} texts, weighted and resampled")
    print(f"Effective sample size  {bars}  of {count}\nPosterior, heaviest first")
    weights, total = Counter(), np.logaddexp.reduce([p.log_weight for p in particles])
    for particle in particles:
        weights[text(particle)] += np.exp(particle.log_weight - total)
    for line, weight in weights.most_common(10):
        print(f"  {weight:.3f}  {line}")
    log_z, error = log_mean([log_z for _, log_z, _ in runs])
    spread = f" ± {error:.3f}" if options.repeats > 1 else ""
    print(f"log Z {log_z:.3f}{spread}: one in {np.exp(-log_z):.0f} of the model's texts is such")
    print(f"{counts.num_awaits} awaits in {counts.num_forwards} forward passes ", end="")
    print(f"(mean batch {counts.mean_batch_size:.1f}); {counts.tokens_computed} tokens ", end="")
    print(f"computed, {counts.tokens_reused} reused")


def log_mean(log_zs):
    """Return the logarithm of the mean of several Z, and its standard error."""
    total = np.logaddexp.reduce(log_zs) - np.log(len(log_zs))
    shares = np.exp(np.array(log_zs) - total)
    return total, shares.std(ddof=min(1, len(shares) - 1)) / np.sqrt(len(shares))


if __name__ == "__main__":
    main()
