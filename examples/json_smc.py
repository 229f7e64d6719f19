"""Sequential Monte Carlo under a JSON schema: every particle keeps to it, the heavy ones survive.

The loop is `smc.py`'s. A weight is the probability that the model gave to what the schema allowed,
the end too, so that the posterior is the model's own, given a valid text.
"""

import argparse
import asyncio
import json

from smc import smc

from genlm_backend import Constraint, load_model_by_name

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


def main() -> None:
    parser = argparse.ArgumentParser(description="SMC under a JSON schema.")
    parser.add_argument("--particles", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=80, help="tokens of each particle, at most")
    options = parser.parse_args()
    with load_model_by_name("smollm2", llm_opts={"batch_size": options.particles}) as lm:
        prompt, constraint = lm.tokenizer.encode(PROMPT), Constraint.from_json_schema(lm, SCHEMA)
        given = {"particles": options.particles, "max_tokens": options.tokens, "seed": 0}
        particles, log_z, _ = asyncio.run(smc(lm, prompt, constraint=constraint, **given))
        for particle in sorted(particles, key=lambda p: -p.log_weight):
            is_whole = particle.is_done  # or of no weight: cut off, or dead
            ids = particle.ids[: -1 if is_whole else None]
            text = b"".join(lm.byte_vocab[i].byte_string for i in ids).decode(errors="replace")
            print(f"{particle.log_weight:8.2f}  {json.loads(text) if is_whole else text + ' …'}")
        print(f"log Z {log_z:.2f}")


if __name__ == "__main__":
    main()
