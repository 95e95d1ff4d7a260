"""What the demo asks: six questions on one long document, then a chat of four turns.

The document comes first and the question last, so that all questions share the document as their
prefix. A chat's next prompt continues the very tokens of the turn before, answer included, so that
the blocks of what was generated are found again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTIONS = (
    "What did Ingrid Hallvard say when she handed over the keys?",
    "Which four programmes does the observatory have?",
    "What was the best seeing ever measured?",
    "What does a visit cost?",
    "When was the Great Storm, and how strong was the wind?",
    "When is the dome closed?",
)
CHAT = (
    "I am new here. What do I do if there is a fire?",
    "And how do we search when a person is missing?",
    "What if the power fails altogether?",
    "Thank you. And what do I do if I do not know what to do?",
)
CHAT_CHAPTER = "CHAPTER 12."
_INSTRUCTION = (
    "You answer questions about a handbook. Answer in one short sentence, with the words of the "
    "handbook."
)
_ANSWER = "@ANSWER@"


def document() -> str:
    """The document: an invented handbook of about 5,500 tokens, written for this demo."""
    return files("headstart.demo").joinpath("document.txt").read_text(encoding="utf-8").strip()


def chapter(heading: str) -> str:
    """The chapter of the document whose heading starts with `heading`."""
    start = document().index(heading)
    stop = document().find("\nCHAPTER ", start)
    return document()[start : None if stop < 0 else stop].strip()


def question_tokens(tokenizer: PreTrainedTokenizerBase, text: str, question: str) -> list[int]:
    """The prompt that asks one question about `text`, as token ids."""
    return _tokens(tokenizer, _template(tokenizer, [_user(f"{text}\n\nQuestion: {question}")]))


@dataclass(slots=True)
class Chat:
    """A conversation, kept as the tokens that the model saw and wrote."""

    tokenizer: PreTrainedTokenizerBase
    text: str
    """What the conversation is about; it is part of the first turn."""
    tokens: list[int] = field(default_factory=list)

    def ask(self, question: str) -> list[int]:
        """The prompt of the next turn: everything so far, and the question."""
        if not self.tokens:
            self.tokens = question_tokens(self.tokenizer, self.text, question)
        else:
            self.tokens = self.tokens + self._next_turn(question)
        return self.tokens

    def hear(self, answer: tuple[int, ...]) -> None:
        """Append the generated tokens of the answer to `ask()`'s prompt."""
        self.tokens = self.tokens + list(answer)

    def _next_turn(self, question: str) -> list[int]:
        """What the chat template puts between an answer and the next one."""
        messages = [_user("?"), {"role": "assistant", "content": _ANSWER}, _user(question)]
        turn = _template(self.tokenizer, messages).split(_ANSWER, 1)[1]
        end = self.tokenizer.eos_token
        # An answer that was not cut off brought the token that ends it.
        if end and self.tokens[-1] == self.tokenizer.eos_token_id:
            turn = turn.removeprefix(end)
        return _tokens(self.tokenizer, turn)


def prompts(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, list[int]]]:
    """Question and prompt of each of the six questions."""
    text = document()
    for question in QUESTIONS:
        yield question, question_tokens(tokenizer, text, question)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    instruction = {"role": "system", "content": _INSTRUCTION}
    return str(
        tokenizer.apply_chat_template(
            [instruction, *messages], tokenize=False, add_generation_prompt=True
        )
    )


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
