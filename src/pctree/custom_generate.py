"""PCTree inside ``model.generate`` of transformers: a code base changes one line.

    model.generate(**inputs, custom_generate=pctree.custom_generate("deepseek-ai/dspark_qwen3_4b_block7"))

transformers prepares processors, warpers and stopping criteria from the generation config; they are used as they are, at
every node of the tree. Sequences, padding and ``return_dict_in_generate`` are those of plain ``generate``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from pctree.audit import plain_logits
from pctree.decoder import SpeculativeDecoder
from pctree.drafters import AnyDrafter, load_drafter
from pctree.errors import UsageError
from pctree.loading import check_fit, local_folder
from pctree.methods import DraftSettings
from pctree.params import SamplingParams
from pctree.request import Request
from pctree.targets import TargetModel


def custom_generate(
    drafter: str | AnyDrafter,
    *,
    method: str = "pctree",
    top_k: int = 4,
    budget: int = 32,
    frontier: str = "capped",
    max_batch_size: int = 16,
) -> Callable[..., Any]:
    """A decoding loop for ``model.generate(custom_generate=…)``, greedy or sampling, for one prompt or a left-padded batch.

    Args:
        drafter: a folder, a hub name, ``smollm2``, or a loaded drafter. It is loaded at the first call, for the model's
            dtype and device.

    A ``streamer`` given to ``generate`` does not reach a custom loop in transformers: stream with
    :meth:`pctree.SpeculativeDecoder.stream`.

    Raises:
        UsageError: a setting is out of range; later, if ``generate`` asks for what this loop cannot do.
        CheckpointError: later, if the drafter does not fit the model.
    """
    settings = DraftSettings(method, top_k, budget, frontier)
    decoders: dict[int, SpeculativeDecoder] = {}

    def decoder_for(model: Any) -> SpeculativeDecoder:
        if id(model) not in decoders:
            loaded: AnyDrafter
            if isinstance(drafter, str):
                loaded = load_drafter(local_folder(drafter, "drafter"), dtype=model.dtype, device=model.device)
            else:
                loaded = drafter
            check_fit(loaded, model, str(drafter) if isinstance(drafter, str) else "drafter", type(model).__name__)
            target = TargetModel(model, loaded.config.target_layer_ids)
            loaded.share(target.embed_tokens, target.lm_head)
            decoders[id(model)] = SpeculativeDecoder(target, loaded, settings=settings)
        return decoders[id(model)]

    def generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        # Not an argument of its own: transformers would take it out of the model's and pass it twice.
        attention_mask = model_kwargs.get("attention_mask")
        refuse_the_unsupported(generation_config)
        decoder = decoder_for(model)
        options: dict[str, Any] = {"stop_token_ids": []}
        if generation_config.do_sample:
            # One seed from torch's own generator, so that torch.manual_seed makes a run reproducible.
            first_seed = int(torch.randint(2**62, ()))
            options["temperature"] = 1.0  # the real one is among the processors
        requests = []
        for row, ids in enumerate(input_ids.tolist()):
            padding = 0 if attention_mask is None else int((attention_mask[row] == 0).sum())
            options["logits_processor"] = [of_row(processor, row) for processor in logits_processor]
            options["max_new_tokens"] = generation_config.max_length - len(ids)
            if generation_config.do_sample:
                options["seed"] = first_seed + row
            request = decoder.request(ids[padding:], SamplingParams(**options))
            request.prefix_ids = ids[:padding]  # processors and criteria of transformers see the padding too
            request.stopping = stopping_criteria
            requests.append(request)
        for _ in decoder.decode(requests, max_batch_size=max_batch_size):
            pass
        return collect(decoder, requests, input_ids, generation_config)

    return generate


def of_row(processor: Any, row: int) -> Any:
    """A processor for one row of the batch: some of transformers' hold a value for each row."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = int(ignored.flatten()[row])
    return processor


def refuse_the_unsupported(config: Any) -> None:
    """Nothing is silently ignored."""
    if config.num_beams > 1:
        raise UsageError(f"num_beams is {config.num_beams}; this decoding loop is greedy or samples, so it must be 1")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise UsageError(f"{name} is True; a tree's forward has none to give for the emitted tokens, drop it")
    if getattr(config, "guidance_scale", None) not in (None, 1, 1.0):
        raise UsageError(f"guidance_scale is {config.guidance_scale}; it needs a second forward per token, drop it")


def collect(decoder: SpeculativeDecoder, requests: list[Request], input_ids: Tensor, config: Any) -> Any:
    """What ``generate`` returns: sequences padded at their end, and scores and logits where asked.

    Scores come from one plain forward over each emitted text; steps after a sequence has ended hold zeros.
    """
    longest = max(len(request.token_ids) for request in requests)
    pad = config.pad_token_id
    if isinstance(pad, (list, tuple)) or pad is None:
        pad = 0
    tails = [request.token_ids + [pad] * (longest - len(request.token_ids)) for request in requests]
    sequences: Any = torch.cat([input_ids, torch.tensor(tails, device=input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    scores: Any = None
    logits: Any = None
    if config.output_scores or config.output_logits:
        raw = [plain_logits(request, decoder) for request in requests]
        if config.output_logits:
            logits = by_step(raw, longest)
        if config.output_scores:
            scores = by_step([request.process_emitted(part) for request, part in zip(requests, raw, strict=True)], longest)
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)


def by_step(rows: list[Tensor], steps: int) -> tuple[Tensor, ...]:
    """From [n, V] per request to [R, V] per step."""
    padded = [torch.cat([row, row.new_zeros(steps - len(row), row.shape[1])]) for row in rows]
    return tuple(torch.stack(padded, dim=1))
