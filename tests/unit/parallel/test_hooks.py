"""What hooks find among a model's arguments."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from dtorch.parallel.hooks import find_main_input, map_tensors

Pair = namedtuple("Pair", "a b")
X = torch.ones(2)
CACHE = object()


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@pytest.mark.parametrize(
    "tree",
    [X, [X, 1], (X, None, [X]), {"a": X, "b": (X, "text")}, OrderedDict(a=X), Pair(X, 3), [], None, CACHE],
    ids=lambda tree: type(tree).__name__,
)
def test_a_tree_keeps_its_types_and_everything_that_is_no_tensor(tree: Any) -> None:
    def check(before: Any, after: Any) -> None:
        assert type(after) is type(before)
        if isinstance(before, torch.Tensor):
            assert after.tolist() == [2.0, 2.0]
        elif isinstance(before, dict):
            assert list(after) == list(before)
            check(list(before.values()), list(after.values()))
        elif isinstance(before, list | tuple):
            assert len(after) == len(before)
            for old, new in zip(before, after, strict=True):
                check(old, new)
        else:
            assert after is before

    check(tree, map_tensors(double, tree))
    assert X.tolist() == [1.0, 1.0]


def test_the_output_of_a_model_is_copied_with_its_attributes() -> None:
    output = CausalLMOutputWithPast(logits=X, attentions=CACHE, hidden_states=(X, X))
    mapped = map_tensors(double, output)
    assert type(mapped) is CausalLMOutputWithPast
    assert mapped.logits.tolist() == mapped["logits"].tolist() == [2.0, 2.0]
    assert mapped.attentions is CACHE
    assert [tensor.tolist() for tensor in mapped.hidden_states] == [[2.0, 2.0]] * 2
    assert output.logits is X


IDS = torch.zeros(3, 5)
OTHER = torch.zeros(1, 5)
VECTOR = torch.zeros(5)


class Pixels(nn.Module):
    main_input_name = "pixel_values"


@pytest.mark.parametrize(
    ("module", "args", "kwargs", "found"),
    [
        (nn.Module(), (IDS, OTHER), {}, IDS),
        (nn.Module(), (), {"position_ids": OTHER, "input_ids": IDS}, IDS),
        (nn.Module(), (), {"position_ids": OTHER, "inputs_embeds": IDS, "input_ids": None}, IDS),
        (nn.Module(), (), {"cache_position": VECTOR, "x": IDS}, IDS),
        (nn.Module(), (), {"cache_position": VECTOR}, VECTOR),
        (Pixels(), (), {"input_ids": OTHER, "pixel_values": IDS}, IDS),
        (nn.Module(), (1,), {"use_cache": True}, None),
    ],
)
def test_the_main_input_says_what_the_batch_is(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: torch.Tensor | None
) -> None:
    assert find_main_input(module, args, kwargs) is found
