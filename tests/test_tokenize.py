"""Ids of remembered pieces are the ids of the whole text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from lightning_ray.gateway import tokenize
from lightning_ray.gateway.tokenize import Tokenize

SPECIAL = ["<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog, 12 times\n" * 20,
    "def f(x):\n    return x + 1\n",
]


def make(kind: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    specials: list[str | AddedToken] = list(SPECIAL)
    if kind == "metaspace":  # Llama 2's: a space goes before the first piece only
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    elif kind == "strips":  # a special token that swallows the spaces after it
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        specials[1] = AddedToken(SPECIAL[1], special=True, rstrip=True)
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.normalizer = normalizers.NFC() if kind == "nfc" else None
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=specials)


TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, " ", "\n", "the quick brown fox " * 20]), st.text(max_size=20)
    )
).map("".join)


@pytest.mark.parametrize("kind", ["bytes", "nfc", "metaspace", "strips"])
def test_pieces_give_the_ids_of_the_whole(kind: str, monkeypatch) -> None:
    monkeypatch.setattr(tokenize, "COMPARED", 0)  # only what the probes found
    tokenizer = make(kind)
    encode = Tokenize(tokenizer)

    @settings(max_examples=150, deadline=None)
    @given(TEXTS)
    def agree(text: str) -> None:
        expected = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert encode(text).tolist() == encode(text).tolist() == expected

    agree()
    assert (encode._special is None) == (kind in ("metaspace", "strips"))


def test_a_tokenizer_whose_pieces_depend_on_each_other_is_found_out() -> None:
    encode = Tokenize(make("bytes"))
    right = encode._encode
    encode._encode = lambda text: right(text) if SPECIAL[0] in text else right(text)[:-1]
    text = f"{SPECIAL[0]}{'the quick brown fox ' * 20}"
    assert np.array_equal(encode(text), right(text))
    assert encode._special is None


def test_the_memory_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(tokenize, "MOST_CHARACTERS", 1000)
    encode = Tokenize(make("bytes"))
    for number in range(50):
        encode(f"{SPECIAL[0]}{number}{'the quick brown fox ' * 15}")
        assert sum(len(piece) + 200 for piece in encode._pieces) <= 1000
    assert len(encode("")) == 0
