"""Text to tokens and back: chat template, tokenizer, tool-call and reasoning parsers.

The parsers are vLLM's own classes. `render` tokenises a whole conversation as `vllm serve` does;
`extend` keeps the tokens of a sampled turn and tokenises only what came after it.

Invariants: what `render` and `extend` return is exactly what the engine sees; `extend` returns the
earlier prompt and sample unchanged at its beginning, or nothing; `parse` never loses text: what is
no tool call or reasoning comes back as content.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ray.config import ModelSection
from lightning_ray.gateway.dialects import PARTS, ChatRequest
from lightning_ray.gateway.errors import ApiError
from lightning_ray.gateway.tokenize import Tokenize
from lightning_ray.records import Call, FinishReason, ToolCall, Turn

log = logging.getLogger("ray.serve")  # the only logger that Serve writes to the replica's file

# Stands for the words of an assistant in a template, to see what the template puts after them.
_WORDS = "lightning ray words"


class Renderer:
    """The text side of one model.

    Raises:
        TypeError: vLLM knows no such tool or reasoning parser.
    """

    def __init__(self, model_dir: str, model: ModelSection) -> None:
        from transformers import AutoTokenizer, GenerationConfig
        from vllm.parser.parser_manager import ParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer

        # Parsers ask for the vocabulary in every call, which takes longer than all the rest.
        self.tokenizer: Any = get_cached_tokenizer(
            AutoTokenizer.from_pretrained(model_dir, trust_remote_code=model.trust_remote_code)
        )
        if model.chat_template:
            self.tokenizer.chat_template = Path(model.chat_template).read_text()
        self._parser_class = ParserManager.get_parser(
            tool_parser_name=model.tool_parser,
            reasoning_parser_name=model.reasoning_parser,
            enable_auto_tools=model.tool_parser is not None,
        )
        eos: Any = self.tokenizer.eos_token_id
        if (Path(model_dir) / "generation_config.json").exists():
            eos = GenerationConfig.from_pretrained(model_dir).eos_token_id or eos
        self._keep_reasoning = model.keep_reasoning
        self._tokenize = Tokenize(self.tokenizer)
        self._wants_parts = _wants_parts(self.tokenizer.chat_template)
        self.end_tokens = frozenset(eos if isinstance(eos, list) else [eos])

    def render(self, request: ChatRequest) -> np.ndarray:
        """The prompt as token ids (int32), up to and including the generation prompt.

        Raises:
            ApiError: 400, the chat template refuses these messages.
        """
        return self._tokenize(self._text(request, request.messages, to_be_continued=True))

    def extend(self, request: ChatRequest, index: int, call: Call) -> np.ndarray | None:
        """The prompt of `request`, whose message `index` is the turn of `call`, with the call's
        prompt and sample kept as they are. A turn that did not end by itself gets the template's
        closing tokens. None if the chat template renders that turn, or what is before it,
        differently once more messages follow.

        Raises:
            ApiError: 400, the chat template refuses these messages.
        """
        messages = request.messages
        if self._keep_reasoning:
            # What is not in the messages, the template cannot take out again.
            messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
        whole = self._text(request, messages, to_be_continued=True)
        head = self._text(request, messages[: index + 1], to_be_continued=False)
        closing = self._closing
        if not (closing and whole.startswith(head) and head.endswith(closing)):
            return None
        reasoning = (call.turn.reasoning or "").strip()
        if reasoning not in head and not self._keep_reasoning:
            return None
        tokens = self._tokenize(closing + whole[len(head) :])
        # A sample that ended by itself has the closing's end token already.
        if len(call.tokens) and call.tokens[-1] in self.end_tokens:
            ends = np.flatnonzero(tokens[: len(self._tokenize(closing))] == call.tokens[-1])
            tokens = tokens[ends[0] + 1 :] if len(ends) else tokens
        return np.concatenate([call.full, tokens])

    def constraint(self, request: ChatRequest) -> Any:
        """vLLM's StructuredOutputsParams for a request whose answer must follow a grammar, else
        None.

        Raises:
            ApiError: 400, there is no such tool, or no parser for tool calls.
        """
        if not request.constrained:
            return None
        parsed = request.parsed.model_copy()
        try:
            if self._parser_class:
                parsed = self._parser_class(self.tokenizer, parsed.tools).adjust_request(parsed)
            found = parsed.extract_structured_outputs()
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            # vLLM takes the shape of a tool's JSON schema for granted.
            raise ApiError(400, f"No grammar for this: {error}", param="tool_choice") from error
        if found is None:
            raise ApiError(
                400,
                "`tool_choice` can only be `auto` or `none`: the run has no model.tool_parser.",
                param="tool_choice",
            )
        return found

    def parse(
        self,
        request: ChatRequest,
        tokens: np.ndarray,
        reason: FinishReason,
        tool_call_prefix: str = "call_",
        stop: Sequence[str] = (),
    ) -> tuple[Turn, str]:
        """What the model said, up to the first of the strings `stop`, and the text that was
        decoded."""
        ids = tokens.tolist()
        if ids and ids[-1] in self.end_tokens:
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=self._parser_class is None)
        if reason is FinishReason.STOP:
            text = text[: min((at for end in stop if (at := text.find(end)) >= 0), default=None)]
        if self._parser_class is None:
            return Turn(content=text, finish_reason=reason), text
        parser = self._parser_class(self.tokenizer, request.parsed.tools)
        try:
            reasoning, content, calls = parser.parse(
                text,
                request.parsed,
                enable_auto_tools=bool(request.tools),
                model_output_token_ids=ids,
            )
            for call in calls or ():
                f"{call.name}{call.arguments}".encode()
        except Exception as error:
            # Forty parsers for whatever a model may say: what one cannot read is text.
            log.warning("vLLM's parser cannot read %.200r: %r", text, error)
            reasoning, content, calls = None, text, None
        if not (content or reasoning or calls):
            content = text  # a forced call that is malformed: vLLM would drop it
        turn = Turn(
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(
                # Our own id: unique over all attempts, so the turn can be found again by it.
                ToolCall(f"{tool_call_prefix}{uuid.uuid4().hex}", call.name, call.arguments)
                for call in calls or ()
            ),
            finish_reason=reason,
        )
        return turn, text

    @functools.cached_property
    def _closing(self) -> str:
        """What the template puts after an assistant's words, "" if it cannot be told."""
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": _WORDS}]
        request = ChatRequest(messages, None, "", 1, None, ())
        try:
            text = self._text(request, messages, to_be_continued=False)
        except ApiError:
            return ""
        return text.rpartition(_WORDS)[2] if _WORDS in text else ""

    def _text(
        self, request: ChatRequest, messages: Sequence[dict[str, Any]], *, to_be_continued: bool
    ) -> str:
        from jinja2 import TemplateError

        def apply(messages: Sequence[dict[str, Any]]) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    [_for_template(message, self._wants_parts) for message in messages],
                    tools=request.tools,
                    add_generation_prompt=to_be_continued,
                    tokenize=False,
                )
            )

        try:
            try:
                return apply(messages)
            except TemplateError:
                # Many templates take a system message at the beginning only; Claude Code sends
                # them in between. As a user's words they keep their place, and the prefix.
                if not any(message["role"] == "system" for message in messages[1:]):
                    raise
                return apply([*messages[:1], *map(_as_user, messages[1:])])
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(
                400, f"The chat template refuses these messages: {error}", param="messages"
            ) from error


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "user"} if message["role"] == "system" else message


def _for_template(message: dict[str, Any], wants_parts: bool) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != PARTS}
    if wants_parts:
        texts = message.get(PARTS) or [message["content"]] * bool(message["content"])
        plain["content"] = [{"type": "text", "text": text} for text in texts]
    return plain


def _wants_parts(template: str | None) -> bool:
    """True if a chat template goes through the parts of a message's content; vLLM decides."""
    from vllm.renderers.hf import _detect_content_format

    return template is not None and _detect_content_format(template, default="string") == "openai"
