"""`python -m sdpa generate`: text that follows a prompt."""

import argparse
import os
import sys
import time
import traceback

from .._runtime import threads
from .embed import add_options, ids_of, load

TEXT = "text that follows a prompt, by a model in a folder, and how many tokens a second"
EXAMPLES = """examples:
  python -m sdpa generate SmolLM2-135M "Once upon a time"                         the likeliest text
  python -m sdpa generate SmolLM2-135M "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1
  python -m sdpa generate SmolLM2-135M "Once upon a time" --dtype bfloat16 --cache int8 --tokens 500
  python -m sdpa generate gpt2 --ids "464 2068 7586"                              without the package tokenizers
  mpiexec -n 2 python -m sdpa generate SmolLM2-135M "Once upon a time"            the cache spread over two processes"""
LAUNCHERS = {"PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE"}  # which mpiexec and srun set: MPICH and its kin, Open MPI


def add_to(commands):
    parser = commands.add_parser(
        "generate", help=TEXT, description=TEXT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="a folder with config.json and *.safetensors, as Hugging Face writes it"
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; -: the standard input")
    parser.add_argument("--ids", action="store_true", help="PROMPT is a list of token ids, separated by spaces")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="the most tokens to generate; default 100")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="what logits are divided by; default 0: the likeliest token",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest tokens that together have a probability of P"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of the random numbers; the same seed gives the same text"
    )
    parser.add_argument(
        "--cache", metavar="DTYPE", help="dtype of the cache of keys and values: int8, or one that --dtype takes"
    )
    add_options(parser)
    parser.set_defaults(run=lambda arguments: generate(arguments, parser))


def generate(arguments, parser):
    comm = world()
    model, prompt = together(comm, parser, lambda parser: read(arguments, parser, comm))
    start = first = time.perf_counter()
    prompt, tokens = together(comm, parser, lambda parser: begin(arguments, parser, comm, model, prompt))
    count = 0

    def counted():
        nonlocal first, count
        for token in tokens:
            count += 1
            if count == 1:
                first = time.perf_counter()
            yield token

    pieces = (f"{token} " for token in counted()) if arguments.ids else model.pieces_of_text(counted())
    speaks = comm is None or comm.rank == 0
    try:
        for piece in pieces:
            if speaks:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    except Exception:
        if comm is None:
            raise
        traceback.print_exc()
        comm.Abort(1)  # the others would wait for this rank
    if not speaks:
        return
    print(flush=True)
    end = time.perf_counter()
    rate = f", {(count - 1) / (end - first):.1f} a second" if count > 1 else ""
    where = "" if comm is None else f", the cache on {comm.size} ranks"
    print(f"{len(prompt)} tokens read in {first - start:.2f} s; {count} generated{rate}{where}", file=sys.stderr)


def read(arguments, parser, comm):
    """The model, and the prompt as text or ids."""
    prompt = arguments.prompt
    if prompt == "-":  # mpiexec gives the standard input to rank 0
        prompt = sys.stdin.read() if comm is None or comm.rank == 0 else None
        prompt = prompt if comm is None else comm.bcast(prompt)
    if comm is not None and arguments.threads is None:
        from ..distributed._agreement import join

        arguments.threads = threads.count(None, join(comm).sharing)
    prompt = ids_of(prompt, parser) if arguments.ids else prompt
    return load(arguments, parser, "Decoder"), prompt


def begin(arguments, parser, comm, model, prompt):
    """The tokens of the prompt, and an iterator over those that follow."""
    options = {} if comm is None else {"comm": comm}
    if arguments.cache:
        options["dtype"] = arguments.cache
    try:
        prompt = prompt if arguments.ids else model.tokenizer.encode(prompt).ids
        return prompt, model.generate(
            prompt, arguments.tokens, temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p,
            seed=arguments.seed, caches=model.new_caches(1, **options),
        )  # fmt: skip
    except (ValueError, TypeError, OSError, ImportError) as error:
        parser.error(str(error))


class Wrong(Exception):
    pass


class Silent:
    """In place of a parser."""

    def error(self, text):
        raise Wrong(text)


def together(comm, parser, work):
    """`work(parser)` on all ranks.  If that is an error on any of them, it is said once, and all end."""
    if comm is None:
        return work(parser)
    result, wrong = None, None
    try:
        result = work(Silent())
    except Wrong as error:
        wrong = str(error)
    for rank, text in enumerate(comm.allgather(wrong)):
        if text is not None:
            if comm.rank == 0:
                parser.error(text if rank == 0 else f"{text} (on rank {rank})")
            raise SystemExit(2)
    return result


def world():
    """The communicator of all ranks, if mpiexec or srun has started several; else None."""
    if not LAUNCHERS & os.environ.keys():
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # none, or one that finds no MPI
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None
