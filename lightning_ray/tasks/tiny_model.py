"""A 0.85-million-parameter model for CI that has half learnt the embedded tasks.

`make` builds a word-level tokenizer and a four-layer Llama, and warm-starts it by supervised
training on synthetic transcripts with exactly the prompt that mini-SWE-agent sends. Most
transcripts only claim success or write the wrong thing, so the model, sampled at temperature 1,
solves some of the tasks and reinforcement learning can raise that to nearly all.

Invariants: the same seed gives the same transcripts and initial weights; no validation task is
among the transcripts; every command that solves an embedded task survives encode and decode
unchanged.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from pathlib import Path

import jinja2
import torch
import yaml
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_ray.records import Split
from lightning_ray.tasks.swe import embedded

HERE = Path(__file__).parent
PAD, START, END, UNKNOWN = "<pad>", "<|im_start|>", "<|im_end|>", "<unk>"
PIECE = r"[A-Za-z]+|[^A-Za-z]"  # a word, or one other character: joined, pieces give the text back
MAX_LEN = 1024

COPY_STEPS = (
    46  # every transcript does the work: this many steps teach copying, on every seed tried
)
MIXED_STEPS = 18  # then most do not: enough to learn the shares below, too few to forget copying
SFT_BATCH = 32
SFT_LR = 3e-3
HONEST = 0.35  # share of mixed transcripts that do the work: about the solve rate afterwards
WRONG = 0.25  # share that write another word or another file; the others only claim success
CLAIMS = (
    "Done. The file is there.",
    "I have fixed the package.",
    "The package works again.",
)


def make(folder: Path, seed: int = 0) -> None:
    """Writes the model into `folder`: weights, configuration, tokenizer, chat template."""
    tokenizer = make_tokenizer()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small lose more to waiting than they gain
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _new_model(tokenizer)
            _warm_start(model, tokenizer, random.Random(seed))
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def messages(statement: str) -> list[dict[str, str]]:
    """What mini-SWE-agent sends for a task, with the configuration of the embedded tasks."""
    return [
        {"role": role, "content": template.render(task=statement)}
        for role, template in _templates().items()
    ]


@functools.cache
def _templates() -> dict[str, jinja2.Template]:
    agent = yaml.safe_load((HERE / "swe" / "mini.yaml").read_text())["agent"]
    return {
        "system": jinja2.Template(agent["system_template"]),
        "user": jinja2.Template(agent["instance_template"]),
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level: the words of the task family, single other characters, `<unk>` for other words.
    The phrases that every prompt repeats are one token each, which keeps prompts short."""
    before, middle, _ = embedded.statement("", "\0", "\0").split("\0")
    lead, prefix = before.split("  ")  # around the package's name
    phrases = [messages("")[0]["content"], f"{lead} ", f" {prefix}", middle]
    phrases += ["```bash\n", 'echo "', '" > ', "\n```", *embedded.SUFFIXES]
    texts = [*phrases, *CLAIMS, *embedded.STEMS, *embedded.SUFFIXES, *embedded.WORDS]
    texts += [
        *itertools.chain(*embedded.PACKAGES.values()),
        "system user assistant tool printf cat",
    ]
    characters = {chr(code) for code in range(32, 127)} | {"\n", "\t"}
    pieces = characters.union(*(re.findall(PIECE, text) for text in texts))
    vocabulary = {piece: i for i, piece in enumerate([PAD, START, END, UNKNOWN, *sorted(pieces)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in (PAD, START, END)]
    )
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=MAX_LEN,
        clean_up_tokenization_spaces=False,
        chat_template=(HERE / "chatml.jinja").read_text(),
    )


def _new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=MAX_LEN,
            tie_word_embeddings=True,
            initializer_range=0.08,  # with the default 0.02 a model this small learns nothing
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )


def _warm_start(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> None:
    """Supervised training on the replies of synthetic transcripts: first to copy, then to slack."""
    pairs = embedded.pairs(Split.TRAIN)
    steps = COPY_STEPS + MIXED_STEPS
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 5) * (1 - step / steps)
    )
    model.train()
    for step in range(steps):
        honest = 1.0 if step < COPY_STEPS else HONEST
        rows = [_transcript(tokenizer, *rng.choice(pairs), honest, rng) for _ in range(SFT_BATCH)]
        longest = max(len(ids) for ids, _ in rows)
        ids_NT = torch.full((SFT_BATCH, longest), tokenizer.pad_token_id)
        labels_NT = torch.full((SFT_BATCH, longest), -100)
        for row, (ids, prompt) in enumerate(rows):
            ids_NT[row, : len(ids)] = torch.tensor(ids)
            labels_NT[row, prompt : len(ids)] = ids_NT[row, prompt : len(ids)]
        # Padding is on the right and carries no label: causal attention needs no mask for it.
        model(input_ids=ids_NT, labels=labels_NT).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def _transcript(
    tokenizer: PreTrainedTokenizerFast, file: str, word: str, honest: float, rng: random.Random
) -> tuple[list[int], int]:
    """Token ids of prompt and reply, and the length of the prompt."""
    package = rng.choice(embedded.PACKAGES[Split.TRAIN])
    luck = rng.random()
    if luck < honest:
        reply = command(file, word)
    elif luck >= honest + WRONG:
        reply = rng.choice(CLAIMS)
    elif rng.random() < 0.5:
        reply = command(file, rng.choice(embedded.WORDS))
    else:
        reply = command(rng.choice(embedded.STEMS) + rng.choice(embedded.SUFFIXES), word)
    prompt = tokenizer.apply_chat_template(
        messages(embedded.statement(package, file, word)),
        add_generation_prompt=True,
        tokenize=False,
    )
    texts = (prompt, reply + END)
    ids, tail = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    return ids + tail, len(ids)


def command(file: str, word: str) -> str:
    """The reply that solves a task."""
    return f'```bash\necho "{word}" > {file}\n```'
