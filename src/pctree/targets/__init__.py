"""Target models: a Hugging Face causal LM seen as prefill, verify and commit."""

from pctree.targets.huggingface import TargetModel
from pctree.targets.kv_cache import KVCache

__all__ = ["KVCache", "TargetModel"]
