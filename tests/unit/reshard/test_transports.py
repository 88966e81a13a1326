"""Regions of a bucket find their place in parameters, and what is wrong is named; sharing is between two processes."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch import nn

from megarl.reshard.transports import (
    BucketRegion,
    ChecksumRegion,
    bucket_envelope,
    checksum_envelope,
    checksum_regions,
    copy_regions,
    describe_envelope,
    describe_parameters,
    load_regions,
    parse_description,
    read_reply,
    serialise_bucket,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(4, 3))
        self.vector = nn.Parameter(torch.zeros(5))
        self.experts = nn.Parameter(torch.zeros(2, 3, 2, dtype=torch.bfloat16))


def named(envelope):
    return [(envelope, torch.empty(0))]


def test_regions_are_copied_into_their_rectangles():
    model = Model()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    flat = torch.zeros(64, dtype=torch.uint8)
    flat[:16].view(torch.float32).copy_(torch.tensor([1.0, 2, 3, 4]))
    flat[16:24].view(torch.float32).copy_(torch.tensor([5.0, 6]))
    flat[24:32].view(torch.bfloat16).copy_(torch.tensor([7.0, 8, 9, 10]))
    regions = [
        BucketRegion("matrix", "float32", (1, 3), (1, 3), 0),
        BucketRegion("vector", "float32", (3, 5), (0, 1), 16),
        BucketRegion("experts", "bfloat16", (4, 6), (0, 2), 24),
    ]
    assert copy_regions(dict(model.named_parameters()), regions, flat) == 32
    assert model.matrix.tolist() == [[0, 0, 0], [0, 1, 2], [0, 3, 4], [0, 0, 0]]
    assert model.vector.tolist() == [0, 0, 0, 5, 6]
    assert model.experts.tolist() == [[[0, 0], [0, 0], [0, 0]], [[0, 0], [7, 8], [9, 10]]]
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (BucketRegion("matrx", "float32", (0, 1), (0, 1), 0), "matrx: .* nearest is matrix"),
        (BucketRegion("matrix", "bfloat16", (0, 1), (0, 1), 0), "matrix: is float32 here, but .* bfloat16"),
        (BucketRegion("matrix", "float32", (0, 5), (0, 1), 0), "matrix: rows 0 to 5 are not in its 4 rows"),
        (BucketRegion("matrix", "float32", (0, 1), (2, 4), 0), "matrix: columns 2 to 4 are not in its 3 columns"),
        (BucketRegion("vector", "float32", (0, 1), (0, 1), 2), "vector: byte 2 is not aligned"),
        (BucketRegion("vector", "float32", (0, 5), (0, 1), 32), "vector: the bucket ends after 48 bytes"),
    ],
)
def test_a_wrong_region_is_named_and_nothing_is_written(region, message):
    model = Model()
    right = BucketRegion("vector", "float32", (0, 2), (0, 1), 0)
    with pytest.raises(ValueError, match=message):
        copy_regions(dict(model.named_parameters()), [right, region], torch.ones(12))
    assert not model.vector.any()


def test_a_parameter_that_a_backend_repacked_is_refused():
    parameters = {"packed": torch.zeros(3, 4).t()}
    with pytest.raises(ValueError, match="packed: is not stored row by row"):
        copy_regions(parameters, [BucketRegion("packed", "float32", (0, 1), (0, 1), 0)], torch.ones(4))


def test_a_region_outside_the_bucket_is_refused_by_the_producer():
    with pytest.raises(ValueError, match="vector: bytes 4 to 24 lie outside the bucket of 20 bytes"):
        serialise_bucket([BucketRegion("vector", "float32", (0, 5), (0, 1), 4)], torch.zeros(5))


def produce(connection):
    flat = torch.arange(1.0, 6.0)
    connection.send_bytes(serialise_bucket([BucketRegion("vector", "float32", (0, 5), (0, 1), 0)], flat))
    connection.recv()
    flat.mul_(10)
    connection.send_bytes(serialise_bucket([BucketRegion("vector", "float32", (0, 5), (0, 1), 0)], flat))
    connection.recv()


def test_a_bucket_of_another_process_is_loaded_and_can_be_filled_again(tmp_path):
    model, reply = Model(), str(tmp_path / "reply")
    here, there = multiprocessing.Pipe()
    producer = multiprocessing.get_context("fork").Process(target=produce, args=(there,))
    producer.start()
    for factor in (1, 10):
        load_regions(model, named(bucket_envelope(reply, here.recv_bytes())))
        assert read_reply(reply) == 20
        assert model.vector.tolist() == [factor * i for i in (1, 2, 3, 4, 5)]
        here.send("go on")
    producer.join(20)
    assert producer.exitcode == 0


def test_a_loader_answers_instead_of_raising(tmp_path):
    reply = str(tmp_path / "reply")
    load_regions(Model(), named(bucket_envelope(reply, b"no pickle")))
    with pytest.raises(RuntimeError, match="UnpicklingError"):
        read_reply(reply)
    checksum_regions(Model(), named(checksum_envelope(reply, [ChecksumRegion("vectr", (0, 1), (0, 1), 0, 0, 1)])))
    with pytest.raises(RuntimeError, match="vectr: .* nearest is vector"):
        read_reply(reply)
    with pytest.raises(RuntimeError, match="did not run"):
        read_reply(reply)


def test_checksums_see_what_was_loaded(tmp_path):
    model, reply = Model(), str(tmp_path / "reply")
    regions = [ChecksumRegion("matrix", (0, 2), (0, 3), 4, 0, 3), ChecksumRegion("vector", (0, 5), (0, 1), 0, 0, 1)]
    sums = []
    for _ in range(2):
        checksum_regions(model, named(checksum_envelope(reply, regions)))
        sums.append(read_reply(reply))
        model.vector.data.add_(1)
    assert sums[0][0] == sums[1][0]
    assert sums[0][1] != sums[1][1]


def test_parameters_are_described(tmp_path):
    reply = str(tmp_path / "reply")
    describe_parameters(Model(), named(describe_envelope(reply)))
    described = parse_description(read_reply(reply))
    assert {name: (p.shape, p.dtype) for name, p in described.items()} == {
        "matrix": ((4, 3), "float32"),
        "vector": ((5,), "float32"),
        "experts": ((2, 3, 2), "bfloat16"),
    }
