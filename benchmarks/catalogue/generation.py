"""Generation: draws, masks, tasks and requests."""

from __future__ import annotations

from benchmarks import generation
from benchmarks.workload import SHARE, Found, Numbers, Row, Workload, median


class Sampling(Workload):
    """The draws of a step of 20 samples, against the step itself and ``torch.multinomial``."""

    name = "sampling"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return generation.sampling(repeats)

    def rows(self, found: Found) -> list[Row]:
        numbers = found[""]
        step, draws = (median(numbers[key]) for key in ("step_ms", "draws_ms"))
        what = f"20 draws, of the step they belong to ({step:.0f} ms)"
        table: list[Row] = [(what, f"{100 * draws / step:.1f}%", "15%")]
        if "multinomial_ms" in numbers:
            tempered, theirs = (median(numbers[key]) for key in ("tempered_ms", "multinomial_ms"))
            table += [
                (f"… from rows of {numbers['vocabulary']:,}", f"{draws:.1f} ms", ""),
                ("… at another temperature than 1", f"{tempered:.1f} ms", ""),
                (f"… over `torch.multinomial` ({theirs:.0f} ms)", f"{theirs / draws:.0f}×", "10×"),
            ]
        return table


class Masks(Workload):
    """A mask under a JSON schema for each of 20 particles, against the step itself."""

    name = "masks"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return generation.masks(repeats)

    def rows(self, found: Found) -> list[Row]:
        step, masks = (median(found[""][key]) for key in ("step_ms", "masks_ms"))
        table: list[Row] = [
            ("a mask under a JSON schema, each of 20", f"{masks / 20:.2f} ms", ""),
            (f"… all 20, of the step they belong to ({step:.0f} ms)", f"{masks / step:.1%}", ""),
        ]
        if "hidden" in found[""]:
            hidden = median(found[""]["hidden"])
            table.append(("… of which within the forward pass", f"{hidden:.0%}", ""))
        return table


class AsyncGlm(Workload):
    """16 tasks through AsyncGLM, against ``model.generate`` task by task."""

    name = "async_glm"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return generation.async_glm(repeats)

    def rows(self, found: Found) -> list[Row]:
        numbers = found[""]
        ratio = median(numbers["theirs_s"]) / median(numbers["ours_s"])
        what = f"AsyncGLM, {numbers['num_tasks']} tasks, over `generate` task by task"
        table: list[Row] = [(what, f"{ratio:.1f}×", "3×")]
        if "limit_s" in numbers:
            share = median(numbers["limit_s"]) / median(numbers["ours_s"])
            table.append((SHARE, f"{share:.0%}", ""))
        return table


class EngineRequests(Workload):
    """Requests of different lengths through an Engine, against padded batches of generate."""

    name = "engine"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return generation.engine(repeats)

    def rows(self, found: Found) -> list[Row]:
        numbers = found[""]
        ours, theirs = median(numbers["ours_s"]), median(numbers["theirs_s"])
        what = f"Engine, {numbers['num_requests']} requests of 4 and 32 tokens, 20 at once"
        waits = f"{median(numbers['first_token_s']):.2f} s"
        table: list[Row] = [
            (what, f"{numbers['num_tokens'] / ours:.0f} tokens/s", ""),
            ("… over `generate` in padded batches of 20", f"{theirs / ours:.1f}×", ""),
            ("… median time to the first token", waits, ""),
        ]
        if "limit_s" in numbers:
            table.append((SHARE, f"{median(numbers['limit_s']) / ours:.0%}", ""))
        return table
