"""Conversion of a conversation to token ids and a mask of its answers.

The tokenizer's own chat template decides. If the template marks answers (``{% generation %}``),
these marks are used. Otherwise, prefixes of the conversation are rendered::

    rendered in full     <user>What?<end><assistant>This.<end><user>And?<end><assistant>That.<end>
    up to the question   <user>What?<end><assistant>                                                  with the generation prompt
    up to the answer     <user>What?<end><assistant>This.<end>

The difference between the two prefixes is the answer with its end marker. The result is exact, or
the conversation is refused: some templates render a prefix differently from the beginning of
the full conversation (for example because they omit the thoughts of earlier answers).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from lightning_ptdp.base.time_limit import time_limit
from lightning_ptdp.base.untrusted import read_bytes
from lightning_ptdp.data.conversations import Conversation, FaultyRow, texts_of
from lightning_ptdp.data.data_error import TokenizerError, reading
from lightning_ptdp.data.huggingface_tokenizer import HuggingFaceTokenizer
from lightning_ptdp.data.token_store import LearnedTokens

Learn: TypeAlias = Literal["answers", "last_answer"]

LIMIT_S = 10.0
"""Time limit for a template to render one conversation, which normally takes milliseconds."""
_ENDLESS = "Use another template (chat_template: a file)"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = (
    "Use a template that marks its answers with {% generation %} (chat_template: a file), or "
    "learn: last_answer"
)


class ChatFormat:
    """Conversion of conversations to tokens with a tokenizer's chat template.

    Args:
        tokenizer: Tokenizer, whose chat template is used unless ``template`` is given.
        template: File with a template that replaces the tokenizer's.
        learn: Learn every answer, or only the last one of each conversation.

    Raises:
        TokenizerError: There is no template, the template computes a power, or the tokenizer cannot
            report the positions of its tokens in a text.
    """

    reads_marks: ClassVar[bool] = True
    """Use the marks of a template, where it has them."""

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        *,
        template: str | None = None,
        learn: Learn = "answers",
    ) -> None:
        self._tokenizer: Any = tokenizer.of_transformers
        self._processor: Any = tokenizer
        self._learn = learn
        if template is not None:
            self.template = read_template(template)
        elif isinstance(tokenizer.chat_template, str):
            self.template = tokenizer.chat_template
        else:
            raise TokenizerError(
                f"the tokenizer of {tokenizer.folder} has no chat template. Give a file with "
                "one (chat_template: file.jinja)"
            )
        if not self._tokenizer.is_fast:
            raise TokenizerError(
                f"the tokenizer of {tokenizer.folder} is a slow one, which does not report the "
                "positions of tokens in a text"
            )
        _check_powers(self.template, tokenizer.folder if template is None else template)
        added = self._tokenizer.added_tokens_decoder.items()
        self._special = np.array([index for index, token in added if token.special], np.int64)

    def encode(self, conversation: Conversation) -> LearnedTokens:
        """Return the ids of ``apply_chat_template`` (int64) and a mask of learned tokens (bool).

        Raises:
            FaultyRow: The template rejects the conversation, or the conversation has nothing to
                learn.
            TokenizerError: The template takes too long.
        """
        text = self._render(conversation)
        _check_rendered(conversation, text)
        ids, learned = (
            self._marked(conversation)
            if self.reads_marks and _MARKED.search(self.template)
            else self._compared(conversation, text)
        )
        if not learned[1:].any():
            raise FaultyRow("there is nothing to learn: the chat template marks no answer")
        return ids, learned

    def _marked(self, conversation: Conversation) -> LearnedTokens:
        quiet = {"verbose": False}  # No warnings about long texts: the data module checks lengths.
        encoding = self._apply(
            conversation,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs=quiet,
        )
        learned = np.array(encoding["assistant_masks"], bool)
        starts = np.flatnonzero(np.diff(learned.astype(np.int8), prepend=0) == 1)
        if self._learn == "last_answer" and len(starts):
            learned[: starts[-1]] = False
        return np.array(encoding["input_ids"], np.int64), learned

    def _compared(self, conversation: Conversation, text: str) -> LearnedTokens:
        return self._masked(text, self._answers(conversation, text))

    def _masked(
        self, text: str, answers: Iterable[tuple[int, int]], *, add_special_tokens: bool = False
    ) -> LearnedTokens:
        """Return the ids of a text, and a mask of the tokens in its answers."""
        encoding = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids = np.array(encoding["input_ids"], np.int64)
        offsets = np.array(encoding["offset_mapping"], np.int64).reshape(-1, 2)
        learned = np.zeros(len(ids), bool)
        for start, stop in answers:
            # A token that begins before the answer and reaches into it must be generated by the
            # model too.
            inside = (offsets[:, 1] > start) & (offsets[:, 0] < stop)
            special = np.flatnonzero(inside & np.isin(ids, self._special))
            if len(special) and not text[offsets[special[-1], 1] : stop].strip():
                # Text after the end marker of an answer (a newline) is not generated.
                inside[special[-1] + 1 :] = False
            learned |= inside
        return ids, learned

    def _answers(self, conversation: Conversation, text: str) -> list[tuple[int, int]]:
        """Return begin and end of every answer in the text."""
        answers = [
            number for number, message in enumerate(conversation) if message["role"] == "assistant"
        ]
        remedy = _REMEDY if self.reads_marks else "Use learn: last_answer, or another template"
        spans = []
        for number in answers[-1:] if self._learn == "last_answer" else answers:
            if number == 0:
                raise FaultyRow(
                    "it begins with an answer. Add a question before it, or remove the answer"
                )
            before = self._render(conversation[:number], add_generation_prompt=True)
            after = (
                text
                if number + 1 == len(conversation)
                else self._render(conversation[: number + 1])
            )
            for part, prefix in (("up to its question", before), ("up to it", after)):
                if not text.startswith(prefix):
                    raise FaultyRow(
                        f"the chat template renders the conversation {part} differently on its own "
                        "than as the beginning of the whole conversation, so the position of "
                        f"answer {number + 1} of {len(conversation)} messages is unknown. {remedy}"
                    )
            spans.append((len(before), len(after)))
        return spans

    def _render(self, conversation: Conversation, **options: Any) -> str:
        return str(self._apply(conversation, tokenize=False, **options))

    def _apply(self, conversation: Conversation, **options: Any) -> Any:
        try:
            with time_limit(LIMIT_S):
                return self._tokenizer.apply_chat_template(
                    conversation, chat_template=self.template, **options
                )
        except TimeoutError as error:
            raise TokenizerError(
                f"the chat template did not finish ({error}) for one conversation. {_ENDLESS}"
            ) from error
        except Exception as error:  # a template is a program and can raise anything
            roles = ", ".join(str(message["role"]) for message in conversation)
            raise FaultyRow(
                f"the chat template failed (roles {roles}): {str(error) or type(error).__name__}"
            ) from error


def read_template(path: str) -> str:
    """Return the Jinja template in a file.

    Raises:
        TokenizerError: The file cannot be read.
    """
    with reading(f"chat_template={path}", TokenizerError, "give a file with a Jinja template"):
        return read_bytes(Path(path)).decode()


def _check_powers(template: str, source: str | Path) -> None:
    """Refuse templates with ``**``.

    One power can take hours in a call that no time limit interrupts. Chat templates do not need it.
    """
    import jinja2

    with contextlib.suppress(jinja2.TemplateSyntaxError):  # reported when it is rendered
        tokens = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).lex(template)
        if any(kind == "operator" and value == "**" for _, kind, value in tokens):
            raise TokenizerError(
                f"the chat template of {source} computes a power (**), which "
                f"may take very long. {_ENDLESS}"
            )


def _check_rendered(conversation: Conversation, text: str) -> None:
    for message in conversation:
        texts = texts_of(message.get("content"))
        if message["role"] != "assistant" and any(part.strip() not in text for part in texts):
            raise FaultyRow(
                f"the chat template leaves out messages of the role {message['role']!r}. Use "
                "roles that it supports"
            )
