"""``pctree chat``: talk to a target, and see what speculation brings."""

from __future__ import annotations

import typer

from pctree.cli.common import BUDGET, COMPILE, DEVICE, DRAFTER, DTYPE, METHOD, PROFILE, TARGET, TOP_K, err, given, read_budget


def command(
    target: str = TARGET,
    drafter: str = DRAFTER,
    method: str = METHOD,
    top_k: int = TOP_K,
    budget: str = BUDGET,
    system: str = typer.Option(None, help="A system message."),
    max_new_tokens: int = typer.Option(512, help="Most tokens per answer."),
    max_length: int = typer.Option(4096, help="Most tokens of the whole conversation."),
    temperature: float = typer.Option(None, help="0 is greedy, the default; else the temperature to sample at."),
    top_p: float = typer.Option(None, help="Sample among the likeliest tokens with this much probability together."),
    repetition_penalty: float = typer.Option(None, help="Penalty on tokens of prompt and output; 1 is none."),
    dtype: str = DTYPE,
    device: str = DEVICE,
    compile: str = COMPILE,
    profile: str = PROFILE,
) -> None:
    """Chat in the terminal. Each turn reads only what is new. /undo takes the last turn back, /new starts over, /quit ends.

    Ctrl-C stops an answer; what was written of it stays in the conversation.
    """
    from pctree import SamplingParams, SpeculativeDecoder
    from pctree.cli.generate import text_writer

    params = SamplingParams(
        **given(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, repetition_penalty=repetition_penalty)
    )
    decoder = SpeculativeDecoder.from_pretrained(
        target, drafter, method=method, top_k=top_k, budget=read_budget(budget), dtype=dtype, device=device,
        compile=compile, profile=profile,
    )  # fmt: skip
    conversation = decoder.chat(system=system, max_length=max_length)
    err.print("/undo takes the last turn back, /new starts over, /quit ends.", style="dim")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/quit":
            return
        if text == "/undo":
            del conversation.messages[-2:]
        elif text == "/new":
            conversation = decoder.chat(system=system, max_length=max_length)
        elif text:
            write, generation = text_writer(), None
            answer = conversation.stream(text, params)
            try:
                for generation, _ in answer:
                    write(generation.text or "", False)
            except KeyboardInterrupt:
                answer.close()  # type: ignore[attr-defined]
            if generation is not None:
                write(generation.text or "", True)
                stats = generation.stats
                err.print(f"{stats.acceptance_length:.2f} tokens a round, {stats.tokens_per_second:.1f} tokens/s", style="dim")
