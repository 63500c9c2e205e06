"""What training gets of an edited answer: token ids, checked against the model and the trajectories that it names."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_parallm.core import Edit, FoundTrajectory, control_ids, end_id
from mlx_parallm.errors import ConflictError, ContextLengthError, InvalidRequestError
from mlx_parallm.server.api.chat.messages import Conversation
from mlx_parallm.server.api.training.people_schema import PreferenceBody
from mlx_parallm.server.planning import check_ids
from mlx_parallm.server.services import Services


def adapter_of(body: PreferenceBody, found: Mapping[str, FoundTrajectory], default: str) -> str:
    """The adapter that learns from an edit. `found`: the trajectories that it names, by field.

    Raises:
        ConflictError: they train another adapter than the one that it names, or different ones.
    """
    wanted = body.lora_adapter or next((each.adapter for each in found.values()), default)
    for field, each in found.items():
        if each.adapter != wanted:
            raise ConflictError(
                f"{field}: this answer trains {each.adapter!r} and cannot teach {wanted!r}; send it for its own "
                "adapter, or its text.",
                param=field,
            )
    return wanted


def edit_of(body: PreferenceBody, found: Mapping[str, FoundTrajectory], adapter: str, services: Services) -> Edit:
    """What training gets of an edit. Texts are encoded, so call it in a worker thread.

    Raises:
        InvalidRequestError: an id is not in the vocabulary, a text has control tokens, the named trajectories have
            different prompts, or the two answers are equal.
        ContextLengthError: prompt and answer are longer than the context.
    """
    prompt = _prompt(body, found, services)
    for field in ("chosen_id", "rejected_id"):
        if field in found and found[field].prompt_ids != prompt:
            raise InvalidRequestError(f"{field}: this answer is to another prompt.", param=field)
    text = body.chosen if body.correction is None else body.correction
    field = "chosen" if body.correction is None else "correction"
    chosen = _answer(field, text, found.get("chosen_id"), services)
    rejected = _answer("rejected", body.rejected, found.get("rejected_id"), services)
    if chosen == rejected:
        raise InvalidRequestError("chosen and rejected are the same answer.", param="rejected")
    context = services.first.card.context_length
    if (tokens := len(prompt) + max(len(chosen), len(rejected))) > context:
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens, and the edit has {tokens}.", param=field
        )
    return Edit(
        adapter,
        prompt,
        chosen,
        rejected,
        found["chosen_id"].text if "chosen_id" in found else text or "",
        found["rejected_id"].text if "rejected_id" in found else body.rejected or "",
        body.user or "",
        body.trajectory_id or body.rejected_id or "",
    )


def _prompt(body: PreferenceBody, found: Mapping[str, FoundTrajectory], services: Services) -> tuple[int, ...]:
    card, tokenizer = services.first.card, services.first.tokenizer
    if body.messages is not None:
        conversation = Conversation.of(body.messages, (), tokenizer)
        return tuple(conversation.render(tokenizer, at_most=card.context_length))
    if body.prompt is not None or body.prompt_token_ids is not None:
        ids = body.prompt_token_ids or tokenizer.encode(body.prompt or "", True, card.context_length)
        check_ids(ids, card.vocab_size, "prompt_token_ids" if body.prompt is None else "prompt")
        return tuple(ids)
    return next(iter(found.values())).prompt_ids


def _answer(field: str, text: str | None, found: FoundTrajectory | None, services: Services) -> tuple[int, ...]:
    """The tokens of an answer; none if there is no such answer. A text is ended by the end-of-sequence token.

    Raises:
        InvalidRequestError: the text has a control token, which people do not write.
    """
    if found is not None:
        return found.completion_ids
    if text is None:
        return ()
    tokenizer = services.first.tokenizer
    ids = tokenizer.encode(text, False, services.first.card.context_length)
    check_ids(ids, services.first.card.vocab_size, field)
    if control := control_ids(tokenizer).intersection(ids):
        mark = tokenizer.token_string(min(control))
        raise InvalidRequestError(f"{field}: the text has the control token {mark!r}; leave it out.", param=field)
    return (*ids, end_id(tokenizer))
