"""Makes a tiny model for real engines: Qwen2 with random weights.

    VLLM_ENVIRONMENT/bin/python tests/real/make_model.py DIR [LAYERS HIDDEN]

The tokenizer is the tokenizer of the emulated engines. Nothing is downloaded. The weights come from
a seed, so two engines give the same greedy answers. The chat template takes tools and content in
parts, like the templates of real models.
"""

from __future__ import annotations

import sys
from pathlib import Path

TOKENIZER = Path(__file__).parents[2] / "python/lmetric_lab/emulated/tokenizer.json"
LAYERS, HIDDEN, HEADS, CONTEXT = 2, 64, 2, 8192

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\nCall with <tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- elif message.content -%}
{%- for part in message.content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>' + call.function | tojson + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def make(target: Path, layers: int = LAYERS, hidden: int = HIDDEN) -> None:
    """Writes configuration, weights and tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    end, padding = (tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        # Wide, so that the likeliest token stands clear of the next.
        initializer_range=0.3 * (HIDDEN / hidden) ** 0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(target)
    # Engines load the tokenizer with the class of the model type. That class pre-tokenizes in its
    # own way and ignores the file. Files of real models agree with their class; so must this file.
    AutoTokenizer.from_pretrained(target).save_pretrained(target)


if __name__ == "__main__":
    make(Path(sys.argv[1]), *map(int, sys.argv[2:]))
