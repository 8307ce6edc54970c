"""Draft models and the checkpoint layouts that they are read from."""

from pctree.drafters.checkpoint import load_drafter, read_config, save_drafter
from pctree.drafters.dspark import DrafterConfig, DSparkDrafter
from pctree.drafters.heads import ConfidenceHead, MarkovHead

__all__ = [
    "ConfidenceHead",
    "DSparkDrafter",
    "DrafterConfig",
    "MarkovHead",
    "load_drafter",
    "read_config",
    "save_drafter",
]
