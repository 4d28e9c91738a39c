"""``plan="search"``: which parts of a model to cut, by what a step costs and what a device can hold. Pure decisions.

Modules are taken together where they are right only together (the column-wise layers of a feed-forward block and the
row-wise one behind them; tied weights). Each such block is cut as the plan of ``"auto"`` says, or is whole. Time and
memory are sums over blocks, so the fastest choice that fits is found exactly, by dynamic programming over the choices
that no other beats in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

from dtorch.parallel.choices import Option, cheapest
from dtorch.parallel.costs import Cost, CostModel
from dtorch.parallel.found import Found, Verdict
from dtorch.parallel.report import folded_name
from dtorch.parallel.tp_plan import ModuleFacts, ModulePlan, Plan, matches, plannable
from dtorch_runtime.errors import SettingError

#: The styles of layers that have pieces of activations between them. The others take and give whole ones.
_OPENS: Final = "colwise"
_CLOSES: Final = "rowwise"

# ---- blocks ----


def find_blocks(facts: Sequence[ModuleFacts], plans: Mapping[str, ModulePlan]) -> list[list[ModuleFacts]]:
    """The modules of a model, those together that are right only when they are cut together."""
    owner = list(range(len(facts)))

    def root(index: int) -> int:
        while owner[index] != index:
            index = owner[index]
        return index

    def join(members: Sequence[int]) -> None:
        for index in members[1:]:
            owner[root(index)] = root(members[0])

    for chain in _chains([plans[f.name].style for f in facts]):
        join(chain)
    alike: dict[object, list[int]] = {}
    for index, f in enumerate(facts):
        for identity in f.tied.values():
            alike.setdefault(identity, []).append(index)
        if f.num_head_groups and plans[f.name].style != "replicate":  # attention, which one layer may begin
            alike.setdefault(f.name.rpartition(".")[0], []).append(index)
    for members in alike.values():
        join(members)
    blocks: dict[int, list[ModuleFacts]] = {}
    for index, f in enumerate(facts):
        blocks.setdefault(root(index), []).append(f)
    return list(blocks.values())


def _chains(styles: Sequence[str]) -> list[list[int]]:
    """Column-wise layers and the row-wise one behind them; all of them at once if they do not come in that order."""
    every = [index for index, style in enumerate(styles) if style in (_OPENS, _CLOSES)]
    chains: list[list[int]] = []
    chain: list[int] = []
    for index in every:
        if styles[index] == _CLOSES and not chain:
            return [every]
        chain.append(index)
        if styles[index] == _CLOSES:
            chains.append(chain)
            chain = []
    return [every] if chain else chains


# ---- the search ----


@dataclass(frozen=True, slots=True)
class Space:
    """What a search chooses from: the plan to cut by, and what modules are with it (``cut``) and without (``whole``).

    ``stage_of`` says on which stage of a pipeline a module is. ``zero_stages`` may be used to make the step fit.
    """

    facts: Sequence[ModuleFacts]
    plan: Plan
    prefix: str
    cut: Mapping[str, ModulePlan]
    whole: Mapping[str, ModulePlan]
    model: CostModel
    num_stages: int
    stage_of: Callable[[str], int]
    zero_stages: Sequence[int] = (0,)


@dataclass(frozen=True, slots=True)
class _Block:
    facts: Sequence[ModuleFacts]
    stage: int
    whole: Cost
    cut: Cost | None

    def options(self) -> list[Option]:
        costs = [self.whole, *([] if self.cut is None else [self.cut])]
        return [Option(c.seconds, c.memory_bytes, i * len(self.facts)) for i, c in enumerate(costs)]

    def cost(self, option: int) -> Cost:
        return self.cut if option and self.cut is not None else self.whole


def search(space: Space, limit_bytes: int | None = None) -> Found:
    """The fastest plan, and stage of ZeRO, that fit; the lowest stage of equally fast ones.

    Raises:
        SettingError: nothing fits.
    """
    by_zero = {stage: _blocks(space, stage) for stage in space.zero_stages}
    found: list[tuple[float, int, list[int]]] = []
    for zero_stage, blocks in by_zero.items():
        options = _cheapest_by_stage(blocks, space.num_stages, limit_bytes)
        if options is not None:
            seconds = sum(block.cost(i).seconds for block, i in zip(blocks, options, strict=True))
            found.append((seconds, zero_stage, options))
    if not found:
        raise SettingError(_no_fit(by_zero, space.num_stages, limit_bytes or 0))
    _, zero_stage, options = min(found, key=lambda item: item[:2])
    blocks, plain = by_zero[zero_stage], by_zero[space.zero_stages[0]]
    left_whole = [b.facts for b, i in zip(blocks, options, strict=True) if b.cut is not None and not i]
    return Found(
        plan=_written(space, [f.name for block in left_whole for f in block]),
        zero_stage=zero_stage,
        chosen=_total(blocks, options, space.num_stages),
        auto=_total(plain, [1] * len(plain), space.num_stages),
        replicated=_total(plain, [0] * len(plain), space.num_stages),
        verdicts=tuple(_verdicts(blocks, options)),
        limit_bytes=limit_bytes,
    )


def _blocks(space: Space, zero_stage: int) -> list[_Block]:
    blocks = []
    for facts in find_blocks(space.facts, space.cut):
        stage, model = space.stage_of(facts[0].name), space.model
        is_choice = any(space.cut[f.name] != space.whole[f.name] for f in facts)
        cut = model.cost(facts, space.cut, zero_stage) if is_choice else None
        blocks.append(_Block(facts, stage, model.cost(facts, space.whole, zero_stage), cut))
    return blocks


def _cheapest_by_stage(blocks: Sequence[_Block], num_stages: int, limit: int | None) -> list[int] | None:
    """Each stage of a pipeline has devices of its own, and is as good as can be by itself."""
    result = [0] * len(blocks)
    for stage in range(num_stages):
        own = [index for index, block in enumerate(blocks) if block.stage == stage]
        options = cheapest([blocks[index].options() for index in own], limit)
        if options is None:
            return None
        for index, option in zip(own, options, strict=True):
            result[index] = option
    return result


def _total(blocks: Sequence[_Block], options: Sequence[int], num_stages: int) -> Cost:
    """Seconds of all stages, one after the other, and bytes of the fullest."""
    costs = [block.cost(option) for block, option in zip(blocks, options, strict=True)]
    total = reduce(Cost.__add__, costs, Cost())
    sums = [0] * num_stages
    for block, cost in zip(blocks, costs, strict=True):
        sums[block.stage] += cost.memory_bytes
    return Cost(total.compute_s, total.communication_s, max(sums))


def _written(space: Space, left_whole: Iterable[str]) -> Plan:
    """The plan without these modules: a pattern stays where it names none of them."""
    whole = set(left_whole)
    kinds = {f"{f.name}.{w}": f.name for f in space.facts if f.kind == "experts" for w in f.weights}
    names = plannable(space.facts)
    plan: dict[str, object] = {}
    for pattern, style in space.plan.items():
        named = [name for name in names if matches(pattern, name, space.prefix)]
        kept = [name for name in named if kinds.get(name, name) not in whole]
        plan |= {pattern: style} if len(kept) == len(named) else dict.fromkeys(kept, style)
    return plan  # type: ignore[return-value]


def _no_fit(by_zero: Mapping[int, Sequence[_Block]], num_stages: int, limit: int) -> str:
    least = []
    for zero_stage, blocks in by_zero.items():
        sums = [0] * num_stages
        for block in blocks:
            sums[block.stage] += min(option.memory_bytes for option in block.options())
        least.append((max(sums), zero_stage))
    num_bytes, zero_stage = min(least)
    zero = f" with ZeRO stage {zero_stage}" if zero_stage else ""
    more = "" if len(by_zero) > 1 else ", or 'dp', over which ZeRO stage 3 cuts what training keeps"
    return (
        f"plan='search': the least that a device can hold is {num_bytes} bytes{zero}, and memory_limit_bytes={limit}; "
        f"give the mesh more devices along 'tp'{more}, or write memory_limit_bytes={num_bytes}"
    )


# ---- the explanation ----


def _verdicts(blocks: Sequence[_Block], options: Sequence[int]) -> Iterator[Verdict]:
    groups: dict[tuple[object, ...], list[tuple[str, int, _Block]]] = {}
    for block, option in zip(blocks, options, strict=True):
        if block.cut is not None:
            name = _name(block.facts)
            pattern = "".join("*" if part.isdigit() else f".{part}" for part in name.split("."))
            groups.setdefault((pattern, block.whole, block.cut), []).append((name, option, block))
    for members in groups.values():
        first = members[0][2]
        assert first.cut is not None, "only blocks with a choice are in groups"
        yield Verdict(
            folded_name([f"{name}." for name, _, _ in members]).removesuffix("."),
            sum(option for _, option, _ in members),
            len(members),
            first.cut.seconds - first.whole.seconds,
            first.cut.memory_bytes - first.whole.memory_bytes,
        )


def _name(facts: Sequence[ModuleFacts]) -> str:
    """The module that all are in, or the names of all."""
    parts = [f.name.split(".") for f in facts]
    common: list[str] = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return ".".join(common) or ", ".join(f.name for f in facts)
