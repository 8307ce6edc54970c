"""TargetModel against plain transformers forwards: what a tree's node sees is its root path and nothing else."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pctree import CheckpointError, TargetModel, UsageError
from pctree.targets import KVCache, huggingface

KINDS = ("qwen3", "llama")


def logits_of(model, token_ids: list[int]) -> torch.Tensor:
    """Logits [V] after the last token, from one forward of the whole sequence."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0, -1]


def prefilled(target: TargetModel, sequences: list[list[int]], room: int = 64) -> KVCache:
    cache = target.new_cache(len(sequences), len(sequences[0]) + room)
    target.prefill(cache, torch.tensor(sequences))
    return cache


def assert_same_rows(cache: KVCache, request: int, target: TargetModel, token_ids: list[int]) -> None:
    """A request's committed rows are those of a fresh prefill of its tokens."""
    fresh = prefilled(target, [token_ids], room=0)
    length = len(token_ids)
    assert int(cache.lengths[request]) == length
    for mine, theirs in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
        assert torch.allclose(mine[:, request, :, :length], theirs[:, 0], atol=1e-4)


def commit_path(target: TargetModel, cache: KVCache, tree, paths: list[list[int]]) -> None:
    """Commit node indices of another length for each request."""
    longest = max(map(len, paths))
    padded = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
    target.commit(cache, padded, torch.tensor([len(path) for path in paths]))


def verify(target: TargetModel, cache: KVCache, tree):
    return target.verify(cache, tree.token_ids, tree.depths, tree.ancestor_mask(tree.nodes))


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_equals_a_plain_forward(kind):
    model = tiny.target(kind)
    tokens = [tiny.prompt(1, 9), tiny.prompt(2, 9)]
    target = TargetModel(model)
    cache = target.new_cache(2, 9)
    logits, features = target.prefill(cache, torch.tensor(tokens))
    assert features.shape == (2, 9, 0)
    for request in range(2):
        assert torch.allclose(logits[request], logits_of(model, tokens[request]), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_node_sees_its_root_path(kind, seed):
    model = tiny.target(kind, seed=seed)
    target, tokens = TargetModel(model), tiny.prompt(seed, 7)
    tree = tiny.random_tree(1, 14, vocab=40, seed=seed)
    logits, _ = verify(target, prefilled(target, [tokens]), tree)
    for node in range(tree.nodes):
        assert torch.allclose(logits[0, node], logits_of(model, tokens + tiny.root_path_tokens(tree, 0, node)), atol=1e-4)


def test_positions_are_the_committed_length_plus_the_depth():
    # Rotary attention cannot see a shift of all positions, and a model that looks them up would.
    model = tiny.target()
    target, seen = TargetModel(model), []

    def see(module, args, kwargs):
        seen.append(kwargs["position_ids"])

    handle = model.model.register_forward_pre_hook(see, with_kwargs=True)
    cache = prefilled(target, [[1, 2, 3, 4], [5, 6, 7, 8]])
    cache.lengths -= torch.tensor([0, 2])
    tree = tiny.random_tree(2, 6, vocab=40, seed=0)
    verify(target, cache, tree)
    handle.remove()
    assert seen[0].tolist() == [[0, 1, 2, 3]] * 2
    assert seen[1].equal(torch.tensor([[4], [2]]) + tree.depths)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_different_lengths_in_one_forward(kind):
    model = tiny.target(kind, seed=4)
    target = TargetModel(model)
    tokens = [tiny.prompt(1, 6), tiny.prompt(2, 6)]
    cache = prefilled(target, tokens)
    # Different paths make the lengths differ; then another tree of each request is verified.
    first = tiny.random_tree(2, 10, vocab=40, seed=1)
    verify(target, cache, first)
    paths = [max((tiny.root_path(first, 0, node) for node in range(10)), key=len), [0]]
    assert len(paths[0]) > 2
    commit_path(target, cache, first, paths)
    tokens = [tokens[r] + first.token_ids[r, paths[r]].tolist() for r in range(2)]
    assert cache.lengths.tolist() == [len(row) for row in tokens]

    second = tiny.random_tree(2, 10, vocab=40, seed=2)
    logits, _ = verify(target, cache, second)
    for request in range(2):
        for node in range(10):
            expected = logits_of(model, tokens[request] + tiny.root_path_tokens(second, request, node))
            assert torch.allclose(logits[request, node], expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [[-1, 0, 1], [1], [2], [-1]])
def test_features_are_the_hidden_states_of_the_named_layers(kind, layers):
    model = tiny.target(kind, layers=4)
    target, tokens = TargetModel(model, layers), tiny.prompt(3, 8)
    cache = target.new_cache(1, 32)
    _, prompt_features = target.prefill(cache, torch.tensor([tokens]))
    tree = tiny.random_tree(1, 6, vocab=40, seed=3)
    _, node_features = verify(target, cache, tree)
    assert prompt_features.shape == (1, 8, target.feature_size)
    assert target.feature_size == len(layers) * tiny.HIDDEN  # nothing else was kept
    for node in range(6):
        with torch.inference_mode():
            row = torch.tensor([tokens + tiny.root_path_tokens(tree, 0, node)])
            states = model(row, use_cache=False, output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer + 1] for layer in layers], dim=-1)  # entry 0 is the embedding output
        assert torch.allclose(prompt_features[0], expected[0, :8], atol=1e-4)
        assert torch.allclose(node_features[0, node], expected[0, -1], atol=1e-4)


