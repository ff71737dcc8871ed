"""`python -m sdpa generate`: text that follows a prompt."""

import argparse
import sys
import time

from .embed import add_options, ids_of, load

TEXT = "text that follows a prompt, from a model in a folder, and how many tokens a second"
EXAMPLES = """examples:
  python -m sdpa generate SmolLM2-135M "Once upon a time"                         the likeliest text
  python -m sdpa generate SmolLM2-135M "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1
  python -m sdpa generate SmolLM2-135M "Once upon a time" --dtype bfloat16 --cache int8 --tokens 500
  python -m sdpa generate gpt2 --ids "464 2068 7586"                              without the package tokenizers"""


def add_to(commands):
    parser = commands.add_parser(
        "generate", help=TEXT, description=TEXT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="with config.json and *.safetensors, as Hugging Face writes it"
    )
    parser.add_argument("prompt", metavar="PROMPT", help="-: the standard input")
    parser.add_argument("--ids", action="store_true", help="PROMPT is token ids, with spaces between them")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="at most so many; default 100")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default 0: the likeliest token")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="from as many as have a probability of P together")
    parser.add_argument("--seed", type=int, metavar="N", help="for the same text again")
    parser.add_argument("--cache", metavar="DTYPE", help="of keys and values: int8, or as --dtype")
    add_options(parser)
    parser.set_defaults(run=lambda arguments: generate(arguments, parser))


def generate(arguments, parser):
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    prompt = ids_of(prompt, parser) if arguments.ids else prompt
    model = load(arguments, parser, "Decoder")
    start = time.perf_counter()
    first, count = start, 0
    try:
        prompt = prompt if arguments.ids else model.tokenizer.encode(prompt).ids
        caches = model.new_caches(1, **({"dtype": arguments.cache} if arguments.cache else {}))
        tokens = model.generate(
            prompt, arguments.tokens, temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p,
            seed=arguments.seed, caches=caches,
        )  # fmt: skip
    except (ValueError, TypeError, OSError, ImportError) as error:
        parser.error(str(error))

    def counted():
        nonlocal first, count
        for token in tokens:
            count += 1
            if count == 1:
                first = time.perf_counter()
            yield token

    pieces = (f"{token} " for token in counted()) if arguments.ids else model.pieces_of_text(counted())
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print(flush=True)
    end = time.perf_counter()
    rate = f", {(count - 1) / (end - first):.1f} a second" if count > 1 else ""
    print(f"{len(prompt)} tokens read in {first - start:.2f} s; {count} generated{rate}", file=sys.stderr)
