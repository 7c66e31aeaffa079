"""Check that router and engine produce the same token IDs: tokenizer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lmetric.doctor.reach import PROMPT
from lmetric.doctor.subject import Subject
from lmetric.engines.http import Unanswered
from lmetric.server.fleet.kv_choice import FIX_TOKENIZER as REMEDY
from lmetric.tokens.download import HubError, fetch
from lmetric.tokens.errors import NotPredictable, TokenizerError
from lmetric.tokens.files import EXPORT_COMMAND
from lmetric.tokens.hub import configured_folder, find_folder, is_hub_id, why_not_downloaded
from lmetric.tokens.prompt import PromptTokenizer
from lmetric.tokens.verify import Difference, NotVerifiable, verify

REFUSED = "the engine refuses it"  # the text in `verify`


async def check_tokenizer(subject: Subject) -> None:
    """Compares the tokens of chats and texts in the server and in the engine."""
    folder = await _folder(subject)
    if folder is None:
        return
    settings = subject.target.settings
    try:
        tokenizer = await asyncio.to_thread(
            PromptTokenizer.load, folder, chat_template=settings.chat_template
        )
    except TokenizerError as error:
        subject.failed("tokenizer", str(error), REMEDY)
        return

    async def post(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        answer = await subject.client.post(path, body)
        return answer.status, answer.body

    subject.tokenizer = tokenizer
    seen = "chats and texts have the engine's tokens"
    differences: list[Difference] = []
    try:
        try:
            differences = await verify(tokenizer, post, subject.model)
            wrong = [str(difference) for difference in differences]
            # SGLang's /tokenize accepts only texts.
            tells = not wrong or any(d.kind == "text" or not d.why.startswith(REFUSED) for d in differences)
        except NotVerifiable:
            tells = False
        if not tells:
            wrong = await _by_count(subject, tokenizer)
            seen = "chats and texts have the engine's number of tokens (its /tokenize does not return tokens)"
    except (Unanswered, NotPredictable) as error:
        subject.failed("tokenizer", str(error), REMEDY)
        return
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        subject.failed("tokenizer", f"{folder}: {wrong[0]}{more}", _remedy(subject, tokenizer, differences))
    else:
        exported = tokenizer.exported_with
        notes = [f"exported with {exported}"] if exported else []
        subject.passed("tokenizer", "; ".join([f"{folder}: {seen}", *notes, *tokenizer.notes]))


def _remedy(subject: Subject, tokenizer: PromptTokenizer, differences: list[Difference]) -> str:
    """The advice for tokens that differ."""
    command = EXPORT_COMMAND.replace("MODEL", subject.capabilities.root(subject.model) or "MODEL")
    if differences and all(difference.kind == "chat" for difference in differences):
        return f"set chat_template to the engine's --chat-template; or run {command}, and set tokenizer: DIR"
    if tokenizer.exported_with:
        old = tokenizer.exported_with
        return (
            f"run {command} with the engine's revision and transformers (was: {old}), and set tokenizer: DIR"
        )
    return f"run {command}: it writes the tokenizer as the engine loads it; then set tokenizer: DIR"


async def _by_count(subject: Subject, tokenizer: PromptTokenizer) -> list[str]:
    """Differences in the number of tokens, for engines that return no token IDs.

    Raises Unanswered and NotPredictable.
    """
    talk = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "What is a router?\n\n  It is  not\ta switch, 語."},
        {"role": "assistant", "content": "It forwards."},
        {"role": "user", "content": "Why?"},
    ]
    cases = [
        ("/v1/completions", {"prompt": text}, tokenizer.completion(text)) for text in (PROMPT, "½ ﬁ\n\n")
    ]
    if tokenizer.no_chat is None:
        for messages in (talk, talk[1:2]):
            body: dict[str, Any] = {"messages": messages}
            cases.append(("/v1/chat/completions", body, tokenizer.chat(body)))
    wrong = []
    for path, body, ours in cases:
        answer = await subject.client.post(path, {"model": subject.model, "max_tokens": 1, **body})
        if answer.status != 200:
            raise Unanswered(f"POST {path}: {answer.error()}")
        theirs = answer.usage("prompt_tokens")
        if theirs != len(ours):
            wrong.append(f"{path}: {len(ours)} tokens here, {theirs} in the engine")
    return wrong


async def _folder(subject: Subject) -> Path | None:
    """The folder of the tokenizer; None, with a verdict, if there is none."""
    setting, revision = subject.target.settings.tokenizer, subject.target.settings.tokenizer_revision
    root = subject.capabilities.root(subject.model)
    if setting == "off":
        subject.not_offered(
            "tokenizer", "tokenizer is off in the configuration: prompts are matched as text", REMEDY
        )
        return None
    named = root if setting is None else setting
    folder = None
    if setting is not None:
        folder = configured_folder(setting, revision)
    elif root:
        folder = find_folder(root, revision)
    if folder is not None:
        return folder
    remedy = REMEDY
    if named is None or not is_hub_id(named):
        cause = f"the engine's model {named or subject.model!r} is not a folder on this machine"
    elif refused := why_not_downloaded(named, setting, subject.target.settings.tokenizer_download):
        cause = refused if setting else f"the engine's model {refused}"
        remedy = f"tokenizer: {named} in the configuration, or --tokenizer {named}"
    else:
        try:
            return await fetch(named, revision)
        except HubError as error:
            subject.failed("tokenizer", str(error), REMEDY)
            return None
    subject.not_offered("tokenizer", f"{cause}: prompts are matched as text", remedy)
    return None