def test_no_hook_stays_behind():
    model = tiny.target()
    prefilled(TargetModel(model, [-1, 0, 1]), [[1, 2, 3]])
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_scattered_paths_are_not_taken_for_a_prefix(kind):
    target = TargetModel(tiny.target(kind, seed=5))
    tokens = [tiny.prompt(4, 5), tiny.prompt(5, 5)]
    cache = prefilled(target, tokens)
    # Root 0 with children 1, 2, 3; the accepted node is never the first sibling.
    tree = tiny.random_tree(2, 7, vocab=40, seed=0)
    tree.parents[:] = torch.tensor([0, 0, 0, 0, 2, 3, 5])
    tree.depths[:] = torch.tensor([0, 1, 1, 1, 2, 2, 3])
    tree.token_ids[:] = torch.tensor([[9, 1, 2, 3, 4, 5, 6], [8, 7, 6, 5, 4, 3, 2]])
    verify(target, cache, tree)
    paths = [[0, 3, 5, 6], [0, 2, 4]]
    commit_path(target, cache, tree, paths)
    for request in range(2):
        assert_same_rows(cache, request, target, tokens[request] + tree.token_ids[request, paths[request]].tolist())


def test_two_hundred_committed_tokens_do_not_drift():
    target = TargetModel(tiny.target(seed=6))
    tokens = [tiny.prompt(6, 3), tiny.prompt(7, 3)]
    cache = prefilled(target, tokens, room=500)
    generator = torch.Generator().manual_seed(0)
    for step in range(200):
        if min(map(len, tokens)) >= 203:
            break
        tree = tiny.random_tree(2, 9, vocab=40, seed=step)
        verify(target, cache, tree)
        ends = torch.randint(9, (2,), generator=generator).tolist()
        paths = [tiny.root_path(tree, request, ends[request]) for request in range(2)]
        commit_path(target, cache, tree, paths)
        for request in range(2):
            tokens[request] += tree.token_ids[request, paths[request]].tolist()
    assert min(map(len, tokens)) >= 203
    for request in range(2):
        assert_same_rows(cache, request, target, tokens[request])


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_prefill_in_chunks_is_one_prefill(chunk, monkeypatch):
    target = TargetModel(tiny.target(), [-1, 1])
    tokens = torch.tensor([tiny.prompt(8, 13), tiny.prompt(9, 13)])
    whole_cache, chunked_cache = target.new_cache(2, 13), target.new_cache(2, 13)
    whole = target.prefill(whole_cache, tokens)
    monkeypatch.setattr(huggingface, "PREFILL_CHUNK", chunk)
    chunked = target.prefill(chunked_cache, tokens)
    for mine, theirs in zip(chunked, whole, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)
    assert torch.allclose(chunked_cache.keys, whole_cache.keys, atol=1e-4)
    assert torch.allclose(chunked_cache.values, whole_cache.values, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_models_own_attention_comes_back(attention):
    model = tiny.target()
    model.set_attn_implementation(attention)
    before = tiny.plain(model, [1, 2, 3], 8)
    target = TargetModel(model)
    prefilled(target, [[1, 2, 3]])
    assert model.config._attn_implementation == attention
    assert tiny.plain(model, [1, 2, 3], 8) == before


def test_the_models_own_attention_comes_back_after_a_failure():
    model = tiny.target()
    before = model.config._attn_implementation
    target = TargetModel(model, [0])
    with pytest.raises(IndexError):
        target.prefill(target.new_cache(1, 8), torch.tensor([[1, 10**6]]))
    assert model.config._attn_implementation == before
    assert not any(module._forward_hooks for module in model.modules())


def test_a_full_cache_is_refused():
    target = TargetModel(tiny.target())
    with pytest.raises(UsageError, match="5 cache rows are needed but the cache has 4"):
        target.prefill(target.new_cache(1, 4), torch.tensor([[1, 2, 3, 4, 5]]))


@pytest.mark.parametrize("rope", [tiny.LLAMA3_ROPE, tiny.YARN_ROPE], ids=["llama3", "yarn"])
@pytest.mark.parametrize("kind", KINDS)
def test_rope_scaling_of_the_target_is_kept(kind, rope):
    model = tiny.target(kind, rope=rope)
    tokens = tiny.prompt(10, 40)  # beyond the original 32 positions
    unscaled = tiny.target(kind)
    assert not torch.allclose(logits_of(model, tokens), logits_of(unscaled, tokens), atol=1e-2)  # so the test can fail
    target = TargetModel(model)
    tree = tiny.random_tree(1, 8, vocab=40, seed=1)
    logits, _ = verify(target, prefilled(target, [tokens]), tree)
    for node in range(8):
        assert torch.allclose(logits[0, node], logits_of(model, tokens + tiny.root_path_tokens(tree, 0, node)), atol=1e-4)


SMALL = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip


def test_sliding_windows_are_refused():
    mistral = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8))
    qwen = Qwen3ForCausalLM(Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=0))
    for model in (mistral, qwen):
        with pytest.raises(CheckpointError, match=r"sliding-window attention \(window 8\).*use a target with full attention"):
            TargetModel(model)


