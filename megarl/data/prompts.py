"""From data files to tokenised prompts, and a cursor over them that can be saved.

A file has one row a prompt, in the form that verl's users know:

    {"data_source": "openai/gsm8k",
     "prompt": [{"role": "user", "content": "3+5="}],
     "ability": "math",
     "reward_model": {"style": "rule", "ground_truth": "8"},
     "extra_info": {"index": 17}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.types import IntArray, Prompt, plain_text

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")
COLUMNS = (*REQUIRED_COLUMNS, "ability", "extra_info")

Overlong = Literal["drop", "truncate_left", "truncate_right", "error"]

TOKENIZE_BATCH = 1024
"""Rows that are tokenised at once: what bounds the memory of the tokenizer's lists."""


@dataclass(frozen=True)
class Row:
    """One row of a data file. Row("openai/gsm8k", [{"role": "user", "content": "3+5="}], "8")"""

    data_source: str
    prompt: str | list[dict[str, str]]
    """Chat messages; or a plain string, which the model sees exactly as it is, without a chat template."""
    ground_truth: str
    ability: str = ""
    style: str = "rule"
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The row in the form of the files."""
        return {
            "data_source": self.data_source,
            "prompt": self.prompt,
            "ability": self.ability,
            "reward_model": {"ground_truth": self.ground_truth, "style": self.style},
            "extra_info": dict(self.extra_info),
        }


def load_rows(paths: Sequence[str | os.PathLike[str]]) -> list[Row]:
    """Read .parquet, .json (a list of objects) and .jsonl (an object a line) files, one after another.

    Columns: data_source, prompt (chat messages or a string), reward_model {ground_truth, style}; optional: ability and
    extra_info. Other columns are ignored. A ground_truth that is no string becomes one: a number by str(), a list or an
    object by JSON.

    Raises ValueError that names the file, and the row or line, when a file is missing or of another kind, a column is
    missing, or a row is not in this form."""
    rows: list[Row] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise ValueError(f"no file {path}; check data.train and data.validation")
        reader = _READERS.get(path.suffix)
        if reader is None:
            raise ValueError(f"{path}: is not one of {', '.join(_READERS)}; convert it with tools/prepare_jsonl.py")
        rows += [_to_row(value, f"{path}, {place}") for place, value in reader(path)]
    return rows


def write_rows(path: str | os.PathLike[str], rows: Sequence[Row]) -> Path:
    """Write rows to a parquet file that `load_rows` reads back; makes the folder and gives the path.

    The keys of extra_info are one set for the file: a row without a key has None there when it is read back.

    Raises ValueError without rows, or when a column mixes types (prompts that are strings with prompts that are
    messages)."""
    if not rows:
        raise ValueError(f"no rows to write to {path}")
    values = [row.to_dict() for row in rows]
    if not any(row.extra_info for row in rows):
        for value in values:
            del value["extra_info"]  # parquet has no empty objects
    try:
        table = pa.Table.from_pylist(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"{path}: a column mixes types ({error}); make them one type") from error
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: is no parquet file ({error})") from error
    with file:
        there = file.schema_arrow.names
        _check_columns(there, str(path))
        number = 0
        for batch in file.iter_batches(columns=[name for name in COLUMNS if name in there]):
            for value in batch.to_pylist():
                yield f"row {number}", value
                number += 1


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not valid JSON ({error}); one object a line is .jsonl") from error
    if not isinstance(values, list):
        raise ValueError(f"{path}: holds a {type(values).__name__}; it must be a list of objects")
    for number, value in enumerate(values):
        yield f"row {number}", value


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: is not valid JSON ({error})") from error


_READERS = {".parquet": _read_parquet, ".json": _read_json, ".jsonl": _read_jsonl}


def _check_columns(there: Sequence[str], where: str) -> None:
    missing = [name for name in REQUIRED_COLUMNS if name not in there]
    if missing:
        raise ValueError(
            f"{where}: has no column {', '.join(missing)}; there are {', '.join(there) or 'none'}. Required are "
            f"{', '.join(REQUIRED_COLUMNS)}; tools/prepare_jsonl.py renames fields"
        )


def _to_row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: is a {type(value).__name__}; a row must be an object with {', '.join(COLUMNS)}")
    _check_columns(list(value), where)
    if not isinstance(value["data_source"], str):
        raise ValueError(f"{where}: data_source is {_short(value['data_source'])}; it must be a string")
    reward_model = value["reward_model"]
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise ValueError(f"{where}: reward_model is {_short(reward_model)}; it must be an object with a ground_truth")
    extra_info = value.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise ValueError(f"{where}: extra_info is {_short(extra_info)}; it must be an object")
    return Row(
        data_source=value["data_source"],
        prompt=_to_prompt(value["prompt"], where),
        ground_truth=_to_text(reward_model["ground_truth"]),
        ability=value.get("ability") or "",
        style=reward_model.get("style") or "rule",
        extra_info=extra_info or {},
    )


def _to_prompt(prompt: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(
            f"{where}: prompt is {_short(prompt)}; it must be a string or a list of messages "
            f"[{{'role': 'user', 'content': '...'}}]"
        )
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(
                f"{where}: message {number} of the prompt is {_short(message)}; it must have the strings role and "
                f"content"
            )
    return prompt


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict, bool)) else str(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class PromptSet:
    """Tokenised prompts, in the order of their rows. Their uids are "<uid_prefix><row>"."""

    prompts: tuple[Prompt, ...]
    num_dropped: int = 0
    """Rows left out because they were longer than max_prompt_length."""
    num_truncated: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def build(
        cls,
        rows: Sequence[Row],
        tokenizer: Any,
        max_prompt_length: int,
        overlong: Overlong = "drop",
        apply_chat_template: bool = True,
        uid_prefix: str = "",
        keeps_content: bool = False,
    ) -> PromptSet:
        """Tokenise rows with a Hugging Face tokenizer, a batch at a time.

        Chat messages go through the tokenizer's chat template, with the tokens that open the answer
        (add_generation_prompt); with apply_chat_template=False their contents, a line each, are tokenised as plain
        text. A prompt that is a string is always plain text. Plain text gets the special tokens that the tokenizer adds
        by itself (such as BOS); templates hold their own.

        Prompts of more than `max_prompt_length` tokens: "drop" leaves them out, "truncate_left" keeps the last tokens,
        "truncate_right" the first, "error" raises. The row in a uid is the index in `rows`, dropped ones counted;
        uid_prefix is "v-" for validation. keeps_content: the prompts hold what was tokenised too, whole (for a reward
        model, which has a tokenizer of its own).

        Raises ValueError when messages meet a tokenizer without chat template, a prompt has no tokens, a prompt is
        overlong under "error", `overlong` is none of these words, or no prompt is left."""
        if overlong not in ("drop", "truncate_left", "truncate_right", "error"):
            raise ValueError(
                f"overlong_prompts is {overlong!r}; it must be drop, truncate_left, truncate_right or error"
            )
        if max_prompt_length < 1:
            raise ValueError(f"max_prompt_length is {max_prompt_length}; it must be at least 1")
        prompts: list[Prompt] = []
        num_dropped = num_truncated = 0
        for number, token_ids in enumerate(_tokenize(rows, tokenizer, apply_chat_template)):
            length = len(token_ids)
            if not length:
                raise ValueError(f"prompt {number} ({_short(rows[number].prompt)}) has no tokens; remove the row")
            if length > max_prompt_length:
                if overlong == "error":
                    raise ValueError(
                        f"prompt {number} has {length} tokens, more than data.max_prompt_length = {max_prompt_length}; "
                        f"raise it to {length} or more, or set data.overlong_prompts to drop, truncate_left or "
                        f"truncate_right"
                    )
                if overlong == "drop":
                    num_dropped += 1
                    continue
                num_truncated += 1
                kept = token_ids[-max_prompt_length:] if overlong == "truncate_left" else token_ids[:max_prompt_length]
                token_ids = kept.copy()
            row = rows[number]
            content = row.prompt if keeps_content else ""
            prompts.append(
                Prompt(f"{uid_prefix}{number}", token_ids, row.data_source, row.ground_truth, row.extra_info, content)
            )
        if not prompts:
            raise ValueError(
                f"no prompt is left of {len(rows)} rows: {num_dropped} have more than data.max_prompt_length = "
                f"{max_prompt_length} tokens; raise it, or check the data files"
            )
        return cls(tuple(prompts), num_dropped, num_truncated)


def _tokenize(rows: Sequence[Row], tokenizer: Any, apply_chat_template: bool) -> Iterator[IntArray]:
    """The token ids of each row, in order."""
    if apply_chat_template and not getattr(tokenizer, "chat_template", None):
        for number, row in enumerate(rows):
            if not isinstance(row.prompt, str):
                raise ValueError(
                    f"prompt {number} is chat messages, but the tokenizer ({getattr(tokenizer, 'name_or_path', '')!r}) "
                    f"has no chat template; use the tokenizer of an instruct model (model.tokenizer_path), or set "
                    f"data.apply_chat_template=false to give the model the messages' contents as plain text"
                )
    for start in range(0, len(rows), TOKENIZE_BATCH):
        batch = rows[start : start + TOKENIZE_BATCH]
        result: list[IntArray] = [np.empty(0, np.int64)] * len(batch)
        chats = [i for i, row in enumerate(batch) if apply_chat_template and not isinstance(row.prompt, str)]
        plain = [i for i, row in enumerate(batch) if not apply_chat_template or isinstance(row.prompt, str)]
        texts = {i: plain_text(batch[i].prompt) for i in plain}
        if chats:
            rendered = tokenizer.apply_chat_template(
                [batch[i].prompt for i in chats], tokenize=False, add_generation_prompt=True
            )
            texts.update(zip(chats, rendered, strict=True))
        for indices, add_special_tokens in ((chats, False), (plain, True)):
            if indices:
                ids = tokenizer([texts[i] for i in indices], add_special_tokens=add_special_tokens)["input_ids"]
                for i, token_ids in zip(indices, ids, strict=True):
                    result[i] = np.asarray(token_ids, np.int64)
        yield from result


Curriculum = Callable[[int, Sequence[Prompt]], Sequence[int]]
"""Gives, of an epoch's number from 0 and all prompts, the numbers of those that the epoch has, in their order. The same
arguments must give the same numbers: a resumed run asks again."""


class PromptStream:
    """An endless walk over a prompt set, the same for the same seed, that can be stopped and taken up anywhere.

    Every epoch has its own permutation, computed from (seed, epoch) alone. Batches never straddle epochs: what is left
    when fewer than `prompts_per_step` prompts remain is left out of that epoch (as verl's drop_last does), another part
    in each epoch when shuffled. Without `shuffle` every epoch is in row order. A curriculum gives each epoch's rows and
    their order instead.

    Prompts get the uid "<epoch>-<uid in the set>", "2-17" for row 17 in the third epoch. Those that are given back come
    first next time.

    Raises ValueError when the set holds fewer than `prompts_per_step` prompts.
    """

    def __init__(
        self,
        prompt_set: PromptSet,
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> None:
        if prompts_per_step < 1:
            raise ValueError(f"data.prompts_per_step is {prompts_per_step}; it must be at least 1")
        if len(prompt_set) < prompts_per_step:
            raise ValueError(
                f"the training set has {len(prompt_set)} prompts ({prompt_set.num_dropped} more were dropped as "
                f"overlong), fewer than data.prompts_per_step = {prompts_per_step}; lower it to {len(prompt_set)} or "
                f"less, or add data"
            )
        if seed < 0:
            raise ValueError(f"run.seed is {seed}; it must not be negative")
        self._prompts = prompt_set.prompts
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._curriculum = curriculum
        self._epoch = 0
        self._position = 0
        self._order = self._permutation(0)
        self._returned: list[Prompt] = []

    @property
    def steps_per_epoch(self) -> int:
        return len(self._prompts) // self._prompts_per_step

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._normalised()[0]

    def next(self, count: int | None = None) -> list[Prompt]:
        """The next prompts, `prompts_per_step` unless told otherwise; moves the cursor."""
        count = self._prompts_per_step if count is None else count
        taken, self._returned = self._returned[:count], self._returned[count:]
        while missing := count - len(taken):
            epoch, position = self._normalised(min(missing, len(self._order)))
            if epoch != self._epoch:
                self._order = self._permutation(epoch)
            rows = self._order[position : position + missing]
            self._epoch, self._position = epoch, position + len(rows)
            taken += [replace(self._prompts[row], uid=f"{epoch}-{self._prompts[row].uid}") for row in rows]
        return taken

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Give prompts back that were taken and not used; they come before all others."""
        self._returned = [*prompts, *self._returned]

    def state_dict(self) -> dict[str, Any]:
        """The cursor: where the next batch starts, and what it is a cursor over. JSON-able; reading it moves nothing.

        {"epoch": 2, "position": 512, "returned": ["2-17"], "num_prompts": 7473, "seed": 1, "shuffle": True,
        "curriculum": None}; position counts prompts, returned has the uids of those that come first.
        """
        epoch, position = self._normalised()
        return {
            "epoch": epoch,
            "position": position,
            "returned": [prompt.uid for prompt in self._returned],
            "num_prompts": len(self._prompts),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "curriculum": self._curriculum
            and getattr(self._curriculum, "__qualname__", type(self._curriculum).__name__),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved cursor. `prompts_per_step` may have changed since: position counts prompts.

        Raises ValueError when the cursor is over another number of prompts, or of another seed or order.
        """
        own = self.state_dict()
        for name, key in (
            ("num_prompts", "data.train"),
            ("seed", "run.seed"),
            ("shuffle", "data.shuffle"),
            ("curriculum", "data.curriculum"),
        ):
            if state.get(name) != own[name]:
                raise ValueError(
                    f"the saved data cursor has {name} = {state.get(name)}, but this run has {own[name]}: the order of "
                    f"prompts would differ; resume with the {key} that the run began with, or start a new run"
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        order = self._permutation(max(epoch, 0))
        if epoch < 0 or not 0 <= position <= len(order):
            raise ValueError(
                f"the saved data cursor is at epoch {epoch}, prompt {position} of {len(order)}; the file is damaged, "
                f"or data.curriculum gives that epoch fewer prompts than it did"
            )
        by_uid = {prompt.uid: prompt for prompt in self._prompts}
        returned = [str(uid) for uid in state.get("returned", ())]
        unknown = [uid for uid in returned if uid.partition("-")[2] not in by_uid]
        if unknown:
            raise ValueError(
                f"the saved data cursor has prompt {unknown[0]} to ask again, but data.train has no such row; resume "
                f"with the data that the run began with, or start a new run"
            )
        self._returned = [replace(by_uid[uid.partition("-")[2]], uid=uid) for uid in returned]
        self._epoch, self._position, self._order = epoch, position, order

    def _normalised(self, count: int | None = None) -> tuple[int, int]:
        """(epoch, position) of the next prompts: the next epoch's start when fewer than `count` are left in this one;
        by default, fewer than the next step needs besides those that were given back."""
        if count is None:
            count = max(self._prompts_per_step - len(self._returned), 1)
        if self._position + count > len(self._order):
            return self._epoch + 1, 0
        return self._epoch, self._position

    def _permutation(self, epoch: int) -> IntArray:
        size = len(self._prompts)
        if self._curriculum is not None:
            try:
                rows = self._curriculum(epoch, self._prompts)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(f"data.curriculum: failed for epoch {epoch}: {reason}") from error
            return self._checked(epoch, rows)
        if not self._shuffle:
            return np.arange(size, dtype=np.int64)
        return np.random.default_rng([self._seed, epoch]).permutation(size).astype(np.int64)

    def _checked(self, epoch: int, rows: Sequence[int]) -> IntArray:
        """A curriculum's epoch.

        Raises ValueError when it has too few prompts for a step, one that is not there, or one twice."""
        order, size = np.asarray(rows), len(self._prompts)
        if order.ndim != 1 or not np.issubdtype(order.dtype, np.integer):
            raise ValueError(f"data.curriculum: epoch {epoch} is no list of whole numbers")
        if len(order) < self._prompts_per_step:
            raise ValueError(
                f"data.curriculum: epoch {epoch} has {len(order)} prompts, fewer than data.prompts_per_step = "
                f"{self._prompts_per_step}"
            )
        if order.min() < 0 or order.max() >= size or len(np.unique(order)) < len(order):
            raise ValueError(
                f"data.curriculum: epoch {epoch} must have each of the prompts 0 to {size - 1} at most once, but has "
                f"{order.min()} to {order.max()}, {len(np.unique(order))} different ones of {len(order)}"
            )
        return order.astype(np.int64)
