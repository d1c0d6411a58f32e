"""The trained aligner: its parts against closed forms, training, folders."""

import dataclasses
import json
import random
import tracemalloc
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkformer.errors import ConfigError, DTypeError, FormatError, ModelError, NonFiniteError, TextError
from sinkformer.losses import fenchel_young
from sinkformer.metrics import coupling_tv, target_coupling
from sinkformer.text import Aligner, BadLine, Pair, choice
from sinkformer.text.choice import choose
from sinkformer.text.gold import read_links
from sinkformer.text.learned import (
    AlignerRecipe,
    Decision,
    PairModel,
    PairModelConfig,
    Trained,
    is_aligner,
    load_aligner,
    reliability,
    train_aligner,
)
from sinkformer.text.learned.decisions import best_threshold, log_odds_of_shares
from sinkformer.text.learned.examples import EncodedExamples, Example, batches, examples
from sinkformer.text.learned.features import NAMES, pair_features
from sinkformer.text.learned.heads import couple_with_nulls, log_shares
from sinkformer.text.learned.models import PairBatch
from sinkformer.text.learned.training import _held_out

SMALL = PairModelConfig(layers=(1, 2), size=16, width=8, heads=2, channels=4, blocks=1, dropout=0.0)
PURE = dataclasses.replace(SMALL, blocks=0, spelling=False, links=False, places=False)


def channel(source, target, name):
    return pair_features(source, target)[NAMES.index(name)]


def batch_of(sizes, seed=0):
    g = torch.Generator().manual_seed(seed)
    states = [[torch.randn(k, 2, 16, generator=g) for k in side] for side in zip(*sizes, strict=True)]
    pairs = [torch.rand(len(NAMES), n, m, generator=g) for n, m in sizes]
    return PairBatch.collate(states[0], states[1], pairs)


