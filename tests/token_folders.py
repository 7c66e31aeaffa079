"""Model folders with small tokenizers of several kinds and chat templates, made by this module."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from lmetric_lab.emulated.text import TOKENIZER_PATH

CORPUS = [
    "The router sends each request to the engine that holds most of its prefix.",
    "def add(a, b):\n    return a + b  # two numbers\n\n\nclass Tree:\n\tpass\n",
    '{"name": "weather", "arguments": {"place": "Zürich", "days": 2}}',
    "Ünïcode, 日本語, 🙂 and ½: don't can't we'll 12345 67.",
    "  spaces   at the front, and  at the end  ",
] * 20

# ChatML as in Qwen's templates: tools in the system message, calls as JSON, results as user turns,
# reasoning kept only after the last question.
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' %}
        {%- set ns.found = true %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Llama's and Mistral's older templates: text around each turn, BOS first, content in parts.
INST = """\
{{ bos_token }}
{%- if tools is not none %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message['role']) }}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
        {%- if message.tool_calls %}
            {{- '[TOOL_CALLS] ' + message.tool_calls | map(attribute='function') | list | tojson }}
        {%- endif %}
        {%- for part in message['content'] %}{{ ' ' + part['text'] | trim }}{% endfor %}{{ eos_token }}
        {%- endgeneration %}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] ' + message['content'] + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- '[INST] ' }}
        {%- for part in message['content'] %}
            {%- if part['type'] != 'text' %}{% continue %}{% endif %}
            {{- part['text'] }}
        {%- endfor %}
        {{- ' [/INST]' }}
    {%- endif %}
{%- endfor %}
"""

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
INST_TOKENS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]")


def _specials(tokens: tuple[str, ...], **how: bool) -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False, **how) for token in tokens]


def byte_level(add_prefix_space: bool = False) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: bytes, a pattern, merges."""
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        special_tokens=_specials(CHATML_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in CHATML_WORDS])
    return tokenizer


def metaspace(scheme: str = "first", legacy: bool = False) -> Tokenizer:
    """Llama 2 and Mistral: spaces become a letter, with one before the first piece; BOS first."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        special_tokens=_specials(INST_TOKENS),
        initial_alphabet=["▁"],
        max_token_length=12,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    made = json.loads(tokenizer.to_str())
    vocabulary = made["model"]["vocab"]
    vocabulary.update({f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)})
    tokenizer = Tokenizer.from_str(json.dumps(made))
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """As T5 and XLM-R: a Unigram model behind a normaliser and Metaspace; EOS behind."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, show_progress=False, special_tokens=list(INST_TOKENS), unk_token="<unk>"
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(_specials(INST_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return tokenizer


def greedy_spaces() -> Tokenizer:
    """Has tokens that take the spaces beside them, and a normalized token."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(_specials(("<left>",), lstrip=True))
    tokenizer.add_special_tokens(_specials(("<right>",), rstrip=True))
    tokenizer.add_special_tokens([AddedToken("<norm>", special=True, normalized=True)])
    return tokenizer


KINDS = {
    "byte-level": (byte_level, CHATML),
    "byte-level, prefix space": (lambda: byte_level(add_prefix_space=True), CHATML),
    "metaspace first": (metaspace, INST),
    "metaspace always": (lambda: metaspace("always"), INST),
    "metaspace legacy": (lambda: metaspace(legacy=True), INST),
    "unigram": (unigram, INST),
    "greedy spaces": (greedy_spaces, CHATML),
}


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None = CHATML, **config: Any) -> Path:
    """A model's folder as Hugging Face's library saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if tokenizer.token_to_id("<s>") is None:
        values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template is not None:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values | config), encoding="utf-8")
    return folder


def make_folder(folder: Path, kind: str) -> Path:
    """The folder of one of `KINDS`."""
    make, template = KINDS[kind]
    return write_folder(folder, make(), template)


def shipped_folder(folder: Path, template: str) -> Path:
    """A folder with the tokenizer of emulated engines, whose tokens never change."""
    return write_folder(folder, Tokenizer.from_file(str(TOKENIZER_PATH)), template)
