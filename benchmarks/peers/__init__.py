"""One adapter per implementation of attention that the benchmarks compare: a file per library, and PEERS, their table.

An adapter takes a workload and returns `(call, result)`: `call()` is what is timed, `result(call())` the
outcome as a NumPy array (B, H, M, D).  It brings the arrays into the layout its implementation likes best
beforehand, but not into a wider dtype; what is compiled, is compiled then, or in the first call, which is not timed.
Where the implementation cannot do the workload, or not without losing precision, the adapter raises `Unsupported`, or
lets what it raises itself pass.  Libraries are imported in the adapters, so that one that is not installed is in
nobody's way.

Each kind of workloads has adapters of its own.  Of "backward" `result(call())` is a tuple, the outcome and the
gradients of query, key and value; of "layer" the axes are (B, M, W).  Of a Formula it is what `comparable` makes of its
outputs; one adapter serves all kinds of formulas, if the library has their Pieces.
"""

import argparse
import fnmatch
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.measure.adapting import require
from benchmarks.measure.reading import READ, copy_peer, read_peer
from benchmarks.peers.jax import jax_backward_peer, jax_layer_peer, jax_peer
from benchmarks.peers.mlx import mlx_backward_peer, mlx_peer
from benchmarks.peers.ncnn import ncnn_peer
from benchmarks.peers.numpy import numpy_formula_peer, numpy_layer_peer, numpy_peer
from benchmarks.peers.onnxruntime import (
    ort_attention_layer_peer,
    ort_attn_peer,
    ort_gqa_peer,
    ort_mha_layer_peer,
    ort_mha_peer,
)
from benchmarks.peers.onnxruntime_graphs import ort_graph_peer
from benchmarks.peers.openvino import openvino_layer_peer, openvino_peer, ov_fold_peer
from benchmarks.peers.openvino_graphs import openvino_graph_peer
from benchmarks.peers.paddle import paddle_backward_peer, paddle_peer
from benchmarks.peers.sdpa import (
    sdpa_backward_peer,
    sdpa_decoder_peer,
    sdpa_encoder_peer,
    sdpa_feed_forward_peer,
    sdpa_layer_peer,
    sdpa_linear_peer,
    sdpa_norm_peer,
    sdpa_peer,
)
from benchmarks.peers.tensorflow import keras_backward_peer, keras_peer
from benchmarks.peers.torch import (
    torch_backward_peer,
    torch_flex_peer,
    torch_formula_peer,
    torch_layer_peer,
    torch_math_backward_peer,
    torch_math_peer,
    torch_mha_layer_peer,
    torch_peer,
)
from benchmarks.peers.transformers import (
    accelerated_decoder_peer,
    accelerated_encoder_peer,
    transformers_decoder_peer,
    transformers_encoder_peer,
)
from benchmarks.peers.vllm import vllm_peer
from benchmarks.peers.zentorch import zentorch_peer


class Peer(NamedTuple):
    library: str  # the module that is imported
    forward: Callable | None = None  # the adapters for workloads of these kinds
    backward: Callable | None = None
    layer: Callable | None = None
    linear: Callable | None = None
    feed_forward: Callable | None = None
    norm: Callable | None = None
    encoder: Callable | None = None
    decoder: Callable | None = None
    accelerated_encoder: Callable | None = None
    accelerated_decoder: Callable | None = None

    @property
    def installed(self):
        return importlib.util.find_spec(self.library) is not None


PARTS, MODELS = ("linear", "feed_forward", "norm"), ("encoder", "decoder")


def formulas(adapter, kinds=(*PARTS, *MODELS)):
    """The fields of a peer whose adapter takes all formulas, or those of some kinds."""
    return dict.fromkeys(kinds, adapter)


PEERS = {
    "numpy": Peer("numpy", numpy_peer, layer=numpy_layer_peer, **formulas(numpy_formula_peer)),
    "torch": Peer(
        "torch",
        torch_peer,
        torch_backward_peer,
        torch_layer_peer,
        **formulas(torch_formula_peer, PARTS),
        encoder=transformers_encoder_peer,
        decoder=transformers_decoder_peer,
        accelerated_encoder=transformers_encoder_peer,
        accelerated_decoder=transformers_decoder_peer,
    ),
    "torch_math": Peer("torch", torch_math_peer, torch_math_backward_peer),
    "torch_flex": Peer("torch", torch_flex_peer),
    "torch_mha": Peer("torch", layer=torch_mha_layer_peer),
    "ort_attn": Peer("onnxruntime", ort_attn_peer, layer=ort_attention_layer_peer),
    "ort_mha": Peer("onnxruntime", ort_mha_peer, layer=ort_mha_layer_peer),
    "ort_gqa": Peer("onnxruntime", ort_gqa_peer),
    "ort": Peer("onnxruntime", **formulas(ort_graph_peer)),
    "openvino": Peer("openvino", openvino_peer, layer=openvino_layer_peer, **formulas(openvino_graph_peer)),
    "ov_fold": Peer("openvino", ov_fold_peer),
    "ncnn": Peer("ncnn", ncnn_peer),
    "jax": Peer("jax", jax_peer, jax_backward_peer, jax_layer_peer),
    "vllm": Peer("vllm", vllm_peer),
    "zentorch": Peer("zentorch", zentorch_peer),
    "keras": Peer("tensorflow", keras_peer, keras_backward_peer),
    "mlx": Peer("mlx", mlx_peer, mlx_backward_peer),
    "paddle": Peer("paddle", paddle_peer, paddle_backward_peer),
}
IMPLEMENTATIONS = {
    "sdpa": Peer(
        "sdpa",
        sdpa_peer,
        sdpa_backward_peer,
        sdpa_layer_peer,
        sdpa_linear_peer,
        sdpa_feed_forward_peer,
        sdpa_norm_peer,
        sdpa_encoder_peer,
        sdpa_decoder_peer,
        accelerated_encoder_peer,
        accelerated_decoder_peer,
    ),
    READ: Peer(
        "sdpa",
        read_peer,
        linear=read_peer,
        feed_forward=read_peer,
        norm=copy_peer,
        decoder=read_peer,
        accelerated_decoder=read_peer,
    ),
    **PEERS,
}


def adapter_of(peer, workload):
    """The one for workloads of this kind."""
    adapter = getattr(peer, workload.kind)
    require(adapter is not None, f"no {workload.kind}")
    return adapter


def select_peers(patterns):
    """The names of the peers that the comma-separated patterns name, in the order of PEERS: a pattern is the name of a
    peer, or else that of a library, which stands for all of its peers, or one such as torch_*; '' names none."""
    chosen = set()
    for pattern in filter(None, patterns.split(",")):
        found = [name for name, peer in PEERS.items() if matches(name, peer, pattern)]
        if not found:
            libraries = dict.fromkeys(peer.library for peer in PEERS.values())
            raise argparse.ArgumentTypeError(
                f"{pattern!r} is neither a peer nor a library; there are: {', '.join(PEERS)}; of {', '.join(libraries)}"
            )
        chosen.update(found)
    return [name for name in PEERS if name in chosen]


def matches(name, peer, pattern):
    if pattern in PEERS:
        return name == pattern
    return peer.library == pattern or fnmatch.fnmatch(name, pattern)
