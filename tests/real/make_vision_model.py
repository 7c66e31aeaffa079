"""Makes a tiny vision model for real engines: Qwen2-VL with random weights.

    VLLM_ENVIRONMENT/bin/python tests/real/make_vision_model.py DIR

It needs torchvision. Tokenizer and chat template are those of `make_model.py`. An image has a token
for each 28 x 28 pixels, at least 4 and at most 64. Nothing is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

from make_model import CHAT_TEMPLATE, CONTEXT, HEADS, HIDDEN, LAYERS, TOKENIZER

PIXELS = 28 * 28  # of a token
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEXT_PART = "{%- if part.type == 'text' -%}"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
IMAGE_PART = "{%- if part.type == 'image' -%}{{- '" + IMAGE + "' -}}{%- endif -%}"
VIDEO_PART = IMAGE_PART.replace("image", "video")


def make(target: Path) -> None:
    """Writes configuration, weights, tokenizer and image processor."""
    import torch
    from tokenizers import AddedToken, Tokenizer
    from transformers import (
        AutoTokenizer,
        PreTrainedTokenizerFast,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    start, stop, image, video = map(tokenizer.token_to_id, MARKS)
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6], "rope_type": "default"},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=stop,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    Qwen2VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(target)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *MARKS],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE.replace(TEXT_PART, IMAGE_PART + VIDEO_PART + TEXT_PART)
    fast.save_pretrained(target)
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=4 * PIXELS, max_pixels=64 * PIXELS),
        tokenizer=AutoTokenizer.from_pretrained(target),  # as in make_model.py
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=fast.chat_template,
    )
    processor.save_pretrained(target)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
