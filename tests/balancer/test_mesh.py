"""Meshes and launchers: which ranks share batches, which data rank this is, and what is refused by name."""

from dataclasses import dataclass
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import LayoutError
from balancer.layout import ParallelSpec
from balancer.mesh import DATA_DIMS, SHARING_DIMS, launched_world_size, mesh_dp_rank, mesh_sizes


@dataclass(frozen=True)
class Mesh:
    """What of a DeviceMesh is read."""

    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None = None

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.coordinate


def everywhere(names: tuple[str, ...], shape: tuple[int, ...]) -> list[Mesh]:
    """The mesh as each of its ranks sees it, in the order of world ranks."""
    return [Mesh(names, shape, place) for place in product(*map(range, shape))]


NAMES = st.lists(st.sampled_from([*DATA_DIMS, *SHARING_DIMS, "pp"]), min_size=1, max_size=5, unique=True).map(tuple)


@given(names=NAMES, data=st.data())
def test_every_data_rank_is_given_to_the_same_number_of_processes(names: tuple[str, ...], data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, 3)) for _ in names)
    meshes = everywhere(names, shape)
    dp_size, pp_size = mesh_sizes(meshes[0])
    assert dp_size == prod(size for name, size in zip(names, shape, strict=True) if name in DATA_DIMS)
    assert pp_size == prod(size for name, size in zip(names, shape, strict=True) if name == "pp")
    ranks = [mesh_dp_rank(mesh) for mesh in meshes]
    assert sorted(set(ranks)) == list(range(dp_size))
    assert {ranks.count(rank) for rank in ranks} == {len(meshes) // dp_size}
    others = [name not in DATA_DIMS for name in names]
    for mesh, rank in zip(meshes, ranks, strict=True):  # a place along another dim changes nothing
        place = tuple(0 if other else at for at, other in zip(mesh.coordinate or (), others, strict=True))
        assert mesh_dp_rank(Mesh(names, shape, place)) == rank


def test_the_last_data_dim_counts_fastest_in_the_order_of_the_mesh() -> None:
    mesh = Mesh(("pp", "dp_replicate", "dp_shard", "tp"), (2, 2, 3, 2), (1, 1, 2, 0))
    assert mesh_sizes(mesh) == (6, 2)
    assert mesh_dp_rank(mesh) == 5
    assert mesh_dp_rank(mesh, dp=("dp_shard", "dp_replicate")) == 5, "the order of the names given does not matter"
    assert mesh_dp_rank(mesh, dp="dp_shard") == 2


@pytest.mark.parametrize("name", ["dp", "dp_replicate", "dp_shard", "fsdp", "hsdp"])
def test_a_mesh_of_data_only_is_pure_data_parallelism(name: str) -> None:
    spec = ParallelSpec.from_mesh(Mesh((name,), (4,), (3,)))
    assert spec == ParallelSpec.pipeline(dp_size=4)


def test_tensor_context_and_expert_dims_share_the_batches_of_a_replica() -> None:
    spec = ParallelSpec.from_mesh(Mesh(("fsdp", "tp", "cp", "ep"), (2, 4, 2, 2)))
    assert (spec.dp_size, spec.num_ranks) == (2, 1)


def test_a_pipeline_dim_becomes_stages_and_options_are_passed_on() -> None:
    spec = ParallelSpec.from_mesh(
        Mesh(("pp", "dp"), (3, 2)),
        encoder="shared",
        num_microbatches=4,
        meet="microbatch",
        media_presence="aligned",
    )
    assert spec.stage_ranks == (0, 0, 1, 2)
    assert (spec.dp_size, spec.num_microbatches) == (2, 4)
    assert (spec.meet, spec.media_presence) == ("microbatch", "aligned")


def test_dims_of_any_name_may_be_data_or_pipeline_when_that_is_said() -> None:
    mesh = Mesh(("stages", "replicas", "inside"), (2, 3, 5), (1, 2, 4))
    assert mesh_sizes(mesh, dp="replicas", pp="stages") == (3, 2)
    assert mesh_dp_rank(mesh, dp=("replicas", "inside"), pp="stages") == 14
    assert ParallelSpec.from_mesh(mesh, dp=("replicas", "inside"), pp="stages").dp_size == 15


def test_a_dim_of_an_unknown_name_is_refused_with_the_two_arguments() -> None:
    with pytest.raises(
        LayoutError,
        match=r"dim 'data' of the mesh \(data, tp\) is not known: data are dp, .* Say which dims are data with dp=\(",
    ):
        ParallelSpec.from_mesh(Mesh(("data", "tp"), (2, 2)))


@pytest.mark.parametrize("names", [None, ()])
def test_dims_without_names_are_refused_with_the_line_to_write(names: tuple[str, ...] | None) -> None:
    with pytest.raises(LayoutError, match=r"DeviceMesh \(4,\) have no names, .* mesh_dim_names=\(\"dp\", \.\.\.\)"):
        mesh_sizes(Mesh(names, (4,)))
    with pytest.raises(LayoutError, match="have no names"):
        mesh_dp_rank(Mesh(names, (4,), (0,)))


def test_names_that_the_mesh_does_not_have_are_refused() -> None:
    mesh = Mesh(("dp", "tp"), (2, 2), (0, 0))
    with pytest.raises(LayoutError, match="dp='fsdp' is no dim of the mesh; its dims are dp, tp"):
        ParallelSpec.from_mesh(mesh, dp=("dp", "fsdp"))
    with pytest.raises(LayoutError, match="pp='pipe' is no dim of the mesh"):
        ParallelSpec.from_mesh(mesh, pp="pipe")


def test_one_dim_in_two_roles_is_refused() -> None:
    with pytest.raises(LayoutError, match="dim 'pp' cannot be data and pipeline at once"):
        mesh_sizes(Mesh(("pp", "dp"), (2, 2)), dp=("pp", "dp"))


def test_a_process_outside_the_mesh_has_no_data_rank() -> None:
    with pytest.raises(LayoutError, match=r"not part of the DeviceMesh dp 2 x tp 4: only its members have a data rank"):
        mesh_dp_rank(Mesh(("dp", "tp"), (2, 4), None))


def test_something_that_is_no_mesh_is_refused_by_its_type() -> None:
    with pytest.raises(LayoutError, match="mesh is a dict; give a torch DeviceMesh"):
        ParallelSpec.from_mesh({"dp": 2})  # type: ignore[arg-type]


def test_the_launched_world_becomes_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert ParallelSpec.from_env() == ParallelSpec.pipeline(dp_size=6)
    spec = ParallelSpec.from_env(
        pp_size=2, encoder="own", num_microbatches=3, meet="microbatch", media_presence="aligned"
    )
    assert (spec.dp_size, spec.stage_ranks, spec.num_microbatches) == (3, (0, 1), 3)
    assert (spec.meet, spec.media_presence) == ("microbatch", "aligned")


def test_a_world_that_replicas_do_not_fill_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(LayoutError, match=r"pp_size=4 does not divide the world of 6 processes; the nearest .* is 3"):
        ParallelSpec.from_env(pp_size=4)


def test_a_script_that_torchrun_did_not_start_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(LayoutError, match=r"WORLD_SIZE is not set: .* torchrun, .*dp_size=1\) for one"):
        ParallelSpec.from_env()


@pytest.mark.parametrize("text", ["", "0", "two", "-1", "2.0", "²", "9" * 400])
def test_a_world_size_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="is no number of processes"):
        launched_world_size({"WORLD_SIZE": text})


