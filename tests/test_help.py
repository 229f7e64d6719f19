"""What ``help`` shows of functions whose options are in a ``TypedDict``."""

import pydoc

import pytest

import genlm_backend
from genlm_backend.generation.config import GenerationFields
from genlm_backend.readouts.sample_readout import DrawOptions
from genlm_backend.scoring.surprisals import SurprisalOptions

FIELDS, OPTIONS = GenerationFields.__annotations__, SurprisalOptions.__annotations__
OF_SEARCHES = ("words", "max_rest", "max_contexts", "lora_name")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("generate", FIELDS), ("generate_sync", FIELDS), ("stream", FIELDS)),
        *(("surprisal", OPTIONS), ("surprisal_sync", OPTIONS)),
        *(("continuations", OF_SEARCHES), ("continuations_sync", OF_SEARCHES)),
        *(("prefix_logprob", OF_SEARCHES), ("prefix_logprob_sync", OF_SEARCHES)),
    ],
)
def test_help_names_each_option(name, options):
    shown = pydoc.plain(pydoc.render_doc(getattr(genlm_backend, name)))
    for option in options:
        assert f" {option}: " in shown


@pytest.mark.parametrize("name", ["draw_next_token", "draw_next_tokens", "batch_draw_next_token"])
@pytest.mark.parametrize("suffix", ["", "_sync"])
def test_help_names_each_option_of_draws(name, suffix):
    shown = pydoc.plain(pydoc.render_doc(getattr(genlm_backend.AsyncLM, name + suffix)))
    for option in ("allowed", "lora_name", *DrawOptions.__annotations__):
        assert f" {option}: " in shown
