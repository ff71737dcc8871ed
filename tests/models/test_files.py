"""Reading folders: what is found, and the errors where something is not as it must be."""

import json
import sys
import tracemalloc

import numpy as np
import pytest
from ml_dtypes import bfloat16
from support.models import DECODERS, ENCODERS, draw_tensors, ids_of, safetensors, write, write_model

import sdpa
from sdpa.models import _progress
from sdpa.models._files import Safetensors

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float16)}


def file(path, data):
    path.write_bytes(data)
    return path


def raises(match, kind=ValueError):
    return pytest.raises(kind, match=match)


# safetensors.


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, bfloat16])
def test_tensors_are_mapped(dtype, tmp_path):
    array = np.random.default_rng(0).standard_normal((3, 5)).astype(dtype)
    found = Safetensors(file(tmp_path / "f", safetensors({"one": array[:0], "x": array, "empty": array[:, :0]})))
    assert list(found.header) == ["one", "x", "empty"]
    view = found.checked("x", (3, 5))
    assert view.dtype == dtype and not view.flags.writeable
    np.testing.assert_array_equal(view, array)
    assert found.checked("one", (0, 5)).shape == (0, 5) and found.checked("empty", (3, 0)).shape == (3, 0)


def test_tensors_that_lie_across_words_are_copied(tmp_path):
    data = safetensors({"odd": np.zeros(3, np.int8), "x": np.arange(4.0)})
    found = Safetensors(file(tmp_path / "f", data)).checked("x", (4,))
    assert found.flags.aligned and found.tolist() == [0, 1, 2, 3]


def test_bfloat16_without_ml_dtypes_is_float32(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    array = np.array([1.5, -2.0, 3e38, np.inf], bfloat16)
    found = Safetensors(file(tmp_path / "f", safetensors({"x": array}))).checked("x", (4,))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, array.astype(np.float32))