def model_of(config=SMALL, seed=0):
    """Weights that are not those of the start, where much is zero."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = PairModel(config)
        for p in model.parameters():
            p.data += 0.3 * torch.randn_like(p)
    return model.eval()


# Features
# ----------------------------------------------------------------------------------------------------------------------


def test_features_of_a_small_pair():
    source, target = ["The", "cat", ",", "42", "the"], ["the", "cats", ",", "the"]
    assert channel(source, target, "same_spelling").tolist()[4] == [1, 0, 0, 1]
    assert channel(source, target, "same_word").tolist()[0] == [1, 0, 0, 1]
    # ^ca cat at$ and ^ca cat ats ts$ have two in common.
    assert float(channel(source, target, "trigrams")[1, 1]) == pytest.approx(2 * 2 / 7)
    assert float(channel(source, target, "prefix")[1, 1]) == pytest.approx(3 / 4)
    assert float(channel(source, target, "prefix")[2, 2]) == 0  # one character is no prefix
    assert channel(source, target, "both_signs").nonzero().tolist() == [[2, 2]]
    assert float(channel(source, target, "one_sign")[2].sum()) == 3
    assert float(channel(source, target, "both_numbers").sum()) == 0
    copies = channel(source, target, "same_copy")
    assert (copies[0].tolist(), copies[4].tolist()) == ([1, 0, 0, 0], [0, 0, 0, 1])
    assert channel(source, target, "only_copy").nonzero().tolist() == [[2, 2]]
    assert float(channel(source, target, "same_count")[0, 3]) == 1
    assert float(channel(source, target, "shift")[4, 0]) == 1
    assert float(channel(source, target, "nearness")[0, 0]) == 1


def test_spelling_is_compared_composed():
    words = ["Ångström", "ñ", "go"]
    apart = [unicodedata.normalize("NFD", word) for word in words]
    assert torch.equal(pair_features(words, words), pair_features(words, apart))


def test_long_words_cost_no_memory():
    tracemalloc.start()
    f = pair_features(["x" * 50_000, *"abcdef" * 20], ["x" * 50_000 + "y", *"abcdef" * 20])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6
    assert float(f[NAMES.index("prefix"), 0, 0]) == pytest.approx(1, abs=1e-4)


@given(st.lists(st.text(max_size=5), min_size=1, max_size=6), st.lists(st.text(max_size=5), min_size=1, max_size=6))
def test_features_of_any_words_are_finite_and_transpose(source, target):
    f, t = pair_features(source, target), pair_features(target, source)
    assert f.shape == (len(NAMES), len(source), len(target))
    assert bool((f.abs() <= 1).all())
    sign = torch.tensor([-1.0 if name == "shift" else 1.0 for name in NAMES])
    torch.testing.assert_close(t.mT, f * sign[:, None, None])


# Coupling layer
# ----------------------------------------------------------------------------------------------------------------------


def random_scores(n, m, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(1, n, m, generator=g) * 2, (torch.randn(1, n, generator=g), torch.randn(1, m, generator=g))


def test_shares_of_a_word_sum_to_one():
    scores, alone = random_scores(4, 3)
    coupling = couple_with_nulls(scores, alone, (torch.ones(1, 4), torch.ones(1, 3)), 1e-6)
    pairs, left, right = log_shares(coupling, torch.tensor([7.0]))
    torch.testing.assert_close(pairs.exp().sum(-1) + left.exp(), torch.ones(1, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(pairs.exp().sum(-2) + right.exp(), torch.ones(1, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(pairs.exp(), 7 * coupling.to_dense()[:, :4, :3].float(), atol=1e-5, rtol=1e-4)


def test_one_word_a_side_in_closed_form():
    # p of the mass moves along the link and 1 - p is alone on both sides: p / (1 - p)^2 * p = exp(s - a - b) / corner.
    scores, alone = torch.tensor([[[1.3]]]), (torch.tensor([[0.4]]), torch.tensor([[0.2]]))
    coupling = couple_with_nulls(scores, alone, (torch.ones(1, 1), torch.ones(1, 1)), 1e-7)
    p = float(log_shares(coupling, torch.tensor([2.0]))[0].exp())
    assert p**2 / (1 - p) ** 2 == pytest.approx(np.exp(1.3 - 0.4 - 0.2), rel=1e-4)


def test_price_of_staying_alone_does_not_depend_on_length():
    # k copies of one perfect pair, each far from the others: the same odds whatever k is.
    found = []
    for k in (1, 3, 9):
        scores = torch.full((1, k, k), -30.0)
        scores[0].fill_diagonal_(2.0)
        price = torch.full((1, k), 0.5)
        coupling = couple_with_nulls(scores, (price, price), (torch.ones(1, k), torch.ones(1, k)), 1e-7)
        found.append(float(log_shares(coupling, torch.tensor([2.0 * k]))[0][0, 0, 0].exp()))
    assert found == pytest.approx([found[0]] * 3, abs=1e-4)


def test_gradient_of_the_loss_is_the_difference_of_the_plans():
    scores, alone = random_scores(3, 4)
    scores.requires_grad_()
    coupling = couple_with_nulls(scores, alone, (torch.ones(1, 3), torch.ones(1, 4)), 1e-7)
    gold = target_coupling([(0, 0), (1, 2), (2, 2)], 3, 4, dtype=torch.float32) / 7
    gold[3, 4] = gold[:3, :4].sum()
    fenchel_young(coupling, gold[None]).sum().backward()
    torch.testing.assert_close(scores.grad, (coupling.to_dense() - gold)[:, :3, :4].float(), atol=2e-5, rtol=0)


# Model
# ----------------------------------------------------------------------------------------------------------------------


def test_pure_model_is_a_separable_cost():
    model, batch = model_of(PURE), batch_of([(3, 5)])
    q, k, left, right = model.words(*batch.states)
    output = model(batch)
    torch.testing.assert_close(output.scores, q @ k.mT)
    torch.testing.assert_close(output.coupling.cost_rows(0, 4)[:, :3, :5].float(), -(q @ k.mT))
    assert output.links is None
    torch.testing.assert_close(output.alone, (left, right))
    # Q sees the source alone and K the target alone.
    other = batch._replace(states=(batch.states[0], torch.randn(1, 5, 2, 16)))
    torch.testing.assert_close(model.words(*other.states)[0], q)


@pytest.mark.parametrize("config", [SMALL, PURE], ids=["whole", "pure"])
def test_padding_changes_nothing(config):
    model, sizes = model_of(config), [(3, 5), (6, 2), (1, 1)]
    together = model(batch_of(sizes))
    g = torch.Generator().manual_seed(0)
    states = [[torch.randn(k, 2, 16, generator=g) for k in side] for side in zip(*sizes, strict=True)]
    pairs = [torch.rand(len(NAMES), n, m, generator=g) for n, m in sizes]
    for k, (n, m) in enumerate(sizes):
        alone = model(PairBatch.collate(states[0][k : k + 1], states[1][k : k + 1], pairs[k : k + 1]))
        torch.testing.assert_close(together.scores[k : k + 1, :n, :m], alone.scores, atol=2e-3, rtol=0)
        if config.links:
            torch.testing.assert_close(together.links[k : k + 1, :n, :m], alone.links, atol=2e-3, rtol=0)


def test_model_before_training_couples_like_directions():
    torch.manual_seed(0)
    model = PairModel(dataclasses.replace(SMALL, dropout=0.0)).eval()
    x = torch.randn(1, 4, 2, 16)
    present = torch.ones(1, 4)
    plan = model(PairBatch((x, x), torch.zeros(1, len(NAMES), 4, 4), (present, present))).coupling.to_dense()[0, :4, :4]
    assert plan.argmax(-1).tolist() == [0, 1, 2, 3]


def test_gradients_reach_every_parameter():
    model, batch = model_of(), batch_of([(3, 4), (5, 2)])
    output = model.train()(batch)
    (output.links.sum() + output.coupling.to_dense().square().sum()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)] == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"layers": (2, 1)}, "ascending"),
        ({"layers": ()}, "layers"),
        ({"layers": "12"}, "layers"),
        ({"width": 9}, "divide width"),
        ({"blocks": -1}, "blocks"),
        ({"heads": True}, "heads"),
        ({"dropout": 1.0}, "dropout"),
        ({"spelling": 1}, "spelling"),
        ({"format_version": 2}, "format_version"),
    ],
)
def test_bad_configuration(values, said):
    with pytest.raises(ConfigError, match=said):
        PairModelConfig(**{**dataclasses.asdict(SMALL), **values})


def test_configuration_takes_layers_and_size_from_the_language_model():
    assert PairModelConfig().resolved(6, 384).layers == (2, 4, 6)
    assert PairModelConfig().resolved(1, 8).layers == (0, 1)
    with pytest.raises(ConfigError, match="size=8"):
        SMALL.resolved(6, 8)
    with pytest.raises(ConfigError, match="resolved"):
        PairModel(PairModelConfig())
    with pytest.raises(ConfigError, match="unknown keys"):
        PairModelConfig.from_dict({"depth": 3})


# Decisions
# ----------------------------------------------------------------------------------------------------------------------


def test_calibration_recovers_a_known_distortion():
    g = torch.Generator().manual_seed(0)
    truth = 3 * torch.randn(20000, generator=g, dtype=torch.float64)
    gold = (torch.rand(20000, generator=g, dtype=torch.float64) < torch.sigmoid(truth)).double()
    decision = Decision.fitted(2 * truth + 1, gold)
    assert decision.scale == pytest.approx(0.5, abs=0.03)
    assert decision.shift == pytest.approx(-0.5, abs=0.1)
    assert reliability(decision.confidence(2 * truth + 1), gold)[1] < 0.02


def test_calibration_of_separable_odds_stays_finite():
    decision = Decision.fitted(torch.tensor([-5.0, -4.0, 6.0]), torch.tensor([0.0, 0.0, 1.0]))
    assert np.isfinite(decision.scale)
    assert decision.confidence(torch.tensor([-4.0, 6.0])).round().tolist() == [0, 1]


def test_best_threshold_by_brute_force():
    g = torch.Generator().manual_seed(1)
    confidence, gold = torch.rand(300, generator=g, dtype=torch.float64), (torch.rand(300, generator=g) < 0.3).double()

    def f1(t):
        chosen = confidence >= t
        return float(2 * gold[chosen].sum() / (chosen.sum() + gold.sum()))

    t, found = best_threshold(confidence, gold)
    assert found == pytest.approx(max(f1(k / 100) for k in range(5, 96)))
    assert f1(t) == pytest.approx(found, abs=2e-4)


def test_links_of_exact_pairs_are_the_only_ones_of_their_words():
    decision = Decision(threshold=0.5)
    confidence = np.array([[0.1, 0.9, 0.9], [0.9, 0.1, 0.2], [0.2, 0.6, 0.5]])
    assert decision.links(confidence, []) == [(0, 1), (0, 2), (1, 0), (2, 1), (2, 2)]
    assert decision.links(confidence, [(0, 0)]) == [(0, 0), (2, 1), (2, 2)]


def test_log_odds_of_shares():
    shares = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    assert log_odds_of_shares(shares.log()).tolist() == pytest.approx([-15, np.log(1 / 3), 15])


@pytest.mark.parametrize(
    "values", [{"scale": 0}, {"threshold": 0}, {"shift": float("nan")}, {"threshold": 1.5}, {"scale": "1"}]
)
def test_bad_decision(values):
    with pytest.raises(ConfigError):
        Decision(**values)


# Examples
# ----------------------------------------------------------------------------------------------------------------------


def test_examples_come_from_files_with_words(tmp_path):
    file = tmp_path / "gold.jsonl"
    file.write_text(
        '{"source": ["a", "b"], "target": ["c"], "sure": [[1, 0]], "possible": [[0, 0]]}\n'
        '{"source": [], "target": ["c"], "sure": []}\n'
    )
    assert examples([read_links(file)]) == [Example(("a", "b"), ("c",), ((0, 0), (1, 0)))]
    bare = tmp_path / "links.pharaoh"
    bare.write_text("0-0\n")
    with pytest.raises(FormatError, match=r"links\.pharaoh:1: expected words"):
        examples([read_links(bare)])
    with pytest.raises(DTypeError, match="received str"):
        examples(["gold.jsonl"])


def test_targets_are_the_gold_couplings(embedder):
    data = [Example(("a", "b", "c"), ("x", "y"), ((0, 0), (1, 0), (2, 1))), Example(("a",), ("x",), ())]
    couplings, links = EncodedExamples(data, embedder, (1,)).targets([0, 1])
    assert couplings.sum((1, 2)).tolist() == pytest.approx([1, 1])
    assert links[0].tolist() == [[1, 0], [1, 0], [0, 1]]
    assert couplings[1, 0, 0] == 0
    assert couplings[1, 0, -1] == couplings[1, -1, 0] == 0.5
    # Marginals are those of the coupling layer: 1/5 for a word, 2/5 and 3/5 for the null atoms.
    torch.testing.assert_close(couplings[0].sum(1), torch.tensor([0.2, 0.2, 0.2, 0.4]))
    torch.testing.assert_close(couplings[0].sum(0), torch.tensor([0.2, 0.2, 0.6]))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=50), st.integers(1, 9), st.integers(0, 3))
def test_batches_hold_everything_once(lengths, size, epoch):
    first, again = [list(batches(lengths, size, 7, epoch)) for _ in range(2)]
    assert first == again
    assert sorted(k for batch in first for k in batch) == list(range(len(lengths)))
    assert max(map(len, first)) <= size


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=60), st.integers(0, 5))
def test_no_held_out_text_is_trained_on(ends, seed):
    gold = [Example((f"s{a}",), (f"t{b}",), ()) for a, b in ends]
    try:
        train, dev = _held_out(gold, seed)
    except FormatError:
        return
    assert len(train) + len(dev) == len(gold)
    assert not {e.source for e in train} & {e.source for e in dev}
    assert not {e.target for e in train} & {e.target for e in dev}
    assert 1 <= len(dev) <= max(2 * (len(gold) // 10), 2)


def test_a_tenth_is_held_out():
    train, dev = _held_out([Example((f"s{k}",), (f"t{k}",), ()) for k in range(50)], 0)
    assert (len(train), len(dev)) == (45, 5)


# Training
# ----------------------------------------------------------------------------------------------------------------------

WORDS = "the cat dog sat ran on at mat rug and a big red hat tree house".split()


def made_up(count, seed):
    """A sentence and a shuffled half of it: the links are known."""
    rng, out = random.Random(seed), []
    for _ in range(count):
        source = rng.sample(WORDS, rng.randint(3, 6))
        kept = rng.sample(range(len(source)), rng.randint(2, len(source)))
        out.append(
            Example(tuple(source), tuple(source[i] for i in kept), tuple(sorted((i, j) for j, i in enumerate(kept))))
        )
    return out


RECIPE = AlignerRecipe(epochs=4, batch=8, rate=1e-2, average=0.8)


@pytest.fixture(scope="module")
def embedder(tiny_models):
    from sinkformer.text.embedders import TransformerEmbedder

    return TransformerEmbedder(str(tiny_models / "bert"), layers=(1, 2))


@pytest.fixture(scope="module")
def trained(tiny_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("aligner") / "folder"
    recipe = dataclasses.replace(RECIPE, epochs=12)
    result = train_aligner(made_up(40, 0), made_up(20, 1), model=tiny_models / "bert", config=SMALL, recipe=recipe)
    result.save(folder)
    return folder, result


def test_training_learns_identity_under_shuffling(trained):
    folder, result = trained
    assert result.training["dev_f1"] > 0.95
    hits = found = gold = 0
    for e, r in zip(test := made_up(20, 2), Aligner(folder).align([(e.source, e.target) for e in test]), strict=True):
        hits, found, gold = hits + len({*r.links} & {*e.links}), found + len(r.links), gold + len(e.links)
    assert 2 * hits / (found + gold) > 0.9


@pytest.mark.parametrize("changes", [{}, {"fine_tune": 1, "encoder_rate": 1e-3}], ids=["frozen", "fine-tuned"])
def test_interrupted_and_resumed_is_uninterrupted(tiny_models, tmp_path, monkeypatch, changes):
    from sinkformer.text.learned import fitting

    recipe = dataclasses.replace(RECIPE, epochs=2, **changes)
    options = {"model": tiny_models / "bert", "config": dataclasses.replace(SMALL, dropout=0.2), "recipe": recipe}
    whole = train_aligner(made_up(20, 0), made_up(6, 1), **options)

    step = fitting._Run.step
    monkeypatch.setattr(
        fitting._Run, "step", lambda self, *a: _interrupt() if self.history.steps == 3 else step(self, *a)
    )
    with pytest.raises(KeyboardInterrupt):
        train_aligner(made_up(20, 0), made_up(6, 1), folder=tmp_path, **options)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="resume"):
        train_aligner(made_up(20, 0), made_up(6, 1), folder=tmp_path, **options)
    other = dataclasses.replace(recipe, rate=0.5)
    with pytest.raises(ConfigError, match=r"recipe\.rate"):
        train_aligner(made_up(20, 0), made_up(6, 1), folder=tmp_path, resume=True, **{**options, "recipe": other})
    again = train_aligner(made_up(20, 0), made_up(6, 1), folder=tmp_path, resume=True, **options)
    assert again.decision == whole.decision
    for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    if changes:
        for a, b in zip(again.blocks.parameters(), whole.blocks.parameters(), strict=True):
            assert torch.equal(a, b)


def _interrupt():
    raise KeyboardInterrupt


def test_fine_tuning_changes_the_blocks_and_is_stored(tiny_models, tmp_path):
    recipe = dataclasses.replace(RECIPE, epochs=1, fine_tune=1, encoder_rate=1e-2)
    result = train_aligner(made_up(16, 0), made_up(6, 1), model=tiny_models / "bert", config=SMALL, recipe=recipe)
    result.save(tmp_path)
    loaded, plain = load_aligner(tmp_path), Aligner(str(tiny_models / "bert"), layer=2)
    assert loaded.embedder.settings["sha256"] != plain.embedder.settings["sha256"]
    text = [["the", "cat"]]
    assert not torch.allclose(loaded.embedder.states(text, (2,))[0], plain.embedder.embed(text)[0].unsqueeze(1))
    torch.testing.assert_close(
        loaded.embedder.states(text, (1,))[0], plain.embedder.states(text, (1,))[0], atol=1e-6, rtol=1e-5
    )
    # Trained further with a frozen language model, the blocks stay what they are.
    further = train_aligner(made_up(16, 0), made_up(6, 1), model=tmp_path, recipe=dataclasses.replace(RECIPE, epochs=1))
    for a, b in zip(further.blocks.parameters(), result.blocks.parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_training_is_deterministic_and_leaves_the_random_state(tiny_models):
    state = torch.random.get_rng_state()
    options = {"model": tiny_models / "bert", "config": SMALL, "recipe": dataclasses.replace(RECIPE, epochs=1)}
    a, b, c = [train_aligner(made_up(16, 0), seed=seed, **options) for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a.model.parameters(), c.model.parameters(), strict=True))
    assert a.training["dev_from_train"]
    assert a.training["pairs"] == 15


def test_early_stopping(tiny_models):
    recipe = dataclasses.replace(RECIPE, epochs=50, rate=0.0)
    result = train_aligner(
        made_up(8, 0), made_up(4, 1), model=tiny_models / "bert", config=SMALL, recipe=recipe, patience=2
    )
    assert result.training["steps"] == 3 * 2


def test_bad_arguments(tiny_models, trained):
    options = {"model": tiny_models / "bert", "config": SMALL}
    with pytest.raises(FormatError, match="at most 2 words"):
        train_aligner(made_up(4, 0), recipe=dataclasses.replace(RECIPE, longest=2), **options)
    with pytest.raises(FormatError, match="give a dev set"):
        train_aligner(made_up(1, 0), **options)
    with pytest.raises(FormatError, match="give a dev set"):
        train_aligner(made_up(1, 0) * 30, **options)
    with pytest.raises(FormatError, match="held-out pairs"):
        train_aligner(made_up(4, 0), [], **options)
    with pytest.raises(FormatError, match="without any link"):
        train_aligner([dataclasses.replace(e, links=()) for e in made_up(20, 0)], **options)
    with pytest.raises(ConfigError, match="blocks to fine-tune"):
        train_aligner(made_up(4, 0), recipe=dataclasses.replace(RECIPE, fine_tune=9), **options)
    with pytest.raises(ConfigError, match="seed"):
        train_aligner(made_up(4, 0), seed=-1, **options)
    with pytest.raises(ConfigError, match="folder to resume"):
        train_aligner(made_up(4, 0), resume=True, **options)
    with pytest.raises(ConfigError, match="has its own"):
        train_aligner(made_up(4, 0), model=trained[0], config=SMALL)
    with pytest.raises(ConfigError, match="epochs"):
        AlignerRecipe(epochs=0)
    with pytest.raises(ConfigError, match="average"):
        AlignerRecipe(average=1.0)
    with pytest.raises(ConfigError, match="rates"):
        AlignerRecipe(rate=1e38)


def test_a_loss_that_is_no_number_stops_with_the_step(tiny_models, monkeypatch):
    from sinkformer.text.learned.learners import Learner

    losses = Learner.losses

    def spoiled(self, *arguments):
        first, second = losses(self, *arguments)
        return first * (torch.nan if float(self.pairs.link.out.bias.detach()) != -3 else 1.0), second

    monkeypatch.setattr(Learner, "losses", spoiled)
    with pytest.raises(NonFiniteError, match="step 2"):
        train_aligner(made_up(16, 0), made_up(4, 1), model=tiny_models / "bert", config=SMALL, recipe=RECIPE)


# The aligner that uses it
# ----------------------------------------------------------------------------------------------------------------------


def test_aligner_of_a_folder(trained):
    folder, result = trained
    assert is_aligner(folder)
    aligner = Aligner(folder)
    assert aligner.settings["method"] == "trained"
    assert aligner.settings["threshold"] == result.decision.threshold
    r = aligner("the cat sat", "sat the")
    n, m = 3, 2
    assert r.converged
    torch.testing.assert_close(r.coupling.to_dense().sum(1), r.coupling.source.weights, atol=1e-8, rtol=0)
    assert r.mass == pytest.approx(float(r.plan.sum()))
    torch.testing.assert_close(r.plan.sum(1) + r.null_source, torch.full((n,), 1 / (n + m), dtype=torch.float64))
    assert all(0 <= c <= 1 for c in r.confidence)
    assert coupling_tv(r.coupling, target_coupling([(0, 1), (2, 0)], n, m)) < 0.2
    assert str(aligner("the cat sat", "sat the")) == "0-1 2-0"


@pytest.mark.parametrize("text", ["the cat and the dog and the cat", "the the the the", "a", "zzz qqq zzz"])
def test_a_text_with_itself_is_the_diagonal(trained, text):
    r = Aligner(trained[0])(text, text)
    assert r.confidence == [1.0] * len(r.links)
    assert r.links == [(k, k) for k in range(len(text.split()))]
    assert r.distance == 0


def test_empty_texts(trained):
    r = Aligner(trained[0])("", "the cat")
    assert r.links == []
    assert r.unaligned == ([], [0, 1])
    assert Aligner(trained[0])("", "").distance == 0


def test_results_do_not_depend_on_the_batch(trained):
    pairs = [(e.source, e.target) for e in made_up(12, 3)]
    results = [list(Aligner(trained[0], batch_size=size).align(pairs)) for size in (1, 5, 32)]
    for a, *others in zip(*results, strict=True):
        for b in others:
            assert a.links == b.links
            assert a.confidence == pytest.approx(b.confidence, abs=1e-4)
            torch.testing.assert_close(a.plan, b.plan, atol=1e-4, rtol=0)


def test_texts_beyond_the_memory_of_the_layers_are_refused(trained, monkeypatch):
    monkeypatch.setattr(Trained, "most_cells", 6)
    aligner = Aligner(trained[0])
    assert len(aligner("the cat", "the cat sat").links) == 2
    with pytest.raises(TextError, match=r"2 x 4 words.*method='partial'"):
        aligner("the cat", "the cat sat on")
    results = list(aligner.align([Pair(1, "a b c", "a b c"), Pair(2, "the cat", "the cat")]))
    assert isinstance(results[0], BadLine)
    assert len(results[1].links) == 2


def test_threshold_moves_the_links(trained):
    few, many = [Aligner(trained[0], threshold=t)("the cat sat on", "cat mat sat") for t in (1.0, 1e-9)]
    assert len(few.links) < len(many.links) == 12
    assert few.settings_hash != many.settings_hash
    assert few.distance == many.distance


def test_a_folder_does_not_take_the_name_of_a_packaged_model(trained, tmp_path, monkeypatch):
    copy(trained[0], tmp_path / "en")
    monkeypatch.chdir(tmp_path)
    assert choose("en").folder == choice._PACKAGED
    assert choose("./en").folder == Path("en")


def test_choice_of_method(trained, tiny_models):
    assert Aligner(trained[0], method="argmax").settings["method"] == "argmax"
    assert Aligner(trained[0], method="trained").settings["method"] == "trained"
    with pytest.raises(ConfigError, match="no meaning for the trained method"):
        Aligner(trained[0], epsilon=0.1)
    with pytest.raises(ConfigError, match="expected a trained aligner"):
        Aligner(str(tiny_models / "bert"), method="trained")
    with pytest.raises(ConfigError, match="threshold"):
        Aligner(trained[0], threshold=0)
    with pytest.raises(ConfigError, match="layer"):
        Aligner(trained[0], layer=5)


# Folders
# ----------------------------------------------------------------------------------------------------------------------


def copy(folder, to):
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_card_says_what_it_is(trained):
    card = (trained[0] / "README.md").read_text()
    assert "40 pairs" in card
    assert "hidden layers 1, 2" in card
    assert "{" not in card


@pytest.mark.parametrize("name", ["aligner.json", "model.safetensors"])
def test_damaged_files(trained, tmp_path, name):
    folder = copy(trained[0], tmp_path / "copy")
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="damaged"):
        load_aligner(folder)
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name):
        load_aligner(folder)


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        (("model", "width"), 16, ModelError),
        (("model", "width"), 10**13, ConfigError),
        (("model", "wings"), 2, ConfigError),
        (("decision", "wings"), 2, ConfigError),
        (("decision", "threshold"), 7, ConfigError),
        (("encoder", "sha256"), "0" * 64, ModelError),
        (("encoder", "name"), 5, ModelError),
        (("encoder", "blocks"), 1, ModelError),
        (("extra",), 1, ModelError),
        (("model",), [], ModelError),
    ],
)
def test_edited_configuration(trained, tmp_path, path, value, error):
    folder = copy(trained[0], tmp_path / "copy")
    values = json.loads((folder / "aligner.json").read_text())
    place = values
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (folder / "aligner.json").write_text(json.dumps(values))
    with pytest.raises(error):
        load_aligner(folder)


def test_weights_that_are_no_numbers(trained, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copy(trained[0], tmp_path / "copy")
    state = load_file(folder / "model.safetensors")
    state["words.query.weight"][0, 0] = float("nan")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"NaN.*words\.query\.weight"):
        load_aligner(folder)
