"""The workloads, in the order of the tables: what each measures, and what is shown of it."""

from __future__ import annotations

from benchmarks.catalogue import (
    beginnings,
    elsewhere,
    generation,
    harness,
    memory,
    mlx,
    models,
    particles,
    tries,
    virtual,
)
from benchmarks.workload import Workload

_WORKLOADS: tuple[Workload, ...] = (
    particles.Sis(),
    particles.LongPrompt(),
    particles.Behind(),
    particles.Smc(),
    particles.Clients(),
    models.SharedContext(),
    models.ScoreQuery(),
    harness.Harness(),
    models.StepOverhead(),
    models.Host(),
    models.ManyParticles(),
    models.Readings(),
    models.AwaitedQueries(),
    models.Trace(),
    models.Dressing(),
    models.RunningStates(),
    models.PrefillMix(),
    models.LoopStall(),
    models.PythonMeanwhile(),
    models.Awaits(),
    beginnings.ImportTime(),
    beginnings.Decoding(),
    generation.Sampling(),
    generation.Masks(),
    generation.AsyncGlm(),
    generation.EngineRequests(),
    models.Growth(),
    memory.Formats(),
    memory.Files(),
    memory.Weights(),
    tries.TrieSpeed(),
    tries.TrieAsync(),
    tries.TrieFirstCall(),
    tries.TrieDevice(),
    virtual.Virtual(),
    mlx.Mlx(),
    elsewhere.Process(),
    elsewhere.Replicas(),
    elsewhere.Ray(),
    elsewhere.Routing(),
    elsewhere.Readouts(),
)

WORKLOADS = {workload.name: workload for workload in _WORKLOADS}
"""Every workload by its name, in the order of the tables."""
