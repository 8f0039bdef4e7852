"""Arguments and inputs of PEFT that a cache cannot honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from kvtier.errors import UnsupportedError

PER_ROW = frozenset({"adapter_names", "alora_offsets"})
"""Arguments that change the adapter inside one call."""


def check_one_adapter(arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for PEFT's arguments that change adapters inside one call."""
    for name in sorted(PER_ROW.intersection(arguments)):
        if arguments[name] is not None:
            raise UnsupportedError(
                f"{name} changes the adapter from row to row or token to token, and a cache cannot tell: make a call "
                "for each adapter, with set_adapter before it"
            )


def check_own_inputs(model: PreTrainedModel) -> None:
    """Raise UnsupportedError while another object prepares the model's inputs, as PEFT's prompt learning does."""
    prepares = vars(model).get("prepare_inputs_for_generation")
    owner = getattr(prepares, "__self__", model)
    if owner is not model:
        raise UnsupportedError(
            f"a {type(owner).__name__} adds virtual tokens to the prompt (PEFT's prompt learning), which no cache can "
            "compare with it: generate without a TieredCache"
        )
