"""Sound, video and prompts with features of an engine: they reach the engine unchanged, and count
no hit of tokens that the router does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server_world import decision_id
from test_server_images import FACE, chat, folder, image, learned, model, record, rendering

__all__ = ["folder"]

TEXT = {"type": "text", "text": "What is this, and who made it? " * 4}
MEDIA = [
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
]
GENERATE = "/inference/v1/generate"


@pytest.mark.parametrize("part", MEDIA, ids=lambda part: str(part["type"]))
async def test_sound_and_video_pass_and_no_block_of_events_is_predicted(
    folder: Path, part: dict[str, Any]
) -> None:
    """Engines hash their blocks with an identity that only they know."""
    async with rendering(folder) as (w, renderer):
        router = model(w).router
        await record(w, chat(image(FACE), TEXT))
        await learned(w)
        router.update_instance("e0", kv_source="exact")  # only events add blocks
        tokens = renderer.tokenizer.chat({"messages": [{"role": "user", "content": [TEXT]}]})
        count = len(tokens) // 4
        router.blocks_stored("e0", list(range(1, count + 1)), tokens[: count * 4])
        known = await record(w, chat(TEXT))
        assert known["predicted_cached_tokens"] >= 4 * 8
        for body in (chat(TEXT, part), chat(part, TEXT), chat(image(FACE), part, TEXT)):
            for _ in range(2):
                got = await record(w, body)
                assert got["predicted_cached_tokens"] == 0
                assert w.engines[0].requests[-1].json == body
        assert model(w).tokenizers.text_prompts["media"] >= 6
        assert len(renderer.bodies) == 1  # of the image alone


async def test_prompts_with_features_pass_and_are_not_matched(folder: Path) -> None:
    """`/inference/v1/generate`: the tokens of different images are equal."""
    features = {
        "mm_hashes": {"image": ["a"]},
        "mm_placeholders": {"image": [{"offset": 8, "length": 40}]},
        "kwargs_data": None,
    }
    body: dict[str, Any] = {"model": "tiny", "token_ids": [7] * 64, "sampling_params": {"max_tokens": 1}}
    async with rendering(folder) as (w, _):
        for sent, cached in ((body, 0), (body, 60), (body | {"features": features}, 0)):
            for _ in range(1 + ("features" in sent)):
                status, headers, _ = await w.post(sent, GENERATE)
                assert status == 200
                got = model(w).router.explain(decision_id(headers))
                assert got is not None
                assert got["predicted_cached_tokens"] == cached
                assert w.engines[0].requests[-1].json == sent
