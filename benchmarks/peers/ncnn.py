"""ncnn: a network of one layer."""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure.adapting import THREADS, additive_mask, as_bits, require


def ncnn_peer(workload):
    """ncnn's SDPA layer: (B * H, M, D).  It reads bfloat16, computes in float32 and gives that."""
    require(workload.dtype.name in ("float32", "bfloat16"), "float32 and bfloat16 only")
    import ncnn

    arrays, options = workload.draw()
    mask = additive_mask(workload, options)
    inputs = [array.reshape(-1, *array.shape[2:]) for array in arrays]
    if mask is not None:
        inputs.append(ncnn_mask(mask, workload))
    half = workload.dtype.itemsize == 2
    mats = [ncnn.Mat(as_bits(array) if half else array).clone() for array in inputs]
    net = ncnn_net(len(inputs), bfloat16=half)

    def call():
        with net.create_extractor() as extractor:
            for index, mat in enumerate(mats):
                extractor.input(f"in{index}", mat)
            return extractor.extract("out")[1]

    return call, lambda out: np.array(out).reshape(arrays[0].shape)


def ncnn_mask(mask, workload):
    """(M, N) if all heads have the same, else (B * H, M, N)."""
    if mask.shape[:2] == (1, 1):
        return mask[0, 0]
    every = np.broadcast_to(mask, (workload.B, workload.H, workload.M, workload.N))
    return every.reshape(-1, workload.M, workload.N)


def ncnn_net(inputs, bfloat16):
    """A network of the one layer, whose inputs are float32 or all bfloat16."""
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads = THREADS
    for option in ("fp16_storage", "fp16_packed", "fp16_arithmetic"):
        setattr(net.opt, f"use_{option}", False)
    net.opt.use_bf16_storage = bfloat16
    names = [f"in{index}" for index in range(inputs)]
    lines = [f"Input {name} 0 1 {name}" for name in names]
    lines.append(f"SDPA attention {inputs} 1 {' '.join(names)} out 5={int(inputs == 4)}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "attention.param"
        path.write_text("\n".join(["7767517", f"{len(lines)} {inputs + 1}", *lines, ""]))
        net.load_param(str(path))
    return net
