"""Tokenizes prompts like the engines, with chat templates, and converts answers back to text."""

from lmetric.tokens.chat import NotPredictable
from lmetric.tokens.detokenise import Detokeniser
from lmetric.tokens.files import TokenizerError, find_folder
from lmetric.tokens.prompt import PromptTokenizer, Text, Tokens
from lmetric.tokens.verify import Difference, NotVerifiable, verify

__all__ = [
    "Detokeniser",
    "Difference",
    "NotPredictable",
    "NotVerifiable",
    "PromptTokenizer",
    "Text",
    "TokenizerError",
    "Tokens",
    "find_folder",
    "verify",
]