def test_an_absurd_world_size_is_refused_as_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "9" * 12)
    with pytest.raises(LayoutError, match="a world has at most 1048576 processes"):
        ParallelSpec.from_env()


@pytest.mark.parametrize("value", ["dummy", "sometimes", None])
def test_other_kinds_of_media_presence_are_refused(value: object) -> None:
    with pytest.raises(LayoutError, match=r"media_presence=.* does not exist in a plan; available: any, aligned"):
        ParallelSpec(domains=ParallelSpec.pipeline().domains, media_presence=value)  # type: ignore[arg-type]


def test_aligned_media_need_an_encoder_that_stays_with_its_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(LayoutError, match=r"needs an encoder that runs with its micro-batch; .*media_presence='any'"):
        ParallelSpec.from_env(pp_size=2, encoder="spread", media_presence="aligned")


@pytest.mark.torch
def test_a_torch_device_mesh_is_read_as_it_is() -> None:
    """64 ranks of a fake world; every rank's data rank as torch itself flattens it."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    names, shape = ("pp", "dp_replicate", "dp_shard", "tp"), (2, 4, 4, 2)
    found = []
    for rank in (0, 1, 2, 31, 63):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)
        try:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            replicas = mesh["dp_replicate", "dp_shard"]
            at = replicas.get_coordinate()
            assert at is not None
            assert mesh_dp_rank(mesh) == mesh_dp_rank(replicas) == at[0] * 4 + at[1]
            spec = ParallelSpec.from_mesh(mesh)
            assert (spec.dp_size, spec.num_ranks) == (16, 2)
            assert ParallelSpec.from_mesh(mesh["dp_shard"]).dp_size == 4
            found.append(mesh_dp_rank(mesh))
        finally:
            dist.destroy_process_group()
    assert found == [0, 0, 1, 15, 15]
