"""Policies that draw by weight, and those that keep a window of queries."""

import torch

from h2o_stream import CacheConfig
from h2o_stream.cache.policies import Candidates, NewQueries, make_policy


def test_nexus_keeps_a_token_as_often_as_its_weight_says() -> None:
    """Of four tokens the best stays in proportion to the weights; the least of four pairs, too, is sometimes drawn."""
    weights, kept = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(4)
    for seed in range(50):
        policy = make_policy(CacheConfig("nexus", 16, seed=seed).plan())
        index = (torch.arange(4) + 4 * torch.arange(40)[:, None]).view(40, 1, 4).expand(40, 2, 4)
        priority = policy.priority(Candidates(weights.expand(40, 2, 4), index, index, torch.full((40, 1, 1), 200)))
        kept += torch.bincount(priority.argmax(-1).flatten(), minlength=4)
    assert ((kept / kept.sum() - weights / 10).abs() < 0.02).all()


def test_nexus_draws_once_for_each_token_and_head() -> None:
    policy, index = make_policy(CacheConfig("nexus", 16).plan()), torch.arange(9).expand(1, 2, 9)
    ones = torch.ones(1, 2, 9)
    draws = [policy.priority(Candidates(ones, index, index, torch.tensor([[[seen]]]))) for seen in (9, 50)]
    assert draws[0].equal(draws[1])
    assert not draws[0][0, 0].equal(draws[0][0, 1])
    assert policy.priority(Candidates(0 * ones, index, index, torch.tensor([[[9]]]))).equal(0 * ones)


def test_the_ring_holds_the_newest_queries_of_each_row() -> None:
    policy = make_policy(CacheConfig("morphkv", 16, heavy=6, sinks=4).plan())
    everything = torch.randn(2, 1, 2, 30, 4)
    start = policy.head_state(2, 4, 4)["newest_queries"]
    state = {"newest_queries": start.expand(2, 1, *start.shape)}
    seen = torch.tensor([0, 0])
    for counts in ([4, 1], [1, 0], [9, 2], [1, 1], [3, 8]):
        count = torch.tensor(counts)
        queries = torch.zeros(2, 1, 2, max(counts), 4)
        for row in range(2):
            queries[row, :, :, : counts[row]] = everything[row, :, :, seen[row] : seen[row] + count[row]]
        state = policy.update_head_state(state, NewQueries(queries, seen.view(-1, 1, 1), count.view(-1, 1, 1)))
        seen += count
    for row in range(2):
        for token in range(int(seen[row]) - 6, int(seen[row])):
            assert state["newest_queries"][row, :, :, token % 6].equal(everything[row, :, :, token])


def test_snapkv_keeps_the_neighbours_of_a_heavy_token() -> None:
    """The only token attended to is number 10; those from 7 to 13 share its score, and the older stay longer."""
    policy = make_policy(CacheConfig("snapkv", 24, heavy=16, sinks=4).plan())
    index = torch.arange(23).view(1, 1, 23)
    keys = torch.zeros(1, 1, 23, 2)
    keys[..., 10, 0] = 50.0
    queries = torch.tensor([1.0, 0.0]).expand(1, 1, 1, 4, 2)
    tokens = Candidates(
        index.float(), index, 22 - index, torch.full((1, 1, 1), 23), keys=keys, values=keys,
        head_state={"newest_queries": queries},
    )  # fmt: skip
    order = policy.priority(tokens)[0, 0].argsort(descending=True)
    assert order[:7].tolist() == list(range(7, 14))
