"""Where contexts go among many replicas, simulated: no model, and costs as passes were measured."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from benchmarks.workload import Numbers, Row
from genlm_backend.remote.replicas.router import Choice, Router, RoutingTree

NUM_REPLICAS, NUM_PARTICLES, NUM_STEPS = 64, 10_000, 32
NUM_PROMPT, BATCH_SIZE = 512, 64
PER_FORWARD = 8.0
"""What a pass costs beside its tokens, in tokens, as ``CostModel`` has it of the CPU."""
STEPS_BETWEEN = 4
"""Steps between two resamplings, each of which replaces half of the particles."""


@dataclass
class Outcome:
    """What a way to send contexts has led to.

    Attributes:
        num_tokens: Number of tokens that were computed, on all replicas.
        least_tokens: Number that one replica would have computed.
        idle_share: Part of all replicas' time that they spent waiting for the slowest.
    """

    num_tokens: int
    least_tokens: int
    idle_share: float


class Others:
    """Ways that do not weigh what is there against what waits.

    Args:
        way: "random", "round robin", or "affinity": wherever most of the context is, and of equal
            ones where least waits.
    """

    def __init__(self, way: str, num_replicas: int) -> None:
        self._way, self._sent = way, RoutingTree([None] * num_replicas)
        self._router = Router([None] * num_replicas)
        self._random, self._count = random.Random(0), 0

    def choose(self, space: None, packed: bytes) -> Choice:
        known = [match.num_known for match in self._sent.matches(space, packed)]
        loads = self._router.loads
        self._count += 1
        if self._way == "random":
            replica = self._random.randrange(len(known))
        elif self._way == "round robin":
            replica = self._count % len(known)
        else:
            replica = min(range(len(known)), key=lambda r: (-known[r], loads[r].num_tokens))
        num_new = max(1, len(packed) // 4 - known[replica])
        choice = Choice(replica, num_new, loads[replica], space, packed)
        choice.load.num_contexts += 1
        choice.load.num_tokens += choice.num_new
        self._sent.add(space, packed, replica)
        return choice

    def ended(self, choice: Choice) -> None:
        self._router.ended(choice)


def maker(way: str, num_replicas: int) -> Router | Others:
    if way != "the router":
        return Others(way, num_replicas)
    return Router([None] * num_replicas, BATCH_SIZE, PER_FORWARD)


def simulate(
    way: str,
    num_replicas: int = NUM_REPLICAS,
    num_particles: int = NUM_PARTICLES,
    num_steps: int = NUM_STEPS,
    num_prompt: int = NUM_PROMPT,
    make: Callable[[str, int], Router | Others] = maker,
) -> Outcome:
    """Walk particles in step behind one prompt, with resampling, and count.

    A step ends when the slowest replica has answered; each takes ``PER_FORWARD`` for every batch
    and one for every token that it has not computed before.
    """
    router, one = make(way, num_replicas), RoutingTree([None])
    generator = random.Random(1)
    contexts = [array("i", range(num_prompt)) for _ in range(num_particles)]
    num_tokens, busy, total = 0, 0.0, 0.0
    router.ended(router.choose(None, contexts[0].tobytes()))
    num_tokens += num_prompt
    one.add(None, contexts[0].tobytes(), 0)
    for step in range(num_steps):
        for context in contexts:
            context.append(generator.randrange(1000, 40_000))
        choices = []
        for context in contexts:
            packed = context.tobytes()
            choices.append(router.choose(None, packed))
            one.add(None, packed, 0)
        times = [0.0] * num_replicas
        counts = [0] * num_replicas
        for choice in choices:
            times[choice.replica] += choice.num_new
            counts[choice.replica] += 1
            num_tokens += choice.num_new
            router.ended(choice)
        times = [
            time + PER_FORWARD * ceil(count / BATCH_SIZE)
            for time, count in zip(times, counts, strict=True)
        ]
        busy += sum(times)
        total += num_replicas * max(times)
        if step % STEPS_BETWEEN == STEPS_BETWEEN - 1:
            kept = generator.sample(contexts, num_particles // 2)
            contexts = [array("i", context) for context in kept + kept]
    return Outcome(num_tokens, one.num_tokens[0], 1 - busy / total)


WAYS = ("the router", "affinity", "round robin", "random")


def measure() -> Numbers:
    """Simulate all ways."""
    numbers: Numbers = {}
    for way in WAYS:
        outcome = simulate(way)
        numbers[f"{way}, tokens"] = [outcome.num_tokens / outcome.least_tokens]
        numbers[f"{way}, idle"] = [outcome.idle_share]
    return numbers


def rows(numbers: Numbers) -> list[Row]:
    """Return tokens over the least possible and the idle share of each way."""
    table: list[Row] = []
    for way in WAYS:
        tokens, idle = numbers[f"{way}, tokens"][0], numbers[f"{way}, idle"][0]
        aims = ("1.15", "10%") if way == WAYS[0] else ("", "")
        what = f"{NUM_REPLICAS} replicas, {NUM_PARTICLES:,} particles, by {way}"
        table.append((f"{what}: tokens computed over the least possible", f"{tokens:.2f}", aims[0]))
        table.append((f"{what}: share of time idle", f"{idle:.0%}", aims[1]))
    return table
