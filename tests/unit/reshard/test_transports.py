"""Regions of a bucket find their place in parameters, and what is wrong is named; sharing is between two processes."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch import nn

from megarl.reshard.channel import PeerLost
from megarl.reshard.transports import (
    BucketRegion,
    allocate_shareable,
    answer,
    copy_regions,
    describe_envelope,
    describe_parameters,
    open_shared,
    parse_description,
    read_reply,
    share,
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
    copy_regions(dict(model.named_parameters()), regions, flat)
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


def produce(connection):
    flat = allocate_shareable(20, torch.device("cpu"))
    values = flat.view(torch.float32)
    values.copy_(torch.arange(1.0, 6.0))
    connection.send_bytes(share(flat))
    connection.recv()
    values.mul_(10)
    connection.send("multiplied")
    connection.recv()


def test_a_buffer_of_another_process_is_opened_once_and_can_be_filled_again():
    here, there = multiprocessing.Pipe()
    producer = multiprocessing.get_context("fork").Process(target=produce, args=(there,))
    producer.start()
    values = open_shared(here.recv_bytes()).view(torch.float32)
    assert values.tolist() == [1, 2, 3, 4, 5]
    here.send("go on")
    assert here.recv() == "multiplied"
    assert values.tolist() == [10, 20, 30, 40, 50]
    here.send("end")
    producer.join(20)
    assert producer.exitcode == 0


def test_only_a_flat_buffer_is_shared():
    with pytest.raises(ValueError, match="a bucket must be one contiguous dimension"):
        share(torch.zeros(4, 2))


def test_a_loader_answers_instead_of_raising(tmp_path):
    reply = str(tmp_path / "reply")

    def fail(error):
        raise error

    for error, said in (
        (ValueError("as it is"), "^as it is$"),
        (PeerLost("ours"), "^ours$"),
        (KeyError("x"), "^KeyError: 'x'$"),
    ):
        answer(named(describe_envelope(reply)), lambda _, error=error: fail(error))
        with pytest.raises(RuntimeError, match=said):
            read_reply(reply)
    with pytest.raises(RuntimeError, match="did not run"):
        read_reply(reply)


def test_parameters_are_described(tmp_path):
    reply = str(tmp_path / "reply")
    describe_parameters(Model(), named(describe_envelope(reply)))
    described = parse_description(read_reply(reply))
    assert {name: (p.shape, p.dtype) for name, p in described.items()} == {
        "matrix": ((4, 3), "float32"),
        "vector": ((5,), "float32"),
        "experts": ((2, 3, 2), "bfloat16"),
    }
