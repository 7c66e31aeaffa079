"""Images in prompts: their keys, and the engine's tokens in their places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmetric.tokens import images as images_module
from lmetric.tokens.errors import NotAligned, NotPredictable
from lmetric.tokens.images import Image, ImageTokens, KnownImages, aligned, image_of
from lmetric.tokens.prompt import PromptTokenizer, Text
from token_folders import byte_level, write_folder

PLACE = 7


def ids(*tokens: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array(tokens, dtype=np.uint32)


def part(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def key(url: Any, request: dict[str, Any] | None = None, **more: Any) -> bytes | None:
    return image_of(part(url, **more), request or {}).key


def test_equal_images_have_equal_keys() -> None:
    data = "data:image/png;base64,AAAA"
    keys = [
        key(data),
        key("data:image/png;base64,AAAB"),
        key(data, uuid="a"),
        key(data, uuid="b"),
        key(data, {"mm_processor_kwargs": {"size": 3}}),
        key(data, {"media_io_kwargs": {"size": 3}}),
        key(data, {"mm_processor_kwargs": {"size": 3}}, uuid="a"),
    ]
    assert len(set(keys)) == len(keys)
    assert None not in keys
    assert key(data) == key(data, {"mm_processor_kwargs": {}}, detail="low")
    item = {"type": "input_image", "image_url": data, "detail": "auto"}
    assert image_of(item, {}) == image_of(part(data), {})
    assert image_of({**item, "uuid": "a"}, {}) == image_of(part(data, uuid="a"), {})
    # The client's name of an image stands for its content, as in vLLM.
    assert key("https://example.com/a.png", uuid="a") == key(data, uuid="a") == key(None, uuid="a")
    # A surrogate, which no UTF-8 has.
    assert key("data:\ud800") != key("data:\ud801")


@pytest.mark.parametrize(
    "url", ["https://example.com/a.png", "file:///a.png", "AAAA", "", None, 3, ["data:"], {}]
)
def test_the_content_of_other_images_is_unknown(url: Any) -> None:
    assert key(url) is None
    assert image_of({"type": "image_url", "image_url": url}, {}).key is None
    assert key("data:,", uuid=3) is None


def test_an_image_is_aligned_with_its_place_in_the_template() -> None:
    template, rendered = ids(1, 2, PLACE, 3), ids(1, 2, 9, 9, PLACE, 9, 3)
    known = aligned(template, rendered, "a", 2, 4)
    assert (known.identifier, known.placeholder, known.tokens.tolist()) == ("a", PLACE, [9, 9, PLACE, 9])
    for other, offset, length in [
        (ids(1, 2, 9, 3), 2, 2),  # not as long as the template
        (ids(1, 2, 9, 9, 9, 9, 4), 2, 4),  # another text behind the image
        (ids(1, 1, 9, 9, 9, 9, 3), 2, 4),  # before it
        (rendered, 3, 4),  # another place
        (rendered, 2, 99),
        (rendered, -1, 4),
        (rendered, 2, 0),
    ]:
        with pytest.raises(NotAligned):
            aligned(template, other, "a", offset, length)
    with pytest.raises(NotAligned):  # twice the placeholder
        aligned(ids(PLACE, 2, PLACE, 3), ids(PLACE, 2, 9, 9, 3), "a", 2, 2)


def known_images(**sizes: int) -> KnownImages:
    known = KnownImages()
    for name, size in sizes.items():
        known.add(name.encode(), ImageTokens(f"hash {name}", PLACE, ids(*([9] * size))))
    return known


def images(*names: str) -> list[Image]:
    return [Image(name.encode() if name else None, {}) for name in names]


def test_known_images_are_put_in_their_places() -> None:
    known = known_images(a=3, b=1)
    prompt = known.expand(ids(1, PLACE, 2, PLACE, PLACE), images("a", "b", "a"))
    assert prompt.tokens is not None
    assert prompt.tokens.tolist() == [1, 9, 9, 9, 2, 9, 9, 9, 9]
    assert prompt.images == [("hash a", 1, 3), ("hash b", 5, 1), ("hash a", 6, 3)]
    assert (prompt.total_tokens, prompt.unknown) == (9, [])


@pytest.mark.parametrize("unknown", ["c", ""])
def test_a_prompt_is_matched_up_to_its_first_unknown_image(unknown: str) -> None:
    prompt = known_images(a=3, b=2).expand(ids(1, PLACE, 2, PLACE, 3, PLACE), images("a", unknown, "b"))
    assert prompt.tokens is not None
    assert prompt.tokens.tolist() == [1, 9, 9, 9, 2]
    assert prompt.images == [("hash a", 1, 3)]
    assert prompt.total_tokens == 3 + 3 + 2 + 2  # the unknown image counts like the last one
    # No engine is asked about an image whose content is unknown.
    assert [image.key for image in prompt.unknown] == ([b"c"] if unknown else [])


def test_a_text_with_the_placeholder_is_not_matched_by_token() -> None:
    known = known_images(a=3)
    assert known.expand(ids(1, PLACE, 2, PLACE), images("a")).tokens is None
    assert known.expand(ids(1, 2), images("a")).tokens is None
    known.add(b"other", ImageTokens("hash", PLACE + 1, ids(9)))
    assert known.expand(ids(1, PLACE), images("a")).tokens is None
    nothing = KnownImages().expand(ids(1, PLACE), images("a"))
    assert (nothing.tokens, [image.key for image in nothing.unknown]) == (None, [b"a"])


def test_the_images_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "MOST_IMAGES", 3)
    known = known_images(a=1, b=1, c=1)
    known.expand(ids(PLACE), images("a"))
    known.add(b"d", ImageTokens("hash d", PLACE, ids(9)))

    def is_known(name: str) -> bool:
        return bool(known.expand(ids(PLACE), images(name)).images)

    assert [is_known(name) for name in "abcd"] == [True, False, True, True]
    monkeypatch.setattr(images_module, "MOST_TOKENS", 5)
    known.add(b"e", ImageTokens("hash e", PLACE, ids(*([9] * 4))))
    assert len(known) == 2
    known.add(b"e", ImageTokens("hash e", PLACE, ids(*([9] * 4))))
    assert len(known) == 2


def test_chats_of_all_apis_show_their_images_in_order(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}[I]{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    tokenizer = PromptTokenizer.load(write_folder(tmp_path / "m", byte_level(), template))
    one, two = "data:image/png;base64,AAAA", "data:image/jpeg;base64,BBBB"

    def shown(text: Text) -> tuple[str, list[bytes | None]]:
        return text.text, [image.key for image in text.images]

    chat = {"messages": [{"role": "user", "content": [part(one), {"type": "text", "text": "x"}, part(two)]}]}
    assert shown(tokenizer.chat_text(chat)) == ("<user>[I]x[I]", [key(one), key(two)])
    item = {"role": "user", "content": [{"type": "input_image", "image_url": one}]}
    assert shown(tokenizer.responses_text({"input": [item]})) == ("<user>[I]", [key(one)])

    def block(kind: str, data: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}

    result = {"type": "tool_result", "tool_use_id": "t", "content": [block("image/png", "AAAA")]}
    remote = {"type": "image", "source": {"type": "url", "url": "https://example.com"}}
    blocks = [result, block("image/jpeg", "BBBB"), remote]
    messages = {"messages": [{"role": "user", "content": blocks}]}
    expected = ("<tool><user>[I]<user>[I][I]", [key(one), key(two), None])
    assert shown(tokenizer.messages_text(messages)) == expected
    with pytest.raises(NotPredictable, match="only an engine knows"):
        tokenizer.chat(chat)
    for bad in ({"type": "image", "source": 3}, {"type": "image", "source": {"data": 3}}):
        with pytest.raises(NotPredictable):
            tokenizer.messages_text({"messages": [{"role": "user", "content": [bad]}]})
