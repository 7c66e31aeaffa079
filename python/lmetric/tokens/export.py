"""Exports a tokenizer as engines load it. Needs the extra `tokenizer` (transformers, no torch).

The library transformers rebuilds the normalizer, the pre-tokenizer and the decoder of many models
from the model's class, and takes only vocabulary and merges from tokenizer.json. The export is the
rebuilt tokenizer, so the router needs only the tokenizers library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmetric._core import LmetricError
from lmetric.extras import install
from lmetric.file_errors import write_file
from lmetric.tokens.download import download
from lmetric.tokens.files import EXPORT_FILE, EXPORT_FORMAT, digest, own_chat
from lmetric.tokens.hub import is_hub_id
from lmetric.tokens.prompt import PromptTokenizer

# Types whose class vLLM 0.32 does not use: it loads tokenizer.json as it is
# (`vllm/tokenizers/registry.py`).
_AS_IN_THE_FILE = {"internlm2", "step3_vl", "step3p7", "unlimited-ocr", "unlimited_ocr"}
_TEXTS = (
    "The quick brown fox",
    "  two  spaces, a\ttab\n\nand 12345 日本語 🙂",
    "def f(x):\n    return x ** 2  # ½ ﬁ e\u0301 don't <|im_start|>",
)


class ExportError(LmetricError):
    """A tokenizer cannot be exported. The message has the cause and what to do."""


@dataclass(frozen=True, slots=True)
class Export:
    """The result of an export."""

    folder: Path
    tokenizer_class: str
    """The class that transformers chose."""
    rebuilt: bool
    """Whether it tokenizes differently from the model's tokenizer.json, or the model has none."""
    transformers: str
    """The version of transformers."""


def export(model: str, out: Path, revision: str | None = None) -> Export:
    """Loads a model's tokenizer with transformers and writes it to the folder ``out``.

    ``model``: a folder or a Hub repository; ``revision``: of the repository, None: main. An earlier
    export in ``out`` is replaced. Raises ExportError, HubError and OSError.
    """
    transformers = _library()
    commit = None
    if Path(model).is_dir():
        folder = Path(model)
    elif is_hub_id(model):
        folder = download(model, revision)
        commit = folder.name
    else:
        raise ExportError(f"{model}: expected a folder, or a Hub repository OWNER/NAME")
    tokenizer = _load(transformers, folder, model)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # requests decide about both
    backend.no_padding()
    content = backend.to_str().encode()
    _clear(out)
    write_file(out / "tokenizer.json", content)
    for path, template in _templates(tokenizer, folder):
        (out / path).parent.mkdir(exist_ok=True)
        write_file(out / path, template.encode())
    about = {
        "format": EXPORT_FORMAT,
        "model": model,
        "commit": commit,
        "transformers": transformers.__version__,
        "tokenizer_class": type(tokenizer).__name__,
        "sha256": digest(content),
        "special_tokens": {name: _plain(value) for name, value in tokenizer.special_tokens_map.items()},
        "no_chat": own_chat(folder),
    }
    marker = out / EXPORT_FILE
    write_file(marker, (json.dumps(about, indent=2, ensure_ascii=False) + "\n").encode())
    if difference := _difference(out, tokenizer):
        marker.unlink()
        raise ExportError(f"{model}: the export tokenizes differently from transformers: {difference}")
    return Export(out, type(tokenizer).__name__, _rebuilt(folder, tokenizer), transformers.__version__)


def _library() -> Any:
    """The module transformers, without its advice. Raises ExportError if it is not installed."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError:
        raise ExportError(
            f"transformers is not installed; run: {install('tokenizer')}, "
            "or better, install the transformers version of your engines"
        ) from None
    return transformers


def _load(transformers: Any, folder: Path, model: str) -> Any:
    """The tokenizer as vLLM loads it from this folder. Raises ExportError."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        as_in_the_file = config.get("model_type") in _AS_IN_THE_FILE
    except (OSError, ValueError, AttributeError):
        as_in_the_file = False
    loader = transformers.TokenizersBackend if as_in_the_file else transformers.AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # it may fail in any way that its classes can
        lines = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]
        raise ExportError(f"{model}: transformers {transformers.__version__} cannot load it: {why}") from None
    if not getattr(tokenizer, "is_fast", False):
        raise ExportError(
            f"{model}: {type(tokenizer).__name__} is a tokenizer in Python; no tokenizer.json can hold it"
        )
    return tokenizer


def _clear(out: Path) -> None:
    """Creates the folder, or removes the earlier export in it. Raises ExportError."""
    out.mkdir(parents=True, exist_ok=True)
    further = out / "additional_chat_templates"
    files = [
        out / EXPORT_FILE,
        out / "tokenizer.json",
        out / "chat_template.jinja",
        out / "chat_template.json",
    ]
    templates = list(further.glob("*.jinja"))
    if others := set(out.iterdir()) - {*files, further}:
        raise ExportError(
            f"{out}: has other files ({min(other.name for other in others)}); name a new or empty folder"
        )
    if any(file.exists() for file in files) and not files[0].exists():
        raise ExportError(f"{out}: has a tokenizer that is no export; name a new or empty folder")
    for file in (*files[1:], *templates, files[0]):  # the marker last: a crash leaves an export
        file.unlink(missing_ok=True)


def _templates(tokenizer: Any, folder: Path) -> Iterator[tuple[str, str]]:
    """Path and content of each chat template."""
    templates = tokenizer.chat_template
    named = templates if isinstance(templates, dict) else {"default": templates} if templates else {}
    for name, template in named.items():
        if name == "default":
            yield "chat_template.jinja", template
        elif "/" not in name and not name.startswith("."):
            yield f"additional_chat_templates/{name}.jinja", template
    if (folder / "chat_template.json").exists():  # of the processor: vision models
        yield "chat_template.json", (folder / "chat_template.json").read_text(encoding="utf-8")


def _plain(value: Any) -> Any:
    return [str(each) for each in value] if isinstance(value, list | tuple) else str(value)


def _difference(out: Path, tokenizer: Any) -> str | None:
    """A text with other tokens in the export, as the router reads it, than in transformers."""
    ours = PromptTokenizer.load(out)
    for text in _TEXTS:
        for special in (True, False):
            theirs = tokenizer.encode(text, add_special_tokens=special)
            found = ours.completion(text, add_special_tokens=special).tolist()
            if found != theirs:
                return f"{text!r}: {found[:20]}, expected {theirs[:20]}"
    return None


def _rebuilt(folder: Path, tokenizer: Any) -> bool:
    if not (folder / "tokenizer.json").exists():
        return True
    raw = PromptTokenizer.load(folder)
    return any(raw.completion(text).tolist() != tokenizer.encode(text) for text in _TEXTS)
