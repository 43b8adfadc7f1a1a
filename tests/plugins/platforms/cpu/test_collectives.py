"""The facade's collectives on gloo ranks: averages, and groups that are created once."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ascend_run.testing.pool import GlooPool
from tests.support.cpu_facade import cpu_facade


def averages() -> dict[str, list[float]]:
    average = dist.ReduceOp.AVG
    with cpu_facade():
        mine = torch.tensor([1.0, 5.0]) + dist.get_rank()
        whole = mine.clone()
        dist.all_reduce(whole, op=average)
        scattered, source = torch.zeros(1), mine.clone()
        dist.reduce_scatter_tensor(scattered, source, op=average)
        coalesced = [mine.clone(), 2 * mine]
        with dist._coalescing_manager():
            for tensor in coalesced:
                dist.all_reduce(tensor, op=average)
        summed = mine.clone()
        dist.all_reduce(summed)
    return {
        "all_reduce": whole.tolist(),
        "reduce_scatter": scattered.tolist(),
        "source": source.tolist(),
        "mine": mine.tolist(),
        "coalesced": torch.cat(coalesced).tolist(),
        "sum": summed.tolist(),
    }


def groups_made() -> dict[str, object]:
    with cpu_facade():
        first = dist.new_group([0, 1], group_desc="a")
        again = dist.new_group([0, 1], group_desc="a")
        other_purpose = dist.new_group([0, 1], group_desc="b")
        other_ranks = dist.new_group([0], group_desc="a")
        dist.destroy_process_group(first)
        after = dist.new_group([0, 1], group_desc="a")
        number = torch.ones(1)
        dist.all_reduce(number, group=after)
        return {
            "same": again is first,
            "purpose": other_purpose is first,
            "ranks": other_ranks is not first,
            "destroyed": after is not first,
            "works": number.item(),
        }


def test_an_average_is_the_sum_of_what_was_divided(gloo_pool: GlooPool) -> None:
    for rank, outcome in enumerate(gloo_pool.run(averages, 2)):
        assert outcome["all_reduce"] == [1.5, 5.5]
        assert outcome["reduce_scatter"] == [[1.5], [5.5]][rank]
        assert outcome["source"] == outcome["mine"]
        assert outcome["coalesced"] == [1.5, 5.5, 3.0, 11.0]
        assert outcome["sum"] == [3.0, 11.0]


def test_a_group_is_made_once_for_its_ranks_whatever_it_is_for(gloo_pool: GlooPool) -> None:
    for outcome in gloo_pool.run(groups_made, 2):
        assert outcome == {
            "same": True,
            "purpose": True,
            "ranks": True,
            "destroyed": True,
            "works": 2.0,
        }


def unequal_rows() -> dict[str, list[float]]:
    rank = dist.get_rank()
    sizes = [3, 1]
    with cpu_facade():
        mine = torch.arange(sizes[rank] * 2.0).view(-1, 2) + 10 * rank
        gathered = [torch.empty(size, 2) for size in sizes]
        dist.all_gather(gathered, mine)
        scattered = torch.empty(sizes[rank], 2)
        dist.reduce_scatter(scattered, [part * (rank + 1) for part in gathered])
    return {"gathered": torch.cat(gathered).tolist(), "scattered": scattered.tolist()}


def test_ranks_may_hold_unequal_numbers_of_rows(gloo_pool: GlooPool) -> None:
    """Like the ranks of one expert, each with the tokens that it received."""
    whole = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [10.0, 11.0]]
    tripled = [[3 * value for value in row] for row in whole]
    for rank, outcome in enumerate(gloo_pool.run(unequal_rows, 2)):
        assert outcome["gathered"] == whole
        assert outcome["scattered"] == [tripled[:3], tripled[3:]][rank]