def test_a_file_that_is_cut_anywhere_is_an_error(tmp_path):
    data = safetensors(TENSORS)
    header = 8 + int.from_bytes(data[:8], "little")
    for size in (0, 7, 8, 20, header - 1, header, header + 1, len(data) - 1):
        with raises("f has .* truncated|f: tensor '.' ends at byte .*: it is truncated"):
            Safetensors(file(tmp_path / "f", data[:size]))
    with raises("has 33 bytes of data: the tensors must fill all of them, and fill 32"):
        Safetensors(file(tmp_path / "f", data + b"!"))


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff\xff", b"null", b"3", b"[" * 100000], ids=len)
def test_a_header_that_is_none(text, tmp_path):
    with raises(f"f: its header of {len(text)} bytes must be an object of JSON"):
        Safetensors(file(tmp_path / "f", len(text).to_bytes(8, "little") + text))
    with raises("must have 8 and a header of .* at least"):
        Safetensors(file(tmp_path / "f", b"\xff" * 64))


@pytest.mark.parametrize(
    "about, message",
    [
        (dict(dtype="F31"), "tensor 'b' has dtype 'F31': it must be one of F64, F32"),
        (dict(dtype=["F32"]), "tensor 'b' has dtype"),
        (dict(shape=[-4]), r"tensor 'b' has shape \[-4\]: it must be a list of whole numbers"),
        (dict(shape=4), "tensor 'b' has shape 4"),
        (dict(shape=[True]), "tensor 'b' has shape"),
        (dict(shape=[5]), r"tensor 'b' has data_offsets \[24, 32\]: for F16 \[5\] they must be 10 apart"),
        (dict(data_offsets=[24]), "tensor 'b' has data_offsets"),
        (dict(data_offsets=[32, 40]), "tensor 'b' begins at byte 32 of the data: it must begin at 24"),
        (dict(data_offsets=[16, 24]), "tensor 'b' begins at byte 16|tensor 'a' begins"),
    ],
)
def test_tensors_that_are_not_as_they_must_be(about, message, tmp_path):
    given = dict(dtype="F16", shape=[4], data_offsets=[24, 32])
    with raises(message):
        Safetensors(file(tmp_path / "f", safetensors(TENSORS, b=given | about)))
    with raises("tensor 'b' has dtype None"):
        Safetensors(file(tmp_path / "f", safetensors(TENSORS, b=7)))


def test_any_other_byte_is_an_error_or_another_number(tmp_path):
    """Never another exception, nor a tensor from outside the file."""
    random, data = np.random.default_rng(0), safetensors(TENSORS | {"empty": np.zeros((0, 3), np.float16)})
    wrong = 0
    for _ in range(1000):
        changed = bytearray(data)
        for at in random.integers(0, len(data), random.integers(1, 4)):
            changed[at] = random.choice([random.integers(256), *b'0123456789[]{}",:-.eE'])
        try:
            found = Safetensors(file(tmp_path / "f", bytes(changed[: random.integers(len(data) - 9, len(data) + 99)])))
            for name, about in found.header.items():
                assert found.checked(name, tuple(about["shape"])).nbytes <= 24
        except ValueError:
            wrong += 1
    assert 500 < wrong < 1000


# Folders.


@pytest.mark.parametrize("kind", ENCODERS + DECODERS)
def test_sharded_is_the_same_as_in_one_file(kind, tmp_path):
    ids = ids_of(2, 7)
    one, three = (sdpa.models.load(write_model(tmp_path / str(n), kind, shards=n)) for n in (1, 3))
    np.testing.assert_array_equal(one(ids), three(ids))


def test_the_dtype_is_that_of_the_weights_or_the_one_asked_for(tmp_path):
    for dtype in (np.float64, np.float32, np.float16, bfloat16):
        folder = write_model(tmp_path / np.dtype(dtype).name, "llama", dtype=dtype)
        model = sdpa.models.load(folder)
        assert model.dtype == dtype and np.dtype(dtype).name in repr(model)
        assert model(ids_of(1, 3)).dtype == (np.float64 if dtype == np.float64 else np.float32)
        assert sdpa.models.load(folder, dtype="bfloat16").dtype == bfloat16
        for wrong in (int, "float31", "int8"):
            with raises("dtype is .*: it must be float16, bfloat16, float32 or float64", TypeError):
                sdpa.models.load(folder, dtype=wrong)


def test_weights_are_mapped_not_copied(tmp_path):
    model = sdpa.models.load(write_model(tmp_path / "m", "bert"))
    assert not model._tables["words"].flags.owndata and not model._tables["words"].flags.writeable


def test_names_of_the_first_berts(tmp_path):
    """And prefixes that only models with a head have."""
    config, tensors = draw_tensors("bert")
    write(tmp_path / "new", config, tensors)
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): x for name, x in tensors.items()
    }
    old = {f"bert.{name}": x for name, x in old.items()} | {"cls.predictions.bias": np.zeros(3, np.float32)}
    write(tmp_path / "old", config, old)
    ids = ids_of(1, 5)
    np.testing.assert_array_equal(sdpa.models.load(tmp_path / "new")(ids), sdpa.models.load(tmp_path / "old")(ids))


def test_missing_files(tmp_path):
    with raises("nowhere is no folder", FileNotFoundError):
        sdpa.models.load(tmp_path / "nowhere")
    with raises("config.json is missing", FileNotFoundError):
        sdpa.models.load(tmp_path)
    folder = write_model(tmp_path / "m", "llama", shards=2)
    index, shard = folder / "model.safetensors.index.json", folder / "model-00002-of-00002.safetensors"
    moved = shard.rename(folder / "elsewhere")
    with raises(f"{shard.name} is missing: .*index.json says that it has", FileNotFoundError):
        sdpa.models.load(folder)
    moved.rename(shard)
    about = json.loads(index.read_text())
    index.write_text(
        json.dumps({"weight_map": about["weight_map"] | {"model.norm.weight": shard.name, "x": shard.name}})
    )
    with raises("has no tensor 'model.norm.weight': model.safetensors.index.json says|has no tensor 'x'"):
        sdpa.models.load(folder)
    index.write_text(json.dumps({"weight_map": {"x": "../../secret.safetensors"}}))
    with raises("index.json: weight_map must say for each tensor the name of a file beside it"):
        sdpa.models.load(folder)
    index.write_text("{}")
    with raises("weight_map must say"):
        sdpa.models.load(folder)
    index.unlink()
    (folder / "pytorch_model.bin").touch()
    with raises("model.safetensors is missing, .* there is config.json, .*pytorch_model.bin", FileNotFoundError):
        sdpa.models.load(folder)


