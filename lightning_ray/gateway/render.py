"""Text to tokens and back: chat template, tokenizer, tool-call and reasoning parsers.

The parsers are vLLM's own classes. Invariants: what `render` returns is exactly what the engine
sees; `parse` never loses text: what is no tool call or reasoning comes back as content.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ray.config import ModelSection
from lightning_ray.gateway.dialects import ChatRequest, ToolCall, Turn
from lightning_ray.gateway.errors import ApiError
from lightning_ray.records import FinishReason


class Renderer:
    """The text side of one model.

    Raises:
        TypeError: vLLM knows no such tool or reasoning parser.
    """

    def __init__(self, model_dir: str, model: ModelSection) -> None:
        from transformers import AutoTokenizer, GenerationConfig
        from vllm.parser.parser_manager import ParserManager

        self.tokenizer: Any = AutoTokenizer.from_pretrained(
            model_dir, trust_remote_code=model.trust_remote_code
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
        self.end_tokens = frozenset(eos if isinstance(eos, list) else [eos])

    def render(self, request: ChatRequest) -> np.ndarray:
        """The prompt as token ids (int32), up to and including the generation prompt.

        Raises:
            ApiError: 400, the chat template refuses these messages.
        """
        from jinja2 import TemplateError

        try:
            tokens = self.tokenizer.apply_chat_template(
                request.messages,
                tools=request.tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(
                400, f"The chat template refuses these messages: {error}", param="messages"
            ) from error
        return np.array(tokens, np.int32)

    def parse(self, request: ChatRequest, tokens: np.ndarray, reason: FinishReason) -> Turn:
        """What the model said."""
        ids = tokens.tolist()
        if ids and ids[-1] in self.end_tokens:
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=self._parser_class is None)
        if self._parser_class is None:
            return Turn(content=text, finish_reason=reason)
        parser = self._parser_class(self.tokenizer, request.parsed.tools)
        reasoning, content, calls = parser.parse(
            text,
            request.parsed,
            enable_auto_tools=bool(request.tools),
            model_output_token_ids=ids,
        )
        return Turn(
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(
                # Our own id: unique over all attempts, so the turn can be found again by it.
                ToolCall(f"call_{uuid.uuid4().hex}", call.name, call.arguments)
                for call in calls or ()
            ),
            finish_reason=reason,
        )
