"""Megatron's names for the boundaries of each of our batches."""

from dataclasses import dataclass, fields
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from balancer.adapters.hf_batch import HfCollate  # noqa: E402
from balancer.adapters.megatron import packed_seq_params  # noqa: E402
from balancer.batch import collate  # noqa: E402
from balancer.errors import PackingError  # noqa: E402

pytestmark = pytest.mark.torch

NAMES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@dataclass
class PackedSeqParams:
    """The fields of Megatron's class that concern the data."""

    qkv_format: str | None = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None


@pytest.fixture(params=["batch", "dict", "hf"])
def make(request):
    """Samples and alignment -> a batch in each of the loader's outputs."""

    def of(samples, align_tokens=1):
        if request.param == "hf":
            return HfCollate(align_tokens=align_tokens)(samples)
        batch = collate(samples, align_tokens=align_tokens)
        return batch if request.param == "batch" else {f.name: getattr(batch, f.name) for f in fields(batch)}

    return of


def test_every_output_of_the_loader_gives_all_fields(make, sample_of):
    samples = [sample_of(num_text=n, seed=n) for n in (5, 9, 3)]
    params = PackedSeqParams(**packed_seq_params(make(samples)))
    assert params.qkv_format == "thd"
    for name in NAMES:
        assert getattr(params, name).tolist() == [0, 5, 14, 17]
        assert getattr(params, name).dtype == torch.int32
    assert params.max_seqlen_q == params.max_seqlen_kv == 9
    assert type(params.max_seqlen_q) is int


def test_the_tail_is_a_sequence_and_counts_in_the_longest(make, sample_of):
    """AM-08: boundaries end at the last token of the buffer, and a tail longer than every sample is the longest."""
    params = packed_seq_params(make([sample_of(num_text=3)], align_tokens=16))
    assert params["cu_seqlens_q"].tolist() == [0, 3, 16]
    assert params["max_seqlen_q"] == 13


def test_boundaries_lie_where_the_tokens_are(sample_of):
    batch = HfCollate()([sample_of(num_text=4)])
    batch["input_ids"] = batch["input_ids"].to("meta")
    assert packed_seq_params(batch)["cu_seqlens_kv"].device.type == "meta"


def test_segments_that_context_parallelism_cannot_cut_are_refused(make, sample_of):
    samples = [sample_of(num_text=n) for n in (8, 12, 6)]
    assert packed_seq_params(make(samples[:2]), cp_size=2)["max_seqlen_q"] == 12
    with pytest.raises(
        PackingError, match=r"^1 of 3 segments cannot be cut into 4 chunks for context par.*lengths 6\."
    ):
        packed_seq_params(make(samples), cp_size=2)


def test_many_segments_that_cannot_be_cut_are_listed_in_part(make, sample_of):
    samples = [sample_of(num_text=n) for n in (5, 7, 9, 11, 13, 15)]
    with pytest.raises(
        PackingError, match=r"6 of 6 segments .* lengths 5, 7, 9, 11, 13, \.\.\.\. Pad samples to a mul"
    ):
        packed_seq_params(make(samples), cp_size=4)


def test_a_batch_without_boundaries_is_refused():
    with pytest.raises(PackingError, match=r"^the batch has no boundaries \(it has: input_ids\). Take one of Balanced"):
        packed_seq_params({"input_ids": torch.zeros(1, 4)})
