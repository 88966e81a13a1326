"""Process groups per role, and vocabulary-parallel log-probs, on two and four ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import RankError, run
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megarl.config import ParallelConfig
from megarl.parallel.groups import RoleGroups
from megarl.parallel.vocab import vocab_parallel_logprobs


def coordinates_agree(parallel: ParallelConfig) -> None:
    groups = RoleGroups.build(parallel, timeout=30)
    here = groups.coordinates
    with groups.activate():
        assert parallel_state.get_tensor_model_parallel_rank() == here.tensor
        assert parallel_state.get_context_parallel_rank() == here.context
        assert parallel_state.get_data_parallel_rank() == here.data
        assert parallel_state.get_pipeline_model_parallel_rank() == here.pipeline
        assert parallel_state.get_expert_model_parallel_rank() == here.expert
        assert parallel_state.get_expert_tensor_parallel_rank() == here.expert_tensor
        assert parallel_state.get_data_parallel_world_size() == groups.grid.data_parallel_size
        assert parallel_state.is_pipeline_last_stage() == groups.is_last_stage


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tensor=2, pipeline=2),
        ParallelConfig(context=2),
        ParallelConfig(tensor=2, expert=2),
        ParallelConfig(pipeline=2, expert=2),
    ],
    ids=["tp2pp2", "cp2dp2", "tp2ep2", "pp2ep2"],
)
def test_coordinates_are_megatrons(parallel: ParallelConfig) -> None:
    run(coordinates_agree, 4, parallel)


def roles_are_apart() -> None:
    assert not parallel_state.model_parallel_is_initialized()
    with mock.patch.object(dist, "new_group", side_effect=dist.new_group) as new_group:
        first = RoleGroups.build(ParallelConfig(tensor=2), seed=1)
        made = new_group.call_count
        second = RoleGroups.build(ParallelConfig(pipeline=2), seed=2)
        assert new_group.call_count == made, "two ranks have no group that the first role did not make"
    assert not parallel_state.model_parallel_is_initialized(), "building leaves no layout behind"
    with first.activate():
        first_states = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
        with second.activate():
            assert parallel_state.get_pipeline_model_parallel_world_size() == 2
            assert parallel_state.get_tensor_model_parallel_world_size() == 1
            with get_cuda_rng_tracker().fork():
                drawn = torch.rand(3)
        assert parallel_state.get_tensor_model_parallel_world_size() == 2
        for name, state in get_cuda_rng_tracker().get_states().items():
            assert torch.equal(state, first_states[name]), f"the other role moved {name}"
    with second.activate(), get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(3), drawn), "a role's generator goes on where it was"
    with pytest.raises(KeyError), second.activate():
        raise KeyError
    assert not parallel_state.model_parallel_is_initialized(), "also after an error"


def test_roles_share_communicators_and_nothing_else() -> None:
    run(roles_are_apart, 2)


def one_rank_stays_away() -> None:
    groups = RoleGroups.build(ParallelConfig(tensor=2), timeout=2)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=groups.tensor)
    else:
        dist.recv(torch.ones(1), src=0)


def test_a_collective_fails_after_the_role_s_timeout() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 failed(.|\n)*[Tt]imed out"):
        run(one_rank_stays_away, 2, deadline=30)


def vocabulary_is_split(vocab_size: int) -> None:
    """48 columns on two ranks; with 20 real ones the second rank holds nothing but padding."""
    generator = torch.Generator().manual_seed(0)
    whole = (4 * torch.randn(13, 48, generator=generator)).double().requires_grad_()
    targets = torch.randint(0, vocab_size, (13,), generator=generator)
    up, up_entropy = torch.randn(2, 13, generator=generator)
    own = whole.detach().float().chunk(2, 1)[dist.get_rank()].clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(own, targets, dist.group.WORLD, 1.3, vocab_size, 4, with_entropy=True)
    assert entropy is not None
    (up * logprobs + up_entropy * entropy).sum().backward()
    log_softmax = torch.log_softmax(whole[:, :vocab_size] / 1.3, -1)
    wanted = log_softmax.gather(1, targets[:, None])[:, 0]
    wanted_entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    (up * wanted + up_entropy * wanted_entropy).sum().backward()
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.grad.double(), whole.grad.chunk(2, 1)[dist.get_rank()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [48, 41, 20])
def test_logprobs_of_a_split_vocabulary(vocab_size: int) -> None:
    run(vocabulary_is_split, 2, vocab_size)


def fails_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the cause")
    dist.barrier()


def test_the_harness_names_the_rank_that_failed_first() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed(.|\n)*the cause"):
        run(fails_on_one, 2)
