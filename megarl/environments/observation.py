"""What an environment says, as tokens that follow the model's turn: nothing that the model wrote is tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.environments.protocol import ROLES
from megarl.types import IntArray

CUT = " ..."
"""The mark at the end of an observation that was shortened."""

CHARACTERS_A_TOKEN = 32
"""Of a text that is much too long only so many are looked at, for each token that it may have."""

_USER, _ASSISTANT, _SAID = "a question", "an answer of megarl", "words of megarl"


class ObservationTokens:
    """From an observation to the tokens after the model's turn, up to where it may write again.

        ...<|im_start|>assistant\\n<calc>12*7</calc><|im_end|>         the model's own tokens, its stop token the last
        \\n<|im_start|>tool\\n84<|im_end|>\\n<|im_start|>assistant\\n    these

    With a chat template it is what the template puts after an assistant's message when the observation's follows, from
    behind the stop token on. Its special tokens are the template's: where the observation's own text spells one, a
    space goes behind that one's first character ("< |im_end|>"), so that no tool's words end a turn or begin another.
    Without a template it is the observation's text as it is.
    """

    def __init__(self, tokenizer: Any, apply_chat_template: bool, stop_token_ids: Sequence[int]) -> None:
        """
        Args:
            tokenizer: a Hugging Face tokenizer.
            apply_chat_template: False, or a tokenizer without a template: plain text.
            stop_token_ids: what ends the model's turn.

        Raises:
            ValueError: a chat template that takes no user message after an assistant's.
        """
        self._tokenizer = tokenizer
        self._stops = {int(token): str(tokenizer.convert_ids_to_tokens(int(token))) for token in stop_token_ids}
        self._roles: dict[str, str] = {}
        """The role by which the template is asked, by the one that the environment names."""
        self._ends: dict[str, str] = {}
        """What the template puts after an assistant's words, through the stop token; by role."""
        self._specials = _special_texts(tokenizer)
        self._is_plain = not apply_chat_template or not getattr(tokenizer, "chat_template", None)
        if not self._is_plain:
            self._learn_template()
        self.least = max(len(self._encode(role, CUT)) for role in ROLES)
        """Tokens of the shortest observation: what the template puts around it, and the mark of a cut."""

    def check_limit(self, max_tokens: int, key: str = "max_tokens") -> None:
        """Raises ValueError when an observation may not fit into so many tokens. key: what the user sets."""
        if max_tokens < self.least:
            raise ValueError(
                f"{key}: is {max_tokens}, but what the chat template puts around an observation takes {self.least} "
                f"tokens with nothing in it; raise it to {self.least + 32} or more"
            )

    def __call__(self, role: str, text: str, max_tokens: int | None = None) -> IntArray:
        """The tokens [R of it], at most max_tokens: a longer text loses its end and gets CUT instead.

        Args:
            role: one of protocol.ROLES.

        Raises:
            ValueError: max_tokens less than `least`.
        """
        if max_tokens is None:
            return np.asarray(self._encode(role, self._without_specials(text)), np.int64)
        self.check_limit(max_tokens)
        most = CHARACTERS_A_TOKEN * max_tokens
        text = self._without_specials(text[: most + 1])
        if len(text) <= most:
            whole = self._encode(role, text)
            if len(whole) <= max_tokens:
                return np.asarray(whole, np.int64)
        # The longest beginning that fits lies between `fits` and `too_long` characters.
        fits, too_long, found = 0, min(len(text), most) + 1, self._encode(role, CUT)
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            shorter = self._encode(role, text[:middle] + CUT)
            if len(shorter) <= max_tokens:
                fits, found = middle, shorter
            else:
                too_long = middle
        return np.asarray(found, np.int64)

    def _without_specials(self, text: str) -> str:
        """With a template: every special token that the text spells is broken by a space. Its beginnings have none
        either."""
        while not self._is_plain and (found := [special for special in self._specials if special in text]):
            for special in found:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        return text

    def _encode(self, role: str, text: str) -> list[int]:
        if self._is_plain:
            return self._ids(text)
        role = self._roles[role]
        after = self._after_answer(role, text)
        end = self._ends[role]
        if not end:
            return self._ids(after)
        assert after.startswith(end), f"the chat template ends an answer by {end!r}, and by {after[:40]!r}"
        # The stop token is tokenised with what follows it, for some tokens take the space around them, and left out.
        stop = next(text for text in self._stops.values() if end.endswith(text))
        ids = self._ids(stop + after[len(end) :])
        return ids[next(i for i, token in enumerate(ids) if token in self._stops) + 1 :]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _after_answer(self, role: str, text: str) -> str:
        """What the template puts behind an assistant's words when this message follows."""
        messages = [
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": _ASSISTANT},
            {"role": role, "content": text},
        ]
        rendered: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, found, after = rendered.partition(_ASSISTANT)
        if not found:
            raise ValueError("the chat template leaves an assistant's words out")
        return after

    def _learn_template(self) -> None:
        for role in ("user", *(role for role in ROLES if role != "user")):
            try:
                after = self._after_answer(role, _SAID)
                if _SAID not in after:
                    raise ValueError(f"the chat template leaves out what a {role} says after an assistant")
            except Exception as error:  # a template's own, of any kind
                if role == "user":
                    raise ValueError(
                        f"environment.function: the tokenizer's chat template takes no user message after an "
                        f"assistant's, so that nothing can be told to the model ({error}); set "
                        f"data.apply_chat_template=false, or use another tokenizer (model.tokenizer_path)"
                    ) from error
                self._roles[role] = "user"
            else:
                self._roles[role] = role
                self._ends[role] = self._end(after[: after.index(_SAID)])

    def _end(self, between: str) -> str:
        """The part of what lies between an answer and an observation that goes through the first stop token; "" without
        one."""
        known = [text for token, text in self._stops.items() if self._ids(text) == [token]]
        ends = [between.index(text) + len(text) for text in known if text in between]
        return between[: min(ends)] if ends else ""


def _special_texts(tokenizer: Any) -> list[str]:
    """What the tokenizer turns into special tokens, without white space around it; those that a space can break."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({text.strip() for text in (*added, *tokenizer.all_special_tokens) if len(text.strip()) > 1})
