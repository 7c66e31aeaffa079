"""Makes a tiny vision model for real engines: LLaVA with random weights.

    VLLM_ENVIRONMENT/bin/python tests/real/make_vision_model.py DIR

Text model, tokenizer and chat template are those of `make_model.py`. An image is 16 tokens. Nothing
is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

from make_model import CHAT_TEMPLATE, CONTEXT, HEADS, HIDDEN, LAYERS, TOKENIZER

IMAGE_SIZE, PATCH = 56, 14  # pixels
TEXT_PART = "{%- if part.type == 'text' -%}"
IMAGE_PART = "{%- if part.type == 'image' -%}{{- '<image>' -}}{%- endif -%}"


def make(target: Path) -> None:
    """Writes configuration, weights, tokenizer and image processor."""
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import AddedToken, Tokenizer
    from transformers import (
        AutoTokenizer,
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
        Qwen2Config,
    )

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.add_special_tokens([AddedToken("<image>", special=True, normalized=False)])
    end, padding, image = (tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>", "<image>"))
    text = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(IMAGE_SIZE // PATCH) ** 2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(target)
    # vLLM expects the names that published models have.
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(target / "model.safetensors").items()
    }
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<image>"],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE.replace(TEXT_PART, IMAGE_PART + TEXT_PART)
    fast.save_pretrained(target)
    fast = AutoTokenizer.from_pretrained(target)  # as in make_model.py
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=size),
        tokenizer=fast,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=fast.chat_template,
    )
    processor.save_pretrained(target)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
