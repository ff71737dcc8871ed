"""`python -m sdpa demo`: a few calls compared with plain NumPy."""

import time

import numpy as np

import sdpa

# name: (B, H, G, M, N, D), dtype, options
CALLS = {
    "prefill, causal": ((1, 8, 8, 1024, 1024, 64), np.float32, {"causal": True}),
    "prefill, full": ((1, 8, 8, 1024, 1024, 64), np.float32, {}),
    "prefill, window of 256": ((1, 8, 8, 1024, 1024, 64), np.float32, {"causal": True, "window": (255, None)}),
    "batch of sentences": ((8, 12, 12, 128, 128, 64), np.float32, {}),
    "grouped heads (GQA)": ((1, 32, 8, 512, 512, 128), np.float32, {"causal": True}),
    "float64, causal": ((1, 8, 8, 512, 512, 64), np.float64, {"causal": True}),
}
SECONDS = 0.25  # for each side of each call


def plain_attention(query, key, value, causal=False, window=None):
    """softmax(Q K^T / sqrt(d)) V as one writes it in NumPy, with the score matrix reused in place."""
    B, H, M, D = query.shape
    G, N = key.shape[1:3]
    query = query.reshape(B, G, H // G, M, D) * D**-0.5
    key, value = key[:, :, None], value[:, :, None]
    scores = query @ key.swapaxes(-1, -2)
    distance = np.arange(M)[:, None] + N - M - np.arange(N)
    if causal:
        scores[..., distance < 0] = -np.inf
    if window is not None:
        scores[..., distance > window[0]] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return (scores @ value).reshape(B, H, M, -1)


def best_time(call):
    """The time of the shortest run.  After the first run, there are as many as fit into SECONDS, and at least two."""
    call()
    times, end = [], time.perf_counter() + SECONDS
    while len(times) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def row(name):
    """The cells of one line of the table, with the measurements of the call of that name."""
    (B, H, G, M, N, D), dtype, options = CALLS[name]
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape).astype(dtype) for shape in ((B, H, M, D), (B, G, N, D), (B, G, N, D))]
    difference = np.abs(sdpa.attention(*arrays, **options) - plain_attention(*arrays, **options)).max()
    ours = best_time(lambda: sdpa.attention(*arrays, **options))
    numpys = best_time(lambda: plain_attention(*arrays, **options))
    plan = sdpa.explain(*arrays, **options)
    return (
        name,
        f"{B} x {H} x {M} x {D}",
        f"{numpys * 1e3:.2f} ms",
        f"{ours * 1e3:.2f} ms",
        f"{numpys / ours:.1f} x",
        f"{difference:.1e}",
        plan.kernel,
        str(plan.threads),
    )


HEADER = ("call", "B x H x M x D", "NumPy", "sdpa", "faster", "difference", "kernel", "threads")
WIDTHS = (23, 18, 11, 9, 8, 11, 9, 8)


def print_row(cells):
    left, right = zip(cells[:2], WIDTHS[:2]), zip(cells[2:], WIDTHS[2:])
    print(*(cell.ljust(width) for cell, width in left), *(cell.rjust(width) for cell, width in right), flush=True)


def demo():
    print(f"sdpa {sdpa.__version__} against NumPy {np.__version__}: one call each, best time of several\n")
    print_row(HEADER)
    for name in CALLS:
        print_row(row(name))
    print("\nfaster: NumPy's time / sdpa's.  difference: the largest between the two results.")
