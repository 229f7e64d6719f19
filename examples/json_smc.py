"""Sequential Monte Carlo under a JSON schema: every particle keeps to it, the heavy ones survive.

A weight is the probability that the model gave to what the schema allowed, the end too, so that
the posterior is the model's own, given a valid text.
"""

import argparse
import json

import numpy as np

from genlm_backend import Constraint, load_model_by_name, smc_sync

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
        constraint, count = Constraint.from_json_schema(lm, SCHEMA), options.particles
        given = {"constraint": constraint, "max_tokens": options.tokens, "seed": 0}
        found = smc_sync(lm, PROMPT, count, **given, progress=True)
        for i in np.argsort(-found.log_weights):
            text, is_whole = found.texts[i], found.group.is_done[i]  # or cut off, or dead
            print(f"{found.log_weights[i]:8.2f}  {json.loads(text) if is_whole else text + ' …'}")
        print(f"log Z {found.log_z:.2f}")


if __name__ == "__main__":
    main()
