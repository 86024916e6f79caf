"""Where things run: parallel degrees and the mapping of ranks. Pure numbers, no torch, no process group.

    world rank = dp_rank * pp_size + pp_rank        (pipeline neighbours are rank neighbours)

`Layout` is what the trainer runs: replicas of a pipeline whose stage 0 is the encoder. `ParallelSpec` is what the
planner plans for: domains (encoder, llm, generator), each on its own ranks of a replica, and the rules about
micro-batches. Stages are numbered along the chain, so the table below is all that schedules and costs need:

    pipeline(pp_size=3, encoder=...)   stages            stage_ranks
    "own"                              E L0 L1           0 1 2          the encoder has rank 0 to itself
    "shared"                           E L0 L1 L2        0 0 1 2        ... runs beside the first LLM stage
    "spread"                           E L0 L1 L2        -1 0 1 2       ... is on every rank, for whole micro-batches
    "none"                             L0 L1 L2          0 1 2          text only
    "shared", num_chunks=2             E L0 .. L5        0 0 1 2 0 1 2  interleaved: LLM stage c lies on rank c % 3

Price: a domain is a pipeline or spread over its ranks, nothing between; degrees inside a stage (TP, EP) are invisible
here, they only scale the cost model.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from balancer.errors import LayoutError
from balancer.layout_numbers import check_multiple, chunk_count, degree, microbatch_count
from balancer.mesh import MeshLike, Names, launched_world_size, mesh_sizes
from balancer.whole_numbers import shown, whole_number

# Far above any cluster, and low enough that tables of cells [R, M, S] (512 MiB a column at 2^26) can be allocated:
# what lies beyond is a typing error, and is refused before a list of that length is made.
MAX_DEGREE = 2**20
MAX_PIPELINE_RANKS = 2**12
MAX_STAGES = 2**14
MAX_MICROBATCHES = 2**16
MAX_CELLS = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism of one domain or of the whole job.

    Attributes:
        dp_size: data-parallel replicas.
        pp_size: pipeline ranks of one replica. 1: every piece on one rank; P > 1: the encoder is stage 0 and the
            LLM layers are split over stages 1..P-1.
        tp_size, cp_size, ep_size: tensor, context and expert degrees; only 1 runs today.

    Raises:
        LayoutError: a degree that is no whole number, below 1 or beyond any cluster, or that no executor runs yet.
    """

    dp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        for name in ("dp_size", "pp_size", "tp_size", "cp_size", "ep_size"):
            most = MAX_PIPELINE_RANKS if name == "pp_size" else MAX_DEGREE
            object.__setattr__(self, name, degree(name, getattr(self, name), most))
        for name in ("tp_size", "cp_size", "ep_size"):
            if getattr(self, name) != 1:
                raise LayoutError(f"{name}={getattr(self, name)} is not available yet; use {name}=1")

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.dp_size * self.pp_size * self.tp_size * self.cp_size

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(dp_rank, pp_rank) of a world rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank} is outside a world of {self.world_size} (dp {self.dp_size} x pp {self.pp_size})"
            )
        return divmod(rank, self.pp_size)

    def rank(self, dp_rank: int, pp_rank: int) -> int:
        """World rank of a (dp_rank, pp_rank)."""
        return dp_rank * self.pp_size + pp_rank

    @classmethod
    def for_world(cls, world_size: int, *, pp_size: int = 1) -> "Layout":
        """The layout that fills `world_size` processes with replicas of `pp_size` pipeline ranks."""
        world_size = whole_number(
            "world_size",
            world_size,
            error=LayoutError,
            below="a world has at least one process",
            above=f"a world has at most {MAX_DEGREE} processes",
            at_least=1,
            at_most=MAX_DEGREE,
        )
        pp_size = degree("pp_size", pp_size, MAX_PIPELINE_RANKS)
        if world_size % pp_size:
            divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
            nearest = min(divisors, key=lambda size: abs(size - pp_size))
            raise LayoutError(
                f"pp_size={pp_size} does not divide the world of {world_size} processes; "
                f"the nearest that does is {nearest}"
            )
        return cls(dp_size=world_size // pp_size, pp_size=pp_size)

    def stage_ranks(self) -> list[int]:
        """Pipeline rank of each cost stage (encoder, LLM 0, LLM 1, ...)."""
        return [0, *range(1, self.pp_size)] if self.pp_size > 1 else [0, 0]

    @property
    def num_stages(self) -> int:
        """Cost stages S: the encoder and at least one LLM stage."""
        return max(self.pp_size, 2)


DomainName = Literal["encoder", "llm", "generator"]
EncoderPlace = Literal["own", "shared", "spread", "none"]
Meet = Literal["step", "microbatch", "unit"]
EncoderGroup = Literal["replica", "world"]
MediaPresence = Literal["any", "aligned"]

SPREAD = -1
"""Rank of a stage that every rank of its domain holds whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A part of the model with its own ranks.

    Attributes:
        name: `encoder`, `llm` or `generator`.
        ranks: pipeline ranks of one replica that hold it, in the order of its stages.
        num_chunks: stages per rank; stage c of the domain lies on ranks[c % len(ranks)].
        spread: every rank holds all of it and takes whole micro-batches; it is one stage then.

    Raises:
        LayoutError: no ranks, a rank twice, below 0 or no whole number, no chunk, a spread domain of several chunks,
            or more ranks or stages than any pipeline has.
    """

    name: DomainName
    ranks: tuple[int, ...]
    num_chunks: int = 1
    spread: bool = False

    def __post_init__(self) -> None:
        if self.name not in get_args(DomainName):
            raise LayoutError(f"domain {self.name!r} does not exist; domains: {', '.join(get_args(DomainName))}")
        object.__setattr__(self, "ranks", self._checked_ranks())
        object.__setattr__(self, "num_chunks", chunk_count(self.name, self.num_chunks, at_most=MAX_STAGES))
        if not isinstance(self.spread, bool):
            raise LayoutError(f"domain {self.name}: spread={shown(self.spread)} is neither True nor False")
        if self.spread and self.num_chunks != 1:
            raise LayoutError(
                f"domain {self.name}: num_chunks={self.num_chunks}, spread={self.spread}: a domain has at least one "
                "chunk, and a spread one exactly one"
            )
        if self.num_stages > MAX_STAGES:
            raise LayoutError(
                f"domain {self.name}: {len(self.ranks)} ranks x num_chunks={self.num_chunks} are {self.num_stages} "
                f"stages, at most {MAX_STAGES}: use fewer chunks"
            )

    def _checked_ranks(self) -> tuple[int, ...]:
        ranks = self.ranks
        if not isinstance(ranks, tuple | list | range) or len(ranks) > MAX_PIPELINE_RANKS:
            raise LayoutError(
                f"domain {self.name}: ranks={shown(ranks)}: give a tuple of at most {MAX_PIPELINE_RANKS} ranks"
            )
        once = f"give each rank from 0 on once, at least one; here ranks={shown(tuple(ranks))}"
        beyond = f"ranks are numbered below {MAX_PIPELINE_RANKS}"
        numbers = tuple(
            whole_number(
                f"domain {self.name}: rank",
                rank,
                error=LayoutError,
                below=once,
                above=beyond,
                at_least=0,
                at_most=MAX_PIPELINE_RANKS - 1,
            )
            for rank in ranks
        )
        if not numbers or len(set(numbers)) != len(numbers):
            raise LayoutError(f"domain {self.name}: ranks={numbers}: give each rank from 0 on once, at least one")
        return numbers

    @property
    def num_stages(self) -> int:
        """Cost stages of the domain."""
        return 1 if self.spread else len(self.ranks) * self.num_chunks

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of each of its stages; SPREAD where every rank holds it."""
        return (SPREAD,) if self.spread else self.ranks * self.num_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """What a step is planned for: replicas, domains, micro-batches, and where ranks meet.

    Attributes:
        dp_size: replicas R.
        domains: in the order of the chain: encoder (may be missing), llm, generator (may be missing).
        num_microbatches: M of every replica, or None for the least that fits.
        min_num_microbatches, num_microbatches_multiple: floor and granularity of a free M.
        meet: where replicas wait for one another: once a `step`; in every `microbatch` (ZeRO-3, TP or EP over
            replicas); or per encoder `unit`.
        encoder_group: ranks over which a media item may be routed: those of its `replica`. `world` is a format hook.
        fill_cells: every replica gets a sample in every micro-batch as long as there are enough. Always so where
            replicas meet inside a step; a loader that hands out batches needs it everywhere.
        media_presence: `aligned`: every micro-batch has media on all replicas or on none, which an encoder whose
            parameters are sharded over replicas (FSDP, ZeRO-3) needs; see `balancer.policies.aligned_media`.

    Raises:
        LayoutError: domains that make no chain, or options that no plan covers.
    """

    dp_size: int = 1
    domains: tuple[Domain, ...]
    num_microbatches: int | None = None
    min_num_microbatches: int = 1
    num_microbatches_multiple: int = 1
    meet: Meet = "step"
    encoder_group: EncoderGroup = "replica"
    fill_cells: bool = False
    media_presence: MediaPresence = "any"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dp_size", degree("dp_size", self.dp_size, MAX_DEGREE))
        self._check_domains()
        if self.meet not in get_args(Meet):
            raise LayoutError(f"meet={self.meet!r} does not exist; available: {', '.join(get_args(Meet))}")
        if self.encoder_group not in get_args(EncoderGroup):
            raise LayoutError(f"encoder_group={self.encoder_group!r} does not exist; use 'replica'")
        if self.encoder_group == "world" and self.dp_size > 1:
            raise LayoutError(
                "encoder_group='world' needs one schedule cut over all replicas, which is not available yet; use "
                "encoder_group='replica': media items are then routed over the ranks of their replica"
            )
        self._check_media_presence()
        self._check_num_microbatches()

    def _check_domains(self) -> None:
        if not isinstance(self.domains, tuple | list) or not all(isinstance(part, Domain) for part in self.domains):
            raise LayoutError(f"domains={shown(self.domains)}: give a tuple of Domain")
        object.__setattr__(self, "domains", tuple(self.domains))
        names = [domain.name for domain in self.domains]
        order = [name for name in get_args(DomainName) if name in names]
        if names != order or "llm" not in names:
            raise LayoutError(f"domains {names}: give encoder, llm, generator in this order, each once, the llm always")
        held = {rank for domain in self.domains for rank in domain.ranks}
        if held != set(range(self.num_ranks)):
            missing = sorted(set(range(self.num_ranks)) - held)
            raise LayoutError(
                f"pipeline ranks {missing} of {self.num_ranks} hold no domain; number ranks without a gap"
            )
        llm = self.domain("llm")
        if llm is not None and llm.spread:
            raise LayoutError("the llm cannot be spread over pipeline ranks: use dp_size for replicas of it")

    def _check_media_presence(self) -> None:
        if self.media_presence not in get_args(MediaPresence):
            raise LayoutError(
                f"media_presence={shown(self.media_presence)} does not exist in a plan; available: "
                f"{', '.join(get_args(MediaPresence))} (dummy media are added to batches by the loader, not planned)"
            )
        if self.media_presence == "aligned" and self.encoder_is_spread:
            raise LayoutError(
                "media_presence='aligned' needs an encoder that runs with its micro-batch; a spread one takes media "
                "items from many: use encoder='own' or 'shared', or media_presence='any'"
            )

    def _check_num_microbatches(self) -> None:
        both = "min_num_microbatches and num_microbatches_multiple: both are at least 1"
        for name in ("min_num_microbatches", "num_microbatches_multiple"):
            object.__setattr__(
                self, name, microbatch_count(name, getattr(self, name), at_most=MAX_MICROBATCHES, below=both)
            )
        minimum, multiple = self.min_num_microbatches, self.num_microbatches_multiple
        # A free number is at least this; the plan checks what it becomes.
        least = -(-minimum // multiple) * multiple
        if self.num_microbatches is not None:
            fixed = microbatch_count(
                "num_microbatches", self.num_microbatches, at_most=MAX_MICROBATCHES, below="a step has at least one"
            )
            object.__setattr__(self, "num_microbatches", fixed)
            least = fixed
        check_num_cells(self.dp_size, least, self.num_stages)
        if self.num_microbatches is None:
            return
        if self.num_microbatches < minimum:
            raise LayoutError(f"num_microbatches={self.num_microbatches} is below the minimum of {minimum}")
        check_multiple(self.num_microbatches, multiple)

    @property
    def num_ranks(self) -> int:
        """P, pipeline ranks of one replica."""
        return max(max(domain.ranks) for domain in self.domains) + 1

    @property
    def num_stages(self) -> int:
        """S, cost stages in chain order."""
        return sum(domain.num_stages for domain in self.domains)

    @property
    def num_chunks(self) -> int:
        """V, chunks of the LLM per rank."""
        return max(domain.num_chunks for domain in self.domains if domain.name == "llm")

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of every stage, [S]; SPREAD (-1) where every rank of the domain holds it."""
        return tuple(rank for domain in self.domains for rank in domain.stage_ranks)

    @property
    def spread_stages(self) -> tuple[bool, ...]:
        """Whether a stage is spread, [S]."""
        return tuple(rank == SPREAD for rank in self.stage_ranks)

    @property
    def domain_of_stage(self) -> tuple[str, ...]:
        """Name of the domain of every stage, [S]."""
        return tuple(domain.name for domain in self.domains for _ in range(domain.num_stages))

    @property
    def has_encoder(self) -> bool:
        """Whether stage 0 is the encoder: it runs only in micro-batches with media."""
        return self.domains[0].name == "encoder"

    @property
    def encoder_is_spread(self) -> bool:
        """Whether media items have a placement of their own."""
        return self.domains[0].name == "encoder" and self.domains[0].spread

    def domain(self, name: DomainName) -> Domain | None:
        """The domain of that name, if there is one."""
        return next((domain for domain in self.domains if domain.name == name), None)

    @classmethod
    def pipeline(
        cls,
        *,
        dp_size: int = 1,
        pp_size: int = 1,
        encoder: EncoderPlace = "own",
        num_chunks: int = 1,
        generator: bool = False,
        num_microbatches: int | None = None,
        min_num_microbatches: int = 1,
        num_microbatches_multiple: int = 1,
        meet: Meet = "step",
    ) -> "ParallelSpec":
        """Replicas of a pipeline of `pp_size` ranks; see the module for `encoder`.

        A generator is spread where the encoder is, and otherwise the last stage of the last rank.

        Raises:
            LayoutError: a degree below 1, or an unknown place of the encoder.
        """
        pp_size = degree("pp_size", pp_size, MAX_PIPELINE_RANKS)
        if encoder not in get_args(EncoderPlace):
            raise LayoutError(f"encoder={encoder!r} does not exist; available: {', '.join(get_args(EncoderPlace))}")
        everywhere = tuple(range(pp_size))
        spread = encoder == "spread"
        domains: list[Domain] = []
        if encoder != "none":
            domains.append(Domain(name="encoder", ranks=everywhere if spread else (0,), spread=spread))
        llm_ranks = everywhere[1:] if encoder == "own" and pp_size > 1 else everywhere
        domains.append(Domain(name="llm", ranks=llm_ranks, num_chunks=num_chunks))
        if generator:
            domains.append(Domain(name="generator", ranks=everywhere if spread else everywhere[-1:], spread=spread))
        return cls(
            dp_size=dp_size,
            domains=tuple(domains),
            num_microbatches=num_microbatches,
            min_num_microbatches=min_num_microbatches,
            num_microbatches_multiple=num_microbatches_multiple,
            meet=meet,
        )

    @classmethod
    def of(
        cls,
        layout: Layout,
        *,
        num_microbatches: int | None = None,
        min_num_microbatches: int = 1,
        num_microbatches_multiple: int = 1,
        meet: Meet = "step",
    ) -> "ParallelSpec":
        """What the trainer's layout runs: the encoder alone on rank 0 where there are several ranks."""
        return cls.pipeline(
            dp_size=layout.dp_size,
            pp_size=layout.pp_size,
            num_microbatches=num_microbatches,
            min_num_microbatches=min_num_microbatches,
            num_microbatches_multiple=num_microbatches_multiple,
            meet=meet,
        )

    @classmethod
    def from_env(
        cls,
        *,
        pp_size: int = 1,
        encoder: EncoderPlace = "own",
        num_microbatches: int | None = None,
        meet: Meet = "step",
        media_presence: MediaPresence = "any",
    ) -> "ParallelSpec":
        """Replicas of `pp_size` ranks that fill the world torchrun has started (WORLD_SIZE).

        Raises:
            LayoutError: no WORLD_SIZE, a pp_size that does not divide it, or as `pipeline`.
        """
        layout = Layout.for_world(launched_world_size(), pp_size=pp_size)
        made = cls.pipeline(
            dp_size=layout.dp_size,
            pp_size=layout.pp_size,
            encoder=encoder,
            num_microbatches=num_microbatches,
            meet=meet,
        )
        return replace(made, media_presence=media_presence)

    @classmethod
    def from_mesh(
        cls,
        mesh: MeshLike,
        *,
        dp: Names = None,
        pp: str | None = None,
        encoder: EncoderPlace = "own",
        num_microbatches: int | None = None,
        meet: Meet = "step",
        media_presence: MediaPresence = "any",
    ) -> "ParallelSpec":
        """The degrees of a torch DeviceMesh; `dp` and `pp` name its dims, see `balancer.mesh`.

        Raises:
            LayoutError: dims without names or with unknown ones, or as `pipeline`.
        """
        dp_size, pp_size = mesh_sizes(mesh, dp=dp, pp=pp)
        made = cls.pipeline(
            dp_size=dp_size, pp_size=pp_size, encoder=encoder, num_microbatches=num_microbatches, meet=meet
        )
        return replace(made, media_presence=media_presence)


def check_num_cells(dp_size: int, num_microbatches: int, num_stages: int) -> None:
    """Refuse a step whose tables [R, M, S] nobody can hold, before one is made.

    Raises:
        LayoutError: more than `MAX_MICROBATCHES`, or than `MAX_CELLS` entries; the text has the product.
    """
    if num_microbatches > MAX_MICROBATCHES:
        raise LayoutError(
            f"the step takes {num_microbatches} micro-batches, at most {MAX_MICROBATCHES}: raise the capacity, or "
            "lower num_microbatches_multiple or the global batch size"
        )
    if dp_size * num_microbatches * num_stages > MAX_CELLS:
        raise LayoutError(
            f"dp_size={dp_size} x {num_microbatches} micro-batches x {num_stages} stages are "
            f"{dp_size * num_microbatches * num_stages} entries of a plan, at most {MAX_CELLS}: use fewer micro-batches"
        )
