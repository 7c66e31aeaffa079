"""Are the router's token ids the engine's: tokenizer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lmetric.doctor.client import Unanswered
from lmetric.doctor.subject import Subject
from lmetric.tokens import PromptTokenizer, TokenizerError, find_folder, verify
from lmetric.tokens.verify import NotVerifiable

REMEDY = "tokenizer: FOLDER in the configuration, or --tokenizer: with the tokenizer.json and chat template"


async def check_tokenizer(subject: Subject) -> None:
    """Renders and tokenises chats and texts as the server would, and has the engine do the same."""
    folder = _folder(subject)
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

    try:
        differences = await verify(tokenizer, post, subject.model)
    except NotVerifiable as error:
        subject.not_offered("tokenizer", str(error))
    except Unanswered as error:
        subject.failed("tokenizer", str(error))
    else:
        if differences:
            more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
            subject.failed("tokenizer", f"{folder}: {differences[0]}{more}", REMEDY)
        else:
            notes = "".join(f"; {note}" for note in tokenizer.notes)
            subject.passed("tokenizer", f"{folder}: chats and texts have the engine's tokens{notes}")


def _folder(subject: Subject) -> Path | None:
    """Where the tokenizer is; None, with the verdict, where it is not."""
    setting, model = subject.target.settings.tokenizer, subject.capabilities.base(subject.model)
    root = model.root if model else None
    if setting == "off":
        subject.not_offered(
            "tokenizer", "it is off in the configuration: prompts are matched as text", REMEDY
        )
        return None
    if setting is not None:
        return Path(setting)
    folder = find_folder(root) if root else None
    if folder is None:
        named = root or subject.model
        cause = f"the engine's model {named!r} is no folder of this machine: prompts are matched as text"
        subject.not_offered("tokenizer", cause, REMEDY)
    return folder
