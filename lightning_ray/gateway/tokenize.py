"""Text to token ids, with a memory for what many conversations have in common.

The rollouts of a group, and of a run, share system prompts and tool descriptions of thousands of
tokens. Special tokens cut a rendered prompt into pieces that a tokenizer encodes independently of
each other, so the ids of a piece can be remembered.

Invariant: the ids are those of encoding the whole text. That pieces are independent is tried with a
tokenizer's own special tokens, and compared again on the first texts; where it does not hold,
nothing is remembered.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from typing import Any

import numpy as np

log = logging.getLogger("ray.serve")  # the only logger that Serve writes to the replica's file

# Characters remembered: some tens of megabytes with the ids.
MOST_CHARACTERS = 8_000_000
# What a piece costs beside its characters, in characters.
PIECE_CHARACTERS = 200
# Texts that are encoded both ways.
COMPARED = 32
_PROBES = (
    "words and words",
    " leading",
    "trailing ",
    "\n\nlines\n",
    "  two  spaces",
    "1.5 + x",
    "é",
)


class Tokenize:
    """Encodes without adding special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._pieces: OrderedDict[str, np.ndarray] = OrderedDict()
        self._characters, self._compared = 0, 0
        self._special = self._splitter()

    def __call__(self, text: str) -> np.ndarray:
        """The ids (int32) of `text`. Half of a surrogate pair, which JSON can escape and which is
        no character, is encoded as U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if self._special is None or not text:
            return self._encode(text)
        ids = np.concatenate([self._piece(piece) for piece in self._special.split(text) if piece])
        if self._compared < COMPARED:
            self._compared += 1
            whole = self._encode(text)
            if not np.array_equal(ids, whole):
                log.warning("this tokenizer's pieces depend on each other; encoding whole prompts")
                self._special = None
                return whole
        return ids

    def _piece(self, piece: str) -> np.ndarray:
        known = self._pieces.get(piece)
        if known is None:
            known = self._pieces[piece] = self._encode(piece)
            self._characters += len(piece) + PIECE_CHARACTERS
            while self._characters > MOST_CHARACTERS:
                forgotten, _ = self._pieces.popitem(last=False)
                self._characters -= len(forgotten) + PIECE_CHARACTERS
        else:
            self._pieces.move_to_end(piece)
        return known

    def _encode(self, text: str) -> np.ndarray:
        if self._backend is None:
            return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)
        # The same ids, without the offsets and masks that take as long again.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def _splitter(self) -> re.Pattern[str] | None:
        """Cuts before and after special tokens; None if pieces are not independent."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        special = sorted((t.content for t in added if t.special), key=len, reverse=True)
        if self._backend is None or not special:
            return None
        cut = re.compile(f"({'|'.join(map(re.escape, special))})")
        for token in special[:8]:
            for probe in _PROBES:
                whole = self._encode(f"{probe}{token}{probe}").tolist()
                piece = self._encode(probe).tolist()
                if whole != [*piece, *self._encode(token).tolist(), *piece]:
                    return None
        return cut
