"""Whole models from the folders that Hugging Face writes, on the kernels of this library::

    encoders : bert, roberta, xlm-roberta, distilbert
    decoders : llama, mistral, qwen2, qwen3, gpt2

`load` reads config.json and maps the weights, `*.safetensors`, into memory.  Text needs the package tokenizers; token
ids do not.
Begin with _families.py for what differs between models, and with _transformer.py for the layers.
"""

import sdpa

from .._runtime.threads import count
from ._decoder import Decoder
from ._encoder import Encoder
from ._families import family_and_settings
from ._files import Folder
from ._frequencies import frequencies_of, mrope_positions

__all__ = ["Decoder", "Encoder", "frequencies_of", "load", "mrope_positions"]


def load(folder, *, dtype=None, threads=None, pieces=None):
    """Load the model in a folder: an Encoder or a Decoder.

    The files are data, and nothing in them is run.  A file that is damaged is a ValueError that names it.  The weights
    are mapped into memory, so the files must not change while the model is used: if another program shortens one of
    them, the system ends this process where it reads past the end (SIGBUS).

    Parameters
    ----------
    folder : str or path
        The folder, with config.json and the weights.
    dtype
        The dtype of all computations: float16, bfloat16 (of ml_dtypes), float32 or float64.  Default: the dtype of the
        weights.
    threads
        Default: SDPA_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs this process may use.
    pieces
        The module with the projections, norms, attention and caches.  Default: `sdpa`.  With `sdpa.reference` the model
        computes in plain NumPy and float64, slowly.

    Examples
    --------
    >>> model = sdpa.models.load("all-MiniLM-L6-v2")                            # doctest: +SKIP
    >>> vectors = model.embed(["a cat on a mat", "a kitten on a rug"])          # doctest: +SKIP
    """
    count(threads)  # checks them
    dtype = "float64" if pieces is sdpa.reference else dtype
    folder = Folder(folder)
    family, settings = family_and_settings(folder)
    kind = Decoder if family.decoder else Encoder
    return kind(folder, family, settings, dtype, threads, sdpa if pieces is None else pieces)
