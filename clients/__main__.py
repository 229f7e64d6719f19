"""Run the clients' own test suites on the library that this interpreter has installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from hub import make_hub
from pronunciations import make_nltk_data
from suites import SUITES, Suite

HERE = Path(__file__).parent
PARALLEL = ("-n", "2", "--dist", "loadfile")


def fetch(suite: Suite, folder: Path) -> Path:
    """Unpack the suite's folders, and nothing else of its distribution; return where they are."""
    target = folder / f"{suite.distribution}-{suite.version}"
    if target.exists():
        return target
    name = f"{suite.distribution}=={suite.version}"
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*download, "--no-binary", ":all:", "--dest", folder, name], check=True)
    (archive,) = folder.glob(f"{suite.distribution.replace('-', '_')}-{suite.version}.tar.gz")
    partial = target.with_name("partial")
    with tarfile.open(archive) as tar:
        tar.extractall(partial, filter="data")
    (unpacked,) = partial.iterdir()
    # The code must be what is installed: the peer's own lies beside its tests.
    for path in unpacked.iterdir():
        if path.name not in suite.folders:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # No configuration of the checkout around it.
    (unpacked / "pytest.ini").write_text(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\n"
    )
    unpacked.rename(target)
    partial.rmdir()
    return target


def run(suite: Suite, root: Path, arguments: list[str]) -> int:
    """Run one suite; return pytest's exit code."""
    folder = fetch(suite, root)
    environment = {
        **os.environ,
        "CLIENT_SUITE": suite.distribution,
        "CLIENT_PART": "yes" if arguments else "",
        "PYTHONPATH": str(HERE),
        "HF_HUB_CACHE": str(root / "hub"),
        "NLTK_DATA": str(root / "nltk_data"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "expected_failures", suite.folders[0]]
    command += [*PARALLEL, "-p", "no:cacheprovider", "--timeout=600", "--durations=5", *arguments]
    if not os.environ.get("ALL"):
        command += [f"--ignore={path}" for path in suite.left_out]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def run_programs(root: Path) -> int:
    """Run programs of our own on the clients, given their archives; return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", *PARALLEL, "-p", "no:cacheprovider"]
    command += ["-c", str(HERE / "pytest.ini"), *map(str, sorted(HERE.glob("test_*.py")))]
    if not os.environ.get("ALL"):
        command += ["-m", "not slow"]
    environment = {
        **os.environ,
        "CLIENTS": str(root),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    # Not where the checkout is, which Python would import from.
    return subprocess.run(command, cwd=HERE, env=environment, check=False).returncode


def main() -> int:
    """Run the suites named, or all, in the folder given first; what follows ``--`` is pytest's."""
    folder, *rest = sys.argv[1:]
    names, _, arguments = " ".join(rest).partition("--")
    root = Path(folder).resolve()
    root.mkdir(exist_ok=True)
    make_hub(root / "hub")
    make_nltk_data(root / "nltk_data")
    wanted = [s for s in SUITES if not names.strip() or s.distribution in names.split()]
    failed = []
    if not names.strip():
        for suite in wanted:
            fetch(suite, root)
        print("== programs on the clients", flush=True)
        failed += ["programs"] if run_programs(root) else []
    for suite in wanted:
        print(f"== {suite.distribution} {suite.version}", flush=True)
        if run(suite, root, arguments.split()):
            failed.append(suite.distribution)
    if failed:
        print(f"== failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