def test_missing_and_wrong_tensors(tmp_path):
    config, tensors = draw_tensors("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    write(tmp_path / "m", config, {key: x for key, x in tensors.items() if key != name})
    with raises(rf"m: no file has the tensor '{name}', of shape \(80, 48\): it must be there"):
        sdpa.models.load(tmp_path / "m")
    write(tmp_path / "m", config, tensors | {name: tensors[name].T})
    with raises(rf"model.safetensors: tensor '{name}' has shape \(48, 80\): by config.json it must be \(80, 48\)"):
        sdpa.models.load(tmp_path / "m")
    write(tmp_path / "m", config, tensors | {name: tensors[name].astype(np.int8)})
    with raises(rf"tensor '{name}' has dtype I8: it must be one of F64, F32, F16, BF16"):
        sdpa.models.load(tmp_path / "m")


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("llama", dict(model_type="mamba"), "config.json: model_type is 'mamba': it must be one of bert, roberta"),
        ("llama", dict(model_type=None), "model_type is None"),
        ("llama", dict(hidden_act="tanh"), "hidden_act is 'tanh': it must be one of relu, gelu"),
        ("llama", dict(num_hidden_layers="2"), "num_hidden_layers is '2': it must be a whole number"),
        ("llama", dict(num_hidden_layers=None), "num_hidden_layers is None"),
        ("llama", dict(num_key_value_heads=3), "4 heads on 3"),
        ("bert", dict(num_attention_heads=0), "num_attention_heads is 0"),
        ("bert", dict(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),
        ("bert", dict(is_decoder=True), "is_decoder is True: it must be False"),
        ("llama", dict(rope_scaling={"rope_type": "spiral"}), "config.json: rope_type is 'spiral': it must be one of"),
        ("llama", dict(rope_scaling={"type": "linear"}), "rope_parameters have no 'factor': for rope_type 'linear'"),
        ("llama", dict(rope_parameters={"rope_type": "linear", "factor": "4"}), "they must be numbers"),
        ("llama", dict(rope_parameters={"full_attention": {}}), "the same for all layers"),
        ("llama", dict(model_type=[]), r"model_type is \[\]"),
        ("llama", dict(hidden_act={}), r"hidden_act is \{\}"),
        ("llama", dict(rms_norm_eps="a"), "rms_norm_eps is 'a': it must be a number from 0 to 1"),
        ("llama", dict(rms_norm_eps=-1), "rms_norm_eps is -1"),
        ("llama", dict(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
        ("llama", dict(rope_theta=0), "rope_theta is 0: it must be a number above 0"),
        ("llama", dict(rope_scaling=[1]), r"rope_scaling is \[1\]: it must be an object"),
        ("llama", dict(rope_scaling={"rope_type": [1]}), r"rope_type is \[1\]"),
        ("llama", dict(rope_scaling={"rope_type": "dynamic", "factor": "4"}), "they must be numbers"),
        ("llama", dict(rope_scaling={"rope_type": "linear", "factor": 0}), "they must be numbers"),
        (
            "llama",
            dict(rope_scaling={"rope_type": "longrope", "short_factor": [1], "long_factor": [[1]]}),
            "numbers|at most",
        ),
        ("llama", dict(partial_rotary_factor=5), "partial_rotary_factor is 5: it must be a number from 0 to 1"),
        ("llama", dict(head_dim=2**60), "head_dim is .*: it must be a whole number of 1 or more, up to 65536"),
        ("llama", dict(vocab_size=2**60), "vocab_size is"),
        ("llama", dict(tie_word_embeddings="x"), "tie_word_embeddings is 'x': it must be true or false"),
        ("llama", dict(hidden_size=3, head_dim=None), "4 heads have 0 numbers each"),
        ("roberta", dict(pad_token_id="a"), "pad_token_id is 'a': it must be a whole number"),
        ("roberta", dict(pad_token_id=-100), "pad_token_id is -100: it must be from 0"),
        ("roberta", dict(pad_token_id=100), "pad_token_id is 100: it must be from 0 to below 39"),
        (
            "roberta",
            dict(pad_token_id=None, max_position_embeddings=1),
            "pad_token_id is 1: it must be from 0 to below 0",
        ),
        ("mistral", dict(sliding_window=0), "sliding_window is 0: it must be a whole number of 1 or more"),
        ("qwen2", dict(layer_types=["sliding_attention"]), "layer_types are 1: they must be 2, one for each layer"),
        ("qwen2", dict(layer_types={"0": 1}), "layer_types is .*: it must be a list of names"),
    ],
)
def test_configurations_that_are_not_known(kind, changes, message, tmp_path):
    """The weights, which are not there, are not even looked for."""
    config, _ = draw_tensors(kind)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with raises(message):
        sdpa.models.load(tmp_path)


def test_files_that_are_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with raises("config.json: it must be JSON"):
        sdpa.models.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with raises("config.json: it must hold a dict, and holds"):
        sdpa.models.load(tmp_path)


def test_layers_that_are_not_there_take_no_time(tmp_path):
    write(tmp_path / "m", *draw_tensors("llama"))
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | dict(num_hidden_layers=2**40)))
    tracemalloc.start()
    try:
        with raises("no file has the tensor 'model.layers.2.self_attn.q_proj.weight'"):
            sdpa.models.load(tmp_path / "m")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_shapes_of_numbers_without_end(tmp_path):
    """Their product would take minutes."""
    for shape in ([10**4000] * 999, [1] * 65):
        with raises("tensor 'b' has shape .*: it must be a list of whole numbers"):
            Safetensors(
                file(tmp_path / "f", safetensors(TENSORS, b=dict(dtype="F32", shape=shape, data_offsets=[0, 0])))
            )


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("config.json", "[" * 100_000, "config.json: it must be JSON"),
        ("modules.json", "[1]", "modules.json: a module is : it must be Transformer"),
        (
            "modules.json",
            '[{"type": "Pooling", "path": "../.."}]',
            "modules.json: path is '../..': it must be the name",
        ),
        ("modules.json", '[{"type": "Pooling", "path": "a\\u0000b"}]', "modules.json: path is .* it must be the name"),
        (
            "sentence_bert_config.json",
            '{"max_seq_length": "x"}',
            "max_seq_length is 'x': it must be a number of 1 or more",
        ),
        ("tokenizer_config.json", '{"model_max_length": -1}', "model_max_length is -1"),
    ],
)
def test_files_beside_the_weights(name, text, message, tmp_path):
    folder = write_model(tmp_path / "m", "bert")
    (folder / name).write_text(text)
    with raises(f"m/.*{message}"):
        sdpa.models.load(folder)


