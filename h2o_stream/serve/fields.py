"""Every field that OpenAI, llama.cpp's server, vLLM and ollama document, and what is done with it here.

A field is served, under another name perhaps, refused with a reason unless its value changes nothing, or has no
influence on any reply. Nothing is dropped without a word: names that are not in the table are reported.
`docs/serving.md` has those that are served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from h2o_stream.serve.errors import ApiError, shown, wrong

Endpoint = Literal["chat/completions", "completions", "responses"]


@dataclass(frozen=True)
class Served:
    """It is followed, as `name` if that is not empty."""

    name: str = ""


@dataclass(frozen=True)
class Refused:
    """It would change a reply, and is not followed: why, or what to do. Values in `neutral` change nothing."""

    why: str
    neutral: tuple[Any, ...] = field(default=(), hash=False)


@dataclass(frozen=True)
class Ignored:
    """No value of it changes what is replied: why."""

    why: str


Rule = Served | Refused | Ignored

_LARK = "give one of response_format, json_schema, guided_json and grammar"
_ORDER = "the order is fixed: penalties, temperature, top_k, top_p, min_p"
_IMAGES = "this server reads texts only"
_TOKENS = "this server takes and gives texts, not token ids"
_KEPT = "the system prompt is never evicted; use pins for other texts"
_SPEED = "it is about speed, or about where a model is computed"
_WHO = "it tells who asks, or what for"
_OWN_CACHE = "every conversation keeps its own cache"
_ADDED = "answers have usage and h2o instead"
_BEAMS = "replies are sampled; use n, or temperature 0"
_OFF = "it has no effect without a field that is refused: {}"

_SHARED: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
         "presence_penalty", "repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length", "seed",
         "stop", "stream", "stream_options", "stream_options.include_usage", "stream_options.include_slots",
         "json_schema", "grammar", "guided_json",
         "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "format", "options", "window",
         "policy", "recall", "think", "pins", "logit_bias", "min_tokens", "ignore_eos"),
        Served(),
    ),
    "repeat_penalty": Served("repetition_penalty"),
    # what would change a reply
    "best_of": Refused(_BEAMS, (1,)),
    "use_beam_search": Refused(_BEAMS, (False,)),
    "stop_token_ids": Refused("use stop, which takes texts", ([],)),
    "include_stop_str_in_output": Refused("replies end before the text of stop", (False,)),
    "skip_special_tokens": Refused("special tokens are no text", (True,)),
    "truncate_prompt_tokens": Refused("prompts are read whole, of any length", (-1,)),
    "prompt_logprobs": Refused("only tokens of replies have logprobs"),
    "allowed_token_ids": Refused(_TOKENS, ([],)),
    "bad_words": Refused("logit_bias, guided_regex and grammar exclude texts", ([],)),
    "logits_processors": Refused("nothing of a request is run", ([],)),
    "prompt_embeds": Refused(_IMAGES, ([],)),
    "guided_whitespace_pattern": Refused("use grammar"),
    "structural_tag": Refused(_LARK),
    "watermarking": Refused("replies have no watermark", (False,)),
    "logprob_token_ids": Refused(_TOKENS, ([],)),
    "return_prompt_text": Refused("answers have the reply only", (False,)),
    "_debug_render_only": Refused("every request is answered", (False,)),
    **dict.fromkeys(("chat_format", "chat_parser", "generation_prompt", "grammar_type"),
                    Refused("the form of replies is that of the model's template")),
    "grammar_lazy": Refused("a grammar is for all of a reply", (False,)),
    "vllm_xargs": Refused("there are no extensions", ({},)),
    "repetition_detection": Refused("use dry_multiplier"),
    "dynatemp_range": Refused("the temperature is constant", (0,)),
    "typical_p": Refused("use top_p or min_p", (1, 0)),
    "tfs_z": Refused("use top_p or min_p", (1,)),
    "top_n_sigma": Refused("use top_p or min_p", (-1, 0)),
    "min_keep": Refused("use top_k", (0,)),
    "xtc_probability": Refused("use temperature", (0,)),
    "dry_penalty_last_n": Refused("use repeat_last_n", (-1,)),
    "dry_sequence_breakers": Refused("sequences are judged whole", ([], ["\n", ":", '"', "*"])),
    "mirostat": Refused("use top_p or min_p", (0,)),
    "adaptive_target": Refused("use top_p or min_p", (-1,)),
    "penalize_nl": Refused("penalties know no exceptions", (True,)),
    "penalize_newline": Refused("penalties know no exceptions", (True,)),
    "samplers": Refused(_ORDER, ([], "")),
    "n_indent": Refused("use grammar", (0,)),
    "t_max_predict_ms": Refused("use max_tokens", (0, -1)),
    "n_keep": Refused(_KEPT, (0,)),
    "num_keep": Refused(_KEPT, (0, 4)),
    "n_discard": Refused("what is evicted is a matter of policy", (0,)),
    "n_probs": Refused("use logprobs", (0,)),
    "post_sampling_probs": Refused("logprobs are those before sampling", (False,)),
    "return_tokens": Refused(_TOKENS, (False,)),
    "return_token_ids": Refused(_TOKENS, (False,)),
    "return_tokens_as_token_ids": Refused(_TOKENS, (False,)),
    "response_fields": Refused("answers are complete", ([],)),
    "lora": Refused("merge adapters into the model, see llama.cpp's llama-export-lora", ([],)),
    "images": Refused(_IMAGES, ([],)),
    "image_data": Refused(_IMAGES, ([],)),
    "template": Refused("the model's own chat template is used", ("",)),
    "context": Refused("send the messages again; what is known is not read again", ([],)),
    "stream_options.continuous_usage_stats": Refused("the last chunk has the usage", (False,)),
    # what does not
    **dict.fromkeys(("user", "safety_identifier", "request_id", "session_id", "metadata"), Ignored(_WHO)),
    **dict.fromkeys(("service_tier", "priority", "prediction", "keep_alive", "sse_ping_interval", "num_gpu", "main_gpu",
                     "num_thread", "num_batch", "num_gqa", "use_mmap", "use_mlock", "low_vram", "numa", "f16_kv",
                     "kv_transfer_params", "ec_transfer_params", "stream_interval",
                     "speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.p_split",
                     "speculative.type", "speculative.ngram_size_n", "speculative.ngram_size_m",
                     "speculative.ngram_min_hits", "backend_sampling", "draft_num_predict"),
                    Ignored(_SPEED)),
    **dict.fromkeys(("cache_prompt", "id_slot", "slot_id", "n_cache_reuse", "cache_salt", "prompt_cache_key",
                     "prompt_cache_retention", "prompt_cache_options"), Ignored(_OWN_CACHE)),
    **dict.fromkeys(("timings_per_token", "return_progress", "stream_options.include_obfuscation"), Ignored(_ADDED)),
    **dict.fromkeys(("num_ctx", "truncate", "shift"), Ignored("a conversation may be of any length; see window")),
    "guided_decoding_backend": Ignored("llguidance follows all schemas and grammars"),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "return_mm_kwargs"), Ignored(_OFF.format("images"))),
    **dict.fromkeys(("return_token_offsets", "routed_experts_prompt_start"), Ignored("it is for other endpoints")),
    **dict.fromkeys(("grammar_triggers", "preserved_tokens"), Ignored(_OFF.format("grammar_lazy"))),
    "truncation_side": Ignored(_OFF.format("truncate_prompt_tokens")),
    "length_penalty": Ignored(_OFF.format("use_beam_search")),
    "spaces_between_special_tokens": Ignored(_OFF.format("skip_special_tokens")),
    "dynatemp_exponent": Ignored(_OFF.format("dynatemp_range")),
    "xtc_threshold": Ignored(_OFF.format("xtc_probability")),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), Ignored(_OFF.format("mirostat"))),
    "adaptive_decay": Ignored(_OFF.format("adaptive_target")),
}  # fmt: skip

_BOTH: Mapping[str, Rule] = {
    **dict.fromkeys(("max_tokens", "n", "logprobs", "response_format"), Served()),
    "n_predict": Served("max_tokens"),
    "num_predict": Served("max_tokens"),
    "n_cmpl": Served("n"),
}
"""Of chat completions and completions."""

_TOOLS: Mapping[str, Rule] = {
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "store"), Served()),
    **dict.fromkeys(
        (
            "enable_thinking",
            "chat_template_kwargs",
            "reasoning_effort",
            "reasoning",
            "reasoning.effort",
            "thinking_budget_tokens",
            "reasoning_budget_message",
        ),
        Served(),
    ),
    **dict.fromkeys(("reasoning_budget_tokens", "thinking_token_budget"), Served("thinking_budget_tokens")),
    **dict.fromkeys(("reasoning.summary", "reasoning.generate_summary"), Ignored("thinking comes as it is, all of it")),
    **dict.fromkeys(
        ("reasoning_budget_start_tag", "reasoning_budget_end_tag"),
        Ignored("the marks are those of the model's template"),
    ),
    "system": Refused("send a message of the role system", ("",)),
    "verbosity": Refused("ask for it in the system prompt", ("medium",)),
    "moderation": Refused("nothing is moderated"),
    "documents": Refused("put texts into messages", ([],)),
    "chat_template": Refused("the model's own is used"),
}
"""Of chat completions and responses."""

FIELDS: Mapping[Endpoint, Mapping[str, Rule]] = {
    "chat/completions": {
        **_SHARED, **_BOTH, **_TOOLS,
        **dict.fromkeys(("messages", "max_completion_tokens", "top_logprobs", "continue_final_message",
                         "add_generation_prompt"), Served()),
        "functions": Refused("use tools", ([],)),
        "function_call": Refused("use tools and tool_choice", ("none", "auto")),
        "audio": Refused(_IMAGES),
        "modalities": Refused(_IMAGES, (["text"],)),
        "web_search_options": Refused("this server searches nothing"),
        "add_special_tokens": Refused("the chat template has them", (False,)),
        "echo": Refused("replies do not repeat what they continue", (False,)),
        "include_reasoning": Refused("thinking is in reasoning_content; think: false switches it off", (True,)),
        "reasoning_format": Refused("thinking is in reasoning_content", ("auto", "deepseek")),
        "reasoning_in_content": Refused("thinking is in reasoning_content", (False,)),
        "reasoning_control": Refused("a reply is not controlled while it is made; use max_tokens", (False,)),
        "previous_response_id": Served(), "messages.role": Served(), "messages.content": Served(),
        "messages.tool_calls": Served(), "messages.tool_call_id": Served(),
        "messages.audio": Refused(_IMAGES),
        "messages.images": Refused(_IMAGES, ([],)),
        "messages.function_call": Refused("use tool_calls"),
        "parse_tool_calls": Refused("use tool_choice: none", (True,)),
        "messages.tool_name": Refused("use name, and tool_call_id"),
        "messages.name": Ignored("templates have no names of people"),
        **dict.fromkeys(("messages.prefix", "messages.partial"), Ignored("an assistant's last message is continued")),
        **dict.fromkeys(("messages.refusal", "messages.annotations"), Ignored("they are no part of the text")),
        **dict.fromkeys(("messages.reasoning_content", "messages.reasoning", "messages.thinking"),
                        Ignored("past thinking is not read again")),
    },
    "completions": {
        **_SHARED, **_BOTH,
        "prompt": Served(),
        "suffix": Refused("texts are continued, not filled in", ("",)),
        "echo": Refused("replies do not repeat the prompt", (False,)),
        "tools": Refused("use /v1/chat/completions", ([],)),
        "system": Refused("put it into the prompt", ("",)),
        "add_special_tokens": Refused("the model's own special tokens are added", (True,)),
        "store": Ignored("completions are never kept"),
        "raw": Ignored("completions have no chat template"),
    },
    "responses": {
        **_SHARED, **_TOOLS,
        **dict.fromkeys(("input", "instructions", "max_output_tokens", "previous_response_id", "text", "text.format",
                         "truncation", "metadata"), Served()),
        "n_predict": Served("max_output_tokens"),
        "num_predict": Served("max_output_tokens"),
        "text.verbosity": Refused("ask for it in instructions", ("medium",)),
        "background": Refused("replies are made while the client waits", (False,)),
        "conversation": Refused("use previous_response_id"),
        "prompt": Refused("this server keeps no prompts; use instructions and input"),
        "enable_response_messages": Refused("answers have items", (False,)),
        "previous_input_messages": Refused("use previous_response_id, or send them in input", ([],)),
        "previous_response": Refused("use previous_response_id, or send its items in input"),
        "include": Refused("answers have what there is", ([], ["reasoning.encrypted_content"])),
        "top_logprobs": Refused("use /v1/chat/completions", (0,)),
        "n": Refused("a response is one reply; use /v1/chat/completions", (1,)),
        "image": Refused(_IMAGES),
        "context_management": Refused("the window does it: see window and policy", ([],)),
        "access_programs": Refused("there are none"),
        "background_options": Ignored(_OFF.format("background")),
        "max_tool_calls": Ignored("it counts calls of tools that the server runs, and there are none"),
    },
}  # fmt: skip
"""Names of the fields in objects and lists of objects have a dot."""

ELSEWHERE: Mapping[str, str] = {
    "embeddings": "this server generates texts, not embeddings",
    "rerank": "this server generates texts, it does not rank any",
    "moderations": "this server moderates nothing",
    "audio": _IMAGES,
    "images": _IMAGES,
    "files": "this server keeps no files",
    "batches": "requests of any number can be sent at once",
    "assistants": "assistants are not served; use /v1/responses",
    "threads": "assistants are not served; use /v1/responses",
    "conversations": "conversations are found by their messages, or by previous_response_id",
    "messages": "this is an interface of Anthropic's; use /v1/chat/completions",
    "api": "this is an interface of ollama's own; ollama's clients of OpenAI's API use /v1",
    "completion": "this is an interface of llama.cpp's own; use /v1/completions",
    "infill": "texts are continued, not filled in",
    "tokenize": _TOKENS,
    "detokenize": _TOKENS,
}
"""What other servers have, by a part of the path, and why it is not here."""


_MAX_UNKNOWN = 1000
"""Largest number of unknown fields that are reported of a request."""


def read_fields(body: Mapping[str, Any], endpoint: Endpoint) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """The served fields of a request by the names that they have here, those that are not in the table, and names that
    the request has by ours, where they differ.

    Raises:
        ApiError: a field would change the reply and is not served; or one is given twice, under two names.
    """
    table, options = FIELDS[endpoint], body.get("options")
    if options is not None and not isinstance(options, dict):
        raise wrong("options", options, "an object")
    found, unknown, names = dict[str, Any](), list[str](), dict[str, str]()
    given = {name for name, value in body.items() if value is not None}
    for name, value in {**(options or {}), **body}.items():
        rule = table.get(name)
        if rule is None:
            unknown.append(name)
        elif value is None or not _is_served(name, rule, value):
            continue
        else:
            unknown += _unknown_inside(name, value, table)
            target = (isinstance(rule, Served) and rule.name) or name
            if name != target and name in given and target in given and body[target] != value:
                message = f"{name} is {target}, which is given, too: {shown(value)} and {shown(body[target])}"
                raise ApiError(400, message, name)
            if name in given or target not in given:
                found[target] = value
                names[target] = name if name in given else f"options.{name}"
    return (
        found,
        [*dict.fromkeys(unknown[:_MAX_UNKNOWN])],
        {target: name for target, name in names.items() if target != name},
    )


def _unknown_inside(name: str, value: Any, table: Mapping[str, Rule]) -> Iterator[str]:
    """Check the fields of an object, or of the objects in a list. Yields those that are not in the table."""
    if not any(known.startswith(f"{name}.") for known in table):
        return
    listed = isinstance(value, list)
    for number, item in enumerate(value if listed else [value]):
        for inner, content in item.items() if isinstance(item, dict) else ():
            rule = table.get(f"{name}.{inner}")
            if rule is None:
                yield f"{name}.{inner}"
            elif content is not None:
                _is_served(f"{name}[{number}].{inner}" if listed else f"{name}.{inner}", rule, content)


def _is_served(place: str, rule: Rule, value: Any) -> bool:
    if isinstance(rule, Refused) and not any(_same(value, neutral) for neutral in rule.neutral):
        raise ApiError(400, f"{place} is not served: {rule.why}", place, "unsupported_parameter")
    return isinstance(rule, Served)


def _same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are the same; true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
