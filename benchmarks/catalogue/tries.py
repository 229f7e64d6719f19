"""Tries: sums and maxima under every prefix."""

from __future__ import annotations

from benchmarks import tries
from benchmarks.workload import Found, Numbers, Workload, median


class TrieSpeed(Workload):
    """Sums and maxima under every prefix of three vocabularies."""

    name = "trie_speed"
    table = "tries"
    variants = ("SmolLM2", "Tekken", "Tekken + DeepSeek")

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return tries.trie_speed(variant, repeats)

    def markdown(self, found: Found) -> str:
        return tries.markdown_of_speed(found)


class TrieAsync(Workload):
    """A hundred awaits of a trie at once, against one call with all of them."""

    name = "trie_async"
    table = "tries"
    variants = ("SmolLM2", "Tekken")

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return tries.trie_async(variant, repeats)

    def markdown(self, found: Found) -> str:
        return tries.markdown_of_async(found)


class TrieFirstCall(Workload):
    """From a fresh interpreter to the first sums and maxima of Tekken."""

    name = "trie_first_call"
    table = "tries"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return tries.trie_first_call(repeats)

    def markdown(self, found: Found) -> str:
        first = median(found[""]["seconds"])
        return (
            "From a fresh interpreter to the first sums and maxima of Tekken, importing and "
            f"building included and the compiled code on disk: {first:.2f} s."
        )


class TrieDevice(Workload):
    """The parallel trie on a device, beside copying as many bytes."""

    name = "trie_device"
    table = "tries"
    variants = TrieSpeed.variants
    needs = "device"

    def measure(self, variant: str, repeats: int, device: str | None) -> Numbers:
        return tries.trie_device(variant, repeats, device or "cpu")

    def markdown(self, found: Found) -> str:
        return tries.markdown_of_device(found)
