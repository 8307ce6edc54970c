"""Draft models and the checkpoint layouts that they are read from."""

from pctree.drafters.checkpoint import load_drafter, read_config, save_drafter
from pctree.drafters.dspark import DrafterConfig, Drafting, DSparkDrafter
from pctree.drafters.eagle3 import Eagle3Drafter
from pctree.drafters.heads import ConfidenceHead, MarkovHead

AnyDrafter = DSparkDrafter | Eagle3Drafter

__all__ = [
    "AnyDrafter",
    "ConfidenceHead",
    "DSparkDrafter",
    "DrafterConfig",
    "Drafting",
    "Eagle3Drafter",
    "MarkovHead",
    "load_drafter",
    "read_config",
    "save_drafter",
]
