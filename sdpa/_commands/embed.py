"""`python -m sdpa embed`: vectors of texts."""

import argparse
import io
import json
import sys

import numpy as np

TEXT = "vectors of texts by a model in a folder, or how similar the texts are"
EXAMPLES = """examples:
  python -m sdpa embed all-MiniLM-L6-v2 "a cat on a mat" "a kitten on a rug"     how similar each text is to each other
  python -m sdpa embed all-MiniLM-L6-v2 --npy vectors.npy < lines.txt            a text on each line
  python -m sdpa embed all-MiniLM-L6-v2 --json - "a cat on a mat"                to the terminal, or to a program
  python -m sdpa embed bert-base-uncased --ids "101 4937 102"                    without the package tokenizers"""
AT_ONCE = 64  # texts between two updates of the progress


def add_to(commands):
    parser = commands.add_parser(
        "embed", help=TEXT, description=TEXT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="a folder with config.json and *.safetensors, as Hugging Face writes it"
    )
    parser.add_argument(
        "texts", metavar="TEXT", nargs="*", help="texts to embed; default: the lines of the standard input"
    )
    parser.add_argument("--ids", action="store_true", help="each TEXT is a list of token ids, separated by spaces")
    into = parser.add_mutually_exclusive_group()
    into.add_argument("--npy", metavar="FILE", help="write the vectors, one in a row, to this file; -: standard output")
    into.add_argument("--json", metavar="FILE", help="write an array of texts and vectors; -: standard output")
    add_options(parser)
    parser.set_defaults(run=lambda arguments: embed(arguments, parser))


def add_options(parser):
    """The options of all commands with a model."""
    parser.add_argument("--dtype", help="float16, bfloat16, float32 or float64; default: the dtype of the weights")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="the most threads; default: the CPUs this process may use"
    )


def load(arguments, parser, kind):
    """Load the model.  A wrong folder or option ends the command with a message."""
    from .. import models

    try:
        model = models.load(arguments.folder, dtype=arguments.dtype, threads=arguments.threads)
    except (ValueError, TypeError, OSError, ImportError) as error:
        parser.error(str(error))
    if not isinstance(model, getattr(models, kind)):
        parser.error(f"{arguments.folder} has the model {model.config['model_type']!r}: it must be of the kind {kind}")
    return model


def ids_of(text, parser):
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        parser.error(f"{text!r}: with --ids it must be whole numbers")


def embed(arguments, parser):
    from ..models._progress import Progress

    texts = arguments.texts or [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not texts:
        parser.error("no TEXT is given, and none on the standard input")
    inputs = [ids_of(text, parser) for text in texts] if arguments.ids else texts
    model = load(arguments, parser, "Encoder")
    parts = [inputs[begin : begin + AT_ONCE] for begin in range(0, len(inputs), AT_ONCE)]
    try:
        with Progress("embedding") as progress:
            vectors = np.concatenate([model.embed(part) for part in progress(parts)])
    except (ValueError, TypeError, OSError, ImportError) as error:
        parser.error(str(error))
    if arguments.npy:
        buffer = io.BytesIO()
        np.save(buffer, vectors)
        _write(arguments.npy, buffer.getvalue())
    elif arguments.json:
        numbers = vectors.astype(float).round(7).tolist()
        pairs = [{"text": text, "vector": vector} for text, vector in zip(texts, numbers)]
        _write(arguments.json, json.dumps(pairs, ensure_ascii=False).encode() + b"\n")
    else:
        print(table(texts, vectors @ vectors.T))


def _write(file, data):
    if file == "-":
        sys.stdout.buffer.write(data)
    else:
        with open(file, "wb") as to:
            to.write(data)


def table(texts, similarity):
    """A line for each text: its number, its cosine with all texts, and the text."""
    digits = len(str(len(texts)))
    lines = [" " * digits + "".join(f"{number:7}" for number in range(1, len(texts) + 1))]
    for number, (text, row) in enumerate(zip(texts, similarity), 1):
        lines.append(f"{number:{digits}}" + "".join(f"{x:7.3f}" for x in row) + f"  {text}")
    return "\n".join(lines)
