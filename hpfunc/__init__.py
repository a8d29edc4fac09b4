"""hpfunc: functional sharded data parallelism with triple communication hiding.

A training step is a pure function over pytrees of sharded arrays. `sharded` records it once, plans its communication,
checks the plan, and then runs by it. See `README.md`, and ``docs/`` for a tour.
"""

from . import checkpoint as checkpoint
from . import interop as interop
from . import optim as optim
from ._accumulate import accumulate as accumulate
from ._array import ShardedArray as ShardedArray
from ._arrays import init as init
from ._arrays import shard as shard
from ._check import check as check
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
from ._grad import grad as grad
from ._grad import value_and_grad as value_and_grad
from ._mesh import Mesh as Mesh
from ._mesh import P as P
from ._mesh import PartitionSpec as PartitionSpec
from ._named import all_gather as all_gather
from ._named import all_to_all as all_to_all
from ._named import axis_index as axis_index
from ._named import axis_size as axis_size
from ._named import pmax as pmax
from ._named import pmean as pmean
from ._named import ppermute as ppermute
from ._named import psum as psum
from ._named import psum_scatter as psum_scatter
from ._named import pvary as pvary
from ._numerics import Numerics as Numerics
from ._partition import combine as combine
from ._partition import is_floating as is_floating
from ._partition import partition as partition
from ._partition import unstack as unstack
from ._plan import Traits as Traits
from ._plan import plan as plan
from ._policy import Policy as Policy
from ._probe import Link as Link
from ._probe import probe as probe
from ._program import Program as Program
from ._schedule import Schedule as Schedule
from ._sharded import Lowered as Lowered
from ._sharded import ShardedStep as ShardedStep
from ._sharded import sharded as sharded
from ._timeline import Timeline as Timeline
from ._timeline import record_timeline as record_timeline
from ._unit import unit as unit
from ._whole import reduce as reduce
from ._whole import reshard as reshard
from ._whole import unshard as unshard
from ._world import make_mesh as make_mesh
from ._world import use_mesh as use_mesh
from .optim import apply_updates as apply_updates
from .optim import clip_by_global_norm as clip_by_global_norm
from .optim import global_norm as global_norm
