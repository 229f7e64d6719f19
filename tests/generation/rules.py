"""Who runs, in plain words: what a roster is compared with."""

from dataclasses import dataclass

from genlm_backend.generation.engine.roster import HEADROOM
from tests.generation.drafts import Draft, need


@dataclass(eq=False)
class Wanted:
    """A text as the rules see it."""

    request: int
    draft: Draft
    has_begun: bool = False
    is_running: bool = False
    is_complete: bool = False


class Rules:
    """The rules in plain words: a list of texts in the order of arrival, and every prefix counted.

    The oldest texts run as long as they fit into the batch and into memory; one that does not run
    yet needs some room to grow, unless it is alone. Nobody overtakes. A text that does not fit
    alone ends its request when it is its turn.
    """

    def __init__(self, max_batch, max_waiting, capacity):
        self.max_batch, self.max_waiting, self.capacity = max_batch, max_waiting, capacity
        self.texts = []
        self.begun = set()
        self.hopeless = []

    def waiting(self):
        return {text.request // 10 for text in self.texts} - self.begun

    def wanted(self):
        return [text for text in self.texts if not text.is_complete]

    def choose(self, texts):
        """Return who may run, and the first whose time has come and that never can."""
        chosen = []
        for text in texts:
            together = [*chosen, text]
            if sum(t.draft.width for t in together) > self.max_batch:
                break
            if need([text.draft]) > self.capacity:
                return chosen, text
            room = HEADROOM * text.draft.width if chosen and not text.is_running else 0
            if need([t.draft for t in together]) + room > self.capacity:
                break
            chosen.append(text)
        return chosen, None

    def submit(self, texts):
        """Return whether there is room for a submission."""
        if self.max_waiting is not None and len(self.waiting()) >= self.max_waiting:
            candidates = [*self.wanted(), texts[0]]
            while (found := self.choose(candidates))[1] not in (None, texts[0]):
                candidates.remove(found[1])
            if found[1] is not None or texts[0] not in found[0]:
                return False
        self.texts += texts
        return True

    def take_off(self, request):
        self.texts = [text for text in self.texts if text.request != request]

    def settle(self):
        """Let whoever may run, and remember the requests that never could."""
        while (found := self.choose(self.wanted()))[1] is not None:
            self.hopeless.append(found[1].request)
            self.take_off(found[1].request)
        for text in self.texts:
            text.is_running = text in found[0]
            text.has_begun |= text.is_running
        self.begun |= {text.request // 10 for text in self.texts if text.has_begun}
