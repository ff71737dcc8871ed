"""What reads files, with bytes that atheris chooses by the branches they reach: `python -m tests.fuzz.guided`.

The first byte of an input says which file of a good folder (see files.py) the rest replaces.  For a failure, libFuzzer
writes the input to a file, and this module prints how to run that file again.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGES = ["sdpa._cache", "sdpa.models", "json"]
MEGABYTES, SECONDS, LONGEST = 2048, 20, 8192  # of an input: of memory, to read it, and its bytes


def corpus(name, folder):
    """The inputs to begin with: each file as it is."""
    from .files import good_files

    files = good_files(name)
    for number, (file, data) in enumerate(sorted(files.items())):
        (folder / f"{number}-{file.replace('/', '-')}").write_bytes(bytes([number]) + data)


def input_of(name, data):
    from .files import good_files

    files = sorted(good_files(name))
    return {files[data[0] % len(files)]: data[1:]} if data else {}


def fuzz(name, options):
    """In this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=PACKAGES):
        import json

        for module in ("decoder", "encoder", "scanner"):
            importlib.reload(getattr(json, module))
        importlib.reload(json)
        from . import files

    def one_input(data):
        try:
            files.check(name, input_of(name, data))
        except files.Refused:
            pass

    tracemalloc.start()  # once: see files.py
    atheris.Setup([sys.argv[0], *options], one_input)
    atheris.Fuzz()


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1, help="of all readers together")
    parser.add_argument("--only", metavar="NAME", help="one reader of tests/fuzz/files.py")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes; default: the CPUs this process may use")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument("--input", metavar="FILE", help="run this input, with --only")
    parser.add_argument("--fuzz", action="store_true", help=argparse.SUPPRESS)
    arguments, options = parser.parse_known_args()
    if arguments.fuzz:
        fuzz(arguments.only, options)
        return 0
    try:
        importlib.import_module("atheris")
    except ImportError:
        print("atheris is not installed (pip install atheris; it is there for CPython on Linux): nothing is run")
        return 0
    from sdpa._runtime.threads import usable_cpus  # not above: what is imported before atheris, it does not see

    from .files import READERS

    names = [arguments.only] if arguments.only else list(READERS)
    jobs = min(arguments.jobs or usable_cpus(), len(names))
    with ThreadPoolExecutor(jobs) as pool:
        well = list(pool.map(lambda name: guided(name, arguments, arguments.minutes * 60 * jobs / len(names)), names))
    failed = [name for name, ended_well in zip(names, well) if not ended_well]
    print(f"{len(names)} readers: {'failures of ' + ', '.join(failed) if failed else 'no failures'}")
    return 1 if failed else 0


def guided(name, arguments, seconds):
    """Whether a process of so many seconds ended well."""
    kept = Path(tempfile.mkdtemp(prefix="sdpa-guided-"))
    options = [f"-max_total_time={max(1, round(seconds))}", f"-timeout={SECONDS}", f"-rss_limit_mb={MEGABYTES}"]
    options += [f"-max_len={LONGEST}", f"-seed={arguments.seed}", f"-artifact_prefix={kept}/", "-print_final_stats=1"]
    if arguments.input:
        options = [arguments.input]
    else:
        (kept / "corpus").mkdir()
        corpus(name, kept / "corpus")
        options.append(str(kept / "corpus"))
    command = [sys.executable, "-m", "tests.fuzz.guided", "--fuzz", "--only", name, *options]
    done = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, errors="replace", env=os.environ | {"LC_ALL": "C"}
    )
    runs = [line.rpartition(" ")[2] for line in done.stderr.splitlines() if "number_of_executed_units" in line]
    covered = [line.split("cov: ")[1].split()[0] for line in done.stderr.splitlines() if "cov: " in line]
    print(f"{name:24} {(runs or ['1'])[-1]:>9} inputs, {(covered or ['?'])[-1]:>6} branches", flush=True)
    if done.returncode == 0:
        return True
    found = [path for path in kept.iterdir() if path.is_file()]
    print(f"==== {name} failed\n{done.stderr[-6000:]}")
    for path in found:
        print(f"---- again: python -m tests.fuzz.guided --only '{name}' --input {path}")
    return False


if __name__ == "__main__":
    sys.exit(main())
