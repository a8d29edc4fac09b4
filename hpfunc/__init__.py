"""hpfunc: functional sharded data parallelism with triple communication hiding.

A training step is a pure function over pytrees of sharded arrays. `sharded` records it once, plans its communication,
checks the plan, and then runs by it. See `README.md`, and ``docs/`` for a tour.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import checkpoint as checkpoint
from . import debug as debug
from . import interop as interop
from . import loop as loop
from . import optim as optim
from ._errors import AgreementError as AgreementError
from ._errors import CheckpointError as CheckpointError
from ._errors import DonatedError as DonatedError
from ._errors import HpfuncError as HpfuncError
from ._errors import HpfuncWarning as HpfuncWarning
from ._errors import LeafError as LeafError
from ._errors import LoweringError as LoweringError
from ._errors import MeshError as MeshError
from ._errors import PeerError as PeerError
from ._errors import PolicyError as PolicyError
from ._errors import ScheduleError as ScheduleError
from ._errors import SpecError as SpecError
from ._errors import UsageError as UsageError
from ._errors import VersionError as VersionError
from ._running.context import record_timeline as record_timeline
from ._running.context import use_mesh as use_mesh
from ._running.doctor.diagnosis import Diagnosis as Diagnosis
from ._running.doctor.doctor import doctor as doctor
from ._running.link_probe import Link as Link
from ._running.link_probe import probe as probe
from ._running.make_mesh import make_mesh as make_mesh
from ._running.timeline import Timeline as Timeline
from ._transforms.accumulate import accumulate as accumulate
from ._transforms.collectives import all_gather as all_gather
from ._transforms.collectives import all_to_all as all_to_all
from ._transforms.collectives import axis_index as axis_index
from ._transforms.collectives import axis_size as axis_size
from ._transforms.collectives import pmax as pmax
from ._transforms.collectives import pmean as pmean
from ._transforms.collectives import pmin as pmin
from ._transforms.collectives import ppermute as ppermute
from ._transforms.collectives import psum as psum
from ._transforms.collectives import psum_scatter as psum_scatter
from ._transforms.collectives import pvary as pvary
from ._transforms.freeze import freeze as freeze
from ._transforms.freeze import is_trainable as is_trainable
from ._transforms.freeze import unfreeze as unfreeze
from ._transforms.grad import grad as grad
from ._transforms.grad import value_and_grad as value_and_grad
from ._transforms.shard import init as init
from ._transforms.shard import shard as shard
from ._transforms.sharded import Lowered as Lowered
from ._transforms.sharded import ShardedStep as ShardedStep
from ._transforms.sharded import sharded as sharded
from ._transforms.unit import unit as unit
from ._transforms.unshard import reduce as reduce
from ._transforms.unshard import reshard as reshard
from ._transforms.unshard import unshard as unshard
from ._values.array import ShardedArray as ShardedArray
from ._values.mesh import Mesh as Mesh
from ._values.mesh import P as P
from ._values.mesh import PartitionSpec as PartitionSpec
from ._values.numerics import Numerics as Numerics
from ._values.partition import combine as combine
from ._values.partition import is_floating as is_floating
from ._values.partition import num_parameters as num_parameters
from ._values.partition import partition as partition
from ._values.partition import unstack as unstack
from ._values.picture import Picture as Picture
from ._values.picture import visualize as visualize
from ._values.tree import register_dataclass as register_dataclass
from .nn import ModuleFunction as ModuleFunction
from .nn import from_module as from_module
from .nn import init_module as init_module
from .nn import to_module as to_module
from .optim import apply_updates as apply_updates
from .optim import clip_by_global_norm as clip_by_global_norm
from .optim import clip_with_norm as clip_with_norm
from .optim import global_norm as global_norm
from .planning.checking.checker import check as check
from .planning.planner import Traits as Traits
from .planning.planner import plan as plan
from .planning.policy import Policy as Policy
from .planning.program import Program as Program
from .planning.schedule import Schedule as Schedule

__version__ = "0.1.0"

if not _TYPE_CHECKING:  # a type checker should find a wrong name by itself

    def __getattr__(name: str) -> object:
        from ._values.foreign_names import HPFUNC, missing

        raise missing("hpfunc", name, HPFUNC, [known for known in globals() if not known.startswith("_")])
