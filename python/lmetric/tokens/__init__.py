"""Tokenizes prompts like the engines, with chat templates, and converts answers back to text."""

from lmetric.tokens.chat import NotPredictable
from lmetric.tokens.detokenise import Detokeniser, tokens_of_text
from lmetric.tokens.files import EXPORT_COMMAND, TokenizerError, configured_folder, find_folder
from lmetric.tokens.hub import HubError, fetch, is_hub_id, why_not_downloaded
from lmetric.tokens.images import Image, ImagePrompt, NotAligned, aligned
from lmetric.tokens.prompt import PromptTokenizer, Text, Tokens
from lmetric.tokens.verify import Difference, NotVerifiable, verify

__all__ = [
    "EXPORT_COMMAND",
    "Detokeniser",
    "Difference",
    "HubError",
    "Image",
    "ImagePrompt",
    "NotAligned",
    "NotPredictable",
    "NotVerifiable",
    "PromptTokenizer",
    "Text",
    "TokenizerError",
    "Tokens",
    "aligned",
    "configured_folder",
    "fetch",
    "find_folder",
    "is_hub_id",
    "tokens_of_text",
    "verify",
    "why_not_downloaded",
]
