"""What the demo asks, without a model."""

from __future__ import annotations

import pytest

from headstart.demo.questions import CHAT, CHAT_CHAPTER, QUESTIONS, chapter, document


def test_the_document_is_long_and_plain():
    text = document()
    assert 3_500 < len(text.split()) < 6_000
    assert text.isascii()
    assert len(set(text.split("\n\n"))) == len(text.split("\n\n"))


def test_there_are_six_questions_and_four_turns():
    assert len(QUESTIONS) == 6
    assert len(CHAT) == 4


def test_chapters_are_found():
    assert chapter(CHAT_CHAPTER).startswith(CHAT_CHAPTER)
    assert "CHAPTER 13." not in chapter(CHAT_CHAPTER)
    assert chapter("CHAPTER 13.").endswith(document()[-40:])


def test_an_unknown_chapter_is_an_error():
    with pytest.raises(ValueError):
        chapter("CHAPTER 99.")
