"""Tiny random targets, drafters and trees, and the plain decoding that they are compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from hypothesis import settings
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from pctree import DraftSettings, DraftTree, DSparkDrafter, Round, SpeculativeDecoder, TargetModel
from pctree.drafters import DrafterConfig, Eagle3Drafter
from pctree.economy import Economy
from pctree.targets import KVCache

# How much of the random testing is done: the other modes repeat what the default one has tried at length.
SHARE = float(os.environ.get("PCTREE_TEST_SHARE", "1"))
HIDDEN, HEADS = 32, ("vanilla", "gated", "rnn")
# None of the defaults: each changes the inverse frequencies at the short lengths used here.
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}


# Costs of rounds and what they commit, for an automatic budget.
ECONOMY = Economy({1: 4.0, 64: 30.0}, 3.0, committed=[1.0, 1.3, 1.5, 1.6], layer_ms=0.3)


def examples(most: int) -> settings:
    """So many random examples of a property, or this run's share of them."""
    return settings(max_examples=max(4, int(most * SHARE)))


def randomise(module: torch.nn.Module, seed: int, std: float) -> None:
    """Matrices from a normal distribution, so wide that greedy outputs vary; norms stay near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(std * noise if parameter.dim() > 1 else 1 + 0.1 * noise)


def target(
    kind: str = "qwen3",
    *,
    seed: int = 0,
    vocab: int = 40,
    layers: int = 3,
    max_length: int = 512,
    rope: dict | None = None,
    tied: bool = False,
    attention_bias: bool = False,
) -> PreTrainedModel:
    """A float32 causal LM with grouped-query attention and no stop token."""
    options = {
        "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": max_length,
        "tie_word_embeddings": tied, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        "rope_parameters": dict(rope or DEFAULT_ROPE), "attention_bias": attention_bias,
    }  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**options)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**options))
    randomise(model, seed, std=0.35)
    return model.eval()


def drafter_config(
    model: PreTrainedModel,
    head: str | None = "vanilla",
    *,
    block_size: int = 7,
    layer_ids: Sequence[int] = (-1, 0, 1),
    mask_token_id: int = 3,
    confidence: bool = False,
    rope: dict | None = None,
    max_length: int = 512,
) -> DrafterConfig:
    """The configuration of a drafter that fits ``model``; ``head`` None means rank 0."""
    backbone = Qwen3Config(
        vocab_size=model.config.vocab_size, hidden_size=HIDDEN, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=max_length,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        rope_parameters=dict(rope or DEFAULT_ROPE),
    )  # fmt: skip
    return DrafterConfig(
        backbone=backbone,
        block_size=block_size,
        num_target_layers=model.config.num_hidden_layers,
        target_layer_ids=list(layer_ids),
        mask_token_id=mask_token_id,
        markov_rank=6 if head else 0,
        markov_head_type=head or "vanilla",
        enable_confidence_head=confidence,
        confidence_head_with_markov=confidence and head is not None,
    )


class Drafter(DSparkDrafter):
    """A random drafter that can be told the future, so that long and scattered paths are accepted too.

    ``boost`` is added to the base logits of each token of ``future`` (prompt and continuation) at its place: 0 is
    chance, some is often right, a lot is always right.
    """

    future: Sequence[int] = ()
    boost: float = 0.0

    def draft_block(self, cache: KVCache, anchors: Tensor) -> tuple[Tensor, Tensor]:
        hidden, logits = super().draft_block(cache, anchors)
        if not self.future:
            return hidden, logits
        # The anchor stands at the committed length. Nothing here asks the host, so that it can be recorded.
        places = cache.window(self.block_size).lengths[:, None] + 1 + torch.arange(self.block_size, device=logits.device)
        tokens = torch.as_tensor(self.future, device=logits.device)[places.clamp_max(len(self.future) - 1)]
        boost = self.boost * (places < len(self.future)).to(logits.dtype)
        return hidden, logits.scatter_add(2, tokens[..., None], boost[..., None])


def drafter(model: PreTrainedModel, head: str | None = "vanilla", *, seed: int = 0, own: bool = False, **options) -> Drafter:
    """A random drafter for ``model``, with its own embeddings and output head or with the target's."""
    made = Drafter(drafter_config(model, head, **options))
    if own:
        made.embed_tokens = torch.nn.Embedding(model.config.vocab_size, HIDDEN)
        made.lm_head = torch.nn.Linear(HIDDEN, model.config.vocab_size, bias=False)
    randomise(made, seed + 1000, std=0.35)
    made.share(model.get_input_embeddings(), model.get_output_embeddings())
    return made.requires_grad_(False).eval()


def eagle(model: PreTrainedModel, *, seed: int = 0, length: int = 4) -> Eagle3Drafter:
    """A random EAGLE-3 drafter for ``model``."""
    base = drafter_config(model, None, layer_ids=(0, 1))
    made = Eagle3Drafter(replace(base, block_size=length, mask_token_id=0, autoregressive=True))
    randomise(made, seed + 500, std=0.35)
    made.share(model.get_input_embeddings(), model.get_output_embeddings())
    return made.requires_grad_(False).eval()


def decoder(
    model: PreTrainedModel, draft: DSparkDrafter | None, method: str = "pctree", *, economy=None, **settings
) -> SpeculativeDecoder:
    layers = draft.config.target_layer_ids if draft is not None else ()
    return SpeculativeDecoder(TargetModel(model, layers), draft, settings=DraftSettings(method, **settings), economy=economy)


def rounds(reader: SpeculativeDecoder, prompt_ids: Sequence[int], count: int) -> Iterator[Round]:
    """Prefill and rounds of one greedy request."""
    return (done for _, done in reader.decode([reader.request(prompt_ids, max_new_tokens=count)]))


def prompt(seed: int, length: int, vocab: int = 40) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain(model: PreTrainedModel, prompt_ids: Sequence[int], count: int, **options) -> tuple[list[int], float]:
    """Greedy tokens of transformers' own ``generate``, and the smallest margin between its first and second choice."""
    ids = torch.tensor([list(prompt_ids)])
    done = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # or else transformers takes a prompt's token 0 for padding
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    top = torch.cat(done.logits).float().topk(2, dim=-1).values
    return done.sequences[0, len(prompt_ids) :].tolist(), float((top[:, 0] - top[:, 1]).min())


def random_tree(requests: int, nodes: int, vocab: int, seed: int) -> DraftTree:
    """Trees of any shape: parents stand before children, siblings differ; nothing else is promised."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.zeros(requests, nodes, dtype=torch.long)
    parents, depths = torch.zeros_like(token_ids), torch.zeros_like(token_ids)
    for r in range(requests):
        taken: set[tuple[int, int]] = set()
        token_ids[r, 0] = torch.randint(vocab, (), generator=generator)
        for node in range(1, nodes):
            while True:
                parent = int(torch.randint(node, (), generator=generator))
                token = int(torch.randint(vocab, (), generator=generator))
                if (parent, token) not in taken:
                    break
            taken.add((parent, token))
            token_ids[r, node], parents[r, node], depths[r, node] = token, parent, depths[r, parent] + 1
    return DraftTree(token_ids, parents, depths, -depths.float())


def root_path(tree: DraftTree, request: int, node: int) -> list[int]:
    """Indices from the root to a node."""
    path = [node]
    while path[0] != 0:
        path.insert(0, int(tree.parents[request, path[0]]))
    return path


def root_path_tokens(tree: DraftTree, request: int, node: int) -> list[int]:
    return tree.token_ids[request, root_path(tree, request, node)].tolist()
