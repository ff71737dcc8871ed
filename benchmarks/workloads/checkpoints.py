"""Models in folders as Hugging Face writes them."""

import itertools
import json

CODES = {"fp32": "F32", "fp64": "F64", "bf16": "BF16", "fp16": "F16"}


def write(folder, config, weights, dtype_name):
    """config.json and model.safetensors: the length of a header, the header, and the numbers of all weights."""
    ends = list(itertools.accumulate((array.nbytes for array in weights.values()), initial=0))
    header = {
        name: {"dtype": CODES[dtype_name], "shape": array.shape, "data_offsets": place}
        for (name, array), place in zip(weights.items(), itertools.pairwise(ends), strict=True)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns what follows
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in weights.values():
            array.tofile(file)
