"""Placement: which GPU each engine and each rank of the learner owns, planned before anything starts.

`SortedConfig` checks its section `placement` with it when it is loaded, `run/builders` plan again with the GPUs that
are really there, and `sortedrl doctor` counts memory by the plan's devices. A plan is a pure function of a `Demand`
(what the configuration asks for) and a `Cluster` (how many GPUs each machine has).

Guarantees: no GPU has two owners of one kind, and with `separate` no two owners at all; the GPUs of an engine are on
one machine; what cannot be placed raises one line that names the keys to change.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from sortedrl.errors import ConfigError

if TYPE_CHECKING:
    from sortedrl.config.config import SortedConfig

Mode = Literal["colocated", "separate"]

# Keys of `placement` that are other names of keys elsewhere.
SAME_KEYS = {
    ("placement", "engines"): ("engine", "replicas"),
    ("placement", "tensor_parallel"): ("engine", "tensor_parallel"),
    ("placement", "ranks"): ("learner", "ranks"),
    ("placement", "context_parallel"): ("learner", "context_parallel"),
}


@dataclass(slots=True, kw_only=True, frozen=True, order=True)
class Device:
    """A GPU by the number of its machine and its number there."""

    node: int
    gpu: int

    def __str__(self) -> str:
        return f"{self.node}:{self.gpu}"


@dataclass(slots=True, kw_only=True, frozen=True)
class Cluster:
    """The number of GPUs of each machine."""

    gpus: tuple[int, ...] = ()

    @classmethod
    def of(cls, num_devices: int, gpus_per_node: int) -> Cluster:
        """Machines of `gpus_per_node` GPUs that have `num_devices` together; the last may have fewer."""
        whole, rest = divmod(num_devices, gpus_per_node)
        return cls(gpus=(gpus_per_node,) * whole + ((rest,) if rest else ()))

    @property
    def num_gpus(self) -> int:
        return sum(self.gpus)

    @property
    def devices(self) -> list[Device]:
        return [Device(node=node, gpu=gpu) for node, count in enumerate(self.gpus) for gpu in range(count)]

    def __str__(self) -> str:
        return f"{self.num_gpus} GPUs on {len(self.gpus)} {'machine' if len(self.gpus) == 1 else 'machines'}"


@dataclass(slots=True, kw_only=True, frozen=True)
class Demand:
    """What a configuration asks for. `mode` None: what the older keys say, without a section `placement`."""

    mode: Mode | None
    num_engines: int
    tensor_parallel: int
    num_ranks: int
    engine_gpus: float  # that Ray reserves for each engine; without mode, `engine.replica_gpus`
    rank_gpus: float  # the same for each rank
    has_engine_actors: bool  # engines run in Ray actors, not in the process of the run
    has_rank_actors: bool
    is_vllm: bool  # the engines use GPUs wherever they see some
    is_served_elsewhere: bool = False  # a running server has GPUs of its own
    learner_uses_gpu: bool = True  # in the process of the run: False if the configuration keeps it on the CPU
    has_overlap: bool = False

    @classmethod
    def of(cls, config: SortedConfig) -> Demand:
        return cls(
            mode=config.placement.mode,
            num_engines=config.num_engines,
            tensor_parallel=config.tensor_parallel,
            num_ranks=config.num_ranks,
            engine_gpus=config.engine.replica_gpus,
            rank_gpus=config.learner.rank_gpus,
            has_engine_actors=config.has_engine_pool,
            has_rank_actors=config.has_rank_actors,
            is_vllm=config.engine.kind == "vllm",
            is_served_elsewhere=bool(config.engine.address),
            learner_uses_gpu=config.learner.device != "cpu",
            has_overlap=bool(config.knobs.overlap),
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class Placement:
    """The devices of each engine and of each rank. Both are empty where no GPU is asked for."""

    mode: Mode | None
    engines: tuple[tuple[Device, ...], ...] = ()
    ranks: tuple[Device, ...] = ()

    @property
    def devices(self) -> list[Device]:
        """Every device with an owner."""
        return sorted({*self.ranks, *(device for engine in self.engines for device in engine)})

    def engine_on(self, device: Device) -> int | None:
        """The number of the engine that uses a device."""
        return next((number for number, devices in enumerate(self.engines) if device in devices), None)

    def rank_on(self, device: Device) -> int | None:
        return next((number for number, owned in enumerate(self.ranks) if owned == device), None)

    def __str__(self) -> str:
        engines, ranks = len(self.engines), len(self.ranks)
        width = len(self.engines[0]) if self.engines else 0
        parts = f"{engines} {'engine' if engines == 1 else 'engines'}" + (f" x {width} GPUs" if width > 1 else "")
        where = "on the same GPUs as" if self.mode == "colocated" else "and"
        return f"{parts} {where} {ranks} {'rank' if ranks == 1 else 'ranks'}"


def check_placement(config: SortedConfig) -> None:
    """Refuse a configuration whose placement contradicts itself, or does not fit the machines that it names."""
    for ours, theirs in SAME_KEYS.items():
        here, there = (getattr(getattr(config, section), key) for section, key in (ours, theirs))
        is_set = theirs[1] in getattr(config, theirs[0]).model_fields_set
        if here is not None and is_set and here != there:
            raise ConfigError(
                f"{'.'.join(ours)} {here} and {'.'.join(theirs)} {there} are two names of one number: remove one of "
                "them"
            )
    if config.tensor_parallel > 1 and config.engine.kind != "vllm":
        raise ConfigError(
            f"engine.tensor_parallel {config.tensor_parallel} needs engine.kind = vllm: set it, or remove the key"
        )
    together, ranks = config.context_parallel, config.num_ranks
    if ranks % together:
        raise ConfigError(
            f"learner.context_parallel {together} does not divide learner.ranks {ranks}: set learner.ranks to a "
            f"multiple of it, such as {-(-ranks // together) * together}"
        )
    if config.learner.offload_activations and not config.learner.recompute:
        raise ConfigError("learner.offload_activations needs learner.recompute = true: set it, or remove the key")
    if config.learner.offload and (config.has_rank_actors or config.knobs.overlap):
        raise ConfigError(
            "learner.offload is for a learner in one process that takes turns with the engine: remove it, or set "
            "learner.ranks = 1 and a strategy without schedule.overlap"
        )
    check_replicas(config)
    if config.placement.mode is not None:
        plan_placement(Demand.of(config), cluster_of(config))


def check_replicas(config: SortedConfig) -> None:
    """Refuse copies of the model that the ranks cannot be divided into."""
    replicas = config.learner.rank_replicas
    if config.num_ranks % replicas:
        raise ConfigError(
            f"learner.rank_replicas {replicas} does not divide the {config.num_ranks} learner processes of "
            "learner.ranks: change one of them"
        )


def cluster_of(config: SortedConfig) -> Cluster:
    """The machines that the configuration names."""
    return Cluster(gpus=(config.placement.gpus_per_node,) * config.placement.nodes)


def plan_placement(demand: Demand, cluster: Cluster) -> Placement:
    """The devices of engines and ranks; raises ConfigError for what cannot be placed or would collide."""
    if demand.mode is None:
        return _plan_by_reservations(demand, cluster)
    _check_mode(demand)
    _check_width(demand, cluster)
    return _plan_colocated(demand, cluster) if demand.mode == "colocated" else _plan_separate(demand, cluster)


def _check_mode(demand: Demand) -> None:
    """Refuse settings that contradict a placement, whatever the machines."""
    name = f"placement.mode = {demand.mode}"
    if demand.is_served_elsewhere:
        raise ConfigError(f"{name} places engines, and engine.address names a server with GPUs of its own: remove one")
    if not demand.is_vllm:
        raise ConfigError(f"{name} gives engines GPUs, which only engine.kind = vllm uses: set it, or remove the mode")
    if demand.engine_gpus not in (0, demand.tensor_parallel):
        raise ConfigError(
            f"engine.replica_gpus = {demand.engine_gpus:g} contradicts {name} with tensor parallelism over "
            f"{demand.tensor_parallel} GPUs: remove engine.replica_gpus, the placement knows it"
        )
    if demand.rank_gpus not in (0, 1):
        raise ConfigError(
            f"learner.rank_gpus = {demand.rank_gpus:g} contradicts {name}, in which a rank has one GPU: remove it"
        )
    if demand.mode == "colocated" and demand.has_overlap:
        raise ConfigError(
            "placement.mode = colocated lets engines and learner take turns, and the strategy lets them work at the "
            "same time (schedule.overlap): set placement.mode = separate, or a strategy such as sorted-partial"
        )


def _check_width(demand: Demand, cluster: Cluster) -> None:
    widest = max(cluster.gpus, default=0)
    if demand.tensor_parallel > widest:
        raise ConfigError(
            f"engine.tensor_parallel {demand.tensor_parallel} is more than the {widest} GPUs of a machine, and an "
            "engine does not span machines: lower it, or raise placement.gpus_per_node"
        )


def _plan_separate(demand: Demand, cluster: Cluster) -> Placement:
    """Ranks on the last GPUs, so that they share machines; engines on the others, each within one machine."""
    width, devices = demand.tensor_parallel, cluster.devices
    needed = demand.num_engines * width + demand.num_ranks
    if needed > len(devices):
        raise ConfigError(
            f"separate engines and ranks need {demand.num_engines} x {width} + {demand.num_ranks} = {needed} GPUs, and "
            f"there are {cluster}: lower placement.engines or placement.ranks, set placement.mode = colocated, or "
            "raise placement.nodes"
        )
    ranks = devices[len(devices) - demand.num_ranks :]
    engines = _pack(demand.num_engines, width, devices[: len(devices) - demand.num_ranks])
    if len(engines) < demand.num_engines:  # the ranks cut a machine badly: let them take what engines leave over
        engines = _pack(demand.num_engines, width, devices)
        taken = {device for engine in engines for device in engine}
        ranks = [device for device in devices if device not in taken][: demand.num_ranks]
    if len(engines) < demand.num_engines or len(ranks) < demand.num_ranks:
        raise _not_packed(demand, cluster)
    return Placement(mode=demand.mode, engines=tuple(engines), ranks=tuple(ranks))


def _plan_colocated(demand: Demand, cluster: Cluster) -> Placement:
    """A rank on each of the first GPUs, and engines on the same ones."""
    width, devices = demand.tensor_parallel, cluster.devices
    if demand.num_ranks > len(devices):
        raise ConfigError(
            f"placement.ranks {demand.num_ranks} need a GPU each, and there are {cluster}: lower placement.ranks, or "
            "raise placement.nodes"
        )
    if demand.num_engines * width != demand.num_ranks:
        raise ConfigError(
            f"colocated engines use the GPUs of the ranks, and {demand.num_engines} engines x {width} GPUs are not "
            f"{demand.num_ranks} ranks: set placement.engines = {max(demand.num_ranks // width, 1)} and "
            f"placement.ranks = {max(demand.num_ranks // width, 1) * width}"
        )
    ranks = devices[: demand.num_ranks]
    engines = _pack(demand.num_engines, width, ranks)
    if len(engines) < demand.num_engines:
        raise _not_packed(demand, cluster)
    return Placement(mode=demand.mode, engines=tuple(engines), ranks=tuple(ranks))


def _pack(count: int, width: int, free: list[Device]) -> list[tuple[Device, ...]]:
    """Up to `count` groups of `width` free devices, each group on one machine, in the order of the devices."""
    groups: list[tuple[Device, ...]] = []
    for _, on_node in groupby(free, key=lambda device: device.node):
        there = list(on_node)
        groups += [tuple(there[i : i + width]) for i in range(0, len(there) - width + 1, width)]
    return groups[:count]


def _not_packed(demand: Demand, cluster: Cluster) -> ConfigError:
    return ConfigError(
        f"{demand.num_engines} engines of {demand.tensor_parallel} GPUs, each on one machine, and {demand.num_ranks} "
        f"ranks do not fit on {cluster}: choose an engine.tensor_parallel that divides placement.gpus_per_node, or "
        "lower placement.engines"
    )


def _plan_by_reservations(demand: Demand, cluster: Cluster) -> Placement:
    """Without a section `placement`: what Ray will do with the reservations of the older keys, checked for traps.

    Where there is no GPU, nothing is placed. Engines that share a GPU by a fraction of it are left to Ray.
    """
    if not cluster.num_gpus:
        return Placement(mode=None)
    _check_reservations(demand)
    engine_gpus = demand.engine_gpus if demand.has_engine_actors else 0.0
    rank_gpus = demand.rank_gpus if demand.has_rank_actors else 0.0
    needed = demand.num_engines * engine_gpus + demand.num_ranks * rank_gpus
    if needed > cluster.num_gpus:
        raise ConfigError(
            f"engine.replicas {demand.num_engines} x engine.replica_gpus {engine_gpus:g} and learner.ranks "
            f"{demand.num_ranks} x learner.rank_gpus {rank_gpus:g} ask for {needed:g} GPUs, and there are {cluster}: "
            "lower them, or name a larger engine.cluster"
        )
    if engine_gpus not in (0, demand.tensor_parallel) or rank_gpus not in (0, 1):
        return Placement(mode=None)
    devices = cluster.devices
    if demand.has_rank_actors:
        ranks = devices[len(devices) - demand.num_ranks :] if rank_gpus else []
    else:
        ranks = devices[:1] if demand.learner_uses_gpu else []
    if demand.has_engine_actors:
        owned = set(ranks)
        free = [device for device in devices if device not in owned]
        engines = _pack(demand.num_engines, demand.tensor_parallel, free) if engine_gpus else []
    else:
        uses_gpu = demand.is_vllm and not demand.is_served_elsewhere
        engines = _pack(1, demand.tensor_parallel, devices) if uses_gpu else []
    return Placement(mode=None, engines=tuple(engines), ranks=tuple(ranks))


def _check_reservations(demand: Demand) -> None:
    """The traps of the older keys on a machine with GPUs, each with its remedy."""
    if demand.is_served_elsewhere or not demand.is_vllm:
        return
    if demand.has_rank_actors and demand.rank_gpus and not demand.has_engine_actors:
        raise ConfigError(
            "the only engine runs in the process of the run and takes GPU 0, which Ray gives to a rank too: set "
            "placement.mode = separate, which makes the engine an actor with GPUs of its own"
        )
    if demand.has_engine_actors and not demand.engine_gpus:
        raise ConfigError(
            "engine.replica_gpus = 0 hides all GPUs from the engines of a pool: set placement.mode = separate, or "
            f"engine.replica_gpus = {demand.tensor_parallel}"
        )
    if demand.has_engine_actors and demand.tensor_parallel > 1 and demand.engine_gpus != demand.tensor_parallel:
        raise ConfigError(
            f"engine.replica_gpus = {demand.engine_gpus:g} is not the {demand.tensor_parallel} GPUs of "
            f"engine.tensor_parallel: set engine.replica_gpus = {demand.tensor_parallel}, or placement.mode = separate"
        )
    if demand.has_engine_actors and not demand.has_rank_actors and demand.learner_uses_gpu:
        raise ConfigError(
            "learner.ranks = 1 trains in the process of the run on GPU 0, which Ray gives to an engine too: set "
            "placement.mode = separate, which makes the learner an actor with a GPU of its own"
        )
