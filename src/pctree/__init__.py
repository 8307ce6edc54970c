"""PCTree: reads a DSpark drafter as a tree and verifies it in one target forward. Lossless, and faster than the chain."""

from pctree.custom_generate import custom_generate
from pctree.decoder import SpeculativeDecoder
from pctree.drafters import DSparkDrafter, load_drafter
from pctree.errors import CheckpointError, PCTreeError, UsageError
from pctree.methods import METHODS, DraftSettings
from pctree.params import SamplingParams
from pctree.results import Generation, Round
from pctree.targets import TargetModel
from pctree.tree import DraftTree, grow_tree

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "CheckpointError",
    "DSparkDrafter",
    "DraftSettings",
    "DraftTree",
    "Generation",
    "PCTreeError",
    "Round",
    "SamplingParams",
    "SpeculativeDecoder",
    "TargetModel",
    "UsageError",
    "custom_generate",
    "grow_tree",
    "load_drafter",
]
