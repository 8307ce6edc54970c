"""Target models: a Hugging Face causal LM seen as prefill, verify and commit."""

from pctree.targets.huggingface import TargetModel
from pctree.targets.kv_cache import FixedCache, KVCache

__all__ = ["FixedCache", "KVCache", "TargetModel"]