def test_a_window_that_is_switched_off_is_not_refused():
    TargetModel(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)))
    TargetModel(Qwen3ForCausalLM(Qwen3Config(**SMALL, use_sliding_window=False, sliding_window=8)))


def hybrid():
    """Convolution layers keep a running state, which no cache of ours holds: verify would silently read the tree as a line."""
    return Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]))


def recurrent():
    return MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2, state_size=4))


def latent_attention():
    """Keys and values are of different sizes, which one cache shape cannot hold."""
    return DeepseekV3ForCausalLM(DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 2}, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16,
        first_k_dense_replace=2,
    ))  # fmt: skip


def own_attention():
    """ALiBi inside an attention of its own, which takes no attention function of ours."""
    return BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=16, n_layer=2, n_head=2))


@pytest.mark.parametrize("build", [hybrid, recurrent, latent_attention, own_attention])
def test_other_targets_that_cannot_work_are_refused_up_front(build):
    with pytest.raises(CheckpointError):
        TargetModel(build())


@pytest.mark.parametrize("layers", [[-2], [0, 3], [2], [7], [-1, 5]])
def test_layers_that_cannot_be_tapped_are_refused(layers):
    # The last of three layers is not allowed: transformers stores the normalised state there.
    with pytest.raises(CheckpointError, match=r"target_layer_ids .* 3 layers.*between -1 .* and 1"):
        TargetModel(tiny.target(), layers)


@pytest.mark.parametrize(("eos", "expected"), [(None, []), (5, [5]), ([5, 6], [5, 6])])
def test_stop_tokens_are_those_of_the_generation_config(eos, expected):
    model = LlamaForCausalLM(LlamaConfig(**SMALL, eos_token_id=eos))
    assert TargetModel(model).eos_token_ids == expected
    model.generation_config.eos_token_id = [9]
    assert TargetModel(model).eos_token_ids == [9]
