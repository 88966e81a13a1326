"""The real SGLang on the CPU, trainers without Megatron that send it weights, and what transformers says of both."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from datetime import timedelta

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megarl.config import ParallelConfig, RolloutConfig, SGLangConfig
from megarl.engines.sglang import SGLangEngine
from megarl.model.families import declare
from megarl.model.role_layout import role_layout
from megarl.reshard import hf_files
from megarl.reshard.checksum import TensorChecksums, compare
from megarl.reshard.executor import Executor
from megarl.reshard.layouts import hf_layout, sglang_layout
from megarl.reshard.plan import plan
from megarl.types import GenerationRequest, SamplingParams
from megarl.workers.weights import WeightSender
from tests.processes import Party, inject

VOCAB, MAX_LENGTH = 99, 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def save_model(config, seed, folder):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


@contextlib.contextmanager
def running_engine(folder, tensor, log_file, load_weights=True, **options):
    """An engine of a folder's model; afterwards it is gone, and so are its processes."""
    rollout = RolloutConfig(tensor=tensor, sglang=SGLangConfig(max_running_requests=16, **options))
    before = set(psutil.Process().children(recursive=True))
    engine = SGLangEngine(
        str(folder),
        tensor,
        rollout,
        "fp32",
        MAX_LENGTH,
        seed=1,
        device="cpu",
        load_weights=load_weights,
        log_file=str(log_file),
    )
    try:
        yield engine
    finally:
        engine.shutdown()
    assert not engine.is_alive
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert [p for p in left if "sglang" in p.name() or "spawn_main" in " ".join(p.cmdline())] == []


def make_requests(count=8, max_new_tokens=10, **sampling):
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return [GenerationRequest(str(i), rng.integers(0, VOCAB, 3 + i), params, seed=i) for i in range(count)]


def assert_greedy_as(model, requests, results):
    for request, result in zip(requests, results, strict=True):
        prompt = torch.from_numpy(request.prompt_ids)[None]
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False, pad_token_id=0
        )
        assert result.uid == request.uid
        assert result.response_ids.tolist() == expected[0, prompt.shape[1] :].tolist()
        np.testing.assert_allclose(result.logprobs, logprobs_of(model, request, result), atol=1e-4)


@torch.no_grad()
def logprobs_of(model, request, result, temperature=1.0):
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, result.response_ids]))[None]
    logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.from_numpy(result.response_ids)[:, None])[:, 0].numpy()


# ---------------------------------------------------------------------------------------- trainers

NUM_TRAINERS = 4
TENSOR_PIPELINE = ParallelConfig(tensor=2, pipeline=2)
CPU = torch.device("cpu")


class Trainer:
    """A rank of a Megatron layout without Megatron: its parameters come from a folder, and go to SGLang."""

    def __init__(self, config, parallel, target, store, rank, fault=None):
        tempfile.tempdir = os.path.dirname(store)  # where its sockets lie when it is killed
        file_store = dist.FileStore(store, NUM_TRAINERS)
        group = dist.ProcessGroupGloo(file_store, rank, NUM_TRAINERS, timedelta(seconds=30))
        self.whole = hf_layout(declare(config))
        self.layout, self.rank = source_layout(config, parallel), rank
        self.parameters = {n: torch.zeros(s) for n, s in self.layout.shard(rank).parameters.items()}
        made = plan(self.layout, target, 4, bucket_bytes=16_000)
        assert len(made.buckets) > 5
        names = [f"SGLang tensor rank {t} of replica 0" for t in range(target.num_ranks)]
        self.sender = WeightSender(made, torch.float32, rank, range(target.num_ranks), CPU, names, group)
        if fault is not None:
            inject(Executor, "exchange", *fault)

    def sockets(self):
        return self.sender.sockets

    def sync(self, number, folder, verify):
        hf_files.load(folder, self.layout, self.rank, self.parameters, self.whole)
        return self.sender.sync(number, self.parameters, None, verify, 60.0)


def source_layout(config, parallel):
    return role_layout("actor", config, parallel, NUM_TRAINERS, fused_norms=False)


def target_layout(config, tensor, expert=1, data_parallel=1, data_parallel_head=False):
    return sglang_layout(declare(config), tensor, 1, 64, expert, data_parallel, data_parallel_head)


class Trainers:
    """All ranks of the trainers. fault: of rank 1, see `inject`."""

    def __init__(self, config, folder, tensor, fault=None, parallel=TENSOR_PIPELINE, **sizes):
        self.source, self.target = source_layout(config, parallel), target_layout(config, tensor, **sizes)
        self.tensor, self.number = tensor, 0
        store = str(folder / f"store{uuid.uuid4().hex}")
        faults = {1: fault}
        self.parties = [
            Party(Trainer, config, parallel, self.target, store, r, faults.get(r)) for r in range(NUM_TRAINERS)
        ]
        found = {t: path for party in self.parties for t, path in party.call("sockets").items()}
        self.sockets = [found[t] for t in range(tensor)]

    def start(self, folder, verify):
        self.number += 1
        for party in self.parties:
            party.start("sync", self.number, folder, verify)

    def results(self):
        return [party.result() for party in self.parties]

    def check(self, sent, loaded):
        """What SGLang holds is what was sent."""
        assert [report.differences for report in loaded] == [[]] * self.tensor
        expected, actual = (
            TensorChecksums(layout, range(len(reports))).of({r: report.sums for r, report in enumerate(reports)})
            for layout, reports in ((self.source, sent), (self.target, loaded))
        )
        compare(expected, actual, "replica 0")

    def load_into(self, engine, folder, version, verify="checksum"):
        """A sync of a folder's weights, checked."""
        self.start(folder, verify)
        loaded = engine.load_weights(self.number, self.sockets, version)
        self.check(self.results(), loaded)
        engine.flush_cache()
