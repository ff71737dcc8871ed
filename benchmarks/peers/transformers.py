"""Whole models of transformers, on PyTorch; by themselves, and with this library's layers, attention and cache."""

import importlib.util

from benchmarks.measure.adapting import THREADS, require
from benchmarks.peers.torch import torch_result, torch_tensor
from benchmarks.workloads.models import past_names


def transformers_model(workload, kind, **options):
    """The model of a class of transformers.Auto..., with attention by scaled_dot_product_attention."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    require(not missing, f"{' and '.join(missing)} must be installed")
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    config = transformers.AutoConfig.for_model(**workload.config)
    model = getattr(transformers, kind).from_config(config, attn_implementation="sdpa", **options).eval()
    weights = {name: torch_tensor(array) for name, array in workload.draw_weights().items()}
    model.load_state_dict(weights, assign=True)
    return model


def accelerated(model):
    """The same model with what sdpa.torch.accelerate knows replaced, and a class of caches for it."""
    from sdpa import huggingface, torch

    huggingface.register()
    torch.accelerate(model)
    return model, huggingface.Cache


def transformers_encoder_peer(workload):
    return encoder_call(workload, encoder_model(workload))


def accelerated_encoder_peer(workload):
    return encoder_call(workload, accelerated(encoder_model(workload))[0])


def encoder_model(workload):
    return transformers_model(workload, "AutoModel", add_pooling_layer=False)


def encoder_call(workload, model):
    import torch

    ids = torch_tensor(workload.draw_inputs()["ids"])
    mask = torch.arange(workload.S) < torch_tensor(workload.lengths)[:, None] if workload.padded else None

    @torch.inference_mode()
    def call():
        return model(ids, attention_mask=mask).last_hidden_state

    return call, lambda x: workload.comparable(torch_result(x))


def transformers_decoder_peer(workload):
    from transformers import DynamicCache

    return decoder_call(workload, transformers_model(workload, "AutoModelForCausalLM"), DynamicCache)


def accelerated_decoder_peer(workload):
    return decoder_call(workload, *accelerated(transformers_model(workload, "AutoModelForCausalLM")))


def decoder_call(workload, model, kind_of_cache):
    import torch

    inputs = {name: torch_tensor(array) for name, array in workload.draw_inputs().items()}
    ids, cache = inputs["ids"], kind_of_cache(config=model.config)
    if workload.cached:
        for number, names in enumerate(past_names(workload.layers)):
            cache.update(*(inputs[name] for name in names), number)

    @torch.inference_mode()
    def prompt():
        return model(ids, logits_to_keep=1, use_cache=True).logits

    @torch.inference_mode()
    def token():
        logits = model(ids, past_key_values=cache).logits
        cache.crop(-workload.S)
        return logits

    return token if workload.cached else prompt, lambda x: workload.comparable(torch_result(x))
