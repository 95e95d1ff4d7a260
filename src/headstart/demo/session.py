"""One run through all questions and the chat, in one process, over one store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.demo.questions import CHAT, CHAT_CHAPTER, QUESTIONS, Chat, chapter, prompts
from headstart.demo.results import Answer

if TYPE_CHECKING:
    from headstart.engines.transformers import CachedModel
    from headstart.store import PrefixStore

NUM_ANSWERS = len(QUESTIONS) + len(CHAT)
Progress = Callable[[str, int, int, str], None]
"""Called with (phase, steps done, steps in all, what is being done)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How every phase runs, so that phases differ in nothing but the store."""

    model_dir: Path
    block_size: int = 32
    max_new_tokens: int = 20


class Session:
    """A loaded model, ready to run phases."""

    def __init__(self, options: SessionOptions) -> None:
        """Imports torch and loads the model: seconds."""
        from headstart.engines.smollm2 import load_model

        self._options = options
        self._model, self._tokenizer = load_model(options.model_dir)

    @property
    def dtype(self) -> str:
        """The dtype of weights and KV."""
        return str(self._model.dtype).removeprefix("torch.")

    def engine(self, store: PrefixStore | None) -> CachedModel:
        """The model over a store, or over none."""
        from headstart.engines.transformers import CachedModel

        return CachedModel(self._model, self._tokenizer, store, block_size=self._options.block_size)

    def answers(self, engine: CachedModel) -> Iterator[Answer]:
        """Answer the six questions, then the four turns of the chat; `NUM_ANSWERS` in all."""
        for question, tokens in prompts(self._tokenizer):
            yield self._answer(engine, "question", question, tokens)
        chat = Chat(tokenizer=self._tokenizer, text=chapter(CHAT_CHAPTER))
        for question in CHAT:
            answer = self._answer(engine, "chat", question, chat.ask(question))
            chat.hear(answer.tokens)
            yield answer

    def _answer(self, engine: CachedModel, kind: str, question: str, tokens: list[int]) -> Answer:
        generation = engine.generate(tokens, max_new_tokens=self._options.max_new_tokens)
        common = {field.name for field in fields(Answer)} - {"kind", "question"}
        figures: dict[str, Any] = {name: getattr(generation, name) for name in common}
        return Answer(kind=kind, question=question, **figures)


def describe(index: int) -> str:
    """What answer `index` of a session is, for a progress display."""
    if index < len(QUESTIONS):
        return f"question {index + 1} of {len(QUESTIONS)}"
    return f"chat, turn {index + 1 - len(QUESTIONS)} of {len(CHAT)}"
