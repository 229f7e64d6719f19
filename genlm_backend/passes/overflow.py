"""Overflow: which outputs of a text are NaN by its own doing, and which by that of later tokens."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import TypeAlias

from genlm_backend.model.context import Context
from genlm_backend.passes.job import Job

Wanted: TypeAlias = list[tuple[Job, Sequence[int]]]
"""Jobs, and positions behind which each wants logits, in order."""


def still_spoilt(wanted: Iterable[tuple[Job, Sequence[int]]]) -> Wanted:
    """Return outputs that are NaN though they may be sound, of jobs that have just been run alone.

    Behind the last position of what was run there was no token that could have spoilt it.
    """
    found = [(job, [i for i in part[:-1] if job.is_spoilt((i,))]) for job, part in wanted]
    return [(job, positions) for job, positions in found if positions]


def search(job: Job, spoilt: Sequence[int], size: int) -> Generator[Wanted]:
    """Yield the outputs to be run next, until a text's scores are those of its own contexts.

    An output is right if it is a number, or if its context alone makes it NaN. A token whose keys
    and values overflow makes NaN of all that is run with it, before it or behind. To tell the two
    takes a *probe*: a token that is sound by itself, which is put behind a beginning of the text
    and shows whether that spoils what follows. The first such beginning is found by bisection, in
    O(n log n) tokens at most, or O(n) where it is short. If its NaN reaches the end of the text by
    way of nothing but probes, all outputs behind it are NaN by their own contexts. It need not: it
    may leave a window, or come behind the last attention. Then each output is run for itself,
    where another one does not answer it, which is right for any model and takes O(n²).
    """
    text = job.context
    probe = yield from _probe(text)
    if probe is None:
        return
    while spoilt:
        low, high = 0, len(spoilt)
        while low < high:
            middle = (low + high) // 2
            beginning = text[: spoilt[middle] + 1]
            if (yield from _is_nan(beginning.extend(probe))):
                high = middle
            else:
                low = middle + 1
        if low == len(spoilt):
            break
        beginning, num_behind = text[: spoilt[low] + 1], spoilt[-1] - spoilt[low]
        if not (yield from _is_nan(beginning + [probe] * num_behind)):
            break
        spoilt = yield from _run(job, [spoilt[:low]], size)
    while spoilt:  # one more is answered by each run
        middle = len(spoilt) // 2
        spoilt = yield from _run(job, [spoilt[:middle], spoilt[middle:]], size)


def _probe(text: Context) -> Generator[Wanted, None, int | None]:
    """Return a token of a text that is sound by itself, or behind a few tokens of it.

    Where there is none, the model has nothing but NaN for this text.
    """
    lengths = [1 << i for i in range(1, len(text).bit_length()) if 1 << i < len(text)]
    contexts = [text[:0].extend(token_id) for token_id in dict.fromkeys(text)]
    contexts += [text[:length] for length in lengths]
    jobs = [_job(context) for context in contexts]
    yield [(job, job.outputs) for job in jobs]
    return next((job.context[-1] for job in jobs if not job.is_spoilt(job.outputs)), None)


def _is_nan(context: Context) -> Generator[Wanted, None, bool]:
    """Return whether the row of a context is NaN."""
    job = _job(context)
    yield [(job, job.outputs)]
    return job.is_spoilt(job.outputs)


def _job(context: Context) -> Job:
    """Return a job for one number of a row, which is NaN where the row is."""
    return Job(context, targets=(context[-1],))


def _run(
    job: Job, stretches: Sequence[Sequence[int]], size: int
) -> Generator[Wanted, None, list[int]]:
    """Run a text up to the end of each stretch of outputs; return those that may be spoilt yet."""
    wanted = [
        (job, stretch[i : i + size]) for stretch in stretches for i in range(0, len(stretch), size)
    ]
    if wanted:
        yield wanted
    return [position for _, positions in still_spoilt(wanted) for position in positions]
