"""The bodies of requests, as OpenAI's API has them, and what this server adds: `precision` and a few ways to draw.

A field that is not here is refused by its name, and so is one that OpenAI has and this server does not, unless its
value says that it is not used. Nothing is left out silently.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from otaro.engine.sampling import Sampling
from otaro.precision import Precision
from otaro.serve.problems import Problem

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_LOGPROBS = 20
SEED = 2**63

Text = Annotated[str, Field(max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[int, Field(ge=1, lt=2**31)]


HINTS = {
    "response_format": ": ask for JSON in the prompt, and check what comes",
    "tool_choice": ": tools are shown to the model, which calls them or not",
    "best_of": ": ask for n answers",
}


NAMES = [str(width) for width in Precision]
# Wrong names are refused in words that say which there are; the schema lists those that can be right.
PrecisionName = Annotated[str, WithJsonSchema({"type": "string", "enum": NAMES})]
PrecisionOrAuto = Annotated[str, WithJsonSchema({"type": "string", "enum": [*NAMES, "auto"]})]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Phases(Body):
    """A precision for reading the prompt, another for writing the answer."""

    prefill: PrecisionName | None = None
    decode: PrecisionOrAuto | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _describe_unused(schema: dict[str, Any], kind: type[Common]) -> None:
    for name, values in kind.UNUSED.items():
        schema["properties"][name] = {"enum": [None, *values], "description": "Not supported."}


class Common(Body):
    """What both kinds of completions take."""

    UNUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "store": (False,),
        "service_tier": ("auto", "default"),
    }
    """Fields of OpenAI's that this server does not have, and the values that ask for nothing."""
    model_config = ConfigDict(json_schema_extra=_describe_unused)

    model: Annotated[str, Field(max_length=300)] | None = Field(
        None, description="The model's name, or NAME@E5M4 for a precision; the only model if left out."
    )
    precision: PrecisionOrAuto | Phases | None = Field(
        None,
        description='A precision such as "E5M4", {"prefill": "E5M4", "decode": "E5M8"}, or "auto": lower under load.',
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-SEED, lt=SEED)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=1000)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1000)]],
            Field(max_length=MOST_STOPS),
        ]
        | None
    ) = None
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    store: Any = None
    service_tier: Any = None

    def check(self) -> None:
        """Refuse what this server does not have."""
        for name, unused in self.UNUSED.items():
            value = getattr(self, name)
            if value is not None and not any(type(value) in _KINDS[type(other)] and value == other for other in unused):
                hint = HINTS.get(name, "")
                raise Problem(
                    400, f"{name} is not supported by this server{hint}", param=name, code="unsupported_parameter"
                )
        if self.stream_options is not None and not self.stream:
            raise Problem(400, "stream_options is for streams: set stream to true", param="stream_options")

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, choice: int) -> Sampling:
        """How the tokens of one of several answers are picked: each draws with a seed of its own."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            seed=None if self.seed is None else (self.seed + choice) % 2**64,
        )


_KINDS: dict[type, tuple[type, ...]] = {int: (int, float), bool: (bool,), dict: (dict,), list: (list,), str: (str,)}
"""Types whose values may be equal to one of a type: in Python False is 0, too."""


class Part(Body):
    """A piece of a message; this server reads text alone."""

    type: Literal["text"]
    text: str


class Function(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # What answers of OpenAI's carry, and a client sends back as it came.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it: one text, and the arguments of calls as objects."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer word for it
        message: dict[str, Any] = {"role": role, "content": text}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


def _arguments(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


class Tool(Body):
    type: Literal["function"]
    function: dict[str, Any]


class ChatBody(Common):
    """The body of /v1/chat/completions."""

    UNUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Common.UNUSED,
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto", "none"),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    response_format: Any = None
    modalities: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise Problem(400, "top_logprobs needs logprobs: set it to true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise Problem(400, "max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools for the template, unless none shall be used."""
        return None if not self.tools or self.tool_choice == "none" else [tool.model_dump() for tool in self.tools]


class CompletionBody(Common):
    """The body of /v1/completions."""

    UNUSED: ClassVar[dict[str, tuple[Any, ...]]] = {**Common.UNUSED, "suffix": ("",), "best_of": (1,)}

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    max_tokens: Tokens | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Any = None
    best_of: Any = None

    def check(self) -> None:
        super().check()
        if self.echo and self.stream:
            raise Problem(400, "echo is not supported in streams", param="echo", code="unsupported_parameter")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or the ids of its tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class PrecisionBody(Body):
    """The body of PUT /v1/precision."""

    precision: PrecisionOrAuto | None = Field(None, description='The default: a precision such as "E5M4", or "auto".')
    resident: PrecisionName | None = Field(
        None, description="How far planes shall be in memory: wider ones are freed, missing ones read."
    )


class RunningBody(Body):
    """The body of PUT /v1/precision/{id}."""

    precision: PrecisionOrAuto = Field(description="The precision of that answer from its next token on.")
