"""Texts in the making, and the distinct tokens of their contexts, counted one by one."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

adapters = st.sampled_from([None, None, None, "a"])


@dataclass(eq=False)
class Draft:
    """A text that grows as it is told to, and forks into as many contexts as it is wide."""

    contexts: list = field(default_factory=list)
    lora_name: str | None = None
    width: int = 1

    def grow(self, token):
        if self.width == 1:
            self.contexts[0].append(token)
        else:  # the last beam is given up for another fork of the first
            old = self.contexts
            kept = [old[i % max(1, len(old) - 1)] for i in range(self.width)]
            self.contexts = [[*context, token + i // 2] for i, context in enumerate(kept)]


def all_prefixes(contexts):
    return {tuple(context[: n + 1]) for context in contexts for n in range(len(context))}


def need(drafts):
    """Distinct tokens of drafts: distinct prefixes, counted for each adapter."""
    return len({(d.lora_name, prefix) for d in drafts for prefix in all_prefixes(d.contexts)})
