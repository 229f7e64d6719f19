"""Random JSON schemas, and a writer that follows a constraint towards an end."""

import random

WORDS = ["a", "b", "name", "größe", "x y", 'q"uote', "日本", "id"]


def random_schema(randomness, depth=3):
    """A schema that some value fulfils."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth > 0:
        kinds += ["object", "array", "anyOf"] * 2
    kind = randomness.choice(kinds)
    if kind == "enum":
        return {"enum": randomness.sample([*WORDS, 1, 2.5, None, True], randomness.randint(1, 4))}
    if kind == "const":
        return {"const": randomness.choice([*WORDS, 7, False])}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": randomness.choice(["^[a-c]{2,4}$", "^x+$", "^\\d\\d$"]),
        }
    if kind == "string":
        low = randomness.randint(0, 2)
        bounds = {"minLength": low, "maxLength": low + randomness.randint(0, 4)}
        return {"type": "string", **(bounds if randomness.random() < 0.5 else {})}
    if kind == "integer":
        low = randomness.randint(-20, 20)
        bounds = {"minimum": low, "maximum": low + randomness.randint(0, 300)}
        return {"type": "integer", **(bounds if randomness.random() < 0.6 else {})}
    if kind == "array":
        low = randomness.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(randomness, depth - 1),
            "minItems": low,
            "maxItems": low + randomness.randint(0, 2),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(randomness, depth - 1) for _ in range(2)]}
    if kind == "object":
        names = randomness.sample(WORDS, randomness.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(randomness, depth - 1) for name in names},
            "required": [name for name in names if randomness.random() < 0.7],
            "additionalProperties": False,
        }
    return {"type": kind}


def write(constraint, byte_vocab, seed, max_tokens=400):
    """Advance ``constraint`` by random tokens, most of them such as bring the end nearer."""
    randomness = random.Random(seed)
    text = b""
    for _ in range(max_tokens):
        allowed = constraint.mask().nonzero().flatten().tolist()
        assert allowed, text
        closing = [i for i in allowed if byte_vocab[i].byte_string[-1:] in b'"}],:0123456789xabl']
        short = sorted(closing or allowed, key=lambda i: len(byte_vocab[i].byte_string))[:12]
        chosen = randomness.choice(allowed if randomness.random() < 0.1 else short)
        if constraint.can_end and randomness.random() < 0.8:
            return text
        constraint.advance(chosen)
        if constraint.is_ended:
            return text  # it was the token that ends
        text += byte_vocab[chosen].byte_string
    raise AssertionError(f"no end in sight: {text[:200]!r}")
