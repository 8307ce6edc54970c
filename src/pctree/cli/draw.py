"""Drawing a round's tree, so that a person sees at once what was drafted and what the target took."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text
from rich.tree import Tree

from pctree.results import Round

ACCEPTED, BONUS = "bold green", "bold yellow"


def draw_round(number: int, done: Round, show: Callable[[int], str]) -> Tree:
    """A round as a rich tree: accepted tokens green behind ✓, the bonus token yellow behind ★, the rest dim.

    A run of tokens without a branching or a change of fate shares a line; the share beside a line is the drafter's
    probability of the path up to its first token.
    """
    tree = done.tree
    token_ids, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
    probabilities = tree.log_probs[0].exp().tolist()
    accepted = set(done.path)
    children: list[list[int]] = [[] for _ in token_ids]
    for node in range(1, len(token_ids)):
        children[parents[node]].append(node)

    def fill(branch: Tree, node: int) -> None:
        if node == done.path[-1] and len(done.token_ids) >= len(done.path):  # the length limit may have cut the bonus token
            bonus = Text(f"★ {show(done.token_ids[len(done.path) - 1])}", BONUS)
            branch.add(bonus.append("  the target's own token", "dim"))
        for child in children[node]:
            run = [child]
            taken = child in accepted
            while run[-1] != done.path[-1] and len(children[run[-1]]) == 1 and (children[run[-1]][0] in accepted) == taken:
                run.append(children[run[-1]][0])
            words = " ".join(show(token_ids[i]) for i in run)
            line = Text(f"✓ {words}", ACCEPTED) if taken else Text(f"· {words}", "dim")
            fill(branch.add(line.append(f"  {probabilities[child]:.0%}", "dim")), run[-1])

    drafted, taken = len(token_ids) - 1, len(done.path) - 1
    title = Text(f"round {number}  ", "bold").append(show(token_ids[0]), ACCEPTED)
    title.append(f"  {drafted} drafted, {taken} accepted, {len(done.token_ids)} committed", "dim")
    root = Tree(title, guide_style="dim")
    fill(root, 0)
    return root