def test_what_pools_is_a_name(tmp_path):
    folder = write_model(tmp_path / "m", "bert")
    (folder / "modules.json").write_text('[{"type": "Pooling", "path": "p"}]')
    (folder / "p").mkdir()
    for given in ([["mean"]], 5, "most"):
        (folder / "p/config.json").write_text(json.dumps({"pooling_mode": given}))
        with raises("p/config.json: pooling is .*: it must be of mean"):
            sdpa.models.load(folder)


def test_tokens_that_end_a_text_are_numbers(tmp_path):
    folder = write_model(tmp_path / "m", "llama")
    model = sdpa.models.load(folder)
    for given in ("x", [[1]], {}, 1.5, 2**70):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
        with raises("generation_config.json: eos_token_id is .*: it must be a token or a list of tokens"):
            model.generate([1, 2], 3)


def test_a_tokenizer_that_is_damaged(tmp_path):
    pytest.importorskip("tokenizers")
    folder = write_model(tmp_path / "m", "bert")
    (folder / "tokenizer.json").write_text('{"version": 3}')
    with raises("tokenizer.json: it must be a tokenizer"):
        sdpa.models.load(folder).embed("a text")


# Progress.


@pytest.mark.parametrize("patience, terminal, expected", [
    (9, True, ""), (9, False, ""), (-1, True, "\r\033[Kloading m: 1 of 2\r\033[K"), (-1, False, "loading m: "),
])  # fmt: skip
def test_progress_is_shown_when_it_takes_long(patience, terminal, expected, tmp_path, monkeypatch, capsys):
    folder = write_model(tmp_path / "m", "bert")
    monkeypatch.setattr(_progress, "PATIENCE", patience)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    sdpa.models.load(folder)
    shown = capsys.readouterr().err
    assert shown.endswith(expected) if terminal else shown.startswith(expected) and bool(shown) == bool(expected)


def test_the_package_is_imported_when_it_is_asked_for():
    from support.processes import run_python

    assert run_python("import sys, sdpa; print('sdpa.models' in sys.modules, sdpa.models.load)").startswith(
        "False <func"
    )
